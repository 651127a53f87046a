"""One logistic regression a tag on the mean of a sentence's words."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import Partial

import fedmcmc
from experiments.fed_ep.methods import flat
from experiments.fed_ep.tag_data import Rows

__all__ = ["posterior", "rates", "score"]


def posterior(num_words: int, num_tags: int) -> fedmcmc.Posterior:
    """Return the model, with a flat prior; it starts at zero."""
    start = {
        "kernel": np.zeros((num_words, num_tags), np.float32),
        "bias": np.zeros(num_tags, np.float32),
    }
    return fedmcmc.Posterior(
        logprior_fn=flat,
        loglikelihood_fn=_loglikelihood,
        resample_fn=_resample,
        init_fn=Partial(_start, start),
    )


def _start(start: Any, rng_key: Array) -> Any:
    del rng_key
    return jax.tree.map(jnp.asarray, start)


def _logits(position: Any, rows: Rows) -> Array:
    known = rows.words >= 0
    each = position["kernel"][jnp.where(known, rows.words, 0).astype(jnp.int32)]
    total = jnp.sum(jnp.where(known[..., None], each, 0), axis=-2)
    return position["bias"] + rows.weight[..., None] * total


def _loglikelihood(position: Any, rows: Rows) -> Array:
    logits = _logits(position, rows)
    tags = jnp.unpackbits(rows.tags.astype(jnp.uint8), axis=-1, count=logits.shape[-1])
    return jnp.sum(tags * logits - jax.nn.softplus(logits), axis=-1)


def _resample(rng_key: Array, position: Any, rows: Rows) -> Rows:
    logits = _logits(position, rows)
    drawn = jax.random.bernoulli(rng_key, jax.nn.sigmoid(logits))
    return rows._replace(tags=jnp.packbits(drawn, axis=-1).astype(rows.tags.dtype))


def score(
    rng_key: Array, num_rows: int, position: Any, test: Rows, round_: Array
) -> dict[str, Array]:
    """Return how often each tag is predicted rightly, wrongly and missed, ``[num_tags, 3]``.

    On `num_rows` of the sentences held out, others in each round; a tag is predicted where its
    probability is above a half.
    """
    total = test.weight.shape[0]
    chosen = jax.random.choice(
        jax.random.fold_in(rng_key, round_), total, (min(num_rows, total),), replace=False
    )
    rows = jax.tree.map(lambda leaf: jnp.asarray(leaf)[chosen], test)
    logits = _logits(position, rows)
    said = logits > 0
    true = jnp.unpackbits(rows.tags.astype(jnp.uint8), axis=-1, count=logits.shape[-1]).astype(bool)
    counts = [said & true, said & ~true, ~said & true]
    return {"counts": jnp.stack([jnp.sum(x, axis=0, dtype=jnp.int32) for x in counts], axis=-1)}


def rates(counts: np.ndarray) -> dict[str, np.ndarray]:
    """Return precision, recall, micro and macro F1, in percent, of counts ``[..., num_tags, 3]``.

    A rate of nothing is zero.
    """
    total = counts.sum(axis=-2).astype(float)
    hits, false, missed = np.moveaxis(total, -1, 0)
    by_tag = np.moveaxis(counts.astype(float), -1, 0)

    def ratio(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return 100 * np.divide(a, b, out=np.zeros_like(a), where=b > 0)

    return {
        "precision": ratio(hits, hits + false),
        "recall": ratio(hits, hits + missed),
        "micro F1": ratio(2 * hits, 2 * hits + false + missed),
        "macro F1": ratio(2 * by_tag[0], 2 * by_tag[0] + by_tag[1] + by_tag[2]).mean(axis=-1),
    }
