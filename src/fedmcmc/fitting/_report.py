"""What a fit did and cost, stage by stage: as text, as a dictionary, as one page."""

import html
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np


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
    """

    stages: tuple[Stage, ...]
    verdict: str
    summary: dict[str, dict[str, float]]
    about: dict[str, Any] = field(default_factory=dict)
    draw_figures: Callable[[], dict[str, str]] | None = field(default=None, repr=False)

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

    def to_dict(self) -> dict[str, Any]:
        """Return everything but figures, ready for JSON; a figure that is not there is ``None``."""
        stages = [
            {key: None if value != value else value for key, value in asdict(stage).items()}
            for stage in self.stages
        ]
        total = {"rounds": self.rounds, "bits_up": self.bits_up, "bits_down": self.bits_down}
        return {
            "verdict": self.verdict,
            "stages": stages,
            "total": total | {"seconds": self.seconds},
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
        return "\n".join([self.verdict, "", *lines])

    def _sum(self) -> tuple[str, ...]:
        megabits = f"{(self.bits_up + self.bits_down) / 1e6:,.2f}"
        return ("all", "", f"{self.rounds:,}", megabits, "", "", "", f"{self.seconds:.1f}", "")

    def save(self, path: str | Path) -> Path:
        """Write one self-contained HTML page: verdict, parameters, figures, stages, words.

        Raises
        ------
        ImportError
            If matplotlib is not installed (``pip install "fedmcmc[plots]"``).
        """
        figures = {} if self.draw_figures is None else self.draw_figures()
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_page(self, figures), encoding="utf-8")
        return path


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


ADVICE = {
    "exact": "These results can be used. They were computed without pooling rows, and they say "
    "nothing about whether the model is right.",
    "doubtful": "Use these results with care: they look right, and nothing shows that they are.",
    "approximate": "Do not report these numbers as the posterior: they are those of a Gaussian "
    "approximation, and may be far off.",
    "failed": "Do not use these numbers.",
}


def _advice(verdict: str) -> str:
    return ADVICE[verdict.split(" ")[0].rstrip(":")]


WORDS = (
    (
        "Round",
        "One exchange with all sites: the server asks, each site answers with a sum over its own "
        "rows, and only the total of the answers is used.",
    ),
    (
        "k-hat",
        "How heavy the tail of the importance weights is. Below 0.5 the weighted draws are as good "
        "as draws of the posterior; above 0.7 they are not to be used.",
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
        "Exact",
        "Draws follow the posterior of the model as written, up to the error of a finite number of "
        "draws, if the search found all modes that matter. Nothing is said about whether the model "
        "is right.",
    ),
)

STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;margin:1rem 0}td,th{padding:.25rem .7rem;text-align:right;
border-bottom:1px solid #ddd}td:first-child,th:first-child,td.text{text-align:left}
.verdict{padding:1rem;border-left:.5rem solid #888;background:#f6f6f6}.good{border-color:#0072b2}
.poor{border-color:#d55e00}svg{max-width:100%;height:auto}dt{font-weight:600}
""".strip()


def _page(report: Report, figures: dict[str, str]) -> str:
    """Return the page; `figures` are titles and SVG elements."""
    good = "good" if report.verdict.startswith("exact") else "poor"
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>fedmcmc: report of a fit</title><style>{STYLE}</style></head><body>",
        "<h1>Report of a fit</h1>",
        f"<p class='verdict {good}'><strong>{html.escape(_advice(report.verdict))}</strong><br>"
        f"{html.escape(report.verdict)}</p>",
        "<h2>Parameters</h2>",
        _table(
            ("parameter", "mean", "sd", "5 %", "50 %", "95 %"),
            [
                (name, *(f"{row[key]:.4g}" for key in ("mean", "sd", "5 %", "50 %", "95 %")))
                for name, row in report.summary.items()
            ],
        ),
    ]
    for title, svg in figures.items():
        parts.append(f"<h2>{html.escape(title)}</h2>{svg}")
    rows = [(*_cells(stage), stage.why) for stage in report.stages]
    parts += [
        "<h2>What was done</h2>",
        _table((*HEADER, "why"), [*rows, (*report._sum(), "")]),
        "<h2>Words</h2><dl>",
        *(f"<dt>{html.escape(w)}</dt><dd>{html.escape(text)}</dd>" for w, text in WORDS),
        "</dl>",
        "<h2>About this run</h2>",
        _table(("what", "value"), [(k, str(v)) for k, v in report.about.items()]),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
