"""What the report says about the memory study; the numbers come from the run."""

from typing import Any

import numpy as np

from experiments import output
from experiments.claims import TIMES, Given, Rows, rows_of

__all__ = ["PAPER", "by_memory", "commentary", "cut_by_memory"]

PAPER = """
Logistic regression on Synthetic(1, 1), 20 clients with 10 to 49 rows, ten coefficients and a prior
precision of 1000. QLSD++ with and without memory, with 2, 4 and 16 levels, single-row minibatches
and the step size `1 / M`, is compared with MALA by the Euclidean norm of the errors of the
coordinates' variances, over 20 repetitions of 100000 rounds. Our copy of the paper lacks most of
these numbers: they are the released notebook's where it has them. The figure has no numbers in the
text. The paper concludes that the memory "reduces the impact of the compression on the asymptotic
bias" where a parameter is large; we read it as omega, which is large where the compressor is
coarse.

The released notebooks' MALA evaluates the reverse proposal with the wrong gradient, which makes its
variances too large; ours is BlackJAX's. Where they draw clients, they set the seed anew each time,
so that clients share all noise; `shared_seed=false` draws independent ones.
"""


def commentary(metrics: dict[str, Any]) -> str:
    """Return what a run says about the paper's conclusions, for the report."""
    plain = metrics["table"][0]
    without, with_ = by_memory(metrics)
    levels = ", ".join(row["algorithm"].removeprefix("QLSD++, ") for row in without)
    ratio = cut_by_memory(without, with_)
    beside = [
        {
            "the paper": "Memory reduces the error of the variances, most where omega is large.",
            "ours": f"Error over LSD++'s for {levels}: without memory "
            + ", ".join(_times(row, plain) for row in without)
            + "; with memory "
            + ", ".join(_times(row, plain) for row in with_)
            + ".",
        },
        {
            "the paper": "The memory reduces the impact of the compression on the bias.",
            "ours": f"At this step size LSD++, without compression, already has "
            f"{plain['variance over MALA']:.3g} times MALA's variance, an error of "
            f"{plain['error / |variances|']:.2g} of the variances' norm. Compression adds, "
            "as a fraction of MALA's variance, "
            + ", ".join(f"{row['added by compression']:.2g}" for row in without)
            + " without memory and "
            + ", ".join(f"{row['added by compression']:.2g}" for row in with_)
            + " with it"
            + (
                f": {min(ratio):.2g} to {max(ratio):.2g} times less where the latter is told from "
                "zero."
                if ratio
                else "."
            ),
        },
        {
            "the paper": "Nothing on bits.",
            "ours": "Bits of a message, counted, without and with memory: "
            + ", ".join(
                f"{a['bits per message']:.3g} and {b['bits per message']:.3g}"
                for a, b in zip(without, with_, strict=True)
            )
            + f", against {plain['bits per message']:.0f} uncompressed: the memory is not paid for "
            "in bits.",
        },
    ]
    truth = metrics["truth"]
    share = truth["error"] / float(np.linalg.norm(truth["variances"]))
    drawn = "share all noise (as released)" if metrics["shared_seed"] else "are independent"
    return (
        output.markdown_table(beside)
        + f"\n\nClients {drawn}. MALA: R-hat {truth['rhat']:.4f}, its own error {share:.1g} of the "
        "variances' norm. Columns: mean over repetitions of the norm of the variances' errors, its "
        "standard error, and over the norm of MALA's variances; mean variance over MALA's; what "
        "compression adds to it, by the difference to LSD++'s run of the same noise."
    )


def by_memory(metrics: Given) -> tuple[Rows, Rows]:
    """Return the rows of QLSD++ without and with memory, in the order of their levels."""
    rows = rows_of(metrics, "algorithm", "QLSD++")
    without, with_ = ([row for row in rows if row["memory"] == kind] for kind in ("no", "yes"))
    return without, with_


def cut_by_memory(without: Rows, with_: Rows) -> list[float]:
    """Return how many times less variance compression adds with memory, where that is told."""
    return [
        a["added by compression"] / b["added by compression"]
        for a, b in zip(without, with_, strict=True)
        if b["added by compression"] > TIMES * b["s.e. of that"]
    ]


def _times(row: dict[str, Any], plain: dict[str, Any]) -> str:
    return f"{row['error of variances'] / plain['error of variances']:.3g}"
