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

    `data` and `model` are configs of a loader and of the model of `experiments.tags`; a round is
    scored on `test_rows` held-out rows, others in each round; and the best is the largest running
    mean of `best_window` rounds after the burn-in. The other arguments are described in
    `experiments.special.fed_ep_runs`.
    """
    loaded, test = wiring.build(data, "data", None)
    posterior = wiring.build(model, "model", wiring.Supplies(loaded))
    supplies = wiring.Supplies(loaded, posterior)
    score_fn = Partial(count_outcomes, jax.random.key(seed + 1), test, test_rows)
    counts = dict(seed=seed, num_seeds=num_seeds, num_burnin=num_burnin, num_rounds=num_rounds)
    tidy_rows = from_numbers("", {}, {"num_parameters": trees.num_elements(supplies.position)})
    for curve in fed_ep_runs.execute(methods, settings, runs, supplies, score_fn, **counts):
        tidy_rows += from_numbers(curve.method, {}, fed_ep_runs.num_lost(curve, num_burnin))
        for metric, values in rates(curve.scores["counts"]).items():
            late = values[:, num_burnin:]
            best = np.asarray(metrics.best_running_mean(late, best_window), np.float64)
            numbers = {metric: mean(list(best)), f"{metric}_sd": best.std(ddof=1)}
            tidy_rows += from_numbers(curve.method, {}, numbers)
            window = min(best_window, WINDOW)
            tidy_rows += fed_ep_runs.rows_by_round(curve, f"{metric}_by_round", values, window)
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
