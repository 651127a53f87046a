"""The page of a run: what was found of its draws, in words for who has not seen the code."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedmcmc._types import ArrayTree
from fedmcmc.diagnostics import ESS, RHAT, Diagnosis, Mixing
from fedmcmc.reports._advice import advice
from fedmcmc.reports._draws import MOMENTS, MOST_SHOWN, Shown, judged, rows_of, shown
from fedmcmc.reports._figures import figures
from fedmcmc.reports._page import Page


@dataclass(frozen=True)
class RunFacts:
    """What the page of a run tells.

    Attributes
    ----------
    draws
        In the user's parameters, leaves ``[num_chains, num_draws, *event]``.
    info, totals
        Of kept rounds and of all rounds, as `fedmcmc.Samples` has them.
    warnings
        What the run warned of, in its own words.
    diagnosis
        What its draws say of themselves, or ``None``; `not_judged` then says why.
    verdict
        Of a fit, else empty.
    stopped
        What the rule that ends a run said; empty without one. Of a fit its ``cost``, that of all
        its stages: ``rounds``, ``bits_up``, ``bits_down``.
    settings
        What was run, by name; those that `OF_DATA` lists are shown as the data.
    versions
        Of what it was run with.
    notes
        Sentences on what the page leaves out.
    """

    draws: ArrayTree
    info: dict[str, np.ndarray]
    totals: dict[str, np.ndarray]
    warnings: tuple[str, ...] = ()
    diagnosis: Diagnosis | None = None
    not_judged: str = ""
    verdict: str = ""
    stopped: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


OF_DATA = {
    "client names": "clients",
    "outcome": "outcome",
    "columns": "columns and codes",
}
"""Settings that say what the data are, and what a page calls them."""

INTRODUCTION = (
    "A model was fitted to data that stay with their owners: what follows is what the data of all "
    "of them say of the model's parameters, and whether it can be trusted. Words are explained at "
    "the end."
)
"""The first paragraph of a page."""

COLUMNS = ("parameter", *MOMENTS, "R-hat", "ESS", "tail ESS")

WORDS = (
    ("Parameter", "A number of the model that is to be learned from the data of all clients."),
    (
        "Draw",
        "One possible value of all parameters. Values that fit the data of all clients and what "
        "was assumed beforehand are drawn more often; the draws together are the result.",
    ),
    ("Mean", "The average of a parameter's draws: the estimate, if one number is to be given."),
    (
        "sd",
        "The standard deviation of the draws: how uncertain the parameter is, given the data. If "
        "draws are enough, more of them do not make it smaller; more data do.",
    ),
    (
        "5 %, 50 %, 95 %",
        "So many of a parameter's draws lie below. Between the first and the last lie 90 in a "
        "hundred: given the model and the data, the parameter is there with a probability of 90 "
        "percent.",
    ),
    (
        "Chain",
        "A sequence of draws, each made from the one before. Several chains run from places of "
        "their own, so that one that is caught somewhere is noticed.",
    ),
    (
        "R-hat",
        "Whether chains agree: the spread of all draws together over that within chains. It should "
        "be below 1.01; of one chain its parts are compared.",
    ),
    (
        "ESS, tail ESS",
        "Effective sample size: to how many independent draws the draws amount, for the mean and "
        "for the ends of the interval. The error of a mean is about the sd over the root of ESS: "
        "with 400, a twentieth of the sd.",
    ),
    (
        "Client",
        "A party that has data of its own, as a hospital. Its rows stay with it; it sends sums "
        "that are computed from them.",
    ),
    (
        "Round",
        "One exchange between the server and the clients that take part: the server sends where "
        "the chain is, the clients send back what their rows say of it.",
    ),
    (
        "Outcome",
        "What the model says how likely it is, given the parameters and what else a row holds.",
    ),
    (
        "Code",
        "A number that stands for a word in the data. Codes of ordered categories follow their "
        "order. Codes of other words are in alphabetical order unless the data say otherwise, and "
        "which of two is larger has no meaning.",
    ),
    (
        "Bit, Mbit",
        "What messages take: a number takes 32 bits unless it is compressed; a Mbit is a million "
        "bits.",
    ),
)
"""Words of a page, and what they mean."""

INFO = {
    "num_active": "clients that took part in a round",
    "gradient_norm": "size of the clients' gradients, which is small near the best fit",
    "bits_up": "bits that the clients sent in a round",
    "bits_down": "bits that the clients were sent in a round",
    "num_lost": "clients of a round that found nothing of use",
    "num_excluded": "clients of a round whose messages were left out, as not finite",
    "shift": "how far a round moved the approximation, in sds",
    "acceptance": "probability with which a proposal was accepted",
}


def run_page(facts: RunFacts) -> Page:
    """Return the page of a run.

    Raises
    ------
    ImportError
        If what draws figures is not installed (the extra ``plots``).
    """
    page = Page("Report of a run")
    found = shown(facts.draws)
    mixing = judged(found.values)
    warned = _warned(facts, found)
    page.paragraph(INTRODUCTION)
    _verdict(page, facts, warned)
    page.heading("Warnings")
    if warned:
        page.paragraph("What was found wrong, in the words in which the run said it:")
        page.items(warned)
    else:
        page.paragraph("None.")
    data_section(page, facts.settings)
    _parameters(page, facts, found, mixing)
    for figure in figures(found, mixing):
        page.heading(figure.title)
        page.figure(figure.svg, figure.about)
    _communication(page, facts)
    rows = [(name, str(value)) for name, value in facts.settings.items() if name not in OF_DATA]
    if rows:
        page.heading("What was run")
        page.table(("setting", "value"), rows, texts=("value",))
    page.heading("Words")
    page.words(WORDS)
    page.heading("Versions")
    page.paragraph("With other versions, or on other devices, draws may differ.")
    page.table(("software", "version"), list(facts.versions.items()), texts=("version",))
    return page


def data_section(page: Page, settings: dict[str, Any]) -> None:
    """Add who has which data, as far as `settings` say it."""
    rows = [(told, str(settings[name])) for name, told in OF_DATA.items() if settings.get(name)]
    if rows:
        page.heading("Data")
        page.table(("what", "names"), rows, texts=("names",))


def _warned(facts: RunFacts, found: Shown) -> list[str]:
    """Return what is wrong, each thing once."""
    warned = list(facts.warnings)
    if facts.diagnosis is not None:
        warned += [x for x in facts.diagnosis.findings if x not in warned]
    num = int((~found.finite).sum())
    if num:
        warned.append(
            f"{num} of the {len(found.names)} parameters shown here have draws that are not "
            f"finite, the first of them {found.names[int(np.argmin(found.finite))]}: means and "
            f"quantiles of these are of no use."
        )
    return warned


def _verdict(page: Page, facts: RunFacts, warned: list[str]) -> None:
    told = facts.verdict or (str(facts.diagnosis).splitlines()[0] if facts.diagnosis else "")
    if facts.verdict:
        good = facts.verdict.startswith("passed") and not warned
        page.verdict(advice(facts.verdict), told, tone="good" if good else "poor")
    elif warned:
        num = "A warning" if len(warned) == 1 else f"{len(warned)} warnings"
        page.verdict(f"{num}: read below before you use these numbers.", told, tone="poor")
    elif facts.diagnosis is None:
        page.verdict("Nobody has judged these draws.", facts.not_judged)
    else:
        page.verdict(
            "Nothing was found wrong with these draws. Whether the model is right is another "
            "question.",
            told,
            tone="good",
        )


def _parameters(page: Page, facts: RunFacts, found: Shown, mixing: Mixing | None) -> None:
    page.heading("Parameters")
    num_chains, num_draws = found.values.shape[:2]
    if not found.names or not num_draws:
        page.paragraph("No draws were kept.")
        return
    of = "of one chain" if num_chains == 1 else f"of each of {num_chains} chains"
    page.paragraph(f"From {num_draws:,} draws {of}.")
    for note in facts.notes:
        page.paragraph(note)
    if len(found.names) < found.num_parameters:
        page.paragraph(
            f"{len(found.names)} of {found.num_parameters:,} parameters are shown here and in the "
            f"figures, as a page with more is not read: small groups of parameters whole, of each "
            f"larger one an equal share, evenly spaced. (At most {MOST_SHOWN} are shown.)"
        )
    rows = []
    marked = set() if mixing is None else _marked(mixing)
    for i, (name, row) in enumerate(rows_of(found).items()):
        cells = [_number(row[key], ".4g") for key in MOMENTS]
        if mixing is None:
            cells += ["", "", ""]
        else:
            of_chains = ((mixing.rhat, ".3f"), (mixing.ess_bulk, ",.0f"), (mixing.ess_tail, ",.0f"))
            cells += [_number(x[i], spec) for x, spec in of_chains]
        rows.append((name, *cells))
    page.table(COLUMNS, rows, marked=marked)
    if marked:
        page.paragraph(
            f"Marked: chains that disagree (R-hat above {RHAT:g} by more than chance), and fewer "
            f"than {ESS:g} effective draws. It takes more draws or another method."
        )


def _marked(mixing: Mixing) -> set[tuple[int, int]]:
    """Return the cells of the table of parameters, ``(row, column)``, that are not as wanted."""
    few = (mixing.ess_bulk < ESS) | (mixing.ess_tail < ESS)
    bad = {
        # Of many draws R-hat is above by chance now and then.
        "R-hat": mixing.disagree(RHAT) | (few & (mixing.rhat > RHAT)),
        "ESS": mixing.ess_bulk < ESS,
        "tail ESS": mixing.ess_tail < ESS,
    }
    cells = {
        (int(i), COLUMNS.index(name)) for name, where in bad.items() for i in np.flatnonzero(where)
    }
    return cells | {(row, 0) for row, _ in cells}


def _communication(page: Page, facts: RunFacts) -> None:
    page.heading("Communication")
    totals = facts.totals
    rounds = int(np.max(totals["rounds"], initial=0))
    up, down = (float(np.sum(totals[way])) for way in ("bits_up", "bits_down"))
    num_chains = len(np.atleast_1d(totals["rounds"]))
    each = "" if num_chains == 1 else f" in each of {num_chains} chains"
    cost = facts.stopped.get("cost")
    if cost is not None:
        page.paragraph(
            f"The whole fit took {cost['rounds']:,} rounds: all clients together sent "
            f"{_bits(cost['bits_up'])} and were sent {_bits(cost['bits_down'])}. What its stages "
            f"were is below."
        )
    if cost is None or facts.info.keys() & INFO.keys():  # else the draws are of no chain
        page.paragraph(
            "Of this, the chains whose draws are shown here: "
            * (cost is not None)
            + f"{rounds:,} rounds{each}, kept or not. All clients together sent {_bits(up)} and "
            f"were sent {_bits(down)}" + ("." if num_chains == 1 else ", for all chains.")
        )
    if facts.stopped.get("rule"):
        reached = "was met" if facts.stopped.get("reached") else "was not met"
        page.paragraph(
            f"The run was to end by the rule {facts.stopped['rule']}, which {reached} after "
            f"{facts.stopped['rounds']:,} rounds."
        )
    rows = [
        (meaning, *(_number(f(facts.info[name]), ",.4g") for f in (np.mean, np.min, np.max)))
        for name, meaning in INFO.items()
        if name in facts.info and np.size(facts.info[name])
    ]
    if rows:
        page.table(("in the rounds that were kept", "mean", "least", "most"), rows)


def _bits(number: float) -> str:
    return f"{number / 1e6:,.4g} Mbit" if number >= 1e5 else f"{number:,.0f} bits"


def _number(value: Any, spec: str) -> str:
    return format(float(value), spec) if np.isfinite(value) else "-"
