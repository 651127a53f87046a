"""What the report says about the experiments on images; the numbers come from the runs."""

from collections.abc import Mapping
from typing import Any

from experiments import output
from experiments.fa_hmc.image_comparisons import (
    NOISE,
    Score,
    against_one,
    compare,
    ranking,
    told,
)
from experiments.fa_hmc.image_figures import TITLES
from experiments.fa_hmc.image_sweep import SCORES
from experiments.qlsd.network_scores import standard_error

__all__ = [
    "AS_BEFORE",
    "LOST_ABOVE",
    "LOST_ONE",
    "SETTINGS",
    "commentary",
    "same_work",
    "table_row",
]

LOST_ONE = "(value lost, presumably 1)"
LOST_ABOVE = "(value lost, presumably above 1)"
AS_BEFORE = """
What is not stated here, what was chosen, and when a difference counts is as in section 5.3 above.
"""

SETTINGS = """
Training images are dealt out at random to 10 clients of equal size; all clients have the same
momenta (`rho = 1`); a sample is kept after every so many rounds, and predictions are averaged over
all samples so far. The step size is the best of a grid for each setting and each score, judged on
the test images as in the paper. Settings are compared at equal rounds of communication, which is
not at equal computation, which the paper claims besides ("under the same budgets of communication
and computation"): a client's minibatch gradients are counted beside. The paper's section 5 has
clients synchronize "every", then a symbol that our copy has lost, "local leapfrog step". We take
`T` as the number of trajectories: section 3 lets clients run HMC between synchronizations, and
section 4.1 speaks of the number of "local HMC iteration steps" (Algorithm 3 is not in our copy). If
`T` counts leapfrog steps in these experiments, larger `L` take no more gradients there.

A gain is a share of the score of `L = 1` or `T = 1`: an accuracy of 0.808 is 1 % better than one of
0.8, by 0.8 points. It counts where Welch's test at 95 % says that it exceeds the noise of chains.
Where the best of several values above one is meant, the test's 5 % are divided by their number. One
chain judges nothing, nor does a best step size at an end of the grid.

Averages over all samples are the paper's. They keep those of the transient, so that chains which
learn sooner stay ahead for long. Newer runs add averages over the later samples alone: without the
first quarter to half of those so far, and with a best step size of their own. "So far" stands where
a difference is not significant in these, reversed there or not judged, or, in runs without them,
where it is smaller at the end of the run than at half of it.

Not stated in the paper, or lost, and chosen here: the `T` at which `L` varies and the `L` at which
`T` does, the prior (normal with standard deviation 0.1), pixels with mean zero and variance one,
the start (the module's own initialization, another for every chain), rounds, samples and chains.
Grids of step sizes are multiples of the largest stable one at the start, the same for all settings.
Clients run on the loss whose target is the posterior itself, not on a mean over rows.
"""

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
    chains = settings["num_chains"]
    rows = [
        _beside(results, v, name, paper[v].get(name, "-"), chains) for v in "LT" for name in SCORES
    ]
    text = (
        f"{metrics['source']}; used here: {metrics['num_rows']:,} images of "
        f"{settings['num_clients']} clients, {metrics['num_test']:,} test images, "
        f"{metrics['num_parameters']:,} parameters, {settings['num_chains']} "
        f"{'chains' if settings['num_chains'] > 1 else 'chain'}, {metrics['rounds'][-1]} rounds. "
        "Step sizes are multiples of "
        f"{metrics['step_limit']:.3g}, the largest stable one at the start. "
        f"`L` is varied at T = {settings['at_local_steps']}, `T` at "
        f"L = {settings['at_leapfrog_steps']}.{_batches(metrics)}\n\n" + output.markdown_table(rows)
    )
    text += "\n\n" + " ".join(
        (
            _above_one(results, "L", "FA-HMC (some L > 1) against FA-LD (L = 1)", chains),
            _above_one(results, "T", "Some T > 1 against T = 1", chains),
            *_equal_steps(results, chains),
        )
    )
    text += _uncertainty(metrics) + _cost(results) + _untrained(results) + _edges(results)
    return text + _divergence(results, len(settings["step_sizes"]))


def _batches(metrics: Mapping[str, Any]) -> str:
    """Say where a batch, drawn with replacement, is larger than what a client has."""
    batch, num = metrics["settings"]["batch_size"], metrics["settings"]["num_clients"]
    rows = metrics["num_rows"] // num
    if batch <= rows:
        return ""
    return (
        f" A batch of {batch:,} has more rows than a client, which has about {rows:,}: drawn with "
        "replacement, it repeats some."
    )


def _beside(
    results: list[dict[str, Any]], varied: str, name: str, paper: str, num_chains: int
) -> dict[str, Any]:
    ordered = ranking(results, varied, name)
    row: dict[str, Any] = {"varied": varied, "score": TITLES[name], "paper": paper}
    found = against_one(results, varied, name, num_chains)
    return row | {
        "ours, best to worst": _listed(ordered, name, num_chains) if ordered else "all diverged",
        "above 1 against 1": found.word if found.value is None else f"{found.word}: {told(found)}",
    }


def _listed(ordered: list[tuple[int, Score]], name: str, num_chains: int) -> str:
    text = ""
    for i, (value, score) in enumerate(ordered):
        if i:
            verdict = compare(name, ordered[i - 1][1], score, num_chains)[0]
            text += " ~ " if verdict == NOISE else " > " if verdict.startswith("better") else ", "
        text += f"{value} ({score['mean']:.4g}{'; end' if score['edge'] else ''})"
    return text


def _above_one(results: list[dict[str, Any]], varied: str, title: str, num_chains: int) -> str:
    words = {name: against_one(results, varied, name, num_chains).word for name in SCORES}
    return _said(title, words)


def _said(title: str, words: Mapping[str, str]) -> str:
    named: dict[str, list[str]] = {}
    for name, word in words.items():
        named.setdefault(word, []).append(TITLES[name])
    return f"{title}: " + "; ".join(f"{w} in {', '.join(n)}" for w, n in named.items()) + "."


def same_work(results: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return pairs of settings with equal ``L T``, so with as many leapfrog steps a round.

    The longer trajectories come first.
    """
    return [
        (max(first, other, key=_length), min(first, other, key=_length))
        for i, first in enumerate(results)
        for other in results[i + 1 :]
        if first["L"] * first["T"] == other["L"] * other["T"]
    ]


def _length(result: Mapping[str, Any]) -> int:
    return int(result["L"])


def _equal_steps(results: list[dict[str, Any]], num_chains: int) -> list[str]:
    said = []
    for many, few in same_work(results):
        words = {}
        for name in SCORES:
            pair = _both(many["scores"][name], few["scores"][name])
            words[name] = compare(name, *pair, num_chains)[0] if pair else "not judged (diverged)"
        title = "L = {L}, T = {T}".format(**many) + " against " + "L = {L}, T = {T}".format(**few)
        said.append(_said(f"With equal rounds and leapfrog steps, {title}", words))
    return said


def _both(ours: Score, theirs: Score) -> tuple[Score, Score] | None:
    return None if None in (ours["mean"], theirs["mean"]) else (ours, theirs)


def _uncertainty(metrics: dict[str, Any]) -> str:
    best = ranking(metrics["results"], "L", "accuracy")
    if not best:
        return ""
    error = standard_error(best[0][1]["mean"], metrics["num_test"])
    text = (
        " From the number of test images alone an accuracy has a standard error of about "
        f"{error:.2g} points. The same test images score all settings; the tests do not cover a "
        "new test set."
    )
    if metrics["settings"]["num_chains"] == 1:
        return text + " With one chain the noise of chains is not known: the order is its own."
    text += " Between neighbors, `~` stands for a difference within the noise of chains."
    if _edges(metrics["results"]):
        text += (
            " A comma stands for one that is not judged, `end` for a best step size at an end of "
            "the grid."
        )
    return text


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
            later = [
                TITLES[n] for n in SCORES if r["scores"][n].get("later", {}).get("edge") == end
            ]
            if later:
                listed = ", ".join(later)
                found.append(
                    f"the {end} for L = {r['L']}, T = {r['T']} in the later samples ({listed})"
                )
    if not found:
        return ""
    return (
        "\n\nThe best step size is an end of the grid, so that others may be better still: "
        + "; ".join(found)
        + ". These scores are not judged."
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
