"""Table 8 and Figure 6 of Guo et al. (2023): how much the settings of client inference matter."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np

from experiments import checks, spreading
from experiments.fed_ep import cifar, federations, image_runs, methods
from experiments.fed_ep.image_figures import smooth
from experiments.fed_ep.methods import Federation, Settings
from experiments.figures import COLORS, figure
from fedmcmc import Placement

__all__ = ["Config", "draw", "groups", "run", "unmodified"]

TIMES = 2.0  # standard errors that a bar shows
PLAIN = {
    "covariance": "covariance (a precision per row)",
    "laplace_passes": "passes of L",
    "stateful_laplace_passes": "passes of L",
    "ngvi_epochs": "epochs of V",
    "server_learning_rate": "server's step size",
    "client_learning_rate": "clients' step size",
    "row_curvature": "curvature per row",
}
"""Settings in the words of the figure, where their own names are not plain."""
SHORT = {
    "laplace_passes": "passes",
    "stateful_laplace_passes": "passes",
    "ngvi_epochs": "epochs",
    "server_learning_rate": "step size",
    "client_learning_rate": "step size",
    "row_curvature": "curvature",
}
GRID = (
    *(f"{f} (I): covariance={a}" for f in ("FedEP", "FedSEP") for a in (0.04, 0.05, 0.06)),
    *(f"{f} (M): shrinkage={a}" for f in ("FedEP", "FedSEP") for a in (5e-5, 1e-4, 5e-4)),
    *(f"FedEP (L): stateful_laplace_passes={n}" for n in (5, 10)),
    *(f"FedSEP (L): laplace_passes={n}" for n in (5, 10)),
    *(f"{f} (V): ngvi_epochs={n}" for f in ("FedEP", "FedSEP") for n in (1, 5, 10)),
)


@dataclass(frozen=True)
class Config(cifar.Config):
    """Settings; the defaults are those of the paper's Table 8 (with one epoch more of V).

    Attributes
    ----------
    dataset
        ``"mnist"``, besides those of `cifar`, as clients with a dominant label each.
    proportion
        Of MNIST's clients, of the dominant label.
    num_components
        Principal components of CIFAR's images, with their variances; zero for all pixels.
    grid
        ``"method: setting=value"``; each is run beside FedAvg.
    """

    DATASETS: ClassVar[tuple[str, ...]] = ("cifar100", "cifar10", "mnist")

    proportion: float = 0.5
    num_components: int = 0
    methods: tuple[str, ...] = ("FedAvg",)
    grid: tuple[str, ...] = GRID

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.at_least(0, self, "num_components")
        checks.require(0 <= self.proportion <= 1, "proportion must lie in [0, 1]", self.proportion)
        checks.require(len(self.grid) > 0, "grid must have a line", self.grid)
        for line in self.grid:
            _parsed(self, line)


def _parsed(config: Config, line: str) -> tuple[str, Settings]:
    """Return the method of a line of the grid and the settings it asks for."""
    method, _, change = line.partition(": ")
    name, _, value = change.partition("=")
    known = {field.name for field in dataclasses.fields(Settings)}
    checks.require(
        method in methods.METHODS and name in known and value != "",
        "grid must have lines like 'FedEP (I): covariance=0.04'",
        repr(line),
    )
    settings = {field: getattr(config, field) for field in known}
    try:
        settings[name] = type(settings[name])(value)
        return method, Settings(**settings)
    except ValueError as error:
        raise ValueError(f"grid has a value out of range in {line!r}: {error}") from error


def run(config: Config, out: Path, placement: Placement = spreading.ONE_DEVICE) -> dict[str, Any]:
    """Run every line of the grid; write the figure."""
    variants = {"FedAvg": ("FedAvg", config)} | {
        line: _parsed(config, line) for line in config.grid
    }
    found = image_runs.measure(config, _federation(config), placement, variants)
    # The page shows none of these of a grid, whose record is long enough.
    left_out = ("loss_by_round", "loss_by_round_sd", "by_round_sd")
    found = {name: value for name, value in found.items() if name not in left_out}
    return found | {"figures": draw(found, out)}


def _federation(config: Config) -> Federation:
    if config.dataset != "mnist":
        found = cifar.federation(config)
        num = config.num_components
        return federations.with_pca(found, num, scaled=False) if num else found
    return federations.mnist(
        jax.random.key(config.seed),
        config.num_clients,
        config.num_rows,
        config.num_test,
        proportion=config.proportion,
    )


def groups(metrics: Mapping[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the table's rows by ``"method, setting"`` and by the setting's value."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in metrics["table"]:
        method, _, change = row["method"].partition(": ")
        name, _, value = change.partition("=")
        if value:
            found.setdefault(f"{method}, {name}", {})[value] = row
    return found


def draw(metrics: dict[str, Any], out: Path) -> list[dict[str, str]]:
    """Write the figure, a panel for each method and setting; return its name."""
    settings, found = metrics["settings"], groups(metrics)
    window = settings["window"]
    columns = min(3, len(found))
    lines = -(-len(found) // columns)
    shades = ("sky", "blue", "green", "orange", "red", "pink")
    with figure(out / "settings.png", lines, columns, (3.4, 2.8), sharey=True) as (_, axes):
        for panel in axes.flat[len(found) :]:
            panel.set_axis_off()
        for panel, (name, of) in zip(axes.flat, found.items(), strict=False):
            method, _, setting = name.partition(", ")
            curves = {"FedAvg": metrics["by_round"]["FedAvg"]}
            curves |= {
                f"{SHORT.get(setting, setting)} {value}": metrics["by_round"][row["method"]]
                for value, row in of.items()
            }
            sources = ["FedAvg", *(row["method"] for row in of.values())]
            plain = unmodified(metrics, method)
            if plain is not None and not any(float(v) == settings[setting] for v in of):
                curves["as it is"] = plain
                sources.append("")
            shown = zip(curves.items(), sources, ("black", *shades), strict=False)
            for i, ((label, values), source, shade) in enumerate(shown):
                curve = smooth(values, window)
                rounds = np.arange(window, window + len(curve))
                # Curves that lie on one another show through the dashes.
                style = dict(color=COLORS[shade], lw=1.2, ls="--" if i % 2 == 0 and i else "-")
                panel.plot(rounds, curve, label=label, **style)
                ends = np.array(metrics["end_by_seed"].get(source, []), float)
                if len(ends) > 1:
                    error = TIMES * ends.std(ddof=1) / len(ends) ** 0.5
                    place = rounds[-1] + (1 + i) * len(curve) / 40  # beside one another
                    panel.errorbar(place, ends.mean(), error, color=COLORS[shade], capsize=2, lw=1)
            panel.axvline(settings["num_burnin"], color="0.6", lw=0.8, ls=":")
            panel.set(xlabel="rounds", title=f"{method}: {PLAIN.get(setting, setting)}")
            panel.title.set_fontsize("medium")
            panel.legend()
        for panel in axes[:, 0]:
            panel.set_ylabel("test accuracy (%)")
    return [{"file": "settings.png"}]


def unmodified(metrics: Mapping[str, Any], method: str) -> list[float] | None:
    """Return the accuracies of a method with the run's own settings, if its grid has such a line.

    A line of a grid may ask for the value that the setting has.
    """
    for name, lines in groups(metrics).items():
        line, _, setting = name.partition(", ")
        for value, row in lines.items():
            if line == method and _is_own(value, metrics["settings"][setting]):
                return list(metrics["by_round"][row["method"]])
    return None


def _is_own(value: str, setting: Any) -> bool:
    return isinstance(setting, int | float) and float(value) == setting
