"""Shards of El Mekkaoui et al. (2021): Gaussian rows, pairs of letters, skewed labels."""

from typing import Any, NamedTuple

import jax
import numpy as np

import fedmcmc
from fedmcmc import partition

__all__ = ["Split", "gaussian", "letter_pairs", "project", "skewed_labels", "standardize"]

Pairs = dict[str, Any]
"""Columns `features`, squared differences per component, and `sign`, 1 for the same letter."""


def gaussian(seed: int, spread: float, num_clients: int, rows_per_client: int) -> np.ndarray:
    """Return the rows of every shard, ``[num_clients, rows, 2]``, around uniform means."""
    rng = np.random.default_rng(seed)
    means = rng.uniform(-spread, spread, (num_clients, 2))
    return means[:, None] + rng.standard_normal((num_clients, rows_per_client, 2))


def project(features: np.ndarray, num_components: int) -> np.ndarray:
    """Project on the top eigenvectors of ``X X'``, ``[num_rows, num_components]``."""
    features = features.astype(np.float64)
    _, vectors = np.linalg.eigh(features.T @ features)
    return features @ vectors[:, ::-1][:, :num_components]


def letter_pairs(
    rng_key: jax.Array,
    projected: np.ndarray,
    labels: np.ndarray,
    *,
    num_clients: int,
    pairs_per_client: int,
    num_test: int,
) -> tuple[fedmcmc.FederatedData, Pairs]:
    """Draw pairs, half of them similar, by client and held out; clients share no letter.

    Features are divided by ``num_components`` times their mean over all clients' pairs, which
    bounds the curvature of a row by about one third.

    Raises
    ------
    ValueError
        If a number of pairs is odd.
    """
    if pairs_per_client % 2 or num_test % 2:
        raise ValueError("pairs_per_client and num_test must be even, half of them similar.")
    client_key, pair_key = jax.random.split(rng_key)
    owner = partition.disjoint_labels(client_key, labels, num_clients)
    rng, taken = _generator(pair_key), set[tuple[int, int]]()
    letters = [np.unique(labels[owner == client]) for client in range(num_clients)]
    counts = [pairs_per_client] * num_clients + [num_test]
    drawn = [
        _draw_pairs(rng, labels, chosen, num, taken)
        for chosen, num in zip([*letters, np.unique(labels)], counts, strict=True)
    ]
    squares = [(projected[pairs[:, 0]] - projected[pairs[:, 1]]) ** 2 for pairs in drawn]
    scale = projected.shape[1] * np.concatenate(squares[:-1]).mean(axis=0)
    *clients, test = (
        {
            "features": (square / scale).astype(np.float32),
            "sign": np.where(np.arange(num) < num // 2, 1, -1).astype(np.float32),
        }
        for square, num in zip(squares, counts, strict=True)
    )
    return fedmcmc.FederatedData.from_clients(clients), test


def _draw_pairs(
    rng: np.random.Generator,
    labels: np.ndarray,
    letters: np.ndarray,
    num_pairs: int,
    taken: set[tuple[int, int]],
) -> np.ndarray:
    """Draw pairs of rows that are not in `taken`, the first half similar, and add them to it."""
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


def _generator(rng_key: jax.Array) -> np.random.Generator:
    return np.random.default_rng(np.asarray(jax.random.key_data(rng_key)).ravel().astype(np.uint32))


def standardize(features: np.ndarray) -> np.ndarray:
    """Give every column mean zero and variance one, except for columns of zeros and ones."""
    binary = np.all((features == 0) | (features == 1), axis=0)
    scaled = (features - features.mean(axis=0)) / np.maximum(features.std(axis=0), 1e-12)
    return np.where(binary, features, scaled).astype(np.float32)


class Split(NamedTuple):
    """Row numbers of a table: `data` by client, and `test`, with as many labels 0 as 1."""

    data: fedmcmc.FederatedData
    test: np.ndarray


def skewed_labels(
    rng_key: jax.Array,
    labels: np.ndarray,
    *,
    num_clients: int,
    rows_per_client: int,
    num_test: int,
    concentration: float,
) -> Split:
    """Draw clients of equal size whose shares of label 1 are ``Beta(a, a)``; no row is used twice.

    Parameters
    ----------
    rng_key
        Key of the shares and the rows.
    labels
        ``[num_rows]``, 0 or 1.
    num_clients, rows_per_client, num_test
        Counts.
    concentration
        The parameter ``a``: 100 for the paper's IID shards, 0.5 for its non-IID ones.

    Raises
    ------
    ValueError
        If the table has too few rows of a label.
    """
    shares = np.asarray(jax.random.beta(rng_key, concentration, concentration, (num_clients,)))
    rng = _generator(jax.random.fold_in(rng_key, 1))
    pools = [rng.permutation(np.flatnonzero(labels == label)) for label in (0, 1)]
    ones = np.append(np.round(shares * rows_per_client), num_test // 2).astype(int)
    sizes = np.append(np.full(num_clients, rows_per_client), num_test)
    parts = []
    for label, (pool, counts) in enumerate(zip(pools, (sizes - ones, ones), strict=True)):
        if counts.sum() > pool.size:
            raise ValueError(
                f"clients and test need {counts.sum()} rows with label {label}, the table has "
                f"{pool.size}: lower num_clients or rows_per_client."
            )
        parts.append(np.split(pool, np.cumsum(counts)))
    rows = [rng.permutation(np.concatenate([n, p])) for n, p in zip(*parts, strict=True)]
    clients = [chosen.astype(np.int32) for chosen in rows[:num_clients]]
    return Split(fedmcmc.FederatedData.from_clients(clients), rows[num_clients])
