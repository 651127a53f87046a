# %% [markdown]
# # A sweep over step sizes
#
# Which step is small enough? A grid of settings and seeds is one call. Settings that differ by
# numbers alone share one compiled program and are run together, so that a sweep costs little more
# than a run. A sweep judges the draws of every point, and warns: here rightly, as we shall see.

# %%
import jax
import jax.numpy as jnp
import numpy as np

import fedmcmc

rng = np.random.default_rng(0)
clients = [rng.normal(center, 1, size=(size, 2)) for center, size in ((0, 40), (1, 20), (3, 10))]
data = fedmcmc.FederatedData.from_clients(clients)
posterior = fedmcmc.Posterior(
    lambda theta: -0.5 * jnp.sum(theta**2) / 100,
    lambda theta, x: -0.5 * jnp.sum((x - theta) ** 2, axis=-1),
)


def kernel_fn(step_size, num_local_steps):
    return fedmcmc.dsgld(posterior, step_size=step_size, num_local_steps=num_local_steps)


swept = fedmcmc.sweep(
    jax.random.key(0),
    kernel_fn,
    {"step_size": [1e-4, 3e-4, 1e-3, 3e-3], "num_local_steps": [1, 10]},
    data,
    jnp.full(2, 0.9),
    num_rounds=20_000,
    num_burnin=2_000,
    thinning=10,
    num_seeds=4,
    progress=False,
)
print(swept)

# %% [markdown]
# What was kept is an `xarray.Dataset` with the settings as dimensions. The posterior is known
# here, so that errors can be told: the mean of the draws in posterior sds, and their sd over the
# posterior's.

# %%
precision = data.num_rows + 1 / 100
mean, sd = np.asarray(data.rows).sum(0) / precision, precision**-0.5
draws = swept.dataset["theta"]
over = [dim for dim in draws.dims if dim in ("seed", "chain", "draw")]
off = np.abs(draws.mean(over) - mean).max(draws.dims[-1]) / sd
width = draws.std(over).mean(draws.dims[-1]) / sd
print(off.to_pandas().round(2))
print(width.to_pandas().round(2))

# %% [markdown]
# DSGLD visits one client at a time and multiplies its gradient by the number of clients. Clients
# differ here, so that draws are too wide, and more so with larger steps and with more of them per
# visit.

# %%
assert (width.sel(step_size=3e-3) > width.sel(step_size=1e-4)).all()
assert (width.sel(num_local_steps=10) > width.sel(num_local_steps=1)).all()
best = width.sel(step_size=1e-4, num_local_steps=1).item()
worst = width.sel(step_size=3e-3, num_local_steps=10).item()
print(f"sds over the posterior's: {best:.2f} at best, {worst:.1f} at worst")

# %% [markdown]
# `predict_bias` says the same before anything is run, from Gaussian approximations of the clients
# (which are exact here):

# %%
surrogates = fedmcmc.surrogates.taylor(posterior, data, jnp.zeros(2))
for step_size, num_local_steps in ((1e-4, 1), (3e-3, 10)):
    predicted = fedmcmc.predict_bias(kernel_fn(step_size, num_local_steps), data, surrogates)
    found = width.sel(step_size=step_size, num_local_steps=num_local_steps).item()
    print(
        f"step {step_size:g}, {num_local_steps} per visit: sds {predicted.spread.mean():.2f} times "
        f"the posterior's by prediction, {found:.2f} in the runs"
    )
    assert abs(np.log(predicted.spread.mean() / found)) < 0.1
