"""Proposals from an approximation: another model, identities, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc import Mixture
from fedmcmc.kernels._evaluations import POINTS_BUDGET
from fedmcmc.rounds import SINGLE_DEVICE, prepare_round, run_round
from fedmcmc.types import as_functions
from tests.contracts.model import DATA, NUM_CLIENTS, POSITIONS, POSTERIOR, surrogates
from tests.oracles.exact_starts import FEDERATION, exact_draws, run
from tests.oracles.exact_starts import POSTERIOR as GAUSSIAN
from tests.oracles.renewed_data import SECANT, assert_the_prior_is_kept

KEY = jax.random.key(0)
VECTOR = POSITIONS["vector"]
Q = fedmcmc.Gaussian.from_moments(VECTOR, np.diag([0.3, 0.2, 0.4]))
AROUND = fedmcmc.Gaussian.from_moments(np.full(2, 0.3), variance=np.array([1.5, 3.0]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "build",
    [
        lambda: fedmcmc.gaussian_mh(SECANT, AROUND),
        lambda: fedmcmc.gaussian_mh(SECANT, AROUND, correlation=0.5),
        lambda: fedmcmc.multiple_try(SECANT, AROUND, num_tries=3),
    ],
    ids=["independent", "correlated", "tries"],
)
def test_chains_whose_data_is_drawn_anew_keep_the_prior(build):
    assert_the_prior_is_kept(build(), 4)


def test_every_proposal_from_the_posterior_itself_is_accepted():
    exact = fedmcmc.Gaussian.from_moments(GAUSSIAN.mean, GAUSSIAN.covariance)
    for correlation in (0.0, 0.7):
        kernel = fedmcmc.gaussian_mh(FEDERATION.posterior, exact, correlation=correlation, tail=0.0)
        result = run(kernel, exact_draws(num=256), 5)
        assert result.info.acceptance.min() > 0.999
        step = result.draws[:, 3] - result.draws[:, 2]
        # Variance 2 (1 - correlation) of the posterior's.
        spread = (step**2).mean(0) / np.diag(GAUSSIAN.covariance)
        np.testing.assert_allclose(spread, 2 * (1 - correlation), rtol=0.35)


def test_many_tries_of_many_chains_are_judged_some_at_a_time():
    """All at once they would take four times as much."""
    rows = {"x": jnp.zeros((4096, 3))}
    data = fedmcmc.FederatedData.from_clients([rows])
    kernel = as_functions(fedmcmc.multiple_try(POSTERIOR, Q, num_tries=65))
    keys = jax.random.split(KEY, 64)

    def start(key):
        return kernel.init(key, VECTOR, data)

    def a_round(kernel, data, key, state):
        cohort, draws = prepare_round(
            kernel, data, SINGLE_DEVICE, key, state.broadcast, jnp.int32(0)
        )
        return run_round(kernel, data, SINGLE_DEVICE, state, cohort, draws)[0]

    states = jax.eval_shape(jax.vmap(start), keys)
    chains = jax.jit(jax.vmap(a_round, in_axes=(None, None, 0, 0)))
    compiled = chains.lower(kernel, data, keys, states).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 1.5 * 4 * POINTS_BUDGET


@jax.jit
def propose(kernel, state, key):
    """Return the state after a round in which nothing is accepted, and the draws of that round."""
    cohort, draws = prepare_round(kernel, DATA, SINGLE_DEVICE, key, state.broadcast, jnp.int32(0))
    at_server = draws.server[0]._replace(uniforms=jnp.ones(2))
    draws = draws._replace(server=[at_server])
    return run_round(kernel, DATA, SINGLE_DEVICE, state, cohort, draws)


@pytest.mark.parametrize("correlation", [0.0, 0.6])
def test_there_and_back_balance_in_detail(correlation):
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
            state = kernel.init(KEY, jnp.asarray(x), DATA)
            state, _ = propose(kernel, state, KEY)
            points = jnp.asarray(y)[None]
            extra = state.broadcast.extra._replace(points=points)
            state = state._replace(broadcast=state.broadcast._replace(extra=extra))
            return float(propose(kernel, state, KEY)[1].acceptance)

        found = []
        for x, y in mean + 0.4 * np.random.default_rng(1).normal(size=(8, 2, 3)):
            forth, back = acceptance(x, y), acceptance(y, x)
            sides = log_joint(x, y) + np.log(forth), log_joint(y, x) + np.log(back)
            # The approximation is built of float32 moments.
            assert abs(sides[0] - sides[1]) < 1e-5
            found += [forth, back]
        assert min(found) < 0.8 and max(found) == 1


def test_what_is_sent_are_values_alone():
    kernel = fedmcmc.multiple_try(POSTERIOR, Q, num_tries=6)
    samples = fedmcmc.sample(KEY, kernel, DATA, VECTOR, num_rounds=3, progress=False)
    assert (samples.info["bits_up"] == NUM_CLIENTS * 32 * (5 + 1)).all()
    assert (samples.info["bits_down"] == NUM_CLIENTS * 32 * (5 * 3 + 3)).all()


def test_nothing_of_it_can_be_compressed():
    kernel = fedmcmc.gaussian_mh(POSTERIOR, Q)
    for compressor in (fedmcmc.quantize(8), fedmcmc.top_k(0.5, error_feedback=False)):
        with pytest.raises(ValueError, match="there is nothing to compress"):
            fedmcmc.compress(kernel, compressor)


MIXED = Mixture.of([(0.5, np.inf, np.zeros(3), np.eye(3)), (0.5, 5.0, np.ones(3), np.eye(3))])


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (dict(approximation=surrogates(VECTOR)), ValueError, "whole posterior"),
        (
            dict(
                approximation=fedmcmc.Gaussian.from_moments(
                    np.zeros((2, 3)), np.stack([np.eye(3)] * 2)
                )
            ),
            ValueError,
            "whole posterior",
        ),
        (
            dict(
                approximation=fedmcmc.Gaussian.from_moments(np.zeros((2, 3)), variance=np.ones(2))
            ),
            ValueError,
            "whole posterior",
        ),
        (dict(approximation=fedmcmc.Gaussian.uniform(VECTOR)), ValueError, "not proper"),
        (dict(approximation=Q / Q**2), ValueError, "not proper: the smallest eigenvalue .* -5"),
        (dict(approximation=np.zeros(3)), TypeError, "fedmcmc.Gaussian"),
        (dict(approximation=MIXED, correlation=0.5), ValueError, "need a Gaussian"),
        (dict(correlation=1.0), ValueError, r"correlation must be in \[0, 1\)"),
        (dict(correlation=-0.1), ValueError, "correlation"),
        (dict(correlation=lambda round_: 0.1), TypeError, "correlation must be a number"),
        (dict(tail=1.0), ValueError, "tail"),
        (dict(num_tries=1), ValueError, "num_tries must be at least 2"),
        (dict(num_tries=2.5), ValueError, "num_tries"),
    ],
)
def test_settings_that_do_not_fit(settings, error, message):
    build = fedmcmc.multiple_try if "num_tries" in settings else fedmcmc.gaussian_mh
    given = dict(posterior=POSTERIOR, approximation=Q) | settings
    with pytest.raises(error, match=message):
        build(**given).init(KEY, VECTOR, DATA)


def test_what_needs_every_client_refuses_to_go_without():
    kernel = fedmcmc.gaussian_mh(POSTERIOR, Q)
    with pytest.raises(ValueError, match="late"):
        fedmcmc.faults(kernel, late=0.1)
    with pytest.raises(ValueError, match="cannot be part of a sequence"):
        fedmcmc.sequence(kernel, kernel)
