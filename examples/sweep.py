# %% [markdown]
# # Find a small enough step size by a sweep
#
# You run a sampler on a grid of settings and seeds by one call of `sweep`. Settings that differ
# only by numbers share one compiled program and run together. The sweep checks the draws of every
# point of the grid. It warns here, correctly: most of these steps are too large.

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
# `swept.dataset` is an `xarray.Dataset` with the settings as dimensions. The posterior is known
# here, so we can compute errors: the error of the mean in posterior standard deviations (sds), and
# the sd of the draws divided by the posterior sd.

# %%
precision = data.num_rows + 1 / 100
mean, sd = np.asarray(data.rows).sum(0) / precision, precision**-0.5
draws = swept.dataset["theta"]
over = [dim for dim in draws.dims if dim in ("seed", "chain", "draw")]
mean_error = np.abs(draws.mean(over) - mean).max(draws.dims[-1]) / sd
width = draws.std(over).mean(draws.dims[-1]) / sd
print(mean_error.to_pandas().round(2))
print(width.to_pandas().round(2))

# %% [markdown]
# DSGLD visits one client at a time and multiplies its gradient by the number of clients. These
# clients differ, so the draws vary too much, and more so with larger steps and with more steps per
# visit.

# %%
assert (width.sel(step_size=3e-3) > width.sel(step_size=1e-4)).all()
assert (width.sel(num_local_steps=10) > width.sel(num_local_steps=1)).all()
best = width.sel(step_size=1e-4, num_local_steps=1).item()
worst = width.sel(step_size=3e-3, num_local_steps=10).item()
print(f"sd of the draws over posterior sd: {best:.2f} at best, {worst:.1f} at worst")

# %% [markdown]
# `predict_bias` predicts these errors without a run, from Gaussian approximations of the clients,
# which are exact here:

# %%
surrogates = fedmcmc.surrogates.taylor(posterior, data, jnp.zeros(2))
for step_size, num_local_steps in ((1e-4, 1), (3e-3, 10)):
    predicted = fedmcmc.predict_bias(kernel_fn(step_size, num_local_steps), data, surrogates)
    measured = width.sel(step_size=step_size, num_local_steps=num_local_steps).item()
    print(
        f"step {step_size:g}, {num_local_steps} per visit: sds {predicted.spread.mean():.2f} times "
        f"the posterior's by prediction, {measured:.2f} in the runs"
    )
    assert abs(np.log(predicted.spread.mean() / measured)) < 0.1
