"""What the study of local steps says; the numbers come from the run and from the law."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments import output
from experiments.fa_hmc import dimension, dimension_law, local_steps_law
from experiments.fa_hmc.dimension_law import Scalars
from experiments.fa_hmc.local_steps_law import CASES, Settings

__all__ = [
    "DEEP",
    "about",
    "by_noise",
    "commentary",
    "exact_at_one_step",
    "fewest_at",
    "listed",
    "nearest_to_u",
    "over_logarithm",
    "turning",
]

DEEP = 1.1  # times the fewest rounds, which both ends of a U have at least


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


def about(config: Mapping[str, Any], metrics: Mapping[str, Any]) -> str:
    """Return what was run, and what of noise and momenta enters the law."""
    settings = Settings(**config)
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


def exact_at_one_step(config: Settings, rows: list[dict[str, Any]]) -> list[tuple[int, int | None]]:
    """Return ``T`` and rounds with exact gradients at the step size that noisy ones keep.

    It is the best for noisy gradients at the first ``T``. A U here is of drift alone.
    """
    clients = dimension.clients_of(config.of_figure())
    level = local_steps_law.level(config, clients)
    step, found = np.array([rows[0]["step, noisy gradients"]]), []
    for row in rows:
        case = config.case("vanilla")
        first = local_steps_law.first(config, clients, step, row["T"], level, case)
        found.append((row["T"], None if first is None else first[0]))
    return found


def over_logarithm(config: Settings, schedules: list[dict[str, Any]]) -> list[float]:
    """Return the savings of falling steps over the logarithm of the start's distance."""
    mean, variance = dimension_law.target(dimension.clients_of(config.of_figure()))
    distance = math.hypot(config.start - mean, math.sqrt(variance)) / math.sqrt(variance)
    return [
        row["constant"] / row["falling"] / math.log(distance / row["tolerance"])
        for row in schedules
        if row["constant"] and row["falling"]
    ]


def _more(settings: Settings, clients: Scalars, row: Mapping[str, Any], name: str) -> float:
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
