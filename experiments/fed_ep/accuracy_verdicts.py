"""What runs of networks and linear models say about Tables 2, 5 and 6 and Figures 2, 4 and 7."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from experiments.claims import (
    CONTRADICTED,
    DRAWN,
    PARTLY,
    REPRODUCED,
    UNTESTABLE,
    Given,
    Verdict,
    all_or_some,
    first_that_holds,
    on_other_data,
)
from experiments.fed_ep.cifar_findings import TABLE_2
from experiments.fed_ep.counted import counted, first_of_levels, left_out, scaled, where
from experiments.fed_ep.differences import (
    Difference,
    accuracy,
    difference,
    difference_noise,
)
from experiments.fed_ep.emnist import COVARIANCE
from experiments.fed_ep.findings import other_data, seeds

__all__ = [
    "BEHIND_FED_PA",
    "ahead",
    "calibrated",
    "inference",
    "jump",
    "losses",
    "marginalized",
    "plain_is_enough",
    "reach",
    "sooner",
    "stateless",
]

# What the paper calls equal, in points of accuracy, by its own tables.
IDENTITY_GAP = 0.1  # of Table 2, that FedEP (I) is behind another at most
STATELESS_GAP = 1.8  # of Table 2, that FedSEP is behind FedEP at most
FEW_POINTS = 0.5  # a lead that a curve of accuracies hardly shows; Figure 4 has no numbers
SMALL_SIZE, LARGE_SIZE = 10_100, 172_900  # parameters of Figure 4's models
OWN, BASES = ("FedEP", "FedSEP"), ("FedAvg", "FedPA")
BEHIND_FED_PA = ("L",)  # of Table 2, in 1500 rounds


def ahead(family: str, papers: str, behind_fed_pa: tuple[str, ...] = ()) -> Any:
    """Judge whether a family is ahead of both baselines, of FedAvg alone with `behind_fed_pa`.

    At its best and in its last rounds, as in the paper's tables: a best accuracy may not last.
    """

    def judge(metrics: Given, config: Given) -> Verdict:
        names = [n for n in _names(metrics) if n.startswith(f"{family} ")]
        gains = {
            n: tuple(
                _over_better(metrics, n, n[-2] in behind_fed_pa, part) for part in ("best", "end")
            )
            for n in names
            if accuracy(metrics, n) > 0  # not of one that turned non-finite
        }
        apart = scaled(config, papers)
        own = [gains[n] for n in counted(metrics, config, list(gains), papers)]
        whole = len(own) == len([n for n in names if n[-2] not in apart])
        above = [best.above and end.above for best, end in own]
        below = [best.below or end.below for best, end in own]
        word = first_that_holds(
            (not own, UNTESTABLE),
            (all(above) and whole, REPRODUCED),
            (all(below), CONTRADICTED),
            (any(above), PARTLY),
            (any(below), CONTRADICTED),
            otherwise=UNTESTABLE,
        )
        word = on_other_data(word, config["dataset"] != papers)
        listed = "; ".join(f"{n[-2]} {best}, {end}" for n, (best, end) in gains.items())
        told = (
            f"points over the better baseline, at their best and in the last "
            f"{metrics['settings']['window']} rounds: {listed}"
        )
        told += left_out(metrics, config, names, papers)
        other, why = _other_method(config, papers)
        word = UNTESTABLE if other else word
        return Verdict(word, f"{told}{why}; {where(metrics, config, papers, (family,))}")

    return judge


def _names(metrics: Given) -> list[str]:
    return [row["method"] for row in metrics["table"]]


def _other_method(config: Given, papers: str) -> tuple[bool, str]:
    """Return whether FedSEP is not the paper's on EMNIST, and why: it says nothing of it."""
    told = ""
    if papers == "emnist62" and config["covariance"] != COVARIANCE:
        told += f"; with a `covariance` of {config['covariance']:g}, the paper's is {COVARIANCE:g}"
    if papers == "emnist62" and config["row_curvature"]:
        told += "; clients' steps are scaled by `row_curvature`, which the paper does not do"
    return bool(told), told


def _over_better(metrics: Given, name: str, fed_avg_alone: bool, part: str) -> Difference:
    """Return the difference to the better baseline, or to FedAvg alone."""
    bases = BASES[:1] if fed_avg_alone else BASES
    return min((difference(metrics, name, base, part) for base in bases), key=lambda d: d.points)


def _listed(differences: dict[str, Difference]) -> str:
    """Return differences by letter, and their noise where it is that of test images."""
    if all(d.error is None for d in differences.values()):
        listed = ", ".join(f"{x} {d.points:+.1f}" for x, d in differences.items())
        largest = max((d.noise for d in differences.values()), default=0.0)
        return f"{listed} (noise of the test images {largest:.1f})"
    return ", ".join(f"{x} {d}" for x, d in differences.items())


def sooner(papers: str) -> Any:
    """Judge whether all reach an accuracy in fewer rounds than the baselines."""

    def judge(metrics: Given, config: Given) -> Verdict:
        level = first_of_levels(metrics, config)
        names = [n for n in _names(metrics) if n not in BASES]
        own = counted(metrics, config, names, papers)
        num = config["num_seeds"]
        reaching = {n: _reached(metrics, config, n, level)[1] for n in (*names, *BASES)}
        first = {n: [_before(metrics, config, n, base, level) for base in BASES] for n in own}
        leads = all(_over_better(metrics, n, False, "best").above for n in own)
        none = not any(reaching[base] for base in BASES)
        # Where means are all that a record has, how far apart in rounds is noise is not known.
        paired = num > 1 and "rounds_by_seed" in metrics
        word = first_that_holds(
            (not own, UNTESTABLE),
            (none and leads and all(reaching[n] == num for n in own), REPRODUCED),
            (not none and not any(reaching[n] for n in own), CONTRADICTED),
            (num == 1, UNTESTABLE),
            (paired and all(all(x is True for x in of) for of in first.values()), REPRODUCED),
            (any(all(x is True for x in of) for of in first.values()), PARTLY),
            (any(x is False for of in first.values() for x in of), CONTRADICTED),
            otherwise=UNTESTABLE,
        )

        def told(name: str) -> str:
            mean, count = _reached(metrics, config, name, level)
            if not count:
                return f"{name} never"
            return f"{name} {mean:.0f}" + (f" ({count} of {num} seeds)" if count < num else "")

        listed = ", ".join(told(n) for n in (*names, *BASES))
        fewer = [n for n, of in first.items() if all(x is True for x in of)]
        how = "in all seeds" if paired else "by means, whose noise the record does not have"
        other, why = _other_method(config, papers)
        return Verdict(
            UNTESTABLE if other else on_other_data(word, config["dataset"] != papers),
            f"rounds to {level:g} %: {listed}; in fewer rounds than both {how} (a seed that does "
            f"not get there counts as later): {', '.join(fewer) or 'none'} of "
            f"{len(own)} judged{left_out(metrics, config, names, papers)}{why}; "
            f"{where(metrics, config, papers, brief=True)}",
        )

    return judge


def _reached(metrics: Given, config: Given, name: str, level: float) -> tuple[float, int]:
    """Return the mean round in which a method's seeds reach an accuracy, and how many do."""
    (row,) = [row for row in metrics["table"] if row["method"] == name]
    rounds = row[f"rounds to {level:g} %"]
    if rounds is None:
        return math.inf, 0
    return rounds, row.get(f"seeds to {level:g} %", config["num_seeds"])


def _before(metrics: Given, config: Given, name: str, base: str, level: float) -> bool | None:
    """Return whether `name` reaches an accuracy before `base`, ``None`` where that is open.

    Within seeds where the record has them. Else by means, of which that of some seeds alone is
    bounded from below: the others reach it after the last round, if ever.
    """
    by_seed = metrics.get("rounds_by_seed", {}).get(f"{level:g}")
    if by_seed:
        never = math.inf
        both = [[never if r is None else r for r in by_seed[n]] for n in (name, base)]
        pairs = list(zip(*both, strict=True))
        if all(a < b for a, b in pairs):
            return True
        return False if all(a > b for a, b in pairs) else None
    num, after = config["num_seeds"], config["num_rounds"] + 1

    def least(mean: float, count: int) -> float:
        return ((mean * count if count else 0.0) + (num - count) * after) / num

    one, other = _reached(metrics, config, name, level), _reached(metrics, config, base, level)
    if one[1] == num and one[0] < least(*other):
        return True
    return False if other[1] == num and other[0] < least(*one) else None


def reach(metrics: Given, config: Given) -> Verdict:
    """Judge whether the methods that reach the last accuracy are those of Table 2."""
    level, num = metrics["settings"]["thresholds"][-1], config["num_seeds"]
    names = _names(metrics)
    reaching = {n: _reached(metrics, config, n, level)[1] for n in names}
    own = [n for n in names if n in BASES or n in counted(metrics, config, names, "cifar100")]
    theirs = [n for n in own if TABLE_2[n][3] is not None]
    most = [n for n in own if reaching[n] > num / 2]
    word = first_that_holds(
        (not theirs or not most, UNTESTABLE),
        (most == theirs, REPRODUCED),
        (set(most) <= set(theirs), PARTLY),
        otherwise=CONTRADICTED,
    )
    listed = ", ".join(f"{n} in {count} of {num} seeds" for n, count in reaching.items() if count)
    return Verdict(
        on_other_data(word, config["dataset"] != "cifar100"),
        f"{level:g} % is reached by {listed or 'none'}"
        f"{left_out(metrics, config, names, 'cifar100')}; "
        f"{where(metrics, config, 'cifar100', brief=True)}",
    )


def jump(metrics: Given, config: Given) -> Verdict:
    """Judge whether accuracy rises with the switch from FedAvg to another method."""
    names = [n for n in _names(metrics) if n != "FedAvg"]
    own = [n for n in names if n == "FedPA" or n in counted(metrics, config, names, "cifar100")]
    early = {n: difference(metrics, n, "FedAvg", "early") for n in names}
    word = all_or_some([early[n].above for n in own], [early[n].below for n in own])
    listed = ", ".join(f"{n} {d}" for n, d in early.items())
    return Verdict(
        on_other_data(word, config["dataset"] != "cifar100"),
        f"points over FedAvg, had it gone on, in the first {metrics['settings']['window']} rounds: "
        f"{listed}{left_out(metrics, config, names, 'cifar100')}; "
        f"{where(metrics, config, 'cifar100', brief=True)}",
    )


def plain_is_enough(metrics: Given, config: Given) -> Verdict:
    """Judge whether a scaled identity is as accurate as the other ways of inference."""
    names = [n for n in _names(metrics) if n.startswith("FedEP ")]
    pairs = {n[-2]: (n, "FedEP (I)") for n in names if n != "FedEP (I)"}
    behind = {x: difference(metrics, *pair) for x, pair in pairs.items()}
    own = counted(metrics, config, names, "cifar100")
    judged = [d for x, d in behind.items() if f"FedEP ({x})" in own and "FedEP (I)" in own]
    word = on_other_data(_within(judged, IDENTITY_GAP), config["dataset"] != "cifar100")
    return Verdict(
        word,
        f"points of the others over I: {_listed(behind)}; the paper, on CIFAR-100: "
        f"{_published(pairs)}{left_out(metrics, config, names, 'cifar100')}; "
        f"{where(metrics, config, 'cifar100', OWN[:1], brief=True)}",
    )


def _published(pairs: dict[str, tuple[str, str]]) -> str:
    """Return the differences of Table 2 after all rounds, by letter."""
    points = {x: TABLE_2[one][1] - TABLE_2[other][1] for x, (one, other) in pairs.items()}
    return ", ".join(f"{x} {value:+.1f}" for x, value in points.items())


def _within(behind: Iterable[Difference], limit: float) -> str:
    """Judge whether nothing is further behind than `limit`; noise may hide either."""
    given = list(behind)
    if not given:
        return UNTESTABLE
    return all_or_some(
        [d.points + d.noise <= limit for d in given],
        [d.points - d.noise > limit for d in given],
    )


def stateless(metrics: Given, config: Given) -> Verdict:
    """Judge whether FedSEP is as accurate as FedEP, up to the gap of Table 2."""
    names = _names(metrics)
    both = [x for x in "IMLV" if {f"FedSEP ({x})", f"FedEP ({x})"} <= set(names)]
    pairs = {x: (f"FedEP ({x})", f"FedSEP ({x})") for x in both}
    behind = {x: difference(metrics, *pair) for x, pair in pairs.items()}
    own = set(counted(metrics, config, [n for n in names if n not in BASES], "cifar100"))
    judged = [behind[x] for x, pair in pairs.items() if set(pair) <= own]
    return Verdict(
        on_other_data(_within(judged, STATELESS_GAP), config["dataset"] != "cifar100"),
        f"points behind FedEP: {_listed(behind)}; the paper, on CIFAR-100: "
        f"{_published(pairs)}{left_out(metrics, config, names, 'cifar100')}; "
        f"{where(metrics, config, 'cifar100', brief=True)}",
    )


def calibrated(metrics: Given, config: Given) -> Verdict:
    """Judge whether point estimates have smaller calibration errors than the baselines'."""
    errors = {row["method"]: row["ECE, point"] for row in metrics["table"]}
    base = min(errors["FedAvg"], errors["FedPA"])
    own = {n: v for n, v in errors.items() if n.split()[0] in OWN and v is not None}
    noise = difference_noise(metrics, 50.0)  # a share of a half has the most
    judged = counted(metrics, config, list(own), "cifar100")
    smaller = [n for n in judged if own[n] < base - noise]
    larger = [n for n in judged if own[n] > base + noise]
    apart = scaled(config, "cifar100")
    whole = len(judged) == len([n for n in errors if n not in BASES and n[-2] not in apart])
    word = first_that_holds(
        (not judged, UNTESTABLE),
        (len(smaller) == len(judged) and whole, REPRODUCED),
        (bool(smaller), PARTLY),
        (bool(larger), CONTRADICTED),
        otherwise=UNTESTABLE,
    )
    word = on_other_data(word, config["dataset"] != "cifar100")
    return Verdict(
        word,
        f"ECE of the point after the last round in %: "
        f"{', '.join(f'{n} {v:.1f}' for n, v in own.items())}; better baseline {base:.1f} (noise "
        f"of the test images at most {noise:.1f})"
        f"{'; larger: ' + ', '.join(larger) if larger else ''}"
        f"{left_out(metrics, config, list(own), 'cifar100')}; "
        f"{where(metrics, config, 'cifar100', brief=True)}",
    )


def marginalized(metrics: Given, config: Given) -> Verdict:
    """Judge whether averaging over draws makes some calibration errors smaller."""
    errors = {
        row["method"]: (row["ECE, point"], row["ECE, marginal"])
        for row in metrics["table"]
        if row.get("ECE, marginal") is not None
    }
    noise = difference_noise(metrics, 50.0)
    gains = {n: point - marginal for n, (point, marginal) in errors.items()}
    judged = counted(metrics, config, list(gains), "cifar100")
    word = first_that_holds(
        (any(gains[n] > noise for n in judged), REPRODUCED),
        (bool(judged) and all(gains[n] < -noise for n in judged), CONTRADICTED),
        otherwise=UNTESTABLE,
    )
    listed = ", ".join(f"{n} {point:.1f}, {own:.1f}" for n, (point, own) in errors.items())
    return Verdict(
        on_other_data(word, config["dataset"] != "cifar100"),
        f"ECE in %, point and marginal: {listed} (noise of the test images at most {noise:.1f})"
        f"{left_out(metrics, config, list(gains), 'cifar100')}; "
        f"{where(metrics, config, 'cifar100', brief=True)}",
    )


def inference(faster: bool) -> Any:
    """Judge whether natural gradients are sooner accurate than a scaled identity, or are not."""

    def judge(metrics: Given, config: Given) -> Verdict:
        window, size = metrics["settings"]["window"], metrics["num_parameters"]
        names = ["FedEP (V)", "FedEP (I)"]
        early, best, end = (difference(metrics, *names, part) for part in ("early", "best", "end"))
        other = names != counted(metrics, config, names, "cifar100")
        none = early.points + early.noise <= FEW_POINTS
        seen = early.above and early.points > FEW_POINTS
        if faster:
            word = first_that_holds(
                (other, UNTESTABLE),
                (seen, REPRODUCED),
                (early.above, PARTLY),  # a lead, if one that a curve hardly shows
                (early.below or none, CONTRADICTED),
                otherwise=UNTESTABLE,
            )
        else:
            word = first_that_holds(
                (other or size <= SMALL_SIZE, UNTESTABLE),  # no large model
                (none, REPRODUCED),
                (seen, CONTRADICTED),
                otherwise=UNTESTABLE,
            )
        papers = f"{SMALL_SIZE / 1000:.1f}" if faster else f"{LARGE_SIZE / 1000:.1f}"
        also = "" if faster else f", and {SMALL_SIZE / 1000:.1f} of its small one"
        return Verdict(
            on_other_data(word, config["dataset"] != "cifar100"),
            f"V is {early} points from I in the first {window} rounds, {best} at their best, {end} "
            f"in the last {window}; {size:,} parameters (the paper: {papers} thousand{also})"
            f"{left_out(metrics, config, names, 'cifar100')}; "
            f"{where(metrics, config, 'cifar100', brief=True)}",
        )

    return judge


def losses(metrics: Given, config: Given) -> Verdict:
    """Say with which loss FedEP and FedSEP end, beside FedAvg and FedPA."""
    window = metrics["settings"]["window"]
    curves = metrics.get("loss_by_round")
    if curves is None:
        return Verdict(UNTESTABLE, "this run kept accuracies alone")
    # A record has no number where a loss is not finite.
    last = {name: np.mean(np.array(values[-window:], float)) for name, values in curves.items()}
    own = {n: v for n, v in last.items() if n not in BASES}
    base = min(v for n, v in last.items() if n not in own)
    listed = ", ".join(f"{n} {_loss(v)}" for n, v in own.items())
    return Verdict(
        DRAWN,
        f"test loss in the last {window} rounds: {listed}; the better baseline {base:.2f}; "
        f"{seeds(config)}{other_data(config, 'cifar100')}",
    )


def _loss(value: float) -> str:
    # A softmax in single precision is zero far below the largest logit, and its logarithm infinite.
    if not np.isfinite(value):
        return "infinite (a probability rounded to 0)"
    return f"{value:.2f}" if value < 100 else f"{value:.1e}"
