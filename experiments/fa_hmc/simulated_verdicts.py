"""What simulated runs and exact laws say about section 4, section 6 and Figures 1 and 2."""

import itertools
import math
from typing import Any

from experiments.claims import (
    CONTRADICTED,
    PARTLY,
    REPRODUCED,
    TIMES,
    UNTESTABLE,
    Given,
    Verdict,
    first_that_holds,
    with_lost_settings,
)
from experiments.fa_hmc import drift, local_steps_findings, rounds_by_law
from experiments.fa_hmc.dimension_findings import with_logarithm
from experiments.fa_hmc.image_comparisons import share
from experiments.fa_hmc.local_steps_law import Settings
from experiments.fa_hmc.logistic_findings import (
    CLAIMED_T,
    around_own_best,
    of_lengths,
    of_rule,
    said,
    told_spans,
)
from experiments.fa_hmc.logistic_judging import (
    BETTER,
    WORSE,
    at_smallest,
    common_limit,
    compared,
    gains,
    longer,
    span,
)

__all__ = [
    "best_is_claimed",
    "corrected",
    "dimension",
    "easy",
    "falling",
    "fewer_rounds",
    "gain",
    "in_u",
    "larger_gap",
    "more_in_high",
    "small_steps",
    "thresholds",
    "vanilla",
]

CLAIMED = 65  # times fewer rounds with 70 local steps, by the paper
WIDER = 1.5  # times as wide a range of step sizes, over the grid's coarseness


def gain(kind: str, about: tuple[float, float] | None = None) -> Any:
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
        least = "at least " * (better and bool(found.ends))
        told_ = [
            f"FA-HMC's best error is {least}{said(found.share, found.error)} than FA-LD's: "
            f"{found.hmc.error:.3g} against {found.ld.error:.3g}; a perfect sampler has "
            f"{metrics['floor']:.3g}"
        ]
        if better and found.ends:
            told_.append(f"FA-HMC's best is at an end of {' and of '.join(found.ends)}")
        if not better and found.share < 0:
            less = f"{100 * abs(found.most):.0f} % {'smaller' if found.most > 0 else 'larger'}"
            told_.append(f"{less} if the grid and luck hide as much as they may")
        if found.why:
            told_.append(found.why)
        rule = of_rule(metrics["table"])
        if kind == "exact" and rule and found.share < 0:
            told_.append(f"L is by the rule as we recall it: {rule}")
            told_.append(
                "how much of it is drift, on a finer grid: [`fa_hmc/drift_1000`](#fa_hmcdrift_1000)"
            )
        return with_lost_settings(word, "; ".join(told_))

    return judge


def easy(kind: str) -> Any:
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
        why = f"; {of_lengths(table, kind)}"
        if kind == "noisy":
            tried = len(config.get("leapfrogs", ())) or "several"
            why = f"; at each step size FA-HMC has the best of {tried} L, FA-LD has one try"
        return with_lost_settings(
            word, f"{told_spans(table, kind)}; not judged: {around_own_best(table, kind)}{why}"
        )

    return judge


def small_steps(metrics: Given, config: Given) -> Verdict:
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
    return with_lost_settings(word, limit + ("; ".join(told_) or "chains were lost"))


def fewer_rounds(metrics: Given, config: Given) -> Verdict:
    """Judge whether the paper's T alone saves more than it says, at one error."""
    del config
    lines = {line["T"]: line for line in metrics["local_steps"]}
    saved = {n: x["times fewer rounds, at most"] for n, x in lines.items() if x.get("to error")}
    if not saved:
        return Verdict(UNTESTABLE, "T = 1 arrives at no error that another T arrives at")
    own, as_many = lines.get(CLAIMED_T, {}), []
    if CLAIMED_T in saved:
        as_many = [
            num
            for num, line in lines.items()
            if num != CLAIMED_T
            and (rounds := rounds_by_law.rounds_to(line, own["to error"])) is not None
            and rounds <= own["rounds"]
        ]
    word = first_that_holds(
        (saved.get(CLAIMED_T, 0) > CLAIMED and not as_many, REPRODUCED),
        (max(saved.values()) > 2, PARTLY),
        otherwise=CONTRADICTED,
    )
    told_ = [rounds_by_law.most_saved(metrics, CLAIMED_T)]
    if as_many:
        told_.append(f"T = {', '.join(map(str, as_many))} takes no more rounds")
    most = max(saved, key=lambda num: saved[num])
    if most != CLAIMED_T:
        told_.append(rounds_by_law.most_saved(metrics, most))
    told_ += _at_threshold(metrics)
    return with_lost_settings(
        word,
        f"with infinitely many chains, by the law: {'; '.join(told_)}; measured: "
        "[`fa_hmc/rounds_to_error_gpu`](#fa_hmcrounds_to_error_gpu)",
    )


def _at_threshold(metrics: Given) -> list[str]:
    """Say how many times fewer rounds the paper's T and the best one take to the threshold."""
    level = metrics["threshold"]
    rounds = dict(_arrived(metrics)).get(level, {})
    if not rounds:
        return []
    best = min(rounds, key=lambda num: rounds[num])
    shown = [num for num in dict.fromkeys((CLAIMED_T, best)) if 1 < rounds.get(num, 0) < rounds[1]]
    listed = [f"{rounds[1] / rounds[num]:.2g} with T = {num}" for num in shown]
    return [f"to {level:g}, times fewer rounds: {', '.join(listed)}"] if listed else []


def _arrived(metrics: Given) -> list[tuple[float, dict[int, int]]]:
    """Return the errors to which T = 1 comes, and the rounds of each ``T`` that comes to them."""
    found = []
    for level in metrics["thresholds"]:
        rounds = {
            line["T"]: at["rounds"]
            for line in metrics["local_steps"]
            for at in line["arrivals"]
            if at["error"] == level
        }
        if 1 in rounds:
            found.append((level, rounds))
    return found


def best_is_claimed(metrics: Given, config: Given) -> Verdict:
    """Judge whether the paper's number of local steps is the best, and larger ones are worse.

    By more than one round: rounds are whole numbers, and small ones.
    """
    del config
    found, numbers = _arrived(metrics), [line["T"] for line in metrics["local_steps"]]
    if not found:
        return Verdict(UNTESTABLE, "T = 1 arrives at no error that was tried")
    listed, inside = [], []
    for level, rounds in found:
        least = min(rounds.values())
        best = [num for num, own in rounds.items() if own == least]
        larger = [rounds.get(num, math.inf) for num in numbers if num > best[-1]]
        listed.append(f"{', '.join(map(str, best))} ({level:g})")
        if best[0] > 1 and larger and min(larger) > least + 1:
            inside.append(best)
    word = first_that_holds(
        ([CLAIMED_T] in inside, REPRODUCED), (bool(inside), PARTLY), otherwise=CONTRADICTED
    )
    level = metrics["threshold"]
    return with_lost_settings(
        word,
        f"best T by the error to be reached: {', '.join(listed)}; rounds to {level:g}: "
        f"{rounds_by_law.told(metrics, level)}; large T stop at the error that stays in the long "
        "run",
    )


def thresholds(metrics: Given, config: Given) -> Verdict:
    """Judge whether the best number of local steps saves more at smaller errors.

    Errors to which it takes one or two rounds say nothing: there are none fewer to save.
    """
    del config
    found = [(level, rounds[1], min(rounds.values())) for level, rounds in _arrived(metrics)]
    times = [first / least for _, first, least in found if least > 2]
    word = first_that_holds(
        (len(times) < 2, UNTESTABLE),
        (times == sorted(times) and times[-1:] > times[:1], REPRODUCED),
        (times[-1:] > times[:1], PARTLY),
        otherwise=CONTRADICTED,
    )
    listed = ", ".join(
        f"{first / least:.2g} ({level:g}" + f", in {least}" * (least < 3) + ")"
        for level, first, least in found
    )
    return with_lost_settings(
        word, f"times fewer rounds, by the marginal error: {listed or 'T = 1 arrives at none'}"
    )


def larger_gap(metrics: Given, config: Given) -> Verdict:
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
    return with_lost_settings(
        word,
        f"gain at the smallest, a middle and the largest step size: {listed}; at the smallest "
        f"FA-LD has an error of {first['FA-LD, noisy']:.2g}, as its chains hardly move",
    )


def more_in_high(metrics: Given, config: Given) -> Verdict:
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


def corrected(metrics: Given, config: Given) -> Verdict:
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


def dimension(metrics: Given, config: Given) -> Verdict:
    """Judge the power of the dimension that the number of rounds has (Figure 2)."""
    power, (low, high) = metrics["power"], with_logarithm(metrics, config)
    word = first_that_holds(
        (abs(power - 0.5) < 0.05, REPRODUCED),
        (abs(power - 0.5) < 0.2, PARTLY),
        otherwise=CONTRADICTED,
    )
    first, last = (metrics["table"][i]["dimension"] for i in (0, -1))
    return with_lost_settings(
        word,
        f"rounds grow as the dimension to the power {power:.2f} (claim: 0.5) from "
        f"{first} to {last}; divided by sqrt(d) log(distance / tolerance) they lie "
        f"between {low:.2g} and {high:.2g}; the step's power of d is derived from this conclusion, "
        "as formula (2) is lost",
    )


def in_u(metrics: Given, config: Given) -> Verdict:
    """Judge whether rounds fall and rise again with T, step sizes tuned for each T.

    The theorem bounds rounds of any target from above and says that they may: no U on one target
    contradicts nothing. At one step size drift alone has a U.
    """
    rows, fixed = metrics["table"], "noisy gradients, one step size"
    tuned = {
        name: local_steps_findings.turning(rows, name)
        for name in ("noisy gradients", "own momenta")
    }
    noises = [
        local_steps_findings.turning(of, "rounds")
        for of in local_steps_findings.by_noise(metrics).values()
    ]
    word = first_that_holds(
        (all(found["inside"] for found in tuned.values()), REPRODUCED),
        (any(found["inside"] for found in (*tuned.values(), *noises)), PARTLY),
        otherwise=UNTESTABLE,
    )
    told_ = []
    if word == UNTESTABLE:
        told_.append(
            f"no U up to T = {rows[-1]['T']} on this target, with tuned step sizes (in one, both "
            f"ends have at least {local_steps_findings.DEEP:g} times the fewest rounds)"
        )
    told_ += [f"{name}: {_rounds(rows, name)}" for name in (*tuned, fixed)]
    if noises:
        told_.append(local_steps_findings.nearest_to_u(metrics))
    exact = local_steps_findings.exact_at_one_step(Settings(**config), rows)
    drift = local_steps_findings.turning([{"T": t, "exact": n} for t, n in exact], "exact")[
        "inside"
    ]
    told_.append(
        f"exact gradients at that step size: {local_steps_findings.listed(exact)}"
        + ", a U that drift alone makes" * drift
    )
    return Verdict(word, "; ".join(told_))


def _rounds(rows: list[dict[str, Any]], name: str) -> str:
    found = local_steps_findings.turning(rows, name)
    ends = [
        f"never there at T = {row['T']}"
        if times == math.inf
        else f"{times:.2g} times as many at T = {row['T']}"
        for row, times in ((rows[0], found["first"]), (rows[-1], found["last"]))
        if times > 1
    ]
    return ", ".join([f"fewest {local_steps_findings.fewest_at(rows, name)}", *ends])


def vanilla(metrics: Given, config: Given) -> Verdict:
    """Judge how much rounds vary with exact gradients and shared momenta (section 4.1)."""
    del config
    rows = metrics["table"]
    found, later = (local_steps_findings.turning(of, "vanilla") for of in (rows, rows[1:]))
    word = first_that_holds(
        (found["largest"] < 2, REPRODUCED),
        (found["T"] == rows[0]["T"], PARTLY),
        otherwise=CONTRADICTED,
    )
    listed = ", ".join(f"{row['vanilla']} (T = {row['T']})" for row in rows)
    return with_lost_settings(
        word,
        f"rounds, by the law: {listed}; T = {found['T']} has the fewest; the most are "
        f"{found['largest']:.2g} times as many, {later['largest']:.2g} times from "
        f"T = {rows[1]['T']} on",
    )


def falling(metrics: Given, config: Given) -> Verdict:
    """Judge whether a falling step saves a logarithm on one target.

    The paper has it of a bound, for all targets: one of them shows it partly at most.
    """
    rows = [row for row in metrics["schedules"] if row["constant"] and row["falling"]]
    if len(rows) < 2:
        return Verdict(UNTESTABLE, "chains do not arrive")
    saved = [row["constant"] / row["falling"] for row in rows]
    over = local_steps_findings.over_logarithm(Settings(**config), rows)
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
