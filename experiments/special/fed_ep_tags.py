"""Guo et al. (2023), Table 3 and Figure 3: tag prediction among hundreds of thousands of users."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import Partial

from experiments import tags, wiring
from experiments.claims import mean
from experiments.special import fed_ep_runs
from experiments.tidy import Row, from_numbers
from fedmcmc import metrics
from fedmcmc.pytrees import trees

__all__ = ["count_outcomes", "rates", "rows"]

WINDOW = 10
"""Rounds of the running means whose deviations over seeds are reported."""


def rows(
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

    Parameters
    ----------
    data, model
        Configs of a loader and of the model of `experiments.tags`.
    methods, settings, runs, num_seeds, num_burnin, num_rounds
        As in `experiments.special.fed_ep_runs`.
    test_rows
        Number of held-out rows on which a round is scored, others in each round.
    best_window
        Number of rounds after the burn-in in the running mean whose largest value is reported.
    """
    loaded, test = wiring.build(data, "data", None)
    posterior = wiring.build(model, "model", wiring.Supplies(loaded))
    supplies = wiring.Supplies(loaded, posterior)
    score_fn = Partial(count_outcomes, jax.random.key(seed + 1), test, test_rows)
    counts = dict(seed=seed, num_seeds=num_seeds, num_burnin=num_burnin, num_rounds=num_rounds)
    num_parameters = trees.num_elements(supplies.position)
    tidy_rows = from_numbers("", {}, {"num_parameters": num_parameters})
    for curve in fed_ep_runs.execute(methods, settings, runs, supplies, score_fn, **counts):
        proper, fitted = (curve.scores[name][:, num_burnin:] for name in ("proper", "fitted"))
        numbers = {"improper_rounds": (~proper).sum(), "lost_fits": 1 - fitted.mean()}
        tidy_rows += from_numbers(curve.method, {}, numbers)
        for metric, values in rates(curve.scores["counts"]).items():
            late = values[:, num_burnin:]
            best = np.asarray(metrics.best_running_mean(late, best_window), np.float64)
            numbers = {metric: mean(list(best)), f"{metric}_sd": best.std(ddof=1)}
            tidy_rows += from_numbers(curve.method, {}, numbers)
            window = min(best_window, WINDOW)
            running = np.lib.stride_tricks.sliding_window_view(values, window, axis=1).mean(axis=-1)
            by_round = {"by_round": (1, values.mean(axis=0))}
            by_round["by_round_sd"] = (window, running.std(axis=0, ddof=1))
            for name, (start, points) in by_round.items():
                for x, value in enumerate(points, start):
                    tidy_rows.append(Row(curve.method, f"{metric}_{name}", value, {}, x=float(x)))
    return tidy_rows


def count_outcomes(
    rng_key: Array, test: Any, num_rows: int, position: Any, round_: Array
) -> dict[str, Array]:
    """Return how often each tag is predicted rightly, wrongly and missed, ``[num_tags, 3]``.

    A tag is predicted where its probability is above a half.
    """
    key, total = jax.random.fold_in(rng_key, round_), len(test["weight"])
    chosen = jax.random.choice(key, total, (min(num_rows, total),), replace=False)
    sample = {name: jnp.asarray(values)[chosen] for name, values in test.items()}
    predicted = tags.logits(position, sample) > 0
    true = tags.unpack(sample, predicted.shape[-1]).astype(bool)
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
