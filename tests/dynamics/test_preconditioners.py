"""Preconditioned SGLD: its recursion in NumPy, and its exact distribution with a fixed metric."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc.random import server_key
from tests.oracles.federations import LIMIT, z_scores

ROWS = [
    np.random.default_rng(i).normal(i, 1, (n, 3)).astype(np.float32) * [1.0, 5.0, 0.2]
    for i, n in enumerate((5, 2, 9))
]
DATA = fedmcmc.FederatedData.from_clients(ROWS)
POSTERIOR = fedmcmc.Posterior(
    lambda theta: -0.5 * jnp.sum(theta**2),
    lambda theta, x: -0.5 * jnp.sum((x - theta) ** 2, axis=-1),
)
START = jnp.array([1.0, -2.0, 0.5])


def test_psgld_agrees_with_the_recursion_in_numpy():
    step_size, decay, damping, quiet, rounds = 0.01, 0.7, 1e-3, 3, 8
    key = jax.random.key(4)
    kernel = fedmcmc.psgld(
        POSTERIOR, step_size=step_size, decay=decay, damping=damping, num_noiseless=quiet
    )
    samples = fedmcmc.sample(key, kernel, DATA, START, num_rounds=rounds, progress=False)
    rows = np.concatenate(ROWS).astype(np.float64)
    # The key of the first chain.
    chain_key = jax.random.fold_in(key, 0)
    theta, square, expected = np.asarray(START, np.float64), np.ones(3), []
    for k in range(rounds):
        gradient = (rows - theta).sum(0) - theta
        square = decay * square + (1 - decay) * (gradient / len(rows)) ** 2
        metric = (square + damping) ** -0.5
        noise = np.asarray(jax.random.normal(server_key(chain_key, jnp.int32(k)), (3,)))
        spread = np.sqrt(2 * step_size * metric) * (k >= quiet)
        theta = theta + step_size * metric * gradient + spread * noise
        expected.append(theta)
    np.testing.assert_allclose(samples.draws[0], expected, rtol=2e-5)


def test_a_fixed_metric_gives_the_distribution_of_langevin():
    # decay = 1 keeps V = 1, so that G = (1 + damping) ** -0.5 rescales the step size.
    step_size, damping, rounds = 0.05, 3.0, 4
    g = step_size / np.sqrt(1 + damping)
    kernel = fedmcmc.psgld(POSTERIOR, step_size=step_size, decay=1.0, damping=damping)
    samples = fedmcmc.sample(
        jax.random.key(0),
        kernel,
        DATA,
        START,
        num_rounds=rounds,
        num_burnin=rounds - 1,
        num_chains=16384,
        progress=False,
    )
    rows = np.concatenate(ROWS)
    contraction = 1 - g * (1 + len(rows))
    limit = rows.sum(0) / (1 + len(rows))
    mean = limit + contraction**rounds * (np.asarray(START) - limit)
    variance = 2 * g * sum(contraction ** (2 * k) for k in range(rounds))
    draws = np.asarray(samples.draws)[:, 0].astype(np.float64)
    assert np.abs(z_scores(draws, mean)).max() < LIMIT
    assert np.abs(z_scores((draws - mean) ** 2, variance)).max() < LIMIT


def test_clients_that_send_gradients_and_pooled_rows_give_the_same_chain():
    kernel = fedmcmc.langevin(
        POSTERIOR,
        fedmcmc.full_gradient(),
        step_size=0.01,
        preconditioner=fedmcmc.dynamics.preconditioners.rms(decay=0.7),
    )
    pooled = fedmcmc.psgld(POSTERIOR, step_size=0.01, decay=0.7)
    runs = [
        fedmcmc.sample(jax.random.key(1), k, DATA, START, num_rounds=5, progress=False).draws
        for k in (kernel, pooled)
    ]
    np.testing.assert_allclose(*runs, rtol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"decay": 1.5}, "decay must be at most 1"),
        ({"decay": -0.1}, "decay must be a finite number at least 0"),
        ({"damping": -1.0}, "damping must be a finite number at least 0"),
        ({"num_noiseless": 1.5}, "num_noiseless must be an integer"),
    ],
)
def test_numbers_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        fedmcmc.dynamics.preconditioners.rms(**arguments)
