"""Theorem 4.1, section 4.1 and Proposition 4.5 of Liang et al. (2024), by the exact law."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedmcmc
from experiments import checks, output
from experiments.checks import require
from experiments.fa_hmc import dimension, dimension_law
from experiments.fa_hmc.dimension_law import Scalars
from experiments.fa_hmc.grids import run_grid
from experiments.figures import COLORS, figure

__all__ = [
    "CASES",
    "DEEP",
    "PAPER",
    "TITLE",
    "Config",
    "about",
    "by_noise",
    "commentary",
    "draw",
    "exact_at_one_step",
    "fewest_at",
    "listed",
    "nearest_to_u",
    "over_logarithm",
    "run",
    "turning",
]

TITLE = "Section 4.1 and Proposition 4.5: local steps, noise, momenta and falling steps, by the law"
PAPER = """
Theorem 4.1 bounds the rounds from above: with noisy gradients or momenta that are not shared they
"may initially decrease and then increase" with the number of local steps `T`, a U, "under proper
tuning". With exact gradients and shared momenta ("vanilla") they have "limited variations", by an
upper bound and, for some target, a lower one, and a small `T` saves work (section 4.1). A step size
that falls with the rounds saves a logarithmic factor of the bound (Proposition 4.5). The paper
varies `T` with noisy gradients at one step size (Figure 1(c)), and with minibatches and a step size
tuned for each `T` (Figures 4, 5 and 7). It varies `T` neither with exact gradients nor with momenta
that differ, and its steps do not fall. Here the clients are Gaussians, those of our Figure 2, so
that the law after every round is known; step sizes are the best of a grid for each `T` and each
tolerance; the theorem, too, has "proper tuning". The paper's falling step is in its supplement,
which our copy lacks; ours is `inverse_sqrt_schedule`, over a grid of its first step and the round
in which its square has halved.
"""
DEEP = 1.1  # times the fewest rounds, which both ends of a U have at least
CASES = ("vanilla", "noisy gradients", "own momenta")
SCHEDULES = ("constant", "falling")


@dataclass(frozen=True)
class Config:
    """Settings; the paper states none of these.

    Attributes
    ----------
    dim, num_clients, means, variances, num_integration_steps, start
        As in Figure 2 (`fa_hmc/dimension`).
    local_steps
        ``T`` that are tried.
    gradient_noise
        Standard deviation of the noise on each coordinate of a client's gradient.
    rho
        Correlation of the clients' momenta where they are not shared.
    noises
        Noises of gradients for which rounds are told, too.
    tolerance
        The 2-Wasserstein distance to be reached, in posterior standard deviations, over ``T``.
    tolerances, schedule_local_steps
        Distances per coordinate that constant and falling steps are to reach, and ``T`` there.
    num_step_sizes, most_rounds
        Of the grids, and rounds in which a chain has to arrive.
    num_runs, simulated
        Simulated chains, of which the distance is estimated beside the law, and the largest ``T``
        at which they run.
    """

    seed: int = 0
    dim: int = 100
    num_clients: int = 10
    means: tuple[float, float] = (1.0, -1.0)
    variances: tuple[float, float] = (1.0, 0.5)
    num_integration_steps: int = 10
    start: float = 3.0
    local_steps: tuple[int, ...] = (1, 2, 5, 10, 20, 50, 100, 200)
    gradient_noise: float = 20.0
    rho: float = 0.0
    noises: tuple[float, ...] = (0.0, 5.0, 10.0, 15.0, 20.0, 40.0, 80.0)
    tolerance: float = 0.5
    tolerances: tuple[float, ...] = (0.3, 0.1, 0.03, 0.01)
    schedule_local_steps: int = 2
    num_step_sizes: int = 200
    most_rounds: int = 20_000
    num_runs: int = 200
    simulated: int = 10

    def __post_init__(self) -> None:
        checks.at_least(1, self, "schedule_local_steps", "num_integration_steps", "most_rounds")
        checks.at_least(2, self, "num_step_sizes")
        checks.positive(self, "gradient_noise", "tolerance")
        checks.between(-1e-9, 1, self, "rho")
        require(
            min(self.noises, default=-1) >= 0,
            "noises must be one or more that are not negative",
            self.noises,
        )
        for name in ("local_steps", "tolerances"):
            values = getattr(self, name)
            require(
                len(values) > 1 and min(values) > 0,
                f"{name} must be two or more that are positive",
                values,
            )
        self.of_figure()

    def of_figure(self) -> dimension.Config:
        """Return the settings of Figure 2 that these are."""
        return dimension.Config(
            num_clients=self.num_clients,
            means=self.means,
            variances=self.variances,
            num_integration_steps=self.num_integration_steps,
            start=self.start,
            num_runs=self.num_runs,
        )

    def case(self, name: str) -> dict[str, float]:
        """Return noise and correlation of one of the cases."""
        noise = self.gradient_noise if name == "noisy gradients" else 0.0
        return {"noise": noise, "rho": self.rho if name == "own momenta" else 1.0}


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


def _grid(config: Config, clients: Scalars) -> np.ndarray:
    """Return step sizes up to trajectories of a quarter of the narrowest client's period."""
    longest = math.pi / 2 / math.sqrt(clients.curvatures.max()) / config.num_integration_steps
    return np.geomspace(longest / 1000, longest, config.num_step_sizes)


def _level(config: Config, clients: Scalars) -> float:
    """Return the distance per coordinate that is the tolerance over ``T``."""
    return config.tolerance * math.sqrt(dimension_law.target(clients)[1] / config.dim)


def _over_noises(config: Config, clients: Scalars) -> list[dict[str, Any]]:
    steps, table = _grid(config, clients), []
    for noise in config.noises:
        row: dict[str, Any] = {"noise": noise}
        for num in config.local_steps:
            case = {"noise": noise, "rho": 1.0}
            found = _first(config, clients, steps, num, _level(config, clients), case)
            row[f"T = {num}"] = None if found is None else found[0]
        table.append(row)
    return table


def _over_local_steps(config: Config, clients: Scalars) -> list[dict[str, Any]]:
    level = _level(config, clients)
    steps, table = _grid(config, clients), []
    for num in config.local_steps:
        row: dict[str, Any] = {"T": num}
        for name in CASES:
            found = _first(config, clients, steps, num, level, config.case(name))
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
        found = _first(
            config, clients, np.array([fixed]), num, level, config.case("noisy gradients")
        )
        row["noisy gradients, one step size"] = None if found is None else found[0]
        table.append(row)
    return table


def _first(
    config: Config,
    clients: Scalars,
    steps: np.ndarray,
    num_local_steps: int,
    level: float,
    case: dict[str, float],
) -> tuple[int, int] | None:
    one = dimension_law.map_of_round(
        clients,
        step_size=steps,
        num_steps=config.num_integration_steps,
        num_local_steps=num_local_steps,
        **case,
    )
    return dimension_law.first_to(
        clients, lambda _: one, level, start=config.start, most=config.most_rounds
    )


def _over_tolerances(config: Config, clients: Scalars) -> list[dict[str, Any]]:
    sd = math.sqrt(dimension_law.target(clients)[1])
    steps, case = _grid(config, clients), config.case("noisy gradients")
    first, halving = (x.ravel() for x in np.meshgrid(steps[-60:], np.geomspace(0.3, 3000, 25)))
    table = []
    for tolerance in config.tolerances:
        row: dict[str, Any] = {"tolerance": tolerance}
        constant = _first(config, clients, steps, config.schedule_local_steps, tolerance * sd, case)
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


def turning(rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Return how rounds depend on ``T``: the best ``T``, and the ends over the best.

    A ``T`` that never arrives counts as infinitely many rounds.
    """
    rounds = np.array([math.inf if row[name] is None else row[name] for row in rows])
    best = int(rounds.argmin())
    return {
        "T": rows[best]["T"],
        "rounds": rounds[best],
        "first": rounds[0] / rounds[best],
        "last": rounds[-1] / rounds[best],
        "inside": bool(min(rounds[0], rounds[-1]) > DEEP * rounds[best]),
        "largest": rounds.max() / rounds[best],
    }


def by_noise(metrics: Mapping[str, Any]) -> dict[float, list[dict[str, Any]]]:
    """Return for each noise of gradients its rows of ``T`` and rounds; none in older records.

    Without noise a U is of drift, so that zero is left out, as is a noise at which none arrives.
    """
    found = {
        row["noise"]: [
            {"T": int(name.removeprefix("T = ")), "rounds": rounds}
            for name, rounds in row.items()
            if name != "noise"
        ]
        for row in metrics.get("noises", [])
        if row["noise"]
    }
    return {noise: rows for noise, rows in found.items() if any(row["rounds"] for row in rows)}


def nearest_to_u(metrics: Mapping[str, Any]) -> str:
    """Say at which noise of gradients the rounds come nearest to a U against ``T``.

    Examples
    --------
    >>> nearest_to_u({"noises": [{"noise": 1.0, "T = 1": 9, "T = 5": 6, "T = 50": 8}]})
    'nearest to a U with a noise of 1: 9 (T = 1), 6 (T = 5), 8 (T = 50)'
    """
    found = by_noise(metrics)

    def depth(noise: float) -> float:
        turn = turning(found[noise], "rounds")
        return float(min(turn["first"], turn["last"]))

    noise = max(found, key=depth)
    rows = found[noise]
    best = next(row for row in rows if row["T"] == turning(rows, "rounds")["T"])
    shown = {row["T"]: row["rounds"] for row in (rows[0], best, rows[-1])}
    return f"nearest to a U with a noise of {noise:g}: {listed(list(shown.items()))}"


def fewest_at(rows: list[dict[str, Any]], name: str) -> str:
    """Return which ``T`` have the fewest rounds, in words.

    Examples
    --------
    >>> def of(*rounds):
    ...     return fewest_at([{"T": t, "n": n} for t, n in zip((1, 5, 50), rounds)], "n")
    >>> of(9, 3, 4), of(9, 3, 3), of(3, 3, None)
    ('at T = 5', 'from T = 5 on', 'at T = 1, 5')
    """
    least = min(row[name] for row in rows if row[name] is not None)
    places = [i for i, row in enumerate(rows) if row[name] == least]
    if len(places) > 1 and places == list(range(places[0], len(rows))):
        return f"from T = {rows[places[0]]['T']} on"
    return f"at T = {', '.join(str(rows[i]['T']) for i in places)}"


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


def about(config: Mapping[str, Any], metrics: Mapping[str, Any]) -> str:
    """Return what was run, and what of noise and momenta enters the law."""
    settings = Config(**config)
    clients = dimension.clients_of(settings.of_figure())
    more = max(_more(settings, clients, row, "own momenta") for row in metrics["table"])
    noise = [_more(settings, clients, row, "noisy gradients") for row in metrics["table"]]
    exact = exact_at_one_step(settings, metrics["table"])
    return (
        f"{settings.num_clients} clients in dimension {settings.dim}; all coordinates start at "
        f"{settings.start:g}; trajectories have {settings.num_integration_steps} leapfrog steps. "
        "The tolerance over `T` is "
        f"{settings.tolerance:g} posterior standard deviations, of all coordinates together; those "
        f"of falling step sizes are per coordinate, at `T = {settings.schedule_local_steps}`. "
        f"Noise on each coordinate of a client's gradient: standard deviation "
        f"{settings.gradient_noise:g}. At the best step sizes it adds {_percent(noise[0])} to the "
        f"variance of a round at T = {metrics['table'][0]['T']} and {_percent(noise[-1])} at "
        f"T = {metrics['table'][-1]['T']}. Momenta that clients do not share: correlation "
        f"{settings.rho:g}. These hardly enter this law: what they add to the variance of a round "
        "comes from clients of different curvature answering the same momentum differently, and is "
        f"at most {100 * more:.2g} % of it at the step sizes of the table. The variance of a round "
        "is linear in this correlation, so that correlations between it and 1 add less. At the one "
        f"step size that is best for noisy gradients at T = {exact[0][0]}, exact gradients take "
        f"{listed(exact)}, in rounds: a U here comes from drift, and is no "
        "evidence on noise. The saving of falling steps divided by log(start's distance / "
        "tolerance) is "
        f"{', '.join(f'{x:.2f}' for x in over_logarithm(settings, metrics['schedules']))}. Steps "
        "that hardly fall are among those tried, so that the best falling one cannot lose: how "
        "the saving grows is what counts."
    )


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %"


def listed(rounds: list[tuple[int, int | None]]) -> str:
    """Return rounds by ``T`` in words.

    Examples
    --------
    >>> listed([(1, 8), (2, 5), (5, None), (10, None)])
    '8 (T = 1), 5 (T = 2), never there from T = 5 on'
    """
    last = max((i for i, (_, n) in enumerate(rounds) if n is not None), default=-1)
    told = [f"{'never there' if n is None else n} (T = {t})" for t, n in rounds[: last + 1]]
    if last + 1 < len(rounds):
        told.append(f"never there from T = {rounds[last + 1][0]} on")
    return ", ".join(told)


def exact_at_one_step(config: Config, rows: list[dict[str, Any]]) -> list[tuple[int, int | None]]:
    """Return ``T`` and rounds with exact gradients at the step size that noisy ones keep.

    It is the best for noisy gradients at the first ``T``. A U here is of drift alone.
    """
    clients = dimension.clients_of(config.of_figure())
    level = _level(config, clients)
    step, found = np.array([rows[0]["step, noisy gradients"]]), []
    for row in rows:
        first = _first(config, clients, step, row["T"], level, config.case("vanilla"))
        found.append((row["T"], None if first is None else first[0]))
    return found


def over_logarithm(config: Config, schedules: list[dict[str, Any]]) -> list[float]:
    """Return the savings of falling steps over the logarithm of the start's distance."""
    mean, variance = dimension_law.target(dimension.clients_of(config.of_figure()))
    distance = math.hypot(config.start - mean, math.sqrt(variance)) / math.sqrt(variance)
    return [
        row["constant"] / row["falling"] / math.log(distance / row["tolerance"])
        for row in schedules
        if row["constant"] and row["falling"]
    ]


def _more(settings: Config, clients: Scalars, row: Mapping[str, Any], name: str) -> float:
    """Return what a case adds to the variance of a round, over the vanilla one's.

    At the case's best step size; zero where it has none.
    """
    if row[f"step, {name}"] is None:
        return 0.0
    vanilla, other = (
        dimension_law.map_of_round(
            clients,
            step_size=row[f"step, {name}"],
            num_steps=settings.num_integration_steps,
            num_local_steps=row["T"],
            **settings.case(case),
        )[2]
        for case in ("vanilla", name)
    )
    return float(other / vanilla - 1)


def commentary(metrics: dict[str, Any]) -> str:
    """Return what the law says about each of the three statements."""
    table, schedules = metrics["table"], metrics["schedules"]
    lines = []
    for name in (*CASES, "noisy gradients, one step size"):
        found = turning(table, name)
        last = "never arrives" if math.isinf(found["last"]) else f"{found['last']:.2f} times"
        lines.append(
            {
                "rounds over T": name,
                "fewest": f"{found['rounds']:.0f} ({fewest_at(table, name)})",
                f"T = {table[0]['T']}": f"{found['first']:.2f} times",
                f"T = {table[-1]['T']}": last,
            }
        )
    gaps = [
        abs(row[f"measured, {name}"] - row[name])
        for row in table
        for name in CASES
        if row[f"measured, {name}"] is not None
    ]
    most = max(row["T"] for row in table for name in CASES if row[f"measured, {name}"] is not None)
    ratios = ", ".join(
        f"{row['constant'] / row['falling']:.2f} (tolerance {row['tolerance']:g})"
        for row in schedules
        if row["constant"] and row["falling"]
    )
    return (
        output.markdown_table(lines)
        + f"\n\nSimulated chains (T up to {most} only) arrive at most {max(gaps)} rounds from "
        f"where the law does. Rounds with the best constant step size over those with the best "
        f"falling one: {ratios}."
        + "".join(
            f" Simulated chains with that falling step arrive after {row['measured, falling']} "
            f"rounds at the tolerance {row['tolerance']:g}, the law after {row['falling']}."
            for row in schedules
            if row["measured, falling"] is not None
        )
        + _told_noises(metrics.get("noises", []))
    )


def _told_noises(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return ""
    shown = [{"noise of gradients, rounds at": f"{row['noise']:g}", **row} for row in rows]
    for row in shown:
        del row["noise"]
    return (
        "\n\nBy the standard deviation of the noise on each coordinate of a client's gradient, at "
        "the best step size for each:\n\n" + output.markdown_table(shown)
    )
