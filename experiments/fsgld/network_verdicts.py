"""What runs of networks say about Table 1."""

from typing import Any

import numpy as np

from experiments.claims import (
    CONTRADICTED,
    PARTLY,
    REPRODUCED,
    TIMES,
    UNTESTABLE,
    Given,
    Verdict,
    first_that_holds,
    on_other_data,
    paired,
    rows_of,
    with_lost_settings,
)
from experiments.fsgld import mlp_scores, spreads
from experiments.output import percent

__all__ = [
    "beside_a_coin",
    "deviations",
    "generalises",
    "network",
    "paper_step",
]

PAPERS_GAIN = mlp_scores.papers("FSGLD", "non_iid")[0] - mlp_scores.papers("DSGLD", "non_iid")[0]
FAR = 0.1 * PAPERS_GAIN
"""Nats by which one network is far better than another, and below which they are alike."""
FAR_SMALLER = 0.5  # of a standard deviation, times another


def network(split: str, better: bool) -> Any:
    """Judge FSGLD against DSGLD on held-out rows of one split (Table 1)."""

    def judge(metrics: Given, config: Given) -> Verdict:
        of = {m: metrics["values"][f"{split} {m}"]["test"] for m in ("DSGLD", "FSGLD")}
        scores = np.array(of["FSGLD"], float)
        kept = np.isfinite(scores)
        if not kept.any():
            return Verdict(UNTESTABLE, f"FSGLD diverged in all {len(scores)} repetitions")
        gain, error = paired(of["FSGLD"], of["DSGLD"])
        low, high = gain - TIMES * error, gain + TIMES * error
        if better:
            word = first_that_holds(
                (low > FAR, REPRODUCED),
                (low > 0, PARTLY),
                (high < FAR, CONTRADICTED),
                otherwise=UNTESTABLE,
            )
        else:
            word = first_that_holds(
                (low > -FAR and high < FAR, REPRODUCED),
                (low > FAR or high < -FAR, CONTRADICTED),
                otherwise=UNTESTABLE,
            )
        word = on_other_data(word, config["table"] != "susy")
        text = f"FSGLD less DSGLD{_where(metrics, config)}: {gain:+.4f} (s.e. {error:.4f}) nats"
        if not kept.all():
            text += f" where it did not diverge, in {kept.sum()} of {len(kept)} repetitions"
        if better:
            text += f"; far better would be more than {FAR:.3f}, a tenth of the paper's lead"
            if config["table"] == "susy":
                text += f", {PAPERS_GAIN:+.2f}"
            text += beside_a_coin(metrics, split)
        else:
            text += f"; alike is less than {FAR:.3f} apart, a tenth of the paper's non-IID lead"
        return Verdict(word, text)

    return judge


def _where(metrics: Given, config: Given) -> str:
    """Return the data, if not the paper's, and the step size ``h``."""
    data = "" if config["table"] == "susy" else f" on {metrics['data'].lower()}"
    return f"{data} at h = {2 * config['step_size']:.0e}" if data else ""


def beside_a_coin(metrics: Given, split: str) -> str:
    """Return which methods are no better than a coin toss on held-out rows within their noise.

    With their accuracies there: a network may be right more often than not and as surely wrong.
    """
    told = []
    for method in ("DSGLD", "FSGLD"):
        values = metrics["values"][f"{split} {method}"]
        scores = np.array(values["test"], float)
        mean, error = paired(scores, np.full(len(scores), -np.log(2)))
        if not np.isfinite(error) or mean > TIMES * error:
            continue
        word = "worse" if mean < -TIMES * error else "no better"
        of = f"{mean:+.3f}, s.e. {error:.3f}"
        if "accuracy" in values:
            right, constant = (
                np.nanmean(np.array(values[k], float)) for k in ("accuracy", "constant")
            )
            of += f"; right for {percent(right, 1)} of them, {percent(constant)} ignore their input"
        told.append(f"{method}'s log likelihood is {word} than a coin toss's ({of})")
    return "".join(f"; {text}" for text in told)


def generalises(metrics: Given, config: Given) -> Verdict:
    """Judge whether DSGLD fits the shard that it is at, and held-out rows far less well."""
    values = metrics["values"]["non_iid DSGLD"]
    gap, error = paired(values["visited"], values["test"])
    word = first_that_holds(
        (gap - TIMES * error > FAR, REPRODUCED),
        (gap + TIMES * error < FAR, CONTRADICTED),
        otherwise=UNTESTABLE,
    )
    visited, train, test = (
        np.nanmean(np.array(values[k], float)) for k in ("visited", "train", "test")
    )
    other = config["table"] != "susy"
    published = [mlp_scores.papers("DSGLD", "non_iid", *of)[0] for of in (("train",), ())]
    return Verdict(
        on_other_data(word, other),
        f"DSGLD's log likelihood{_where(metrics, config)} is {visited:.3f} on the shard visited "
        f"and {test:.3f} on held-out rows, {gap:.3f} (s.e. {error:.3f}) nats apart; on the rows of "
        f"all shards it is {train:.3f}"
        + ("" if other else f"; the paper's are {published[0]:.2f} (train) and {published[1]:.2f}"),
    )


def deviations(metrics: Given, config: Given) -> Verdict:
    """Judge FSGLD's standard deviations over repetitions (Table 1)."""
    found, papers = {}, []
    for split in mlp_scores.SPLITS:
        of = {m: metrics["values"][f"{split} {m}"]["test"] for m in ("FSGLD", "DSGLD")}
        found[split] = spreads.compare(of["FSGLD"], of["DSGLD"])
        papers.append(mlp_scores.papers("FSGLD", split)[1] / mlp_scores.papers("DSGLD", split)[1])
    ratios = found.values()
    word = first_that_holds(
        (all(ratio.high < FAR_SMALLER for ratio in ratios), REPRODUCED),
        (any(ratio.high < 1 for ratio in ratios), PARTLY),
        (all(ratio.low > FAR_SMALLER for ratio in ratios), CONTRADICTED),
        otherwise=UNTESTABLE,
    )
    other = config["table"] != "susy"
    told = "; ".join(f"{mlp_scores.SPLITS[split]} {ratio}" for split, ratio in found.items())
    return Verdict(
        on_other_data(word, other),
        f"held-out standard deviations over those of DSGLD{_where(metrics, config)}, by Pitman and "
        f"Morgan's test: {told}"
        + ("" if other else f"; the paper's are {papers[0]:.2f} and {papers[1]:.2f}"),
    )


def paper_step(metrics: Given, config: Given) -> Verdict:
    """Judge Table 1 at the paper's step size."""
    lost = [row["diverged"] for row in rows_of(metrics, "method", "FSGLD")]
    if min(lost) < config["num_repetitions"]:
        return network("non_iid", True)(metrics, config)
    other = config["table"] != "susy"
    data = f" on {metrics['data'].lower()}" if other else ""
    return with_lost_settings(  # The paper does not give its prior and its surrogates' samplers.
        on_other_data(CONTRADICTED, other),
        f"FSGLD diverged{data} in all {config['num_repetitions']} repetitions of both splits",
    )
