"""DG-SGLD: the joint law of the server's and the clients' positions, round by round."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from tests.oracles import laws_consensus
from tests.oracles.federations import LIMIT, Federation, worst_z, z_scores
from tests.oracles.laws import Moments, location_noise
from tests.support.lanes import fast_and_slow

NUM_CHAINS = 8192
FEDERATION = Federation()
SIZES = np.array(Federation.sizes)
START = Federation.start
TOLERANCES = np.array([0.02, 0.3, 0.05, 0.11])
STEP_SIZES = np.array([0.004, 0.05, 0.003, 0.012])
LOCAL = dict(step_size=0.004, num_local_steps=3, tolerance=0.05)
# Cold where there are minibatches, so that nothing hides the gradient noise.
CASES = {
    "one per client": dict(
        step_size=STEP_SIZES, num_local_steps=3, tolerance=TOLERANCES, batch_size=3, temperature=0.1
    ),
    "schedules": dict(
        step_size=lambda r: 0.005 / (1 + r / 4),
        num_local_steps=2,
        tolerance=lambda r: 0.3 / (1 + r),
        temperature=lambda r: 1 + 0.1 * r,
    ),
}
SLOW_CASES = {
    "one step": dict(step_size=0.005, num_local_steps=1, tolerance=0.2),
    "tolerances": dict(LOCAL, tolerance=TOLERANCES, temperature=2.0),
    "step sizes": dict(LOCAL, step_size=STEP_SIZES, batch_size=3, temperature=0.02),
    "distinct rows": dict(LOCAL, batch_size=3, replace=False, temperature=0.02),
}


def densities(federation=FEDERATION):
    """Return precisions and means of the clients' log densities, each with its share of prior."""
    shares = SIZES / SIZES.sum()
    prior, precisions = federation.prior_precision, federation.precisions
    total = precisions + shares[:, None, None] * prior
    slopes = np.einsum("sij,sj->si", precisions, federation.means)
    slopes = slopes + shares[:, None] * (prior @ federation.prior_mean)
    return total, np.stack([np.linalg.solve(a, k) for a, k in zip(total, slopes, strict=True)])


def law(round_, *, step_size, tolerance, temperature=1.0, batch_size=None, replace=True, **local):
    numbers = (x(round_) if callable(x) else x for x in (step_size, tolerance, temperature))
    steps, tolerances, temperature = numbers
    noises = None
    if batch_size is not None:
        noises = [
            location_noise(rows, precision, batch_size, replace=replace)
            for rows, precision in zip(FEDERATION.rows, FEDERATION.row_precisions, strict=True)
        ]
    return laws_consensus.consensus(
        *densities(),
        step_sizes=steps,
        tolerances=tolerances,
        temperature=temperature,
        noises=noises,
        **local,
    )


def everything(state, info):
    """Collect theta and all clients' positions as one vector."""
    del info
    return jnp.concatenate([state.broadcast.position, state.clients.position.reshape(-1)])


def run(kernel, *, num_rounds=12, thinning=6, num_chains=NUM_CHAINS, collect=everything, **kwargs):
    return fedmcmc.sample(
        jax.random.key(0),
        kernel,
        FEDERATION.data,
        START,
        num_rounds=num_rounds,
        thinning=thinning,
        num_chains=num_chains,
        collect=collect,
        progress=False,
        **kwargs,
    )


@jax.jit
def after(kernel, keys, num_rounds):
    """Return theta and all clients' positions after some rounds, one row a key.

    Half the compile time of `fedmcmc.sample`.
    """
    init, step = fedmcmc.simulate(kernel, FEDERATION.data)

    def chain(key):
        start = init(jnp.asarray(START))
        state = jax.lax.fori_loop(0, num_rounds, lambda _, s: step(key, s)[0], start)
        return everything(state, None)

    return jax.vmap(chain)(keys)


def dg_sgld(**settings):
    return fedmcmc.dg_sgld(FEDERATION.posterior, **settings)


@functools.cache
def local_run():
    return run(dg_sgld(**LOCAL))


@pytest.mark.slow
def test_joint_law_after_six_and_twelve_rounds():
    expected, draws = law(0, **LOCAL).rounds(START, 12), local_run().draws
    assert worst_z(draws[:, 0], expected[6]) < LIMIT
    assert worst_z(draws[:, 1], expected[12]) < LIMIT


@pytest.mark.parametrize("case", fast_and_slow(CASES | SLOW_CASES, CASES, ["one per client"]))
def test_joint_law_after_seven_rounds(case):
    settings, expected = (CASES | SLOW_CASES)[case], laws_consensus.start_at(START, 5)
    for round_ in range(7):
        expected = law(round_, **settings).after(expected)
    keys = jax.random.split(jax.random.key(0), NUM_CHAINS)
    assert worst_z(after(dg_sgld(**settings), keys, 7), expected) < LIMIT


@pytest.mark.slow
def test_stationary_law():
    settings = dict(LOCAL, tolerance=0.3, step_size=0.005)
    limit = law(0, **settings).stationary()
    late = law(0, **settings).rounds(START, 700)[-1]
    np.testing.assert_allclose(late.mean, limit.mean, rtol=0, atol=1e-6)
    keys = jax.random.split(jax.random.key(0), 2048)
    assert worst_z(after(dg_sgld(**settings), keys, 700), limit) < LIMIT


# The oracle


def anchor(step_size=0.1, num_local_steps=2):
    """Return the scalar example whose numbers are known from simulations."""
    return laws_consensus.consensus(
        np.array([[[1.0]], [[3.0]]]),
        np.array([[-1.0], [2.0]]),
        step_sizes=step_size,
        num_local_steps=num_local_steps,
        tolerances=0.25,
    )


def test_anchors():
    limit = anchor().stationary()
    np.testing.assert_allclose(limit.mean, [1.0454545, 0.6363636, 1.4545455], atol=1e-7)
    np.testing.assert_allclose(limit.covariance[0, 0], 0.4735907, atol=1e-7)
    small = anchor(step_size=1e-5).stationary()
    np.testing.assert_allclose(small.covariance[0, 0], 0.3977273, rtol=1e-4)


@pytest.mark.slow
def test_the_sampler_has_the_anchors_law():
    posterior = fedmcmc.Posterior(
        lambda theta: 0.0, lambda theta, rows: -0.5 * rows["a"] * (rows["m"] - theta) ** 2
    )
    clients = [
        {"a": np.array([a]), "m": np.array([m], float)} for a, m in ((1.0, -1.0), (3.0, 2.0))
    ]
    samples = fedmcmc.sample(
        jax.random.key(1),
        fedmcmc.dg_sgld(posterior, step_size=0.1, num_local_steps=2, tolerance=0.25),
        fedmcmc.FederatedData.from_clients(clients),
        1.0,
        num_rounds=150,
        num_burnin=149,
        num_chains=20000,
        progress=False,
    )
    expected = Moments(np.array([1.0454545]), np.array([[0.4735907]]))
    assert worst_z(samples.draws, expected) < LIMIT


@pytest.mark.parametrize("tolerances", [0.25, TOLERANCES])
def test_small_steps_lead_to_the_known_precision(tolerances):
    expected = laws_consensus.server_precision(densities()[0], tolerances)
    limit = laws_consensus.gibbs(*densities(), tolerances=tolerances).stationary()
    np.testing.assert_allclose(np.linalg.inv(limit.covariance[:3, :3]), expected, rtol=1e-8)
    gap = []
    for step_size in (2e-5, 1e-5):
        law_ = laws_consensus.consensus(
            *densities(), step_sizes=step_size, num_local_steps=2, tolerances=tolerances
        )
        covariance = law_.stationary().covariance[:3, :3]
        gap.append(np.abs(np.linalg.inv(covariance) - expected).max())
    # The error is of first order in the step size.
    assert gap[1] < 0.01 * np.abs(expected).max()
    np.testing.assert_allclose(gap[0] / gap[1], 2.0, rtol=0.02)


def test_i20_many_small_steps_are_the_gibbs_sampler():
    exact = laws_consensus.gibbs(*densities(), tolerances=TOLERANCES).rounds(START, 3)[-1]
    gaps = []
    for step_size in (2e-3, 1e-3):
        close = laws_consensus.consensus(
            *densities(), step_sizes=step_size, num_local_steps=20000, tolerances=TOLERANCES
        ).rounds(START, 3)[-1]
        np.testing.assert_allclose(close.mean, exact.mean, rtol=1e-9)
        gaps.append(np.abs(close.covariance - exact.covariance).max())
    np.testing.assert_allclose(gaps[0] / gaps[1], 2.0, rtol=0.05)


@pytest.mark.slow
def test_i20_the_sampler_with_many_small_steps_is_the_gibbs_sampler():
    # The bias of these steps is a hundredth of a standard error; see the test above.
    exact = laws_consensus.gibbs(*densities(), tolerances=0.01).rounds(START, 3)[-1]
    settings = dict(step_size=2e-5, num_local_steps=4000, tolerance=0.01)
    keys = jax.random.split(jax.random.key(0), 2000)
    assert worst_z(after(dg_sgld(**settings), keys, 3), exact) < LIMIT


# The kernel


@pytest.mark.slow
def test_i20_the_server_averages_and_adds_noise():
    kernel, draws = dg_sgld(**LOCAL), local_run().draws
    for chain in range(3):
        key = jax.random.fold_in(jax.random.key(0), chain)
        for round_, draw in zip((5, 11), draws[chain], strict=True):
            server = jax.random.fold_in(jax.random.fold_in(key, round_), np.uint32(2**32 - 1))
            like = fedmcmc.types.Broadcast(jnp.int32(round_), jnp.asarray(START))
            noise = np.asarray(kernel.prepare_server(server, like))
            expected = draw[3:].reshape(4, 3).mean(0) + np.sqrt(LOCAL["tolerance"] / 4) * noise
            np.testing.assert_allclose(draw[:3], expected, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
def test_bits_are_those_of_one_position_each_way():
    info = local_run().info
    np.testing.assert_array_equal(info["bits_up"], 4 * 32 * 3)
    np.testing.assert_array_equal(info["bits_down"], 4 * 32 * 3)


def test_everyone_has_the_snapshot_already():
    estimator = fedmcmc.svrg(fedmcmc.minibatch(3), 3)
    kernel = fedmcmc.consensus(FEDERATION.posterior, estimator, **LOCAL)
    init, step = fedmcmc.simulate(kernel, FEDERATION.data)
    step, state, down = jax.jit(step), init(jnp.asarray(START)), []
    for _ in range(4):
        state, info = step(jax.random.key(0), state)
        down.append(int(info.bits_down))
    assert np.isfinite(state.clients.position).all()
    # It is the position of a round in which all took part.
    np.testing.assert_array_equal(down, 4 * 96)


@pytest.mark.slow
def test_compression_keeps_the_mean():
    kernel = fedmcmc.compress(dg_sgld(**LOCAL), fedmcmc.quantize(2))

    def position(state, info):
        return state.broadcast.position

    draws = run(kernel, collect=position).draws[:, 1]
    expected = law(0, **LOCAL).rounds(START, 12)[-1]
    assert np.abs(z_scores(draws, expected.mean[:3])).max() < LIMIT


def test_one_trace_serves_all_numbers():
    traces = []

    def counted(theta, rows):
        traces.append(None)
        return FEDERATION.posterior.loglikelihood_fn(theta, rows)

    posterior = FEDERATION.posterior._replace(loglikelihood_fn=counted)

    @jax.jit
    def program(kernel, key):
        init, step = fedmcmc.simulate(kernel, FEDERATION.data)
        return step(key, init(START))[0].broadcast.position

    settings = dict(num_local_steps=2, temperature=1.0)
    key = jax.random.key(0)
    first = program(fedmcmc.dg_sgld(posterior, step_size=0.001, tolerance=0.1, **settings), key)
    num = len(traces)
    second = program(fedmcmc.dg_sgld(posterior, step_size=0.002, tolerance=0.2, **settings), key)
    assert len(traces) == num > 0
    assert np.abs(first - second).max() > 1e-3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(step_size=0.0), "step_size must be a finite number above 0"),
        (dict(tolerance=-1.0), "tolerance must be a finite number above 0"),
        (dict(tolerance=np.inf), "tolerance must be a finite number above 0"),
        (dict(tolerance=[1.0, 0.0, 1.0, 1.0]), "tolerance must hold finite numbers above 0"),
        (dict(step_size=np.ones((2, 2))), "one number per client, got an array of shape"),
        (dict(num_local_steps=0), "num_local_steps must be a positive integer, got 0"),
        (dict(num_local_steps=2.5), "num_local_steps must be a positive integer, got 2.5"),
        (dict(num_local_steps=None), "num_local_steps must be a positive integer, got None"),
        (dict(temperature=-1.0), "temperature must be a finite number at least 0"),
        (dict(tolerance=np.ones(3)), "tolerance has 3 entries, but the data has 4 clients"),
        (dict(step_size=np.ones(5)), "step_size has 5 entries, but the data has 4 clients"),
    ],
)
def test_bad_numbers(change, message):
    with pytest.raises(ValueError, match=message):
        dg_sgld(**(LOCAL | change)).init(jax.random.key(0), START, FEDERATION.data)
