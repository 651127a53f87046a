"""Proposals from an approximation: detailed balance, memory, and messages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc.kernels._evaluations import POINTS_BUDGET
from fedmcmc.rounds import SINGLE_DEVICE, prepare_round, run_round
from fedmcmc.types import as_functions
from tests.contracts.model import DATA, NUM_CLIENTS, POSITIONS, POSTERIOR
from tests.oracles.exact_starts import FEDERATION, exact_draws, run
from tests.oracles.exact_starts import POSTERIOR as GAUSSIAN
from tests.oracles.renewed_data import SECANT, assert_the_prior_is_kept

KEY = jax.random.key(0)
VECTOR = POSITIONS["vector"]
Q = fedmcmc.Gaussian.from_moments(VECTOR, np.diag([0.3, 0.2, 0.4]))
AROUND = fedmcmc.Gaussian.from_moments(np.full(2, 0.3), variance=np.array([1.5, 3.0]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kernel",
    [
        fedmcmc.gaussian_mh(SECANT, AROUND),
        fedmcmc.gaussian_mh(SECANT, AROUND, correlation=0.5),
        fedmcmc.multiple_try(SECANT, AROUND, num_tries=3),
    ],
    ids=["independent", "correlated", "tries"],
)
def test_chains_keep_the_prior_if_their_data_is_renewed(kernel):
    assert_the_prior_is_kept(kernel, 4)


def test_each_proposal_from_the_posterior_itself_is_accepted():
    exact = fedmcmc.Gaussian.from_moments(GAUSSIAN.mean, GAUSSIAN.covariance)
    for correlation in (0.0, 0.7):
        kernel = fedmcmc.gaussian_mh(FEDERATION.posterior, exact, correlation=correlation, tail=0.0)
        result = run(kernel, exact_draws(num=256), 5)
        assert result.info.acceptance.min() > 0.999
        step = result.draws[:, 3] - result.draws[:, 2]
        # A step has 2 (1 - correlation) times the posterior's variance.
        spread = (step**2).mean(0) / np.diag(GAUSSIAN.covariance)
        np.testing.assert_allclose(spread, 2 * (1 - correlation), rtol=0.35)


def test_tries_of_many_chains_are_evaluated_in_parts():
    """All points together would need four times as much memory."""
    data = fedmcmc.FederatedData.from_clients([{"x": jnp.zeros((4096, 3))}])
    kernel = as_functions(fedmcmc.multiple_try(POSTERIOR, Q, num_tries=65))
    keys = jax.random.split(KEY, 64)

    def run_chain(kernel, data, key, state):
        cohort, draws = prepare_round(
            kernel, data, SINGLE_DEVICE, key, state.broadcast, jnp.int32(0)
        )
        return run_round(kernel, data, SINGLE_DEVICE, state, cohort, draws)[0]

    states = jax.eval_shape(jax.vmap(lambda key: kernel.init(key, VECTOR, data)), keys)
    chains = jax.jit(jax.vmap(run_chain, in_axes=(None, None, 0, 0)))
    compiled = chains.lower(kernel, data, keys, states).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 1.5 * 4 * POINTS_BUDGET


@jax.jit
def reject(kernel, state, key):
    """Return the state and the report of a round that accepts nothing."""
    cohort, draws = prepare_round(kernel, DATA, SINGLE_DEVICE, key, state.broadcast, jnp.int32(0))
    draws = draws._replace(server=[draws.server[0]._replace(uniforms=jnp.ones(2))])
    return run_round(kernel, DATA, SINGLE_DEVICE, state, cohort, draws)


@pytest.mark.parametrize("correlation", [0.0, 0.6])
def test_proposals_balance_in_detail(correlation):
    """``pi(x) q(y | x) a(x, y)`` is symmetric, in float64."""
    with jax.enable_x64(True):
        data = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), DATA.rows)
        q = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), Q)
        kernel = fedmcmc.gaussian_mh(POSTERIOR, q, correlation=correlation, tail=0.0)
        mean, root = np.asarray(VECTOR, float), np.sqrt([0.3, 0.2, 0.4])

        def log_joint(x, y):
            gap = y - mean - correlation * (x - mean)
            log_proposal = -0.5 * np.sum((gap / root) ** 2) / (1 - correlation**2)
            rows = jnp.sum(POSTERIOR.loglikelihood_fn(jnp.asarray(x), data))
            return float(POSTERIOR.logprior_fn(jnp.asarray(x)) + rows) + log_proposal

        def acceptance(x, y):
            state, _ = reject(kernel, kernel.init(KEY, jnp.asarray(x), DATA), KEY)
            extra = state.broadcast.extra._replace(points=jnp.asarray(y)[None])
            state = state._replace(broadcast=state.broadcast._replace(extra=extra))
            return float(reject(kernel, state, KEY)[1].acceptance)

        acceptances = []
        for x, y in mean + 0.4 * np.random.default_rng(1).normal(size=(8, 2, 3)):
            forth, back = acceptance(x, y), acceptance(y, x)
            sides = log_joint(x, y) + np.log(forth), log_joint(y, x) + np.log(back)
            # The approximation is built from float32 moments.
            assert abs(sides[0] - sides[1]) < 1e-5
            acceptances += [forth, back]
        assert min(acceptances) < 0.8 and max(acceptances) == 1


def test_clients_send_values_only():
    kernel = fedmcmc.multiple_try(POSTERIOR, Q, num_tries=6)
    init, step = fedmcmc.simulate(kernel, DATA)
    _, info = jax.jit(step)(KEY, init(VECTOR))
    assert int(info.bits_up) == NUM_CLIENTS * 32 * (5 + 1)
    assert int(info.bits_down) == NUM_CLIENTS * 32 * (5 * 3 + 3)
