"""What the report says about simulated logistic regression; the numbers come from the run."""

import math
from collections.abc import Mapping
from typing import Any

from experiments import output
from experiments.claims import Rows
from experiments.fa_hmc.logistic_data import curvatures
from experiments.fa_hmc.logistic_judging import (
    AGAIN,
    DECENT,
    REACH,
    Best,
    Compared,
    Span,
    best,
    common_limit,
    compared,
    local,
    longer,
    span,
)

__all__ = [
    "CLAIMED_T",
    "PAPER",
    "about",
    "around_own_best",
    "commentary",
    "fewer",
    "federation_of",
    "local_steps_told",
    "of_errors",
    "of_lengths",
    "of_rule",
    "rises",
    "said",
    "told_spans",
]

PAPER = """
Bayesian logistic regression on simulated data, dealt out equally to the clients, in high dimension
and in dimension 10; exact gradients (G), or with normal noise added to each coordinate (SG). The
benchmark is Metropolis-adjusted HMC; ours is NUTS, whose trajectories end by themselves. The
marginal error (ME) is the total variation distance of a coordinate's law from the benchmark's,
averaged over coordinates: half the sum of the absolute differences between two histograms, of 50
bins on the range of the benchmark's draws and one for all outside. (The paper's formula is lost; it
names Mangoubi and Vishnoi (2018) and Faes et al. (2011).) It is compared at the same number of
rounds over step sizes, with a rule for `L` after Mangoubi and Vishnoi for exact gradients and `L`
tuned for noisy ones; then rounds to a given ME over `T` from 1 to 100. In words: FA-HMC
"significantly outperforms FA-LD with around 5% improvement", less so in dimension 10; it does well
over a wide range of step sizes, and a small one "usually leads to a good performance". The best `T`
is 70, with "more than 65 times" fewer rounds than another `T` (value lost, presumably 1) where a
setting has some value (both lost, presumably the ME), and a smaller value (of the same, presumably)
saves more; a `T` that is too large takes more rounds, too. Dimension 10 has noisy gradients only,
and no study of `T`; the gap is larger there for smaller step sizes.

Our copy of the paper has lost its high dimension, rows, clients, noise, `T`, grids, thresholds and
the rule for `L`. All of these are ours: the verdicts hold for our settings. The rule is taken to be
`L = floor(pi / (3 eta))`, with `eta` in units of one over the root of the posterior's largest
curvature, so that the length of a trajectory jumps where `L` does, and large steps have `L = 1`,
which is FA-LD. FA-HMC counts where `L` is above 1. Rounds are equal, gradients are not: FA-HMC
takes `L` times as many, as the paper supposes "the local computation cost is negligible". With
noisy gradients the two half kicks between two drifts share a gradient; the paper's algorithm is
lost. `T` is taken as a number of trajectories; section 5.3 below has the other reading, by which T
= 70 would be 70 / `L` trajectories.
"""


LOW = 10  # the dimension of Figure 1(d)
NEARLY_ROUND = 3.0  # the condition number below which a random walk has not far to go
CLAIMED_T = 70  # the paper's best number of local steps


def commentary(metrics: dict[str, Any]) -> str:
    """Return what a run says about the paper's conclusions, for the report."""
    table, floor, low = metrics["table"], metrics["floor"], metrics["dim"] <= LOW
    beside = []
    for kind in ("exact", "noisy"):
        wins = f"FA-HMC beats FA-LD by about 5 % ({kind} gradients)."
        if low:
            wins = "Nothing on exact gradients in this dimension."
            if kind == "noisy":
                wins = "FA-HMC is better, by less than in high dimension (noisy gradients)."
        found = compared(table, kind)
        ours = "No step size with more than one leapfrog step has all its chains."
        if found is not None:
            ours = (
                f"Best errors {_told(found.hmc)} of FA-HMC and {_told(found.ld)} of FA-LD: "
                f"{of_errors(found)}."
            )
            if low and kind == "noisy":
                ours += (
                    " Gains, and differences of gains between this and high dimension, of less "
                    f"than {200 * found.error:.0f} % cannot be told from none here."
                )
        beside.append({"the paper": wins, "ours": ours})
    beside.append(
        {
            "the paper": ("In high dimension: a" if low else "A")
            + " wide range of step sizes does well for FA-HMC: it is easier to tune.",
            "ours": "; ".join(told_spans(table, kind) for kind in ("exact", "noisy"))
            + ". "
            + "; ".join(around_own_best(table, kind) for kind in ("exact", "noisy"))
            + f". With exact gradients {of_lengths(table, 'exact')}; with noisy ones each step "
            "size has the best of several L, and FA-LD one try.",
        }
    )
    beside.append(
        {
            "the paper": "Nothing on T in this dimension."
            if low
            else "The best T is 70, with more than 65 times fewer rounds than T = 1 (lost, "
            "presumably) where a setting has some value (both lost); larger T take more rounds "
            "again.",
            "ours": local_steps_told(metrics),
        }
    )
    return (
        output.markdown_table(beside)
        + f"\n\nA perfect sampler's {metrics['num_draws']} draws have an error of {floor:.3g} "
        f"against this reference (R-hat {metrics['reference']['rhat']:.4g}, smallest effective "
        f"sample size {metrics['reference']['ess']:.0f}). Dimension {metrics['dim']}, "
        f"T = {metrics['num_local_steps']} in the table below, noise {metrics['gradient_noise']:g} "
        "a coordinate of a client's gradient. Local steps bias the law at every step size, so that "
        f"errors stay above the floor. {_of_noise(table)}"
    )


def _of_noise(table: Rows) -> str:
    exact, noisy = (best(table, f"FA-LD, {kind}") for kind in ("exact", "noisy"))
    if exact is None or noisy is None:
        return ""
    return (
        f"The noise itself takes FA-LD's best error from {exact.error:.3g} to {noisy.error:.3g}; "
        "for FA-HMC exact and noisy gradients differ in how `L` is chosen, too. The least of "
        "several noisy errors is lucky, FA-HMC's with noisy gradients the most, as several `L` "
        "are tried at each step size."
    )


def _told(found: Best) -> str:
    end = f", the {found.edge} tried" if found.edge else ""
    return f"{found.error:.3g} (s.e. {found.deviation:.1g}; step {found.step:.3g}{end})"


def of_errors(found: Compared) -> str:
    """Return a comparison of best errors in words, with what it cannot say."""
    open_ = f" (not judged: {found.why})" if found.why else ""
    if found.ends and found.share > 0 and not open_:
        open_ = f", at least: its best is at an end of {' and of '.join(found.ends)}"
    return f"FA-HMC's is {said(found.share, found.error)}{open_}"


def told_spans(table: Rows, kind: str) -> str:
    """Return how wide the ranges of step sizes are that do, by one limit for both methods."""
    limit, told = common_limit(table, kind), []
    if limit is None:
        return f"a method lost chains at every step size, with {kind} gradients"
    for name in ("FA-HMC", "FA-LD"):
        rows = longer(table, kind) if name == "FA-HMC" else table
        found = span(rows, f"{name}, {kind}", limit)
        if found is None or not found.number:
            told.append(f"{name} at none of {len(rows)} step sizes")
            continue
        told.append(f"{name} at {_of_span(found, len(rows))}")
    return (
        f"{kind} gradients: an error up to {limit:.3g}, a quarter above the better method's best, "
        f"is had by {' and '.join(told)}"
    )


def around_own_best(table: Rows, kind: str) -> str:
    """Return how wide the worse method's range is around its own best, up to a quarter above it."""
    found = {}
    for name in ("FA-HMC", "FA-LD"):
        rows = longer(table, kind) if name == "FA-HMC" else table
        found[name] = rows, best(rows, f"{name}, {kind}")
    lost = [name for name, (_, least) in found.items() if least is None]
    if lost:
        return f"{lost[0]} lost chains at every step size, with {kind} gradients"
    name = max(found, key=lambda name: found[name][1].error)
    rows, least = found[name]
    wide = span(rows, f"{name}, {kind}", DECENT * least.error)
    assert wide is not None
    return (
        f"{name}, which is worse with {kind} gradients, is up to a quarter above its own best at "
        f"{_of_span(wide, len(rows))}"
    )


def _of_span(found: Span, num_tried: int) -> str:
    end = ", an end of those tried" if found.open else ""
    if found.number == 1:
        return f"1 of {num_tried} step sizes ({found.least:.3g}{end})"
    return (
        f"{found.number} of {num_tried} step sizes in a row around its best ({found.least:.3g} to "
        f"{found.largest:.3g}{end})"
    )


def of_lengths(table: Rows, kind: str) -> str:
    """Return between which lengths the rule for ``L`` keeps trajectories."""
    lengths = [row["step size"] * row[f"L, {kind}"] for row in longer(table, kind)]
    if not lengths:
        return "the rule has no trajectory of more than one step"
    return (
        f"the rule for L keeps the length of a trajectory between {min(lengths):.2g} and "
        f"{max(lengths):.2g}"
    )


def of_rule(table: Rows) -> str:
    """Say what the rule for L does, at the step size that is best where L is tuned.

    Empty where the rule's trajectories are no longer, or a run was lost.
    """
    both = ("FA-HMC, exact", "FA-HMC, noisy")  # a run that was lost has no error
    rows = [row for row in table if None not in (row.get(name) for name in both)]
    found = min(rows, key=lambda row: row["FA-HMC, noisy"], default=None)
    if found is None or found["L, exact"] <= found["L, noisy"]:
        return ""
    return (
        f"at a step size of {found['step size']:.2g} the rule's trajectories of "
        f"L = {found['L, exact']} have an error of {found['FA-HMC, exact']:.3g}, tuned ones of "
        f"L = {found['L, noisy']} one of {found['FA-HMC, noisy']:.3g}, noise included"
    )


def federation_of(config: Mapping[str, Any]) -> str:
    """Return the simulated data of a run in words, with the condition number of its posterior."""
    low, high = curvatures(
        *(config[name] for name in ("seed", "num_rows", "dim", "prior_precision"))
    )
    return (
        f"{config['num_rows']:,} rows, dealt out equally to {config['num_clients']} clients; "
        f"features are uniform on the unit sphere of dimension {config['dim']}; labels are of "
        f"coefficients from the prior, normal with precision {config['prior_precision']:g}. "
        f"Curvatures at the posterior's mode lie between {low:.3g} and {high:.3g}: its condition "
        f"number is {high / low:.2g}"
        + ". So nearly spherical a posterior favours FA-LD" * (high < NEARLY_ROUND * low)
        + ". "
    )


def about(config: Mapping[str, Any], metrics: Mapping[str, Any]) -> str:
    """Return what was run, as far as the table does not show it."""
    scale = metrics["table"][0]["step size"] / config["scaled_steps"][0]
    tried = ", ".join(str(n) for n in config["leapfrogs"])
    return (
        f"{federation_of(config)}Over step sizes: {config['num_chains']} chains of "
        f"{config['num_rounds']:,} rounds from zero, the first {config['num_burnin']:,} left out; "
        f"with noisy gradients the best `L` of {tried} at each step size. Over `T`: "
        f"L = {config['local_leapfrog']}, a step size of {config['local_step_size'] * scale:.3g}, "
        f"at most {config['local_rounds']:,} rounds, and {config['local_gradients']:,} gradients "
        "of a client."
    )


def said(share: float, error: float) -> str:
    """Return a gain as words: by how much an error is smaller or larger.

    Examples
    --------
    >>> said(0.05, 0.01), said(-0.125, 0.02)
    ('5 % (s.e. 1 %) smaller', '12 % (s.e. 2 %) larger')
    """
    word = "smaller" if share > 0 else "larger"
    return f"{100 * abs(share):.0f} % (s.e. {100 * error:.0f} %) {word}"


def fewer(metrics: Mapping[str, Any]) -> str:
    """Return how many times fewer rounds than the first the fastest number of local steps takes."""
    found = local(metrics)
    if found is None:
        return "no T reaches the threshold"
    first, fastest = found.first, found.fastest
    least = "" if found.arrived else "more than "
    text = f"T = {fastest['T']} takes {_rounds(fastest)} rounds, T = {first['T']} "
    if found.arrived:
        text += f"takes {_rounds(first)}, "
    else:
        text += f"has not arrived in {first['rounds run']}, "
    text += f"{least}{found.times:.3g} times as many{_error_of_quotient(first, fastest)}"
    if found.spared is not None:
        text += f"; a perfect sampler would take {found.spared:.2g} times fewer than T = 1"
    return text


def _error_of_quotient(first: Mapping[str, Any], fastest: Mapping[str, Any]) -> str:
    """Return the standard error of a quotient of rounds, as of independent chains, if known."""
    lines = (first, fastest)
    if any(None in (line["rounds to threshold"], line.get("s.e. rounds")) for line in lines):
        return ""
    shares = [line["s.e. rounds"] / line["rounds to threshold"] for line in lines]
    quotient = first["rounds to threshold"] / fastest["rounds to threshold"]
    return f" (s.e. {quotient * math.hypot(*shares):.2g})"


def _rounds(line: Mapping[str, Any]) -> str:
    """Return the rounds to the threshold, with their standard error where it is known."""
    error = line.get("s.e. rounds")
    return f"{line['rounds to threshold']}" + ("" if error is None else f" (s.e. {error:.2g})")


def rises(metrics: Mapping[str, Any]) -> str:
    """Return whether numbers of local steps above the fastest take more rounds again."""
    found, lines = local(metrics), metrics["local_steps"]
    if found is None:
        return "no T reaches the threshold"
    best_ = found.fastest["T"]
    if found.more:
        listed = ", ".join(
            f"T = {x['T']} takes {_rounds(x)}"
            if x["rounds to threshold"] is not None
            else f"T = {x['T']} has not arrived in {x['rounds run']}"
            for x in found.more
        )
        return f"fewest rounds at T = {best_}, {_rounds(found.fastest)}; more again: " + listed
    if best_ == lines[-1]["T"]:
        return f"T = {best_} takes the fewest rounds, and none above it was tried"
    if best_ == found.largest:
        return f"T = {best_} takes the fewest rounds, and none above it was run for long enough"
    if found.fastest.get("s.e. rounds") is None:
        return (
            f"T = {best_} takes the fewest rounds, larger T less than {AGAIN:g} times as many, "
            "which noise may do"
        )
    return f"T = {best_} takes the fewest rounds, larger T no more beyond the noise"


def local_steps_told(metrics: Mapping[str, Any]) -> str:
    """Return what a run says of numbers of local steps."""
    lines, threshold = metrics["local_steps"], metrics["threshold"]
    reached = [line for line in lines if line["rounds to threshold"] is not None]
    found = local(metrics)
    if found is None:
        return f"No T reaches an error of {threshold:g} in the rounds that were run."
    text = f"To an error of {threshold:g}: {fewer(metrics)}; {rises(metrics)}. "
    for line in lines:
        if line["rounds to threshold"] is None and line["floor"] > REACH * threshold:
            text += (
                f"T = {line['T']} is not tested: the cap on gradients leaves it "
                f"{line['rounds run']} rounds, and even a perfect sampler's {line['draws']} draws "
                f"would have an error of {line['floor']:.2g}. "
            )
    text += (
        f"With the {found.fastest['draws']} draws that T = {found.fastest['T']} needed, a perfect "
        f"sampler has an error of {found.fastest['floor']:.2g}"
    )
    if found.fastest["floor"] > REACH * threshold:
        text += ": so near the threshold that it is the number of draws that takes these rounds"
    return (
        text
        + ". Rounds to it: "
        + ", ".join(f"T = {line['T']}: {_rounds(line)}" for line in reached)
        + "".join(f", T = {x['T']}: not in {x['rounds run']}" for x in lines if x not in reached)
    )
