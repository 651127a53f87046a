"""Theorem 4.1, section 4.1 and Proposition 4.5 of Liang et al. (2024), by the exact law."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedmcmc
from experiments.fa_hmc import dimension, dimension_law, local_steps_law
from experiments.fa_hmc.dimension_law import Scalars
from experiments.fa_hmc.grids import run_grid
from experiments.fa_hmc.local_steps_law import CASES
from experiments.figures import COLORS, figure

__all__ = ["Config", "draw", "run"]

SCHEDULES = ("constant", "falling")


@dataclass(frozen=True)
class Config(local_steps_law.Settings):
    """Settings; see `experiments.fa_hmc.local_steps_law.Settings`."""


def run(config: Config, out: Path) -> dict[str, Any]:
    """Compute rounds by the law, and by simulation at the best step sizes; write the figure."""
    clients = dimension.clients_of(config.of_figure())
    metrics = {
        "table": _over_local_steps(config, clients),
        "noises": _over_noises(config, clients),
        "schedules": _over_tolerances(config, clients),
        "tolerance": config.tolerance,
        "dim": config.dim,
        "gradient_noise": config.gradient_noise,
        "rho": config.rho,
    }
    return metrics | {"figures": draw(metrics, out)}


def _over_noises(config: Config, clients: Scalars) -> list[dict[str, Any]]:
    level = local_steps_law.level(config, clients)
    steps, table = local_steps_law.grid(config, clients), []
    for noise in config.noises:
        row: dict[str, Any] = {"noise": noise}
        for num in config.local_steps:
            case = {"noise": noise, "rho": 1.0}
            found = local_steps_law.first(config, clients, steps, num, level, case)
            row[f"T = {num}"] = None if found is None else found[0]
        table.append(row)
    return table


def _over_local_steps(config: Config, clients: Scalars) -> list[dict[str, Any]]:
    level = local_steps_law.level(config, clients)
    steps, table = local_steps_law.grid(config, clients), []
    for num in config.local_steps:
        row: dict[str, Any] = {"T": num}
        for name in CASES:
            found = local_steps_law.first(config, clients, steps, num, level, config.case(name))
            row[name] = None if found is None else found[0]
            step = None if found is None else float(steps[found[1]])
            row[f"step, {name}"] = step
            row[f"measured, {name}"] = (
                None
                if found is None or num > config.simulated
                else _measured(config, clients, step, num, level, found[0], name)
            )
        # At one step size for all T, as in Figure 1(c): that which is best for T = 1.
        fixed = (table[0] if table else row)["step, noisy gradients"]
        found = local_steps_law.first(
            config, clients, np.array([fixed]), num, level, config.case("noisy gradients")
        )
        row["noisy gradients, one step size"] = None if found is None else found[0]
        table.append(row)
    return table


def _over_tolerances(config: Config, clients: Scalars) -> list[dict[str, Any]]:
    sd = math.sqrt(dimension_law.target(clients)[1])
    steps, case = local_steps_law.grid(config, clients), config.case("noisy gradients")
    first, halving = (x.ravel() for x in np.meshgrid(steps[-60:], np.geomspace(0.3, 3000, 25)))
    table = []
    for tolerance in config.tolerances:
        row: dict[str, Any] = {"tolerance": tolerance}
        constant = local_steps_law.first(
            config, clients, steps, config.schedule_local_steps, tolerance * sd, case
        )
        row["constant"] = None if constant is None else constant[0]

        def falling(round_: int) -> tuple[Any, Any, Any]:
            return dimension_law.map_of_round(
                clients,
                step_size=first / np.sqrt(1 + round_ / halving),
                num_steps=config.num_integration_steps,
                num_local_steps=config.schedule_local_steps,
                **case,
            )

        most = config.most_rounds if constant is None else constant[0]
        found = dimension_law.first_to(
            clients, falling, tolerance * sd, start=config.start, most=most
        )
        row["falling"] = None if found is None else found[0]
        row["first step"] = None if found is None else float(first[found[1]])
        row["halved after"] = None if found is None else float(halving[found[1]])
        table.append(row)
    told = [row for row in table if row["falling"] is not None and row["tolerance"] >= 0.1]
    for row in told[-1:]:  # the smallest distance that so many simulated numbers can tell
        row["measured, falling"] = _measured(
            config,
            clients,
            fedmcmc.tuning.inverse_sqrt_schedule(row["first step"], row["halved after"]),
            config.schedule_local_steps,
            row["tolerance"] * sd,
            row["falling"],
            "noisy gradients",
        )
    return [row | {"measured, falling": row.get("measured, falling")} for row in table]


def _measured(
    config: Config,
    clients: Scalars,
    step_size: Any,
    num_local_steps: int,
    level: float,
    expected: int,
    case: str,
) -> int | None:
    """Return rounds to the level of simulated chains, of whose coordinates the law is estimated."""
    posterior, data = dimension.federation(clients, config.dim)
    settings = config.case(case)
    draws = run_grid(
        jax.random.key(config.seed),
        lambda _: fedmcmc.fa_hmc(
            posterior,
            step_size=step_size,
            num_integration_steps=config.num_integration_steps,
            num_local_steps=num_local_steps,
            rho=settings["rho"],
            gradient_noise=settings["noise"],
            gradients="reuse",
        ),
        data,
        jnp.full(config.dim, config.start),
        [0.0],
        num_chains=config.num_runs,
        num_rounds=int(1.2 * expected) + 5,
    )[0]
    mean, variance = draws.mean((0, 2)), draws.var((0, 2))
    right_mean, right_variance = dimension_law.target(clients)
    away = np.hypot(mean - right_mean, np.sqrt(variance) - math.sqrt(right_variance))
    found = dimension_law.rounds_to(away, level)
    return None if found is None else found + 1


def draw(metrics: dict[str, Any], out: Path) -> list[dict[str, str]]:
    """Write the figure of a run; return its file and caption."""
    table, schedules = metrics["table"], metrics["schedules"]
    with figure(out / "local_steps.png", 1, 2) as (_, axes):
        left, right = axes[0]
        left.set(xscale="log", yscale="log", xlabel="local steps T", ylabel="rounds")
        numbers = [row["T"] for row in table]
        places: dict[str, Any] = {
            "vanilla": dict(color=COLORS["green"], ls="-", lw=3, marker="x"),
            "noisy gradients": dict(color=COLORS["orange"], ls="-", marker="x"),
            # Nearly the vanilla line: dashes and a smaller marker show both.
            "own momenta": dict(color=COLORS["black"], ls="--", lw=1.2, marker="+"),
        }
        for name, style in places.items():
            law, measured = (
                np.array([row[column] for row in table], float)
                for column in (name, f"measured, {name}")
            )
            marker = style.pop("marker")
            left.plot(numbers, law, label=name, **style)
            left.plot(numbers, measured, marker, color=style["color"], ms=6)
        one = np.array([row["noisy gradients, one step size"] for row in table], float)
        left.plot(numbers, one, "o:", color=COLORS["red"], ms=4, label="noisy, one step size")
        never = [t for t, rounds in zip(numbers, one, strict=True) if np.isnan(rounds)]
        if never:
            top = 2 * np.nanmax(one)
            left.plot(never, [top] * len(never), "^", color=COLORS["red"], ms=5, mfc="none")
            left.annotate(
                "never arrives", (never[0], top), (0, 6), textcoords="offset points", fontsize=8
            )
            left.set_ylim(top=2 * top)
        left.plot([], [], "kx", label="simulated")
        right.set(xscale="log", xlabel="tolerance", ylabel="rounds times tolerance")
        for name, color in zip(SCHEDULES, ("orange", "blue"), strict=True):
            points = [(row["tolerance"], row[name]) for row in schedules if row[name] is not None]
            right.plot(
                [t for t, _ in points],
                [t * r for t, r in points],
                "o-",
                color=COLORS[color],
                label=f"{name} step size",
            )
        right.set_ylim(bottom=0)
        for place in (left, right):
            place.legend()
    caption = (
        "Left: rounds to the tolerance by the exact law, at the best step size for each T, and of "
        f"simulated chains (dimension {metrics['dim']}); vanilla and own momenta nearly coincide. "
        "The dotted line keeps the step size that is best for T = 1; hollow triangles: chains that "
        "never arrive. Right: rounds to a distance "
        "per coordinate, times that distance, with noisy gradients: a line that rises to the left "
        "is a logarithm."
    )
    return [{"file": "local_steps.png", "caption": caption}]
