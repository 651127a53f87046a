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
    with_lost_settings,
)
from experiments.fa_hmc import drift, local_steps
from experiments.fa_hmc.dimension_findings import with_logarithm
from experiments.fa_hmc.image_comparisons import (
    WORST_FIRST,
    Against,
    against_one,
    compare,
    larger_or_smaller,
    ranking,
    share,
    standard_error,
    told,
)
from experiments.fa_hmc.image_figures import TITLES
from experiments.fa_hmc.image_findings import LOST_ABOVE, LOST_ONE, same_work
from experiments.fa_hmc.logistic_findings import (
    CLAIMED_T,
    at_claimed,
    fewer,
    of_rule,
    rises,
    said,
    told_spans,
)
from experiments.fa_hmc.logistic_judging import (
    AGAIN,
    BETTER,
    WORSE,
    at_smallest,
    by_threshold,
    common_limit,
    compared,
    gains,
    local,
    longer,
    span,
)

__all__ = ["CLAIMS"]

ALL_IMAGES = {"fashion_mnist": 60_000, "kmnist": 60_000, "cifar2": 10_000}  # for training
HIGH = ("fa_hmc/logistic", "fa_hmc/logistic_small")
LOW = ("fa_hmc/logistic_low", "fa_hmc/logistic_low_small")
LEAPFROGS = (1, 10, 50, 100)  # the paper's L in section 5.3
BEST_L = 50  # of them, as inferred from "the optimal choice of leapfrog step is around 50"
CLAIMED = 65  # times fewer rounds with 70 local steps, by the paper
NEAR = 1.5  # times the paper's best T, or one over it: a best T there is its own
ABOUT = (0.025, 0.1)  # what "about 5 %" may be
WIDER = 1.5  # times as wide a range of step sizes, over the grid's coarseness


def _gain(kind: str, about: tuple[float, float] | None = None) -> Any:
    """Judge whether FA-HMC's best error is smaller, and by `about` so much.

    At an end of the step sizes or of ``L`` it is smaller by at least so much.
    """

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
            (found.word == BETTER, REPRODUCED if fits and not found.ends else PARTLY),
            (found.word == WORSE, CONTRADICTED),
            otherwise=UNTESTABLE,
        )
        better = found.word == BETTER
        told_ = [
            "at least "
            * (better and bool(found.ends))
            + f"{100 * found.share:+.0f} % (s.e. {100 * found.error:.0f} %): {found.hmc.error:.3g} "
            f"and {found.ld.error:.3g}; a perfect sampler has {metrics['floor']:.3g}"
        ]
        if better and found.ends:
            told_.append(f"FA-HMC's best is at an end of {' and of '.join(found.ends)}")
        if not better and found.share < 0:
            told_.append(f"{100 * found.most:+.0f} % if the grid and luck hide as much as they may")
        if found.why:
            told_.append(found.why)
        rule = of_rule(metrics["table"])
        if kind == "exact" and rule and found.share < 0:
            told_.append(f"L is by the rule as we recall it: {rule}")
            told_.append(
                f"[`fa_hmc/drift`](#fa_hmcdrift) shows in dimension {drift.Config().dim} what "
                "drift does; it did not decompose the gap here"
            )
        return Verdict(with_lost_settings(word), "; ".join(told_))

    return judge


def _easy(kind: str) -> Any:
    """Judge whether step sizes that do, by one limit for both, lie in a wider range."""

    def judge(metrics: Given, config: Given) -> Verdict:
        table, limit = metrics["table"], common_limit(metrics["table"], kind)
        if limit is None:
            return Verdict(UNTESTABLE, told_spans(table, kind))
        hmc = span(longer(table, kind), f"FA-HMC, {kind}", limit)
        ld = span(table, f"FA-LD, {kind}", limit)
        assert hmc is not None and ld is not None
        ratio = hmc.largest / hmc.least / (ld.largest / ld.least)
        word = first_that_holds(
            (not hmc.number, CONTRADICTED),
            (not ld.number or (ratio > WIDER and not ld.open), REPRODUCED),
            (ratio < 1 / WIDER and not hmc.open, CONTRADICTED),
            otherwise=UNTESTABLE,
        )
        why = "; the rule for L keeps the length of a trajectory nearly fixed"
        if kind == "noisy":
            tried = len(config.get("leapfrogs", ())) or "several"
            why = f"; at each step size FA-HMC has the best of {tried} L, FA-LD has one try"
        return Verdict(with_lost_settings(word), told_spans(table, kind) + why)

    return judge


def _small_steps(metrics: Given, config: Given) -> Verdict:
    """Judge whether FA-HMC does at the smaller half of step sizes."""
    del config
    words, told_ = [], []
    for kind in ("exact", "noisy"):
        found = at_smallest(metrics["table"], kind)
        if found is None:
            continue
        good, of = found
        words.append(
            first_that_holds(
                (good == of, REPRODUCED), (2 * good > of, PARTLY), otherwise=CONTRADICTED
            )
        )
        told_.append(f"{kind} gradients: at {good} of the {of} smallest step sizes")
    word = first_that_holds(
        (bool(words) and set(words) == {REPRODUCED}, REPRODUCED),
        (bool({REPRODUCED, PARTLY} & set(words)), PARTLY),
        (CONTRADICTED in words, CONTRADICTED),
        otherwise=UNTESTABLE,
    )
    limit = "errors up to a quarter above the better method's best; "
    return Verdict(with_lost_settings(word), limit + ("; ".join(told_) or "chains were lost"))


def _near(num: int) -> bool:
    return CLAIMED_T / NEAR <= num <= CLAIMED_T * NEAR


def _fewer(metrics: Given, config: Given) -> Verdict:
    """Judge by how many times the best number of local steps has fewer rounds than one."""
    del config
    found = local(metrics)
    if found is None:
        return Verdict(UNTESTABLE, fewer(metrics))
    unseen = found.spared is not None and found.spared < CLAIMED
    word = first_that_holds(
        (unseen, UNTESTABLE),
        (found.times > CLAIMED and _near(found.fastest["T"]), REPRODUCED),
        (found.times > 2, PARTLY),
        (found.arrived, CONTRADICTED),
        otherwise=UNTESTABLE,
    )
    told_ = [fewer(metrics)]
    if unseen:
        told_[0] += f", so that {CLAIMED} cannot be seen at this threshold"
    if (own := at_claimed(metrics)) and found.fastest["T"] != CLAIMED_T:
        told_.append(own)
    return Verdict(with_lost_settings(word), "; ".join(told_))


def _rises(metrics: Given, config: Given) -> Verdict:
    """Judge whether the paper's number of local steps is the best, and larger ones are worse."""
    del config
    found = local(metrics)
    if found is None or not found.more:
        return Verdict(UNTESTABLE, rises(metrics))
    word = REPRODUCED if _near(found.fastest["T"]) else PARTLY
    return Verdict(
        word,
        rises(metrics)
        + "; drift alone makes a U at one step size, too: see the row on Theorem 4.1",
    )


def _thresholds(metrics: Given, config: Given) -> Verdict:
    """Judge whether the best number of local steps saves more at smaller thresholds.

    Quotients of rounds are uncertain by two fifths each: they must differ by `AGAIN` times.
    """
    del config
    found = by_threshold(metrics)
    if len(found) < 2:
        return Verdict(UNTESTABLE, "the first T does not reach the threshold")
    saved = [times for _, _, times in found]
    word = first_that_holds(
        (saved[-1] > AGAIN * saved[0] and saved == sorted(saved), REPRODUCED),
        (saved[-1] > AGAIN * saved[0], PARTLY),
        (saved[-1] * AGAIN < saved[0], CONTRADICTED),
        otherwise=UNTESTABLE,
    )
    listed = ", ".join(f"{times:.2g} at {level:g} (T = {num})" for level, num, times in found)
    return Verdict(
        with_lost_settings(word),
        f"times fewer rounds, by the threshold: {listed}"
        + f"; differences below {AGAIN:g} times may be noise" * (word == UNTESTABLE),
    )


def _larger_gap(metrics: Given, config: Given) -> Verdict:
    """Judge whether FA-HMC's advantage with noisy gradients is larger at smaller step sizes."""
    del config
    found = gains(metrics["table"], "noisy")
    if len(found) < 3:
        return Verdict(UNTESTABLE, "chains were lost")
    shares = [gain for _, gain in found]
    word = first_that_holds(
        (shares == sorted(shares, reverse=True), REPRODUCED),
        (shares[0] == max(shares) and shares[-1] == min(shares), PARTLY),
        otherwise=CONTRADICTED,
    )
    shown = [found[i] for i in (0, len(found) // 2, -1)]
    listed = ", ".join(f"{100 * gain:+.0f} % ({step:.3g})" for step, gain in shown)
    first = min(metrics["table"], key=lambda row: row["step size"])
    return Verdict(
        with_lost_settings(word),
        f"gain at the smallest, a middle and the largest step size: {listed}; at the smallest "
        f"FA-LD has an error of {first['FA-LD, noisy']:.2g}, as its chains hardly move",
    )


def _more_in_high(metrics: Given, config: Given) -> Verdict:
    """Judge whether the gain in low dimension is below the paper's own in high dimension."""
    del config
    found = compared(metrics["table"], "noisy")
    if found is None:
        return Verdict(UNTESTABLE, "chains were lost")
    noise, high = TIMES * found.error, 0.05
    return Verdict(
        PARTLY if found.share + noise < high else UNTESTABLE,
        f"in dimension {metrics['dim']} the gain is {share(found.share, found.error)}: differences "
        f"of gains below {100 * noise:.0f} % cannot be told from none",
    )


def _corrected(metrics: Given, config: Given) -> Verdict:
    """Judge whether control variates take the bias of local steps from FA-HMC's best error."""
    del config
    plain, both = drift.METHODS[0], drift.METHODS[1:4:2]
    found = drift.against(metrics, both[1], plain)
    if found is None:
        return Verdict(UNTESTABLE, "chains were lost")
    gain, error = found
    word = first_that_holds(
        (gain > TIMES * error, REPRODUCED),
        (gain < -TIMES * error, CONTRADICTED),
        otherwise=UNTESTABLE,
    )
    return Verdict(
        word,
        f"in dimension {metrics['dim']} FA-HMC's best error is "
        f"{drift.compared(metrics, 'FA-HMC')} than FA-LD's, with control variates "
        f"{said(gain, error)}, and {drift.compared(metrics, both[1], both[0])} than FA-LD's with "
        f"them{drift.excess(metrics)}",
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
        with_lost_settings(word),
        f"rounds grow as the dimension to the power {power:.2f} (claim: 0.5) from "
        f"{first} to {last}; divided by sqrt(d) log(distance / tolerance) they lie "
        f"between {low:.2g} and {high:.2g}; the step's power of d is derived from this conclusion, "
        "as formula (2) is lost",
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
    return ", ".join([f"fewest {local_steps.fewest_at(rows, name)}", *ends])


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
        with_lost_settings(word),
        f"rounds, by the law: {listed}; the most are {found['largest']:.2g} times the fewest, "
        f"{later['largest']:.2g} times from T = {rows[1]['T']} on",
    )


def _falling(metrics: Given, config: Given) -> Verdict:
    """Judge whether a falling step saves a logarithm on one target.

    The paper has it of a bound, for all targets: one of them shows it partly at most.
    """
    rows = [row for row in metrics["schedules"] if row["constant"] and row["falling"]]
    if len(rows) < 2:
        return Verdict(UNTESTABLE, "chains do not arrive")
    saved = [row["constant"] / row["falling"] for row in rows]
    over = local_steps.over_logarithm(local_steps.Config(**config), rows)
    grows = all(b > a for a, b in itertools.pairwise(saved))
    word = first_that_holds(
        (grows and max(over) < 1.25 * min(over), PARTLY),
        otherwise=UNTESTABLE,
    )
    listed = ", ".join(
        f"{ratio:.2g} ({row['tolerance']:g})" for ratio, row in zip(saved, rows, strict=True)
    )
    return Verdict(
        word,
        "on one Gaussian target, rounds of the best constant step over the best falling one's "
        f"(tolerance): {listed}; this saving divided by log(start's distance / tolerance): "
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
        text = larger_or_smaller(found, varied, name, TITLES[name]) if found.value else "-"
        return _of_scores({name: word}, {name: text}, metrics, config, titled=False)

    return judge


def _worst_and_second(metrics: Given, config: Given) -> Verdict:
    """Judge whether L = 1 is the worst in three scores and the second worst in accuracy.

    Second worst is told only where all of the paper's ``L`` ran; else, whether it is not the best.
    """
    results, chains = metrics["results"], config["num_chains"]
    found = {
        name: against_one(results, "L", name, chains, all_of_them=name != "accuracy")
        for name in ALL
    }
    words = {name: against.word for name, against in found.items()}
    texts = {name: told(against) for name, against in found.items()}
    missing = [num for num in LEAPFROGS if num not in {r["L"] for r in results}]
    if not missing and words["accuracy"] == "better":
        order = [value for value, _ in ranking(results, "L", "accuracy")]
        words["accuracy"] = "better" if order[-2:-1] == [1] else "not second worst"
    if missing:
        texts["accuracy"] += f" (second worst is not told without L = {missing[0]})"
        words["accuracy"] = words["accuracy"].replace("better", "better than some", 1)
    return _of_scores(words, texts, metrics, config)


def _best_values(varied: str, wanted: Mapping[str, tuple[int, ...]]) -> Any:
    """Judge whether in each score the best value is one of those wanted, against all others."""

    def judge(metrics: Given, config: Given) -> Verdict:
        words, texts = {}, {}
        for name, values in wanted.items():
            ordered = ranking(metrics["results"], varied, name)
            ours = next((pair for pair in ordered if pair[0] in values), None)
            others = [pair for pair in ordered if pair[0] not in values]
            if ours is None or not others:
                words[name], texts[name] = "not tried", ""
                continue
            found = []
            for value, score in others:
                word, gain = compare(name, ours[1], score, config["num_chains"])
                error = standard_error(ours[1], score, config["num_chains"])
                mean = abs(score["mean"])
                found.append(Against(word, value, gain / mean, error / mean))
            least = min(found, key=lambda against: WORST_FIRST.index(against.word))
            words[name] = least.word
            texts[name] = (
                f"{varied} = {ours[0]} against {least.value} {share(least.gain, least.error)}"
            )
        return _of_scores(words, texts, metrics, config)

    return judge


def _gains_of_best(metrics: Given, config: Given) -> Verdict:
    """Judge by which shares the paper's best L is better than one: 26 % in ECE, 2 % in NLL.

    The paper has them as the most that is reached: half of each suffices.
    """
    chains, words, texts = config["num_chains"], {}, {}
    for name, claimed in (("ece", 0.26), ("nnll", 0.02)):
        scores = dict(ranking(metrics["results"], "L", name))
        if not {1, BEST_L} <= set(scores):
            words[name], texts[name] = "not tried", ""
            continue
        ours, one = scores[BEST_L], scores[1]
        word, gain = compare(name, ours, one, chains)
        error = standard_error(ours, one, chains) / one["mean"]
        gain = gain / one["mean"]
        if word == "better" and not claimed / 2 <= gain <= 2 * claimed:
            word = "better, by another amount"
        words[name], texts[name] = word, f"{share(gain, error)} (claim: {100 * claimed:.0f} %)"
    return _of_scores(words, texts, metrics, config)


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
    words: Mapping[str, str],
    texts: Mapping[str, str],
    metrics: Given,
    config: Given,
    *,
    titled: bool = True,
) -> Verdict:
    """Judge by how scores compare; what is better so far alone, or on other data, is so partly.

    What is worse may be so by the settings that the paper does not state.
    """
    given = list(words.values())
    word = first_that_holds(
        (set(given) == {"better"}, REPRODUCED),
        (any(how.startswith("better") for how in given), PARTLY),
        ("worse" in given, CONTRADICTED),
        otherwise=UNTESTABLE,
    )
    other = metrics["num_rows"] < ALL_IMAGES[config["dataset"]]
    groups: dict[str, list[str]] = {}
    for name, how in words.items():
        groups.setdefault(how, []).append(
            f"{TITLES[name]} {texts[name]}" if titled else texts[name]
        )
    listed = "; ".join(f"{how}: {', '.join(of)}" for how, of in groups.items())
    chains = f"{config['num_chains']} chain{'s' * (config['num_chains'] > 1)}"
    return Verdict(
        on_other_data(with_lost_settings(word), other),
        f"{listed} (after {metrics['rounds'][-1]} rounds, {chains}, "
        f"{metrics['num_rows']:,} images)",
    )


ALL = ("accuracy", "brier", "ece", "nnll")
PLAIN = ("accuracy", "brier", "ece")
CLAIMS = (
    Claim(
        "Theorem 4.1",
        "The bound lets rounds form a U against T with noisy gradients, or momenta that differ.",
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
        "A step size that changes saves a logarithmic factor of the bound on rounds.",
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
        "Figure 1a",
        "A wide range of step sizes does well for FA-HMC: it is easier to tune than FA-LD.",
        "fa_hmc/logistic",
        _easy("exact"),
        "errors.png",
        HIGH,
    ),
    Claim(
        "Figure 1b",
        "A wide range of step sizes does well for FA-HMC: it is easier to tune than FA-LD.",
        "fa_hmc/logistic",
        _easy("noisy"),
        "errors.png",
        HIGH,
    ),
    Claim(
        "Figures 1a, 1b",
        "A small step size usually does well for FA-HMC.",
        "fa_hmc/logistic",
        _small_steps,
        "errors.png",
        HIGH,
    ),
    Claim(
        "Figure 1c",
        "The best T, 70, needs more than 65 times fewer rounds than another T "
        f"{LOST_ONE}, where a setting (lost, presumably the ME) has some value (lost, too).",
        "fa_hmc/logistic",
        _fewer,
        "errors.png",
        HIGH,
    ),
    Claim(
        "Figure 1c",
        "The best T is 70; larger ones need more rounds again.",
        "fa_hmc/logistic",
        _rises,
        "errors.png",
        HIGH,
    ),
    Claim(
        "Figure 1c",
        "The best T saves more rounds, against another "
        f"{LOST_ONE}, the smaller a setting is (lost, presumably the ME).",
        "fa_hmc/logistic",
        _thresholds,
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
        "Figure 1d",
        "In dimension 10 the gap is larger for smaller step sizes.",
        "fa_hmc/logistic",
        _larger_gap,
        "errors.png",
        LOW,
    ),
    Claim(
        "Figures 1b, 1d",
        "FA-HMC's advantage is larger in high dimension.",
        "fa_hmc/logistic",
        _more_in_high,
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
        "Fashion-MNIST: FA-LD (L = 1) is the worst in Brier score, ECE and NLL and the second "
        "worst in accuracy.",
        "fa_hmc/fashion_mnist",
        _worst_and_second,
        "curves_L.png",
    ),
    Claim(
        "Figure 3",
        "Fashion-MNIST: one L (value lost, presumably 50) is the best in accuracy, Brier score "
        "and NLL.",
        "fa_hmc/fashion_mnist",
        _best_values("L", dict.fromkeys(("accuracy", "brier", "nnll"), (BEST_L,))),
        "curves_L.png",
    ),
    Claim(
        "Figure 3",
        f"Fashion-MNIST: it is up to 26 % better in ECE and 2 % in NLL than another L {LOST_ONE}.",
        "fa_hmc/fashion_mnist",
        _gains_of_best,
        "curves_L.png",
    ),
    Claim(
        "Section 5.3",
        "Fashion-MNIST: FA-HMC beats FA-LD at the same computation, too.",
        "fa_hmc/fashion_mnist",
        _same_work,
    ),
    Claim(
        "Figure 4",
        f"Fashion-MNIST: one T {LOST_ONE} is the worst in all four scores.",
        "fa_hmc/fashion_mnist",
        _above_one("T", ALL, all_of_them=True),
        "curves_T.png",
    ),
    Claim(
        "Figure 4",
        "Fashion-MNIST: T = 50 is the best in Brier score, T = 20 in NLL.",
        "fa_hmc/fashion_mnist",
        _best_values("T", {"brier": (50,), "nnll": (20,)}),
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
        f"A network: one T {LOST_ONE} is the worst.",
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
        "Figure 6",
        "Two classes of CIFAR-10: L = 10 is the best in accuracy and Brier score, a larger one in "
        "ECE.",
        "fa_hmc/cifar2",
        _best_values("L", {"accuracy": (10,), "brier": (10,), "ece": (50, 100)}),
        "curves_L.png",
    ),
    Claim(
        "Figure 7",
        f"KMNIST: T {LOST_ABOVE} is better than another {LOST_ONE} in all scores.",
        "fa_hmc/kmnist",
        _above_one("T", PLAIN),
        "curves_T.png",
    ),
    Claim(
        "Figure 7",
        f"Two classes of CIFAR-10: T {LOST_ABOVE} is better than another {LOST_ONE} but for "
        "accuracy.",
        "fa_hmc/cifar2",
        _above_one("T", ("brier", "ece")),
        "curves_T.png",
    ),
    Claim(
        "Section 6",
        "Control variates, which the paper proposes and does not try, have FA-HMC beat FA-LD "
        "with exact gradients.",
        "fa_hmc/drift",
        _corrected,
        "drift.png",
        ("fa_hmc/drift_1000", "fa_hmc/drift"),
        ours=True,
    ),
)
