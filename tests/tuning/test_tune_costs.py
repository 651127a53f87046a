"""Costs of an effective draw: of a functional, in rounds, bits or seconds."""

import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc.tuning._row_counts import count_rows_per_round
from tests.oracles.federations import Federation
from tests.oracles.laws import effective_rounds

FEDERATION = Federation()
SURROGATES, _ = FEDERATION.surrogates("exact")
METRIC = np.array([[1.2, 0.3, 0.0], [0.3, 0.8, -0.2], [0.0, -0.2, 0.5]])
CURVATURES = np.array([1.0, 2.25])
LENGTH, SPREAD = 4, 0.2


def loglikelihood(position, rows):
    """Return the log density of a single row, whose posterior has the curvatures."""
    return -0.5 * jnp.sum(CURVATURES * (position - rows[:, None]) ** 2, axis=1)


SINGLE = fedmcmc.Posterior(lambda position: jnp.zeros(()), loglikelihood)
SINGLE_ROW = fedmcmc.FederatedData.from_clients([np.zeros(1, np.float32)])
SINGLE_SURROGATE = fedmcmc.Gaussian.from_moments(np.zeros((1, 2)), np.diag(1 / CURVATURES)[None])


def build_trajectory(step_size, num_integration_steps=LENGTH):
    return fedmcmc.fa_hmc(
        SINGLE,
        step_size=step_size,
        num_integration_steps=num_integration_steps,
        num_local_steps=1,
    )


def tune(**settings):
    return fedmcmc.tune(
        build_trajectory, SINGLE, SINGLE_ROW, SINGLE_SURROGATE, max_spread=SPREAD, **settings
    )


def trajectory_times(step_size, direction):
    """Return the autocorrelation time of ``direction @ theta``, and the largest error of an sd.

    ``L`` leapfrog steps from a fresh momentum make ``theta_j' = cos(L phi_j) theta_j + noise`` with
    ``cos phi_j = 1 - step**2 h_j / 2``, whose variance is ``1 / (h_j (1 - step**2 h_j / 4))``.
    """
    squares = step_size**2 * CURVATURES
    factors = np.cos(LENGTH * np.arccos(1 - squares / 2))
    variances = direction**2 / (CURVATURES * (1 - squares / 4))
    time = np.sum(variances * (1 + factors) / (1 - factors)) / np.sum(variances)
    return time, np.max(1 / np.sqrt(1 - squares / 4) - 1)


@pytest.mark.slow
@pytest.mark.parametrize("direction", [(1.0, 0.0), (0.0, 1.0), (1.0, 1.5)], ids=str)
def test_the_functional_of_the_user_mixes_fastest(direction):
    """The closed form of a trajectory on Gaussians gives the best of all accepted steps."""
    direction = np.array(direction)
    best = tune(functional=lambda position: jnp.sum(direction * position))
    time, error = trajectory_times(best.settings["step_size"], direction)
    rounds = best.prediction.functional_rounds
    np.testing.assert_allclose(rounds, time, rtol=1e-3, atol=1e-5)
    steps = np.geomspace(1e-3, 1.2, 20_000)
    times, errors = np.array([trajectory_times(step, direction) for step in steps]).T
    assert error <= SPREAD * (1 + 1e-3)
    np.testing.assert_allclose(time, times[errors <= SPREAD].min(), rtol=0.02, atol=1e-3)
    assert f"{rounds:.3g} rounds per effective draw of the" in str(best)


def test_only_steps_between_bounds_are_tried():
    best = tune(step_size=(0.05, 0.3))
    steps = [entry["step_size"] for entry in best.table]
    assert min(steps) == 0.05 and max(steps) == 0.3
    assert best.settings["step_size"] == 0.3  # a longer step is faster in the slowest direction
    best = tune(step_size=(0.2, 0.2))
    (entry,) = best.table
    assert entry["step_size"] == 0.2 == best.settings["step_size"]
    factor = np.cos(LENGTH * np.arccos(1 - 0.02))
    np.testing.assert_allclose(entry["burn_in"], np.log(0.01) / np.log(factor), rtol=1e-4)
    with pytest.raises(ValueError, match=r"keep means .* closest are .*'step_size': 1\.1"):
        tune(step_size=(1.1, 1.2))


@pytest.mark.slow
def test_a_functional_takes_the_users_coordinates():
    """In whitened coordinates its direction turns with them; a twin estimates it by its chains."""
    white = fedmcmc.whiten(FEDERATION.posterior, FEDERATION.data, jnp.zeros(3))
    kernel = fedmcmc.fa_hmc(
        white.posterior,
        step_size=0.3,
        num_integration_steps=3,
        num_local_steps=2,
        inverse_mass_matrix=METRIC,
    )
    prediction = fedmcmc.predict_bias(
        kernel, FEDERATION.data, white.surrogates, functional=lambda theta: theta[0]
    )
    ends = np.asarray([white.posterior.position_fn(x) for x in np.eye(3)])
    direction = ends[:, 0] - np.asarray(white.posterior.position_fn(np.zeros(3)))[0]
    rounds = prediction.functional_rounds
    expected = effective_rounds(prediction.on_position, prediction.covariance, direction)
    np.testing.assert_allclose(rounds, expected, rtol=1e-4)
    assert np.abs(rounds / prediction.rounds_per_draw[0] - 1) > 0.01  # not of white[0]
    assert rounds < prediction.slowest
    sparse = fedmcmc.qlsd(FEDERATION.posterior, step_size=0.01, compressor=fedmcmc.sparsify(0.9))
    prediction = fedmcmc.predict_bias(
        sparse, FEDERATION.data, SURROGATES, functional=lambda theta: -3 * theta[1]
    )
    assert prediction.simulated
    rounds = prediction.functional_rounds
    np.testing.assert_allclose(rounds, prediction.rounds_per_draw[1], rtol=1e-6)


LARGEST = int(np.max(FEDERATION.data.sizes))
ROWS = {
    "lsd": (fedmcmc.lsd, {}, LARGEST),
    "lsd, batches": (fedmcmc.lsd, dict(batch_size=2), 2),
    # Two batches at two places, and all rows in every fourth round.
    "lsd_pp": (fedmcmc.lsd_pp, dict(batch_size=2, refresh_every=4), 4 + LARGEST / 4),
    "fa_hmc": (fedmcmc.fa_hmc, dict(num_integration_steps=3, num_local_steps=2), 6 * LARGEST),
    "fsgld": (
        fedmcmc.fsgld,
        dict(surrogates=SURROGATES, num_local_steps=5, batch_size=2),
        10,
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_round_has_the_rows_of_its_gradients(name):
    build, settings, expected = ROWS[name]
    kernel = build(FEDERATION.posterior, step_size=0.01, **settings)
    num_rows = count_rows_per_round(kernel, FEDERATION.data.federation, SURROGATES)
    np.testing.assert_array_equal(num_rows, expected)


@pytest.mark.slow
def test_expensive_exchanges_need_longer_trajectories_than_expensive_gradients():
    """Seconds of a round: exchanges, bytes, and the rows of the largest client.

    The same time in 12 steps or in 24 mixes as fast, and of such ties the smaller step is taken.
    """

    def tune_seconds(**prices):
        grid = {"num_integration_steps": [12, 24]}
        return tune(grid=grid, objective="seconds", **prices)

    exchanges, gradients = tune_seconds(latency=1.0), tune_seconds(seconds_per_gradient=1.0)
    assert exchanges.settings["num_integration_steps"] == 24
    assert gradients.settings["num_integration_steps"] == 12
    assert 0.95 < exchanges.prediction.slowest / gradients.prediction.slowest < 1.05
    for entry in gradients.table:
        if np.isfinite(entry["cost"]):
            expected = entry["rounds"] * entry["num_integration_steps"]
            np.testing.assert_allclose(entry["cost"], expected)
    both = tune_seconds(latency=10.0, seconds_per_gradient=0.5, bandwidth=8.0)
    entry = next(entry for entry in both.table if entry["num_integration_steps"] == 12)
    per_round = 10 + 2 * 2 * 4 / 8 + 0.5 * 12
    np.testing.assert_allclose(entry["cost"], entry["rounds"] * per_round)


@pytest.mark.parametrize(
    ("settings", "message"),
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
def test_invalid_costs_raise(settings, message):
    with pytest.raises(ValueError, match=message):
        tune(**settings)
