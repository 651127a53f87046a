# %% [markdown]
# # Run a federated sampler inside NumPyro's MCMC
#
# If you already work with NumPyro, you can stay there: `FederatedMCMCKernel` is a kernel for
# `numpyro.infer.MCMC`, like NUTS. Pass a `FederatedData` to `run`. Draws, `print_summary`,
# `Predictive` and ArviZ work as with NUTS.

# %%
import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, Predictive

import fedmcmc
from fedmcmc.interop.numpyro import FederatedMCMCKernel


def model(x, y=None):  # for the rows of one clinic
    level = numpyro.sample("level", dist.Normal(0, 2))
    slope = numpyro.sample("slope", dist.Normal(0, 2))
    with numpyro.plate("patients", len(x)):
        numpyro.sample("y", dist.Poisson(jax.numpy.exp(level + slope * x)), obs=y)


rng = np.random.default_rng(0)
clinics = []
for size in (40, 25, 60, 8):
    x = rng.normal(size=size)
    clinics.append({"x": x, "y": rng.poisson(np.exp(0.5 + 0.3 * x))})
data = fedmcmc.FederatedData.from_clients(clinics)

# %% [markdown]
# `FederatedMCMCKernel` builds a posterior from the model, and a function of yours builds the
# sampler from the posterior. Here all clinics send gradients in every round, and the server makes
# Langevin steps.


# %%
def kernel_fn(posterior):
    return fedmcmc.lsd(posterior, step_size=3e-4)


kernel = FederatedMCMCKernel(model, kernel_fn)
settings = dict(num_chains=4, chain_method="vectorized", progress_bar=False)
mcmc = MCMC(kernel, num_warmup=2_000, num_samples=10_000, **settings)
mcmc.run(jax.random.key(0), data)
mcmc.print_summary()

# %% [markdown]
# NumPyro does not signal the end of a run, so nothing checks the draws automatically. Call
# `diagnose`:

# %%
diagnosis = kernel.diagnose(mcmc.get_samples(group_by_chain=True), data)
print(diagnosis)
assert diagnosis.findings == ()

# %% [markdown]
# The extra fields count the bits that the clinics sent.

# %%
bits = mcmc.get_extra_fields()["bits_up"]
print(f"{int(bits[0])} bits per round from {data.num_clients} clinics together")

# %% [markdown]
# ## Compare with NUTS on pooled rows

# %%
nuts = MCMC(NUTS(model), num_warmup=500, num_samples=2_500, **settings)
nuts.run(jax.random.key(1), **data.rows)
federated, pooled = mcmc.get_samples(), nuts.get_samples()
for name in ("level", "slope"):
    shift = (federated[name].mean() - pooled[name].mean()) / pooled[name].std()
    print(
        f"{name}: the mean is {shift:+.2f} posterior sd from NUTS's, "
        f"the sd {federated[name].std() / pooled[name].std():.2f} times NUTS's"
    )
    assert abs(shift) < 0.15

# %% [markdown]
# ## Predict for new patients

# %%
new_x = np.array([-1.0, 0.0, 1.0])
counts = Predictive(model, federated)(jax.random.key(2), x=new_x)["y"]
for x, expected in zip(new_x, counts.mean(0), strict=True):
    print(f"x = {x:+.0f}: {float(expected):.2f} events expected")
