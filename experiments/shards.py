"""Clients of El Mekkaoui et al. (2021) and Vono et al. (2022), by row numbers or as rows."""

import jax
import numpy as np

import fedmcmc
from fedmcmc import partition


def some_rows(rng_key: jax.Array, total: int, num: int | None) -> np.ndarray:
    """Return `num` of `total` row numbers at random, in random order; all in order for ``None``."""
    if num is None:
        return np.arange(total)
    if not 0 < num <= total:
        raise ValueError(f"cannot take {num} of {total} rows.")
    return np.asarray(jax.random.permutation(rng_key, total)[:num])


def _generator(rng_key: jax.Array) -> np.random.Generator:
    return np.random.default_rng(np.asarray(jax.random.key_data(rng_key)).ravel().astype(np.uint32))


def label_dirichlet(rng_key: jax.Array, labels: np.ndarray, num_clients: int) -> np.ndarray:
    """Return client ids ``[num_rows]``: the shares of each label are Dirichlet.

    The split of Plassier et al. (2021, 2023): for each label, ``p ~ U[0, 1]^b`` and shares
    ``~ Dirichlet(p)``; a client takes ``1 + round((n - b) share)`` consecutive rows of it, as far
    as they last, and the last client what remains.
    """
    rng = _generator(rng_key)
    ids = np.empty(len(labels), np.int32)
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        if len(rows) < num_clients:
            raise ValueError(f"label {label} has {len(rows)} rows for {num_clients} clients.")
        shares = rng.dirichlet(rng.uniform(size=num_clients))
        counts = 1 + np.round((len(rows) - num_clients) * shares).astype(int)
        ends = np.minimum(np.cumsum(counts), len(rows))
        ends[-1] = len(rows)
        ids[rows] = np.repeat(np.arange(num_clients), np.diff(ends, prepend=0))
    return ids


def femnist_star(
    labels: np.ndarray, num_clients: int, seed: int, shared_seed: bool = False
) -> list[np.ndarray]:
    """Return row numbers of the clients of FEMNIST*: 20 to 99 each, from pools that overlap.

    Rows are sorted by label and cut into 26 groups of `num_clients` chunks of equal size; the rest
    is not used. A client picks 20 groups and 6 of these again, a random chunk each time, and draws
    its rows from this pool without replacement. So clients share rows, and one may hold a row
    twice. With `shared_seed`, as in the released notebooks, all clients draw the same places of
    their pools.
    """
    sizes = np.random.RandomState(seed).randint(20, 100, num_clients)
    rng = np.random.RandomState(seed)
    chunk_size = len(labels) // (26 * num_clients)
    used = np.argsort(labels, kind="stable")[: 26 * num_clients * chunk_size]
    chunks = used.reshape(26, num_clients, chunk_size)
    picked = [rng.choice(26, 20, False) for _ in range(num_clients)]
    again = [rng.choice(groups, 6, False) for groups in picked]
    pools = [
        np.concatenate([chunks[g, rng.choice(num_clients)] for g in np.concatenate(groups)])
        for groups in zip(picked, again, strict=True)
    ]
    if max(sizes) > 26 * chunk_size:
        raise ValueError(
            f"a client needs {max(sizes)} images and its pool has {26 * chunk_size}: give more "
            f"images (got {len(labels)}) or fewer clients (got {num_clients})."
        )
    draws = (np.random.RandomState(seed) if shared_seed else rng for _ in pools)
    return [d.choice(pool, size, False) for d, pool, size in zip(draws, pools, sizes, strict=True)]


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
    """Draw different pairs of utterances, half of them of one letter; clients share no letter.

    The column `features` has squared differences over ``num_components`` times their mean, which
    bounds the curvature of a row by about one third; `sign` is 1 for the same letter, else -1.
    """
    client_key, pair_key = jax.random.split(rng_key)
    owner = partition.disjoint_labels(client_key, labels, num_clients)
    letters = [np.unique(labels[owner == client]) for client in range(num_clients)]
    if min(map(len, letters)) < 2:
        raise ValueError(f"{num_clients} clients do not have two letters each: lower num_clients.")
    counts = [pairs_per_client] * num_clients + [num_test]
    rng, pairs = _generator(pair_key), dict[tuple[int, int], int]()  # signs
    for chosen, num in zip([*letters, np.unique(labels)], counts, strict=True):
        rows = {letter: np.flatnonzero(labels == letter) for letter in chosen}
        half, end = len(pairs) + num // 2, len(pairs) + num
        while len(pairs) < end:
            sign = 1 if len(pairs) < half else -1
            if sign == 1:
                two = rng.choice(rows[rng.choice(chosen)], 2, replace=False)
            else:
                two = [rng.choice(rows[letter]) for letter in rng.choice(chosen, 2, replace=False)]
            pairs.setdefault((int(min(two)), int(max(two))), sign)
    left, right = np.array(list(pairs)).T
    squares = (projected[left] - projected[right]) ** 2
    train, test = slice(-num_test), slice(-num_test, None)
    features = squares / (squares.shape[1] * squares[train].mean(axis=0))
    columns = {"features": features, "sign": np.array(list(pairs.values()))}
    columns = {name: column.astype(np.float32) for name, column in columns.items()}
    owners = np.repeat(np.arange(num_clients), pairs_per_client)
    data = fedmcmc.FederatedData.from_arrays({k: x[train] for k, x in columns.items()}, owners)
    return data, {name: column[test] for name, column in columns.items()}


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
    """
    shares = np.asarray(jax.random.beta(rng_key, concentration, concentration, (num_clients,)))
    rng = _generator(jax.random.fold_in(rng_key, 1))
    pools = [rng.permutation(np.flatnonzero(labels == label)) for label in (0, 1)]
    ones = np.append(np.round(shares * rows_per_client), num_test // 2).astype(int)
    zeros = np.append(np.full(num_clients, rows_per_client), num_test) - ones
    parts = []
    for pool, counts in zip(pools, (zeros, ones), strict=True):
        if counts.sum() > len(pool):
            raise ValueError(
                f"clients and test need {counts.sum()} rows of a label that has {len(pool)}: "
                "lower num_clients or rows_per_client."
            )
        parts.append(np.split(pool, np.cumsum(counts))[:-1])
    *clients, test = (rng.permutation(np.concatenate(two)) for two in zip(*parts, strict=True))
    data = fedmcmc.FederatedData.from_clients([client.astype(np.int32) for client in clients])
    return data, test
