"""What the reports on images share: our tables, and which of the paper's orderings hold."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments import output

__all__ = ["difference_noise", "introduction", "number", "seeds", "tables", "trouble"]

TIMES = 2.0
STILL = 0.15
CALIBRATION = ("accuracy, point", "accuracy, marginal", "ECE, point", "ECE, marginal")


def tables(metrics: dict[str, Any], *, calibration: bool = False) -> str:
    """Return our numbers, and what our run says about the paper's conclusions.

    Parameters
    ----------
    metrics
        Of `image_runs.execute`.
    calibration
        Whether to show accuracies and calibration errors of the last round, point and marginal.
    """
    settings = metrics["settings"]
    names = [f"accuracy in {r} rounds" for r in settings["checkpoints"]]
    names += [f"rounds to {level:g} %" for level in settings["thresholds"]]
    rows = []
    for row in metrics["table"]:
        line = {"method": row["method"]}
        for name in names:
            deviation = name.replace("accuracy", "sd").replace(" rounds", "")
            if deviation.startswith("sd "):
                line[name] = number(row[name], row[deviation])
            else:
                line[name] = _reached(row, name, settings["num_seeds"])
        rows.append(line)
    parts = [introduction(metrics), output.markdown_table(rows)]
    if calibration:
        parts.append(_calibration(metrics))
    return "\n\n".join([*parts, _conclusions(metrics), trouble(metrics)]).strip()


def introduction(metrics: dict[str, Any]) -> str:
    """Say what was run."""
    settings = metrics["settings"]
    return (
        f"{metrics['data']}; {settings['model']}, {metrics['num_parameters']:,} parameters. "
        f"{settings['cohort_size']} clients per round, {settings['num_epochs']} epochs, "
        f"{settings['num_burnin']} rounds of FedAvg, {settings['num_rounds']} rounds in all, "
        f"{seeds(settings)}. Accuracies in percent: best running means of "
        f"{settings['best_window']} rounds (sd over seeds); rounds until a running mean of "
        f"{settings['window']} rounds reaches a threshold, means over the seeds that reach it."
    )


def seeds(settings: Mapping[str, Any]) -> str:
    """Return how many independent runs there were."""
    num = settings["num_seeds"]
    return f"{num} seed{'s' if num > 1 else ''}"


def difference_noise(metrics: Mapping[str, Any], *rates: float) -> float:
    """Return two standard errors of a difference of accuracies on two independent test sets.

    Of accuracies in percent; one stands for both.
    """
    shares = np.array(rates if len(rates) > 1 else 2 * rates) / 100
    return float(
        TIMES * 100 * np.sqrt((shares * (1 - shares)).sum() / metrics["settings"]["num_test"])
    )


def _reached(row: Mapping[str, Any], name: str, num_seeds: int) -> str:
    """Return rounds to a threshold, and how many seeds reach it where not all do."""
    count = row.get(f"seeds {name[len('rounds ') :]}", num_seeds)
    some = f" ({count} of {num_seeds} seeds)" if 0 < count < num_seeds else ""
    return number(row[name]) + some


def _calibration(metrics: dict[str, Any]) -> str:
    rows = [
        {"method": row["method"]} | {name: number(row[name]) for name in CALIBRATION}
        for row in metrics["table"]
    ]
    bins = metrics["settings"]["num_bins"]
    text = f"After the last round, in percent (expected calibration error with {bins} bins):"
    return f"{text}\n\n{output.markdown_table(rows)}"


def number(value: float | None, deviation: float | None = None) -> str:
    """Return a cell: one decimal, the deviation in brackets."""
    if value is None:
        return "-"
    text = f"{value:.1f}" if value % 1 else f"{value:.0f}"
    return text if deviation is None else f"{text} ({deviation:.1f})"


def _conclusions(metrics: dict[str, Any]) -> str:
    """Say which of the paper's orderings hold, for the methods that were run."""
    settings = metrics["settings"]
    column = f"accuracy in {settings['checkpoints'][-1]} rounds"
    best = {row["method"]: row[column] for row in metrics["table"] if row[column] is not None}
    lines = []
    for family in ("FedEP", "FedSEP"):
        own = {name: value for name, value in best.items() if name.startswith(f"{family} ")}
        for baseline in ("FedAvg", "FedPA"):
            if own and baseline in best:
                lines.append(_against(family, own, baseline, metrics, best[baseline]))
    if lines:
        if _still(metrics):
            lines.append(f"\n\\* stood still in more than {STILL:.0%} of its rounds: see below.")
        lines.append(
            f"\nAhead or behind is a difference of best accuracies of more than {TIMES:g} standard "
            "errors that two independent test sets of this size would give it; runs differ besides "
            f"({seeds(settings)}), and windows are chosen on the test set. Calibration errors are "
            "compared as they are."
        )
    return "\n".join(lines)


def _against(
    family: str, own: Mapping[str, float], baseline: str, metrics: dict[str, Any], level: float
) -> str:
    errors = {r["method"]: r["ECE, point"] for r in metrics["table"] if r["ECE, point"] is not None}
    size = metrics["settings"]["num_test"]
    found: dict[str, list[str]] = {"ahead of": [], "behind": [], "not told apart from": []}
    still = _still(metrics)
    for name, value in sorted(own.items()):
        rates = np.array([value, level]) / 100
        noise = 100 * np.sqrt(np.sum(rates * (1 - rates)) / size)
        far = abs(value - level) > TIMES * noise
        kind = "not told apart from" if not far else "ahead of" if value > level else "behind"
        found[kind].append(name[-2] + "*" * (name in still))
    told = [f"{kind} {baseline} with {_listed(who, own)}" for kind, who in found.items() if who]
    better = sorted(n[-2] for n in own if errors.get(n, 1e9) < errors.get(baseline, -1.0))
    return (
        f"- {family} is {'; '.join(told)}, in best accuracy; its point estimate has the smaller "
        f"calibration error with {_listed(better, own)}."
    )


def _still(metrics: dict[str, Any]) -> list[str]:
    """Return the methods whose point stood still in many rounds."""
    settings = metrics["settings"]
    own = settings["num_rounds"] - settings["num_burnin"]
    return [n for n, rounds in metrics["improper_rounds"].items() if rounds > STILL * own]


def _listed(letters: list[str], own: Mapping[str, float]) -> str:
    if not letters:
        return "none"
    plain = not any(letter.endswith("*") for letter in letters)
    return f"all {len(own)}" if plain and len(letters) == len(own) else ", ".join(letters)


def trouble(metrics: dict[str, Any]) -> str:
    """Say what was lost on the way, if anything."""
    lines = [
        f"- {name} turned non-finite in round {round_}."
        for name, round_ in metrics["diverged"].items()
    ]
    for name, share in metrics["lost_fits"].items():
        rounds = metrics["improper_rounds"][name]
        told = []
        if share > 0:
            told.append(f"{share:.1%} of the fits were not proper (their sites were kept)")
        if rounds:
            settings = metrics["settings"]
            own = settings["num_rounds"] - settings["num_burnin"]
            told.append(
                f"after {rounds} of {own} rounds the product was improper and the point stood still"
            )
        if told:
            lines.append(f"- {name}: {', and '.join(told)}.")
    return "\n".join(lines)
