"""Whitening: every kernel on the whitened posterior is that kernel on the model with a metric."""

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
# Two parameters whose scales differ by 10,000, correlated.
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
    [
        np.tile(center, (size, 1)).astype(np.float32)
        for center, size in zip(CENTERS, SIZES, strict=True)
    ]
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
    return np.asarray(white.posterior.position_fn.factor, np.float64)


def test_the_factor_is_that_of_the_inverse_of_the_precision(white):
    factor = factor_of(white)
    if factor.ndim == 2:
        np.testing.assert_allclose(factor @ factor.T, COVARIANCE, rtol=1e-4)
    else:
        np.testing.assert_allclose(factor**2, 1 / np.diag(TOTAL), rtol=1e-5)
    at_mode = white.posterior.position_fn(white.position)
    scaled = (np.array([at_mode["a"], at_mode["b"]]) - MEAN) / np.sqrt(np.diag(COVARIANCE))
    assert np.abs(scaled).max() < 0.02


def test_it_takes_no_more_than_the_sum_of_the_precisions(white):
    """As where single answers are hidden."""
    structure = "dense" if white.posterior.position_fn.factor.ndim == 2 else "diagonal"
    alone = fedmcmc.whiten(POSTERIOR, DATA, START, structure=structure, surrogates=False)
    assert alone.surrogates is None
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7),
        alone.metric,
        white.metric,
    )


def test_a_langevin_path_is_that_of_the_model_with_the_metric(white):
    """``theta' = theta + h B grad + sqrt(2 h) C xi``, with ``B = C C'``, by the very normals."""
    step = 0.3
    kernel = fedmcmc.lsd(white.posterior, step_size=step)
    samples = fedmcmc.sample(KEY, kernel, DATA, white.position, num_rounds=20, progress=False)
    hot = samples.draws
    path = np.stack([hot["a"][0], hot["b"][0]], 1).astype(np.float64)
    factor = factor_of(white)
    dense = factor if factor.ndim == 2 else np.diag(factor)
    # The normals of the run, from the same kernel on a flat model.
    flat = fedmcmc.Posterior(lambda z: 0.0 * z["a"], lambda z, rows: 0.0 * rows[:, 0])
    walk = fedmcmc.lsd(flat, step_size=step)
    free = fedmcmc.sample(KEY, walk, DATA, white.position, num_rounds=20, progress=False).draws
    steps = np.diff(np.stack([free["a"][0], free["b"][0]], 1), axis=0, prepend=0.0)
    at_mode = white.posterior.position_fn(white.position)
    theta = np.array([at_mode["a"], at_mode["b"]], np.float64)
    for drawn, moved in zip(steps, path, strict=True):
        drift = step * dense @ dense.T @ (TOTAL @ (MEAN - theta))
        theta = theta + drift + dense @ drawn
        np.testing.assert_allclose((moved - theta) / np.sqrt(np.diag(COVARIANCE)), 0, atol=2e-3)


@pytest.mark.parametrize("step", [0.5, 1.2])
def test_the_stationary_law_is_the_same_for_every_direction(step, dense):
    """In whitened coordinates LSD has variance ``1 / (1 - h / 2)`` whatever the model."""
    white = dense
    kernel = fedmcmc.lsd(white.posterior, step_size=step)
    samples = fedmcmc.sample(
        KEY,
        kernel,
        DATA,
        white.position,
        num_rounds=60,
        thinning=60,
        num_chains=4096,
        progress=False,
    )
    found = np.stack([samples.draws["a"][:, 0], samples.draws["b"][:, 0]], 1) - MEAN
    factor = factor_of(white)
    z = np.linalg.solve(factor, found.T).T
    assert np.abs(z_scores(z, 0.0)).max() < LIMIT
    products = np.stack([z[:, 0] ** 2, z[:, 1] ** 2, z[:, 0] * z[:, 1]], 1)
    law = 1 / (1 - step / 2)
    assert np.abs(z_scores(products, np.array([law, law, 0.0]))).max() < LIMIT


def test_surrogates_are_whitened_with_the_posterior(dense):
    white = dense
    kernel = fedmcmc.lsd(white.posterior, step_size=0.5)
    predicted = fedmcmc.predict_bias(kernel, DATA, white.surrogates)
    np.testing.assert_allclose(predicted.target_covariance, np.eye(2), atol=2e-3)
    np.testing.assert_allclose(predicted.target_mean, 0, atol=0.02)
    np.testing.assert_allclose(predicted.spread, np.sqrt(1 / (1 - 0.25)), rtol=2e-3)
    back = white.whitened_position(
        white.posterior.position_fn({"a": jnp.float32(1.5), "b": jnp.float32(-0.5)})
    )
    np.testing.assert_allclose([back["a"], back["b"]], [1.5, -0.5], atol=2e-3)


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
    white = dense
    record = fedmcmc.Record(streams={"moments": streaming.moments()})
    samples = fedmcmc.sample(
        KEY,
        KERNELS[name](white),
        DATA,
        white.position,
        num_rounds=600,
        num_burnin=100,
        num_chains=8,
        record=record,
        progress=False,
    )
    means = np.array([samples.draws["a"].mean(), samples.draws["b"].mean()])
    sds = np.array([samples.draws["a"].std(), samples.draws["b"].std()])
    true = np.sqrt(np.diag(COVARIANCE))
    assert (np.abs(means - MEAN) / true).max() < 0.25
    assert np.abs(np.log(sds / true)).max() < 0.25
    streamed = samples.streams["moments"]
    np.testing.assert_allclose(np.mean(streamed.mean["b"]), means[1], rtol=1e-3)
    if name != "fed_ep":  # whose draws are from its Gaussian
        last = jax.vmap(white.posterior.position_fn)(samples.state.broadcast.position)
        np.testing.assert_allclose(last["b"], samples.draws["b"][:, -1], rtol=1e-5)


def model(y, group):
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(5))
    with numpyro.plate("groups", 8):
        z = numpyro.sample("z", dist.Normal())
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal((mu + tau * z)[group], 15.0), obs=y)


@pytest.mark.slow
def test_a_curvature_that_is_no_guide_warns():
    y = np.array([28.0, 8, -3, 7, -1, 1, 18, 12])
    data = fedmcmc.FederatedData.from_arrays({"y": y, "group": np.arange(8)}, np.arange(8))
    posterior = fedmcmc.from_numpyro(model, example=data)
    with pytest.warns(UserWarning, match="no guide to the scale of tau") as said:
        fedmcmc.whiten(posterior, data)
    assert [warning.filename for warning in said] == [__file__]


@pytest.mark.parametrize(
    "num_rows, warns",
    [
        (6, True),
        pytest.param(10, False, marks=pytest.mark.slow),
        pytest.param(200, False, marks=pytest.mark.slow),
    ],
)
def test_a_mean_that_widens_with_its_scale_warns(num_rows, warns):
    """Given the scale the mean is normal: no fall along its axis shows what six rows leave open."""

    def rows_of(y):
        mean = numpyro.sample("mean", dist.Normal(0, 10))
        scale = numpyro.sample("scale", dist.HalfCauchy(5))
        with numpyro.plate("rows", len(y)):
            numpyro.sample("y", dist.Normal(mean, scale), obs=y)

    y = 2 + 3 * np.random.default_rng(0).normal(size=num_rows)
    data = fedmcmc.FederatedData.from_arrays({"y": y}, np.arange(num_rows) % 2)
    posterior = fedmcmc.from_numpyro(rows_of, example=data)
    if warns:
        with pytest.warns(UserWarning, match="no guide 2 sds along (mean|scale): the smallest"):
            fedmcmc.whiten(posterior, data)
    else:
        fedmcmc.whiten(posterior, data)


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [30, 600])
def test_a_few_binary_outcomes_do_not(num_rows):
    rng = np.random.default_rng(1)
    x = rng.normal(size=num_rows)
    y = (rng.random(num_rows) < 1 / (1 + np.exp(0.5 - x))).astype(int)
    data = fedmcmc.FederatedData.from_arrays({"x": x, "y": y}, np.arange(num_rows) % 2)
    fedmcmc.whiten(fedmcmc.from_numpyro(year, example=data), data)


def year(x, y):
    intercept = numpyro.sample("intercept", dist.Normal(0, 500))
    slope = numpyro.sample("slope", dist.Normal(0, 5))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Bernoulli(logits=intercept + x * slope), obs=y)


@pytest.mark.slow
def test_the_mode_of_covariates_that_are_not_centered_is_that_of_centered_ones():
    """Steps of Newton's method do not depend on coordinates; gradients alone get nowhere here."""
    rng = np.random.default_rng(0)
    x = 2000 + 10 * rng.normal(size=200)
    y = (rng.random(200) < 1 / (1 + np.exp(-(x - 2000) / 10))).astype(int)
    found = {}
    for shift in (2000, 0):
        rows = {"x": x - shift, "y": y}
        data = fedmcmc.FederatedData.from_arrays(rows, np.arange(200) % 4)
        white = fedmcmc.whiten(fedmcmc.from_numpyro(year, example=data), data)
        found[shift] = white.posterior.position_fn(white.position)
    slope = found[2000]["slope"]
    np.testing.assert_allclose(found[0]["slope"], slope, rtol=0.01)
    np.testing.assert_allclose(
        found[0]["intercept"], found[2000]["intercept"] - 2000 * slope, rtol=0.01
    )


@pytest.mark.slow
def test_the_mode_of_counts_with_large_covariates_is_found_from_near_the_origin():
    """From what `init_fn` draws their log link overflows."""
    rng = np.random.default_rng(1)
    x = np.stack([np.ones(120), 1000 * rng.normal(size=120)], 1)
    y = rng.poisson(np.exp(0.5 + 0.4 * x[:, 1] / 1000))

    def counts(x, y=None):
        b = numpyro.sample("b", dist.Normal(0, 2.5).expand([2]).to_event(1))
        with numpyro.plate("rows", len(x)):
            numpyro.sample("y", dist.Poisson(jnp.exp(x @ b)), obs=y)

    data = fedmcmc.FederatedData.from_arrays({"x": x, "y": y}, np.arange(120) % 6)
    posterior = fedmcmc.from_numpyro(counts, example=data)
    drawn = posterior.init_fn(jax.random.key(0))
    with pytest.raises(ValueError, match=r"Pass another position=: zeros"):
        fedmcmc.whiten(posterior, data, drawn)
    center = fedmcmc.whiten(posterior, data).posterior.position_fn.center
    by_zeros = fedmcmc.whiten(posterior, data, {"b": jnp.zeros(2)}).posterior.position_fn.center
    np.testing.assert_allclose(center, by_zeros, rtol=1e-5)
    np.testing.assert_allclose(center, [0.5, 0.4 / 1000], rtol=0.3)


def test_what_has_no_scale_is_refused():
    flat = fedmcmc.Posterior(
        lambda theta: 0.0 * theta["a"], lambda theta, rows: -0.5 * (rows[:, 0] - theta["a"]) ** 2
    )
    for structure in ("dense", "diagonal"):
        with pytest.raises(ValueError, match="flat or rises at its mode, in a direction of b"):
            fedmcmc.whiten(flat, DATA, START, structure=structure)
    with pytest.raises(ValueError, match="has no init_fn"):
        fedmcmc.whiten(POSTERIOR, DATA)
    white = fedmcmc.whiten(POSTERIOR, DATA, START)
    assert "position_fn" in repr(white.posterior)


@pytest.mark.slow
def test_numpyros_driver_refuses_whitened_coordinates():
    data = fedmcmc.FederatedData.from_clients(
        [{"x": np.arange(5.0) - 2, "y": np.array([0, 1, 0, 1, 1])}] * 2
    )

    def kernel_fn(posterior):
        return fedmcmc.lsd(fedmcmc.whiten(posterior, data).posterior, step_size=0.1)

    kernel = fedmcmc.interop.numpyro.FederatedMCMCKernel(year, kernel_fn)
    mcmc = numpyro.infer.MCMC(kernel, num_warmup=0, num_samples=2, progress_bar=False)
    with pytest.raises(ValueError, match=r"use fedmcmc\.sample"):
        mcmc.run(KEY, data)
