"""Trajectories point by point, adaptation, and what kernels that accept or reject refuse."""

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
from tests.contracts.model import DATA, POSITIONS, POSTERIOR, logprior, make_data
from tests.oracles.exact_starts import FEDERATION, exact_draws, run
from tests.oracles.exact_starts import POSTERIOR as GAUSSIAN
from tests.oracles.federations import LIMIT
from tests.oracles.renewed_data import SECANT, assert_the_prior_is_kept
from tests.support.lanes import fast_and_slow

KEY = jax.random.key(0)
VECTOR = POSITIONS["vector"]
DENSE = np.array([[0.5, 0.2, 0.0], [0.2, 0.3, -0.1], [0.0, -0.1, 0.4]])


@jax.jit
def round_with(kernel, data, state, momentum, length, uniform):
    """Run a round with given randomness at the server."""
    cohort, draws = prepare_round(kernel, data, SINGLE_DEVICE, KEY, state.broadcast, jnp.int32(0))
    draws = draws._replace(server=[_HamiltonianDraws(momentum, jnp.int32(length), uniform)])
    state, info = run_round(kernel, data, SINGLE_DEVICE, state, cohort, draws)
    return state, info.server


def asked(state):
    return jax.tree.map(lambda leaf: leaf[0], state.broadcast.extra.points)


def trajectory(kernel, data, position, momentum, length):
    """Return where a trajectory ends, its momentum there, and with which probability it counts."""
    state = kernel.init(KEY, position, data)
    state, _ = round_with(kernel, data, state, momentum, length, jnp.asarray(0.5))
    for _ in range(length - 1):
        state, _ = round_with(kernel, data, state, momentum, length, jnp.asarray(0.5))
    end, behind = asked(state), state.server.momentum
    gradient = jax.grad(log_posterior)(end, data)
    momentum_there = half_kick(behind, gradient, state.server.step_size, kernel.metric)
    _, info = round_with(kernel, data, state, momentum, length, jnp.asarray(0.5))
    return end, momentum_there, info.acceptance


def log_posterior(position, data):
    return POSTERIOR.logprior_fn(position) + jnp.sum(
        POSTERIOR.loglikelihood_fn(position, data.rows)
    )


@pytest.mark.parametrize("metric", [None, DENSE], ids=["identity", "dense"])
@pytest.mark.parametrize("length", [1, 4])
def test_there_and_back_balance_in_detail(length, metric):
    """``pi(x) N(p) a`` is the same there and back, and the way back ends where it began."""
    with jax.enable_x64(True):
        data = make_data()
        data = replace(data, rows=jax.tree.map(lambda leaf: leaf.astype(np.float64), data.rows))
        like = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), POSITIONS["nested"])
        _, unravel = ravel_pytree(like)
        kernel = fedmcmc.hmc(POSTERIOR, like, step_size=0.9, metric=metric)
        rng, acceptances = np.random.default_rng(0), []
        for _ in range(8):
            x, p = (unravel(jnp.asarray(v)) for v in rng.normal(size=(2, 3)))
            y, there, forth = trajectory(kernel, data, x, p, length)
            z, back, again = trajectory(kernel, data, y, jax.tree.map(jnp.negative, there), length)
            for a, b in ((z, x), (back, jax.tree.map(jnp.negative, p))):
                np.testing.assert_allclose(ravel_pytree(a)[0], ravel_pytree(b)[0], atol=1e-10)
            sides = [
                log_posterior(q, data) - 0.5 * jnp.sum(ravel_pytree(r)[0] ** 2) + jnp.log(a)
                for q, r, a in ((x, p, forth), (y, there, again))
            ]
            assert abs(sides[0] - sides[1]) < 1e-10
            acceptances += [float(forth), float(again)]
        assert min(acceptances) < 0.95


def test_a_proposal_of_one_step_is_that_of_langevin_dynamics():
    """``pi(x) q(y | x) a(x, y)`` is symmetric, with the density of an unadjusted step."""
    with jax.enable_x64(True):
        data = make_data()
        data = replace(data, rows=jax.tree.map(lambda leaf: leaf.astype(np.float64), data.rows))
        step_size, root = 0.3, np.linalg.cholesky(DENSE)
        kernel = fedmcmc.mala(POSTERIOR, np.zeros(3), step_size=step_size, metric=DENSE)

        def standardized(x, y):
            mean = x + step_size * DENSE @ np.asarray(jax.grad(log_posterior)(jnp.asarray(x), data))
            return np.linalg.solve(root, y - mean) / np.sqrt(2 * step_size)

        for x, y in np.random.default_rng(1).normal(size=(8, 2, 3)):
            sides = []
            for a, b in ((x, y), (y, x)):
                z = standardized(a, b)
                end, _, acceptance = trajectory(kernel, data, jnp.asarray(a), jnp.asarray(z), 1)
                np.testing.assert_allclose(end, b, atol=1e-12)
                log_joint = log_posterior(jnp.asarray(a), data) - 0.5 * z @ z
                sides.append(log_joint + jnp.log(acceptance))
            assert abs(sides[0] - sides[1]) < 1e-10


@pytest.mark.parametrize("field", ["swirl", "rounded"])
def test_leapfrog_steps_along_any_field_keep_volume_and_can_be_undone(field):
    fields = {
        "swirl": lambda x: jnp.sin(x[::-1]) * jnp.array([1.0, -2.0, 0.5]) - x,
        "rounded": lambda x: 4 * jnp.round(-x / 2) - jnp.tanh(x),
    }

    def flow(x, p):
        force = fields[field]
        for _ in range(5):
            p = half_kick(p, force(x), jnp.asarray(0.7), metric)
            x = drift(x, p, jnp.asarray(0.7), metric)
            p = half_kick(p, force(x), jnp.asarray(0.7), metric)
        return x, p

    with jax.enable_x64(True):
        metric = Metric.of(DENSE)
        x, p = jnp.array([0.3, -1.2, 2.0]), jnp.array([1.0, 0.4, -0.7])
        joined = jax.jacfwd(lambda both: jnp.concatenate(flow(both[:3], both[3:])))
        volume = jnp.linalg.det(joined(jnp.concatenate([x, p])))
        assert abs(volume - 1) < 1e-8
        y, q = flow(x, p)
        back, reversed_ = flow(y, -q)
        np.testing.assert_allclose(back, x, atol=1e-10)
        np.testing.assert_allclose(-reversed_, p, atol=1e-10)


@pytest.mark.parametrize("steps", fast_and_slow([1, 3], [1]))
def test_chains_whose_data_is_drawn_anew_keep_the_prior(steps):
    kernel = fedmcmc.hmc(
        SECANT, np.zeros(2), step_size=1.3, max_integration_steps=steps, metric=np.ones(2)
    )
    assert_the_prior_is_kept(kernel, 1 + 2 * steps)


# Adaptation


def test_the_step_size_adapts_and_then_stays():
    covariance = GAUSSIAN.covariance
    kernel = fedmcmc.hmc(
        FEDERATION.posterior,
        GAUSSIAN.mean,
        step_size=0.4,
        max_integration_steps=1,
        metric=covariance,
        num_adapt=100,
        target_accept=0.6,
    )
    result = run(kernel, exact_draws(num=512), 120)
    adapting = result.info.server.adapting
    assert adapting[:, :100].all() and not adapting[:, 100:].any()
    steps = np.stack([server.step_size for server in result.servers], axis=1)
    # The first round judges the start. A step size is used from the round before that it is told.
    assert (steps[:, 101:] == steps[:, [101]]).all()
    np.testing.assert_allclose(steps[:, 100], steps[:, 101], rtol=1e-6)
    assert (np.diff(steps[:, 2:99], axis=1) != 0).all()
    assert np.median(steps[:, -1]) > 2.5 * 0.4
    # From above: while it tries steps on both sides, a mean of logarithms is the shorter one.
    assert 0.6 < result.info.acceptance[:, 100:].mean() < 0.75
    assert steps[:, -1].std() > 0  # of each chain its own


def test_a_run_warns_of_kept_draws_of_adapting_rounds(tmp_path):
    kernel = fedmcmc.mala(POSTERIOR, VECTOR, step_size=0.1, num_adapt=4)
    run = partial(fedmcmc.sample, KEY, kernel, DATA, VECTOR, num_rounds=9, progress=False)
    with pytest.warns(fedmcmc.SamplingWarning, match=r"^3 of 8 kept draws .* num_burnin=4"):
        told = run(num_burnin=1, record=fedmcmc.Record(draws_to=tmp_path / "draws.zarr"))
    assert len(told.warnings) == 1
    assert not run(num_burnin=4).warnings


@pytest.mark.slow
def test_a_trajectory_keeps_its_step_size_when_another_is_given():
    build = partial(fedmcmc.hmc, POSTERIOR, VECTOR, max_integration_steps=8)
    first, then = build(step_size=0.1), build(step_size=0.3)
    sample = partial(
        fedmcmc.sample, KEY, data=DATA, num_chains=64, progress=False, collect=lambda s, i: s.server
    )
    before = sample(kernel=first, position=VECTOR, num_rounds=6)
    after = sample(kernel=then, state=before.state, num_rounds=20).draws
    in_flight = after.num_points[:, 0] > 0
    assert in_flight.any() and (after.step_size[in_flight, 0] == np.float32(0.1)).all()
    assert (after.step_size[:, -1] == np.float32(0.3)).all()


@pytest.mark.slow
def test_switching_to_another_metric_goes_on_from_the_chain():
    build = partial(fedmcmc.hmc, POSTERIOR, VECTOR, step_size=0.4, max_integration_steps=6)
    samples = fedmcmc.sample(KEY, build(), DATA, VECTOR, num_rounds=9, num_chains=8, progress=False)
    state = samples.state
    assert (asked_of_all(state) != state.broadcast.position).any()
    fresh = fedmcmc.switch(build(metric=DENSE), DATA, state)
    np.testing.assert_array_equal(fresh.broadcast.position, samples.draws[:, -1])
    np.testing.assert_array_equal(asked_of_all(fresh), samples.draws[:, -1])
    np.testing.assert_array_equal(fresh.broadcast.round, 9)


def asked_of_all(state):
    return state.broadcast.extra.points[:, 0]


# What a client needs, and what is refused


def test_a_client_needs_the_broadcast_and_no_number_of_the_kernel():
    """A site builds the kernel from a study's settings, before anyone knows the mode."""
    kernel = fedmcmc.hmc(POSTERIOR, VECTOR, step_size=0.3, metric=DENSE)
    at_site = fedmcmc.hmc(POSTERIOR, jnp.zeros(3), step_size=9.0, metric=np.eye(3))
    state = kernel.init(KEY, VECTOR + 0.5, DATA)
    messages = [
        rounds.client_step(k, 0, KEY, state.broadcast, (), DATA.client(1))[0]
        for k in (kernel, at_site)
    ]
    chex.assert_trees_all_equal(*messages)
    assert abs(messages[0].value.value[0]) > 0.01


def test_a_client_with_an_impossible_value_says_so_in_finite_numbers():
    posterior = POSTERIOR._replace(
        loglikelihood_fn=lambda theta, rows: jnp.log(theta[0]) + 0 * rows["x"][:, 0]
    )
    kernel = fedmcmc.hmc(posterior, jnp.ones(3), step_size=0.1)
    for bad in (-1.0, 0.0, np.inf, np.nan):  # NaN, minus infinity, infinity, NaN
        state = kernel.init(KEY, jnp.ones(3), DATA)
        points = jnp.full((1, 3), bad)
        extra = state.broadcast.extra._replace(points=points)
        broadcast = state.broadcast._replace(extra=extra)
        message, _, _ = rounds.client_step(kernel, 0, KEY, broadcast, (), DATA.client(0))
        assert message.value.value[0] < -1e29 and np.isfinite(message.value.value).all()
        assert (message.gradient == 0).all()


def test_a_trajectory_that_overflows_is_rejected_and_the_run_goes_on():
    kernel = fedmcmc.hmc(POSTERIOR, VECTOR, step_size=1e30, max_integration_steps=4)
    samples = fedmcmc.sample(KEY, kernel, DATA, VECTOR, num_rounds=40, num_chains=4, progress=False)
    assert (samples.draws == VECTOR).all()
    assert (samples.info["acceptance"][:, -5:] == 0).all()


def test_a_run_that_hardly_ever_moves_warns():
    kernel = fedmcmc.hmc(POSTERIOR, VECTOR, step_size=100.0)
    with pytest.warns(fedmcmc.SamplingWarning, match="accepted with a probability of"):
        fedmcmc.sample(KEY, kernel, DATA, VECTOR, num_rounds=100, progress=False)


def test_compressors_under_which_trajectories_cannot_be_undone_are_refused():
    kernel = fedmcmc.hmc(POSTERIOR, VECTOR)
    for compressor in (
        fedmcmc.quantize(8),
        fedmcmc.sparsify(0.5),
        fedmcmc.top_k(0.5),
        fedmcmc.memory(fedmcmc.quantize(8)),
        fedmcmc.memory(fedmcmc.compression.identity()),
        fedmcmc.compression.chain(fedmcmc.compression.clip(1.0), fedmcmc.quantize(4)),
    ):
        with pytest.raises(ValueError, match=r"top_k\(\.\.\., error_feedback=False\)"):
            fedmcmc.compress(kernel, compressor)
    for compressor in (
        fedmcmc.compression.identity(),
        fedmcmc.compression.chain(
            fedmcmc.compression.clip(1.0), fedmcmc.top_k(0.5, error_feedback=False)
        ),
    ):
        once = fedmcmc.compress(kernel, compressor)
        assert fedmcmc.compress(once, fedmcmc.compression.clip(2.0)).depth == 1


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (dict(step_size=0.0), ValueError, "step_size"),
        (dict(step_size=lambda round_: 0.1), TypeError, "must be a number, not a schedule"),
        (dict(max_integration_steps=0), ValueError, "max_integration_steps"),
        (dict(num_adapt=1.5), ValueError, "num_adapt"),
        (dict(target_accept=1.0), ValueError, "target_accept"),
        (dict(centre=np.zeros(3, int)), TypeError, "centre must hold floats"),
        (dict(centre=0), TypeError, "centre must hold floats"),
        (dict(centre=np.zeros(2)), ValueError, "center must have the shapes of the position"),
        (dict(metric=np.ones(2)), ValueError, "metric must be shaped as the position"),
        (dict(metric=-np.eye(3)), ValueError, "positive definite"),
        (dict(posterior=logprior), TypeError, "posterior"),
    ],
)
def test_settings_that_do_not_fit(settings, error, message):
    given = dict(posterior=POSTERIOR, centre=VECTOR) | settings
    with pytest.raises(error, match=message):
        kernel = fedmcmc.hmc(**given)
        kernel.init(KEY, VECTOR, DATA)


def test_what_needs_every_client_refuses_to_go_without():
    kernel = fedmcmc.hmc(POSTERIOR, VECTOR)
    for rule in (fedmcmc.uniform(2), fedmcmc.bernoulli(0.5), fedmcmc.full()):
        with pytest.raises(ValueError, match="needs the log likelihood of every client"):
            replace(kernel, participation=rule).init(KEY, VECTOR, DATA)
    with pytest.raises(ValueError, match="late"):
        fedmcmc.faults(kernel, late=0.1)
    other = fedmcmc.mala(POSTERIOR, VECTOR)
    with pytest.raises(ValueError, match="cannot be part of a sequence"):
        fedmcmc.sequence(kernel, other)


@pytest.mark.slow
def test_what_is_predicted_of_it_is_no_bias_and_how_often_a_draw_is_effective():
    metric = GAUSSIAN.covariance
    kernel = fedmcmc.hmc(FEDERATION.posterior, FEDERATION.start, metric=metric)
    q, _ = FEDERATION.surrogates("exact")
    predicted = fedmcmc.predict_bias(kernel, FEDERATION.data, q)
    assert predicted.simulated and not predicted.is_biased
    assert np.abs(predicted.bias / predicted.bias_error).max() < LIMIT
    assert 1 < predicted.slowest < 8
