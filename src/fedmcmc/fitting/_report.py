"""What a fit did and cost, stage by stage: as text, as a dictionary, as one page."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedmcmc.diagnostics import ESS, RHAT, Verdict, VerdictKind
from fedmcmc.reports import INTRODUCTION, OF_DATA, Figure, Page, advice, data_section, table_of_rows
from fedmcmc.reports import WORDS as WORDS_OF_RUNS

WORST_KHAT = 0.7
"""Above, weights are not to be used."""


@dataclass(frozen=True)
class Stage:
    """One stage of a fit.

    Attributes
    ----------
    stage, method
        What it was for, and how it was done.
    rounds, bits_up, bits_down, seconds
        What it cost; a round is one exchange with all clients, bits are those of all of them.
    khat, rhat, ess
        Shape of the weights' tail, R-hat, effective draws; NaN where a stage has none.
    verdict
        What came of it.
    why
        In a sentence.
    """

    stage: str
    method: str
    rounds: int
    bits_up: float
    bits_down: float
    seconds: float
    khat: float = np.nan
    rhat: float = np.nan
    ess: float = np.nan
    verdict: str = ""
    why: str = ""


@dataclass(frozen=True)
class Report:
    """All stages of a fit; printed, a table and the verdict.

    Attributes
    ----------
    stages
        In the order in which they ran.
    verdict
        The fit's, a sentence with figures.
    summary
        Name of each parameter to its ``mean``, ``sd`` and quantiles ``5 %``, ``50 %``, ``95 %``.
    warnings
        What the fit warned of besides its verdict, in its own words.
    """

    stages: tuple[Stage, ...]
    verdict: Verdict
    summary: dict[str, dict[str, float]]
    about: dict[str, Any] = field(default_factory=dict)
    draw_figures: Callable[[], list[Figure]] | None = field(default=None, repr=False)
    warnings: tuple[str, ...] = ()

    @property
    def rounds(self) -> int:
        """Exchanges with all clients."""
        return sum(stage.rounds for stage in self.stages)

    @property
    def bits_up(self) -> float:
        """Bits that all clients sent."""
        return sum(stage.bits_up for stage in self.stages)

    @property
    def bits_down(self) -> float:
        """Bits that all clients were sent."""
        return sum(stage.bits_down for stage in self.stages)

    @property
    def seconds(self) -> float:
        """Wall-clock time of all stages."""
        return sum(stage.seconds for stage in self.stages)

    @property
    def cost(self) -> dict[str, float]:
        """Exchanges and bits of all stages, by name."""
        return {"rounds": self.rounds, "bits_up": self.bits_up, "bits_down": self.bits_down}

    def to_dict(self) -> dict[str, Any]:
        """Return everything but figures, ready for JSON; a figure that is not there is ``None``."""
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
        rows = [HEADER, *(_cells(stage) for stage in self.stages), self._sum()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(HEADER))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        said = [f"Warning: {warning}" for warning in self.warnings]
        return "\n".join([self.verdict, *said, "", *lines])

    def _sum(self) -> tuple[str, ...]:
        megabits = f"{(self.bits_up + self.bits_down) / 1e6:,.2f}"
        return ("all", "", f"{self.rounds:,}", megabits, "", "", "", f"{self.seconds:.1f}", "")

    def save(self, path: str | Path) -> Path:
        """Write one self-contained HTML page: verdict, parameters, figures, stages, words.

        Raises
        ------
        ImportError
            If what draws figures is not installed (the extra ``plots``).
        """
        return self.page([] if self.draw_figures is None else self.draw_figures()).save(path)

    def page(self, figures: Sequence[Figure] = ()) -> Page:
        """Return the page that `save` writes, with these figures."""
        return _page(self, figures)


HEADER = ("stage", "method", "rounds", "Mbit", "k-hat", "R-hat", "ESS", "seconds", "verdict")


def _cells(stage: Stage) -> tuple[str, ...]:
    def number(value: float, spec: str) -> str:
        return "" if np.isnan(value) else format(value, spec)

    return (
        stage.stage,
        stage.method,
        f"{stage.rounds:,}",
        f"{(stage.bits_up + stage.bits_down) / 1e6:,.2f}",
        number(stage.khat, ".2f"),
        number(stage.rhat, ".3f"),
        number(stage.ess, ",.0f"),
        f"{stage.seconds:.1f}",
        stage.verdict,
    )


WORDS = (
    (
        "Mean, sd",
        "The average of a parameter's draws, and their standard deviation: how uncertain the "
        "parameter is, given the data and the model.",
    ),
    (
        "Stage",
        "A fit goes from cheap stages to dear ones until one is good enough. The draws on this "
        "page are those of the last one; one that is called doubtful above it was not enough.",
    ),
    (
        "Worth a round",
        "What the shape of the posterior at its mode promises: that weighted draws will do, which "
        "takes one more round. Otherwise chains are run.",
    ),
    ("Mbit", "Millions of bits that all clients sent and were sent."),
    (
        "Round",
        "One exchange with all clients: the server asks, each answers with a sum over its own "
        "rows, and only the total of the answers is used.",
    ),
    (
        "k-hat",
        "How heavy the tail of the importance weights is. Below 0.5 the weighted draws are as good "
        "as draws of the posterior; above 0.7 they are not to be used.",
    ),
    (
        "Monte Carlo error",
        "How far a mean or an sd on this page may be off because the number of draws is finite: "
        "one standard error, for means in posterior sds, for sds in per cent.",
    ),
    (
        "R-hat",
        "Whether chains that began at different places agree. It should be below 1.01.",
    ),
    (
        "ESS",
        "To how many independent draws the draws amount. With 400 or more, means are known to a "
        "twentieth of a posterior standard deviation.",
    ),
    (
        "Evidence",
        "The probability of the data under the model, in nats; right if prior and likelihood are "
        "normalized. Differences between two models on the same data are log Bayes factors.",
    ),
    (
        "Mode",
        "A place where the posterior density is highest among its neighbors. There may be several.",
    ),
    (
        "5 %, 50 %, 95 %",
        "So many of a parameter's posterior draws lie below. Between the first and the last lie 90 "
        "in a hundred.",
    ),
    (
        "Approximate, doubtful",
        "Approximate: draws of a Gaussian. Doubtful: weighted draws that look right, where a part "
        "of the posterior that no draw reached would not show.",
    ),
    (
        "Passed",
        "All checks of the draws passed: they follow the posterior of the model as written, up to "
        "the stated Monte Carlo errors, if the search found all modes that matter. This is no "
        "proof, and it says nothing about whether the model is right.",
    ),
)

SHARED_WORDS = ("Parameter", "Client", "Outcome", "Code")
"""Words that mean the same on the page of a run."""


def _page(report: Report, figures: Sequence[Figure]) -> Page:
    page = Page("Report of a fit")
    page.paragraph(INTRODUCTION)
    passed = report.verdict.kind == VerdictKind.PASSED
    good = passed and not report.warnings
    told = advice(report.verdict)
    if report.warnings and passed:
        told = "Read the warning below before these results are used."
    page.verdict(told, report.verdict, tone="good" if good else "poor")
    if report.warnings:
        page.heading("Warnings")
        page.items(list(report.warnings))
    data_section(page, report.about)
    page.heading("Parameters")
    page.table(*table_of_rows(report.summary))
    for figure in figures:
        page.heading(figure.title)
        page.figure(figure.svg, figure.about)
    page.heading("What was done")
    rows = [(*_cells(stage), stage.why) for stage in report.stages]
    page.table(
        (*HEADER, "why"),
        [*rows, (*report._sum(), "")],
        texts=("method", "verdict", "why"),
        marked={cell for i, stage in enumerate(report.stages) for cell in _marked(i, stage)},
    )
    if any(list(_marked(0, stage)) for stage in report.stages):
        page.paragraph(
            f"Marked: k-hat above {WORST_KHAT:g}, R-hat of {RHAT:g} or more, and fewer than "
            f"{ESS:g} effective draws. A stage that is marked was not enough."
        )
    page.heading("Words")
    page.words((*WORDS, *((word, text) for word, text in WORDS_OF_RUNS if word in SHARED_WORDS)))
    page.heading("About this run")
    rows = [(name, str(value)) for name, value in report.about.items() if name not in OF_DATA]
    page.table(("what", "value"), rows, texts=("value",))
    return page


def _marked(row: int, stage: Stage) -> Iterator[tuple[int, int]]:
    """Yield the cells ``(row, column)`` of a stage whose figures are not as wanted."""
    # No figure is NaN, which compares as false.
    bad = {"k-hat": stage.khat > WORST_KHAT, "R-hat": stage.rhat >= RHAT, "ESS": stage.ess < ESS}
    return ((row, HEADER.index(name)) for name, is_bad in bad.items() if is_bad)
