"""Shards of El Mekkaoui et al. (2021): Gaussian rows, pairs of letters, skewed labels."""

from typing import Any

import jax
import numpy as np

import fedmcmc
from fedmcmc import partition

__all__ = ["gaussian", "letter_pairs", "project", "skewed_labels", "standardize"]


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
) -> tuple[fedmcmc.FederatedData, dict[str, np.ndarray]]:
    """Draw pairs of utterances, half of them of one letter; clients share no letter.

    The column `features` has squared differences over ``num_components`` times their mean, which
    bounds the curvature of a row by about one third; `sign` is 1 for the same letter, else -1.
    """
    client_key, pair_key = jax.random.split(rng_key)
    owner = partition.disjoint_labels(client_key, labels, num_clients)
    letters = [np.unique(labels[owner == client]) for client in range(num_clients)]
    if min(map(len, letters)) < 2:
        raise ValueError(f"{num_clients} clients do not have two letters each: lower num_clients.")
    counts = [pairs_per_client] * num_clients + [num_test]
    rng, used = _generator(pair_key), set[tuple[int, int]]()
    pairs = [
        _draw_pairs(rng, labels, chosen, num, used)
        for chosen, num in zip([*letters, np.unique(labels)], counts, strict=True)
    ]
    squares = [(projected[pair[:, 0]] - projected[pair[:, 1]]) ** 2 for pair in pairs]
    scale = projected.shape[1] * np.concatenate(squares[:-1]).mean(axis=0)
    signs = [np.where(np.arange(num) < num // 2, 1, -1).astype(np.float32) for num in counts]
    *clients, test = (
        {"features": (square / scale).astype(np.float32), "sign": sign}
        for square, sign in zip(squares, signs, strict=True)
    )
    return fedmcmc.FederatedData.from_clients(clients), test


def _draw_pairs(
    rng: np.random.Generator, labels: Any, letters: Any, num_pairs: int, used: set[tuple[int, int]]
) -> np.ndarray:
    """Draw pairs of rows that are not in `used`, the first half similar, and add them to it."""
    rows = {letter: np.flatnonzero(labels == letter) for letter in letters}
    pairs: list[tuple[int, int]] = []
    while len(pairs) < num_pairs:
        if len(pairs) < num_pairs // 2:
            two = rng.choice(rows[rng.choice(letters)], 2, replace=False)
        else:
            two = [rng.choice(rows[letter]) for letter in rng.choice(letters, 2, replace=False)]
        pair = (int(min(two)), int(max(two)))
        if pair not in used:
            used.add(pair)
            pairs.append(pair)
    return np.array(pairs)


def _generator(rng_key: jax.Array) -> np.random.Generator:
    return np.random.default_rng(np.asarray(jax.random.key_data(rng_key)).ravel().astype(np.uint32))


def standardize(features: np.ndarray) -> np.ndarray:
    """Give every column mean zero and variance one, except for columns of zeros and ones."""
    binary = np.all((features == 0) | (features == 1), axis=0)
    scaled = (features - features.mean(axis=0)) / np.maximum(features.std(axis=0), 1e-12)
    return np.where(binary, features, scaled).astype(np.float32)


def skewed_labels(
    rng_key: jax.Array,
    labels: np.ndarray,
    *,
    num_clients: int,
    rows_per_client: int,
    num_test: int,
    concentration: float,
) -> tuple[fedmcmc.FederatedData, np.ndarray]:
    """Draw row numbers, each at most once: by client, and held out with as many labels 0 as 1.

    The clients' shares of label 1 are ``Beta(concentration, concentration)``.

    Raises
    ------
    ValueError
        If there are too few rows of a label.
    """
    shares = np.asarray(jax.random.beta(rng_key, concentration, concentration, (num_clients,)))
    rng = _generator(jax.random.fold_in(rng_key, 1))
    pools = [rng.permutation(np.flatnonzero(labels == label)) for label in (0, 1)]
    ones = np.append(np.round(shares * rows_per_client), num_test // 2).astype(int)
    zeros = np.append(np.full(num_clients, rows_per_client), num_test) - ones
    for pool, counts in zip(pools, (zeros, ones), strict=True):
        if counts.sum() > len(pool):
            raise ValueError(
                f"clients and test need {counts.sum()} rows of a label that has {len(pool)}: "
                "lower num_clients or rows_per_client."
            )
    parts = [np.split(pools[0], np.cumsum(zeros)), np.split(pools[1], np.cumsum(ones))]
    rows = [rng.permutation(np.concatenate(two)) for two in zip(*parts, strict=True)]
    clients = [client.astype(np.int32) for client in rows[:num_clients]]
    return fedmcmc.FederatedData.from_clients(clients), rows[num_clients]
