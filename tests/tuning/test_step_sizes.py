"""Step sizes: estimated curvatures, suggested steps, steps that fall."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc.metrics import gaussian_w2
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
    """Return the 2-Wasserstein distance of a law from the posterior."""
    return float(gaussian_w2(moments.mean, moments.covariance, TARGET, np.linalg.inv(TOTAL)))


@pytest.mark.parametrize("weights", [None, np.array([0.2, 0.35, 0.15, 0.3])])
def test_curvatures_are_those_of_the_hessians(weights):
    w = SHARES if weights is None else weights
    curvatures = FEDERATION.prior_precision + FEDERATION.precisions / w[:, None, None]
    found = fedmcmc.estimate_smoothness(
        KEY, FEDERATION.posterior, FEDERATION.data, START, weights=weights, num_steps=500
    )
    np.testing.assert_allclose(found.largest, np.linalg.eigvalsh(curvatures).max(), rtol=1e-3)
    np.testing.assert_allclose(found.smallest, np.linalg.eigvalsh(TOTAL).min(), rtol=1e-2)


def test_curvatures_of_either_sign_and_none():
    """Eigenvalues 8 and -32 at one client, none at the other; the prior is flat."""
    posterior = fedmcmc.Posterior(
        lambda t: jnp.zeros(()), lambda t, rows: -0.5 * rows @ (jnp.array([4.0, -16.0]) * t**2)
    )
    data = fedmcmc.FederatedData.from_clients([np.ones((1, 2)) * [1, 1], np.zeros((1, 2))])
    found = fedmcmc.estimate_smoothness(KEY, posterior, data, jnp.zeros(2))
    np.testing.assert_allclose(found, (8.0, -16.0), rtol=1e-3)
    with pytest.raises(ValueError, match="num_steps must be a positive integer, got 0"):
        fedmcmc.estimate_smoothness(KEY, posterior, data, jnp.zeros(2), num_steps=0)


def test_a_suggested_step_keeps_its_promise_on_gaussian_clients():
    """Within the tolerance, and not far within, where clients pull as the formula takes it."""
    d, tolerance = 4, 0.2
    rng = np.random.default_rng(0)
    for num_steps, num_local_steps in ((1, 10), (5, 1), (5, 10)):
        curvatures = np.array([np.diag(rng.uniform(1, 4, d)) for _ in range(6)])
        gradients = rng.normal(size=(6, d))
        gradients -= gradients.mean(0)
        gradients *= np.sqrt(4.0 * d) / np.sqrt((gradients**2).sum(1).mean())
        eta = fedmcmc.tuning.proposition_step_size(
            4.0,
            dimension=d,
            num_integration_steps=num_steps,
            num_local_steps=num_local_steps,
            tolerance=tolerance,
        )
        # Clients with these gradients at zero, the mode; weights of one sixth.
        means = np.linalg.solve(curvatures, gradients[..., None])[..., 0]
        one = law(num_steps=num_steps, num_local_steps=num_local_steps, step_size=eta)
        one = one._replace(
            precisions=curvatures / 6,
            means=means,
            prior_precision=np.zeros((d, d)),
            prior_mean=np.zeros(d),
            weights=np.full(6, 1 / 6),
            noises=None,
        )
        found = one.stationary()
        exact = np.linalg.inv(curvatures.mean(0))
        w2 = float(gaussian_w2(found.mean, found.covariance, np.zeros(d), exact))
        assert 0.03 * tolerance < w2 * np.sqrt(4.0) < tolerance, (num_steps, num_local_steps)


def test_suggested_steps_scale_as_the_proposition_says():
    def suggest(**changed):
        given = dict(dimension=64, num_integration_steps=8, num_local_steps=4, tolerance=0.01)
        return fedmcmc.tuning.proposition_step_size(
            changed.pop("smoothness", 2.0), **(given | changed)
        )

    base = suggest()
    np.testing.assert_allclose(suggest(dimension=64 * 16) / base, 1 / 2)
    np.testing.assert_allclose(suggest(num_local_steps=16) / base, 1 / 2)
    np.testing.assert_allclose(suggest(num_integration_steps=16) / base, 1 / 2)
    np.testing.assert_allclose(suggest(smoothness=8.0) / base, 1 / 2)
    np.testing.assert_allclose(suggest(tolerance=0.0025) / base, 1 / 2)
    # Never beyond a trajectory of one over the root of the smoothness.
    assert suggest(tolerance=1e9) * 8 <= np.sqrt(1 / 2.0) * (1 + 1e-12)


@pytest.mark.slow
def test_falling_steps_leave_less_bias_than_a_constant_one():
    """By the exact law: after many rounds, below what the first step size would end at."""
    schedule = fedmcmc.tuning.inverse_sqrt_schedule(0.08, 20)
    settings = dict(num_steps=3, num_local_steps=2)
    constant = law(**settings, step_size=0.08).stationary()
    moments = law(**settings, step_size=0.08).rounds(FEDERATION.start, 0)[0]
    seen = []
    for r in range(600):
        a, b, v = law(**settings, step_size=float(schedule(r))).map_of(np.ones(4))
        moments = moments._replace(
            mean=a @ moments.mean + b, covariance=a @ moments.covariance @ a.T + v
        )
        seen.append(distance(moments))
    assert seen[-1] < 0.1 * distance(constant)
    assert seen[-1] < 0.5 * seen[100]


@pytest.mark.slow
def test_a_run_takes_the_falling_steps():
    schedule = fedmcmc.tuning.inverse_sqrt_schedule(0.08, 2)
    kernel = fedmcmc.fa_hmc(
        FEDERATION.posterior, step_size=schedule, num_integration_steps=3, num_local_steps=2
    )
    moments = law(num_steps=3, num_local_steps=2, step_size=0.08).rounds(FEDERATION.start, 0)[0]
    for r in range(4):
        one = law(num_steps=3, num_local_steps=2, step_size=float(schedule(r)))
        a, b, v = one.map_of(np.ones(4))
        moments = moments._replace(
            mean=a @ moments.mean + b, covariance=a @ moments.covariance @ a.T + v
        )
    draws = fedmcmc.sample(
        KEY,
        kernel,
        FEDERATION.data,
        START,
        num_rounds=4,
        thinning=4,
        num_chains=16384,
        progress=False,
    ).draws
    assert worst_z(draws[:, 0], moments) < LIMIT


def test_bad_numbers_say_so():
    settings = dict(dimension=2, num_integration_steps=1, num_local_steps=1)
    with pytest.raises(ValueError, match="smoothness must be a positive number, got 0"):
        fedmcmc.tuning.proposition_step_size(0, **settings)
    with pytest.raises(ValueError, match="tolerance must be a positive number"):
        fedmcmc.tuning.proposition_step_size(1, **settings, tolerance=float("nan"))
    with pytest.raises(ValueError, match="decay_rounds must be a positive number"):
        fedmcmc.tuning.inverse_sqrt_schedule(0.1, 0)
    with pytest.raises(ValueError, match=r"weights must have shape \(4,\)"):
        fedmcmc.estimate_smoothness(
            KEY, FEDERATION.posterior, FEDERATION.data, START, weights=np.ones(3) / 3
        )
