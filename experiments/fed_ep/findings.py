"""What the reports on images share: our tables, and which of the paper's orderings hold."""

import math
from collections.abc import Mapping
from typing import Any

from experiments import output
from experiments.fed_ep.differences import (
    FALL,
    TIMES,
    accuracy,
    difference,
    difference_noise,
    fallen_methods,
    fallen_seeds,
    within_seeds,
)

__all__ = [
    "CALIBRATION",
    "STILL",
    "ended",
    "fallen",
    "introduction",
    "number",
    "often_improper",
    "other_data",
    "own_rounds",
    "seeds",
    "tables",
    "trouble",
]

STILL = 0.15  # of a method's rounds with an improper product, beyond which it counts as lost
AMBIGUOUS = "(JPEG where the exact ones are not at hand)"
JPEG = (
    "(JPEG copies of quality 75 where the folder of data had them, which this record does not say)"
)
"""What records of before say of CIFAR-10's test images, and what is meant."""
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
                line[f"best {name}"] = number(row[name], row[deviation])
            else:
                line[name] = _reached(row, name, metrics)
        end = accuracy(metrics, row["method"], "end")
        line[f"last {settings['window']} rounds"] = "-" if math.isnan(end) else f"{end:.1f}"
        rows.append(line)
    parts = [introduction(metrics), output.markdown_table(rows), fallen(metrics)]
    if calibration:
        parts.append(_calibration(metrics))
    parts += [_conclusions(metrics, calibration), trouble(metrics)]
    return "\n\n".join(part for part in parts if part).strip()


def fallen(metrics: Mapping[str, Any]) -> str:
    """Name the methods whose last rounds are behind their best, which best accuracies hide."""
    found = [ended(metrics, name) for name in fallen_methods(metrics)]
    window = metrics["settings"]["window"]
    text = "A best accuracy hides what comes after it. These methods are below their best in the "
    text += f"last {window} rounds, beyond noise or by more than {FALL:g} points"
    return f"{text}: {'; '.join(found)}." if found else ""


def ended(metrics: Mapping[str, Any], name: str) -> str:
    """Return a method's best accuracy, that of its last rounds, and how many seeds fell."""
    best, end = (accuracy(metrics, name, part) for part in ("best", "end"))
    text = f"{name} from {best:.1f} to {end:.1f}"
    num, count = metrics["settings"].get("num_seeds", 1), fallen_seeds(metrics, name)
    if num == 1 or count is None:
        return text
    return f"{text} ({count} of {num} seeds by more than {FALL:g} points)"


def introduction(metrics: dict[str, Any]) -> str:
    """Say what was run."""
    settings = metrics["settings"]
    data = metrics["data"].replace(AMBIGUOUS, JPEG)
    return (
        f"{data}; {settings['model']}, {metrics['num_parameters']:,} parameters. "
        f"{settings['cohort_size']} clients per round, {settings['num_epochs']} epochs, "
        f"{settings['num_burnin']} rounds of FedAvg, {settings['num_rounds']} rounds in all, "
        f"{seeds(settings)}. Accuracies in percent: best running means of "
        f"{settings['best_window']} rounds, those of the shared burn-in among them (sd over "
        f"seeds); rounds until a running mean of {settings['window']} rounds reaches a threshold, "
        "means over the seeds that reach it."
    )


def seeds(settings: Mapping[str, Any]) -> str:
    """Return how many independent runs there were."""
    num = settings["num_seeds"]
    return f"{num} seed{'s' if num > 1 else ''}"


def other_data(config: Mapping[str, Any], papers: str) -> str:
    """Return which data a run has in place of the paper's, in brackets; else nothing."""
    return "" if config["dataset"] == papers else f" ({config['dataset']}, not {papers})"


def _reached(row: Mapping[str, Any], name: str, metrics: Mapping[str, Any]) -> str:
    """Return rounds to a threshold, and how many seeds reach it where not all do."""
    settings = metrics["settings"]
    count = row.get(f"seeds {name[len('rounds ') :]}", settings["num_seeds"])
    rounds, num = row[name], settings["num_seeds"]
    same = len(metrics["table"]) > 1 and len({other[name] for other in metrics["table"]}) == 1
    if same and rounds is not None and rounds <= settings["num_burnin"]:  # which all share
        return f"{number(rounds)}, in the burn-in"
    return number(rounds) + (f" ({count} of {num} seeds)" if 0 < count < num else "")


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


def _conclusions(metrics: dict[str, Any], calibration: bool) -> str:
    """Say which of the paper's orderings hold, for the methods that were run."""
    settings = metrics["settings"]
    column = f"accuracy in {settings['checkpoints'][-1]} rounds"
    best = {row["method"]: row[column] for row in metrics["table"] if row[column] is not None}
    lines = []
    for family in ("FedEP", "FedSEP"):
        own = {name: value for name, value in best.items() if name.startswith(f"{family} ")}
        for baseline in ("FedAvg", "FedPA"):
            if own and baseline in best:
                lines.append(_against(family, own, baseline, metrics, calibration))
    if lines:
        if often_improper(metrics):
            lines.append(
                f"\n\\* its product was improper after more than {output.percent(STILL)} of its "
                "rounds (see below): no evidence."
            )
        lines.append("\n" + _noise(metrics, calibration))
    return "\n".join(lines)


def _noise(metrics: Mapping[str, Any], calibration: bool) -> str:
    """Say beyond what a difference counts."""
    if within_seeds(metrics):
        text = (
            "Ahead or behind is a difference of best accuracies beyond the 95 % interval of "
            f"differences within {seeds(metrics['settings'])}, by Student's law; all seeds have "
            "the same clients and test images"
        )
    else:
        text = (
            f"Ahead or behind is a difference of best accuracies of more than {TIMES:g} standard "
            "errors that two independent test sets of this size would give it; how much seeds "
            f"differ besides is not in this record ({seeds(metrics['settings'])})"
        )
    text += ". Windows are chosen on the test set."
    if calibration:
        text += (
            f" A calibration error counts as smaller beyond {TIMES:g} standard errors of the "
            "difference of two shares near a half, each on its own test images."
        )
    return text


def _against(
    family: str, own: Mapping[str, float], baseline: str, metrics: dict[str, Any], calibration: bool
) -> str:
    found: dict[str, list[str]] = {"ahead of": [], "behind": [], "not told apart from": []}
    still = often_improper(metrics)
    for name in sorted(own):
        gap = difference(metrics, name, baseline)
        kind = "ahead of" if gap.above else "behind" if gap.below else "not told apart from"
        found[kind].append(name[-2] + "*" * (name in still))
    told = [f"{kind} {baseline} with {_listed(who, own)}" for kind, who in found.items() if who]
    text = f"- {family} is {'; '.join(told)}, in best accuracy"
    if calibration:
        errors = {row["method"]: row["ECE, point"] for row in metrics["table"]}
        level = errors[baseline]
        noise = difference_noise(metrics, 50.0)
        better = [
            n[-2]
            for n in sorted(own)
            if None not in (errors[n], level) and errors[n] < level - noise
        ]
        listed = _listed(better, own)
        text += f"; its point estimate has the smaller calibration error with {listed}"
    return f"{text}."


def often_improper(metrics: Mapping[str, Any]) -> list[str]:
    """Return the methods whose product was improper after more than `STILL` of their rounds.

    An improper product has no mean, so that the point stays where it was: its accuracy is that of
    an earlier round, and no evidence.
    """
    counts = metrics.get("improper_rounds", {})
    return [n for n, num in counts.items() if num and num > STILL * own_rounds(metrics["settings"])]


def own_rounds(settings: Mapping[str, Any]) -> int:
    """Return a method's rounds after the burn-in, those of all seeds together."""
    return int(settings["num_seeds"] * (settings["num_rounds"] - settings["num_burnin"]))


def _of_all(metrics: Mapping[str, Any]) -> str:
    return " of all seeds" if metrics["settings"]["num_seeds"] > 1 else ""


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
        if rounds:
            own, whose = own_rounds(metrics["settings"]), _of_all(metrics)
            told.append(
                f"after {rounds} of {own} rounds{whose} the product was improper (the point stays "
                "where it was)"
            )
        if share > 0:
            lost = output.percent(share, 1)
            told.append(f"{lost} of the fits were not proper (their sites were kept)")
        if told:
            lines.append(f"- {name}: {', and '.join(told)}.{_absorbed(metrics, name)}")
    return "\n".join(lines)


def _absorbed(metrics: Mapping[str, Any], name: str) -> str:
    """Say how many fits were lost before the product was improper, where it stayed so.

    Up to version 0.2.0 cavities stayed improper after an improper product, and fits with them.
    Records have counts alone. Of a seed's improper rounds the last one starts no other; if all
    fits of the rounds that others start are lost, the rest was lost with a proper product. Nothing
    is said where other numbers were lost, as fits may do although their cavity is improper.
    """
    settings, improper = metrics["settings"], metrics["improper_rounds"][name]
    share, own = metrics["lost_fits"][name], own_rounds(settings)
    lost, starts = share * own, improper - settings["num_seeds"]
    if name not in often_improper(metrics) or not 0.9 * starts <= lost <= 1.1 * improper:
        return ""
    cohort = settings["cohort_size"]
    before = max(round((share * own - (improper - settings["num_seeds"])) * cohort), 0)
    text = (
        f" Lost fits are those of {share * own:.1f} rounds, so nearly all follow an improper "
        f"product: if every fit that starts from one is lost, {before:,} of {own * cohort:,} were "
        "lost before."
    )
    curve = metrics["by_round"][name]  # of tags one for each score
    scores = list(zip(*curve.values(), strict=True)) if isinstance(curve, Mapping) else curve
    last = max((i for i in range(1, len(scores)) if scores[i] != scores[i - 1]), default=0) + 1
    if last < settings["num_rounds"]:
        text += f" After round {last} no score changed."
    return text
