"""Figures of the pages from records: ``python -m experiments.plots [name ...]``.

``notes/figures.yaml`` has an entry per figure in ``docs/results/figures``, and describes the keys.
"""

import dataclasses
import io
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib.style
import numpy as np
import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse
from matplotlib.ticker import LogLocator, NullFormatter
from PIL import Image

from experiments import tidy
from experiments.claims import NOTES, evaluate

FIGURES = NOTES.parent / "docs" / "results" / "figures"
STYLE = Path(__file__).with_name("figures.mplstyle")
OF_ENTRY = {"columns": 2, "size": (3.6, 2.8), "legend": "figure"}
NUM_COLORS = 7
OF_PANEL = ("title", "xlabel", "ylabel", "xlim", "ylim", "xscale", "yscale")


@dataclasses.dataclass(frozen=True)
class Layer:
    """Rows of a study in one plot, a series for each value of `by`."""

    study: str
    metric: str
    kind: str = "curve"
    x: str = "x"
    by: Sequence[str] = ("method",)
    where: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    pivot: Sequence[str] = ()
    error: Any = None
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    label: str = ""
    scale: float | str = 1.0
    power: float = 1.0
    window: int = 1
    times: Sequence[str] = ()
    style: Any = "-"
    marker: str = ""
    colors: Mapping[str, str] = dataclasses.field(default_factory=dict)
    colormap: str = ""
    covariance: str = ""


def entries(path: Path = NOTES / "figures.yaml") -> dict[str, dict[str, Any]]:
    """Return the figures by the names of their files; each panel has all keys of its figure."""
    figures = {}
    for name, node in yaml.safe_load(path.read_text())["figures"].items():
        common = {k: v for k, v in node.items() if k not in ("panels", *OF_ENTRY)}
        panels = [_merged(common, panel) for panel in node.get("panels", [{}])]
        figures[name] = {**OF_ENTRY, **node, "panels": panels}
    return figures


def layers(panel: Mapping[str, Any]) -> list[Layer]:
    """Return the layers of a panel."""
    common = {k: v for k, v in panel.items() if k not in ("layers", "lines", *OF_PANEL)}
    return [Layer(**_merged(common, changes)) for changes in panel.get("layers", [{}])]


def _merged(common: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    where = {**common.get("where", {}), **changes.get("where", {})}
    return {**common, **changes, "where": where}


def places(layer: Layer) -> dict[Any, dict[str, float]]:
    """Return metrics by the columns and settings of their rows."""
    table: dict[Any, dict[str, float]] = defaultdict(dict)
    for row in tidy.read(layer.study):
        if row.matches(layer.where):
            about = dict(row.place)
            index = ",".join(str(about.pop(name)) for name in layer.pivot if name in about)
            metric = f"{row.metric}[{index}]" if index else row.metric
            table[tuple(about.items())][metric] = row.value
    return table


def series(layer: Layer) -> dict[str, np.ndarray]:
    """Return columns ``x, y, low, high`` of every series, sorted by x; raise if there is none."""
    scale = _number(layer.scale, layer.study)
    groups: dict[str, list[Any]] = defaultdict(list)
    order: dict[str, Any] = {}
    for place, values in places(layer).items():
        about, y = dict(place), values.get(layer.metric)
        x = values.get(layer.x, about.get(layer.x))
        if y is None or x is None:
            continue
        x *= math.prod(about[name] for name in layer.times)
        heights = [scale * v**layer.power for v in (y, *_limits(layer, values, y))]
        label = _label(layer, about)
        groups[label].append([x, *np.where(np.isfinite(heights), heights, np.nan)])
        order[label] = about.get(layer.by[0]) if len(layer.by) == 1 else None
        if layer.x not in values:
            groups[label].sort()
    if not groups:
        raise LookupError(f"{layer.study} has no rows for {layer}.")
    if all(isinstance(value, int | float) for value in order.values()):
        groups = {label: groups[label] for label in sorted(groups, key=order.__getitem__)}
    ordered = {n: groups[n] for n in layer.names.values() if n in groups}
    return {n: _smooth(np.array(v, object), layer.window) for n, v in {**ordered, **groups}.items()}


def _smooth(points: np.ndarray, window: int) -> np.ndarray:
    """Return running means of y, with limits at the distances of the last points."""
    if window > 1:
        means = np.convolve(points[:, 1].astype(float), np.ones(window) / window, mode="valid")
        points = points[window - 1 :]
        points[:, 1:] += (means - points[:, 1])[:, None]
    return points


def _limits(layer: Layer, values: Mapping[str, float], y: float) -> tuple[float, float]:
    """Return limits: two standard errors, one standard deviation, or two metrics."""
    if isinstance(layer.error, list):
        return values[layer.error[0]], values[layer.error[1]]
    if layer.error is None:
        width = values.get(f"{layer.metric}_sd", 0.0)
        width = 2 * values.get(f"{layer.metric} s.e.", width / 2)
    else:
        width = values.get(layer.error, 0.0)
    return y - width, y + width


def _label(layer: Layer, about: Mapping[str, Any]) -> str:
    values = [about[name] for name in layer.by if about.get(name) is not None]
    plain = ", ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in values)
    if layer.label and plain not in layer.names and layer.kind != "heat":
        return layer.label.format(**about)
    return layer.names.get(plain, plain)


def draw(name: str, entry: Mapping[str, Any], folder: Path = FIGURES) -> Path:
    """Draw a figure into `folder`; return its path."""
    panels, (width, height) = entry["panels"], entry["size"]
    columns = min(entry["columns"], len(panels))
    colors: dict[str, Any] = {}
    handles: dict[str, Any] = {}
    with figure(folder / name, -(-len(panels) // columns), columns, (width, height)) as (fig, axes):
        for axis in axes.flat[len(panels) :]:
            axis.axis("off")
        for axis, panel in zip(axes.flat, panels, strict=False):
            axis.set(**{key: panel[key] for key in OF_PANEL if panel.get(key)})
            for layer in layers(panel):
                _draw_layer(axis, layer, colors)
            for line in panel.get("lines", ()):
                _draw_line(axis, panel["study"], **line)
            _label_ticks(axis)
            items, labels = axis.get_legend_handles_labels()
            legend = {label: items[labels.index(label)] for label in labels}
            handles |= {label: item for label, item in legend.items() if label not in handles}
            if entry["legend"] == "panel":
                axis.legend(legend.values(), legend, fontsize=7)
        if entry["legend"] == "figure" and len(handles) > 1:
            longest = max(map(len, handles)) / 13 + 0.5
            across = max(1, min(len(handles), int(columns * width / longest)))
            fig.legend(handles.values(), handles, loc="outside lower center", ncols=across)
    return folder / name


def _draw_layer(axes: Axes, layer: Layer, colors: dict[str, Any]) -> None:
    groups = series(layer)
    if layer.kind == "heat":
        values = np.array([points[:, 1] for points in groups.values()], float)
        image = axes.imshow(values, aspect="auto", cmap="Blues", origin="lower")
        axes.set_xticks(range(values.shape[1]), next(iter(groups.values()))[:, 0])
        axes.set_yticks(range(len(groups)), list(groups))
        axes.grid(False)
        axes.figure.colorbar(image, ax=axes, label=layer.label)
        return
    for i, (label, points) in enumerate(groups.items()):
        color = layer.colors.get(label) or colors.setdefault(label, f"C{len(colors) % NUM_COLORS}")
        if layer.colormap:
            color = matplotlib.colormaps[layer.colormap](0.9 * i / max(1, len(groups) - 1))
        x, (y, low, high) = points[:, 0], points[:, 1:].astype(float).T
        low = np.maximum(low, y / 10) if axes.get_yscale() == "log" else low
        style: dict[str, Any] = {"color": color, "label": label}
        errors = np.nan_to_num(np.maximum(0, [y - low, high - y]))
        if layer.kind == "bars":
            axes.bar(x.astype(str), y, **style)
        elif layer.kind == "ellipse":
            _draw_ellipses(axes, layer, label, color)
        else:
            line = layer.style.get(label, "-") if isinstance(layer.style, dict) else layer.style
            if line == "-" and not layer.colormap and label in [*colors][NUM_COLORS:]:
                line = "--"
            style |= {"linestyle": line, "marker": layer.marker, "ms": 4}
            if layer.marker and errors.any():
                axes.errorbar(x.astype(float), y, errors, **style)
                continue
            axes.plot(x.astype(float), y, **style)
            if errors.any():
                axes.fill_between(x.astype(float), low, high, color=color, alpha=0.2, lw=0)


def _draw_ellipses(axes: Axes, layer: Layer, label: str, color: Any) -> None:
    """Draw ellipses of two standard deviations around centers, pivoted metrics as `mean[0]`."""
    for place, values in places(layer).items():
        if layer.metric in values and _label(layer, dict(place)) == label:
            center = (values[layer.x], values[layer.metric])
            cells = [[values[f"{layer.covariance}[{i},{j}]"] for j in (0, 1)] for i in (0, 1)]
            lengths, vectors = np.linalg.eigh(cells)
            angle = float(np.degrees(np.arctan2(vectors[1, 1], vectors[0, 1])))
            width, height = 4 * np.sqrt(lengths[::-1])
            patch = Ellipse(center, width, height, angle=angle, fill=False, color=color)
            axes.add_patch(patch).set_label(label)


def _draw_line(axes: Axes, study: str, label: str = "", power: float = 0, **exact: Any) -> None:
    """Draw an exact value ``x`` or ``y``, or a power of x through the last point drawn."""
    style: dict[str, Any] = {"color": "black", "ls": ":", "lw": 1.2, "label": label or None}
    if power:
        x, y = np.concatenate([np.asarray(line.get_xydata(), float) for line in axes.lines]).T
        x, last = np.sort(x), y[np.argmax(x)]
        axes.plot(x, last * (x / x[-1]) ** power, **style)
    for side, expression in exact.items():
        (axes.axhline if side == "y" else axes.axvline)(_number(expression, study), **style)


def _number(expression: Any, study: str) -> float:
    return float(evaluate(str(expression), study))


def _label_ticks(axes: Axes) -> None:
    """Label logarithmic axes of less than three decades in plain numbers."""
    for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        if axis.get_scale() == "log" and high < 1000 * low:
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter(lambda value, _: f"{value:g}")
            axis.set_minor_formatter(NullFormatter())


@contextmanager
def figure(
    path: Path, rows: int = 1, columns: int = 1, size: tuple[float, float] = (4.8, 3.4)
) -> Iterator[tuple[Figure, np.ndarray]]:
    """Yield a figure and its axes ``[rows, columns]`` of a `size` in inches; write a small PNG."""
    with matplotlib.style.context(STYLE):
        shape = (size[0] * columns, size[1] * rows)
        fig = Figure(figsize=shape)
        yield fig, fig.subplots(rows, columns, squeeze=False)
        buffer = io.BytesIO()
        fig.savefig(buffer, format="png")
        image = Image.open(buffer).convert("RGB")  # with a palette it is a third of the size
        image.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)


if __name__ == "__main__":
    listed = entries()
    for name in sys.argv[1:] or listed:
        name = name.removesuffix(".png") + ".png"
        print(draw(name, listed[name]).name)
