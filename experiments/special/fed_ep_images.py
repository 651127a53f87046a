"""Guo et al. (2023), image classification: accuracy over rounds, calibration at the end."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import Partial

from experiments import models, wiring
from experiments.special import fed_ep_runs
from experiments.special.fed_ep_runs import BASELINES, BURN_IN, Curve
from experiments.tidy import Row, from_numbers
from experiments.verdicts import Number, mean
from fedmcmc import metrics
from fedmcmc.interop.flax import predictive

__all__ = ["rows"]

NUM_DRAWS = 10
ROWS_AT_A_TIME = 1_000
LARGEST_FALL = 2.0
"""Points of accuracy; a seed that ends further below its best has fallen."""
LARGEST_IMPROPER_SHARE = 0.15
"""Share of rounds; beyond it a method's accuracy is that of an earlier round."""


class Run(NamedTuple):
    """Accuracies of a method by seed, and whether its approximation was proper in most rounds."""

    method: str
    settings: Mapping[str, Any]
    accuracy: dict[str, np.ndarray]
    is_proper: bool


def rows(
    data: Mapping[str, Any],
    module: Mapping[str, Any],
    methods: Mapping[str, Any],
    settings: Mapping[str, Any],
    runs: Sequence[Mapping[str, Any]],
    seed: int,
    num_seeds: int,
    num_burnin: int,
    num_rounds: int,
    checkpoints: Sequence[int],
    thresholds: Sequence[float],
    window: int,
    best_window: int,
    num_bins: int,
) -> list[Row]:
    """Return accuracies of all runs, their differences, and calibration of points and draws.

    Parameters
    ----------
    data
        Config of a loader of images with held-out rows.
    module
        Config of a function that returns a flax module, given ``num_outputs``.
    methods, settings, runs, num_seeds, num_burnin, num_rounds
        As in `experiments.special.fed_ep_runs`; the setting `weight_decay` is a precision per row.
    checkpoints
        Numbers of rounds within which the best running mean of `best_window` rounds is reported.
    thresholds
        Accuracies in percent, for the rounds until a running mean of `window` rounds reaches them.
    window
        Number of first rounds after the burn-in, and of last rounds, that are averaged.
    num_bins
        Number of bins of the expected calibration error.
    """
    if not best_window <= min(checkpoints) <= max(checkpoints) <= num_rounds or window > num_burnin:
        raise ValueError(
            "checkpoints must lie between best_window and num_rounds, and window below num_burnin."
        )
    loaded, test = wiring.build(data, "data", None)
    build_network = wiring.build(module, "module", None)
    network = build_network(num_outputs=models.num_classes(loaded))
    precision = settings["weight_decay"] * loaded.num_rows
    posterior = models.network(loaded, build_network, precision**-0.5 if precision else 1.0)
    if not precision:
        posterior = fed_ep_runs.without_prior(posterior)
    key = jax.random.key(seed + 1)
    position = posterior.init_fn(key)
    numbers: dict[str, Any] = {"num_parameters": sum(x.size for x in jax.tree.leaves(position))}
    if getattr(network, "widths", None) == ():
        numbers["information_ratio"] = _information_ratio(loaded.rows["features"])
    collected, measured = from_numbers("", {}, numbers), []
    counts = dict(num_burnin=num_burnin, num_rounds=num_rounds)
    for curve in fed_ep_runs.execute(
        methods,
        settings,
        runs,
        wiring.Supplies(loaded, posterior),
        Partial(_scores, predictive(network, inputs="features"), test),
        seed=seed,
        num_seeds=num_seeds,
        **counts,
    ):
        run, curve_rows = _summary(curve, checkpoints, thresholds, window, best_window, **counts)
        predict_fn = predictive(network, likelihood="categorical", inputs="features")
        numbers = _calibration(key, curve, predict_fn, test, num_bins)
        collected += curve_rows + from_numbers(curve.method, curve.settings, numbers)
        measured.append(run)
    return collected + _comparisons(measured, collected, thresholds)


def _information_ratio(features: Any) -> float:
    """Return the 90 % quantile over the 10 % quantile of the weights' Fisher informations.

    These are the informations of a linear model at zero weights, up to a factor that all share.
    """
    squares = np.asarray(features, np.float64) ** 2
    low, high = np.quantile(squares.mean(axis=0).ravel(), [0.1, 0.9])
    return float(high / low)


def _scores(logits_fn: Any, test: Any, position: Any, round_: Array) -> dict[str, Array]:
    """Return accuracy and loss, the loss from logits because small probabilities round to zero."""
    del round_
    log_probabilities = jax.nn.log_softmax(_in_blocks(logits_fn, position, test))
    terms = jnp.take_along_axis(log_probabilities, jnp.asarray(test["label"])[:, None], axis=1)
    accuracy = metrics.accuracy(jnp.exp(log_probabilities), test["label"])
    return {"accuracy": accuracy, "loss": -jnp.mean(terms)}


def _in_blocks(predict_fn: Any, position: Any, test: Any) -> Array:
    """Return predictions for all rows, ``[num_test, num_classes]``, some rows at a time."""

    def predict_row(features: Array) -> Array:
        return predict_fn(position, {"features": features[None]})[0]

    return jax.lax.map(predict_row, jnp.asarray(test["features"]), batch_size=ROWS_AT_A_TIME)


def _summary(
    curve: Curve,
    checkpoints: Sequence[int],
    thresholds: Sequence[float],
    window: int,
    best_window: int,
    num_burnin: int,
    num_rounds: int,
) -> tuple[Run, list[Row]]:
    """Return a method's accuracies by seed, and its rows."""
    accuracy = 100 * np.asarray(curve.scores["accuracy"], np.float64)
    loss = np.asarray(curve.scores["loss"], np.float64)
    proper, fitted = (curve.scores[name][:, num_burnin:] for name in ("proper", "fitted"))
    by_seed = {
        "early": accuracy[:, num_burnin : num_burnin + window].mean(axis=1),
        "best": np.asarray(metrics.best_running_mean(accuracy, best_window)),
        "end": accuracy[:, -window:].mean(axis=1),
    }
    if accuracy.shape[1] < num_rounds:
        by_seed |= dict.fromkeys(("best", "end"), np.full(len(accuracy), np.nan))
    numbers = {
        "end_accuracy_mean": mean(by_seed["end"]),
        "end_loss": loss[:, -window:].mean(),
        "num_seeds_fallen": (~(by_seed["best"] - by_seed["end"] <= LARGEST_FALL)).sum(),
        "improper_rounds": (~proper).sum(),
        "lost_fits": 1 - fitted.mean(),
        **({} if curve.diverged is None else {"diverged_in_round": curve.diverged}),
    }
    method, settings = curve.method, curve.settings
    collected = from_numbers(method, settings, numbers)
    for limit in checkpoints:
        best = metrics.best_running_mean(accuracy[:, :limit], best_window)
        numbers = {"best_accuracy_mean": mean(best if limit <= accuracy.shape[1] else [])}
        collected += from_numbers(method, {**settings, "rounds": limit}, numbers)
    for level in thresholds:
        reached = np.asarray(metrics.rounds_to_threshold(accuracy, level, window))
        is_reached = np.isfinite(reached)
        numbers = {
            "num_seeds_reaching": is_reached.sum(),
            "rounds_to_accuracy": reached.mean() if is_reached.all() else np.nan,
            "rounds_to_accuracy_at_least": np.minimum(reached, num_rounds + 1).mean(),
        }
        collected += from_numbers(method, {**settings, "level": level}, numbers)
    for part, values in by_seed.items():
        for i, value in enumerate(values):
            collected += from_numbers(method, settings, {f"{part}_accuracy": value}, seed=i)
    for name, values in (("accuracy", accuracy), ("loss", loss)):
        curves = {f"{name}_by_round": (1, values.mean(axis=0))}
        if len(values) > 1:
            views = np.lib.stride_tricks.sliding_window_view(values, window, axis=1)
            spread = views.mean(axis=-1).std(axis=0, ddof=1)
            curves[f"{name}_by_round_sd"] = (window, spread)
        for metric, (start, points) in curves.items():
            for i, point in enumerate(points):
                collected += from_numbers(method, settings, {metric: point}, x=float(start + i))
    is_proper = bool((~proper).mean() <= LARGEST_IMPROPER_SHARE)
    return Run(method, settings, by_seed, is_proper), collected


def _calibration(
    rng_key: Array, curve: Curve, predict_fn: Any, test: Any, num_bins: int
) -> dict[str, Any]:
    """Return accuracy and calibration of the last point and of draws from the approximation."""
    names = ("accuracy_point", "ece_point", "accuracy_marginal", "ece_marginal")
    numbers: dict[str, Any] = dict.fromkeys(names)
    if curve.state is None:
        return numbers
    draws = {"point": jax.tree.map(lambda leaf: leaf[:, None], curve.state.broadcast.position)}
    if curve.method not in BASELINES:
        draws["marginal"] = fed_ep_runs.draws_of(rng_key, curve, NUM_DRAWS)
    error = 50 / len(test["label"]) ** 0.5  # at most
    for kind, positions in draws.items():
        probabilities = _averages(predict_fn, positions, test)
        labels = np.broadcast_to(test["label"], probabilities.shape[:2])
        ece = metrics.expected_calibration_error(probabilities, labels, num_bins)
        numbers[f"accuracy_{kind}"] = 100 * metrics.accuracy(probabilities, test["label"]).mean()
        numbers[f"ece_{kind}"] = Number(float(100 * ece.mean()), error)
    if "marginal" in draws:
        gain = numbers["ece_point"].value - numbers["ece_marginal"].value
        numbers["ece_gain_of_averaging"] = Number(gain, 2**0.5 * error)
    return numbers


def _averages(predict_fn: Any, positions: Any, test: Any) -> np.ndarray:
    """Return average predictions over draws, ``[num_seeds, num_test, num_classes]``."""
    fn = Partial(_in_blocks, predict_fn)
    num_seeds = len(jax.tree.leaves(positions)[0])
    seeds = [jax.tree.map(lambda leaf, s=s: leaf[s], positions) for s in range(num_seeds)]
    return np.stack([np.asarray(metrics.predictive(fn, draws, test)) for draws in seeds])


def _comparisons(
    measured: Sequence[Run], curve_rows: Sequence[Row], thresholds: Sequence[float]
) -> list[Row]:
    """Return differences between methods, and between values of a setting."""
    plain = {run.method: run for run in measured if not run.settings}
    triples = [(run, plain[BURN_IN], "over_fed_avg") for run in measured if BURN_IN in plain]
    for letter in "IMLV":
        run = plain.get(f"FedEP ({letter})")
        references = {"FedEP (I)": "over_identity", f"FedSEP ({letter})": "over_stateless"}
        triples += [(run, plain[o], to) for o, to in references.items() if run and o in plain]
    epochs = {r.settings.get("ngvi_epochs"): r for r in measured if r.method == "FedEP (V)"}
    if {1, 10} <= epochs.keys():
        triples.append((epochs[10]._replace(settings={}), epochs[1], "of_ten_epochs"))
    rows = []
    for run, reference, name in triples:
        if run is not reference:
            gains = {f"{p}_gain_{name}": _gain(run, reference, p) for p in ("early", "best", "end")}
            rows += from_numbers(run.method, run.settings, gains)
    baselines = [plain[name] for name in BASELINES if name in plain]
    if len(baselines) == len(BASELINES):
        for run in measured:
            leads = {
                f"{part}_lead": min((_gain(run, b, part) for b in baselines), key=float)
                for part in ("best", "end")
            }
            if run.method not in BASELINES:
                rows += from_numbers(run.method, run.settings, leads)
        for level in thresholds:
            name, place = "rounds_to_accuracy_at_least", {"level": level}
            same = [row for row in curve_rows if row.metric == name and row.settings == place]
            fewest = min(row.value for row in same if row.method in BASELINES)
            rows += from_numbers("faster baseline", place, {name: fewest})
    return rows + _spreads(measured)


def _gain(run: Run, reference: Run, part: str) -> Number:
    """Return the mean difference of accuracies within seeds."""
    return mean(run.accuracy[part] - reference.accuracy[part])


def _spreads(measured: Sequence[Run]) -> list[Row]:
    """Return accuracies with the best value of a setting less those with the worst."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in measured:
        if run.settings:
            groups.setdefault((run.method, ",".join(run.settings)), []).append(run)
    spreads = []
    for (method, name), group in groups.items():
        by_best = sorted(group, key=lambda run: float(run.accuracy["best"].mean()))
        proper = [run for run in by_best if run.is_proper]
        for metric, chosen in (("spread", by_best), ("spread_of_proper", proper)):
            if len(chosen) > 1:
                gain = _gain(chosen[-1], chosen[0], "best")
                spreads += from_numbers(method, {"varied": name}, {metric: gain})
    return spreads
