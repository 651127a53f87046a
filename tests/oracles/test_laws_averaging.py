"""The oracle of the averaging family against closed forms and figures found elsewhere."""

import numpy as np
import pytest

from tests.oracles import laws
from tests.oracles.laws_averaging import Averaging, trajectory

H, M, W = np.array([1.0, 3.0]), np.array([-1.0, 2.0]), np.array([0.4, 0.6])


def scalar(**settings):
    """Return the law for two one-dimensional clients with weighted curvatures H and no prior."""
    return Averaging(
        precisions=(W * H)[:, None, None],
        means=M[:, None],
        prior_precision=np.zeros((1, 1)),
        prior_mean=np.zeros(1),
        weights=W,
        step_size=0.3,
        **settings,
    )


# Figures of 2e5 independently simulated chains and of scalar closed forms.
ANCHORS = [
    (dict(num_steps=1, num_local_steps=1, rho=0.3), 1.4545455, 0.4782172),
    (dict(num_steps=1, num_local_steps=5, rho=1.0), 1.3700033, 0.4948514),
    (dict(num_steps=1, num_local_steps=5, rho=0.0), 1.3700033, 0.5003017),
    (dict(num_steps=4, num_local_steps=1, rho=1.0), 1.3365538, 0.4844345),
    (dict(num_steps=4, num_local_steps=3, rho=0.5), 0.9197732, 0.5559346),
    (
        dict(num_steps=4, num_local_steps=3, rho=0.5, noises=np.ones((2, 1, 1))),
        0.9197732,
        0.5865809,
    ),
    (dict(num_steps=4, num_local_steps=3, rho=0.5, control_variate=True), 1.4545455, 0.6248905),
]


@pytest.mark.parametrize("settings, mean, variance", ANCHORS)
def test_stationary_laws_equal_the_anchors(settings, mean, variance):
    law = scalar(**settings).stationary()
    np.testing.assert_allclose(law.mean, [mean], atol=2e-7)
    np.testing.assert_allclose(law.covariance, [[variance]], atol=2e-7)


def block_form(curvature, step_size):
    """Return one leapfrog step in (position, momentum)."""
    d, eta = len(curvature), step_size
    half = np.eye(d) - eta**2 / 2 * curvature
    return np.block(
        [
            [half, eta * np.eye(d)],
            [-eta * curvature @ (np.eye(d) - eta**2 / 4 * curvature), half],
        ]
    )


@pytest.mark.parametrize("gradients", ["fresh", "reuse"])
def test_a_trajectory_is_a_power_of_the_block_matrix(gradients):
    rng = np.random.default_rng(0)
    factor = rng.normal(size=(3, 3))
    curvature, slope, eta, num = factor @ factor.T + np.eye(3), rng.normal(size=3), 0.2, 4
    one = trajectory(
        curvature,
        slope,
        np.zeros((3, 3)),
        step_size=eta,
        num_steps=num,
        gradients=gradients,
    )
    step = block_form(curvature, eta)
    power = np.linalg.matrix_power(step, num)
    np.testing.assert_allclose(one.on_start, power[:3, :3], atol=1e-12)
    np.testing.assert_allclose(one.on_noise, power[:3, 3:], atol=1e-12)
    centre = np.linalg.solve(curvature, slope)
    np.testing.assert_allclose(one.shift, centre - power[:3, :3] @ centre, atol=1e-12)
    # Noise of the calls: N1 enters before a step, N2 behind it. The sign is that of f's gradient.
    first = -np.block([[eta**2 / 2 * np.eye(3)], [eta / 2 * np.eye(3) - eta**3 / 4 * curvature]])
    second = -np.block([[np.zeros((3, 3))], [eta / 2 * np.eye(3)]])
    powers = [np.linalg.matrix_power(step, k) for k in range(num + 1)]
    if gradients == "fresh":
        inputs = [powers[k] @ n for k in range(num) for n in (first, second)]
    else:
        inputs = [
            (powers[num - 1 - k] @ first if k < num else 0) + (powers[num - k] @ second if k else 0)
            for k in range(num + 1)
        ]
    expected = sum(n[:3] @ n[:3].T for n in inputs)
    np.testing.assert_allclose(sum(m @ m.T for m in one.on_calls), expected, atol=1e-12)


def heterogeneous(**settings):
    rng = np.random.default_rng(1)
    factors = rng.normal(size=(3, 2, 2))
    return Averaging(
        precisions=factors @ factors.transpose(0, 2, 1) + np.eye(2),
        means=rng.normal(size=(3, 2)),
        prior_precision=0.5 * np.eye(2),
        prior_mean=np.ones(2),
        weights=np.array([0.5, 0.2, 0.3]),
        **dict(dict(step_size=0.1, num_steps=3, num_local_steps=4), **settings),
    )


def target(law):
    mean, covariance = laws.posterior(*law[:4])
    return mean, np.linalg.inv(covariance)


def test_one_step_between_averages_has_the_law_of_plain_langevin_dynamics_for_any_correlation():
    for rho in (0.0, 0.4, 1.0):
        law = heterogeneous(num_steps=1, num_local_steps=1, rho=rho)
        mean, precision = target(law)
        gamma = law.step_size**2 / 2
        exact = np.linalg.inv(precision @ (np.eye(2) - gamma / 2 * precision))
        np.testing.assert_allclose(law.stationary().mean, mean, atol=1e-10)
        np.testing.assert_allclose(law.stationary().covariance, exact, atol=1e-10)


def test_equal_curvatures_of_weighted_losses_make_the_mean_exact_and_correlation_immaterial():
    covariances = []
    for rho in (0.0, 1.0):
        law = heterogeneous(rho=rho)
        law = law._replace(precisions=law.weights[:, None, None] * law.precisions.sum(0))
        limit = law.stationary()
        covariances.append(limit.covariance)
        np.testing.assert_allclose(limit.mean, target(law)[0], atol=1e-10)
    np.testing.assert_allclose(*covariances, atol=1e-10)


@pytest.mark.parametrize("steps", [(3, 1), (1, 4), (3, 4)])
def test_heterogeneity_biases_the_mean_and_a_control_variate_removes_the_bias(steps):
    settings = dict(num_steps=steps[0], num_local_steps=steps[1])
    law = heterogeneous(**settings)
    mean, _ = target(law)
    assert np.abs(law.stationary().mean - mean).max() > 1e-3
    corrected = heterogeneous(**settings, control_variate=True)
    np.testing.assert_allclose(corrected.stationary().mean, mean, atol=1e-10)
    noise = law.map_of(np.ones(3))[2]
    np.testing.assert_allclose(corrected.map_of(np.ones(3))[2], noise, atol=1e-12)


@pytest.mark.parametrize("steps", [(1, 5), (4, 1), (4, 3), (20, 1)])
def test_the_leading_bias_is_the_covariance_of_curvatures_and_pulls(steps):
    """The formula of docs/explanation/exact_distributions.md, in the length of a trajectory."""
    num_steps, num_local_steps = steps
    law = heterogeneous(num_steps=num_steps, num_local_steps=num_local_steps, step_size=2e-3)
    mean, precision = target(law)
    w = law.weights
    curvatures = law.prior_precision + law.precisions / w[:, None, None]
    slopes = law.prior_precision @ law.prior_mean
    slopes = slopes + np.einsum("cij,cj->ci", law.precisions, law.means) / w[:, None]
    pulls = curvatures @ mean - slopes
    covariance = np.einsum("c,cij,cj->i", w, curvatures - precision, pulls)
    factor = num_local_steps / 4 - 1 / 6 - 1 / (12 * num_steps**2)
    length = num_steps * 2e-3
    expected = length**2 * factor * np.linalg.solve(precision, covariance)
    np.testing.assert_allclose(law.stationary().mean - mean, expected, rtol=0.02)


def test_shared_momentum_never_widens_a_round():
    private, shared = (heterogeneous(rho=rho).map_of(np.ones(3))[2] for rho in (0.0, 1.0))
    assert np.linalg.eigvalsh(private - shared).min() > 0
