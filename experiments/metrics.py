"""Measures of a run as tidy rows, and the files that a run leaves.

Rows are those of `experiments.tidy`, with the setting ``parameter`` for numbers of one parameter.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedmcmc
from experiments import output, plots, problems
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
    "table",
    "tidy",
    "write",
]

ROWS = "rows.csv"
MOST_PARAMETERS = 200
MOST_PREDICTIVE_DRAWS = 200
ROWS_AT_A_TIME = 1_000
OVER_SEEDS: dict[str, Callable[..., float]] = {"max_rhat": np.max, "min_ess": np.min}
"""How seeds are summarized in a table; others by their mean."""
MIXING_AT_ONCE = 8  # the least number of parameters that `mixing` judges
OUTCOMES = ("label", "y")
"""Names of columns that hold the outcome."""


Found = Iterator[tuple[str, str, Any]]  # parameter or nothing, metric, value


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
        for parameter, metric, value in measure(samples, problem):
            if not names or metric in names:
                place = {"parameter": "_".join(parameter.split())} if parameter else {}
                rows += from_numbers(method, {**settings, **place}, {metric: value}, seed)
    return rows


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
    posterior, data, test = problem.posterior, problem.data, problem.test
    if test is None or not problems.has_rows(posterior):
        return
    draws = samples.draws if samples.final_draws is None else samples.final_draws
    flat = jax.tree.map(lambda leaf: np.asarray(leaf).reshape(-1, *np.shape(leaf)[2:]), draws)
    num = len(jax.tree.leaves(flat)[0])
    places_of_draws = np.unique(
        np.linspace(0, num - 1, min(num, MOST_PREDICTIVE_DRAWS)).astype(int)
    )
    positions = jax.tree.map(lambda leaf: jnp.asarray(leaf[places_of_draws]), flat)
    terms = jax.tree_util.Partial(posterior.loglikelihood_fn)
    outcome = next((n for n in OUTCOMES if isinstance(test, dict) and n in test), None)
    if outcome is None or not np.issubdtype(np.asarray(test[outcome]).dtype, np.integer):
        yield "", "nll", -_log_predictive(terms, (), positions, test, None).mean()
        return
    classes = np.unique(np.asarray(data.rows[outcome]))
    probabilities = np.exp(_log_predictive(terms, classes, positions, test, outcome))
    labels = np.searchsorted(classes, test[outcome])
    yield "", "nll", metrics.negative_log_likelihood(probabilities, labels)
    yield "", "accuracy", metrics.accuracy(probabilities, labels)
    yield "", "ece", metrics.expected_calibration_error(probabilities, labels)
    yield "", "brier", metrics.brier_score(probabilities, labels)


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


def _log_predictive(
    terms: Any, classes: Any, positions: Any, rows: Any, outcome: str | None
) -> np.ndarray:
    """Return log predictive probabilities of every class, or of the rows if there are none.

    They are averages over positions, ``[num_rows, num_classes]`` or ``[num_rows]``.
    """
    total = len(jax.tree.leaves(rows)[0])
    cuts = [slice(i, i + ROWS_AT_A_TIME) for i in range(0, total, ROWS_AT_A_TIME)]
    blocks = [jax.tree.map(lambda leaf, cut=cut: jnp.asarray(leaf)[cut], rows) for cut in cuts]
    sums = [_log_sums(terms, classes, positions, block, outcome=outcome) for block in blocks]
    return np.concatenate(sums).astype(np.float64) - np.log(len(jax.tree.leaves(positions)[0]))


@functools.partial(jax.jit, static_argnames="outcome")
def _log_sums(terms: Any, classes: Any, positions: Any, rows: Any, *, outcome: str | None) -> Any:
    def score(position: Any) -> Any:
        if outcome is None:
            return terms(position, rows)
        labels = jnp.broadcast_to(classes[:, None], (len(classes), len(rows[outcome])))
        each = [terms(position, {**rows, outcome: label}) for label in labels]
        return jax.nn.log_softmax(jnp.stack(each, axis=-1), axis=-1)

    def add(total: Any, position: Any) -> tuple[Any, None]:
        return jnp.logaddexp(total, score(position)), None

    shape = jax.eval_shape(score, jax.tree.map(lambda leaf: leaf[0], positions))
    start = jnp.full(shape.shape, -jnp.inf, shape.dtype)
    return jax.lax.scan(add, start, positions)[0]


NAMES: dict[str, Callable[[fedmcmc.Samples, Any], Iterable[tuple[str, str, Any]]]] = {
    **dict.fromkeys(("mean", "sd"), _moments),
    **dict.fromkeys(("rhat", "ess", "max_rhat", "min_ess"), _mixing),
    **dict.fromkeys(("bits_up", "bits_down", "rounds"), _communication),
    "bits_per_message": _messages,
    **dict.fromkeys(("variance", "mse_of_average"), _about_mode),
    **dict.fromkeys(("nll", "accuracy", "ece", "brier"), _predictions),
}
"""Functions that measure, by the names of their metrics."""
DEFAULT = tuple(n for n, measure in NAMES.items() if measure not in (_about_mode, _messages))
"""Metrics of a run that names none: the mode is expensive in many dimensions."""
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
    whole = [row for row in rows if "parameter" not in row.settings]
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
