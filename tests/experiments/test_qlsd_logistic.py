"""Logistic posteriors: likelihood, curvature bound, and the mode at the size of the digits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from experiments import data, images
from experiments.qlsd import federations, image_federations, logistic
from experiments.qlsd.federations import Rows

RNG = np.random.default_rng(4)


def some_rows(num, dim, classes, seed=0):
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(num, dim)).astype(np.float32)
    return Rows(features, rng.integers(0, classes, num).astype(np.int32))


def softmax(scores):
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def test_binary_likelihood_and_potential():
    rows, theta = some_rows(40, 3, 2), RNG.normal(size=3)
    posterior = logistic.binary(3, prior_precision=2.5)
    probability = 1 / (1 + np.exp(-rows.features.astype(float) @ theta))
    expected = np.log(np.where(rows.label == 1, probability, 1 - probability))
    terms = posterior.loglikelihood_fn(jnp.asarray(theta, jnp.float32), rows)
    np.testing.assert_allclose(terms, expected, atol=1e-5)
    split = fedmcmc.FederatedData.from_arrays(rows, np.arange(40) % 3)
    potential = logistic.potential_fn(posterior, split)(jnp.asarray(theta, jnp.float32))
    np.testing.assert_allclose(potential, 1.25 * theta @ theta - expected.sum(), rtol=1e-5)
    table = np.exp(logistic.log_probabilities(jnp.asarray(theta, jnp.float32), rows.features))
    np.testing.assert_allclose(table, np.stack([1 - probability, probability], 1), atol=1e-5)
    assert posterior.init_fn(jax.random.key(0)).shape == (3,)


def test_multinomial_likelihood_and_potential():
    rows, theta = some_rows(30, 4, 5), RNG.normal(size=(4, 5))
    posterior = logistic.multinomial(4, 5, prior_precision=0.0)
    table = softmax(rows.features.astype(float) @ theta)
    expected = np.log(table[np.arange(30), rows.label])
    position = jnp.asarray(theta, jnp.float32)
    np.testing.assert_allclose(posterior.loglikelihood_fn(position, rows), expected, atol=1e-5)
    found = np.exp(logistic.log_probabilities(position, rows.features))
    np.testing.assert_allclose(found, table, atol=1e-5)
    split = fedmcmc.FederatedData.from_arrays(rows, np.arange(30) % 4)
    potential = logistic.potential_fn(posterior, split)(position)
    np.testing.assert_allclose(potential, -expected.sum(), rtol=1e-5)
    assert posterior.logprior_fn(position) == 0
    assert posterior.init_fn(jax.random.key(0)).shape == (4, 5)


def test_far_scores_stay_finite():
    rows = Rows(np.array([[1e4], [-1e4]], np.float32), np.array([1, 1], np.int32))
    for posterior, theta in (
        (logistic.binary(1, 1.0), jnp.ones(1)),
        (logistic.multinomial(1, 2, 1.0), jnp.array([[0.0, 1.0]])),
    ):
        terms = posterior.loglikelihood_fn(theta, rows)
        np.testing.assert_allclose(terms, [0.0, -1e4])
        gradient = jax.grad(lambda t, p=posterior: p.loglikelihood_fn(t, rows).sum())(theta)
        assert np.isfinite(gradient).all()


def test_a_negative_precision_is_refused():
    with pytest.raises(ValueError, match="prior_precision must not be negative, got -1"):
        logistic.binary(2, -1.0)


def test_smoothness_of_many_and_of_few_rows():
    for shape in ((50, 4), (3, 6)):
        features = RNG.normal(size=shape).astype(np.float32)
        top = np.linalg.svd(features.astype(float), compute_uv=False)[0] ** 2
        bounds = [logistic.smoothness(features, 2.0, factor) for factor in (0.25, 0.5)]
        np.testing.assert_allclose(bounds, [top / 4 + 2, top / 2 + 2])


def largest_curvature(posterior, rows, thetas):
    """Return the largest eigenvalue of the potential's Hessian at each of `thetas`."""
    split = fedmcmc.FederatedData.from_clients([rows])
    hessian = jax.jit(jax.vmap(jax.hessian(logistic.potential_fn(posterior, split))))
    size = thetas[0].size
    matrices = np.asarray(hessian(jnp.asarray(thetas, jnp.float32)), float)
    return np.linalg.eigvalsh(matrices.reshape(-1, size, size))[:, -1]


def test_smoothness_bounds_the_curvature_and_is_reached():
    rows = some_rows(50, 4, 2)
    quarter, half = (logistic.smoothness(rows.features, 2.0, factor) for factor in (0.25, 0.5))
    at_zero, beside = largest_curvature(logistic.binary(4, 2.0), rows, [np.zeros(4), np.ones(4)])
    np.testing.assert_allclose(at_zero, quarter, rtol=1e-5)
    assert beside < quarter
    # Two of three classes share every row: the quarter is exceeded, the half is reached.
    three = logistic.multinomial(4, 3, 2.0)
    everywhere = [scale * RNG.normal(size=(4, 3)) for scale in (0.1, 1, 5)]
    assert (largest_curvature(three, rows, everywhere) < half).all()
    one = Rows(np.array([[1.0, 0.5, 0.0, 2.0]], np.float32), np.array([0], np.int32))
    shared = [np.array([0, 0, -50.0]) * np.ones((4, 1))]
    found = largest_curvature(three, one, shared)[0]
    np.testing.assert_allclose(found, logistic.smoothness(one.features, 2.0, 0.5), rtol=1e-5)
    assert found > logistic.smoothness(one.features, 2.0)


def newton(rows, precision, shape):
    """Find the mode in float64 with full Newton steps, of the multinomial model."""
    x, (dim, classes) = rows.features.astype(float), shape
    theta, chosen = np.zeros(shape), np.eye(classes)[rows.label]
    for _ in range(30):
        p = softmax(x @ theta)
        gradient = x.T @ (p - chosen) + precision * theta
        blocks = np.einsum("nk,kl->nkl", p, np.eye(classes)) - np.einsum("nk,nl->nkl", p, p)
        hessian = np.einsum("ni,nkl,nj->ikjl", x, blocks, x).reshape(dim * classes, -1)
        hessian += precision * np.eye(dim * classes)
        theta = theta - np.linalg.solve(hessian, gradient.reshape(-1)).reshape(shape)
    return theta, np.linalg.norm(gradient)


def test_the_mode_by_sums_over_clients_is_that_of_newton():
    found = federations.synthetic(dim=6, num_classes=3)
    rows = Rows(*(np.asarray(leaf) for leaf in found.data.rows))
    expected, size = newton(rows, 5.0, (6, 3))
    assert size < 1e-9
    posterior = logistic.multinomial(6, 3, 5.0)
    mode = fedmcmc.surrogates.mode(posterior, found.data, jnp.zeros((6, 3)))
    np.testing.assert_allclose(mode.position, expected, atol=2e-4)


@pytest.mark.slow
def test_the_mode_at_the_size_of_the_digits():
    """With 7840 coordinates the gradient is far below what moves a mean by its error."""
    rng = np.random.default_rng(7)
    centres = rng.normal(size=(10, 784))
    labels = rng.integers(0, 10, 627)
    features = (0.5 * centres[labels] + rng.normal(size=(627, 784))).astype(np.float32)
    rows = Rows(features, labels.astype(np.int32))
    split = fedmcmc.FederatedData.from_arrays(rows, np.arange(627) % 10)
    check_centre(logistic.multinomial(784, 10, 100.0), split)


def check_centre(posterior, split):
    zeros = jnp.zeros((784, 10))
    mode = fedmcmc.surrogates.mode(posterior, split, zeros, tolerance=1e-11, max_steps=500)
    gradient = np.asarray(jax.grad(logistic.potential_fn(posterior, split))(mode.position))
    # The drift that is left over the smallest curvature moves a coordinate by at most this share
    # of its standard deviation, at most 0.1.
    assert np.abs(gradient).max() / 100 / 0.1 < 1e-4
    assert np.linalg.norm(gradient) / 100 < 1e-5
    assert np.linalg.norm(mode.position) > 0.1


@pytest.mark.data
def test_the_mode_on_the_real_digits():
    def no_fetch(name, version):
        raise OSError("not in this test")

    try:
        pictures = images.mnist(no_fetch)
    except data.DataNotFound as error:
        pytest.skip(str(error))
    found = image_federations.digits(pictures)
    posterior = logistic.multinomial(784, 10, 100.0)
    check_centre(posterior, found.data)
    mode = fedmcmc.surrogates.mode(posterior, found.data, jnp.zeros((784, 10)))
    predicted = logistic.log_probabilities(mode.position, found.test.features).argmax(axis=1)
    assert np.mean(predicted == found.test.label) > 0.85
