"""One style for every figure (``figures.mplstyle``), its common parts, and small files."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from PIL import Image

__all__ = [
    "COLORS",
    "band",
    "covariance_ellipse",
    "figure",
    "floor",
    "label_ticks",
    "points",
    "save",
    "some",
    "threshold",
]

# Okabe and Ito's palette: legible to colour-blind readers and in print.
COLORS = {
    "black": "#000000",
    "orange": "#E69F00",
    "sky": "#56B4E9",
    "green": "#009E73",
    "yellow": "#F0E442",
    "blue": "#0072B2",
    "red": "#D55E00",
    "pink": "#CC79A7",
}
STYLE = Path(__file__).with_suffix(".mplstyle")


@contextmanager
def figure(
    path: Path,
    rows: int = 1,
    columns: int = 1,
    size: tuple[float, float] = (4.8, 3.4),
    **kwargs: Any,
) -> Iterator[tuple[Figure, np.ndarray]]:
    """Yield a figure and its axes ``[rows, columns]``; write it to `path` at the end.

    Parameters
    ----------
    path
        A PNG file.
    rows, columns
        Of the grid of axes.
    size
        Width and height in inches of one cell of the grid.
    **kwargs
        Passed to ``plt.subplots``.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with figure(Path(folder) / "line.png") as (fig, axes):
    ...         _ = axes[0, 0].plot([0, 1])
    ...     (Path(folder) / "line.png").exists()
    True
    """
    with plt.style.context(STYLE):
        fig, axes = plt.subplots(
            rows, columns, figsize=(size[0] * columns, size[1] * rows), squeeze=False, **kwargs
        )
        try:
            yield fig, axes
            save(fig, path)
        finally:
            plt.close(fig)


def save(fig: Figure, path: Path) -> None:
    """Write a PNG with a palette of 256 colours, a third of the size of one without."""
    buffer = io.BytesIO()
    fig.savefig(buffer, format="png")
    image = Image.open(buffer).convert("RGB")
    image.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)


def band(axes: Axes, x: Any, middle: Any, spread: Any, *, color: str, **kwargs: Any) -> None:
    """Draw a line with a band of `spread` on both sides; none where `spread` is ``None``.

    Where the vertical axis is logarithmic the band ends at a tenth of the line, not at zero.
    """
    middle = np.asarray(middle, float)
    axes.plot(x, middle, color=color, **kwargs)
    if spread is None:
        return
    spread = np.asarray(spread, float)
    low = middle - spread
    if axes.get_yscale() == "log":
        low = np.maximum(low, middle / 10)
    axes.fill_between(x, low, middle + spread, color=color, alpha=0.2, lw=0)


def points(axes: Axes, x: Any, middle: Any, error: Any, *, color: str, **kwargs: Any) -> None:
    """Draw points with bars of two standard errors on both sides, without a line's cap."""
    middle, error = np.asarray(middle, float), 2 * np.asarray(error, float)
    if axes.get_yscale() == "log":
        error = np.stack([np.minimum(error, 0.9 * middle), error])
    axes.errorbar(x, middle, error, color=color, **kwargs)


def floor(axes: Axes, level: float, label: str = "floor") -> None:
    """Draw what no method can fall below: a dotted black line."""
    axes.axhline(level, color=COLORS["black"], ls=":", lw=1.2, label=label)


def threshold(axes: Axes, level: float, label: str = "threshold") -> None:
    """Draw what is to be reached: a dashed pink line."""
    axes.axhline(level, color=COLORS["pink"], ls="--", lw=1.2, label=label)


def label_ticks(axis: Axis, places: tuple[float, ...] = (1, 2, 5)) -> None:
    """Label a logarithmic axis at one, two and five of every decade, in plain numbers."""
    axis.set_major_locator(LogLocator(subs=places))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def some(num: int, most: int = 100) -> np.ndarray:
    """Return at most so many indices of `num`, evenly spaced, the last one among them.

    Examples
    --------
    >>> some(10, 3).tolist()
    [0, 4, 9]
    """
    return np.unique(np.linspace(0, num - 1, min(num, most)).astype(int))


def covariance_ellipse(
    axes: Axes, mean: np.ndarray, covariance: np.ndarray, deviations: float = 2.0, **kwargs: Any
) -> None:
    """Draw the ellipse of points `deviations` standard deviations from `mean` in the plane."""
    values, vectors = np.linalg.eigh(covariance)
    angle = float(np.degrees(np.arctan2(vectors[1, 1], vectors[0, 1])))
    width, height = 2 * deviations * np.sqrt(values[::-1])
    axes.add_patch(Ellipse((mean[0], mean[1]), width, height, angle=angle, fill=False, **kwargs))
