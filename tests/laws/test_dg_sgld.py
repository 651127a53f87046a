"""DG-SGLD: the joint law of the server's and the clients' positions, round by round."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from tests.oracles import laws_consensus
from tests.oracles.chains import draw, split_keys
from tests.oracles.federations import LIMIT, Federation, worst_z, z_scores
from tests.support.lanes import fast_and_slow

NUM_CHAINS = 8192
FEDERATION = Federation()
DATA, START = FEDERATION.data, Federation.start
TERMS = FEDERATION.split_terms
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
    "one step": dict(step_size=0.005, num_local_steps=1, tolerance=0.2),
    "tolerances": dict(LOCAL, tolerance=TOLERANCES, temperature=2.0),
    "step sizes": dict(LOCAL, step_size=STEP_SIZES, batch_size=3, temperature=0.02),
    "distinct rows": dict(LOCAL, batch_size=3, replace=False, temperature=0.02),
}
FAST = ("one per client", "schedules")


def law(round_, *, step_size, tolerance, temperature=1.0, batch_size=None, replace=True, **local):
    step_size, tolerance, temperature = (
        x(round_) if callable(x) else x for x in (step_size, tolerance, temperature)
    )
    noises = None
    if batch_size is not None:
        noises = FEDERATION.location_noises(batch_size, replace=replace)
    return laws_consensus.consensus(
        *TERMS,
        step_sizes=step_size,
        tolerances=tolerance,
        temperature=temperature,
        noises=noises,
        **local,
    )


def get_positions(state):
    """Return theta and all clients' positions as one vector."""
    return jnp.concatenate([state.broadcast.position, state.clients.position.reshape(-1)])


@pytest.mark.parametrize("case", fast_and_slow(CASES, FAST, ["one per client"]))
def test_joint_law_after_seven_rounds_is_exact(case):
    expected = laws_consensus.start_at(START, 5)
    for round_ in range(7):
        expected = law(round_, **CASES[case]).after(expected)
    kernel = fedmcmc.dg_sgld(FEDERATION.posterior, **CASES[case])
    draws = draw(kernel, DATA, START, split_keys(NUM_CHAINS), 7, get_positions)
    assert worst_z(draws, expected) < LIMIT


@pytest.mark.slow
def test_compression_keeps_the_mean():
    kernel = fedmcmc.dg_sgld(FEDERATION.posterior, **LOCAL)
    kernel = fedmcmc.compress(kernel, fedmcmc.quantize(2))
    draws = draw(kernel, DATA, START, split_keys(NUM_CHAINS), 12)
    expected = law(0, **LOCAL).rounds(START, 12)[-1]
    assert np.abs(z_scores(draws, expected.mean[:3])).max() < LIMIT


# The oracle


def anchor(step_size=0.1):
    """Return the scalar example whose numbers come from independent simulations."""
    return laws_consensus.consensus(
        np.array([[[1.0]], [[3.0]]]),
        np.array([[-1.0], [2.0]]),
        step_sizes=step_size,
        num_local_steps=2,
        tolerances=0.25,
    ).stationary()


def test_stationary_law_equals_the_anchors():
    limit = anchor()
    np.testing.assert_allclose(limit.mean, [1.0454545, 0.6363636, 1.4545455], atol=1e-7)
    np.testing.assert_allclose(limit.covariance[0, 0], 0.4735907, atol=1e-7)
    np.testing.assert_allclose(anchor(step_size=1e-5).covariance[0, 0], 0.3977273, rtol=1e-4)


def test_rounds_converge_to_the_stationary_law():
    settings = dict(LOCAL, tolerance=0.3, step_size=0.005)
    limit, late = law(0, **settings).stationary(), law(0, **settings).rounds(START, 700)[-1]
    np.testing.assert_allclose(late.mean, limit.mean, rtol=0, atol=1e-6)
    np.testing.assert_allclose(late.covariance, limit.covariance, rtol=0, atol=1e-6)


@pytest.mark.parametrize("tolerances", [0.25, TOLERANCES])
def test_small_steps_lead_to_the_known_precision(tolerances):
    expected = laws_consensus.server_precision(TERMS[0], tolerances)
    limit = laws_consensus.gibbs(*TERMS, tolerances=tolerances).stationary()
    np.testing.assert_allclose(np.linalg.inv(limit.covariance[:3, :3]), expected, rtol=1e-8)
    gaps = []
    for step_size in (2e-5, 1e-5):
        close = laws_consensus.consensus(
            *TERMS, step_sizes=step_size, num_local_steps=2, tolerances=tolerances
        )
        covariance = close.stationary().covariance[:3, :3]
        gaps.append(np.abs(np.linalg.inv(covariance) - expected).max())
    # The error is of first order in the step size.
    assert gaps[1] < 0.01 * np.abs(expected).max()
    np.testing.assert_allclose(gaps[0] / gaps[1], 2.0, rtol=0.02)


def test_i20_many_small_steps_are_the_gibbs_sampler():
    exact = laws_consensus.gibbs(*TERMS, tolerances=TOLERANCES).rounds(START, 3)[-1]
    gaps = []
    for step_size in (2e-3, 1e-3):
        close = laws_consensus.consensus(
            *TERMS, step_sizes=step_size, num_local_steps=20000, tolerances=TOLERANCES
        ).rounds(START, 3)[-1]
        np.testing.assert_allclose(close.mean, exact.mean, rtol=1e-9)
        gaps.append(np.abs(close.covariance - exact.covariance).max())
    np.testing.assert_allclose(gaps[0] / gaps[1], 2.0, rtol=0.05)


# The kernel


def test_every_client_has_the_snapshot_already():
    """A snapshot is the position of a round in which all take part, so it costs no bits."""
    estimator = fedmcmc.svrg(fedmcmc.minibatch(3), 3)
    kernel = fedmcmc.consensus(FEDERATION.posterior, estimator, **LOCAL)
    init, step = fedmcmc.simulate(kernel, DATA)
    step, state = jax.jit(step), init(jnp.asarray(START))
    for _ in range(4):
        state, info = step(jax.random.key(0), state)
        assert int(info.bits_down) == int(info.bits_up) == 4 * 96
    assert np.isfinite(state.clients.position).all()


def test_one_program_serves_all_numbers():
    @jax.jit
    @chex.assert_max_traces(n=1)
    def move(kernel, key):
        init, step = fedmcmc.simulate(kernel, DATA)
        return step(key, init(START))[0].broadcast.position

    for step_size, tolerance in ((0.001, 0.1), (0.002, 0.2)):
        settings = dict(LOCAL, step_size=step_size, tolerance=tolerance)
        move.trace(fedmcmc.dg_sgld(FEDERATION.posterior, **settings), jax.random.key(0))


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
def test_bad_numbers_raise(change, message):
    with pytest.raises(ValueError, match=message):
        kernel = fedmcmc.dg_sgld(FEDERATION.posterior, **(LOCAL | change))
        kernel.init(jax.random.key(0), START, DATA)
