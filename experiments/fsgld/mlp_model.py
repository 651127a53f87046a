"""The network of El Mekkaoui et al. (2021), section 5.3, and its label-skewed shards."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import Partial

import fedmcmc
from experiments.data import Table

__all__ = ["Shards", "make_posterior", "make_shards", "start", "standardise"]

HIDDEN = (18, 18, 8)
NUM_CLASSES = 2


class Shards(NamedTuple):
    """Which rows of a table each shard has.

    `data` holds row numbers, so that repetitions with other shards share one table; `train` is
    ``[num_shards, num_evaluated]``, some rows of each shard; `test` is ``[num_test]``, the
    balanced shard that is held out.
    """

    data: fedmcmc.FederatedData
    train: np.ndarray
    test: np.ndarray


def start(rng_key: Array, num_features: int) -> list[dict[str, Array]]:
    """Draw weights of variance ``2 / inputs`` (He et al. 2015), with no biases."""
    widths = (num_features, *HIDDEN, NUM_CLASSES)
    keys = jax.random.split(rng_key, len(widths) - 1)
    return [
        {"bias": jnp.zeros(after), "weight": jax.random.normal(k, (before, after)) * scale}
        for k, before, after in zip(keys, widths[:-1], widths[1:], strict=True)
        for scale in (np.sqrt(2 / before).astype(np.float32),)
    ]


def make_posterior(table: Table, prior_scale: float) -> fedmcmc.Posterior:
    """Return the network over row numbers of `table`, with a normal prior on every weight."""
    arrays = Table(jnp.asarray(table.features), jnp.asarray(table.labels))
    prior = Partial(_logprior, jnp.float32(prior_scale))
    return fedmcmc.Posterior(prior, Partial(_loglikelihood, arrays))


def _logprior(prior_scale: Array, position: Any) -> Array:
    return -0.5 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(position)) / prior_scale**2


def _loglikelihood(table: Table, position: Any, rows: Array) -> Array:
    hidden = table.features[rows]
    for layer in position[:-1]:
        hidden = jax.nn.relu(hidden @ layer["weight"] + layer["bias"])
    logits = hidden @ position[-1]["weight"] + position[-1]["bias"]
    chosen = jax.nn.one_hot(table.labels[rows], NUM_CLASSES, dtype=logits.dtype)
    return jnp.sum(jax.nn.log_softmax(logits) * chosen, axis=-1)


def standardise(features: np.ndarray) -> np.ndarray:
    """Give every column mean zero and variance one, except those of zeros and ones.

    (A rare indicator divided by its standard deviation would be an outlier of its own.)
    """
    binary = np.all((features == 0) | (features == 1), axis=0)
    scaled = (features - features.mean(axis=0)) / np.maximum(features.std(axis=0), 1e-12)
    return np.where(binary, features, scaled).astype(np.float32)


def make_shards(
    rng_key: Array,
    labels: np.ndarray,
    *,
    num_shards: int,
    rows_per_shard: int,
    num_test: int,
    num_evaluated: int,
    concentration: float,
) -> Shards:
    """Draw shards of equal size whose positive proportions are ``Beta(a, a)``, and a balanced one.

    Parameters
    ----------
    rng_key
        Of proportions and rows.
    labels
        ``[num_rows]``, 0 or 1.
    num_shards, rows_per_shard, num_test, num_evaluated
        Counts; no row is used twice.
    concentration
        The parameter ``a``: 100 for the paper's IID shards, 0.5 for its non-IID ones.

    Raises
    ------
    ValueError
        If the table has too few rows of a label for the proportions drawn.
    """
    proportions = np.asarray(jax.random.beta(rng_key, concentration, concentration, (num_shards,)))
    words = np.asarray(jax.random.key_data(jax.random.fold_in(rng_key, 1))).ravel()
    rng = np.random.default_rng(words.astype(np.uint32))
    pools = [rng.permutation(np.flatnonzero(labels == label)) for label in (0, 1)]
    positives = np.round(proportions * rows_per_shard).astype(int)
    wanted = np.stack([rows_per_shard - positives, positives])
    wanted = np.concatenate([wanted, [[num_test - num_test // 2], [num_test // 2]]], axis=1)
    for label in (0, 1):
        if wanted[label].sum() > pools[label].size:
            raise ValueError(
                f"the shards need {wanted[label].sum()} rows with label {label}, the table has "
                f"{pools[label].size}: lower num_shards or rows_per_shard"
            )
    parts = [np.split(pools[label], np.cumsum(wanted[label])) for label in (0, 1)]
    rows = [rng.permutation(np.concatenate([n, p])) for n, p in zip(*parts, strict=True)]
    shards = [r.astype(np.int32) for r in rows[:num_shards]]
    data = fedmcmc.FederatedData.from_clients(shards)
    return Shards(data, np.stack([r[:num_evaluated] for r in shards]), rows[num_shards])
