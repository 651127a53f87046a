"""Measures of a run as tidy rows, and the files that a run leaves.

Rows are tidy (`experiments.tidy`), with the setting ``parameter`` for numbers of one parameter.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp

import fedmcmc
from experiments import confidence, plots, problems
from experiments.claims import mean as mean_with_error
from experiments.confidence import Numbers
from experiments.reference import flat
from experiments.tidy import Row, from_numbers, setting_text, write_rows
from experiments.wiring import ConfigError
from fedmcmc.diagnostics import mixing
from fedmcmc.pytrees import named_leaves

ROWS = "rows.csv"
MAX_PARAMETERS = 200
MAX_PREDICTIVE_DRAWS = 1_000
OVER_SEEDS: dict[str, Callable[..., float]] = {"max_rhat": np.max, "min_ess": np.min}
"""How seeds are summarized in a table; others by their mean."""


def check_names(names: Any) -> None:
    """Raise `ConfigError` unless all names are metrics."""
    choices = (*NAMES, *OF_REFERENCES)
    unknown = ", ".join(name for name in names or () if name not in choices)
    if unknown:
        raise ConfigError(f"metrics has {unknown}; the metrics are {', '.join(choices)}.")


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
    chosen = [name for name in names or DEFAULT if name not in OF_REFERENCES]
    return [
        row
        for measure in dict.fromkeys(NAMES[name] for name in chosen)
        for place, metric, value in measure(samples, problem)
        if metric in chosen
        for row in from_numbers(method, {**settings, **place}, {metric: value}, seed)
    ]


def parameters(samples: fedmcmc.Samples) -> tuple[list[str], np.ndarray]:
    """Return names and draws ``[num_chains, num_draws, n]`` of up to 200 evenly spaced numbers."""
    names = []
    for leaf_name, leaf in named_leaves(samples.constrained).items():
        site = "_".join(leaf_name.split())
        places = [",".join(map(str, place)) for place in np.ndindex(*np.shape(leaf)[2:])]
        names += [f"{site}[{place}]" if place else site for place in places]
    values = flat(samples.constrained, 2)
    chosen = np.unique(np.linspace(0, len(names) - 1, min(len(names), MAX_PARAMETERS)).astype(int))
    return [names[i] for i in chosen], values[..., chosen]


def _moments(samples: fedmcmc.Samples, problem: Any) -> Numbers:
    names, values = parameters(samples)
    for name, mean, sd in zip(names, values.mean((0, 1)), values.std((0, 1)), strict=True):
        yield {"parameter": name}, "mean", mean
        yield {"parameter": name}, "sd", sd


def _mixing(samples: fedmcmc.Samples, problem: Any) -> Numbers:
    names, values = parameters(samples)
    if values.shape[1] < 4 or not np.isfinite(values).all():
        return
    columns = [mixing(values[..., i : i + 1]) for i in range(len(names))]  # all, not only some
    rhat, ess = np.array([(column.rhat[0], column.ess_bulk[0]) for column in columns]).T
    for name, r, e in zip(names, rhat, ess, strict=True):
        yield {"parameter": name}, "rhat", r
        yield {"parameter": name}, "ess", e
    if np.isfinite(rhat).any():
        yield {}, "max_rhat", np.nanmax(rhat)
        yield {}, "min_ess", np.nanmin(ess)


def _communication(samples: fedmcmc.Samples, problem: Any) -> Numbers:
    for name in ("bits_up", "bits_down", "rounds"):
        yield {}, name, float(np.mean(samples.totals[name]))
    messages = np.asarray(samples.totals["rounds"]) * problem.data.num_clients
    yield {}, "bits_per_message", float(np.mean(np.asarray(samples.totals["bits_up"]) / messages))


def _scores(samples: fedmcmc.Samples, problem: Any) -> Numbers:
    posterior, test = problem.posterior, problem.test
    if test is None or not problems.has_rows(posterior):
        return
    if confidence.outcome_of(test) is None:
        draws = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), _spaced(samples))
        each = jax.lax.map(lambda position: posterior.loglikelihood_fn(position, test), draws)
        yield {}, "nll", np.log(len(each)) - logsumexp(each, axis=0).mean()
        return
    scores = confidence.scores(problem, predictions(samples, problem))
    scores |= {"nll": scores["negative_log_likelihood"], "ece": scores["calibration_error"]}
    yield from (({}, name, value) for name, value in scores.items())


def _spaced(samples: fedmcmc.Samples) -> Any:
    """Return up to 1,000 draws, evenly spaced in each chain, ``[num_chains, num, ...]``."""
    draws = samples.draws if samples.final_draws is None else samples.final_draws
    num_chains, num = np.shape(jax.tree.leaves(draws)[0])[:2]
    size = min(num, max(1, MAX_PREDICTIVE_DRAWS // num_chains))
    chosen = np.unique(np.linspace(0, num - 1, size).astype(int))
    return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)[:, chosen]), draws)


def predictions(samples: fedmcmc.Samples, problem: Any) -> np.ndarray:
    """Return average probabilities of classes for held-out rows, ``[num_rows, num_classes]``."""
    return confidence.predict(problem, _spaced(samples), problem.test).mean(axis=0)


def _about_mode(samples: fedmcmc.Samples, problem: Any) -> Numbers:
    """Compare with the posterior's mode, which of a Gaussian posterior is the exact mean."""
    if problem.posterior.local is not None:
        return
    mode = flat(problem.centre, 0)
    leaves = (jax.tree.leaves(tree)[0] for tree in (samples.draws, problem.centre))
    num_axes = np.subtract(*map(np.ndim, leaves))  # chains, draws, and any axes of `collect`
    draws = flat(samples.draws, num_axes)
    draws = draws.reshape(len(draws), -1, len(mode))
    yield {}, "variance", mean_with_error(list(((draws - mode) ** 2).mean((1, 2))))
    yield {}, "mse_of_average", mean_with_error(list(((draws.mean(1) - mode) ** 2).sum(-1)))


def _networks(samples: fedmcmc.Samples, problem: Any) -> Numbers:
    """Return curves of predictions, the mean network's accuracy, and bits per number sent."""
    if confidence.outcome_of(problem.test) is None:
        return
    mean = jax.tree.map(lambda leaf: jnp.mean(leaf, (0, 1), keepdims=True), samples.draws)
    of_mean = confidence.predict(problem, mean, problem.test)[0]
    yield {}, "accuracy_of_mean_network", confidence.scores(problem, of_mean)["accuracy"]
    yield {}, "draws", np.prod(np.shape(jax.tree.leaves(samples.draws)[0])[:2])
    bits, messages = (
        np.asarray(samples.info[name], np.float64).sum() for name in ("bits_up", "num_active")
    )
    yield {}, "relative_bits", bits / messages / (32 * flat(mean, 2).size)
    yield from confidence.curves(problem, _spaced(samples), predictions(samples, problem))


MEASURES: dict[Callable[[fedmcmc.Samples, Any], Numbers], str] = {
    _moments: "mean sd",
    _mixing: "rhat ess max_rhat min_ess",
    _communication: "bits_up bits_down rounds bits_per_message",
    _scores: "accuracy brier calibration_error ece negative_log_likelihood nll",
    _about_mode: "variance mse_of_average",
    _networks: "accuracy_of_mean_network draws relative_bits auc accuracy_by_confidence "
    "images_by_confidence calibration_gap images_in_bin entropy_quantile entropy_density",
}
NAMES = {name: measure for measure, names in MEASURES.items() for name in names.split()}
DEFAULT = (
    *("mean", "sd", "rhat", "ess", "max_rhat", "min_ess", "bits_up", "bits_down", "rounds"),
    *("nll", "accuracy", "ece", "brier"),
)
"""Metrics of a run that names none: the mode is expensive, and curves are long."""
OF_REFERENCES = ("hpd_error", "variance_error")
"""Metrics against the config's `references`: `experiments.comparisons`."""


def write(out: Path, samples: fedmcmc.Samples, rows: Sequence[Row]) -> None:
    """Write rows, draws, a figure of traces and a report into the folder `out`."""
    write_rows(out / ROWS, rows)
    samples.to_datatree().to_netcdf(out / "draws.nc", engine="h5netcdf")
    names, values = parameters(samples)
    with plots.figure(out / "trace.png", rows=min(3, len(names)), size=(6, 1.8)) as (_, axes):
        for axis, name, column in zip(axes[:, 0], names, np.moveaxis(values, -1, 0), strict=False):
            axis.plot(column.T, linewidth=0.7)
            axis.set_ylabel(name)
        axes[-1, 0].set_xlabel("draw")
    samples.report(out / "report.html")


def table(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the metrics of whole runs by method and setting, summarized over seeds."""
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        if row.x is None and "parameter" not in row.settings:
            groups[row.method, setting_text(row.settings)].append(row)
    names = dict.fromkeys(row.metric for group in groups.values() for row in group)
    lines = []
    for (method, setting), group in groups.items():
        seeds = {row.seed for row in group}
        line: dict[str, Any] = {"method": method, "setting": setting, "seeds": len(seeds)}
        for name in names:
            values = [row.value for row in group if row.metric == name]
            line[name] = float(OVER_SEEDS.get(name, np.mean)(values)) if values else None
        lines.append(line)
    return lines
