"""``docs/findings.md``: what a user of the papers' methods should know before choosing one.

Every number comes from a record in ``docs/results/runs``. A finding whose record is missing is not
told; the page names it at its end. Each paper's findings are in its own ``lessons``.
"""

import re
from collections.abc import Mapping
from typing import Any

from experiments import output
from experiments.claims import Finding
from experiments.fa_hmc import lessons as fa_hmc
from experiments.fed_ep import lessons as fed_ep
from experiments.fsgld import lessons as fsgld
from experiments.qlsd import lessons as qlsd

__all__ = ["FINDINGS", "page"]

FINDINGS = (*fsgld.FINDINGS, *qlsd.FINDINGS, *fa_hmc.FINDINGS, *fed_ep.FINDINGS)


def page(records: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page as Markdown; `records` are those of all runs, by name."""
    parts, advice, missing = [], [], []
    for finding in FINDINGS:
        names = finding.runs_of(records)
        lacking = [name for name in names if name not in records]
        if lacking:
            listed = ", ".join(f"`{name}`" for name in lacking)
            missing.append(f"- {finding.title} ({listed})")
            continue
        given = [records[n]["metrics"] | {"config": records[n]["config"]} for n in names]
        text = finding.tell(*given)
        parts += [f"## {finding.title}", text, _evidence(finding, names)]
        because = f"[{finding.title}](#{_anchor(finding.title)})"
        advice.append({"what to do": finding.advice, "because": because})
    table = [output.markdown_table(advice)] if advice else []
    parts = [INTRODUCTION, *table, *parts, _released()]
    if missing:
        parts.append(
            "## Not told\n\nThese have no committed run, so that nothing is said of them here:\n\n"
            + "\n".join(missing)
        )
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _anchor(title: str) -> str:
    """Return the anchor that Markdown gives a heading.

    Examples
    --------
    >>> _anchor("QLSD's best multiple is 1 / (1 + e^2)")
    'qlsds-best-multiple-is-1--1--e2'
    """
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _evidence(finding: Finding, names: list[str]) -> str:
    commands = "; ".join(f"`python -m experiments.run experiment={name}`" for name in names)
    pages = sorted({name.split("/")[0] for name in names})
    links = [f"[{paper}](results/{paper}.md)" for paper in pages]
    if finding.figure is not None:
        name = names[0].replace("/", "-")
        links.append(f"[figure](results/figures/{name}-{finding.figure})")
    return f"{commands}. {', '.join(links)}."


INTRODUCTION = """
# Findings

What the reproductions of four papers show that a user of these methods should know before choosing
one. `make docs` computes the numbers from the records of runs in [results/runs](results/runs); the
pages in [results](results) say how each run differs from its paper's. How to choose a kernel is in
[choosing.md](choosing.md), what the exact laws are in [laws.md](laws.md).
"""

RELEASED = (
    (
        "QLSD, Tables 3 and S1",
        'the "99 %" region is that of probability 0.4975 (element 99 of a grid of 200 levels)',
        "errors are those of a quantile near the median",
    ),
    (
        "QLSD, Figure 1, Table 3",
        "bits are a bound with natural logarithms, not base 2",
        "savings are not those of real messages: smaller in Figure 1, larger in Table 3 at 4 bits",
    ),
    (
        "QLSD, Figure 1",
        "QLSD* quantizes each client's whole gradient, not its difference from that at the mode",
        "the curves may not be those of the text's QLSD*",
    ),
    (
        "QLSD, Figure 1",
        "step size 0.01 / L and batches of one row; as restored, the text has 1 / L and a tenth",
        "other curves than the text's settings give",
    ),
    (
        "QLSD, Table 3",
        "the gradient leaves out rows of other classes; the snapshot of the control variate "
        "follows the position",
        "another posterior, for the reference too; minibatches without noise",
    ),
    (
        "QLSD, Figure S3, Table S1",
        "MALA evaluates the reverse proposal with the wrong gradient",
        'the "truth" has variances that are too large',
    ),
    (
        "QLSD, Figure S3",
        "the seed is set anew for each client",
        "clients share all noise",
    ),
    (
        "QLSD, Table S2",
        "messages are quantized twice, memories begin at the weights, the prior has half the "
        "variance",
        "other algorithms than the text's",
    ),
    (
        "QLSD, Table S2",
        "each tensor of a network is quantized by itself",
        "other noise and bits than those of one vector, which the text has and we run",
    ),
    (
        "QLSD, Table 4",
        "a network with batch normalization beside an HMC with filter response normalization",
        "predictions differ for reasons besides sampling",
    ),
    (
        "FSGLD, Figure 1",
        "the smallest of the means of a coin's shards is printed as -0.1",
        "none; 0.1 is meant, as 30 tosses of a fair coin are split",
    ),
)
"""Of a paper: where, what its released code (or its text) does, and what follows."""


def _released() -> str:
    names = ("where", "what the released code, or the text, does", "what follows")
    return (
        "## What the released code does otherwise than its paper\n\n"
        "As read when the experiments were written; the code itself is not in this repository. "
        "FedEP's differences are in [fed_ep.md](fed_ep.md#what-the-released-code-does).\n\n"
        + output.markdown_table([dict(zip(names, row, strict=True)) for row in RELEASED])
    )
