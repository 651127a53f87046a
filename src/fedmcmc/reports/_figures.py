"""Figures of draws as SVG elements, by ArviZ or matplotlib."""

import io
import re
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedmcmc._checks import missing_extra_error
from fedmcmc.diagnostics import Mixing, mixing
from fedmcmc.pytrees import variables
from fedmcmc.reports._draws import Shown, compute_mixing, select_parameters
from fedmcmc.types import ArrayTree

if TYPE_CHECKING:
    import matplotlib.figure

MAX_TRACED, MAX_CHAINS, MAX_POINTS = 8, 8, 1600
"""Parameters, chains, and draws of all chains together in the figure of traces."""
MAX_POINTS_PER_CHAIN = 500
NUM_QUANTILES = 100
"""Number of quantiles at which the figure of ranks compares chains."""


class Figure(NamedTuple):
    """SVG element with its title and a caption."""

    title: str
    svg: str
    about: str


def can_draw() -> None:
    """Raise `ImportError` if arviz-plots or matplotlib is not installed."""
    try:
        import arviz_plots  # noqa: F401
        import matplotlib  # noqa: F401
    except ImportError as error:
        need = "The figures of a report need arviz-plots and matplotlib"
        raise missing_extra_error(need, "plots") from error


def as_svg(figure: "matplotlib.figure.Figure", prefix: str) -> str:
    """Return a matplotlib figure as an SVG element whose ids begin with `prefix`."""
    import matplotlib

    buffer = io.StringIO()
    # Text stays text, which can be searched and takes less space than outlines.
    with matplotlib.rc_context({"svg.hashsalt": prefix, "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None})
    # The metadata hold web addresses, which a page must not contain.
    svg = re.sub(r"<metadata>.*?</metadata>", "", buffer.getvalue(), flags=re.DOTALL)
    svg = svg[svg.index("<svg") :]
    # Ids of the figures of one page must differ.
    return re.sub(r'((?:\bid="|href="#|url\(#))', rf"\g<1>{prefix}-", svg)


def figures_of(draws: ArrayTree, *, with_traces: bool = True) -> list[Figure]:
    """Return figures of draws with leaves ``[num_chains, num_draws, *event]``; see `figures`."""
    shown = select_parameters(draws)
    return figures(shown, compute_mixing(shown.values), with_traces=with_traces)


def figures(shown: Shown, judged: Mixing | None, *, with_traces: bool = True) -> list[Figure]:
    """Return a forest plot, and traces and ranks of the parameters that mix worst.

    Raises
    ------
    ImportError
        If arviz-plots or matplotlib is not installed.
    """
    can_draw()
    num_draws = shown.values.shape[1]
    result = []
    if num_draws > 1 and shown.finite.any():
        result.append(_forest(shown))
    if num_draws > 1 and shown.names and with_traces:
        chosen, note = _worst_mixing(shown, judged)
        result.append(_traces(shown, chosen, note))
        moves = shown.values.min((0, 1)) < shown.values.max((0, 1))
        clean = chosen[(shown.finite & moves)[chosen]]
        if judged is not None and len(shown.values) > 1 and len(clean):
            result.append(_ranks(shown, clean))
    return result


def histogram(title: str, values: np.ndarray, axis: str, about: str) -> Figure:
    """Return a histogram with horizontal axis `axis` and a logarithmic vertical axis.

    Raises
    ------
    ImportError
        If arviz-plots or matplotlib is not installed.
    """
    can_draw()
    from matplotlib.figure import Figure as MatplotlibFigure

    figure = MatplotlibFigure(figsize=(7, 2.5))
    ax = figure.add_subplot()
    ax.hist(values, bins=60, color="#0072b2")
    ax.set_yscale("log")
    ax.set_xlabel(axis)
    ax.set_ylabel("draws")
    return Figure(title, as_svg(figure, "histogram"), about)


def _forest(shown: Shown) -> Figure:
    num_chains = len(shown.values)
    separate = 1 < num_chains <= MAX_CHAINS
    num_omitted = len(shown.names) - int(shown.finite.sum())
    about = (
        "The median of each parameter (dot), and the intervals that hold 50 % (thick) and 90 % "
        "(thin) of its draws"
        + (", one line per chain: the lines of a parameter should overlap." if separate else ".")
        + f" Without {num_omitted} parameters whose draws are not all finite." * bool(num_omitted)
    )
    style = dict(combined=not separate, ci_kind="eti", ci_probs=(0.5, 0.9), point_estimate="median")
    svg = _plot_by_arviz("plot_forest", shown, np.flatnonzero(shown.finite), **style)
    return Figure("Posterior", svg, about)


def _worst_mixing(shown: Shown, judged: Mixing | None) -> tuple[np.ndarray, str]:
    """Return the indices of the parameters with the fewest effective draws, and a note on them."""
    num = len(shown.names)
    if num <= MAX_TRACED:
        return np.arange(num), ""
    ess = np.zeros(num) if judged is None else np.nan_to_num(judged.ess_bulk, nan=-1.0)
    chosen = np.sort(np.argsort(ess, kind="stable")[:MAX_TRACED])
    return chosen, (
        f" Only the {len(chosen)} parameters with the fewest effective draws are shown, because "
        f"problems appear there first."
    )


def _traces(shown: Shown, chosen: np.ndarray, note: str) -> Figure:
    num_chains, num_draws, _ = shown.values.shape
    # With many chains each line has fewer draws, since the lines would hide each other.
    num_points = min(MAX_POINTS_PER_CHAIN, MAX_POINTS // min(num_chains, MAX_CHAINS))
    thinning = -(-num_draws // num_points)
    if thinning > 1:
        note += f" One draw in {thinning} is shown."
    if num_chains > MAX_CHAINS:
        note += f" {MAX_CHAINS} of {num_chains} chains are shown."
    part = shown._replace(values=shown.values[:MAX_CHAINS, ::thinning])
    svg = _plot_by_arviz(
        "plot_trace",
        part,
        chosen,
        col_wrap=2,
        figure_kwargs=_panel_layout(len(chosen)),
        visuals={"trace": {"width": 0.5, "alpha": 0.75}},
    )
    about = (
        "The draws in their order, one color per chain. Good chains look the same and have no "
        f"trend: noise around one level.{note}"
    )
    return Figure("Traces", svg, about)


def _ranks(shown: Shown, chosen: np.ndarray) -> Figure:
    """Return a plot of `off_even` with one panel per parameter and one line per chain."""
    from matplotlib.figure import Figure as MatplotlibFigure

    shown_chains = shown.values[:MAX_CHAINS, :, chosen]
    # Use each chain's effective draws: the number for all chains is small if chains disagree,
    # and the band would then hide the disagreement.
    sizes = np.median([mixing(chain[None]).ess_bulk for chain in shown_chains], axis=0)
    figure = MatplotlibFigure(**_panel_layout(len(chosen)))
    panels = figure.subplots(-(-len(chosen) // 2), min(2, len(chosen)), squeeze=False, sharex=True)
    even = np.linspace(0, 1, NUM_QUANTILES + 1)
    for ax in panels.flat[len(chosen) :]:
        ax.set_axis_off()
    for ax, i, ess, chains in zip(
        panels.flat, chosen, sizes, np.moveaxis(shown_chains, -1, 0), strict=False
    ):
        for line in off_even(chains, shown.values[..., i], even):
            ax.plot(even, line, linewidth=0.8)
        width = 3 * np.sqrt(even * (1 - even) / ess)
        ax.fill_between(even, -width, width, color="0.9", linewidth=0)
        ax.set_title(shown.names[i].replace("$", r"\$"), fontsize=10)
        ax.tick_params(labelsize=8)
    about = (
        "The share of a chain's draws below a quantile of all draws, minus the expected share: "
        "zero everywhere if all chains have the same distribution. Lines of chains that agree "
        "hardly leave the gray band, which is three standard errors to either side."
    )
    if len(shown.values) > MAX_CHAINS:
        about += f" {MAX_CHAINS} of {len(shown.values)} chains are shown."
    return Figure("Ranks", as_svg(figure, "ranks"), about)


def off_even(chains: np.ndarray, values: np.ndarray, even: np.ndarray) -> np.ndarray:
    """Return each chain's share of draws below the quantiles `even` of all draws, minus `even`.

    `chains` is ``[num_chains, num_draws]``; `values` holds all draws.

    Examples
    --------
    >>> chains = np.array([[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]])
    >>> off_even(chains, chains, np.array([0.0, 0.5, 1.0])).tolist()
    [[0.0, 0.5, 0.0], [0.0, -0.5, 0.0]]
    """
    quantiles = np.quantile(values, even)
    below = [np.sort(chain).searchsorted(quantiles, "right") for chain in chains]
    shares = np.array(below) / chains.shape[1]
    shares[:, even <= 0] = 0.0  # no draw is below the smallest
    return shares - even


def _panel_layout(num: int) -> dict[str, Any]:
    return {"figsize": (9.0, 1.7 * -(-num // 2) + 0.4), "layout": "constrained"}


def _plot_by_arviz(name: str, shown: Shown, chosen: np.ndarray, **settings: object) -> str:
    """Return ArviZ's plot `name` of the chosen parameters as an SVG element."""
    import arviz_plots
    import matplotlib.pyplot as plt
    from arviz_base import from_dict

    # A dollar sign would begin a formula.
    columns = variables({shown.names[i].replace("$", r"\$"): shown.values[..., i] for i in chosen})
    finite = {name: np.where(np.isfinite(x), x, np.nan) for name, x in columns.items()}
    # Do not display the figure in the user's matplotlib session.
    with warnings.catch_warnings(), plt.ioff():
        warnings.simplefilter("ignore")
        plot = getattr(arviz_plots, name)
        plots = plot(from_dict({"posterior": finite}), backend="matplotlib", **settings)
        figure = plots.viz["figure"].item()
        try:
            return as_svg(figure, name.removeprefix("plot_"))
        finally:
            plt.close(figure)
