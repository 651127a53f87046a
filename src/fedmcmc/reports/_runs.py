"""Page about a run, for readers who have not seen the code."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedmcmc.diagnostics import MAX_RHAT, MIN_ESS, Diagnosis, Mixing
from fedmcmc.reports._advice import advice
from fedmcmc.reports._draws import MAX_SHOWN, MOMENTS, Shown, compute_mixing, select_parameters
from fedmcmc.reports._figures import figures
from fedmcmc.reports._page import Page
from fedmcmc.types import ArrayTree


@dataclass(frozen=True)
class RunFacts:
    """Content of the page about a run.

    Attributes
    ----------
    draws
        Draws in the user's parameters, leaves ``[num_chains, num_draws, *event]``.
    info, totals
        Values of kept rounds and sums over all rounds, see `fedmcmc.Samples`.
    warnings
        Texts of the run's warnings.
    diagnosis
        Convergence diagnostics; ``None`` for the reason `reason_not_judged`.
    verdict
        Verdict of a fit; empty for a run.
    stopped
        Result of the stopping rule; empty without a rule. A fit stores the total ``cost`` of its
        stages there: ``rounds``, ``bits_up``, ``bits_down``.
    settings
        Settings by name; the settings in `DATA_SETTINGS` describe the data.
    versions
        Versions of the software.
    notes
        Sentences on what the page leaves out.
    """

    draws: ArrayTree
    info: dict[str, np.ndarray]
    totals: dict[str, np.ndarray]
    warnings: tuple[str, ...] = ()
    diagnosis: Diagnosis | None = None
    reason_not_judged: str = ""
    verdict: str = ""
    stopped: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


DATA_SETTINGS = {
    "client names": "clients",
    "outcome": "outcome",
    "columns": "columns and codes",
}
"""Settings that describe the data, with their names on a page."""

INTRODUCTION = (
    "A model was fitted to data that stay with their owners. This page shows what the data of all "
    "owners imply for the model's parameters, and whether the results can be trusted. Terms are "
    "explained at the end."
)
"""Opening paragraph of a page."""

COLUMNS = ("parameter", *MOMENTS, "R-hat", "ESS", "tail ESS")

RUN_GLOSSARY = (
    ("Parameter", "A number of the model that is learned from the data of all clients."),
    (
        "Draw",
        "One possible value of all parameters. Values that fit the data of all clients and the "
        "prior assumptions are drawn more often. All draws together are the result.",
    ),
    ("Mean", "The average of a parameter's draws: the estimate, if you need a single number."),
    (
        "sd",
        "The standard deviation of the draws: the uncertainty of the parameter, given the data. "
        "More draws do not reduce it; more data do.",
    ),
    (
        "5 %, 50 %, 95 %",
        "Quantiles: this share of a parameter's draws lies below the number. Given the model and "
        "the data, the parameter lies between the 5 % and the 95 % quantile with a probability of "
        "90 %.",
    ),
    (
        "Chain",
        "A sequence of draws, each computed from the previous draw. Several chains start at "
        "different points, so that a chain that gets stuck is noticed.",
    ),
    (
        "R-hat",
        "Measures whether chains agree: the spread of all draws divided by the spread within "
        "chains. It should be below 1.01. With one chain, its parts are compared.",
    ),
    (
        "ESS, tail ESS",
        "Effective sample size: the number of independent draws that would be as accurate, for the "
        "mean and for the ends of the interval. The error of a mean is about the sd divided by the "
        "square root of ESS: with an ESS of 400, a twentieth of the sd.",
    ),
    (
        "Client",
        "An owner of data, for example a hospital. Its rows stay with it; it sends only sums that "
        "are computed from them.",
    ),
    (
        "Round",
        "One exchange between the server and the clients that take part: the server sends the "
        "current parameters, and the clients send back results computed from their rows.",
    ),
    ("Outcome", "The column whose values the model predicts from the other columns of a row."),
    (
        "Code",
        "A number that stands for a word in the data. Codes of ordered categories follow their "
        "order. Other codes follow the alphabet, unless the data define them, and their size has "
        "no meaning.",
    ),
    (
        "Bit, Mbit",
        "The size of messages: a number takes 32 bits unless it is compressed; a Mbit is a million "
        "bits.",
    ),
)
"""Glossary of a page."""

INFO = {
    "num_active": "clients that took part in a round",
    "gradient_norm": "size of the clients' gradients, small near the best fit",
    "bits_up": "bits that the clients sent in a round",
    "bits_down": "bits that the clients received in a round",
    "num_lost": "clients of a round without a usable result",
    "num_excluded": "clients of a round whose messages were excluded as not finite",
    "shift": "distance by which a round moved the approximation, in sds",
    "acceptance": "acceptance probability of a proposal",
}


def run_page(facts: RunFacts) -> Page:
    """Return the page about a run.

    Raises
    ------
    ImportError
        If the extra ``plots`` is not installed.
    """
    page = Page("Report of a run")
    shown = select_parameters(facts.draws)
    mixing = compute_mixing(shown.values)
    problems = _list_problems(facts, shown)
    page.paragraph(INTRODUCTION)
    _add_verdict(page, facts, problems)
    page.heading("Warnings")
    if problems:
        page.paragraph("Problems that the run reported:")
        page.items(problems)
    else:
        page.paragraph("None.")
    data_section(page, facts.settings)
    _add_parameters(page, facts, shown, mixing)
    for figure in figures(shown, mixing):
        page.heading(figure.title)
        page.figure(figure.svg, figure.about)
    _add_communication(page, facts)
    rows = [
        (name, str(value)) for name, value in facts.settings.items() if name not in DATA_SETTINGS
    ]
    if rows:
        page.heading("Settings")
        page.table(("setting", "value"), rows, texts=("value",))
    page.heading("Words")
    page.words(RUN_GLOSSARY)
    page.heading("Versions")
    page.paragraph("With other versions, or on other devices, draws may differ.")
    page.table(("software", "version"), list(facts.versions.items()), texts=("version",))
    return page


def data_section(page: Page, settings: dict[str, Any]) -> None:
    """Add a section on the data if `settings` describe them."""
    rows = [
        (label, str(settings[name])) for name, label in DATA_SETTINGS.items() if settings.get(name)
    ]
    if rows:
        page.heading("Data")
        page.table(("what", "names"), rows, texts=("names",))


def _list_problems(facts: RunFacts, shown: Shown) -> list[str]:
    """Return warnings and findings without duplicates."""
    problems = list(facts.warnings)
    if facts.diagnosis is not None:
        problems += [x for x in facts.diagnosis.findings if x not in problems]
    num = int((~shown.finite).sum())
    if num:
        problems.append(
            f"{num} of the {len(shown.names)} parameters shown here have draws that are not "
            f"finite, the first of them {shown.names[int(np.argmin(shown.finite))]}: their means "
            f"and quantiles cannot be used."
        )
    return problems


def _add_verdict(page: Page, facts: RunFacts, problems: list[str]) -> None:
    details = facts.verdict or (str(facts.diagnosis).splitlines()[0] if facts.diagnosis else "")
    if facts.verdict:
        good = facts.verdict.startswith("passed") and not problems
        page.verdict(advice(facts.verdict), details, tone="good" if good else "poor")
    elif problems:
        num = "A warning" if len(problems) == 1 else f"{len(problems)} warnings"
        page.verdict(f"{num}: read below before you use these numbers.", details, tone="poor")
    elif facts.diagnosis is None:
        page.verdict("These draws were not checked.", facts.reason_not_judged)
    else:
        page.verdict(
            "Nothing was found wrong with these draws. This does not show whether the model is "
            "right.",
            details,
            tone="good",
        )


def _add_parameters(page: Page, facts: RunFacts, shown: Shown, mixing: Mixing | None) -> None:
    page.heading("Parameters")
    num_chains, num_draws = shown.values.shape[:2]
    if not shown.names or not num_draws:
        page.paragraph("No draws were kept.")
        return
    chains = "one chain" if num_chains == 1 else f"each of {num_chains} chains"
    page.paragraph(f"From {num_draws:,} draws of {chains}.")
    for note in facts.notes:
        page.paragraph(note)
    if len(shown.names) < shown.num_parameters:
        page.paragraph(
            f"{len(shown.names)} of {shown.num_parameters:,} parameters are shown here and in the "
            f"figures (at most {MAX_SHOWN}): all parameters of small groups, and an equal number "
            f"of evenly spaced parameters of each larger group."
        )
    rows, statistics = [], []
    marked: set[tuple[int, int]] = set()
    if mixing is not None:
        marked = _marked_cells(mixing)
        statistics = [(mixing.rhat, ".3f"), (mixing.ess_bulk, ",.0f"), (mixing.ess_tail, ",.0f")]
    for i, (name, row) in enumerate(shown.summary().items()):
        cells = [_format_number(row[key], ".4g") for key in MOMENTS]
        cells += [_format_number(x[i], spec) for x, spec in statistics] or ["", "", ""]
        rows.append((name, *cells))
    page.table(COLUMNS, rows, marked=marked)
    if marked:
        page.paragraph(
            f"Marked: chains that disagree (R-hat above {MAX_RHAT:g} by more than chance), and "
            f"fewer than {MIN_ESS:g} effective draws. Take more draws or use another method."
        )


def _marked_cells(mixing: Mixing) -> set[tuple[int, int]]:
    """Return the cells ``(row, column)`` of the table of parameters that miss the limits."""
    few = (mixing.ess_bulk < MIN_ESS) | (mixing.ess_tail < MIN_ESS)
    bad = {
        # With many draws R-hat sometimes exceeds its limit by chance.
        "R-hat": mixing.disagree(MAX_RHAT) | (few & (mixing.rhat > MAX_RHAT)),
        "ESS": mixing.ess_bulk < MIN_ESS,
        "tail ESS": mixing.ess_tail < MIN_ESS,
    }
    cells = {
        (int(i), COLUMNS.index(name)) for name, where in bad.items() for i in np.flatnonzero(where)
    }
    return cells | {(row, 0) for row, _ in cells}


def _add_communication(page: Page, facts: RunFacts) -> None:
    page.heading("Communication")
    totals = facts.totals
    rounds = int(np.max(totals["rounds"], initial=0))
    up, down = (float(np.sum(totals[way])) for way in ("bits_up", "bits_down"))
    num_chains = len(np.atleast_1d(totals["rounds"]))
    chains = "" if num_chains == 1 else f" in each of {num_chains} chains"
    cost = facts.stopped.get("cost")
    if cost is not None:
        page.paragraph(
            f"The whole fit took {cost['rounds']:,} rounds: all clients together sent "
            f"{_format_bits(cost['bits_up'])} and received {_format_bits(cost['bits_down'])}. Its "
            f"stages are listed below."
        )
    if cost is None or facts.info.keys() & INFO.keys():  # otherwise the draws are not from chains
        page.paragraph(
            "The chains whose draws are shown here used "
            * (cost is not None)
            + f"{rounds:,} rounds{chains}, kept or not. All clients together sent "
            f"{_format_bits(up)} and received {_format_bits(down)}"
            + ("." if num_chains == 1 else ", for all chains.")
        )
    if facts.stopped.get("rule"):
        reached = "was met" if facts.stopped.get("reached") else "was not met"
        page.paragraph(
            f"Stopping rule: {facts.stopped['rule']}. It {reached} after "
            f"{facts.stopped['rounds']:,} rounds."
        )
    rows = [
        (meaning, *(_format_number(f(facts.info[name]), ",.4g") for f in (np.mean, np.min, np.max)))
        for name, meaning in INFO.items()
        if name in facts.info and np.size(facts.info[name])
    ]
    if rows:
        page.table(("in the kept rounds", "mean", "minimum", "maximum"), rows)


def _format_bits(number: float) -> str:
    return f"{number / 1e6:,.4g} Mbit" if number >= 1e5 else f"{number:,.0f} bits"


def _format_number(value: float, spec: str) -> str:
    return format(float(value), spec) if np.isfinite(value) else "-"
