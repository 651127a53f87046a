"""Report of a fit, stage by stage: as text, as a dictionary and as an HTML page."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedmcmc.diagnostics import MAX_RHAT, MIN_ESS, Verdict, VerdictKind
from fedmcmc.records import Samples
from fedmcmc.reports import (
    DATA_SETTINGS,
    INTRODUCTION,
    RUN_GLOSSARY,
    Figure,
    Page,
    advice,
    data_section,
    table_of_rows,
)

WORST_KHAT = 0.7
"""Largest k-hat at which importance weights can be used."""


@dataclass(frozen=True)
class StageReport:
    """Row of a report: one stage of a fit.

    Attributes
    ----------
    stage, method
        Purpose and method.
    rounds, bits_up, bits_down, seconds
        Cost: number of exchanges with all clients, bits summed over clients, wall-clock time.
    k_hat, rhat, ess
        Shape of the weights' tail, R-hat, number of effective draws; NaN if not computed.
    verdict
        Result in a few words.
    why
        Explanation in a sentence.
    """

    stage: str
    method: str
    rounds: int
    bits_up: float
    bits_down: float
    seconds: float = 0.0
    k_hat: float = np.nan
    rhat: float = np.nan
    ess: float = np.nan
    verdict: str = ""
    why: str = ""


@dataclass(frozen=True)
class Report:
    """Stages of a fit with their cost, and the verdict.

    Attributes
    ----------
    stages
        Stages in chronological order.
    verdict
        Verdict on the fit, a sentence with figures.
    summary
        ``mean``, ``sd`` and quantiles ``5 %``, ``50 %``, ``95 %`` per parameter name.
    about
        Facts on data, model and software, by name.
    draw_figures
        Function that draws the figures of the page, or ``None``.
    warnings
        Warnings of the fit other than its verdict.
    """

    stages: tuple[StageReport, ...]
    verdict: Verdict
    summary: dict[str, dict[str, float]]
    about: dict[str, Any] = field(default_factory=dict)
    draw_figures: Callable[[], list[Figure]] | None = field(default=None, repr=False)
    warnings: tuple[str, ...] = ()

    @property
    def rounds(self) -> int:
        """Number of exchanges with all clients."""
        return sum(stage.rounds for stage in self.stages)

    @property
    def bits_up(self) -> float:
        """Number of bits that all clients sent."""
        return sum(stage.bits_up for stage in self.stages)

    @property
    def bits_down(self) -> float:
        """Number of bits that all clients received."""
        return sum(stage.bits_down for stage in self.stages)

    @property
    def seconds(self) -> float:
        """Wall-clock time of all stages."""
        return sum(stage.seconds for stage in self.stages)

    @property
    def cost(self) -> dict[str, float]:
        """Rounds and bits of all stages, by name."""
        return {"rounds": self.rounds, "bits_up": self.bits_up, "bits_down": self.bits_down}

    def to_dict(self) -> dict[str, Any]:
        """Return everything except plots, ready for JSON; a missing figure is ``None``."""
        stages = [
            {key: None if value != value else value for key, value in asdict(stage).items()}
            for stage in self.stages
        ]
        return {
            "verdict": self.verdict,
            "warnings": list(self.warnings),
            "stages": stages,
            "total": self.cost | {"seconds": self.seconds},
            "summary": self.summary,
            "about": self.about,
        }

    def __str__(self) -> str:
        """Return the verdict and the stages as a table."""
        rows = [HEADER, *(_cells(stage) for stage in self.stages), self._total_row()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(HEADER))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        warnings = [f"Warning: {warning}" for warning in self.warnings]
        return "\n".join([self.verdict, *warnings, "", *lines])

    def _total_row(self) -> tuple[str, ...]:
        megabits = f"{(self.bits_up + self.bits_down) / 1e6:,.2f}"
        return ("all", "", f"{self.rounds:,}", megabits, "", "", "", f"{self.seconds:.1f}", "")

    def save(self, path: str | Path) -> Path:
        """Write a self-contained HTML page: verdict, parameters, figures, stages, glossary.

        Raises
        ------
        ImportError
            If the plotting library is not installed (the extra ``plots``).
        """
        return self.page([] if self.draw_figures is None else self.draw_figures()).save(path)

    def page(self, figures: Sequence[Figure] = ()) -> Page:
        """Return the page that `save` writes, with the specified figures."""
        page = Page("Report of a fit")
        page.paragraph(INTRODUCTION)
        passed = self.verdict.kind == VerdictKind.PASSED
        good = passed and not self.warnings
        headline = advice(self.verdict)
        if self.warnings and passed:
            headline = "Read the warning below before you use these results."
        page.verdict(headline, self.verdict, tone="good" if good else "poor")
        if self.warnings:
            page.heading("Warnings")
            page.items(list(self.warnings))
        data_section(page, self.about)
        page.heading("Parameters")
        page.table(*table_of_rows(self.summary))
        for figure in figures:
            page.heading(figure.title)
            page.figure(figure.svg, figure.about)
        page.heading("Stages")
        rows = [(*_cells(stage), stage.why) for stage in self.stages]
        page.table(
            (*HEADER, "why"),
            [*rows, (*self._total_row(), "")],
            texts=("method", "verdict", "why"),
            marked={cell for i, stage in enumerate(self.stages) for cell in _marked(i, stage)},
        )
        if any(list(_marked(0, stage)) for stage in self.stages):
            page.paragraph(
                f"Marked: k-hat above {WORST_KHAT:g}, R-hat of {MAX_RHAT:g} or more, and fewer "
                f"than {MIN_ESS:g} effective draws. The draws of a marked stage were not good "
                "enough."
            )
        page.heading("Glossary")
        shared = dict(RUN_GLOSSARY)
        page.words((*GLOSSARY, *((term, shared[term]) for term in SHARED_TERMS)))
        page.heading("About this run")
        rows = [
            (name, str(value)) for name, value in self.about.items() if name not in DATA_SETTINGS
        ]
        page.table(("what", "value"), rows, texts=("value",))
        return page


def cost_of(samples: Samples, num_rounds: int | None = None) -> tuple[int, float, float]:
    """Return the number of exchanges, which chains share, and the bits of all chains."""
    totals = samples.totals
    up, down = (float(np.sum(totals[name])) for name in ("bits_up", "bits_down"))
    return int(np.max(totals["rounds"])) if num_rounds is None else num_rounds, up, down


HEADER = ("stage", "method", "rounds", "Mbit", "k-hat", "R-hat", "ESS", "seconds", "verdict")


def _cells(stage: StageReport) -> tuple[str, ...]:
    def number(value: float, spec: str) -> str:
        return "" if np.isnan(value) else format(value, spec)

    return (
        stage.stage,
        stage.method,
        f"{stage.rounds:,}",
        f"{(stage.bits_up + stage.bits_down) / 1e6:,.2f}",
        number(stage.k_hat, ".2f"),
        number(stage.rhat, ".3f"),
        number(stage.ess, ",.0f"),
        f"{stage.seconds:.1f}",
        stage.verdict,
    )


GLOSSARY = (
    (
        "Stage",
        "A fit runs stages in order of cost until the result is good enough. The draws on this "
        "page come from the final stage. A doubtful stage before it was not good enough.",
    ),
    (
        "Worth a round",
        "The shape of the posterior at its mode suggests that weighted draws, which take one more "
        "round, will pass. Otherwise the fit runs chains.",
    ),
    ("Mbit", "Millions of bits that all clients sent and received."),
    (
        "Round",
        "One exchange with all clients: the server sends a question, each client returns a sum "
        "over its rows, and the server uses only the total of the answers.",
    ),
    (
        "k-hat",
        "A measure of the tail of the importance weights. Below 0.5 the weighted draws are as good "
        "as draws from the posterior; above 0.7 they must not be used.",
    ),
    (
        "Monte Carlo error",
        "The standard error of a mean or an sd on this page because the number of draws is finite: "
        "in posterior sds for means, in percent for sds.",
    ),
    (
        "ESS",
        "The number of independent draws with the same precision. With 400 or more, the standard "
        "error of a mean is at most a twentieth of a posterior standard deviation.",
    ),
    (
        "Evidence",
        "The log probability of the data under the model, in nats, if prior and likelihood are "
        "normalized. Differences between two models on the same data are log Bayes factors.",
    ),
    ("Mode", "A local maximum of the posterior density. There may be several."),
    (
        "Approximate, doubtful",
        "Approximate: draws from a Gaussian. Doubtful: weighted draws that look right, although a "
        "part of the posterior that no draw reached would not be visible.",
    ),
    (
        "Passed",
        "All checks of the draws passed: they follow the posterior of the model, up to the stated "
        "Monte Carlo errors, if the search reached all important modes. This is no proof, and the "
        "checks do not show if the model itself is right.",
    ),
)

SHARED_TERMS = ("Mean", "sd", "5 %, 50 %, 95 %", "R-hat", "Parameter", "Client", "Outcome", "Code")
"""Glossary terms with the same meaning on the page of a run."""


def _marked(row: int, stage: StageReport) -> Iterator[tuple[int, int]]:
    """Return the cells ``(row, column)`` of figures that do not meet the requirements."""
    # A missing figure is NaN; comparisons with NaN are false.
    bad = {
        "k-hat": stage.k_hat > WORST_KHAT,
        "R-hat": stage.rhat >= MAX_RHAT,
        "ESS": stage.ess < MIN_ESS,
    }
    return ((row, HEADER.index(name)) for name, is_bad in bad.items() if is_bad)
