"""FSGLD under `numpyro.infer.MCMC` against NUTS on the pooled rows."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS

import fedmcmc
from fedmcmc.interop.numpyro import FederatedMCMCKernel

NOISE = 2.0


def lognormal_rate(x, y):
    """Gaussian in unconstrained space, with a constrained site."""
    b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
    r = numpyro.sample("r", dist.LogNormal(0.0, 1.0))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ b + jnp.log(r), NOISE), obs=y)


def summarise(draws):
    """Return mean, sd and effective sample size of ``[num_chains, num_draws, d]``."""
    return draws.mean((0, 1)), draws.std((0, 1)), effective_sample_size(draws)


@pytest.mark.slow
def test_fsgld_under_mcmc_agrees_with_nuts_on_the_pooled_rows():
    """Means within 5 standard errors of both chains; sds too, once its known excess is taken off.

    In ``z = (b, log r)`` the likelihood of client s is Gaussian with precision ``A_s`` and the
    prior standard normal. With exact surrogates every local step is one of Langevin dynamics on
    the posterior, whose law has the posterior's mean and covariance
    ``inv(P (I - step_size P / 2))``, ``P = I + sum A_s``: a little wide, by a known factor.
    """
    rng = np.random.default_rng(3)
    trees = []
    for shift, n in ((-1.0, 8), (0.5, 15), (2.0, 6)):  # clients that disagree
        x = rng.normal(size=(n, 2))
        trees.append({"x": x, "y": x @ [1.0, -0.5] + shift + NOISE * rng.normal(size=n)})
    designs = [np.column_stack([tree["x"], np.ones(len(tree["y"]))]) for tree in trees]
    precisions = np.array([design.T @ design / NOISE**2 for design in designs])
    means = np.array(
        [np.linalg.lstsq(a, t["y"], rcond=None)[0] for a, t in zip(designs, trees, strict=True)]
    )
    surrogates = fedmcmc.Gaussian.from_moments(
        {"b": means[:, :2], "r": means[:, 2]}, np.linalg.inv(precisions)
    )
    precision = np.eye(3) + precisions.sum(0)
    step_size = 0.1 / np.linalg.eigvalsh(precision).max()
    excess = np.sqrt(
        np.diag(np.linalg.inv(precision @ (np.eye(3) - step_size * precision / 2)))
        / np.diag(np.linalg.inv(precision))
    )

    def kernel_fn(posterior):
        return fedmcmc.fsgld(posterior, surrogates, step_size=step_size, num_local_steps=10)

    data = fedmcmc.FederatedData.from_clients(trees)
    federated = MCMC(
        FederatedMCMCKernel(lognormal_rate, kernel_fn),
        num_warmup=100, num_samples=4000, num_chains=4, chain_method="vectorized",
        progress_bar=False,
    )  # fmt: skip
    federated.run(jax.random.key(0), data)
    pooled = MCMC(
        NUTS(lognormal_rate),
        num_warmup=300, num_samples=2000, num_chains=4, chain_method="vectorized",
        progress_bar=False,
    )  # fmt: skip
    pooled.run(jax.random.key(1), **data.rows)

    def draws(mcmc):
        samples = mcmc.get_samples(group_by_chain=True)
        return np.concatenate([samples["b"], np.log(samples["r"])[..., None]], axis=-1)

    (mean, sd, ess), (mean_, sd_, ess_) = summarise(draws(federated)), summarise(draws(pooled))
    assert ess.min() > 1000 and ess_.min() > 1000
    z = (mean - mean_) / np.sqrt(sd**2 / ess + sd_**2 / ess_)
    assert np.abs(z).max() < 5, z
    z = (sd / excess - sd_) / np.sqrt(sd**2 / (2 * ess) + sd_**2 / (2 * ess_))
    assert np.abs(z).max() < 5, z
