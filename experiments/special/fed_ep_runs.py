"""Images and tags of Guo et al. (2023): methods that continue from a burn-in that all share.

A study gives `methods`, the configs of kernels by name, and `settings`. A text ``$name`` in a
config stands for the setting `name`, which may be a config itself and which a run may change.
`runs` lists what is run: mappings of ``method`` and of settings to values, where lists stand for
all their values. `num_rounds` includes the `num_burnin` rounds.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.tree_util import Partial

import fedmcmc
from experiments import models, setup, wiring
from experiments import tags as sentences
from experiments.claims import Number, mean
from experiments.tidy import Row, from_numbers
from fedmcmc import inference, metrics
from fedmcmc.interop.flax import predictive
from fedmcmc.pytrees import trees

BURN_IN = "FedAvg"
BASELINES = (BURN_IN, "FedPA")
"""Methods without an approximation, which continue the burn-in's state as it is."""
CLIENT_BYTES = 2**31
"""Clients' states above this size are kept on the host, for one seed at a time."""

without_prior = setup.flat_prior


class Curve(NamedTuple):
    """Run of a method, with its settings that differ from the study's.

    `scores` are arrays ``[num_seeds, num_rounds, ...]`` by name, burn-in included. Besides the
    scores of the study they have `fitted`, the share of clients' fits that were proper, and
    `proper`, whether the approximation was. `state` is the last state without clients, or ``None``
    if the run turned non-finite.
    """

    scores: dict[str, np.ndarray]
    state: Any
    method: str = ""
    settings: Mapping[str, Any] = {}


def images(
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
    """Return accuracies of all runs, leads over the baselines, and calibration at the end.

    `data` is the config of a loader of images with held-out rows, `module` the config of a function
    that returns a flax module for ``num_outputs``. The setting `weight_decay` is a precision per
    row. The best running mean of `best_window` rounds is reported within each of `checkpoints`
    rounds, and the rounds until a running mean of `window` rounds reaches each of `thresholds`, in
    percent. The first `window` rounds after the burn-in and the last ones are averaged as well.
    """
    loaded, test, *_ = wiring.build(data, "data", None)
    build_network = wiring.build(module, "module", None)
    network = build_network(num_outputs=models.num_classes(loaded))
    precision = settings["weight_decay"] * loaded.num_rows
    posterior = models.network(loaded, build_network, precision**-0.5 if precision else 1.0)
    posterior = posterior if precision else without_prior(posterior)
    supplies, key = wiring.Supplies(loaded, posterior), jax.random.key(seed + 1)
    numbers: dict[str, Any] = {"num_parameters": trees.num_elements(supplies.position)}
    if getattr(network, "widths", None) == ():  # Fisher informations of weights of zero
        squares = np.square(loaded.rows["features"], dtype=np.float64).mean(axis=0)
        numbers["information_ratio"] = np.divide(*np.quantile(squares, [0.9, 0.1]))
    collected, measured = from_numbers("", {}, numbers), []
    score_fn = Partial(_scores, predictive(network, inputs="features"), test)
    predict_row_fn = predictive(network, likelihood="categorical", inputs="features")
    predict_fn = Partial(_in_blocks, predict_row_fn)
    counts = dict(num_burnin=num_burnin, num_rounds=num_rounds)
    common = dict(seed=seed, num_seeds=num_seeds, **counts)
    for curve in execute(methods, settings, runs, supplies, score_fn, **common):
        by_seed, rows = _summary(curve, checkpoints, thresholds, window, best_window, **counts)
        numbers = _calibration(key, curve, predict_fn, test, num_bins)
        collected += rows + from_numbers(curve.method, curve.settings, numbers)
        measured.append((curve.method, curve.settings, by_seed))
    baselines = [by_seed for method, _, by_seed in measured if method in BASELINES]
    for method, changes, by_seed in measured:
        if method not in BASELINES and len(baselines) == len(BASELINES):
            leads = {
                f"{part}_lead": min(mean(by_seed[part] - b[part]) for b in baselines)
                for part in ("best", "end")
            }
            collected += from_numbers(method, changes, leads)
    return collected


def tags(
    data: Mapping[str, Any],
    model: Mapping[str, Any],
    methods: Mapping[str, Any],
    settings: Mapping[str, Any],
    runs: Sequence[Mapping[str, Any]],
    seed: int,
    num_seeds: int,
    num_burnin: int,
    num_rounds: int,
    test_rows: int,
    best_window: int,
) -> list[Row]:
    """Return precision, recall and F1 in percent of all methods: by round, and at their best.

    `data` and `model` are configs of a loader and of the model of `experiments.tags`; a round is
    scored on `test_rows` held-out rows, others in each round; and the best is the largest running
    mean of `best_window` rounds after the burn-in.
    """
    loaded, test = wiring.build(data, "data", None)
    posterior = wiring.build(model, "model", wiring.Supplies(loaded))
    supplies = wiring.Supplies(loaded, posterior)
    score_fn = Partial(count_outcomes, jax.random.key(seed + 1), test, test_rows)
    counts = dict(seed=seed, num_seeds=num_seeds, num_burnin=num_burnin, num_rounds=num_rounds)
    collected = from_numbers("", {}, {"num_parameters": trees.num_elements(supplies.position)})
    for curve in execute(methods, settings, runs, supplies, score_fn, **counts):
        collected += from_numbers(curve.method, {}, _num_lost(curve, num_burnin))
        for metric, values in rates(curve.scores["counts"]).items():
            best = metrics.best_running_mean(values[:, num_burnin:], best_window)
            best = np.asarray(best, np.float64)
            numbers = {metric: mean(best), f"{metric}_sd": best.std(ddof=1)}
            collected += from_numbers(curve.method, {}, numbers)
            collected += _by_round(curve, metric, values, min(best_window, 10))
    return collected


def execute(
    methods: Mapping[str, Any],
    settings: Mapping[str, Any],
    runs: Sequence[Mapping[str, Any]],
    supplies: wiring.Supplies,
    score_fn: Callable[[Any, Array], dict[str, Array]],
    *,
    seed: int,
    num_seeds: int,
    num_burnin: int,
    num_rounds: int,
) -> Iterator[Curve]:
    """Run the burn-in, which is ``methods["FedAvg"]``, and each method from there.

    `score_fn` returns scores of a position and the number of its round.

    Raises
    ------
    ValueError
        If `runs` has an unknown method or setting, or there are no rounds after the burn-in.
    """
    if not 0 < num_burnin < num_rounds:
        raise ValueError(f"num_burnin must lie between 1 and {num_rounds - 1}, got {num_burnin}.")
    chosen = list(_variants(runs, methods, settings))
    data, key = supplies.data, jax.random.key(seed)
    common: dict[str, Any] = dict(collect=partial(_collect, score_fn), progress=False)

    def build(method: str, changes: Mapping[str, Any]) -> fedmcmc.FederatedKernel:
        return wiring.build(_filled(methods[method], {**settings, **changes}), method, supplies)

    lengths = dict(num_rounds=num_burnin, num_chains=num_seeds)
    kernel, init_fn = build(BURN_IN, {}), supplies.posterior.init_fn
    burn_in = fedmcmc.sample(key, kernel, data, init_fn, **lengths, **common)
    common["num_rounds"] = num_rounds - num_burnin
    for method, changes in chosen:
        kernel = build(method, changes)
        switch: Any = partial(fedmcmc.switch, kernel, data)
        if method in BASELINES:
            switch = lambda state: state  # noqa: E731
        clients = jax.eval_shape(switch, burn_in.state).clients
        on_host = 4 * trees.num_elements(clients) > CLIENT_BYTES
        parts = [slice(i, i + 1) for i in range(num_seeds)] if on_host else [slice(None)]
        curves = [_continued(part, key, kernel, data, burn_in, switch, common) for part in parts]
        yield _joined(curves)._replace(method=method, settings=changes)


def _variants(
    runs: Sequence[Mapping[str, Any]], methods: Mapping[str, Any], settings: Mapping[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return the methods to run, each with its settings that differ from the study's."""
    for entry in runs:
        choices = [value if isinstance(value, list) else [value] for value in entry.values()]
        for values in itertools.product(*choices):
            changes = dict(zip(entry, values, strict=True))
            method = changes.pop("method", None)
            if method not in methods or not changes.keys() <= settings.keys():
                raise ValueError(
                    f"runs has {entry}; the methods are {', '.join(methods)}, and the settings "
                    f"{', '.join(settings)}."
                )
            yield method, changes


def _filled(node: Any, settings: Mapping[str, Any]) -> Any:
    """Return a config in which every ``$name`` is replaced by the setting."""
    if isinstance(node, str) and node.startswith("$"):
        if node[1:] not in settings:
            raise ValueError(f"{node} is not among the settings {', '.join(settings)}.")
        return _filled(settings[node[1:]], settings)
    if isinstance(node, Mapping):
        return {name: _filled(value, settings) for name, value in node.items()}
    return node


def _continued(
    part: slice, key: Array, kernel: Any, data: Any, burn_in: Any, switch: Any, common: Any
) -> Curve:
    """Run a method from the end of the burn-in, for all seeds or for one, with a host store."""
    state, scores = jax.tree.map(lambda leaf: leaf[part], (burn_in.state, burn_in.draws))
    placement = fedmcmc.Placement()
    if part == slice(None):
        start = switch(state)
    else:
        # The first seed keeps the key with which all seeds would run together.
        key = jax.random.fold_in(key, part.start) if part.start else key
        store = fedmcmc.HostStore()
        start = store.start(lambda ids: switch(state, clients=ids), data.num_clients)
        placement = fedmcmc.Placement(client_store=store)
    try:
        run = fedmcmc.sample(key, kernel, data, state=start, placement=placement, **common)
        final_state = run.state._replace(clients=())
    except fedmcmc.NonFiniteError as error:
        run, final_state = error.samples, None
    if run is not None:
        scores = {n: np.concatenate([v, run.draws[n]], axis=1) for n, v in scores.items()}
    return Curve(scores, final_state)


def _joined(curves: Sequence[Curve]) -> Curve:
    """Return runs of some seeds each as one curve, which is as long as the shortest."""
    num_rounds = min(curve.scores["proper"].shape[1] for curve in curves)
    parts = [jax.tree.map(lambda leaf: leaf[:, :num_rounds], curve.scores) for curve in curves]
    scores = jax.tree.map(lambda *x: np.concatenate(x), *parts)
    states = [curve.state for curve in curves]
    is_lost = any(state is None for state in states)
    return Curve(scores, None if is_lost else jax.tree.map(lambda *x: jnp.concatenate(x), *states))


def _collect(score_fn: Any, state: Any, info: Any) -> dict[str, Array]:
    proper = jnp.array(True) if trees.is_empty(info.server) else info.server.proper
    fitted = jnp.mean(info.clients.usable, dtype=jnp.float32)
    scores = score_fn(state.broadcast.position, state.broadcast.round)
    return {**scores, "fitted": fitted, "proper": proper}


def _scores(logits_fn: Any, test: Any, position: Any, round_: Array) -> dict[str, Array]:
    """Return accuracy and loss, the loss from logits because small probabilities round to zero."""
    del round_
    logits, labels = _in_blocks(logits_fn, position, test), jnp.asarray(test["label"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return {"accuracy": jnp.mean(logits.argmax(axis=1) == labels), "loss": jnp.mean(losses)}


def _in_blocks(predict_fn: Any, position: Any, test: Any) -> Array:
    """Return predictions for all rows, ``[num_test, num_classes]``, some rows at a time."""

    def predict_row(features: Array) -> Array:
        return predict_fn(position, {"features": features[None]})[0]

    return jax.lax.map(predict_row, jnp.asarray(test["features"]), batch_size=1_000)


def _summary(
    curve: Curve,
    checkpoints: Sequence[int],
    thresholds: Sequence[float],
    window: int,
    best_window: int,
    num_burnin: int,
    num_rounds: int,
) -> tuple[dict[str, np.ndarray], list[Row]]:
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
    falls = by_seed["best"] - by_seed["end"]  # in percent, as accuracies are
    numbers = {
        "end_accuracy_mean": mean(by_seed["end"]),
        "end_loss": loss[:, -window:].mean(),
        "num_seeds_fallen": (~(falls <= 2)).sum(),
        **_num_lost(curve, num_burnin),
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
    collected += _by_round(curve, "accuracy", accuracy, window)
    return by_seed, collected + _by_round(curve, "loss", loss, window)


def _num_lost(curve: Curve, num_burnin: int) -> dict[str, Any]:
    """Return the number of improper rounds and the share of improper fits after the burn-in."""
    proper, fitted = (curve.scores[name][:, num_burnin:] for name in ("proper", "fitted"))
    return {"improper_rounds": (~proper).sum(), "lost_fits": 1 - fitted.mean()}


def _by_round(curve: Curve, metric: str, values: np.ndarray, window: int) -> list[Row]:
    """Return means over seeds of `values`, ``[num_seeds, num_rounds]``, for each round.

    If there are several seeds, return also standard deviations of running means of `window` rounds.
    """
    points = {f"{metric}_by_round": (1, values.mean(axis=0))}
    if len(values) > 1:
        views = np.lib.stride_tricks.sliding_window_view(values, window, axis=1)
        points[f"{metric}_by_round_sd"] = (window, views.mean(axis=-1).std(axis=0, ddof=1))
    return [
        Row(curve.method, name, value, curve.settings, x=float(x))
        for name, (start, by_round) in points.items()
        for x, value in enumerate(by_round, start)
    ]


def _calibration(
    rng_key: Array, curve: Curve, predict_fn: Any, test: Any, num_bins: int
) -> dict[str, Any]:
    """Return accuracy and calibration of the last point and of draws from the approximation."""
    names = ("accuracy_point", "ece_point", "accuracy_marginal", "ece_marginal")
    numbers: dict[str, Any] = dict.fromkeys(names)
    if curve.state is None:
        return numbers
    draws = {"point": jax.tree.map(lambda leaf: leaf[:, None], curve.state.broadcast.position)}
    num_seeds = len(curve.scores["proper"])
    if curve.method not in BASELINES:
        split = partial(jax.random.split, num=10)
        draw = jax.vmap(lambda gaussian, key: jax.vmap(gaussian.draw)(split(key)))
        gaussians = curve.state.server.approximation.gaussian
        draws["marginal"] = draw(gaussians, jax.random.split(rng_key, num_seeds))
    error = 50 / len(test["label"]) ** 0.5  # at most
    for kind, positions in draws.items():
        seeds = [jax.tree.map(lambda leaf, i=i: leaf[i], positions) for i in range(num_seeds)]
        probabilities = np.stack([metrics.predictive(predict_fn, each, test) for each in seeds])
        ece = metrics.expected_calibration_error(probabilities, test["label"], num_bins)
        numbers[f"accuracy_{kind}"] = 100 * metrics.accuracy(probabilities, test["label"]).mean()
        numbers[f"ece_{kind}"] = Number(float(100 * ece.mean()), error)
    return numbers


def count_outcomes(
    rng_key: Array, test: Any, num_rows: int, position: Any, round_: Array
) -> dict[str, Array]:
    """Return how often each tag is predicted rightly, wrongly and missed, ``[num_tags, 3]``.

    A tag is predicted where its probability is above a half.
    """
    key, total = jax.random.fold_in(rng_key, round_), len(test["weight"])
    chosen = jax.random.choice(key, total, (min(num_rows, total),), replace=False)
    sample = {name: jnp.asarray(values)[chosen] for name, values in test.items()}
    predicted = sentences.logits(position, sample) > 0
    true = sentences.unpack(sample, predicted.shape[-1]).astype(bool)
    outcomes = (predicted & true, predicted & ~true, ~predicted & true)
    return {"counts": jnp.stack([jnp.sum(x, 0, dtype=jnp.int32) for x in outcomes], axis=-1)}


def rates(counts: np.ndarray) -> dict[str, np.ndarray]:
    """Return rates in percent of counts ``[..., num_tags, 3]``; a rate of nothing is zero."""
    right, wrong, missed = np.moveaxis(counts.sum(axis=-2).astype(float), -1, 0)
    by_tag = np.moveaxis(counts.astype(float), -1, 0)

    def ratio(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return 100 * np.divide(a, b, out=np.zeros_like(a), where=b > 0)

    return {
        "precision": ratio(right, right + wrong),
        "recall": ratio(right, right + missed),
        "micro_f1": ratio(2 * right, 2 * right + wrong + missed),
        "macro_f1": ratio(2 * by_tag[0], 2 * by_tag[0] + by_tag[1] + by_tag[2]).mean(axis=-1),
    }


def averaged(
    optimizer: optax.GradientTransformation, cohort_size: int
) -> optax.GradientTransformation:
    """Return an optimizer of the cohort's mean change, for kernels that give it the sum."""
    return optax.chain(optax.scale(1 / cohort_size), optimizer)


def uniform_prior(posterior: fedmcmc.Posterior) -> fedmcmc.Gaussian:
    """Return the improper uniform density as a Gaussian."""
    return fedmcmc.Gaussian.uniform(jax.eval_shape(posterior.init_fn, jax.random.key(0)))


def natural_gradients(
    mean: Any, covariance: float, weight_decay: float, scale: float, **settings: Any
) -> inference.Inference:
    """Return `fedmcmc.inference.ngvi` that starts where the released code does."""
    start = max(covariance / scale - weight_decay, 0.0)
    return inference.ngvi(mean, initial=start, scale=scale, **settings)
