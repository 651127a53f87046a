"""What an effective draw costs: of which functional, and in whose seconds."""

import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc.tuning._row_counts import count_rows_per_round
from tests.oracles.federations import Federation
from tests.oracles.laws import effective_rounds

FEDERATION = Federation()
METRIC = np.array([[1.2, 0.3, 0.0], [0.3, 0.8, -0.2], [0.0, -0.2, 0.5]])
CURVATURES = np.array([1.0, 2.25])
LENGTH, SPREAD = 4, 0.2


def normal(position, rows):
    """Of one row, a number, the posterior of which has the curvatures."""
    return -0.5 * jnp.sum(CURVATURES * (position - rows[:, None]) ** 2, axis=1)


ONE = fedmcmc.Posterior(lambda position: jnp.zeros(()), normal)
ONE_ROW = fedmcmc.FederatedData.from_clients([np.zeros(1, np.float32)])
ONE_SURROGATE = fedmcmc.Gaussian.from_moments(np.zeros((1, 2)), np.diag(1 / CURVATURES)[None])


def trajectory(step_size):
    return fedmcmc.fa_hmc(ONE, step_size=step_size, num_integration_steps=LENGTH, num_local_steps=1)


def of_trajectories(step_size, direction):
    """Autocorrelation time of ``direction @ theta``, and the largest error of an sd.

    ``L`` leapfrog steps from a fresh momentum make ``theta_j' = cos(L phi_j) theta_j + noise`` with
    ``cos phi_j = 1 - step**2 h_j / 2``, whose variance is ``1 / (h_j (1 - step**2 h_j / 4))``.
    """
    squares = step_size**2 * CURVATURES
    kept = np.cos(LENGTH * np.arccos(1 - squares / 2))
    variances = direction**2 / (CURVATURES * (1 - squares / 4))
    time = np.sum(variances * (1 + kept) / (1 - kept)) / np.sum(variances)
    return time, np.max(1 / np.sqrt(1 - squares / 4) - 1)


@pytest.mark.slow
@pytest.mark.parametrize("direction", [(1.0, 0.0), (0.0, 1.0), (1.0, 1.5)], ids=str)
def test_the_functional_that_is_asked_for_mixes_fastest(direction):
    """Against the closed form of a trajectory on Gaussians, over all steps that are accepted."""
    direction = np.array(direction)
    best = fedmcmc.tune(
        lambda step_size: trajectory(step_size),
        ONE,
        ONE_ROW,
        ONE_SURROGATE,
        max_spread=SPREAD,
        functional=lambda position: jnp.sum(direction * position),
    )
    step = best.settings["step_size"]
    time, error = of_trajectories(step, direction)
    np.testing.assert_allclose(best.prediction.functional_rounds, time, rtol=1e-3, atol=1e-5)
    steps = np.geomspace(1e-3, 1.2, 20_000)
    times, errors = np.array([of_trajectories(each, direction) for each in steps]).T
    least = times[errors <= SPREAD].min()
    assert error <= SPREAD * (1 + 1e-3)
    np.testing.assert_allclose(time, least, rtol=0.02, atol=1e-3)
    assert f"{best.prediction.functional_rounds:.3g} rounds per effective draw of the" in str(best)


def test_steps_are_tried_between_bounds_alone():
    def tried(bounds):
        found = fedmcmc.tune(
            lambda step_size: trajectory(step_size),
            ONE,
            ONE_ROW,
            ONE_SURROGATE,
            max_spread=SPREAD,
            step_size=bounds,
        )
        return np.array([entry["step_size"] for entry in found.table]), found

    steps, found = tried((0.05, 0.3))
    assert steps.min() == 0.05 and steps.max() == 0.3
    assert found.settings["step_size"] == 0.3  # the slowest direction is faster the longer the step
    steps, found = tried((0.2, 0.2))
    assert steps.tolist() == [0.2] == [found.settings["step_size"]]
    entry = found.table[0]
    shrinks = np.cos(LENGTH * np.arccos(1 - 0.02))
    np.testing.assert_allclose(entry["burn_in"], np.log(0.01) / np.log(shrinks), rtol=1e-4)
    with pytest.raises(ValueError, match=r"keep means .* closest are .*'step_size': 1\.1"):
        tried((1.1, 1.2))


@pytest.mark.slow
def test_a_functional_is_one_of_the_users_coordinates():
    """In whitened coordinates its direction turns with them; a twin finds it in its chains."""
    white = fedmcmc.whiten(FEDERATION.posterior, FEDERATION.data, jnp.zeros(3))
    kernel = fedmcmc.fa_hmc(
        white.posterior,
        step_size=0.3,
        num_integration_steps=3,
        num_local_steps=2,
        inverse_mass_matrix=METRIC,
    )
    told = fedmcmc.predict_bias(
        kernel, FEDERATION.data, white.surrogates, functional=lambda theta: theta[0]
    )
    ends = np.asarray([white.posterior.position_fn(x) for x in np.eye(3)])
    direction = ends[:, 0] - np.asarray(white.posterior.position_fn(np.zeros(3)))[0]
    expected = effective_rounds(told.on_position, told.covariance, direction)
    np.testing.assert_allclose(told.functional_rounds, expected, rtol=1e-4)
    assert np.abs(told.functional_rounds / told.rounds_per_draw[0] - 1) > 0.01  # not of white[0]
    assert told.functional_rounds < told.slowest
    sparse = fedmcmc.qlsd(FEDERATION.posterior, step_size=0.01, compressor=fedmcmc.sparsify(0.9))
    exact, _ = FEDERATION.surrogates("exact")
    told = fedmcmc.predict_bias(
        sparse, FEDERATION.data, exact, functional=lambda theta: -3 * theta[1]
    )
    assert told.simulated
    np.testing.assert_allclose(told.functional_rounds, told.rounds_per_draw[1], rtol=1e-6)


LARGEST = int(np.max(FEDERATION.data.sizes))
ROWS = {
    "lsd": (lambda: fedmcmc.lsd(FEDERATION.posterior, step_size=0.01), LARGEST),
    "lsd, batches": (
        lambda: fedmcmc.lsd(FEDERATION.posterior, step_size=0.01, batch_size=2),
        2,
    ),
    "lsd_pp": (  # two batches at two places, and all rows in every fourth round
        lambda: fedmcmc.lsd_pp(FEDERATION.posterior, step_size=0.01, batch_size=2, refresh_every=4),
        4 + LARGEST / 4,
    ),
    "fa_hmc": (
        lambda: fedmcmc.fa_hmc(
            FEDERATION.posterior, step_size=0.01, num_integration_steps=3, num_local_steps=2
        ),
        6 * LARGEST,
    ),
    "fsgld": (
        lambda: fedmcmc.fsgld(
            FEDERATION.posterior,
            FEDERATION.surrogates("exact")[0],
            step_size=0.01,
            num_local_steps=5,
            batch_size=2,
        ),
        10,
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_a_round(name):
    build, expected = ROWS[name]
    surrogates, _ = FEDERATION.surrogates("exact")
    found = count_rows_per_round(build(), FEDERATION.data.federation, surrogates)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
def test_dear_gradients_and_dear_exchanges_ask_for_other_trajectories():
    """Seconds of a round: exchanges, bytes, and the rows of the largest client.

    The same time in 12 steps or in 24 mixes as fast, and of such ties the smaller step is taken.
    """

    def tuned(**prices):
        return fedmcmc.tune(
            lambda step_size, num_integration_steps: fedmcmc.fa_hmc(
                ONE,
                step_size=step_size,
                num_integration_steps=num_integration_steps,
                num_local_steps=1,
            ),
            ONE,
            ONE_ROW,
            ONE_SURROGATE,
            grid={"num_integration_steps": [12, 24]},
            objective="seconds",
            max_spread=SPREAD,
            **prices,
        )

    exchanges, gradients = tuned(latency=1.0), tuned(seconds_per_gradient=1.0)
    assert exchanges.settings["num_integration_steps"] == 24
    assert gradients.settings["num_integration_steps"] == 12
    assert 0.95 < exchanges.prediction.slowest / gradients.prediction.slowest < 1.05
    for entry in gradients.table:
        if np.isfinite(entry["cost"]):
            expected = entry["rounds"] * entry["num_integration_steps"]
            np.testing.assert_allclose(entry["cost"], expected)
    both = tuned(latency=10.0, seconds_per_gradient=0.5, bandwidth=8.0)
    entry = next(each for each in both.table if each["num_integration_steps"] == 12)
    per_round = 10 + 2 * 2 * 4 / 8 + 0.5 * 12
    np.testing.assert_allclose(entry["cost"], entry["rounds"] * per_round)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(objective="seconds"), "latency=, bandwidth= or seconds_per_gradient="),
        (dict(latency=-1.0), "latency must be a number of seconds"),
        (dict(seconds_per_gradient=float("nan")), "seconds_per_gradient must be a number"),
        (dict(bandwidth=0.0), "bandwidth must be"),
        (dict(step_size=(0.2, 0.1)), "the smallest and the largest to try"),
        (dict(functional=lambda position: position), "functional must return a number"),
        (dict(functional=lambda position: jnp.sum(position**2)), "must be finite and not zero"),
    ],
)
def test_what_cannot_be_a_cost_is_said(settings, words):
    with pytest.raises(ValueError, match=words):
        fedmcmc.tune(
            lambda step_size: trajectory(step_size), ONE, ONE_ROW, ONE_SURROGATE, **settings
        )
