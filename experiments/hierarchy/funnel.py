"""Few hospitals that hardly differ: Langevin dynamics with centered and with shifted effects."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array

import fedmcmc
from experiments import checks
from experiments.hierarchy import methods
from experiments.tidy import Row
from fedmcmc import hierarchy, rounds

__all__ = ["Config", "exact", "rows", "run"]

METRICS = (
    "diverged",
    "error_of_mean_mu",
    "sd_ratio_mu",
    "error_of_mean_log_tau",
    "sd_ratio_log_tau",
)
FURTHEST = 50.0
"""A chain whose ``log tau`` or `mu` went further has diverged."""


@dataclass(frozen=True)
class Config:
    """Settings.

    Attributes
    ----------
    num_hospitals, rows_per_hospital, spread
        Number and size of the simulated hospitals, and the standard deviation of their effects.
        Outcomes have a standard deviation of one around their hospital's effect.
    step_sizes
        Step sizes of Langevin dynamics, without a metric.
    """

    seed: int = 0
    num_hospitals: int = 4
    rows_per_hospital: int = 25
    spread: float = 0.05
    step_sizes: tuple[float, ...] = (0.002, 0.01)
    num_chains: int = 100
    num_rounds: int = 4000
    num_burnin: int = 500

    def __post_init__(self) -> None:
        checks.at_least(2, self, "num_hospitals", "num_chains")
        checks.at_least(1, self, "rows_per_hospital")
        checks.positive(self, "spread")
        for value in self.step_sizes:
            checks.require(value > 0, "step_sizes must be positive", value)
        checks.require(
            0 <= self.num_burnin < self.num_rounds,
            "num_burnin must be below num_rounds",
            self.num_burnin,
        )


def model(y=None):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    effect = numpyro.sample("effect", dist.Normal(mu, tau), infer={"local": True})
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(effect, 1), obs=y)


def exact(hospitals: list[dict[str, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Return means and sds of `mu` and ``log tau`` on a grid, effects integrated out."""
    mu, log_tau = np.meshgrid(np.linspace(-3, 3, 801), np.linspace(-14, 3, 1701), indexing="ij")
    tau = np.exp(log_tau)
    log_p = -(mu**2) / 2 - tau**2 / 2 + log_tau
    for hospital in hospitals:
        y = hospital["y"].astype(float)
        variance = tau**2 + 1 / len(y)
        log_p -= (y.mean() - mu) ** 2 / variance / 2 + np.log(variance) / 2
    p = np.exp(log_p - log_p.max())
    p /= p.sum()
    values = np.stack([mu, log_tau])
    mean = (p * values).sum((1, 2))
    return mean, np.sqrt((p * values**2).sum((1, 2)) - mean**2)


def run(config: Config, out: Path) -> dict[str, Any]:
    """Run all chains and compare their moments with a grid's."""
    rng = np.random.default_rng(config.seed)
    effects = rng.normal(0, config.spread, config.num_hospitals)
    hospitals = [
        {"y": rng.normal(effect, 1, config.rows_per_hospital).astype(np.float32)}
        for effect in effects
    ]
    data = fedmcmc.FederatedData.from_clients(hospitals)
    mean, sd = exact(hospitals)
    posteriors = {
        name: fedmcmc.from_numpyro(model, example=data, centered=centered)
        for name, centered in (("centered", 1.0), ("shifted", 0.0))
    }
    draw = hierarchy.conjugate()  # exact draws of the effects, so that nothing else is off
    half = fedmcmc.bernoulli(0.5)
    kernels: dict[tuple[str, float | None], Any] = {
        ("lsd" if name == "shifted" else "lsd, centered", step): fedmcmc.lsd(
            posterior, step_size=step, refresh=draw
        )
        for name, posterior in posteriors.items()
        for step in config.step_sizes
    }
    kernels |= {
        ("fed_gibbs", None): fedmcmc.fed_gibbs(posteriors["centered"], refresh=draw),
        ("fed_gibbs, half absent", None): fedmcmc.fed_gibbs(
            posteriors["centered"], refresh=draw, participation=half
        ),
        ("lsd on marginal", config.step_sizes[-1]): fedmcmc.lsd(
            fedmcmc.marginal(posteriors["shifted"]), step_size=config.step_sizes[-1]
        ),
    }
    key = jax.random.key(config.seed)
    table = [
        {"method": method, "step_size": step}
        | compared(draws(kernel, data, key, config), mean, sd)
        | {"verdict": None}
        for (method, step), kernel in kernels.items()
    ]
    fitted = fedmcmc.fit(posteriors["shifted"], data, rng_key=key, progress=False)
    fitted_draws = np.stack([np.asarray(fitted.samples.draws[name]) for name in ("mu", "tau")], -1)
    verdict = fitted.verdict.partition(":")[0]
    table.append(
        {"method": "fit", "step_size": None}
        | compared(fitted_draws, mean, sd)
        | {"verdict": verdict}
    )
    names = ("mu", "log_tau")
    exact_moments = {
        "mean": dict(zip(names, mean, strict=True)),
        "sd": dict(zip(names, sd, strict=True)),
    }
    return {"table": table, "exact": exact_moments}


def rows(metrics: Mapping[str, Any]) -> list[Row]:
    """Return the tidy rows of a run."""
    tidy = [
        Row("grid", name, value, {"parameter": parameter})
        for name, moments in metrics["exact"].items()
        for parameter, value in moments.items()
    ]
    for line in metrics["table"]:
        settings = {} if line["step_size"] is None else {"step_size": line["step_size"]}
        tidy += methods.verdict_rows(line["method"], line["verdict"])
        for name in METRICS:
            value = math.nan if line[name] is None else line[name]
            tidy.append(Row(line["method"], name, value, settings))
    return tidy


def draws(kernel: Any, data: fedmcmc.FederatedData, key: Array, config: Config) -> np.ndarray:
    """Return draws of `mu` and ``log tau``, ``[chains, draws, 2]``; one chain stops no other."""
    start = {"mu": jnp.zeros(()), "tau": jnp.log(jnp.asarray(0.5))}

    @jax.jit
    @jax.vmap
    def chain(chain_key: Array) -> Array:
        state = kernel.init(chain_key, start, data)
        _, records = rounds.run_rounds(
            kernel, data, chain_key, state, config.num_rounds, thinning=5
        )
        return jnp.stack([records.draws["mu"], records.draws["tau"]], -1)

    drawn = chain(jax.random.split(key, config.num_chains))
    return np.asarray(drawn[:, config.num_burnin // 5 :], np.float64)


def compared(drawn: np.ndarray, mean: np.ndarray, sd: np.ndarray) -> dict[str, float]:
    """Return the share of chains that diverged, and errors of the moments of the other chains.

    Errors of means are in standard deviations; standard deviations are ratios. All are NaN if all
    chains diverged.
    """
    finite = (np.isfinite(drawn) & (np.abs(drawn) < FURTHEST)).all((1, 2))
    values = [math.nan] * 4
    if finite.any():
        gaps = (drawn[finite].mean((0, 1)) - mean) / sd
        ratios = drawn[finite].std((0, 1)) / sd
        values = [gaps[0], ratios[0], gaps[1], ratios[1]]
    numbers = (1 - finite.mean(), *values)
    return {name: float(number) for name, number in zip(METRICS, numbers, strict=True)}
