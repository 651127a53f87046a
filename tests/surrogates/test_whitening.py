"""Whitening: a kernel on the whitened posterior is the kernel on the model with a metric."""

from contextlib import nullcontext

import chex
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import fedmcmc
from fedmcmc import streaming
from tests.oracles.federations import LIMIT, z_scores
from tests.support.lanes import fast_and_slow

KEY = jax.random.key(5)
# Two correlated parameters whose scales differ by 10,000.
PRECISION = np.array([[1e6, 3e2], [3e2, 0.25]])
PRIOR = np.array([4.0, 1e-2])
CENTERS = np.array([[0.001, 3.0], [-0.002, -5.0], [0.0, 1.0]])
SIZES = (4, 2, 7)


def logprior(theta):
    return -0.5 * jnp.sum(jnp.asarray(PRIOR, jnp.float32) * jnp.stack([*theta.values()]) ** 2)


def loglikelihood(theta, rows):
    gap = rows - jnp.stack([theta["a"], theta["b"]])
    return -0.5 * jnp.einsum("ni,ij,nj->n", gap, jnp.asarray(PRECISION, jnp.float32), gap)


POSTERIOR = fedmcmc.Posterior(logprior, loglikelihood)
DATA = fedmcmc.FederatedData.from_clients(
    [np.tile(np.float32(center), (n, 1)) for center, n in zip(CENTERS, SIZES, strict=True)]
)
START = {"a": jnp.zeros(()), "b": jnp.zeros(())}
TOTAL = sum(SIZES) * PRECISION + np.diag(PRIOR)
MEAN = np.linalg.solve(TOTAL, sum(n * PRECISION @ c for n, c in zip(SIZES, CENTERS, strict=True)))
COVARIANCE = np.linalg.inv(TOTAL)


@pytest.fixture(scope="module", params=["dense", "diagonal"])
def white(request):
    return fedmcmc.whiten(POSTERIOR, DATA, START, structure=request.param)


@pytest.fixture(scope="module")
def dense():
    return fedmcmc.whiten(POSTERIOR, DATA, START)


def factor_of(white):
    factor = np.asarray(white.posterior.position_fn.factor, np.float64)
    return factor if factor.ndim == 2 else np.diag(factor)


def test_the_factor_is_a_root_of_the_covariance_at_the_mode(white):
    """The result needs only the sum of the clients' precisions, as in a secure sum."""
    structure = "dense" if white.posterior.position_fn.factor.ndim == 2 else "diagonal"
    factor = factor_of(white)
    expected = COVARIANCE if structure == "dense" else np.diag(1 / np.diag(TOTAL))
    rtol = 1e-4 if structure == "dense" else 1e-5
    np.testing.assert_allclose(factor @ factor.T, expected, rtol=rtol)
    mode = white.posterior.position_fn(white.position)
    scaled = (np.array([mode["a"], mode["b"]]) - MEAN) / np.sqrt(np.diag(COVARIANCE))
    assert np.abs(scaled).max() < 0.02
    summed = fedmcmc.whiten(POSTERIOR, DATA, START, structure=structure, surrogates=False)
    assert summed.surrogates is None
    chex.assert_trees_all_close(summed.metric, white.metric, rtol=1e-5, atol=1e-7)


def test_a_langevin_path_is_the_path_of_the_model_with_the_metric(white):
    """``theta' = theta + h B grad + sqrt(2 h) C xi``, with ``B = C C'``, by the same normals."""
    step = 0.3
    # The normals of the run come from the same kernel on a flat model.
    flat = fedmcmc.Posterior(lambda z: 0.0 * z["a"], lambda z, rows: 0.0 * rows[:, 0])
    path, free = (
        fedmcmc.sample(
            KEY,
            fedmcmc.lsd(posterior, step_size=step),
            DATA,
            white.position,
            num_rounds=20,
            progress=False,
        ).draws
        for posterior in (white.posterior, flat)
    )
    path, free = (np.stack([x["a"][0], x["b"][0]], 1).astype(float) for x in (path, free))
    noise = np.diff(free, axis=0, prepend=0.0)
    mode = white.posterior.position_fn(white.position)
    theta, factor = np.array([mode["a"], mode["b"]], np.float64), factor_of(white)
    for drawn, moved in zip(noise, path, strict=True):
        drift = step * factor @ factor.T @ (TOTAL @ (MEAN - theta))
        theta = theta + drift + factor @ drawn
        np.testing.assert_allclose((moved - theta) / np.sqrt(np.diag(COVARIANCE)), 0, atol=2e-3)


@pytest.mark.parametrize("step", [0.5, 1.2])
def test_the_stationary_variance_is_equal_in_all_directions(step, dense):
    """In whitened coordinates LSD has variance ``1 / (1 - h / 2)`` for any model."""
    samples = fedmcmc.sample(
        KEY,
        fedmcmc.lsd(dense.posterior, step_size=step),
        DATA,
        dense.position,
        num_rounds=60,
        thinning=60,
        num_chains=4096,
        progress=False,
    )
    gaps = np.stack([samples.draws["a"][:, 0], samples.draws["b"][:, 0]], 1) - MEAN
    z = np.linalg.solve(factor_of(dense), gaps.T).T
    assert np.abs(z_scores(z, 0.0)).max() < LIMIT
    products = np.stack([z[:, 0] ** 2, z[:, 1] ** 2, z[:, 0] * z[:, 1]], 1)
    variance = 1 / (1 - step / 2)
    assert np.abs(z_scores(products, np.array([variance, variance, 0.0]))).max() < LIMIT


def test_surrogates_are_whitened_with_the_posterior(dense):
    kernel = fedmcmc.lsd(dense.posterior, step_size=0.5)
    prediction = fedmcmc.predict_bias(kernel, DATA, dense.surrogates)
    np.testing.assert_allclose(prediction.target_covariance, np.eye(2), atol=2e-3)
    np.testing.assert_allclose(prediction.target_mean, 0, atol=0.02)
    np.testing.assert_allclose(prediction.spread, np.sqrt(1 / (1 - 0.25)), rtol=2e-3)
    place = {"a": jnp.float32(1.5), "b": jnp.float32(-0.5)}
    back = dense.whitened_position(dense.posterior.position_fn(place))
    chex.assert_trees_all_close(back, place, rtol=1e-7, atol=2e-3)
    assert "position_fn" in repr(dense.posterior)


KERNELS = {
    "fsgld": lambda w: fedmcmc.fsgld(w.posterior, w.surrogates, step_size=0.02, num_local_steps=3),
    "fa_hmc": lambda w: fedmcmc.fa_hmc(
        w.posterior, step_size=0.2, num_integration_steps=2, num_local_steps=1
    ),
    "qlsd": lambda w: fedmcmc.qlsd(w.posterior, step_size=0.1, compressor=fedmcmc.quantize(16)),
    "fed_ep": lambda w: fedmcmc.fed_ep(
        w.posterior, inference=fedmcmc.inference.exact_gaussian(), structure="dense"
    ),
}


@pytest.mark.parametrize("name", fast_and_slow(KERNELS, ["qlsd"]))
def test_draws_are_in_the_coordinates_of_the_model(name, dense):
    samples = fedmcmc.sample(
        KEY,
        KERNELS[name](dense),
        DATA,
        dense.position,
        num_rounds=600,
        num_burnin=100,
        num_chains=8,
        record=fedmcmc.Record(streams={"moments": streaming.moments()}),
        progress=False,
    )
    means = np.array([samples.draws["a"].mean(), samples.draws["b"].mean()])
    sds = np.array([samples.draws["a"].std(), samples.draws["b"].std()])
    exact = np.sqrt(np.diag(COVARIANCE))
    assert (np.abs(means - MEAN) / exact).max() < 0.25
    assert np.abs(np.log(sds / exact)).max() < 0.25
    streamed = samples.streams["moments"]
    np.testing.assert_allclose(np.mean(streamed.mean["b"]), means[1], rtol=1e-3)
    if name != "fed_ep":  # whose draws are from its Gaussian
        at_end = jax.vmap(dense.posterior.position_fn)(samples.state.broadcast.position)
        np.testing.assert_allclose(at_end["b"], samples.draws["b"][:, -1], rtol=1e-5)


# Models of NumPyro


def schools(y, group):
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(5))
    with numpyro.plate("groups", 8):
        z = numpyro.sample("z", dist.Normal())
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal((mu + tau * z)[group], 15.0), obs=y)


def normal(y):
    mean = numpyro.sample("mean", dist.Normal(0, 10))
    scale = numpyro.sample("scale", dist.HalfCauchy(5))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(mean, scale), obs=y)


def logistic(x, y):
    intercept = numpyro.sample("intercept", dist.Normal(0, 500))
    slope = numpyro.sample("slope", dist.Normal(0, 5))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Bernoulli(logits=intercept + x * slope), obs=y)


def poisson(x, y=None):
    b = numpyro.sample("b", dist.Normal(0, 2.5).expand([2]).to_event(1))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Poisson(jnp.exp(x @ b)), obs=y)


def whiten(model, rows, num_clients):
    """Return the posterior, the data and the whitened posterior of rows that clients share."""
    num = len(rows["y"])
    data = fedmcmc.FederatedData.from_arrays(rows, np.arange(num) % num_clients)
    posterior = fedmcmc.from_numpyro(model, example=data)
    return posterior, data, fedmcmc.whiten(posterior, data)


def binary_rows(num, location, scale):
    rng = np.random.default_rng(0)
    x = scale * rng.normal(size=num)
    y = (rng.random(num) < 1 / (1 + np.exp(-x / scale))).astype(int)
    return {"x": location + x, "y": y}


@pytest.mark.slow
def test_a_curvature_that_does_not_show_the_scale_warns():
    y = np.array([28.0, 8, -3, 7, -1, 1, 18, 12])
    rows = {"y": y, "group": np.arange(8)}
    data = fedmcmc.FederatedData.from_arrays(rows, np.arange(8))
    posterior = fedmcmc.from_numpyro(schools, example=data)
    with pytest.warns(UserWarning, match="no guide to the scale of tau") as caught:
        fedmcmc.whiten(posterior, data)
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize("num_rows", fast_and_slow([6, 10, 200], [6]))
def test_a_mean_that_widens_with_its_scale_warns(num_rows):
    """Given the scale the mean is normal: along its axis, six rows seem to determine it."""
    y = 2 + 3 * np.random.default_rng(0).normal(size=num_rows)
    message = "no guide 2 sds along (mean|scale): the smallest"
    with pytest.warns(UserWarning, match=message) if num_rows == 6 else nullcontext():
        whiten(normal, {"y": y}, 2)


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [30, 600])
def test_few_binary_outcomes_do_not_warn(num_rows):
    whiten(logistic, binary_rows(num_rows, 0.0, 1.0), 2)


@pytest.mark.slow
def test_the_mode_does_not_depend_on_the_location_of_covariates():
    """Newton's steps do not depend on coordinates; steps along gradients would fail."""
    modes = []
    for location in (2000, 0):
        _, _, white = whiten(logistic, binary_rows(200, location, 10), 4)
        modes.append(white.posterior.position_fn(white.position))
    away, centered = modes
    np.testing.assert_allclose(centered["slope"], away["slope"], rtol=0.01)
    intercept = away["intercept"] + 2000 * away["slope"]
    np.testing.assert_allclose(centered["intercept"], intercept, rtol=0.01)


@pytest.mark.slow
def test_the_mode_of_counts_with_large_covariates_is_found_from_near_the_origin():
    """At positions from `init_fn` their log link overflows."""
    rng = np.random.default_rng(1)
    x = np.stack([np.ones(120), 1000 * rng.normal(size=120)], 1)
    y = rng.poisson(np.exp(0.5 + 0.4 * x[:, 1] / 1000))
    posterior, data, white = whiten(poisson, {"x": x, "y": y}, 6)
    with pytest.raises(ValueError, match=r"Pass another position=: zeros"):
        fedmcmc.whiten(posterior, data, posterior.init_fn(jax.random.key(0)))
    center = white.posterior.position_fn.center
    from_zeros = fedmcmc.whiten(posterior, data, {"b": jnp.zeros(2)}).posterior.position_fn.center
    np.testing.assert_allclose(center, from_zeros, rtol=1e-5)
    np.testing.assert_allclose(center, [0.5, 0.4 / 1000], rtol=0.3)


def test_posteriors_without_a_scale_or_a_start_raise():
    flat = fedmcmc.Posterior(
        lambda theta: 0.0 * theta["a"], lambda theta, rows: -0.5 * (rows[:, 0] - theta["a"]) ** 2
    )
    for structure in ("dense", "diagonal"):
        with pytest.raises(ValueError, match="flat or rises at its mode, in a direction of b"):
            fedmcmc.whiten(flat, DATA, START, structure=structure)
    with pytest.raises(ValueError, match="has no init_fn"):
        fedmcmc.whiten(POSTERIOR, DATA)


@pytest.mark.slow
def test_the_kernel_of_numpyro_raises_for_whitened_coordinates():
    rows = {"x": np.arange(5.0) - 2, "y": np.array([0, 1, 0, 1, 1])}
    data = fedmcmc.FederatedData.from_clients([rows] * 2)

    def kernel_fn(posterior):
        return fedmcmc.lsd(fedmcmc.whiten(posterior, data).posterior, step_size=0.1)

    kernel = fedmcmc.interop.numpyro.FederatedMCMCKernel(logistic, kernel_fn)
    mcmc = numpyro.infer.MCMC(kernel, num_warmup=0, num_samples=2, progress_bar=False)
    with pytest.raises(ValueError, match=r"use fedmcmc\.sample"):
        mcmc.run(KEY, data)
