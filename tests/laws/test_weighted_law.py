"""Proposals from an approximation: chains from exact draws keep the law in every round."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc import Mixture
from fedmcmc.tuning import gaussian_mh_acceptance
from tests.oracles import laws_adjusted
from tests.oracles.exact_starts import FEDERATION, POSTERIOR, exact_draws, run
from tests.oracles.federations import LIMIT, worst_z, z_scores
from tests.support.lanes import fast_and_slow

ROOT = np.linalg.cholesky(POSTERIOR.covariance)
NUM_ROUNDS = 8


def approximation(*, variance=1.0, distance=0.0):
    """Return a Gaussian that is off by so much where the posterior is standard normal."""
    mean = POSTERIOR.mean + ROOT @ np.array([distance, 0.0, 0.0])
    return fedmcmc.Gaussian.from_moments(mean, variance * POSTERIOR.covariance)


def assert_law(draws, rounds=(2, NUM_ROUNDS - 1)):
    for round_ in rounds:
        assert worst_z(draws[:, round_], POSTERIOR) < LIMIT, f"after {round_ + 1} rounds"


OFF = {
    "independent, wide": dict(variance=1.6),
    "independent, narrow": dict(variance=0.7),
    "independent, shifted": dict(distance=0.8),
    "correlated, wide": dict(variance=2.0, correlation=0.6),
    "correlated, shifted": dict(distance=1.2, correlation=0.5),
}


@pytest.mark.parametrize(
    "case", fast_and_slow(OFF, ["independent, narrow", "correlated, wide", "correlated, shifted"])
)
def test_gaussian_proposals_keep_the_law_and_are_accepted_as_often_as_told(case):
    off = dict(OFF[case])
    correlation = off.pop("correlation", 0.0)
    kernel = fedmcmc.gaussian_mh(
        FEDERATION.posterior, approximation(**off), correlation=correlation, tail=0.0
    )
    result = run(kernel, exact_draws(), NUM_ROUNDS)
    assert_law(result.draws)
    expected = gaussian_mh_acceptance(3, correlation=correlation, **off)
    assert abs(z_scores(result.info.acceptance[:, 1], expected)) < LIMIT
    assert abs(z_scores(result.info.acceptance[:, -1], expected)) < LIMIT
    moved = (np.diff(result.draws, axis=1) != 0).any(-1)
    assert abs(z_scores(moved.mean(1), expected)) < LIMIT


def two_parts():
    """Return a mixture of which one part misses where the posterior is."""
    parts = [
        (0.5, 4.0, POSTERIOR.mean + ROOT @ np.array([0.7, -0.5, 0.0]), POSTERIOR.covariance),
        (0.3, np.inf, POSTERIOR.mean - 0.2, 2 * POSTERIOR.covariance),
        (0.2, np.inf, POSTERIOR.mean + 3.0, np.eye(3)),
    ]
    return Mixture.of(parts)


MIXED = {
    "defensive": lambda: fedmcmc.gaussian_mh(
        FEDERATION.posterior, approximation(variance=0.6, distance=0.5)
    ),
    "mixture": lambda: fedmcmc.gaussian_mh(FEDERATION.posterior, two_parts()),
    "diagonal": lambda: fedmcmc.gaussian_mh(
        FEDERATION.posterior,
        fedmcmc.Gaussian.from_moments(
            POSTERIOR.mean, variance=np.diag(POSTERIOR.covariance).copy()
        ),
    ),
    "tries among a mixture": lambda: fedmcmc.multiple_try(
        FEDERATION.posterior, two_parts(), num_tries=4
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", MIXED)
def test_mixtures_keep_the_law(case):
    result = run(MIXED[case](), exact_draws(1), NUM_ROUNDS)
    assert_law(result.draws)
    assert 0.1 < result.info.acceptance[:, 1:].mean() < 0.9


@pytest.mark.parametrize("num_tries", fast_and_slow([2, 8, 32], [2]))
def test_a_choice_among_tries_keeps_the_law_and_moves_as_often_as_told(num_tries):
    off = dict(variance=1.4, distance=0.5)
    kernel = fedmcmc.multiple_try(
        FEDERATION.posterior, approximation(**off), num_tries=num_tries, tail=0.0
    )
    result = run(kernel, exact_draws(), NUM_ROUNDS)
    assert_law(result.draws)
    mean, error = laws_adjusted.multiple_try(3, num_tries=num_tries, **off)
    moves = result.info.acceptance[:, -1]
    assert abs(moves.mean() - mean) < LIMIT * np.hypot(error, moves.std() / np.sqrt(len(moves)))
    moved = (np.diff(result.draws, axis=1) != 0).any(-1).mean(1)
    assert abs(moved.mean() - mean) < LIMIT * np.hypot(error, moved.std() / np.sqrt(len(moved)))


def test_faults_make_rounds_void_and_leave_the_law_alone():
    kernel = fedmcmc.gaussian_mh(
        FEDERATION.posterior, approximation(variance=0.8, distance=0.6), correlation=0.3
    )
    result = run(fedmcmc.faults(kernel, drop=0.1, nan=0.1), exact_draws(2), 12)
    assert_law(result.draws, (5, 11))
    whole = result.info.server.whole
    moved = (np.diff(result.draws, axis=1) != 0).any(-1)
    assert 0.3 < whole.mean() < 0.5 and not moved[~whole[:, 1:]].any()


@pytest.mark.slow
def test_an_impossible_half_is_never_entered_and_the_rest_keeps_its_law():
    posterior = fedmcmc.Posterior(
        lambda theta: jnp.where(theta[0] < 0, -jnp.inf, 0.0),
        lambda theta, rows: jnp.where(theta[1] < 0, -jnp.inf, -0.5 * jnp.sum(theta**2)) + 0 * rows,
    )
    data = fedmcmc.FederatedData.from_clients([np.zeros(1, np.float32)])
    q = fedmcmc.Gaussian.from_moments(jnp.full(2, 0.5), variance=jnp.full(2, 1.5))
    start = np.abs(np.random.default_rng(0).normal(size=(8192, 2)))
    for kernel in (
        fedmcmc.gaussian_mh(posterior, q, correlation=0.2),
        fedmcmc.multiple_try(posterior, q, num_tries=3),
    ):
        draws = run(kernel, start, 6, data=data).draws[:, -1]
        assert (draws >= 0).all()
        for power, expected in ((1, np.sqrt(2 / np.pi)), (2, 1.0), (3, 2 * np.sqrt(2 / np.pi))):
            assert np.abs(z_scores(draws**power, expected)).max() < LIMIT


@pytest.mark.slow
def test_a_chain_comes_in_from_where_the_posterior_is_nothing():
    posterior = FEDERATION.posterior._replace(
        logprior_fn=lambda theta: jnp.where(jnp.max(theta) > 50, -jnp.inf, 0.0)
    )
    kernel = fedmcmc.gaussian_mh(posterior, approximation(variance=1.2))
    samples = fedmcmc.sample(
        jax.random.key(0),
        kernel,
        FEDERATION.data,
        jnp.full(3, 60.0),
        num_rounds=3,
        num_chains=4,
        progress=False,
    )
    assert (samples.draws[:, 0] == 60).all() and (samples.draws[:, -1] < 50).all()
