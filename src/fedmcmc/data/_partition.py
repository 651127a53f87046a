"""Rows to clients: the splits that federated experiments are run on.

``from fedmcmc import partition``, or ``fedmcmc.partition.iid(...)``: it is a part of the room of
data and no module of the package's root, so that ``import fedmcmc.partition`` finds none.

Every function returns one client id per row, for `fedmcmc.FederatedData.from_arrays`. The split is
a function of the key alone: a NumPy generator is seeded with the key's words, on the host.
"""

from typing import Any

import jax
import numpy as np

from fedmcmc._checks import positive_integer


def iid(rng_key: jax.Array, num_rows: int, num_clients: int) -> np.ndarray:
    """Split rows at random into parts whose sizes differ by at most one.

    Parameters
    ----------
    rng_key
        A JAX key.
    num_rows, num_clients
        At least one row per client.

    Returns
    -------
    numpy.ndarray
        Client ids, ``[num_rows]`` int32.

    Examples
    --------
    >>> import jax
    >>> import numpy as np
    >>> np.bincount(iid(jax.random.key(0), 8, 3)).tolist()
    [3, 3, 2]
    """
    _check_counts(num_rows, num_clients)
    ids = np.arange(num_rows, dtype=np.int32) % num_clients
    return _generator(rng_key).permutation(ids)


def dirichlet(
    rng_key: jax.Array,
    labels: Any,
    num_clients: int,
    concentration: float,
    *,
    min_rows: int = 1,
    max_tries: int = 1000,
) -> np.ndarray:
    """Split each label's rows over the clients by a draw of symmetric Dirichlet proportions.

    Parameters
    ----------
    rng_key
        A JAX key.
    labels
        ``[num_rows]``, any values that can be compared.
    num_clients
        Number of clients.
    concentration
        Of the Dirichlet distribution; small values make clients differ, large ones make them
        alike.
    min_rows
        Proportions are drawn again until every client has this many rows.
    max_tries
        Draws before giving up.

    Returns
    -------
    numpy.ndarray
        Client ids, ``[num_rows]`` int32.

    Raises
    ------
    ValueError
        On numbers out of range, and if no draw gave every client `min_rows` rows.

    References
    ----------
    Hsu, Qi and Brown (2019), Measuring the effects of non-identical data distribution for
    federated visual classification; with proportions over clients for each label.

    Examples
    --------
    >>> import jax
    >>> import numpy as np
    >>> labels = np.repeat([0, 1], 50)
    >>> ids = dirichlet(jax.random.key(0), labels, 4, 0.5)
    >>> ids.shape, np.unique(ids).tolist()
    ((100,), [0, 1, 2, 3])
    """
    classes, labels = _check_labels(labels, num_clients)
    _check_positive(concentration=concentration)
    if min_rows * num_clients > labels.size or min_rows < 1:
        raise ValueError(
            f"min_rows must be at least 1 and fit {labels.size} rows over {num_clients} clients, "
            f"got {min_rows!r}."
        )
    rng = _generator(rng_key)
    for _ in range(max_tries):
        ids = np.empty(labels.size, np.int32)
        for label in range(len(classes)):
            rows = rng.permutation(np.flatnonzero(labels == label))
            shares = rng.dirichlet(np.full(num_clients, concentration))
            ids[rows] = _repeated_ids(_round_shares(shares, rows.size))
        if np.bincount(ids, minlength=num_clients).min() >= min_rows:
            return ids
    raise ValueError(
        f"None of {max_tries} draws gave each of {num_clients} clients {min_rows} rows; "
        f"concentration {concentration} is too small for {labels.size} rows."
    )


def dominant_label(
    rng_key: jax.Array, labels: Any, num_clients: int, proportion: float
) -> np.ndarray:
    """Give each client one label that dominates it, in parts of almost equal size.

    Client ``c`` has the ``c``-th label, counted round and round, as its dominant one. It first
    takes `proportion` of its rows from that label, as far as they last; what is left over is
    shuffled and fills the clients up.

    Parameters
    ----------
    rng_key
        A JAX key.
    labels
        ``[num_rows]``, any values that can be compared.
    num_clients
        Number of clients.
    proportion
        In ``[0, 1]``, of a client's rows that are taken from its dominant label first.

    Returns
    -------
    numpy.ndarray
        Client ids, ``[num_rows]`` int32; the sizes differ by at most one.

    Examples
    --------
    >>> import jax
    >>> import numpy as np
    >>> labels = np.repeat([0, 1], 50)
    >>> ids = dominant_label(jax.random.key(0), labels, 2, 0.8)
    >>> [bool(np.mean(labels[ids == c] == c) >= 0.8) for c in range(2)]
    [True, True]
    """
    classes, labels = _check_labels(labels, num_clients)
    if not 0 <= proportion <= 1:
        raise ValueError(f"proportion must lie in [0, 1], got {proportion!r}.")
    rng = _generator(rng_key)
    sizes = _equal_sizes(labels.size, num_clients)
    ids = np.full(labels.size, -1, np.int32)
    pools = [rng.permutation(np.flatnonzero(labels == label)) for label in range(len(classes))]
    for label, pool in enumerate(pools):
        clients = np.arange(label, num_clients, len(classes), dtype=np.int32)
        wanted = np.floor(proportion * sizes[clients]).astype(int)
        if wanted.sum() > pool.size:
            wanted = _round_shares(wanted / wanted.sum(), pool.size)
        ids[pool[: wanted.sum()]] = np.repeat(clients, wanted)
    rest = rng.permutation(np.flatnonzero(ids < 0))
    missing = sizes - np.bincount(ids[ids >= 0], minlength=num_clients)
    ids[rest] = _repeated_ids(missing)
    return ids


def disjoint_labels(rng_key: jax.Array, labels: Any, num_clients: int) -> np.ndarray:
    """Split so that no two clients share a label: labels are dealt out in random order.

    The numbers of labels per client differ by at most one; all rows of a label go together.

    Parameters
    ----------
    rng_key
        A JAX key.
    labels
        ``[num_rows]``, any values that can be compared; at least `num_clients` different ones.
    num_clients
        Number of clients.

    Returns
    -------
    numpy.ndarray
        Client ids, ``[num_rows]`` int32.

    Examples
    --------
    >>> import jax
    >>> import numpy as np
    >>> labels = np.array(list("aabbccdd"))
    >>> ids = disjoint_labels(jax.random.key(0), labels, 2)
    >>> set(labels[ids == 0]) & set(labels[ids == 1])
    set()
    """
    classes, labels = _check_labels(labels, num_clients)
    if len(classes) < num_clients:
        raise ValueError(
            f"{num_clients} clients cannot have disjoint labels: there are only {len(classes)}."
        )
    owner = _generator(rng_key).permutation(np.arange(len(classes), dtype=np.int32) % num_clients)
    return owner[labels]


def pachinko(
    rng_key: jax.Array,
    labels: Any,
    groups: Any,
    num_clients: int,
    *,
    group_concentration: float = 0.1,
    label_concentration: float = 10.0,
) -> np.ndarray:
    """Give each client labels from few groups of labels, in parts of almost equal size.

    A client draws proportions over the groups and, in each group, over its labels, from symmetric
    Dirichlet distributions; then each of its rows: a group, a label of it, a row of that label
    that nobody has yet. Labels and groups without rows left are left out, and proportions are
    scaled up.

    Parameters
    ----------
    rng_key
        A JAX key.
    labels, groups
        ``[num_rows]`` each: fine and coarse labels (CIFAR-100's classes and superclasses), any
        values that can be compared. Rows of one label must be of one group.
    num_clients
        Number of clients.
    group_concentration, label_concentration
        Of the Dirichlet distributions; the defaults are those of the federated CIFAR-100.

    Returns
    -------
    numpy.ndarray
        Client ids, ``[num_rows]`` int32; the sizes differ by at most one.

    References
    ----------
    Li and McCallum (2006), Pachinko allocation; Reddi et al. (2021), Adaptive federated
    optimization, appendix C.1.

    Examples
    --------
    >>> import jax
    >>> import numpy as np
    >>> labels = np.repeat(np.arange(6), 20)
    >>> ids = pachinko(jax.random.key(0), labels, labels // 3, 4)
    >>> np.bincount(ids).tolist()
    [30, 30, 30, 30]
    """
    classes, labels = _check_labels(labels, num_clients)
    coarse, groups = _check_labels(groups, 1)
    if groups.size != labels.size:
        raise ValueError(
            f"labels and groups must have equal lengths, got {labels.size} and {groups.size}."
        )
    _check_positive(
        group_concentration=group_concentration, label_concentration=label_concentration
    )
    pairs = np.unique(np.stack([labels, groups]), axis=1)
    if pairs.shape[1] != len(classes):
        twice = classes[pairs[0][:-1][np.diff(pairs[0]) == 0][0]]
        raise ValueError(f"Rows of one label must be of one group; label {twice} has several.")
    rng = _generator(rng_key)
    pools = [list(rng.permutation(np.flatnonzero(labels == i))) for i in range(len(classes))]
    left = np.array([len(pool) for pool in pools])
    members = [pairs[0][pairs[1] == group] for group in range(len(coarse))]
    ids = np.empty(labels.size, np.int32)
    for client, size in enumerate(_equal_sizes(labels.size, num_clients)):
        over_groups = rng.dirichlet(np.full(len(coarse), group_concentration))
        over_labels = np.zeros(len(classes))
        for inside in members:
            over_labels[inside] = rng.dirichlet(np.full(len(inside), label_concentration))
        for _ in range(size):
            rows = np.array([left[inside].sum() for inside in members])
            inside = members[_one_of(rng, over_groups, rows)]
            label = inside[_one_of(rng, over_labels[inside], left[inside])]
            ids[pools[label].pop()] = client
            left[label] -= 1
    return ids


def _one_of(rng: np.random.Generator, proportions: np.ndarray, left: np.ndarray) -> int:
    """Draw by `proportions` from what has rows left; by these where the proportions vanish."""
    weights = np.where(left > 0, proportions, 0.0)
    if not weights.sum() > 0:
        weights = left.astype(float)
    return int(np.searchsorted(np.cumsum(weights), rng.random() * weights.sum(), side="right"))


def quantity_skew(
    rng_key: jax.Array, num_rows: int, num_clients: int, concentration: float = 1.0
) -> np.ndarray:
    """Split rows at random into parts of unequal size, by symmetric Dirichlet shares.

    Every client gets one row; the others are shared out in the drawn proportions.

    Parameters
    ----------
    rng_key
        A JAX key.
    num_rows, num_clients
        At least one row per client.
    concentration
        Of the Dirichlet distribution of the clients' shares; small values make sizes differ.

    Returns
    -------
    numpy.ndarray
        Client ids, ``[num_rows]`` int32.

    Examples
    --------
    >>> import jax
    >>> import numpy as np
    >>> sizes = np.bincount(quantity_skew(jax.random.key(0), 100, 4, concentration=0.5))
    >>> int(sizes.sum()), bool(sizes.min() >= 1)
    (100, True)
    """
    _check_counts(num_rows, num_clients)
    _check_positive(concentration=concentration)
    rng = _generator(rng_key)
    shares = rng.dirichlet(np.full(num_clients, concentration))
    sizes = 1 + _round_shares(shares, num_rows - num_clients)
    return rng.permutation(_repeated_ids(sizes))


def _generator(rng_key: jax.Array) -> np.random.Generator:
    typed = jax.numpy.issubdtype(rng_key.dtype, jax.dtypes.prng_key)
    words = np.asarray(jax.random.key_data(rng_key) if typed else rng_key)
    return np.random.default_rng(words.ravel().astype(np.uint32))


def _repeated_ids(sizes: np.ndarray) -> np.ndarray:
    return np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)


def _round_shares(shares: np.ndarray, total: int) -> np.ndarray:
    """Whole numbers near ``shares * total`` that sum to `total`; each is off by less than one."""
    ends = np.round(np.cumsum(shares) / np.sum(shares) * total).astype(int)
    return np.diff(ends, prepend=0)


def _equal_sizes(num_rows: int, num_clients: int) -> np.ndarray:
    return num_rows // num_clients + (np.arange(num_clients) < num_rows % num_clients)


def _check_counts(num_rows: int, num_clients: int) -> None:
    positive_integer(num_rows, "num_rows")
    positive_integer(num_clients, "num_clients")
    if num_rows < num_clients:
        raise ValueError(f"{num_rows} rows cannot give each of {num_clients} clients one row.")


def _check_positive(**numbers: float) -> None:
    for name, number in numbers.items():
        if not number > 0:
            raise ValueError(f"{name} must be positive, got {number!r}.")


def _check_labels(labels: Any, num_clients: int) -> tuple[np.ndarray, np.ndarray]:
    labels = np.asarray(labels)
    if labels.ndim != 1:
        raise ValueError(f"labels must be one per row, shape (num_rows,), got {labels.shape}.")
    _check_counts(labels.size, num_clients)
    return np.unique(labels, return_inverse=True)
