"""Image classification with all methods: accuracy over rounds, calibration at the end."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.tree_util import Partial

import fedmcmc
from experiments import checks, group_norm, models
from experiments.fed_ep import image_figures, methods, runs
from experiments.fed_ep.methods import Federation
from experiments.qlsd.federations import Rows
from fedmcmc import Placement, metrics
from fedmcmc.interop.flax import predictive

__all__ = ["MODELS", "Settings", "execute", "measure"]

ROWS_AT_A_TIME = 1000  # of a prediction
MODELS = ("resnet18", "emnist_cnn", "small_cnn", "linear")


@dataclasses.dataclass(frozen=True)
class Settings(methods.Settings):
    """Settings of the experiments with images, besides those of the methods.

    Attributes
    ----------
    num_clients, num_rows, num_test
        Of the smaller federations; the published ones have their own.
    model
        One of `MODELS`.
    checkpoints
        Rounds within which the best accuracy is reported, a running mean of `best_window` rounds.
    thresholds
        Accuracies, in percent; the rounds until a running mean of `window` rounds reaches them.
    num_bins
        Of the expected calibration error.
    """

    num_clients: int = 100
    num_rows: int = 10_000
    num_test: int = 2_000
    model: str = "resnet18"
    checkpoints: tuple[int, ...] = (1000, 1500)
    thresholds: tuple[float, ...] = (45.0, 50.0)
    window: int = 10
    best_window: int = 100
    num_bins: int = 15

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.at_least(1, self, "num_clients", "num_rows", "num_test", "num_bins", "window")
        checks.require(self.model in MODELS, f"model must be one of {MODELS}", self.model)
        checks.require(
            self.best_window >= 1 and self.best_window <= min(self.checkpoints),
            "best_window must lie between 1 and the first of checkpoints",
            self.best_window,
        )
        checks.require(
            max(self.checkpoints) <= self.num_rounds,
            f"checkpoints must be at most num_rounds={self.num_rounds}",
            self.checkpoints,
        )
        checks.require(
            self.window <= self.num_burnin, "window must be at most num_burnin", self.window
        )


def execute(
    settings: Settings, federation: Federation, out: Path, placement: Placement
) -> dict[str, Any]:
    """Run all methods on a federation; write the figure; return the metrics."""
    found = measure(settings, federation, placement)
    return found | {"figures": image_figures.draw(found, out)}


def measure(
    settings: Settings,
    federation: Federation,
    placement: Placement,
    variants: Mapping[str, tuple[str, methods.Settings]] | None = None,
) -> dict[str, Any]:
    """Run all methods of the settings, or all variants (see `runs.execute`); return the metrics."""
    data = federation.data
    num_classes = 1 + int(max(np.max(data.rows.label), np.max(federation.test.label)))
    module = _module(settings, num_classes)
    posterior = _posterior(module, settings, data)
    predict_fn = predictive(module, likelihood="categorical", inputs=0)
    score_fn = Partial(_scores, predictive(module, inputs=0))
    curves = runs.execute(settings, posterior, federation, score_fn, placement, variants)
    key = jax.random.key(settings.seed + 1)
    table: list[dict[str, Any]] = []
    by_round, spreads, losses, spreads_of_losses = {}, {}, {}, {}
    by_seed: dict[str, dict[str, list[float]]] = {"early": {}, "best": {}, "end": {}}
    rounds: dict[str, dict[str, list[float | None]]] = {f"{x:g}": {} for x in settings.thresholds}
    for name, curve in curves.items():
        accuracy = 100 * np.asarray(curve.scores["accuracy"], np.float64)
        by_round[name] = accuracy.mean(axis=0).tolist()
        spreads[name] = image_figures.deviations(accuracy, settings.window)
        for part, values in _by_seed(accuracy, settings).items():
            by_seed[part][name] = values
        for level in settings.thresholds:
            rounds[f"{level:g}"][name] = _rounds_of_seeds(accuracy, level, settings)
        loss = np.asarray(curve.scores["loss"], np.float64)
        losses[name] = loss.mean(axis=0).tolist()
        spreads_of_losses[name] = image_figures.deviations(loss, settings.window)
        row = {"method": name} | _summary(accuracy, settings)
        row |= _calibration(key, name, curve, predict_fn, federation.test, settings)
        table.append(row)
    return {
        "table": table,
        "data": federation.text,
        "num_parameters": sum(x.size for x in jax.tree.leaves(posterior.init_fn(key))),
        "settings": dataclasses.asdict(settings),
        "by_round": by_round,
        "by_round_sd": spreads,
        "loss_by_round": losses,
        "loss_by_round_sd": spreads_of_losses,
        # Of each seed, so that methods can be compared on the same burn-in and test images.
        **{f"{part}_by_seed": values for part, values in by_seed.items()},
        "rounds_by_seed": rounds,
        **runs.trouble(curves),
    }


def _module(settings: Settings, num_classes: int) -> nn.Module:
    if settings.model == "resnet18":
        return group_norm.ResNet18(num_classes)
    if settings.model == "emnist_cnn":
        return group_norm.EmnistCnn(num_classes)
    if settings.model == "small_cnn":
        return models.SmallCnn(num_classes)
    return models.Mlp((), num_classes)


def _posterior(
    module: nn.Module, settings: Settings, data: fedmcmc.FederatedData
) -> fedmcmc.Posterior:
    """Return the model with the weight decay's prior, flat without one."""
    decay = settings.weight_decay * data.num_rows
    posterior = fedmcmc.from_flax(
        module,
        example=tuple(leaf[:2] for leaf in data.rows),
        prior_scale=decay**-0.5 if decay else 1.0,
        likelihood="categorical",
        inputs=0,
        outcome=1,
        check=False,
    )
    return posterior if decay else posterior._replace(logprior_fn=methods.flat)


def _scores(logits_fn: Any, position: Any, test: Rows, round_: jax.Array) -> dict[str, Any]:
    """Return accuracy and loss, the latter from logits: a small probability would round to 0."""
    del round_
    log_probabilities = jax.nn.log_softmax(_in_blocks(logits_fn, position, test))
    own = jnp.take_along_axis(log_probabilities, jnp.asarray(test.label)[:, None], axis=1)
    return {
        "accuracy": metrics.accuracy(jnp.exp(log_probabilities), test.label),
        "loss": -jnp.mean(own),
    }


def _in_blocks(predict_fn: Any, position: Any, test: Rows) -> jax.Array:
    """Return what `predict_fn` does for each row, ``[num_test, num_classes]``, some at a time."""

    def one(row: jax.Array) -> jax.Array:
        return predict_fn(position, (row[None],))[0]

    return jax.lax.map(one, jnp.asarray(test.features), batch_size=ROWS_AT_A_TIME)


def _summary(accuracy: np.ndarray, settings: Settings) -> dict[str, Any]:
    """Return best accuracies and rounds to thresholds, means and deviations over seeds."""
    row: dict[str, Any] = {}
    num_rounds = accuracy.shape[1]
    for last in settings.checkpoints:
        best = None
        if last <= num_rounds:
            best = np.asarray(metrics.best_running_mean(accuracy[:, :last], settings.best_window))
        row[f"accuracy in {last} rounds"] = None if best is None else float(best.mean())
        row[f"sd in {last}"] = _deviation(best)
    for level in settings.thresholds:
        reached = np.asarray(metrics.rounds_to_threshold(accuracy, level, settings.window))
        # As in the paper, over the seeds that reach it.
        some = reached[np.isfinite(reached)]
        row[f"rounds to {level:g} %"] = float(some.mean()) if some.size else None
        row[f"seeds to {level:g} %"] = int(some.size)
    return row


def _rounds_of_seeds(accuracy: np.ndarray, level: float, settings: Settings) -> list[float | None]:
    """Return each seed's rounds to an accuracy, ``None`` where it is not reached."""
    reached = np.asarray(metrics.rounds_to_threshold(accuracy, level, settings.window))
    return [float(r) if np.isfinite(r) else None for r in reached]


def _by_seed(accuracy: np.ndarray, settings: Settings) -> dict[str, list[float]]:
    """Return each seed's means: first and last `window` rounds after the burn-in, and the best.

    The best is a running mean of `best_window` rounds, as in the table. The best and the last are
    NaN where the run turned non-finite before its end.
    """
    first, window = settings.num_burnin, settings.window
    whole = accuracy.shape[1] == settings.num_rounds
    lost = np.full(len(accuracy), np.nan)
    best = metrics.best_running_mean(accuracy, settings.best_window) if whole else lost
    return {
        "early": accuracy[:, first : first + window].mean(axis=1).tolist(),
        "best": np.asarray(best, np.float64).tolist(),
        "end": (accuracy[:, -window:].mean(axis=1) if whole else lost).tolist(),
    }


def _deviation(values: np.ndarray | None) -> float | None:
    return None if values is None or values.size < 2 else float(values.std(ddof=1))


def _calibration(
    rng_key: jax.Array,
    name: str,
    curve: runs.Curve,
    predict_fn: Any,
    test: Rows,
    settings: Settings,
) -> dict[str, Any]:
    """Return accuracy and calibration of the last round's point and of draws from its Gaussian."""
    row: dict[str, Any] = {}
    for kind in ("point", "marginal"):
        accuracy, ece = None, None
        draws = None
        if curve.state is not None:
            if kind == "point":
                draws = runs.point(curve.state)
            elif name not in ("FedAvg", "FedPA"):
                draws = runs.marginal(rng_key, curve.state)
        if draws is not None:
            probabilities = _average(predict_fn, draws, test)
            accuracy = float(100 * metrics.accuracy(probabilities, test.label).mean())
            ece = float(
                100
                * metrics.expected_calibration_error(
                    probabilities,
                    np.broadcast_to(test.label, probabilities.shape[:2]),
                    settings.num_bins,
                ).mean()
            )
        row |= {f"accuracy, {kind}": accuracy, f"ECE, {kind}": ece}
    return row


def _average(predict_fn: Any, draws: Any, test: Rows) -> np.ndarray:
    """Return each seed's average prediction over its draws, ``[num_seeds, num_test, classes]``."""
    fn = Partial(_in_blocks, predict_fn)
    num_seeds = jax.tree.leaves(draws)[0].shape[0]
    each = [jax.tree.map(lambda leaf, s=s: leaf[s], draws) for s in range(num_seeds)]
    return np.stack([np.asarray(metrics.predictive(fn, own, test)) for own in each])
