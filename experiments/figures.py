"""One style for every figure, and small files."""

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
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse
from PIL import Image

__all__ = ["COLORS", "covariance_ellipse", "figure", "save"]

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
STYLE: dict[str, Any] = {
    "figure.dpi": 110,
    "figure.constrained_layout.use": True,
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.6,
    "axes.prop_cycle": matplotlib.cycler(
        color=[COLORS[c] for c in ("blue", "red", "green", "orange", "pink", "sky", "black")]
    ),
}


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
    with plt.rc_context(STYLE):
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


def covariance_ellipse(
    axes: Axes, mean: np.ndarray, covariance: np.ndarray, deviations: float = 2.0, **kwargs: Any
) -> None:
    """Draw the ellipse of points `deviations` standard deviations from `mean` in the plane."""
    values, vectors = np.linalg.eigh(covariance)
    angle = float(np.degrees(np.arctan2(vectors[1, 1], vectors[0, 1])))
    width, height = 2 * deviations * np.sqrt(values[::-1])
    axes.add_patch(Ellipse((mean[0], mean[1]), width, height, angle=angle, fill=False, **kwargs))
