"""What runs of networks and linear models say about Tables 2, 5 and 6 and Figures 2, 4 and 7."""

from typing import Any

import numpy as np

from experiments.claims import (
    CONTRADICTED,
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
from experiments.fed_ep.differences import (
    Difference,
    accuracy,
    difference,
    difference_noise,
    fell,
)
from experiments.fed_ep.emnist import COVARIANCE
from experiments.fed_ep.findings import other_data, seeds

__all__ = [
    "ahead",
    "calibrated",
    "inference",
    "losses",
    "plain_is_enough",
    "sooner",
    "stateless",
]

# What the paper calls equal, in points of accuracy, by its own tables.
IDENTITY_GAP = 0.1  # of Table 2, that FedEP (I) is behind another at most
STATELESS_GAP = 1.8  # of Table 2, that FedSEP is behind FedEP at most
FEW_POINTS = 0.5  # a lead that a curve of accuracies hardly shows; Figure 4 has no numbers
SMALL_SIZE, LARGE_SIZE = 10_100, 172_900  # parameters of Figure 4's models
SCALED = ("L", "V")  # by `scale`
OWN, BASES = ("FedEP", "FedSEP"), ("FedAvg", "FedPA")


def ahead(family: str, papers: str, behind_fed_pa: tuple[str, ...] = ()) -> Any:
    """Judge whether a family is ahead of both baselines, of FedAvg alone with `behind_fed_pa`."""

    def judge(metrics: Given, config: Given) -> Verdict:
        names = [row["method"] for row in metrics["table"]]
        names = [name for name in names if name.startswith(f"{family} ")]
        finite = [n for n in names if accuracy(metrics, n) > 0]
        gains = {n[-2]: _over_better(metrics, n, n[-2] in behind_fed_pa) for n in finite}
        # What L and V add to the cavity is the paper's where it is not scaled.
        scaled = SCALED if papers == "emnist62" and config["scale"] != 1 else ()
        own = [gain for letter, gain in gains.items() if letter not in scaled]
        word = first_that_holds(
            (not own, UNTESTABLE),
            (all(g.above for g in own) and len(finite) == len(names), REPRODUCED),
            (all(g.below for g in own), CONTRADICTED),
            (any(g.above for g in own), PARTLY),
            (any(g.below for g in own), CONTRADICTED),
            otherwise=UNTESTABLE,
        )
        word = on_other_data(word, config["dataset"] != papers)
        told = f"points over the better baseline: {_listed(gains)}"
        if scaled:
            told += f"; {' and '.join(scaled)} are not judged: their `scale` is "
            told += f"{config['scale']:g}, at full size 1"
        other = papers == "emnist62" and config["covariance"] != COVARIANCE
        if other:  # what is not the paper's method says nothing of it
            word = UNTESTABLE
            told += f"; with a `covariance` of {config['covariance']:g}, the paper's is "
            told += f"{COVARIANCE:g}"
        if papers == "emnist62" and config["row_curvature"]:
            word = UNTESTABLE
            told += "; clients' steps are scaled by `row_curvature`, which the paper does not do"
        return Verdict(word, f"{told}; {_where(metrics, config, papers, (family,))}")

    return judge


def _over_better(metrics: Given, name: str, fed_avg_alone: bool) -> Difference:
    """Return the difference to the better baseline, or to FedAvg alone."""
    bases = BASES[:1] if fed_avg_alone else BASES
    return min((difference(metrics, name, base) for base in bases), key=lambda d: d.points)


def _listed(differences: dict[str, Difference]) -> str:
    """Return differences by letter, and their noise where it is that of test images."""
    if all(d.error is None for d in differences.values()):
        listed = ", ".join(f"{x} {d.points:+.1f}" for x, d in differences.items())
        largest = max((d.noise for d in differences.values()), default=0.0)
        return f"{listed} (noise of the test images {largest:.1f})"
    return ", ".join(f"{x} {d}" for x, d in differences.items())


def _where(metrics: Given, config: Given, papers: str, families: tuple[str, ...] = OWN) -> str:
    """Say how many seeds, which methods' points stood still or fell, and which data."""
    own = config["num_seeds"] * (config["num_rounds"] - config["num_burnin"])
    still = "".join(
        f"; {name} stood still in {rounds} of {own} rounds"
        for name, rounds in metrics.get("improper_rounds", {}).items()
        if rounds > 0 and name.split()[0] in families
    )
    lost = "".join(
        f"; {name} turned non-finite"
        if name in metrics["diverged"]
        else f"; {name} fell to {accuracy(metrics, name, 'end'):.1f} in the end"
        for name in metrics.get("by_round", ())
        if name.split()[0] in families and fell(metrics, name)
    )
    return f"{seeds(config)}{still}{lost}{other_data(config, papers)}"


def sooner(metrics: Given, config: Given) -> Verdict:
    """Judge whether all reach an accuracy in fewer rounds than the baselines."""
    level = metrics["settings"]["thresholds"][0]
    rounds = {row["method"]: row[f"rounds to {level:g} %"] for row in metrics["table"]}
    num = config["num_seeds"]
    reaching = {row["method"]: row.get(f"seeds to {level:g} %", num) for row in metrics["table"]}
    own = {n: r for n, r in rounds.items() if n.split()[0] in OWN}
    base = [rounds[n] for n in BASES if rounds[n] is not None]
    reached = [r for r in own.values() if r is not None]
    all_reach = len(reached) == len(own) and all(reaching[n] == num for n in own)
    # How far apart in rounds is noise is not known: an accuracy that only some reach is.
    leads = all(_over_better(metrics, name, False).above for name in own)
    word = first_that_holds(
        (all_reach and not base and leads, REPRODUCED),
        (all_reach and bool(base) and config["num_seeds"] > 1 and max(reached) < min(base), PARTLY),
        (bool(base) and not reached, CONTRADICTED),
        otherwise=UNTESTABLE,
    )

    def told(name: str) -> str:
        if rounds[name] is None:
            return f"{name} never"
        some = f" ({reaching[name]} of {num} seeds)" if reaching[name] < num else ""
        return f"{name} {rounds[name]:.0f}{some}"

    return Verdict(
        on_other_data(word, config["dataset"] != "cifar100"),
        f"rounds to {level:g} %: {', '.join(told(n) for n in (*own, *BASES))} "
        f"(the first possible: {config['num_burnin'] + config['window']}); "
        f"{_where(metrics, config, 'cifar100')}",
    )


def plain_is_enough(metrics: Given, config: Given) -> Verdict:
    """Judge whether a scaled identity is as accurate as the other ways of inference."""
    names = [row["method"] for row in metrics["table"]]
    others = {x: f"FedEP ({x})" for x in "MLV" if f"FedEP ({x})" in names}
    pairs = {x: (name, "FedEP (I)") for x, name in others.items()}
    behind = {x: difference(metrics, *pair) for x, pair in pairs.items()}
    return Verdict(
        on_other_data(_within(behind, IDENTITY_GAP), config["dataset"] != "cifar100"),
        f"points of the others over I: {_listed(behind)}; the paper, on CIFAR-100: "
        f"{_published(pairs)}; "
        f"{_where(metrics, config, 'cifar100', OWN[:1])}",
    )


def _published(pairs: dict[str, tuple[str, str]]) -> str:
    """Return the differences of Table 2 after all rounds, by letter."""
    points = {x: TABLE_2[one][1] - TABLE_2[other][1] for x, (one, other) in pairs.items()}
    return ", ".join(f"{x} {value:+.1f}" for x, value in points.items())


def _within(behind: dict[str, Difference], limit: float) -> str:
    """Judge whether nothing is further behind than `limit`; noise may hide either."""
    return all_or_some(
        [d.points + d.noise <= limit for d in behind.values()],
        [d.points - d.noise > limit for d in behind.values()],
    )


def stateless(metrics: Given, config: Given) -> Verdict:
    """Judge whether FedSEP is as accurate as FedEP, up to the gap of Table 2."""
    names = {row["method"] for row in metrics["table"]}
    both = [x for x in "IMLV" if {f"FedSEP ({x})", f"FedEP ({x})"} <= names]
    pairs = {x: (f"FedEP ({x})", f"FedSEP ({x})") for x in both}
    behind = {x: difference(metrics, *pair) for x, pair in pairs.items()}
    return Verdict(
        on_other_data(_within(behind, STATELESS_GAP), config["dataset"] != "cifar100"),
        f"points behind FedEP: {_listed(behind)}; the paper, on CIFAR-100: "
        f"{_published(pairs)}; "
        f"{_where(metrics, config, 'cifar100')}",
    )


def calibrated(metrics: Given, config: Given) -> Verdict:
    """Judge whether point estimates have smaller calibration errors than the baselines'."""
    errors = {row["method"]: row["ECE, point"] for row in metrics["table"]}
    base = min(errors["FedAvg"], errors["FedPA"])
    own = {n: v for n, v in errors.items() if n.split()[0] in OWN and v is not None}
    noise = difference_noise(metrics, 50.0)  # a share of a half has the most
    smaller = [n for n, v in own.items() if v < base - noise]
    larger = [n for n, v in own.items() if v > base + noise]
    word = first_that_holds(
        (len(smaller) == len(own), REPRODUCED),
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
        f"{'; larger: ' + ', '.join(larger) if larger else ''}; "
        f"{_where(metrics, config, 'cifar100')}",
    )


def inference(faster: bool) -> Any:
    """Judge whether natural gradients are sooner accurate than a scaled identity, or are not."""

    def judge(metrics: Given, config: Given) -> Verdict:
        window, size = metrics["settings"]["window"], metrics["num_parameters"]
        early, last = (
            difference(metrics, "FedEP (V)", "FedEP (I)", part) for part in ("early", "best")
        )
        none = early.points + early.noise <= FEW_POINTS
        seen = early.above and early.points > FEW_POINTS
        if faster:
            word = first_that_holds(
                (seen, REPRODUCED),
                (early.above, PARTLY),  # a lead, if one that a curve hardly shows
                (early.below or none, CONTRADICTED),
                otherwise=UNTESTABLE,
            )
        else:
            word = first_that_holds(
                (size <= SMALL_SIZE, UNTESTABLE),  # no large model
                (none, REPRODUCED),
                (seen, CONTRADICTED),
                otherwise=UNTESTABLE,
            )
        papers = f"{SMALL_SIZE / 1000:.1f}" if faster else f"{LARGE_SIZE / 1000:.1f}"
        also = "" if faster else f", and {SMALL_SIZE / 1000:.1f} of its small one"
        return Verdict(
            on_other_data(word, config["dataset"] != "cifar100"),
            f"V is {early} points from I in the first {window} rounds, {last} at their best; "
            f"{size:,} parameters (the paper: {papers} thousand{also}); "
            f"{_where(metrics, config, 'cifar100')}",
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
    own = {n: v for n, v in last.items() if n not in ("FedAvg", "FedPA")}
    base = min(v for n, v in last.items() if n not in own)
    listed = ", ".join(f"{n} {_loss(v)}" for n, v in own.items())
    return Verdict(
        UNTESTABLE,
        f"test loss in the last {window} rounds: {listed}; the better baseline {base:.2f}; "
        f"{seeds(config)}{other_data(config, 'cifar100')}",
    )


def _loss(value: float) -> str:
    if not np.isfinite(value):
        return "not finite in some seed"
    return f"{value:.2f}" if value < 100 else f"{value:.1e}"
