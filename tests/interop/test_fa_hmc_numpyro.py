"""FA-HMC under `numpyro.infer.MCMC` against NUTS on pooled rows: predicted and observed bias."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC, NUTS

import fedmcmc
from fedmcmc.interop.numpyro import FederatedMCMCKernel


def visits(x, y):
    """Counts of visits, whose posterior is not Gaussian."""
    level = numpyro.sample("level", dist.Normal(0, 1))
    slope = numpyro.sample("slope", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(level + x @ slope)), obs=y)


def build_clients():
    """Return sites whose covariates differ in scale, and so their curvatures."""
    rng = np.random.default_rng(1)
    trees = []
    for scale, n in (([1.0, 0.2], 30), ([0.2, 1.0], 25), ([0.6, 0.6], 45)):
        x = rng.normal(size=(n, 2)) * scale
        trees.append({"x": x, "y": rng.poisson(np.exp(0.3 + x @ [0.5, -0.8])).astype(float)})
    return trees


def stack_draws(mcmc):
    samples = mcmc.get_samples(group_by_chain=True)
    return np.concatenate([samples["level"][..., None], samples["slope"]], axis=-1)


def run(kernel, seed, *arguments, **keywords):
    mcmc = MCMC(
        kernel,
        num_warmup=500,
        num_samples=4000,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(seed), *arguments, **keywords)
    return stack_draws(mcmc)


@pytest.mark.slow
def test_fa_hmc_differs_from_nuts_by_the_predicted_bias():
    data = fedmcmc.FederatedData.from_clients(build_clients())
    posterior = fedmcmc.from_numpyro(visits, example=data)
    start = posterior.init_fn(jax.random.key(0))
    mode = fedmcmc.surrogates.mode(posterior, data, start)
    surrogates = fedmcmc.surrogates.taylor(posterior, data, mode.position)
    truth = run(NUTS(visits), 1, **data.rows)
    mean, sd = truth.mean((0, 1)), truth.std((0, 1))

    biases = {}
    for name, settings in {
        "close": dict(step_size=0.02, num_integration_steps=3, num_local_steps=1),
        "far": dict(step_size=0.03, num_integration_steps=3, num_local_steps=60),
        "corrected": dict(
            step_size=0.03, num_integration_steps=3, num_local_steps=5, control_variate=True
        ),
    }.items():

        def kernel_fn(posterior_, settings=settings):
            return fedmcmc.fa_hmc(posterior_, **settings)

        predicted = fedmcmc.predict_bias(kernel_fn(posterior), data, surrogates)
        draws = run(FederatedMCMCKernel(visits, kernel_fn), 0, data)
        biases[name] = predicted.bias, (draws.mean((0, 1)) - mean) / sd

    predicted, observed = biases["close"]
    assert np.abs(predicted).max() < 0.02 and np.abs(observed).max() < 0.1
    predicted, observed = biases["far"]
    assert np.abs(predicted).max() > 0.3
    np.testing.assert_allclose(observed, predicted, atol=0.15)
    predicted, observed = biases["corrected"]
    assert np.abs(predicted).max() < 0.01 and np.abs(observed).max() < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("method", ["vectorized", "sequential"])
def test_diverged_chains_warn_once_per_run_after_the_prediction(method):
    def model(x):
        mean = numpyro.sample("mean", dist.Normal(0, 10))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("x", dist.Normal(mean, 0.1), obs=x)

    def kernel_fn(posterior):
        return fedmcmc.fa_hmc(posterior, step_size=9.0, num_integration_steps=3, num_local_steps=2)

    data = fedmcmc.FederatedData.from_clients([np.ones(3), np.zeros(5)])
    surrogates = fedmcmc.Gaussian.from_moments(
        {"mean": jnp.array([1.0, 0.0])}, variance={"mean": jnp.array([0.01 / 3, 0.002])}
    )
    kernel = FederatedMCMCKernel(model, kernel_fn, surrogates=surrogates)
    mcmc = MCMC(
        kernel,
        num_warmup=0,
        num_samples=30,
        num_chains=2,
        chain_method=method,
        progress_bar=False,
    )
    with pytest.warns(RuntimeWarning) as caught:
        mcmc.run(jax.random.key(0), data)
        jax.effects_barrier()
    messages = [str(w.message) for w in caught]
    assert "the kernel diverges" in messages[0]
    times = {"vectorized": 1, "sequential": 2}[method]  # separate runs in sequence
    assert sum("A chain turned non-finite in round" in line for line in messages) == times
    assert bool(mcmc.get_extra_fields()["diverging"][-1])
