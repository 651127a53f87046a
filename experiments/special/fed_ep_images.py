"""Guo et al. (2023), image classification: accuracy over rounds, calibration at the end."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import Partial

from experiments import models, wiring
from experiments.claims import Number, mean
from experiments.special import fed_ep_runs
from experiments.special.fed_ep_runs import BASELINES, BURN_IN, Curve
from experiments.tidy import Row, from_numbers
from fedmcmc import metrics
from fedmcmc.interop.flax import predictive
from fedmcmc.pytrees import trees

NUM_DRAWS = 10
ROWS_AT_A_TIME = 1_000
LARGEST_FALL = 2.0
"""Points of accuracy; a seed that ends further below its best has fallen."""
LARGEST_IMPROPER_SHARE = 0.15
"""Share of rounds; beyond it a method's accuracy is that of an earlier round."""


class Run(NamedTuple):
    """Accuracies of a method by seed, and its rounds until each threshold, at least.

    `is_proper` is true if the approximation was proper in most rounds.
    """

    method: str
    settings: Mapping[str, Any]
    accuracy: dict[str, np.ndarray]
    num_rounds: dict[float, float]
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

    `data` is the config of a loader of images with held-out rows. `module` is the config of a
    function that returns a flax module for ``num_outputs``. The other arguments are described in
    `experiments.special.fed_ep_runs`; the setting `weight_decay` is a precision per row.

    Parameters
    ----------
    checkpoints
        Numbers of rounds within which the best running mean of `best_window` rounds is reported.
    thresholds
        Accuracies in percent, for the rounds until a running mean of `window` rounds reaches them.
    window
        Number of first rounds after the burn-in, and of last rounds, that are averaged.
    num_bins
        Number of bins of the expected calibration error.
    """
    loaded, test, *_ = wiring.build(data, "data", None)
    build_network = wiring.build(module, "module", None)
    network = build_network(num_outputs=models.num_classes(loaded))
    precision = settings["weight_decay"] * loaded.num_rows
    posterior = models.network(loaded, build_network, precision**-0.5 if precision else 1.0)
    if not precision:
        posterior = fed_ep_runs.without_prior(posterior)
    supplies, key = wiring.Supplies(loaded, posterior), jax.random.key(seed + 1)
    numbers: dict[str, Any] = {"num_parameters": trees.num_elements(supplies.position)}
    if getattr(network, "widths", None) == ():
        numbers["information_ratio"] = _information_ratio(loaded.rows["features"])
    collected, measured = from_numbers("", {}, numbers), []
    score_fn = Partial(_scores, predictive(network, inputs="features"), test)
    predict_fn = predictive(network, likelihood="categorical", inputs="features")
    counts = dict(num_burnin=num_burnin, num_rounds=num_rounds)
    common = dict(seed=seed, num_seeds=num_seeds, **counts)
    for curve in fed_ep_runs.execute(methods, settings, runs, supplies, score_fn, **common):
        run, curve_rows = _summary(curve, checkpoints, thresholds, window, best_window, **counts)
        numbers = _calibration(key, curve, predict_fn, test, num_bins)
        collected += curve_rows + from_numbers(curve.method, curve.settings, numbers)
        measured.append(run)
    return collected + _comparisons(measured, thresholds) + _spreads(measured)


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
        **fed_ep_runs.num_lost(curve, num_burnin),
    }
    method, settings = curve.method, curve.settings
    collected = from_numbers(method, settings, numbers)
    for limit in checkpoints:
        best = metrics.best_running_mean(accuracy[:, :limit], best_window)
        numbers = {"best_accuracy_mean": mean(best if limit <= accuracy.shape[1] else [])}
        collected += from_numbers(method, {**settings, "rounds": limit}, numbers)
    at_least = {}
    for level in thresholds:
        reached = np.asarray(metrics.rounds_to_threshold(accuracy, level, window))
        is_reached = np.isfinite(reached)
        at_least[level] = float(np.minimum(reached, num_rounds + 1).mean())
        numbers = {
            "num_seeds_reaching": is_reached.sum(),
            "rounds_to_accuracy": reached.mean() if is_reached.all() else np.nan,
            "rounds_to_accuracy_at_least": at_least[level],
        }
        collected += from_numbers(method, {**settings, "level": level}, numbers)
    for part, values in by_seed.items():
        for i, value in enumerate(values):
            collected += from_numbers(method, settings, {f"{part}_accuracy": value}, seed=i)
    for name, values in (("accuracy", accuracy), ("loss", loss)):
        collected += fed_ep_runs.rows_by_round(curve, f"{name}_by_round", values, window)
    proper = curve.scores["proper"][:, num_burnin:]
    is_proper = bool((~proper).mean() <= LARGEST_IMPROPER_SHARE)
    return Run(method, settings, by_seed, at_least, is_proper), collected


def _calibration(
    rng_key: Array, curve: Curve, predict_fn: Any, test: Any, num_bins: int
) -> dict[str, Any]:
    """Return accuracy and calibration of the last point and of draws from the approximation."""
    names = ("accuracy_point", "ece_point", "accuracy_marginal", "ece_marginal")
    numbers: dict[str, Any] = dict.fromkeys(names)
    if curve.state is None:
        return numbers
    draws = {"point": jax.tree.map(lambda leaf: leaf[:, None], curve.state.broadcast.position)}
    num_seeds = jnp.size(curve.state.broadcast.round)
    if curve.method not in BASELINES:

        def draw(seed_key: Array, gaussian: Any) -> Any:
            return jax.vmap(gaussian.draw)(jax.random.split(seed_key, NUM_DRAWS))

        keys = jax.random.split(rng_key, num_seeds)
        draws["marginal"] = jax.vmap(draw)(keys, curve.state.server.approximation.gaussian)
    error = 50 / len(test["label"]) ** 0.5  # at most
    fn = Partial(_in_blocks, predict_fn)
    for kind, positions in draws.items():
        seeds = [jax.tree.map(lambda leaf, i=i: leaf[i], positions) for i in range(num_seeds)]
        probabilities = np.stack([metrics.predictive(fn, each, test) for each in seeds])
        labels = np.broadcast_to(test["label"], probabilities.shape[:2])
        ece = metrics.expected_calibration_error(probabilities, labels, num_bins)
        numbers[f"accuracy_{kind}"] = 100 * metrics.accuracy(probabilities, test["label"]).mean()
        numbers[f"ece_{kind}"] = Number(float(100 * ece.mean()), error)
    if "marginal" in draws:
        gain = numbers["ece_point"].value - numbers["ece_marginal"].value
        numbers["ece_gain_of_averaging"] = Number(gain, 2**0.5 * error)
    return numbers


def _comparisons(measured: Sequence[Run], thresholds: Sequence[float]) -> list[Row]:
    """Return mean differences of accuracies, within seeds, between methods."""
    plain = {run.method: run for run in measured if not run.settings}
    pairs = [(run, plain.get(BURN_IN), "over_fed_avg") for run in measured]
    for method, run in plain.items():
        if method.startswith("FedEP"):
            pairs.append((run, plain.get("FedEP (I)"), "over_identity"))
            pairs.append((run, plain.get(method.replace("FedEP", "FedSEP")), "over_stateless"))
    epochs = {r.settings.get("ngvi_epochs"): r for r in measured if r.method == "FedEP (V)"}
    if {1, 10} <= epochs.keys():
        pairs.append((epochs[10]._replace(settings={}), epochs[1], "of_ten_epochs"))
    table = []
    for run, reference, name in pairs:
        if reference is not None and run is not reference:
            gains = {f"{p}_gain_{name}": _gain(run, reference, p) for p in ("early", "best", "end")}
            table += from_numbers(run.method, run.settings, gains)
    if not {*BASELINES} <= plain.keys():
        return table
    baselines = [plain[name] for name in BASELINES]
    for run in measured:
        if run.method not in BASELINES:
            leads = {
                f"{part}_lead": min((_gain(run, b, part) for b in baselines), key=float)
                for part in ("best", "end")
            }
            table += from_numbers(run.method, run.settings, leads)
    for level in thresholds:
        numbers = {"rounds_to_accuracy_at_least": min(run.num_rounds[level] for run in baselines)}
        table += from_numbers("faster baseline", {"level": level}, numbers)
    return table


def _gain(run: Run, reference: Run, part: str) -> Number:
    return mean(run.accuracy[part] - reference.accuracy[part])


def _spreads(measured: Sequence[Run]) -> list[Row]:
    """Return accuracies with the best value of a setting less those with the worst."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in measured:
        if run.settings:
            groups.setdefault((run.method, ",".join(run.settings)), []).append(run)
    spreads = []
    for (method, name), group in groups.items():
        group.sort(key=lambda run: float(run.accuracy["best"].mean()))
        proper = [run for run in group if run.is_proper]
        for metric, chosen in (("spread", group), ("spread_of_proper", proper)):
            if len(chosen) > 1:
                gain = _gain(chosen[-1], chosen[0], "best")
                spreads += from_numbers(method, {"varied": name}, {metric: gain})
    return spreads
