"""Measures of a run as tidy rows, and the files that a run leaves.

Rows are those of `experiments.tidy`, with the setting ``parameter`` for numbers of one parameter.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedmcmc
from experiments import confidence, output, plots, problems
from experiments.claims import mean as mean_with_error
from experiments.tidy import Row, from_numbers, setting_text, write_rows
from experiments.wiring import ConfigError
from fedmcmc import metrics
from fedmcmc.diagnostics import mixing

__all__ = [
    "NAMES",
    "ROWS",
    "check_names",
    "flat",
    "probabilities",
    "rows_at",
    "table",
    "tidy",
    "write",
]

ROWS = "rows.csv"
MOST_PARAMETERS = 200
MOST_PREDICTIVE_DRAWS = 1_000
OVER_SEEDS: dict[str, Callable[..., float]] = {"max_rhat": np.max, "min_ess": np.min}
"""How seeds are summarized in a table; others by their mean."""
MIXING_AT_ONCE = 8  # the least number of parameters that `mixing` judges
OUTCOMES = ("label", "y")
"""Names of columns that hold the outcome."""


Found = Iterator[tuple[Any, str, Any]]  # parameter, settings or nothing; metric; value


def check_names(names: Any) -> None:
    """Raise `ConfigError` unless all names are metrics."""
    choices = (*NAMES, *OF_REFERENCES)
    unknown = [name for name in names or () if name not in choices]
    if unknown:
        listed = ", ".join(choices)
        raise ConfigError(f"metrics has {', '.join(unknown)}; the metrics are {listed}.")


def tidy(
    samples: fedmcmc.Samples,
    problem: Any,
    *,
    method: str,
    settings: Mapping[str, Any],
    seed: int,
    names: Sequence[str] | None = None,
) -> list[Row]:
    """Return the rows of a run: all metrics that apply, or those in `names`."""
    rows: list[Row] = []
    chosen = [name for name in names or DEFAULT if name not in OF_REFERENCES]
    for measure in dict.fromkeys(NAMES[name] for name in chosen):
        for place, metric, value in measure(samples, problem):
            if (not names or metric in names) and NAMES[metric] is measure:
                rows += rows_at(method, settings, place, {metric: value}, seed)
    return rows


def rows_at(
    method: str,
    settings: Mapping[str, Any],
    place: str | Mapping[str, Any],
    numbers: Mapping[str, Any],
    seed: int,
) -> list[Row]:
    """Return rows of one parameter, or at settings whose `x` is a place on a curve."""
    if isinstance(place, str):
        place = {"parameter": "_".join(place.split())} if place else {}
    own = {name: value for name, value in place.items() if name != "x"}
    return from_numbers(method, {**settings, **own}, numbers, seed, place.get("x"))


def parameters(samples: fedmcmc.Samples) -> tuple[list[str], np.ndarray]:
    """Return names and draws ``[num_chains, num_draws, n]`` of up to 200 evenly spaced numbers."""
    names, columns = [], []
    for path, leaf in jax.tree_util.tree_leaves_with_path(samples.constrained):
        site = jax.tree_util.keystr(path, simple=True, separator=".") or "theta"
        event = np.shape(leaf)[2:]
        places = [",".join(map(str, place)) for place in np.ndindex(*event)]
        names += [f"{site}[{place}]" if place else site for place in places]
        columns.append(np.asarray(leaf, np.float64).reshape(*np.shape(leaf)[:2], -1))
    values = np.concatenate(columns, axis=-1)
    size = values.shape[-1]
    chosen = np.unique(np.linspace(0, size - 1, min(size, MOST_PARAMETERS)).astype(int))
    return [names[i] for i in chosen], values[..., chosen]


def _moments(samples: fedmcmc.Samples, problem: Any) -> Found:
    names, values = parameters(samples)
    for name, mean, sd in zip(names, values.mean((0, 1)), values.std((0, 1)), strict=True):
        yield name, "mean", mean
        yield name, "sd", sd


def _mixing(samples: fedmcmc.Samples, problem: Any) -> Found:
    names, values = parameters(samples)
    if values.shape[1] < 4 or not np.isfinite(values).all():
        return
    parts = [
        mixing(values[..., i : i + MIXING_AT_ONCE]) for i in range(0, len(names), MIXING_AT_ONCE)
    ]
    rhat, ess = (np.concatenate([getattr(p, name) for p in parts]) for name in ("rhat", "ess_bulk"))
    for name, r, e in zip(names, rhat, ess, strict=True):
        yield name, "rhat", r
        yield name, "ess", e
    if np.isfinite(rhat).any():
        yield "", "max_rhat", np.nanmax(rhat)
        yield "", "min_ess", np.nanmin(ess)


def _communication(samples: fedmcmc.Samples, problem: Any) -> Found:
    for name in ("bits_up", "bits_down", "rounds"):
        yield "", name, float(np.mean(samples.totals[name]))


def _messages(samples: fedmcmc.Samples, problem: Any) -> Found:
    messages = np.asarray(samples.totals["rounds"]) * problem.data.num_clients
    yield "", "bits_per_message", float(np.mean(np.asarray(samples.totals["bits_up"]) / messages))


def _predictions(samples: fedmcmc.Samples, problem: Any) -> Found:
    posterior, test = problem.posterior, problem.test
    if test is None or not problems.has_rows(posterior):
        return
    draws = samples.draws if samples.final_draws is None else samples.final_draws
    positions, outcome = _positions(draws), _outcome(test)
    if outcome is None:
        terms = jax.tree_util.Partial(posterior.loglikelihood_fn)
        yield "", "nll", -confidence.log_predictive(terms, (), positions, test, None).mean()
        return
    probabilities = confidence.predict(problem, positions, test, outcome)
    labels = confidence.labels_of(problem, outcome)
    scores = confidence.scores(probabilities, labels)
    yield "", "nll", scores["negative_log_likelihood"]
    yield "", "accuracy", scores["accuracy"]
    yield "", "ece", scores["calibration_error"]
    yield "", "brier", scores["brier"]


def _outcome(test: Any) -> str | None:
    """Return the name of the column of classes, if rows have one."""
    name = next((n for n in OUTCOMES if isinstance(test, dict) and n in test), None)
    is_class = name is not None and np.issubdtype(np.asarray(test[name]).dtype, np.integer)
    return name if is_class else None


def _positions(draws: Any) -> Any:
    """Return up to 1,000 evenly spaced draws of all chains, leaves ``[num_positions, ...]``."""
    flat = jax.tree.map(lambda leaf: np.asarray(leaf).reshape(-1, *np.shape(leaf)[2:]), draws)
    num = len(jax.tree.leaves(flat)[0])
    chosen = np.unique(np.linspace(0, num - 1, min(num, MOST_PREDICTIVE_DRAWS)).astype(int))
    return jax.tree.map(lambda leaf: jnp.asarray(leaf[chosen]), flat)


def probabilities(samples: fedmcmc.Samples, problem: Any) -> np.ndarray:
    """Return the average predictions of classes for held-out rows."""
    outcome = _outcome(problem.test) or OUTCOMES[0]
    return confidence.predict(problem, _positions(samples.draws), problem.test, outcome)


def _about_mode(samples: fedmcmc.Samples, problem: Any) -> Found:
    """Compare with the posterior's mode, which of a Gaussian posterior is the exact mean."""
    if problem.posterior.local is not None:
        return
    mode = flat(problem.supplies.centre, 0)
    draws = flat(samples.draws, 1)
    draws = draws.reshape(len(draws), -1, len(mode))
    yield "", "variance", mean_with_error(list(((draws - mode) ** 2).mean((1, 2))))
    yield "", "mse_of_average", mean_with_error(list(((draws.mean(1) - mode) ** 2).sum(-1)))


def flat(tree: Any, num_axes: int) -> np.ndarray:
    """Return the leaves of a tree side by side, flat after the first `num_axes` axes."""
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]
    return np.concatenate([a.reshape(*a.shape[:num_axes], -1) for a in leaves], axis=-1)


def _confidence(samples: fedmcmc.Samples, problem: Any) -> Found:
    """Return scores of predictions and of the mean network, their curves, and bits per message."""
    outcome = _outcome(problem.test)
    if outcome is None:
        return
    labels = confidence.labels_of(problem, outcome)
    positions = _positions(samples.draws)
    predicted = confidence.predict(problem, positions, problem.test, outcome)
    other = problem.other
    if other is not None:
        other = confidence.predict(problem, positions, other, outcome)
    scores = confidence.scores(predicted, labels)
    for name in ("calibration_error", "negative_log_likelihood"):
        yield "", name, scores[name]
    mean = jax.tree.map(lambda leaf: jnp.mean(leaf, axis=(0, 1))[None], samples.draws)
    of_mean = metrics.accuracy(confidence.predict(problem, mean, problem.test, outcome), labels)
    yield "", "accuracy_of_mean_network", confidence.share(of_mean, len(labels))
    yield "", "draws", np.prod(np.shape(jax.tree.leaves(samples.draws)[0])[:2])
    bits, messages = (
        np.asarray(samples.info[name], np.float64).sum() for name in ("bits_up", "num_active")
    )
    size = sum(leaf[0].size for leaf in jax.tree.leaves(mean))
    yield "", "relative_bits", bits / messages / (32 * size)
    yield from confidence.curves(predicted, labels, other)


NAMES: dict[str, Callable[[fedmcmc.Samples, Any], Iterable[tuple[Any, str, Any]]]] = {
    **dict.fromkeys(("mean", "sd"), _moments),
    **dict.fromkeys(("rhat", "ess", "max_rhat", "min_ess"), _mixing),
    **dict.fromkeys(("bits_up", "bits_down", "rounds"), _communication),
    "bits_per_message": _messages,
    **dict.fromkeys(("variance", "mse_of_average"), _about_mode),
    **dict.fromkeys(("nll", "accuracy", "ece", "brier"), _predictions),
    **dict.fromkeys(("calibration_error", "negative_log_likelihood", "auc"), _confidence),
    **dict.fromkeys(("accuracy_of_mean_network", "draws", "relative_bits"), _confidence),
    **dict.fromkeys(("accuracy_by_confidence", "images_by_confidence"), _confidence),
    **dict.fromkeys(("calibration_gap", "images_in_bin"), _confidence),
    **dict.fromkeys(("entropy_quantile", "entropy_density"), _confidence),
}
"""Functions that measure, by the names of their metrics."""
OF_STUDIES = (_about_mode, _messages, _confidence)
DEFAULT = tuple(name for name, measure in NAMES.items() if measure not in OF_STUDIES)
"""Metrics of a run that names none: the mode is expensive, and curves are long."""
OF_REFERENCES = ("hpd_error", "variance_error")
"""Metrics against the config's `references`: `experiments.comparisons`."""


def write(out: Path, samples: fedmcmc.Samples, rows: Sequence[Row]) -> None:
    """Write rows, draws, a figure of traces and a report into the folder `out`."""
    write_rows(out / ROWS, rows)
    output.save_draws(samples, out / "draws.nc")
    names, values = parameters(samples)
    with plots.figure(out / "trace.png", rows=min(3, len(names)), size=(6, 1.8)) as (_, axes):
        for axis, name, column in zip(axes[:, 0], names, np.moveaxis(values, -1, 0), strict=False):
            axis.plot(column.T, linewidth=0.7)
            axis.set_ylabel(name)
        axes[-1, 0].set_xlabel("draw")
    samples.report(out / "report.html")


def table(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the metrics of whole runs by method and setting, summarized over seeds."""
    whole = [row for row in rows if row.x is None and "parameter" not in row.settings]
    names = list(dict.fromkeys(row.metric for row in whole))
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in whole:
        groups.setdefault((row.method, setting_text(row.settings)), []).append(row)
    lines = []
    for (method, setting), matching in groups.items():
        line: dict[str, Any] = {"method": method, "setting": setting}
        line["seeds"] = len({row.seed for row in matching})
        for name in names:
            values = [row.value for row in matching if row.metric == name]
            line[name] = float(OVER_SEEDS.get(name, np.mean)(values)) if values else None
            if line["seeds"] > 1 and name in ("nll", "accuracy"):
                line[f"sd of {name}"] = float(np.std(values, ddof=1)) if len(values) > 1 else None
        lines.append(line)
    return lines
