"""Trajectories point by point, adaptation of the step size, and messages of clients."""

from dataclasses import replace
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import fedmcmc
from fedmcmc import rounds
from fedmcmc.dynamics import Metric
from fedmcmc.kernels._hamiltonian import _HamiltonianDraws, drift, half_kick
from fedmcmc.rounds import SINGLE_DEVICE, prepare_round, run_round
from tests.contracts.model import DATA, POSITIONS, POSTERIOR
from tests.oracles.exact_starts import FEDERATION, exact_draws, run
from tests.oracles.exact_starts import POSTERIOR as GAUSSIAN
from tests.oracles.federations import LIMIT
from tests.oracles.renewed_data import SECANT, assert_the_prior_is_kept
from tests.support.lanes import fast_and_slow

KEY = jax.random.key(0)
VECTOR = POSITIONS["vector"]
DENSE = np.array([[0.5, 0.2, 0.0], [0.2, 0.3, -0.1], [0.0, -0.1, 0.4]])


@jax.jit
def round_with(kernel, data, state, momentum, length):
    """Run a round with a given momentum and length of the trajectory."""
    cohort, draws = prepare_round(kernel, data, SINGLE_DEVICE, KEY, state.broadcast, jnp.int32(0))
    server = _HamiltonianDraws(momentum, jnp.int32(length), jnp.asarray(0.5))
    state, info = run_round(
        kernel, data, SINGLE_DEVICE, state, cohort, draws._replace(server=[server])
    )
    return state, info.server


def trajectory(kernel, data, position, momentum, length):
    """Return the end of a trajectory, its momentum there, and its acceptance probability."""
    state = kernel.init(KEY, position, data)
    for _ in range(length):
        state, _ = round_with(kernel, data, state, momentum, length)
    end = jax.tree.map(lambda leaf: leaf[0], state.broadcast.extra.points)
    gradient = jax.grad(log_posterior)(end, data)
    server = state.server
    last_momentum = half_kick(server.momentum, gradient, server.step_size, kernel.metric)
    _, info = round_with(kernel, data, state, momentum, length)
    return end, last_momentum, info.acceptance


def log_posterior(position, data):
    return POSTERIOR.logprior_fn(position) + jnp.sum(
        POSTERIOR.loglikelihood_fn(position, data.rows)
    )


def data_in_double_precision():
    return replace(DATA, rows=jax.tree.map(lambda leaf: leaf.astype(np.float64), DATA.rows))


@pytest.mark.parametrize("metric", [None, DENSE], ids=["identity", "dense"])
@pytest.mark.parametrize("length", [1, 4])
def test_trajectories_are_reversible_and_balance_in_detail(length, metric):
    """``pi(x) N(p) a`` is the same for a trajectory and its reverse."""
    with jax.enable_x64(True):
        data = data_in_double_precision()
        like = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), POSITIONS["nested"])
        _, unravel = ravel_pytree(like)
        kernel = fedmcmc.hmc(POSTERIOR, like, step_size=0.9, metric=metric)
        rng, acceptances = np.random.default_rng(0), []
        for _ in range(8):
            x, p = (unravel(jnp.asarray(v)) for v in rng.normal(size=(2, 3)))
            y, q, forth = trajectory(kernel, data, x, p, length)
            z, r, back = trajectory(kernel, data, y, jax.tree.map(jnp.negative, q), length)
            chex.assert_trees_all_close((z, jax.tree.map(jnp.negative, r)), (x, p), atol=1e-10)
            sides = [
                log_posterior(end, data) - 0.5 * jnp.sum(ravel_pytree(v)[0] ** 2) + jnp.log(a)
                for end, v, a in ((x, p, forth), (y, q, back))
            ]
            assert abs(sides[0] - sides[1]) < 1e-10
            acceptances += [float(forth), float(back)]
        assert min(acceptances) < 0.95


def test_a_proposal_of_a_single_step_is_a_step_of_langevin_dynamics():
    """``pi(x) q(y | x) a(x, y)`` is symmetric, with the density of an unadjusted step."""
    with jax.enable_x64(True):
        data = data_in_double_precision()
        step_size, root = 0.3, np.linalg.cholesky(DENSE)
        kernel = fedmcmc.mala(POSTERIOR, np.zeros(3), step_size=step_size, metric=DENSE)

        def standardize(x, y):
            mean = x + step_size * DENSE @ np.asarray(jax.grad(log_posterior)(jnp.asarray(x), data))
            return np.linalg.solve(root, y - mean) / np.sqrt(2 * step_size)

        for x, y in np.random.default_rng(1).normal(size=(8, 2, 3)):
            sides = []
            for a, b in ((x, y), (y, x)):
                z = standardize(a, b)
                end, _, acceptance = trajectory(kernel, data, jnp.asarray(a), jnp.asarray(z), 1)
                np.testing.assert_allclose(end, b, atol=1e-12)
                log_joint = log_posterior(jnp.asarray(a), data) - 0.5 * z @ z
                sides.append(log_joint + jnp.log(acceptance))
            assert abs(sides[0] - sides[1]) < 1e-10


FIELDS = {
    "swirl": lambda x: jnp.sin(x[::-1]) * jnp.array([1.0, -2.0, 0.5]) - x,
    "rounded": lambda x: 4 * jnp.round(-x / 2) - jnp.tanh(x),
}


@pytest.mark.parametrize("field", FIELDS)
def test_leapfrog_steps_along_any_field_are_reversible_and_keep_volume(field):
    @jax.jit
    def flow(x, p):
        step_size = jnp.asarray(0.7)
        for _ in range(5):
            p = half_kick(p, FIELDS[field](x), step_size, metric)
            x = drift(x, p, step_size, metric)
            p = half_kick(p, FIELDS[field](x), step_size, metric)
        return x, p

    with jax.enable_x64(True):
        metric = Metric.of(DENSE)
        x, p = jnp.array([0.3, -1.2, 2.0]), jnp.array([1.0, 0.4, -0.7])
        jacobian = jax.jacfwd(lambda both: jnp.concatenate(flow(both[:3], both[3:])))
        assert abs(jnp.linalg.det(jacobian(jnp.concatenate([x, p]))) - 1) < 1e-8
        y, q = flow(x, p)
        back, reverse = flow(y, -q)
        np.testing.assert_allclose(back, x, atol=1e-10)
        np.testing.assert_allclose(-reverse, p, atol=1e-10)


@pytest.mark.parametrize("steps", fast_and_slow([1, 3], [1]))
def test_chains_keep_the_prior_if_their_data_is_renewed(steps):
    kernel = fedmcmc.hmc(
        SECANT, np.zeros(2), step_size=1.3, max_integration_steps=steps, metric=np.ones(2)
    )
    assert_the_prior_is_kept(kernel, 1 + 2 * steps)


# Adaptation


def test_the_step_size_adapts_and_then_stays():
    kernel = fedmcmc.hmc(
        FEDERATION.posterior,
        GAUSSIAN.mean,
        step_size=0.4,
        max_integration_steps=1,
        metric=GAUSSIAN.covariance,
        num_adapt=100,
        target_accept=0.6,
    )
    result = run(kernel, exact_draws(num=512), 120)
    adapting = result.info.server.adapting
    assert adapting[:, :100].all() and not adapting[:, 100:].any()
    steps = np.stack([server.step_size for server in result.servers], axis=1)
    # The first round judges the start, and a round reports the step size of the round before.
    assert (steps[:, 101:] == steps[:, [101]]).all()
    np.testing.assert_allclose(steps[:, 100], steps[:, 101], rtol=1e-6)
    assert (np.diff(steps[:, 2:99], axis=1) != 0).all()
    assert np.median(steps[:, -1]) > 2.5 * 0.4
    # The final step size is a mean of logarithms, which is smaller than the steps around it.
    assert 0.6 < result.info.acceptance[:, 100:].mean() < 0.75
    assert steps[:, -1].std() > 0  # each chain has its own


def test_a_run_warns_if_it_keeps_draws_of_adapting_rounds(tmp_path):
    kernel = fedmcmc.mala(POSTERIOR, VECTOR, step_size=0.1, num_adapt=4)
    sample = partial(fedmcmc.sample, KEY, kernel, DATA, VECTOR, num_rounds=9, progress=False)
    with pytest.warns(fedmcmc.SamplingWarning, match=r"^3 of 8 kept draws .* num_burnin=4"):
        samples = sample(num_burnin=1, record=fedmcmc.Record(draws_to=tmp_path / "draws.zarr"))
    assert len(samples.warnings) == 1
    assert not sample(num_burnin=4).warnings


@pytest.mark.slow
def test_a_trajectory_ends_with_the_step_size_of_its_start():
    build = partial(fedmcmc.hmc, POSTERIOR, VECTOR, max_integration_steps=8)
    sample = partial(
        fedmcmc.sample, KEY, data=DATA, num_chains=64, progress=False, collect=lambda s, i: s.server
    )
    before = sample(kernel=build(step_size=0.1), position=VECTOR, num_rounds=6)
    after = sample(kernel=build(step_size=0.3), state=before.state, num_rounds=20).draws
    in_flight = after.num_points[:, 0] > 0
    assert in_flight.any() and (after.step_size[in_flight, 0] == np.float32(0.1)).all()
    assert (after.step_size[:, -1] == np.float32(0.3)).all()


@pytest.mark.slow
def test_a_switch_to_another_metric_continues_from_the_chain():
    build = partial(fedmcmc.hmc, POSTERIOR, VECTOR, step_size=0.4, max_integration_steps=6)
    samples = fedmcmc.sample(KEY, build(), DATA, VECTOR, num_rounds=9, num_chains=8, progress=False)
    broadcast = samples.state.broadcast
    assert (broadcast.extra.points[:, 0] != broadcast.position).any()
    broadcast = fedmcmc.switch(build(metric=DENSE), DATA, samples.state).broadcast
    for position in (broadcast.position, broadcast.extra.points[:, 0]):
        np.testing.assert_array_equal(position, samples.draws[:, -1])
    np.testing.assert_array_equal(broadcast.round, 9)


# Clients


def test_a_client_needs_no_number_of_the_kernel():
    """A site builds the kernel from a study's settings, before the mode is available."""
    kernel = fedmcmc.hmc(POSTERIOR, VECTOR, step_size=0.3, metric=DENSE)
    at_site = fedmcmc.hmc(POSTERIOR, jnp.zeros(3), step_size=9.0, metric=np.eye(3))
    state = kernel.init(KEY, VECTOR + 0.5, DATA)
    messages = [
        rounds.client_step(k, 0, KEY, state.broadcast, (), DATA.client(1))[0]
        for k in (kernel, at_site)
    ]
    chex.assert_trees_all_equal(*messages)
    assert abs(messages[0].value.value[0]) > 0.01


def test_a_client_reports_an_impossible_value_in_finite_numbers():
    posterior = POSTERIOR._replace(
        loglikelihood_fn=lambda theta, rows: jnp.log(theta[0]) + 0 * rows["x"][:, 0]
    )
    kernel = fedmcmc.hmc(posterior, jnp.ones(3), step_size=0.1)
    broadcast = kernel.init(KEY, jnp.ones(3), DATA).broadcast

    @jax.jit
    def message_at(points):
        moved = broadcast._replace(extra=broadcast.extra._replace(points=points))
        return rounds.client_step(kernel, 0, KEY, moved, (), DATA.client(0))[0]

    for bad in (-1.0, 0.0, np.inf, np.nan):  # NaN, minus infinity, infinity, NaN
        message = message_at(jnp.full((1, 3), bad))
        assert message.value.value[0] < -1e29 and np.isfinite(message.value.value).all()
        assert (message.gradient == 0).all()


def test_a_run_rejects_trajectories_that_overflow_and_warns_if_it_hardly_moves():
    kernel = fedmcmc.hmc(POSTERIOR, VECTOR, step_size=1e30, max_integration_steps=4)
    settings = dict(num_rounds=100, num_chains=4, progress=False)
    with pytest.warns(fedmcmc.SamplingWarning, match="accepted with a probability of"):
        samples = fedmcmc.sample(KEY, kernel, DATA, VECTOR, **settings)
    assert (samples.draws == VECTOR).all()
    assert (samples.info["acceptance"][:, -5:] == 0).all()


@pytest.mark.slow
def test_a_prediction_has_no_bias_and_the_autocorrelation():
    kernel = fedmcmc.hmc(FEDERATION.posterior, FEDERATION.start, metric=GAUSSIAN.covariance)
    q, _ = FEDERATION.surrogates("exact")
    prediction = fedmcmc.predict_bias(kernel, FEDERATION.data, q)
    assert prediction.simulated and not prediction.is_biased
    assert np.abs(prediction.bias / prediction.bias_error).max() < LIMIT
    assert 1 < prediction.slowest < 8
