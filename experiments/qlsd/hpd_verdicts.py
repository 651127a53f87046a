"""What errors of HPD regions say about Tables 3 and S1."""

from collections.abc import Sequence

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
    on_other_data,
    rows_of,
)
from experiments.qlsd.covtype_findings import draws_of
from experiments.qlsd.digits_findings import PUBLISHED, few_beyond, with_error, with_middle
from experiments.qlsd.hpd_figures import FEW, beyond

__all__ = ["as_reference", "by_bits", "competing", "covertype", "efficiency"]


def as_reference(metrics: Given, config: Given) -> Verdict:
    """Judge whether QLSD++ is as near to LSD++ as another run of LSD++ is (Table 3)."""
    rows = rows_of(metrics, "algorithm", "QLSD++")
    (again,) = rows_of(metrics, "algorithm", "LSD++")
    largest = max(row["HPD error"] for row in rows)
    word = first_that_holds(
        (beyond(metrics) < FEW, UNTESTABLE),
        (largest < again["HPD error"] + TIMES * again["s.e."], REPRODUCED),
        otherwise=CONTRADICTED,
    )
    return Verdict(
        _for_source(word, config),
        f"errors of at most {largest:.1e} by compression alone (runs share all other noise); two "
        f"runs of LSD++ with other keys differ by {with_error(again, metrics)}"
        + few_beyond(metrics)
        + _at_middle((max(rows, key=lambda row: row["at published level"]), again), metrics),
    )


def _for_source(word: str, config: Given) -> str:
    """Return `word` as it holds where MNIST stands in for the paper's digits."""
    return on_other_data(word, config["source"] != "emnist")


def _at_middle(rows: Sequence[Given], metrics: Given) -> str:
    """Return what many draws say where few lie beyond the 99 % threshold; else nothing."""
    if beyond(metrics) >= FEW:
        return ""
    listed = ", ".join(f"{row['algorithm']} {with_middle(row)}" for row in rows)
    return f"; at the released notebook's level, 0.4975: {listed}"


def efficiency(metrics: Given, config: Given) -> Verdict:
    """Judge how many times fewer bits QLSD++ sends, by the paper's formula too (Table 3)."""
    rows = {row["algorithm"]: row for row in rows_of(metrics, "algorithm", "QLSD++")}
    found = {n: r for n, r in rows.items() if PUBLISHED.get(n, (None, None))[1] is not None}
    if not found:
        return Verdict(UNTESTABLE, "none of the paper's bit widths was run")
    near = [0.67 < r["efficiency"] / float(PUBLISHED[n][1] or 1) < 1.5 for n, r in found.items()]
    word = first_that_holds((all(near), REPRODUCED), (any(near), PARTLY), otherwise=CONTRADICTED)
    real = ", ".join(f"{r['efficiency']:.3g} ({n.split(', ')[1]})" for n, r in found.items())
    formula = ", ".join(f"{r['by bound, ln']:.3g}" for r in found.values())
    paper = ", ".join(f"{PUBLISHED[n][1]:.2g}" for n in found)
    return Verdict(
        _for_source(word, config),
        f"in bits of real messages {real}; by the paper's formula {formula}; it has {paper}",
    )


def by_bits(metrics: Given, config: Given) -> Verdict:
    """Judge whether the error of QLSD++ falls with the number of bits (Table 3)."""
    rows = rows_of(metrics, "algorithm", "QLSD++")
    few = beyond(metrics) < FEW
    told = not few and all(row["HPD error"] > TIMES * row["s.e."] for row in rows)
    falls = rows[0]["HPD error"] > rows[-1]["HPD error"]
    word = first_that_holds((not told, UNTESTABLE), (falls, REPRODUCED), otherwise=CONTRADICTED)
    listed = ", ".join(f"{row['algorithm'][8:]} {with_error(row, metrics)}" for row in rows)
    return Verdict(
        _for_source(word, config), f"to LSD++ with the same noise: {listed}{few_beyond(metrics)}"
    )


def competing(metrics: Given, config: Given) -> Verdict:
    """Judge whether FSGLD and DG-SGLD are no farther off than QLSD++ (Table 3)."""
    others = rows_of(metrics, "algorithm", "FSGLD") + rows_of(metrics, "algorithm", "DG-SGLD")
    ours = max(row["HPD error"] for row in rows_of(metrics, "algorithm", "QLSD++"))
    (again,) = rows_of(metrics, "algorithm", "LSD++")
    # Both are distances of a run with noise of its own from the same reference.
    apart = [
        row["HPD error"] - again["HPD error"] > TIMES * np.hypot(row["s.e."], again["s.e."])
        for row in others
    ]
    word = first_that_holds(
        (beyond(metrics) < FEW, UNTESTABLE),
        (all(apart), CONTRADICTED),
        (any(apart), PARTLY),
        otherwise=REPRODUCED,
    )
    listed = ", ".join(f"{r['algorithm']} {with_error(r, metrics)}" for r in others)
    saved = ", ".join(
        f"{r['algorithm']} {r['efficiency']:.3g} (the paper {PUBLISHED[r['algorithm']][1]:g})"
        for r in others
    )
    return Verdict(
        _for_source(word, config),
        f"with noise of their own, from the starts of LSD++: {listed}, LSD++ with another key "
        f"{with_error(again, metrics)}; QLSD++ with the noise of LSD++ at most {ours:.1e}"
        + few_beyond(metrics)
        + _at_middle((*others, again), metrics)
        + f"; bits, times fewer: {saved}",
    )


def covertype(metrics: Given, config: Given) -> Verdict:
    """Judge whether four bits have less error than eight and sixteen (Table S1)."""
    rows = rows_of(metrics, "algorithm", "QLSD++")
    draws = draws_of(config)
    added = max(
        r["HPD error"] for r in metrics["against_lsd_pp"] if r["algorithm"].startswith("QLSD++")
    )
    coarse, *finer = rows
    less = all(
        row["HPD error"] - 2 * coarse["HPD error"] > TIMES * np.hypot(row["s.e."], coarse["s.e."])
        for row in finer
    )
    listed = ", ".join(f"{row['algorithm'][8:]} {with_error(row, draws)}" for row in rows)
    return Verdict(
        REPRODUCED if less and beyond(draws) >= FEW else UNTESTABLE,
        f"{listed}{few_beyond(draws)}{_at_middle(rows, draws)}; compression adds at most "
        f"{added:.0e}. The paper's subset of rows is not stated",
    )
