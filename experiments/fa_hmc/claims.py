"""The claims of Liang et al. (2024), in the paper's order."""

import itertools
import math
from collections.abc import Mapping
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
    on_other_data,
)
from experiments.fa_hmc import local_steps
from experiments.fa_hmc.dimension_findings import with_logarithm
from experiments.fa_hmc.image_comparisons import against_one, compare, share, standard_error, told
from experiments.fa_hmc.image_figures import TITLES
from experiments.fa_hmc.image_findings import same_work
from experiments.fa_hmc.logistic_findings import fewer, rises, told_spans
from experiments.fa_hmc.logistic_judging import BETTER, WORSE, compared, local, span

__all__ = ["CLAIMS"]

ALL_IMAGES = {"fashion_mnist": 60_000, "kmnist": 60_000, "cifar2": 10_000}  # for training
HIGH = ("fa_hmc/logistic", "fa_hmc/logistic_small")
LOW = ("fa_hmc/logistic_low", "fa_hmc/logistic_low_small")
CLAIMED = 65  # times fewer rounds with 70 local steps, by the paper
ABOUT = (0.025, 0.1)  # what "about 5 %" may be
WIDER = 1.5  # times as wide a range of step sizes, over the grid's coarseness


def _gain(kind: str, about: tuple[float, float] | None = None) -> Any:
    """Judge whether FA-HMC's best error is smaller, and by `about` so much."""

    def judge(metrics: Given, config: Given) -> Verdict:
        del config
        found = compared(metrics["table"], kind)
        if found is None:
            return Verdict(UNTESTABLE, "all step sizes with several leapfrog steps lost chains")
        noise = TIMES * found.error
        fits = about is None or (
            found.least - noise <= about[1] and max(found.most, found.share) + noise >= about[0]
        )
        word = first_that_holds(
            (found.word == BETTER, REPRODUCED if fits else PARTLY),
            (found.word == WORSE, CONTRADICTED),
            otherwise=UNTESTABLE,
        )
        drifted = word == CONTRADICTED and kind == "exact"  # as in the study
        return Verdict(
            word,
            f"{100 * found.share:+.0f} % (s.e. {100 * found.error:.0f} %): {found.hmc.error:.3g} "
            f"and {found.ld.error:.3g}; a perfect sampler has {metrics['floor']:.3g}"
            + (f"; {found.why}" if found.why else "")
            + ("; why: [`fa_hmc/drift`](#fa_hmcdrift)" if drifted else ""),
        )

    return judge


def _easy(metrics: Given, config: Given) -> Verdict:
    """Judge whether step sizes within a quarter of the best error lie in a wider range."""
    del config
    table, kinds, words = metrics["table"], ("exact", "noisy"), []
    for kind in kinds:
        longer = [row for row in table if row[f"L, {kind}"] > 1]
        hmc, ld = span(longer, f"FA-HMC, {kind}"), span(table, f"FA-LD, {kind}")
        if hmc is None or ld is None:
            words.append("")
            continue
        ratio = (hmc.largest / hmc.least) / (ld.largest / ld.least)
        words.append(
            first_that_holds(
                (ratio > WIDER and not ld.open, REPRODUCED),
                (ratio < 1 / WIDER and not hmc.open, CONTRADICTED),
                otherwise="",
            )
        )
    word = first_that_holds(
        (set(words) == {REPRODUCED}, REPRODUCED),
        (REPRODUCED in words, PARTLY),
        (CONTRADICTED in words, CONTRADICTED),
        otherwise=UNTESTABLE,
    )
    return Verdict(word, "; ".join(told_spans(table, kind) for kind in kinds))


def _fewer(metrics: Given, config: Given) -> Verdict:
    """Judge by how many times the best number of local steps has fewer rounds than one."""
    del config
    found = local(metrics)
    if found is None:
        return Verdict(UNTESTABLE, fewer(metrics))
    unseen = found.spared is not None and found.spared < CLAIMED
    word = first_that_holds(
        (found.times > CLAIMED, REPRODUCED),
        (found.times > 2, PARTLY),
        (found.arrived and not unseen, CONTRADICTED),
        otherwise=UNTESTABLE,
    )
    ceiling = f", so that {CLAIMED} cannot be seen at this threshold" if unseen else ""
    return Verdict(word, fewer(metrics) + ceiling)


def _rises(metrics: Given, config: Given) -> Verdict:
    """Judge whether a number of local steps above the best takes more rounds again."""
    del config
    found = local(metrics)
    return Verdict(REPRODUCED if found is not None and found.more else UNTESTABLE, rises(metrics))


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
    """Judge whether rounds fall and rise again with T, step sizes tuned for each T.

    The theorem bounds rounds of any target from above and says that they may: no U on one target
    contradicts nothing. At one step size drift alone has a U.
    """
    rows, fixed = metrics["table"], "noisy gradients, one step size"
    tuned = {name: local_steps.turning(rows, name) for name in ("noisy gradients", "own momenta")}
    word = first_that_holds(
        (all(found["inside"] for found in tuned.values()), REPRODUCED),
        (any(found["inside"] for found in tuned.values()), PARTLY),
        otherwise=UNTESTABLE,
    )
    told_ = []
    if word == UNTESTABLE:
        told_.append(f"no U up to T = {rows[-1]['T']} on this target, with tuned step sizes")
    told_ += [f"{name}: {_rounds(rows, name)}" for name in (*tuned, fixed)]
    exact = local_steps.exact_at_one_step(local_steps.Config(**config), rows)
    drift = local_steps.turning([{"T": t, "exact": n} for t, n in exact], "exact")["inside"]
    told_.append(
        f"exact gradients at that step size: {local_steps.listed(exact)}"
        + ", a U that drift alone makes" * drift
    )
    return Verdict(word, "; ".join(told_))


def _rounds(rows: list[dict[str, Any]], name: str) -> str:
    found = local_steps.turning(rows, name)
    ends = [
        f"never there at T = {row['T']}"
        if times == math.inf
        else f"{times:.2g} times as many at T = {row['T']}"
        for row, times in ((rows[0], found["first"]), (rows[-1], found["last"]))
        if times > 1
    ]
    return ", ".join([f"fewest at T = {found['T']}", *ends])


def _vanilla(metrics: Given, config: Given) -> Verdict:
    del config
    rows = metrics["table"]
    found, later = (local_steps.turning(of, "vanilla") for of in (rows, rows[1:]))
    word = first_that_holds(
        (found["largest"] < 2, REPRODUCED),
        (found["T"] == rows[0]["T"], PARTLY),
        otherwise=CONTRADICTED,
    )
    listed = ", ".join(f"{row['vanilla']} (T = {row['T']})" for row in rows)
    return Verdict(
        word,
        f"rounds, by the law: {listed}; the most are {found['largest']:.2g} times the fewest, "
        f"{later['largest']:.2g} times from T = {rows[1]['T']} on",
    )


def _falling(metrics: Given, config: Given) -> Verdict:
    rows = [row for row in metrics["schedules"] if row["constant"] and row["falling"]]
    if len(rows) < 2:
        return Verdict(UNTESTABLE, "chains do not arrive")
    saved = [row["constant"] / row["falling"] for row in rows]
    over = local_steps.over_logarithm(local_steps.Config(**config), rows)
    grows = all(b > a for a, b in itertools.pairwise(saved))
    word = first_that_holds(
        (grows and max(over) < 1.25 * min(over), REPRODUCED),
        (grows, PARTLY),
        otherwise=CONTRADICTED,
    )
    listed = ", ".join(
        f"{ratio:.2g} ({row['tolerance']:g})" for ratio, row in zip(saved, rows, strict=True)
    )
    return Verdict(
        word,
        f"rounds of the best constant step over the best falling one's (tolerance): {listed}; over "
        "the logarithm of the start's distance in tolerances: "
        + ", ".join(f"{x:.2f}" for x in over),
    )


def _above_one(varied: str, names: tuple[str, ...], *, all_of_them: bool = False) -> Any:
    """Judge whether values above one, some or all, are better than one in the scores named."""

    def judge(metrics: Given, config: Given) -> Verdict:
        found = {
            name: against_one(
                metrics["results"], varied, name, config["num_chains"], all_of_them=all_of_them
            )
            for name in names
        }
        words = {name: against.word for name, against in found.items()}
        texts = {name: told(against) for name, against in found.items()}
        return _of_scores(words, texts, metrics, config)

    return judge


def _one_best(varied: str, name: str) -> Any:
    """Judge whether one is better than all values above one in a score."""

    def judge(metrics: Given, config: Given) -> Verdict:
        found = against_one(metrics["results"], varied, name, config["num_chains"])
        opposite = {"better": "worse", "worse": "better", "worse so far": "better so far"}
        word = opposite.get(found.word, found.word)
        text = f"above 1 is {told(found)} better" if found.value else "-"
        return _of_scores({name: word}, {name: text}, metrics, config)

    return judge


def _same_work(metrics: Given, config: Given) -> Verdict:
    """Judge FA-HMC against FA-LD where both take as many leapfrog steps a round."""
    pairs = [pair for pair in same_work(metrics["results"]) if pair[1]["L"] == 1]
    if not pairs:
        return Verdict(UNTESTABLE, "no setting of FA-HMC takes as many leapfrog steps as FA-LD")
    long, short = pairs[0]
    words, texts = {}, {}
    for name in TITLES:
        ours, theirs = long["scores"][name], short["scores"][name]
        if None in (ours["mean"], theirs["mean"]):
            words[name], texts[name] = "not judged (diverged)", "-"
            continue
        words[name], gain = compare(name, ours, theirs, config["num_chains"])
        error = standard_error(ours, theirs, config["num_chains"])
        texts[name] = share(gain / theirs["mean"], error / theirs["mean"])
    title = "L = {L}, T = {T}".format(**long) + " against " + "L = {L}, T = {T}: ".format(**short)
    verdict = _of_scores(words, texts, metrics, config)
    return verdict._replace(number=title + verdict.number)


def _of_scores(
    words: Mapping[str, str], texts: Mapping[str, str], metrics: Given, config: Given
) -> Verdict:
    """Judge by how scores compare; what is better so far alone, or on other data, is so partly."""
    given = list(words.values())
    word = first_that_holds(
        (set(given) == {"better"}, REPRODUCED),
        (any(said.startswith("better") for said in given), PARTLY),
        ("worse" in given, CONTRADICTED),
        otherwise=UNTESTABLE,
    )
    other = metrics["num_rows"] < ALL_IMAGES[config["dataset"]]
    groups: dict[str, list[str]] = {}
    for name, said in words.items():
        groups.setdefault(said, []).append(f"{TITLES[name]} {texts[name]}")
    listed = "; ".join(f"{said}: {', '.join(of)}" for said, of in groups.items())
    chains = f"{config['num_chains']} chain{'s' * (config['num_chains'] > 1)}"
    return Verdict(
        on_other_data(word, other),
        f"{listed} (after {metrics['rounds'][-1]} rounds, {chains}, "
        f"{metrics['num_rows']:,} images)",
    )


ALL = ("accuracy", "brier", "ece", "nnll")
PLAIN = ("accuracy", "brier", "ece")
CLAIMS = (
    Claim(
        "Theorem 4.1",
        "With noisy gradients or momenta that differ, rounds against T may form a U, by a bound.",
        "fa_hmc/local_steps",
        _in_u,
        "local_steps.png",
    ),
    Claim(
        "Section 4.1",
        "With exact gradients and shared momenta (vanilla) rounds vary little with T.",
        "fa_hmc/local_steps",
        _vanilla,
        "local_steps.png",
    ),
    Claim(
        "Proposition 4.5",
        "A step size that changes saves a logarithmic factor of rounds.",
        "fa_hmc/local_steps",
        _falling,
        "local_steps.png",
    ),
    Claim(
        "Figure 1a",
        "Exact gradients: FA-HMC beats FA-LD by about 5 %.",
        "fa_hmc/logistic",
        _gain("exact", ABOUT),
        "errors.png",
        HIGH,
    ),
    Claim(
        "Figure 1b",
        "Noisy gradients: FA-HMC beats FA-LD by about 5 %.",
        "fa_hmc/logistic",
        _gain("noisy", ABOUT),
        "errors.png",
        HIGH,
    ),
    Claim(
        "Figures 1a, 1b",
        "A wide range of step sizes does well for FA-HMC: it is easier to tune than FA-LD.",
        "fa_hmc/logistic",
        _easy,
        "errors.png",
        HIGH,
    ),
    Claim(
        "Figure 1c",
        "About 70 local steps need more than 65 times fewer rounds than one.",
        "fa_hmc/logistic",
        _fewer,
        "errors.png",
        HIGH,
    ),
    Claim(
        "Figure 1c",
        "Local steps above the best number, 70, need more rounds again.",
        "fa_hmc/logistic",
        _rises,
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
        "The square of the number of rounds is approximately proportional to the dimension.",
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
        "Section 5.3",
        "Fashion-MNIST: FA-HMC beats FA-LD at the same computation, too.",
        "fa_hmc/fashion_mnist",
        _same_work,
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
        "A network: FA-LD (L = 1) is slightly better in Brier score.",
        "fa_hmc/network",
        _one_best("L", "brier"),
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
