"""FA-HMC on Gaussian clients by its exact distribution, and marginal errors from counts."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from experiments import loaders, models
from experiments.special.fa_hmc_gaussian import Clients, moments, stationary
from experiments.special.fa_hmc_logistic import Histograms, error_curve
from fedmcmc.metrics import marginal_error


@pytest.mark.parametrize(
    ("num_local_steps", "length", "rho", "noise"), [(1, 3, 1.0, 2.0), (3, 2, 0.3, 0.0)]
)
def test_rounds_have_the_distribution_that_predict_bias_has(num_local_steps, length, rho, noise):
    """Off by sqrt(2) in the noise, or with the prior twice, it would fail."""
    data, _ = loaders.spherical(num_clients=4, num_rows=60, dim=6, num_test=0)
    posterior = models.logistic(data, 0.5)
    mode = fedmcmc.surrogates.mode(posterior, data, jnp.zeros(6)).position
    expansions = fedmcmc.surrogates.taylor(posterior, data, mode)
    curvatures, axes = np.linalg.eigh(4 * np.asarray(expansions.precision, float))
    slopes = 4 * np.asarray(expansions.precision_mean, float)
    means = np.einsum("bij,bi->bj", axes, slopes) / (curvatures + 0.5)
    clients = Clients(curvatures + 0.5, means, axes, np.full(4, 0.25))
    (one,) = clients.rounds([num_local_steps], 0.2, length, rho=rho, noise=noise)
    kernel = fedmcmc.fa_hmc(
        posterior,
        step_size=0.2,
        num_integration_steps=length,
        num_local_steps=num_local_steps,
        rho=rho,
        gradient_noise=noise,
        gradients="reuse",
    )
    expected = fedmcmc.predict_bias(kernel, data, expansions)
    assert not expected.simulated
    late = next(itertools.islice(moments(itertools.repeat(one), np.zeros(6)), 300, None))
    for mean, variance in (stationary(one), late):
        np.testing.assert_allclose(mean, expected.mean, atol=1e-5)
        np.testing.assert_allclose(variance, np.diag(expected.covariance), atol=1e-5)
    np.testing.assert_allclose(clients.target()[0], mode, atol=1e-5)


def test_errors_of_the_draws_so_far_are_marginal_errors():
    rng = np.random.default_rng(0)
    reference = rng.normal(size=(500, 3)).astype(np.float32)
    draws = (0.3 + 1.2 * rng.normal(size=(2, 80, 3))).astype(np.float32)
    draws[:, 3, 0], draws[:, 5, 1] = reference[:, 0].max(), 40
    parts = (draws[:, start : start + 10] for start in range(0, 80, 10))
    marks, errors = error_curve(parts, Histograms(reference), 75, 0.0)
    assert marks[0] == 2 and marks[-1] == 75
    for mark, found in zip(marks, errors, strict=True):
        chains = draws[:, mark // 2 : mark]
        for part, error in zip((chains, chains[1:], chains[:1]), found, strict=True):
            assert error == pytest.approx(float(marginal_error(part.reshape(-1, 3), reference)))
