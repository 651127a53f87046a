"""The claims of Liang et al. (2024), in the paper's order."""

import itertools
import math
from typing import Any

from experiments.claims import (
    CONTRADICTED,
    PARTLY,
    REPRODUCED,
    TIMES,
    UNTESTABLE,
    Claim,
    Given,
    Verdict,
    first_that_holds,
)
from experiments.fa_hmc.dimension_findings import with_logarithm
from experiments.fa_hmc.image_figures import TITLES
from experiments.fa_hmc.image_findings import compare, ranking
from experiments.fa_hmc.local_steps import turning
from experiments.fa_hmc.logistic_findings import best, between_steps, gain, spared

__all__ = ["CLAIMS"]

LONG = 200  # rounds, below which the scores are those of chains on their way
HIGH = ("fa_hmc/logistic", "fa_hmc/logistic_small")
CLAIMED = 65  # times fewer rounds with 70 local steps, by the paper
LOW = ("fa_hmc/logistic_low", "fa_hmc/logistic_low_small")


def _gain(kind: str) -> Any:
    def judge(metrics: Given, config: Given) -> Verdict:
        del config
        table = metrics["table"]
        longer = [row for row in table if row[f"L, {kind}"] > 1]
        if not longer:
            return Verdict(UNTESTABLE, "no step size with more than one leapfrog step")
        hmc, ld = best(longer, f"FA-HMC, {kind}"), best(table, f"FA-LD, {kind}")
        share, error = gain(hmc, ld)
        # Steps between those of the grid may be better.
        ours, theirs = (
            between_steps(longer, f"FA-HMC, {kind}"),
            between_steps(table, f"FA-LD, {kind}"),
        )
        least, most = 1 - hmc.error / theirs, 1 - ours / ld.error
        word = first_that_holds(
            (least > TIMES * error, REPRODUCED),
            (most < -TIMES * error, CONTRADICTED),
            otherwise=UNTESTABLE,
        )
        finer = ""
        if word == UNTESTABLE and abs(share) > TIMES * error:
            finer = f"; between the step sizes tried FA-LD may have {theirs:.3g}"
        return Verdict(
            word,
            f"{100 * share:+.0f} % (s.e. {100 * error:.0f} %): {hmc.error:.3g} and {ld.error:.3g}; "
            f"a perfect sampler has {metrics['floor']:.3g}{finer}",
        )

    return judge


def _local(metrics: Given, config: Given) -> Verdict:
    lines = metrics["local_steps"]
    reached = [line for line in lines if line["rounds to threshold"] is not None]
    tested = [
        line["T"] for line in lines if line in reached or line["floor"] <= metrics["threshold"]
    ]
    if not reached or lines[0]["rounds to threshold"] is None:
        return Verdict(UNTESTABLE, "the threshold was not reached with T = 1")
    fastest = min(reached, key=lambda line: line["rounds to threshold"])
    times = lines[0]["rounds to threshold"] / fastest["rounds to threshold"]
    inside = fastest["T"] < max(tested)
    word = first_that_holds(
        (times > 30 and inside, REPRODUCED), (times > 2, PARTLY), otherwise=CONTRADICTED
    )
    most = spared(metrics, config["num_chains"])
    ceiling = ""
    if most is not None and most < CLAIMED:
        ceiling = (
            f". At this threshold a perfect sampler needs {most:.2g} times fewer, so that "
            f"{CLAIMED} cannot be seen"
        )
    return Verdict(
        word,
        f"T = {fastest['T']} needs {times:.3g} times fewer rounds than T = 1; "
        + ("larger T need more again" if inside else "whether larger T need more is not tested")
        + ceiling,
    )


def _dimension(metrics: Given, config: Given) -> Verdict:
    power, (low, high) = metrics["power"], with_logarithm(metrics, config)
    word = first_that_holds(
        (abs(power - 0.5) < 0.05, REPRODUCED),
        (abs(power - 0.5) < 0.2, PARTLY),
        otherwise=CONTRADICTED,
    )
    first, last = (metrics["table"][i]["dimension"] for i in (0, -1))
    return Verdict(
        word,
        f"rounds grow as the dimension to the power {power:.2f} (claim: 0.5) from "
        f"{first} to {last}; over that root and a logarithm they lie "
        f"between {low:.2g} and {high:.2g}",
    )


def _in_u(metrics: Given, config: Given) -> Verdict:
    """Judge whether rounds fall and rise again with T, step sizes tuned for each T."""
    del config
    rows, fixed = metrics["table"], "noisy gradients, one step size"
    tuned = {name: turning(rows, name) for name in ("noisy gradients", "own momenta")}
    word = first_that_holds(
        (all(found["inside"] for found in tuned.values()), REPRODUCED),
        (any(found["inside"] for found in tuned.values()), PARTLY),
        (turning(rows, fixed)["inside"], PARTLY),
        otherwise=CONTRADICTED,
    )
    told = []
    if not any(found["inside"] for found in tuned.values()):
        told.append(f"with tuned step sizes no U up to T = {rows[-1]['T']}")
    for name, found in (tuned | {fixed: turning(rows, fixed)}).items():
        ends = [
            f"never there at T = {row['T']}"
            if times == math.inf
            else f"{times:.2g} times as many at T = {row['T']}"
            for row, times in ((rows[0], found["first"]), (rows[-1], found["last"]))
            if row["T"] != found["T"]
        ]
        told.append(f"{name}: fewest at T = {found['T']}, {', '.join(ends)}")
    return Verdict(word, "; ".join(told))


def _vanilla(metrics: Given, config: Given) -> Verdict:
    del config
    rows = metrics["table"]
    found = turning(rows, "vanilla")
    word = first_that_holds(
        (found["largest"] < 2, REPRODUCED),
        (found["T"] == rows[0]["T"], PARTLY),
        otherwise=CONTRADICTED,
    )
    listed = ", ".join(f"{row['vanilla']} (T = {row['T']})" for row in rows)
    return Verdict(word, f"rounds, by the law: {listed}")


def _falling(metrics: Given, config: Given) -> Verdict:
    del config
    rows = [row for row in metrics["schedules"] if row["constant"] and row["falling"]]
    if len(rows) < 2:
        return Verdict(UNTESTABLE, "chains do not arrive")
    saved = [row["constant"] / row["falling"] for row in rows]
    grows = all(b > a for a, b in itertools.pairwise(saved))
    word = first_that_holds((grows, REPRODUCED), (saved[-1] > 1, PARTLY), otherwise=CONTRADICTED)
    listed = ", ".join(
        f"{ratio:.2g} ({row['tolerance']:g})" for ratio, row in zip(saved, rows, strict=True)
    )
    return Verdict(
        word, f"rounds of the best constant step over the best falling one's (tolerance): {listed}"
    )


def _above_one(varied: str, names: tuple[str, ...], *, all_of_them: bool = False) -> Any:
    """Judge whether values above one, some or all, are better than one in the scores named."""

    def judge(metrics: Given, config: Given) -> Verdict:
        verdicts: dict[str, list[str]] = {}
        for name in names:
            ordered = ranking(metrics["results"], varied, name)
            one = [score for value, score in ordered if value == 1]
            more = [score for value, score in ordered if value > 1]
            other = more[-1 if all_of_them else 0] if more else None  # the best, or the worst
            said = compare(name, other, one[0])[0] if one and more else "not to be said"
            verdicts.setdefault(said, []).append(TITLES[name])
        better = {n for said, of in verdicts.items() if said.startswith("better") for n in of}
        worse = any(said.startswith("worse") for said in verdicts)
        rounds = metrics["rounds"][-1]
        word = first_that_holds(
            (len(better) == len(names), REPRODUCED if rounds >= LONG else PARTLY),
            (bool(better), PARTLY),
            (worse, CONTRADICTED),
            otherwise=UNTESTABLE,
        )
        if config["num_chains"] == 1 and rounds < LONG:
            word = UNTESTABLE
        listed = "; ".join(f"{said}: {', '.join(of)}" for said, of in verdicts.items())
        chains = f"{config['num_chains']} chain{'s' * (config['num_chains'] > 1)}"
        return Verdict(word, f"{listed} (after {rounds} rounds, {chains})")

    return judge


ALL = ("accuracy", "brier", "ece", "nnll")
PLAIN = ("accuracy", "brier", "ece")
CLAIMS = (
    Claim(
        "Theorem 4.1",
        "With noisy gradients or momenta that differ, rounds against T form a U.",
        "fa_hmc/local_steps",
        _in_u,
        "local_steps.png",
    ),
    Claim(
        "Section 4.1",
        "With exact gradients and shared momenta (vanilla) they hardly depend on T.",
        "fa_hmc/local_steps",
        _vanilla,
        "local_steps.png",
    ),
    Claim(
        "Proposition 4.5",
        "A step size that changes saves a logarithm of rounds.",
        "fa_hmc/local_steps",
        _falling,
        "local_steps.png",
    ),
    Claim(
        "Figure 1a",
        "Exact gradients: FA-HMC beats FA-LD by about 5 %.",
        "fa_hmc/logistic",
        _gain("exact"),
        "errors.png",
        HIGH,
    ),
    Claim(
        "Figure 1b",
        "Noisy gradients: FA-HMC beats FA-LD by about 5 %.",
        "fa_hmc/logistic",
        _gain("noisy"),
        "errors.png",
        HIGH,
    ),
    Claim(
        "Figure 1c",
        "70 local steps need 65 times fewer rounds than one; still more need more rounds again.",
        "fa_hmc/logistic",
        _local,
        "errors.png",
        HIGH,
    ),
    Claim(
        "Figure 1d",
        "In dimension 10, too, FA-HMC is better with noisy gradients.",
        "fa_hmc/logistic",
        _gain("noisy"),
        "errors.png",
        LOW,
    ),
    Claim(
        "Figure 2",
        "The square of the number of rounds is proportional to the dimension.",
        "fa_hmc/dimension",
        _dimension,
        "rounds.png",
    ),
    Claim(
        "Figure 3",
        "Fashion-MNIST: some L above 1 beats FA-LD (L = 1) in all four scores.",
        "fa_hmc/fashion_mnist",
        _above_one("L", ALL),
        "curves_L.png",
    ),
    Claim(
        "Figure 4",
        "Fashion-MNIST: T = 1 is the worst in all four scores.",
        "fa_hmc/fashion_mnist",
        _above_one("T", ALL, all_of_them=True),
        "curves_T.png",
    ),
    Claim(
        "Figure 5",
        "A network: some L above 1 is better in accuracy and ECE.",
        "fa_hmc/network",
        _above_one("L", ("accuracy", "ece")),
        "curves_L.png",
    ),
    Claim(
        "Figure 5",
        "A network: T = 1 is the worst.",
        "fa_hmc/network",
        _above_one("T", PLAIN, all_of_them=True),
        "curves_T.png",
    ),
    Claim(
        "Figure 6",
        "KMNIST: L = 1 is never the best.",
        "fa_hmc/kmnist",
        _above_one("L", PLAIN),
        "curves_L.png",
    ),
    Claim(
        "Figure 6",
        "Two classes of CIFAR-10: L = 1 is never the best.",
        "fa_hmc/cifar2",
        _above_one("L", PLAIN),
        "curves_L.png",
    ),
    Claim(
        "Figure 7",
        "KMNIST: some T above 1 is better in all scores.",
        "fa_hmc/kmnist",
        _above_one("T", PLAIN),
        "curves_T.png",
    ),
    Claim(
        "Figure 7",
        "Two classes of CIFAR-10: some T above 1 is better but for accuracy.",
        "fa_hmc/cifar2",
        _above_one("T", ("brier", "ece")),
        "curves_T.png",
    ),
)
