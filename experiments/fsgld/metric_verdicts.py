"""What runs of metric learning say about Figure 5 and appendix F.2."""

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
    paired,
    rows_of,
    with_lost_settings,
)
from experiments.fsgld import metric_scores, spreads
from experiments.output import percent

__all__ = [
    "better",
    "faster",
    "laplace",
    "spread",
]

MOST = 0.9  # of the points of a curve
CLIMB = 0.9  # of the way from the start of a curve to its level


def better(metrics: Given, config: Given) -> Verdict:
    """Judge the log likelihood of samples (Figure 5)."""
    del config
    of = metrics["methods"]
    found = [paired(of["FSGLD"][k], of["DSGLD"][k]) for k in ("learn", "test")]
    word = first_that_holds(
        (all(gain > TIMES * error for gain, error in found), REPRODUCED),
        (any(gain > TIMES * error for gain, error in found), PARTLY),
        (any(gain < -TIMES * error for gain, error in found), CONTRADICTED),
        otherwise=UNTESTABLE,
    )
    (a, b), (c, d) = found
    text = f"{a:+.3f} (s.e. {b:.3f}) nats per learning pair, {c:+.3f} (s.e. {d:.3f}) held out"
    if "NUTS" in of and "mean_off_sds" in of["FSGLD"]:
        off = np.nanmean(np.array(of["FSGLD"]["mean_off_sds"], float))
        text += f"; FSGLD's worst mean is off by {off:.1f} posterior standard deviations"
    return Verdict(word, text)


def faster(metrics: Given, config: Given) -> Verdict:
    """Judge by who leads while both climb, and by who reaches which level first."""
    if config["keep_every"] > 1 or config["num_burnin"]:
        return Verdict(UNTESTABLE, "the curves of this run begin too late")
    leads, sooner, told = [], [], []
    for key, where in metric_scores.WHERE.items():
        curve = metrics["curves"][key]
        samples = (np.array(curve["at"]) + 1) * metrics["samples_a_draw"]
        means = {m: np.array(curve[m]["mean"]) for m in ("DSGLD", "FSGLD")}
        levels = {m: mean[len(mean) // 2 :].mean() for m, mean in means.items()}
        reached = {}
        for m, mean in means.items():
            goals = (levels["DSGLD"], np.log(0.5) + CLIMB * (levels[m] - np.log(0.5)))
            reached[m] = [_first(mean > goal, samples) for goal in goals]
        climbing = samples <= max(times[0] for times in reached.values())
        gap, error = (np.array(curve["difference"][k])[climbing] for k in ("mean", "spread"))
        ahead, behind = int((gap > TIMES * error).sum()), int((gap < -TIMES * error).sum())
        leads.append(ahead > len(gap) / 2 and not behind)
        sooner.append(reached["FSGLD"][0] < reached["DSGLD"][0])
        told.append(
            f"on {where} DSGLD comes to its level (the mean of the second half of its curve) after "
            f"{reached['DSGLD'][0]:.0f} samples, FSGLD "
            f"to the same after {reached['FSGLD'][0]:.0f}; until then FSGLD is ahead at {ahead} "
            f"and behind at {behind} of {len(gap)} points by more than {TIMES:g} s.e. (on average "
            f"by {gap.mean():.4f} nats); nine tenths of the way to its own level take "
            f"{reached['DSGLD'][1]:.0f} (DSGLD) and {reached['FSGLD'][1]:.0f} (FSGLD)"
        )
    word = first_that_holds(
        (all(sooner) and all(leads), REPRODUCED),
        (any(sooner), PARTLY),
        (any(leads), UNTESTABLE),  # ahead, but at no level sooner
        otherwise=CONTRADICTED,
    )
    return with_lost_settings(word, "; ".join(told))


def _first(holds: np.ndarray, samples: np.ndarray) -> float:
    """Return after how many samples a curve first is where it should be."""
    return float(samples[holds.argmax()]) if holds.any() else np.inf


def spread(metrics: Given, config: Given) -> Verdict:
    """Judge the error bars of the curves, and test differences within repetitions."""
    del config
    of = metrics["methods"]
    bars = metric_scores.bars(metrics)
    if not bars:
        return Verdict(UNTESTABLE, "FSGLD diverged, so that its bars are of fewer repetitions")
    told = [
        f"on {metric_scores.WHERE[key]} FSGLD's bars are the smaller ones at "
        f"{percent(bar.smaller)} of the points after burn-in and "
        f"{bar.FSGLD / bar.DSGLD:.2f} times DSGLD's on average"
        for key, bar in bars.items()
    ]
    overall = [bar.smaller >= MOST for bar in bars.values()]
    tests = []
    if "NUTS" in of:
        gaps = metric_scores.from_pooled(metrics)
        tests = [spreads.compare(gap["FSGLD"], gap["DSGLD"]) for gap in gaps.values()]
        told.append(
            "standard deviations over DSGLD's of what averages differ from pooled NUTS on the same "
            "pairs, by Pitman and Morgan's test: "
            + " and ".join(str(ratio) for ratio in tests)
            + "; DSGLD is further off, which inflates its own: "
            + metric_scores.of_their_gaps(metrics)
        )
    word = first_that_holds(
        (all(overall) and bool(tests) and all(r.high < 1 for r in tests), REPRODUCED),
        (any(overall) or any(r.high < 1 for r in tests), PARTLY),
        (all(bar.smaller <= 1 - MOST for bar in bars.values()), CONTRADICTED),
        otherwise=UNTESTABLE,
    )
    return with_lost_settings(word, "; ".join(told))


def laplace(metrics: Given, config: Given) -> Verdict:
    """Say what became of Laplace approximations as surrogates (appendix F.2)."""
    num, (row,) = config["num_repetitions"], rows_of(metrics, "method", "FSGLD")
    told = (
        "whatever a run gives, since what the appendix found is not in our copy; here FSGLD "
        f"diverged in {row['diverged']} of {num} repetitions (the paper's data, our prior and "
        "numbers of rounds and local steps)"
    )
    return Verdict(UNTESTABLE, told)
