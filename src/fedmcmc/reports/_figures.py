"""Figures of draws as SVG elements: through ArviZ where it draws them, else by matplotlib."""

import io
import re
import warnings
from typing import Any, NamedTuple

import numpy as np

from fedmcmc._types import ArrayTree
from fedmcmc.diagnostics import Mixing
from fedmcmc.reports._draws import Shown, judged, shown

MISSING = 'The figures of a report need arviz-plots and matplotlib: pip install "fedmcmc[plots]".'
MOST_TRACED, MOST_CHAINS, MOST_POINTS = 8, 8, 500
"""Parameters, chains, and draws per chain in the figure of traces."""


class Figure(NamedTuple):
    """An SVG element, its title, and a sentence or two about what it shows."""

    title: str
    svg: str
    about: str


def can_draw() -> None:
    """Raise `ImportError` where what draws figures is not installed."""
    try:
        import arviz_plots  # noqa: F401
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(MISSING) from error


def as_svg(figure: Any, prefix: str) -> str:
    """Return a matplotlib figure as an SVG element whose ids begin with `prefix`."""
    import matplotlib

    text = io.StringIO()
    # Text stays text, which can be searched and takes less space than outlines.
    with matplotlib.rc_context({"svg.hashsalt": prefix, "svg.fonttype": "none"}):
        figure.savefig(text, format="svg", bbox_inches="tight", metadata={"Date": None})
    whole = text.getvalue()
    # What is left out names its license by addresses; the page has none.
    whole = re.sub(r"<metadata>.*?</metadata>", "", whole, flags=re.DOTALL)
    whole = whole[whole.index("<svg") :]
    # Ids of the figures of one page must differ.
    return re.sub(r'((?:\bid="|href="#|url\(#))', rf"\g<1>{prefix}-", whole)


def figures_of(draws: ArrayTree, *, with_traces: bool = True) -> list[Figure]:
    """Return figures of draws with leaves ``[num_chains, num_draws, *event]``; see `figures`."""
    found = shown(draws)
    return figures(found, judged(found.values), with_traces=with_traces)


def figures(found: Shown, mixing: Mixing | None, *, with_traces: bool = True) -> list[Figure]:
    """Return a forest plot of the parameters, and the traces of some, chosen by their `mixing`.

    Raises
    ------
    ImportError
        If arviz-plots or matplotlib is not installed.
    """
    can_draw()
    num_draws = found.values.shape[1]
    drawn = []
    if num_draws > 1 and found.finite.any():
        drawn.append(_forest(found))
    if num_draws > 1 and found.names and with_traces:
        drawn.append(_traces(found, mixing))
    return drawn


def histogram(title: str, values: np.ndarray, axis: str, about: str) -> Figure:
    """Return a histogram with a logarithmic vertical axis, named `axis` along the other.

    Raises
    ------
    ImportError
        If arviz-plots or matplotlib is not installed.
    """
    can_draw()
    from matplotlib.figure import Figure as Drawn

    drawn = Drawn(figsize=(7, 2.5))
    ax = drawn.add_subplot()
    ax.hist(values, bins=60, color="#0072b2")
    ax.set_yscale("log")
    ax.set_xlabel(axis)
    ax.set_ylabel("draws")
    return Figure(title, as_svg(drawn, "histogram"), about)


def _forest(found: Shown) -> Figure:
    num_chains = len(found.values)
    apart = 1 < num_chains <= MOST_CHAINS
    left_out = len(found.names) - int(found.finite.sum())
    about = (
        "Of each parameter the median (dot), and the intervals that hold half (thick) and nine "
        "tenths (thin) of its draws"
        + (", one line per chain: the lines of a parameter should lie together." if apart else ".")
        + f" Without {left_out} parameters whose draws are not all finite." * bool(left_out)
    )
    settings = dict(combined=not apart, ci_kind="eti", ci_probs=(0.5, 0.9), point_estimate="median")
    svg = _by_arviz("plot_forest", found, np.flatnonzero(found.finite), **settings)
    return Figure("Posterior", svg, about)


def _traces(found: Shown, mixing: Mixing | None) -> Figure:
    num_chains, num_draws, num = found.values.shape
    chosen = np.arange(num)
    why = ""
    if num > MOST_TRACED:
        least = np.zeros(num) if mixing is None else np.nan_to_num(mixing.ess_bulk, nan=-1.0)
        chosen = np.sort(np.argsort(least, kind="stable")[:MOST_TRACED])
        why = (
            f" {len(chosen)} parameters are shown, those with the fewest effective draws, where "
            f"trouble shows first."
        )
    every = -(-num_draws // MOST_POINTS)
    if every > 1:
        why += f" One draw in {every} is shown."
    if num_chains > MOST_CHAINS:
        why += f" {MOST_CHAINS} of {num_chains} chains are shown."
    part = found._replace(values=found.values[:MOST_CHAINS, ::every])
    svg = _by_arviz(
        "plot_trace", part, chosen, col_wrap=2, figure_kwargs=_size_of_traces(len(chosen))
    )
    about = (
        "The draws in their order, one color per chain. Good chains look alike and have no trend: "
        f"noise around one level.{why}"
    )
    return Figure("Traces", svg, about)


def _size_of_traces(num: int) -> dict[str, Any]:
    return {"figsize": (9.0, 1.7 * -(-num // 2) + 0.4), "layout": "constrained"}


def _by_arviz(name: str, found: Shown, chosen: np.ndarray, **settings: Any) -> str:
    """Return a plot of ArviZ, every parameter a variable of its own."""
    import arviz_plots
    import matplotlib.pyplot as plt
    from arviz_base import from_dict

    # A dollar sign would begin a formula.
    columns = {found.names[i].replace("$", r"\$"): found.values[..., i] for i in chosen}
    finite = {name: np.where(np.isfinite(x), x, np.nan) for name, x in columns.items()}
    # Whatever a user's matplotlib shows figures in, this one is only written.
    with warnings.catch_warnings(), plt.ioff():
        warnings.simplefilter("ignore")
        plot = getattr(arviz_plots, name)
        drawn = plot(from_dict({"posterior": finite}), backend="matplotlib", **settings)
        figure = drawn.viz["figure"].item()
        try:
            return as_svg(figure, name.removeprefix("plot_"))
        finally:
            plt.close(figure)
