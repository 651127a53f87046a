"""What the report says about the experiments on images; the numbers come from the runs."""

import math
from collections.abc import Mapping
from typing import Any

from experiments import output
from experiments.fa_hmc.image_figures import TITLES
from experiments.fa_hmc.image_sweep import SCORES
from experiments.fa_hmc.image_tuning import orientation
from experiments.qlsd.network_scores import standard_error

__all__ = ["SETTINGS", "commentary", "compare", "ranking", "table_row"]

SETTINGS = """
Training images are dealt out at random to 10 clients of equal size; all clients have the same
momenta (`rho = 1`); a sample is kept after every so many rounds, and predictions are averaged over
all samples so far. The step size is the best of a grid for each setting and each score, judged on
the test images as in the paper. Settings are compared at equal rounds of communication, which is
not at equal computation, which the paper claims besides: a client's minibatch gradients are counted
beside.

Not stated in the paper, or lost, and chosen here: `T = 10` where `L` varies and `L = 10` where `T`
does, the prior (normal with standard deviation 0.1), pixels with mean zero and variance one, the
start (the module's own initialisation, another for every chain), rounds, samples and chains. Grids
of step sizes are multiples of the largest stable one at the start, the same for all settings.
Clients run on the loss whose target is the posterior itself, not on a mean over rows. Runs on a GPU
shared it with seven others, so that each alone is faster than its time says.
"""

Score = Mapping[str, Any]
UNTRAINED = 0.05  # an accuracy that is lower by so much belongs to a chain still on its way


def table_row(result: Mapping[str, Any], num_step_sizes: int) -> dict[str, Any]:
    """Return one line: scores with the best step size, and their deviation over chains."""
    row: dict[str, Any] = {
        "L": result["L"],
        "T": result["T"],
        "varied": " and ".join(result["sweeps"]),
        "gradients": result["gradients"],
    }
    for name, title in zip(SCORES, ("accuracy %", "Brier", "ECE", "nNLL"), strict=True):
        score, unit = result["scores"][name], 100 if name == "accuracy" else 1
        row[title] = None if score["mean"] is None else unit * score["mean"]
        row[f"sd {title}"] = None if score["sd"] is None else unit * score["sd"]
    chosen = [result["scores"][name]["step"] for name in SCORES]
    row["best steps"] = ", ".join(output.format_number(step) for step in chosen)
    row["diverged"] = f"{result['diverged']} of {num_step_sizes}"
    return row


def ranking(results: list[dict[str, Any]], varied: str, name: str) -> list[tuple[int, Score]]:
    """Return the values of ``L`` or ``T`` and their scores, best first, without diverged ones."""
    found = [(r[varied], r["scores"][name]) for r in results if varied in r["sweeps"]]
    good = [(value, score) for value, score in found if score["mean"] is not None]
    return sorted(good, key=lambda pair: -orientation(name) * pair[1]["mean"])


def compare(name: str, ours: Score, theirs: Score) -> tuple[str, float]:
    """Return how one score compares with another, and by how much it is better.

    ``"better"`` or ``"worse"`` where the difference exceeds the standard deviation of a difference
    of two chains, else ``"within the spread"``; with one chain ``"better (one chain)"`` or
    ``"worse (one chain)"``.
    """
    gain = orientation(name) * (ours["mean"] - theirs["mean"])
    side = "better" if gain > 0 else "worse"
    if ours["sd"] is None or theirs["sd"] is None:
        return f"{side} (one chain)", gain
    spread = math.hypot(ours["sd"], theirs["sd"])
    return (side if abs(gain) > spread else "within the spread"), gain


def commentary(metrics: dict[str, Any], paper: Mapping[str, Mapping[str, str]]) -> str:
    """Return what a run says about the paper's conclusions, for the report.

    Parameters
    ----------
    metrics
        Of the run.
    paper
        For each sweep (``"L"``, ``"T"``) and score what the paper finds, in words.
    """
    settings, results = metrics["settings"], metrics["results"]
    rows = [_beside(results, v, name, paper[v].get(name, "-")) for v in "LT" for name in SCORES]
    text = (
        f"{metrics['source']}; used here: {metrics['num_rows']:,} images of "
        f"{settings['num_clients']} clients, {metrics['num_test']:,} test images, "
        f"{metrics['num_parameters']:,} parameters, {settings['num_chains']} "
        f"{'chains' if settings['num_chains'] > 1 else 'chain'}, {metrics['rounds'][-1]} rounds. "
        "Step sizes are multiples of "
        f"{metrics['step_limit']:.3g}, the largest stable one at the start.\n\n"
        + output.markdown_table(rows)
    )
    text += "\n\n" + " ".join(
        (
            _above_one(results, "L", "FA-HMC (the best L > 1) against FA-LD (L = 1)"),
            _above_one(results, "T", "The best T > 1 against T = 1"),
            *_equal_steps(results),
        )
    )
    text += _uncertainty(metrics) + _cost(results) + _untrained(results) + _edges(results)
    return text + _divergence(results, len(settings["step_sizes"]))


def _beside(results: list[dict[str, Any]], varied: str, name: str, paper: str) -> dict[str, Any]:
    ordered = ranking(results, varied, name)
    row: dict[str, Any] = {"varied": varied, "score": TITLES[name], "paper": paper}
    if not ordered:
        return row | {"ours, best to worst": "all diverged", "best above 1 against 1": "-"}
    return row | {
        "ours, best to worst": _listed(ordered, name),
        "best above 1 against 1": _against_one(ordered, name),
    }


def _listed(ordered: list[tuple[int, Score]], name: str) -> str:
    text = ""
    for i, (value, score) in enumerate(ordered):
        if i:
            verdict = compare(name, ordered[i - 1][1], score)[0]
            text += " ~ " if verdict == "within the spread" else " > "
        text += f"{value} ({score['mean']:.4g})"
    return text


def _against_one(ordered: list[tuple[int, Score]], name: str) -> str:
    pair = _pair(ordered)
    if pair is None:
        return "-"
    verdict, gain = compare(name, *pair)
    return f"{verdict} ({gain:+.2g}, {100 * gain / pair[1]['mean']:+.2g} %)"


def _pair(ordered: list[tuple[int, Score]]) -> tuple[Score, Score] | None:
    """Return the best score of a value above one, and that of one."""
    one = [score for value, score in ordered if value == 1]
    others = [score for value, score in ordered if value > 1]
    return (others[0], one[0]) if one and others else None


def _above_one(results: list[dict[str, Any]], varied: str, title: str) -> str:
    return _said(title, {name: _pair(ranking(results, varied, name)) for name in SCORES})


def _said(title: str, pairs: Mapping[str, tuple[Score, Score] | None]) -> str:
    verdicts: dict[str, list[str]] = {}
    for name, pair in pairs.items():
        verdict = "not to be said" if pair is None else compare(name, *pair)[0]
        verdicts.setdefault(verdict, []).append(TITLES[name])
    return f"{title}: " + "; ".join(f"{v} in {', '.join(n)}" for v, n in verdicts.items()) + "."


def _equal_steps(results: list[dict[str, Any]]) -> list[str]:
    """Compare settings with equal ``L T``: as many rounds and leapfrog steps."""
    said = []
    for i, first in enumerate(results):
        for other in results[i + 1 :]:
            if first["L"] * first["T"] != other["L"] * other["T"]:
                continue
            few, many = sorted((first, other), key=lambda r: r["L"])
            pairs = {name: _both(many["scores"][name], few["scores"][name]) for name in SCORES}
            title = (
                "L = {L}, T = {T}".format(**many) + " against " + "L = {L}, T = {T}".format(**few)
            )
            said.append(_said(f"With equal rounds and leapfrog steps, {title}", pairs))
    return said


def _both(ours: Score, theirs: Score) -> tuple[Score, Score] | None:
    return None if None in (ours["mean"], theirs["mean"]) else (ours, theirs)


def _uncertainty(metrics: dict[str, Any]) -> str:
    best = ranking(metrics["results"], "L", "accuracy")
    if not best:
        return ""
    error = standard_error(best[0][1]["mean"], metrics["num_test"])
    text = f" From the test images alone an accuracy has a standard error of about {error:.2g} %"
    if metrics["settings"]["num_chains"] > 1:
        return text + (
            ", which all settings share; the spread is the standard deviation of a difference of "
            "two chains, and `~` stands between neighbours that differ by no more than it."
        )
    return text + "; with one chain the spread over chains is not known, and the order is its own."


def _untrained(results: list[dict[str, Any]]) -> str:
    found = [
        f"L = {r['L']}, T = {r['T']} ({ece['accuracy']:.2g} instead of {best:.2g})"
        for r in results
        if (ece := r["scores"]["ece"])["accuracy"] is not None
        and (best := r["scores"]["accuracy"]["mean"]) - ece["accuracy"] > UNTRAINED
    ]
    if not found:
        return ""
    return (
        "\n\nA flat prediction is calibrated too: with the step size that is best for ECE the "
        f"accuracy is far from the best of {'; '.join(found)}."
    )


def _edges(results: list[dict[str, Any]]) -> str:
    found = []
    for r in results:
        for end in ("smallest", "largest"):
            names = [TITLES[name] for name in SCORES if r["scores"][name]["edge"] == end]
            if names:
                scores = "all scores" if len(names) == len(SCORES) else ", ".join(names)
                found.append(f"the {end} for L = {r['L']}, T = {r['T']} ({scores})")
    if not found:
        return ""
    return (
        "\n\nThe best step size is an end of the grid, so that others may be better still: "
        + "; ".join(found)
        + "."
    )


def _cost(results: list[dict[str, Any]]) -> str:
    costs = {
        v: sorted((r[v], r["gradients"]) for r in results if v in r["sweeps"]) for v in ("L", "T")
    }
    counted = "; ".join(
        f"{v} = {value}: {number:,}" for v, pairs in costs.items() for value, number in pairs
    )
    return (
        f"\n\nA client's minibatch gradients in all rounds: {counted}. A setting that is better at "
        "equal rounds need not be at equal work."
    )


def _divergence(results: list[dict[str, Any]], num_step_sizes: int) -> str:
    found = [
        f"L = {r['L']}, T = {r['T']}: {r['diverged']} of {num_step_sizes}"
        for r in results
        if r["diverged"]
    ]
    return (
        ""
        if not found
        else " Step sizes with a chain that turned non-finite: " + ("; ".join(found) + ".")
    )
