"""Figures of draws as SVG elements: through ArviZ where it draws them, else by matplotlib."""

import io
import re
import warnings
from typing import Any, NamedTuple

import numpy as np

from fedmcmc._checks import not_installed
from fedmcmc._types import ArrayTree
from fedmcmc.diagnostics import Mixing
from fedmcmc.diagnostics import mixing as _mixing_of
from fedmcmc.pytrees import variables
from fedmcmc.reports._draws import Shown, judged, shown

MOST_TRACED, MOST_CHAINS, MOST_POINTS = 8, 8, 1600
"""Parameters, chains, and draws of all chains together in the figure of traces."""
POINTS_OF_A_CHAIN = 500
RANKS = 100
"""Places at which the figure of ranks compares chains."""


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
        what = "The figures of a report need arviz-plots and matplotlib"
        raise not_installed(what, "plots") from error


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
    """Return a forest plot of the parameters, and traces and ranks of some, chosen by `mixing`.

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
        chosen, why = _hardest(found, mixing)
        drawn.append(_traces(found, chosen, why))
        moves = found.values.min((0, 1)) < found.values.max((0, 1))
        clean = chosen[(found.finite & moves)[chosen]]
        if mixing is not None and len(found.values) > 1 and len(clean):
            drawn.append(_ranks(found, clean))
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


def _hardest(found: Shown, mixing: Mixing | None) -> tuple[np.ndarray, str]:
    """Return which parameters have the fewest effective draws, and a sentence on it."""
    num = len(found.names)
    if num <= MOST_TRACED:
        return np.arange(num), ""
    least = np.zeros(num) if mixing is None else np.nan_to_num(mixing.ess_bulk, nan=-1.0)
    chosen = np.sort(np.argsort(least, kind="stable")[:MOST_TRACED])
    return chosen, (
        f" {len(chosen)} parameters are shown, those with the fewest effective draws, where "
        f"trouble shows first."
    )


def _traces(found: Shown, chosen: np.ndarray, why: str) -> Figure:
    num_chains, num_draws, _ = found.values.shape
    num_shown = min(num_chains, MOST_CHAINS)
    # Of many chains fewer draws: their lines would hide one another.
    every = -(-num_draws // min(POINTS_OF_A_CHAIN, MOST_POINTS // num_shown))
    if every > 1:
        why += f" One draw in {every} is shown."
    if num_chains > MOST_CHAINS:
        why += f" {MOST_CHAINS} of {num_chains} chains are shown."
    part = found._replace(values=found.values[:MOST_CHAINS, ::every])
    svg = _by_arviz(
        "plot_trace",
        part,
        chosen,
        col_wrap=2,
        figure_kwargs=_size_of_panels(len(chosen)),
        visuals={"trace": {"width": 0.5, "alpha": 0.75}},
    )
    about = (
        "The draws in their order, one color per chain. Good chains look alike and have no trend: "
        f"noise around one level.{why}"
    )
    return Figure("Traces", svg, about)


def _ranks(found: Shown, chosen: np.ndarray) -> Figure:
    """Draw how far the ranks of a chain's draws among all are from even, a line per chain."""
    from matplotlib.figure import Figure as Drawn

    shown_chains = found.values[:MOST_CHAINS, :, chosen]
    # Of chains alone: that of all together is small where they disagree, which is to be seen.
    ess = np.median([_mixing_of(chain[None]).ess_bulk for chain in shown_chains], axis=0)
    drawn = Drawn(**_size_of_panels(len(chosen)))
    panels = drawn.subplots(-(-len(chosen) // 2), min(2, len(chosen)), squeeze=False, sharex=True)
    even = np.linspace(0, 1, RANKS + 1)
    for ax in panels.flat[len(chosen) :]:
        ax.set_axis_off()
    for ax, i, own, chains in zip(
        panels.flat, chosen, ess, np.moveaxis(shown_chains, -1, 0), strict=False
    ):
        for line in off_even(chains, found.values[..., i], even):
            ax.plot(even, line, linewidth=0.8)
        width = 3 * np.sqrt(even * (1 - even) / own)
        ax.fill_between(even, -width, width, color="0.9", linewidth=0)
        ax.set_title(found.names[i].replace("$", r"\$"), fontsize=10)
        ax.tick_params(labelsize=8)
    about = (
        "Of each chain the share of its draws below a quantile of all draws, less that quantile: "
        "zero everywhere if chains draw alike. Lines of chains that agree hardly leave the gray "
        "area, three standard errors to either side for a chain's own effective draws."
    )
    if len(found.values) > MOST_CHAINS:
        about += f" {MOST_CHAINS} of {len(found.values)} chains are shown."
    return Figure("Ranks", as_svg(drawn, "ranks"), about)


def off_even(chains: np.ndarray, values: np.ndarray, even: np.ndarray) -> np.ndarray:
    """Return each chain's share of draws below quantiles `even` of all draws, less `even`.

    `chains` is ``[num_chains, num_draws]``, `values` are all draws.

    Examples
    --------
    >>> chains = np.array([[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]])
    >>> off_even(chains, chains, np.array([0.0, 0.5, 1.0])).tolist()
    [[0.0, 0.5, 0.0], [0.0, -0.5, 0.0]]
    """
    quantiles = np.quantile(values, even)
    below = [np.sort(chain).searchsorted(quantiles, "right") for chain in chains]
    shares = np.array(below) / chains.shape[1]
    shares[:, even <= 0] = 0.0  # the least draw is below none
    return shares - even


def _size_of_panels(num: int) -> dict[str, Any]:
    return {"figsize": (9.0, 1.7 * -(-num // 2) + 0.4), "layout": "constrained"}


def _by_arviz(name: str, found: Shown, chosen: np.ndarray, **settings: Any) -> str:
    """Return a plot of ArviZ, every parameter a variable of its own."""
    import arviz_plots
    import matplotlib.pyplot as plt
    from arviz_base import from_dict

    # A dollar sign would begin a formula.
    columns = variables({found.names[i].replace("$", r"\$"): found.values[..., i] for i in chosen})
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
