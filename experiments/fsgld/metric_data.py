"""Pairs of spoken letters for metric learning, in shards that share no letter.

El Mekkaoui et al. (2021), section 5.2. With 26 letters over 10 shards, six shards have three
letters and four have two. A shard's similar pairs are two utterances of one of its letters, its
dissimilar pairs two of different ones. The held-out pairs are of all letters.
"""

import jax
import numpy as np

from experiments.data import Table
from experiments.fsgld.metric_model import Pairs
from fedmcmc import partition

__all__ = ["make_pairs", "project"]


def project(table: Table, num_components: int) -> np.ndarray:
    """Project on the top eigenvectors of ``X X'``, ``[num_rows, num_components]``."""
    features = table.features.astype(np.float64)
    _, vectors = np.linalg.eigh(features.T @ features)
    return features @ vectors[:, ::-1][:, :num_components]


def make_pairs(
    rng_key: jax.Array,
    projected: np.ndarray,
    labels: np.ndarray,
    *,
    num_shards: int,
    pairs_per_shard: int,
    test_pairs: int,
) -> tuple[list[Pairs], Pairs]:
    """Draw learning pairs a shard and held-out pairs, half of each similar.

    Features are divided by ``num_components`` times their mean over all learning pairs, so that
    an average pair has distance one where all weights are one. With the intercept this bounds the
    curvature of a row by about one third, which the paper's step size can bear. (In a federation
    the means are sums that the clients send once.)

    Parameters
    ----------
    rng_key
        Decides which letters share a shard and which pairs are drawn.
    projected, labels
        ``[num_rows, num_components]`` and ``[num_rows]``.
    num_shards, pairs_per_shard, test_pairs
        Counts, of similar and dissimilar pairs together.

    Returns
    -------
    shards, test
    """
    shard_key, pair_key = jax.random.split(rng_key)
    owner = partition.disjoint_labels(shard_key, labels, num_shards)
    words = np.asarray(jax.random.key_data(pair_key)).ravel()
    rng = np.random.default_rng(words.astype(np.uint32))
    taken: set[tuple[int, int]] = set()
    drawn = [
        _draw(rng, labels, np.unique(labels[owner == shard]), pairs_per_shard, taken)
        for shard in range(num_shards)
    ]
    test = _draw(rng, labels, np.unique(labels), test_pairs, taken)
    raw = [_squared_differences(projected, pairs) for pairs in drawn]
    scale = projected.shape[1] * np.concatenate(raw).mean(axis=0)
    shards = [Pairs((f / scale).astype(np.float32), _signs(pairs_per_shard)) for f in raw]
    held_out = (_squared_differences(projected, test) / scale).astype(np.float32)
    return shards, Pairs(held_out, _signs(test_pairs))


def _signs(num_pairs: int) -> np.ndarray:
    return np.where(np.arange(num_pairs) < num_pairs // 2, 1, -1).astype(np.float32)


def _squared_differences(projected: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    return (projected[pairs[:, 0]] - projected[pairs[:, 1]]) ** 2


def _draw(
    rng: np.random.Generator,
    labels: np.ndarray,
    letters: np.ndarray,
    num_pairs: int,
    taken: set[tuple[int, int]],
) -> np.ndarray:
    """Draw `num_pairs` pairs that were not `taken`, the first half similar."""
    rows = {letter: np.flatnonzero(labels == letter) for letter in letters}
    pairs: list[tuple[int, int]] = []
    while len(pairs) < num_pairs:
        if len(pairs) < num_pairs // 2:
            first, second = rng.choice(rows[rng.choice(letters)], 2, replace=False)
        else:
            one, other = rng.choice(letters, 2, replace=False)
            first, second = rng.choice(rows[one]), rng.choice(rows[other])
        pair = (int(min(first, second)), int(max(first, second)))
        if pair not in taken:
            taken.add(pair)
            pairs.append(pair)
    return np.array(pairs)
