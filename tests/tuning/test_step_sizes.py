"""Step sizes: estimated curvatures, recommended steps, decreasing steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc.metrics import gaussian_w2
from fedmcmc.tuning import inverse_sqrt_schedule, proposition_step_size
from tests.oracles.federations import LIMIT, worst_z
from tests.oracles.federations_averaging import FEDERATION, SHARES, law

KEY = jax.random.key(0)
START = jnp.asarray(FEDERATION.start)
TOTAL = FEDERATION.prior_precision + FEDERATION.precisions.sum(0)
TARGET = np.linalg.solve(
    TOTAL,
    FEDERATION.prior_precision @ FEDERATION.prior_mean
    + np.einsum("cij,cj->i", FEDERATION.precisions, FEDERATION.means),
)


def distance(moments):
    """Return the 2-Wasserstein distance from the posterior."""
    return float(gaussian_w2(moments.mean, moments.covariance, TARGET, np.linalg.inv(TOTAL)))


@pytest.mark.parametrize("weights", [None, np.array([0.2, 0.35, 0.15, 0.3])])
def test_estimated_curvatures_are_eigenvalues_of_the_hessians(weights):
    w = SHARES if weights is None else weights
    curvatures = FEDERATION.prior_precision + FEDERATION.precisions / w[:, None, None]
    estimate = fedmcmc.estimate_smoothness(
        KEY, FEDERATION.posterior, FEDERATION.data, START, weights=weights, num_steps=500
    )
    np.testing.assert_allclose(estimate.largest, np.linalg.eigvalsh(curvatures).max(), rtol=1e-3)
    np.testing.assert_allclose(estimate.smallest, np.linalg.eigvalsh(TOTAL).min(), rtol=1e-2)


def test_estimated_curvatures_may_be_negative():
    """Eigenvalues 8 and -32 at one client, zero at the second client; the prior is flat."""
    posterior = fedmcmc.Posterior(
        lambda t: jnp.zeros(()), lambda t, rows: -0.5 * rows @ (jnp.array([4.0, -16.0]) * t**2)
    )
    data = fedmcmc.FederatedData.from_clients([np.ones((1, 2)) * [1, 1], np.zeros((1, 2))])
    estimate = fedmcmc.estimate_smoothness(KEY, posterior, data, jnp.zeros(2))
    np.testing.assert_allclose(estimate, (8.0, -16.0), rtol=1e-3)
    with pytest.raises(ValueError, match="num_steps must be a positive integer, got 0"):
        fedmcmc.estimate_smoothness(KEY, posterior, data, jnp.zeros(2), num_steps=0)


@pytest.mark.parametrize(("num_steps", "num_local_steps"), [(1, 10), (5, 1), (5, 10)])
def test_a_recommended_step_keeps_its_tolerance_on_gaussian_clients(num_steps, num_local_steps):
    """The error is within the tolerance, and above a thirtieth of it."""
    d, tolerance = 4, 0.2
    rng = np.random.default_rng(0)
    curvatures = np.array([np.diag(rng.uniform(1, 4, d)) for _ in range(6)])
    gradients = rng.normal(size=(6, d))
    gradients -= gradients.mean(0)
    gradients *= np.sqrt(4.0 * d) / np.sqrt((gradients**2).sum(1).mean())
    step_size = proposition_step_size(
        4.0,
        dimension=d,
        num_integration_steps=num_steps,
        num_local_steps=num_local_steps,
        tolerance=tolerance,
    )
    # Clients with these gradients at zero, the mode; weights of one sixth.
    rounds = law(num_steps=num_steps, num_local_steps=num_local_steps, step_size=step_size)
    stationary = rounds._replace(
        precisions=curvatures / 6,
        means=np.linalg.solve(curvatures, gradients[..., None])[..., 0],
        prior_precision=np.zeros((d, d)),
        prior_mean=np.zeros(d),
        weights=np.full(6, 1 / 6),
        noises=None,
    ).stationary()
    exact = np.linalg.inv(curvatures.mean(0))
    w2 = float(gaussian_w2(stationary.mean, stationary.covariance, np.zeros(d), exact))
    assert 0.03 * tolerance < w2 * np.sqrt(4.0) < tolerance


def test_recommended_steps_scale_as_the_proposition():
    def recommend(smoothness=2.0, **changed):
        settings = dict(dimension=64, num_integration_steps=8, num_local_steps=4, tolerance=0.01)
        return proposition_step_size(smoothness, **(settings | changed))

    for changed in (
        dict(dimension=64 * 16),
        dict(num_local_steps=16),
        dict(num_integration_steps=16),
        dict(smoothness=8.0),
        dict(tolerance=0.0025),
    ):
        np.testing.assert_allclose(recommend(**changed) / recommend(), 1 / 2)
    # A trajectory is never longer than one over the root of the smoothness.
    assert recommend(tolerance=1e9) * 8 <= np.sqrt(1 / 2.0) * (1 + 1e-12)


def decreasing_steps(schedule, num_rounds, **settings):
    """Yield exact moments after each round with the schedule's step sizes."""
    moments = law(**settings, step_size=0.08).rounds(FEDERATION.start, 0)[0]
    for round_ in range(num_rounds):
        a, b, v = law(**settings, step_size=float(schedule(round_))).map_of(np.ones(4))
        covariance = a @ moments.covariance @ a.T + v
        moments = moments._replace(mean=a @ moments.mean + b, covariance=covariance)
        yield moments


@pytest.mark.slow
def test_decreasing_steps_leave_less_bias_than_a_constant_step():
    settings = dict(num_steps=3, num_local_steps=2)
    constant = law(**settings, step_size=0.08).stationary()
    moments = decreasing_steps(inverse_sqrt_schedule(0.08, 20), 600, **settings)
    distances = [distance(after_round) for after_round in moments]
    assert distances[-1] < 0.1 * distance(constant)
    assert distances[-1] < 0.5 * distances[100]


@pytest.mark.slow
def test_a_run_takes_decreasing_steps():
    schedule = inverse_sqrt_schedule(0.08, 2)
    *_, moments = decreasing_steps(schedule, 4, num_steps=3, num_local_steps=2)
    draws = fedmcmc.sample(
        KEY,
        fedmcmc.fa_hmc(
            FEDERATION.posterior, step_size=schedule, num_integration_steps=3, num_local_steps=2
        ),
        FEDERATION.data,
        START,
        num_rounds=4,
        thinning=4,
        num_chains=16384,
        progress=False,
    ).draws
    assert worst_z(draws[:, 0], moments) < LIMIT


def test_invalid_numbers_raise():
    settings = dict(dimension=2, num_integration_steps=1, num_local_steps=1)
    nan, three = float("nan"), np.ones(3) / 3
    federation = (KEY, FEDERATION.posterior, FEDERATION.data, START)
    for compute, message in (
        (lambda: proposition_step_size(0, **settings), "smoothness must be a positive .*, got 0"),
        (
            lambda: proposition_step_size(1, **settings, tolerance=nan),
            "tolerance must be a positive number",
        ),
        (lambda: inverse_sqrt_schedule(0.1, 0), "decay_rounds must be a positive number"),
        (
            lambda: fedmcmc.estimate_smoothness(*federation, weights=three),
            r"weights must have shape \(4,\)",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            compute()
