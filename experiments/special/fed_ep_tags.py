"""Guo et al. (2023), Table 3 and Figure 3: tag prediction among hundreds of thousands of users."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from experiments import spreading, tags, wiring
from experiments.fed_ep import methods, runs
from experiments.tidy import Row, from_numbers
from experiments.verdicts import mean
from fedmcmc import metrics

__all__ = ["count_outcomes", "rates", "rows"]

WINDOW = 10
"""Rounds of the running means whose deviations over seeds are reported."""


def rows(
    data: Mapping[str, Any],
    num_words: int,
    num_tags: int,
    test_rows: int,
    best_window: int,
    settings: Mapping[str, Any],
) -> list[Row]:
    """Return precision, recall and F1 in percent of all methods: by round, and at their best.

    Parameters
    ----------
    data
        Config of a loader of `experiments.tags`.
    test_rows
        Number of held-out rows on which a round is scored, others in each round.
    best_window
        Number of rounds after the burn-in in the running mean whose largest value is reported.
    settings
        Those of `experiments.fed_ep.methods.Settings`.
    """
    chosen = methods.Settings(**settings)
    loaded, test = wiring.build(data, "data", None)
    posterior = tags.regressions(loaded, num_words, num_tags)
    score_fn = partial(count_outcomes, jax.random.key(chosen.seed + 1), test_rows)
    federation = methods.Federation(loaded, test, "")
    curves = runs.execute(chosen, posterior, federation, score_fn, spreading.ONE_DEVICE)
    tidy_rows = from_numbers("", {}, {"num_parameters": (num_words + 1) * num_tags})
    for method, curve in curves.items():
        numbers = {"improper_rounds": curve.improper, "lost_fits": curve.lost}
        tidy_rows += from_numbers(method, {}, numbers)
        for metric, values in rates(curve.scores["counts"]).items():
            late = values[:, chosen.num_burnin :]
            best = np.asarray(metrics.best_running_mean(late, best_window), np.float64)
            numbers = {metric: mean(list(best)), f"{metric}_sd": best.std(ddof=1)}
            tidy_rows += from_numbers(method, {}, numbers)
            window = min(best_window, WINDOW)
            running = np.lib.stride_tricks.sliding_window_view(values, window, axis=1).mean(axis=-1)
            by_round = {"by_round": (1, values.mean(axis=0))}
            by_round["by_round_sd"] = (window, running.std(axis=0, ddof=1))
            for name, (first, points) in by_round.items():
                for x, value in enumerate(points, first):
                    tidy_rows.append(Row(method, f"{metric}_{name}", value, {}, x=float(x)))
    return tidy_rows


def count_outcomes(
    rng_key: Array, num_rows: int, position: Any, test: Any, round_: Array
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
