"""Tidy rows of the FSGLD studies, from the metrics of a run."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.fsgld import metric_scores, spreads
from experiments.fsgld.metric_scores import PAIRS
from experiments.tidy import Row
from experiments.tidy import from_numbers as _rows
from experiments.verdicts import TIMES, Number, mean

__all__ = ["rows_of"]

Metrics = Mapping[str, Any]
CLIMB = 0.9
"""Share of the way from the start of a curve to its level."""


def rows_of(study: str, config: Metrics, metrics: Metrics) -> list[Row]:
    """Return the rows of a study, summaries before repetitions before curves.

    Parameters
    ----------
    study
        Name of the study's module, such as ``"fsgld/metric"``.
    config, metrics
        Settings and metrics of its run.
    """
    rows = ROWS[study](config, metrics)
    return sorted(rows, key=lambda row: (row.x is not None, row.seed is not None))


def _summary(method: str, settings: Mapping[str, Any], metric: str, values: Any) -> list[Row]:
    """Return mean and standard deviation over the repetitions that are finite."""
    finite = np.array(values, float)
    finite = finite[np.isfinite(finite)]
    if not finite.size:
        return []
    numbers = {f"mean_{metric}": mean(list(finite))}
    if finite.size > 1:
        numbers[f"{metric}_sd"] = Number(float(finite.std(ddof=1)))
    return _rows(method, settings, numbers)


def _by_seed(method: str, settings: Mapping[str, Any], metric: str, values: Any) -> list[Row]:
    return [
        row
        for seed, value in enumerate(values)
        for row in _rows(method, settings, {metric: value}, seed=seed)
    ]


def _sd_ratio(metric: str, method: str, settings: Metrics, one: Any, other: Any) -> list[Row]:
    """Return the ratio of two standard deviations over repetitions with its 95 % interval."""
    ratio = spreads.compare(one, other)
    if not math.isfinite(ratio.high):
        return []
    numbers = {
        metric: ratio.ratio,
        f"{metric}_low": ratio.low,
        f"{metric}_high": ratio.high,
        f"{metric}_p_value": ratio.p_value,
    }
    return _rows(method, settings, numbers)


METRIC = {
    **{key: f"{pairs}_log_likelihood" for key, pairs in PAIRS.items()},
    **{f"{key}_predictive": f"{pairs}_predictive_log_likelihood" for key, pairs in PAIRS.items()},
    **{f"{key}_accuracy": f"{pairs}_accuracy" for key, pairs in PAIRS.items()},
    "mean_off_sds": "worst_error_of_mean",
    "sd_ratio_min": "smallest_sd_ratio",
    "sd_ratio_max": "largest_sd_ratio",
}
"""Metrics of the rows, by the names of the run's values."""


def _metric(config: Metrics, metrics: Metrics) -> list[Row]:
    rows = []
    methods = {
        name: {key: np.array(values, float) for key, values in scores.items()}
        for name, scores in metrics["methods"].items()
    }
    finite = {m: np.isfinite([of["learn"], of["test"]]).all(axis=0) for m, of in methods.items()}
    for method, scores in methods.items():
        for key, values in scores.items():
            # A chain that was lost has finite accuracies, which mean nothing.
            each = np.where(finite[method], values, np.nan)
            rows += _by_seed(method, {}, METRIC[key], each)
            rows += _summary(method, {}, METRIC[key], each)
        rows += _rows(method, {}, {"diverged": (~finite[method]).sum()})
    both = finite["DSGLD"] & finite["FSGLD"]
    if both.sum() > 1:
        for key, values in methods["FSGLD"].items():
            gains = (values - methods["DSGLD"][key])[both]
            rows += _summary("FSGLD minus DSGLD", {}, METRIC[key], gains)
        if "NUTS" in methods:
            rows += _metric_spreads(metrics, methods)
    for key, bar in metric_scores.bars(metrics).items():
        pairs = PAIRS[key]
        rows += _rows("FSGLD", {}, {f"{pairs}_mean_bar": bar.FSGLD})
        rows += _rows("DSGLD", {}, {f"{pairs}_mean_bar": bar.DSGLD})
        numbers = {
            f"{pairs}_bar_ratio": bar.FSGLD / bar.DSGLD,
            f"{pairs}_smaller_bars_share": bar.smaller,
        }
        rows += _rows("FSGLD / DSGLD", {}, numbers)
    if config["keep_every"] == 1 and not config["num_burnin"]:
        rows += _climbing(metrics)
    numbers = {"samples_per_draw": metrics["samples_a_draw"]}
    if "samples_a_chain" in metrics:
        numbers["samples_per_chain"] = metrics["samples_a_chain"]
    for method in ("DSGLD", "FSGLD"):
        rows += _rows(method, {}, numbers)
    return rows + _metric_curves(metrics)


def _metric_spreads(metrics: Metrics, methods: Mapping[str, Metrics]) -> list[Row]:
    """Return how spreads over repetitions compare, with the pairs' part and without it."""
    rows = []
    for key, gaps in metric_scores.from_pooled(metrics).items():
        pairs = PAIRS[key]
        for method, gap in gaps.items():
            rows += _summary(method, {}, f"{pairs}_gap_to_nuts", gap)
        against = "FSGLD / DSGLD"
        rows += _sd_ratio(f"{pairs}_gap_sd_ratio", against, {}, gaps["FSGLD"], gaps["DSGLD"])
        for method in ("DSGLD", "NUTS"):
            scores = (methods["FSGLD"][key], methods[method][key])
            rows += _sd_ratio(f"{pairs}_sd_ratio", f"FSGLD / {method}", {}, *scores)
    return rows


def _climbing(metrics: Metrics) -> list[Row]:
    """Return after how many samples each method reaches a level, and who leads until then.

    A level is the mean of the second half of a curve.
    """
    rows = []
    for key, pairs in PAIRS.items():
        curve = metrics["curves"][key]
        samples = (np.array(curve["at"]) + 1) * metrics["samples_a_draw"]
        means = {method: np.array(curve[method]["mean"]) for method in ("DSGLD", "FSGLD")}
        levels = {method: values[len(values) // 2 :].mean() for method, values in means.items()}
        latest = 0.0
        for method, values in means.items():
            reached = _first(values > levels["DSGLD"], samples)
            goal = np.log(0.5) + CLIMB * (levels[method] - np.log(0.5))
            numbers = {
                f"{pairs}_samples_to_level_of_dsgld": reached,
                f"{pairs}_samples_to_own_level": _first(values > goal, samples),
                f"{pairs}_level": levels[method],
            }
            rows += _rows(method, {}, numbers)
            latest = max(latest, reached)
        climbing = samples <= latest
        gain, error = (np.array(curve["difference"][k])[climbing] for k in ("mean", "spread"))
        numbers = {
            f"{pairs}_points_ahead_while_climbing": (gain > TIMES * error).sum(),
            f"{pairs}_points_behind_while_climbing": (gain < -TIMES * error).sum(),
            f"{pairs}_points_while_climbing": len(gain),
            f"{pairs}_mean_lead_while_climbing": gain.mean(),
        }
        rows += _rows("FSGLD minus DSGLD", {}, numbers)
    return rows


def _first(holds: np.ndarray, samples: np.ndarray) -> float:
    return float(samples[holds.argmax()]) if holds.any() else math.inf


def _metric_curves(metrics: Metrics) -> list[Row]:
    rows = []
    labels = {"DSGLD": "DSGLD", "FSGLD": "FSGLD", "difference": "FSGLD minus DSGLD"}
    for key, curves in metrics["curves"].items():
        samples = (np.array(curves["at"]) + 1) * metrics["samples_a_draw"]
        name = f"{METRIC[key]}_by_sample"
        for curve, method in labels.items():
            if curves.get(curve) is None:
                continue
            spread = f"{name} s.e." if curve == "difference" else f"{name}_sd"
            lines = (samples, curves[curve]["mean"], curves[curve]["spread"])
            for x, center, deviation in zip(*lines, strict=True):
                rows += _rows(method, {}, {name: center, spread: deviation}, x=float(x))
        if "NUTS" in curves:
            rows += _rows("NUTS", {}, {f"{name}_level": curves["NUTS"]})
    return rows


MLP = {
    **{rows: f"{rows}_log_likelihood" for rows in ("train", "test", "visited")},
    "accuracy": "accuracy",
    "constant": "share_ignoring_input",
}
"""Metrics of the rows, by the names of the run's values."""


def _mlp(config: Metrics, metrics: Metrics) -> list[Row]:
    del config
    rows = []
    for line in metrics["table"]:
        split, method = line["split"], line["method"]
        scores = metrics["values"][f"{split} {method}"]
        settings = {"split": split}
        finite = np.isfinite(np.array(scores["test"], float))
        each = {
            MLP[key]: np.where(finite, np.array(values, float), np.nan)
            for key, values in scores.items()
        }
        for metric, values in each.items():
            rows += _by_seed(method, settings, metric, values)
            rows += _summary(method, settings, metric, values)
            if metric in ("test_log_likelihood", "visited_log_likelihood") and finite.any():
                median = np.median(values[np.isfinite(values)])
                rows += _rows(method, settings, {f"median_{metric}": median})
        if "visited" in scores:
            gap = each["visited_log_likelihood"] - each["test_log_likelihood"]
            rows += _summary(method, settings, "visited_minus_test_log_likelihood", gap)
        rows += _rows(method, settings, {"diverged": line["diverged"]})
    for split in metrics["curves"]:
        settings = {"split": split}
        test = [
            np.array(metrics["values"][f"{split} {method}"]["test"], float)
            for method in ("FSGLD", "DSGLD")
        ]
        rows += _summary("FSGLD minus DSGLD", settings, "test_log_likelihood", test[0] - test[1])
        rows += _sd_ratio("test_sd_ratio", "FSGLD / DSGLD", settings, *test)
    numbers = {
        "num_rows": metrics["num_rows"],
        "step_size_times_rows": metrics["step_size_times_rows"],
        "steps_per_draw": metrics["steps_a_draw"],
    }
    return rows + _rows("data", {}, numbers) + _mlp_curves(metrics)


def _mlp_curves(metrics: Metrics) -> list[Row]:
    rows = []
    for split, methods in metrics["curves"].items():
        for method, curves in methods.items():
            for key, curve in curves.items():
                steps = (np.array(curve["at"]) + 1) * metrics["steps_a_draw"]
                quantiles = np.array(curve["quantiles"], float)
                for x, (low, middle, high) in zip(steps, quantiles.T, strict=True):
                    numbers = {
                        f"{key}_log_likelihood_q10_by_step": low,
                        f"{key}_log_likelihood_q50_by_step": middle,
                        f"{key}_log_likelihood_q90_by_step": high,
                    }
                    rows += _rows(method, {"split": split}, numbers, x=float(x))
                if key == "test":
                    rise = {"rise_of_median_in_last_quarter": _rise(quantiles[1])}
                    rows += _rows(method, {"split": split}, rise)
    return rows


def _rise(values: Sequence[float]) -> float:
    """Return the mean of the last quarter of a curve minus the mean of the quarter before."""
    quarter = len(values) // 4
    return float(np.mean(values[-quarter:]) - np.mean(values[-2 * quarter : -quarter]))


ROWS: dict[str, Callable[[Metrics, Metrics], list[Row]]] = {
    "fsgld/metric": _metric,
    "fsgld/mlp": _mlp,
}
