"""Random splits of rows over clients, for federated experiments.

Use ``from fedmcmc import partition`` or ``fedmcmc.partition.iid(...)``. There is no module
``fedmcmc.partition`` to import.

Each function returns client ids, ``[num_rows]`` int32, for `fedmcmc.FederatedData.from_arrays`. The
split depends only on the arguments: `rng_key`, a JAX key, seeds a NumPy generator on the host.
`labels` are ``[num_rows]`` values that can be compared.
"""

import jax
import numpy as np

from fedmcmc._checks import check_positive_numbers, positive_integer


def iid(rng_key: jax.Array, num_rows: int, num_clients: int) -> np.ndarray:
    """Split rows at random into parts whose sizes differ by at most one.

    Returns client ids, ``[num_rows]`` int32, from a JAX key and the numbers of rows and clients.

    Examples
    --------
    >>> import jax
    >>> import numpy as np
    >>> np.bincount(iid(jax.random.key(0), 8, 3)).tolist()
    [3, 3, 2]
    """
    _check_counts(num_rows, num_clients)
    ids = np.arange(num_rows, dtype=np.int32) % num_clients
    return _seed_generator(rng_key).permutation(ids)


def dirichlet(
    rng_key: jax.Array,
    labels: object,
    num_clients: int,
    concentration: float,
    *,
    min_rows: int = 1,
    max_tries: int = 1000,
) -> np.ndarray:
    """Split each label's rows over the clients by a draw of symmetric Dirichlet proportions.

    Returns client ids, ``[num_rows]`` int32.

    Parameters
    ----------
    rng_key, labels, num_clients
        JAX key, labels of rows and number of clients.
    concentration
        Concentration of the Dirichlet distribution; clients differ more for smaller values.
    min_rows
        Minimal number of rows per client. Proportions are drawn again until all clients have it.
    max_tries
        Maximal number of draws of the proportions.

    Raises
    ------
    ValueError
        If an argument is out of range, or no draw gives each client `min_rows` rows.

    References
    ----------
    Hsu et al. (2019), Measuring the effects of non-identical data distribution for
    federated visual classification (arXiv:1909.06335). Here proportions over clients are drawn for
    each label.

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
    check_positive_numbers(concentration=concentration)
    if min_rows * num_clients > labels.size or min_rows < 1:
        raise ValueError(
            f"min_rows must be at least 1 and fit {labels.size} rows over {num_clients} clients, "
            f"got {min_rows!r}."
        )
    rng = _seed_generator(rng_key)
    for _ in range(max_tries):
        ids = np.empty(labels.size, np.int32)
        for label in range(len(classes)):
            rows = rng.permutation(np.flatnonzero(labels == label))
            shares = rng.dirichlet(np.full(num_clients, concentration))
            ids[rows] = _repeat_ids(_round_shares(shares, rows.size))
        if np.bincount(ids, minlength=num_clients).min() >= min_rows:
            return ids
    raise ValueError(
        f"None of {max_tries} draws gave each of {num_clients} clients {min_rows} rows; "
        f"concentration {concentration} is too small for {labels.size} rows."
    )


def dominant_label(
    rng_key: jax.Array, labels: object, num_clients: int, proportion: float
) -> np.ndarray:
    """Give each client one dominant label, in parts whose sizes differ by at most one.

    The dominant label of client ``c`` has the number ``c`` modulo the number of labels. A client
    gets the fraction `proportion` of its rows from this label, or fewer if the label has too few
    rows. The remaining rows are shuffled and fill the clients. Returns client ids, ``[num_rows]``
    int32.

    Parameters
    ----------
    rng_key, labels, num_clients
        JAX key, labels of rows and number of clients.
    proportion
        Fraction of a client's rows, in ``[0, 1]``.

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
    rng = _seed_generator(rng_key)
    sizes = _split_equally(labels.size, num_clients)
    ids = np.full(labels.size, -1, np.int32)
    pools = [rng.permutation(np.flatnonzero(labels == label)) for label in range(len(classes))]
    for label, pool in enumerate(pools):
        clients = np.arange(label, num_clients, len(classes), dtype=np.int32)
        counts = np.floor(proportion * sizes[clients]).astype(int)
        if counts.sum() > pool.size:
            counts = _round_shares(counts / counts.sum(), pool.size)
        ids[pool[: counts.sum()]] = np.repeat(clients, counts)
    remaining = rng.permutation(np.flatnonzero(ids < 0))
    missing = sizes - np.bincount(ids[ids >= 0], minlength=num_clients)
    ids[remaining] = _repeat_ids(missing)
    return ids


def disjoint_labels(rng_key: jax.Array, labels: object, num_clients: int) -> np.ndarray:
    """Assign each label with all its rows to one random client.

    Numbers of labels per client differ by at most one, and there must be at least `num_clients`
    different `labels`, ``[num_rows]``. Returns client ids, ``[num_rows]`` int32.

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
    owner = _seed_generator(rng_key).permutation(
        np.arange(len(classes), dtype=np.int32) % num_clients
    )
    return owner[labels]


def pachinko(
    rng_key: jax.Array,
    labels: object,
    groups: object,
    num_clients: int,
    *,
    group_concentration: float = 0.1,
    label_concentration: float = 10.0,
) -> np.ndarray:
    """Give each client labels from few groups of labels, in parts that differ by at most one row.

    A client draws proportions over groups, and over the labels of each group, from symmetric
    Dirichlet distributions. It then draws each of its rows: a group, a label of the group, and an
    unassigned row of the label. Proportions are rescaled to labels and groups with unassigned rows.
    Returns client ids, ``[num_rows]`` int32.

    Parameters
    ----------
    rng_key, num_clients
        JAX key and number of clients.
    labels, groups
        Fine and coarse labels of rows, ``[num_rows]`` each, such as CIFAR-100's classes and
        superclasses. Rows of one label must be in one group.
    group_concentration, label_concentration
        Concentrations of the Dirichlet distributions, by default as for the federated CIFAR-100.

    References
    ----------
    Li and McCallum (2006), Pachinko allocation; Reddi et al. (2021), Adaptive federated
    optimization, appendix C.1 (arXiv:2003.00295).

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
    check_positive_numbers(
        group_concentration=group_concentration, label_concentration=label_concentration
    )
    pairs = np.unique(np.stack([labels, groups]), axis=1)
    if pairs.shape[1] != len(classes):
        repeated = classes[pairs[0][:-1][np.diff(pairs[0]) == 0][0]]
        raise ValueError(f"Rows of one label must be in one group; label {repeated} has several.")
    rng = _seed_generator(rng_key)
    pools = [list(rng.permutation(np.flatnonzero(labels == i))) for i in range(len(classes))]
    num_left = np.array([len(pool) for pool in pools])
    members = [pairs[0][pairs[1] == group] for group in range(len(coarse))]
    ids = np.empty(labels.size, np.int32)
    for client, size in enumerate(_split_equally(labels.size, num_clients)):
        over_groups = rng.dirichlet(np.full(len(coarse), group_concentration))
        over_labels = np.zeros(len(classes))
        for inside in members:
            over_labels[inside] = rng.dirichlet(np.full(len(inside), label_concentration))
        for _ in range(size):
            num_in_groups = np.array([num_left[inside].sum() for inside in members])
            inside = members[_draw(rng, over_groups, num_in_groups)]
            label = inside[_draw(rng, over_labels[inside], num_left[inside])]
            ids[pools[label].pop()] = client
            num_left[label] -= 1
    return ids


def _draw(rng: np.random.Generator, proportions: np.ndarray, num_left: np.ndarray) -> int:
    """Draw an index with rows left by `proportions`, or by `num_left` if all proportions vanish."""
    weights = np.where(num_left > 0, proportions, 0.0)
    if not weights.sum() > 0:
        weights = num_left.astype(float)
    return int(np.searchsorted(np.cumsum(weights), rng.random() * weights.sum(), side="right"))


def quantity_skew(
    rng_key: jax.Array, num_rows: int, num_clients: int, concentration: float = 1.0
) -> np.ndarray:
    """Split rows at random into parts of unequal size, by symmetric Dirichlet shares.

    Each client gets at least one row. Returns client ids, ``[num_rows]`` int32.

    Parameters
    ----------
    rng_key, num_rows, num_clients
        JAX key and numbers of rows and clients.
    concentration
        Concentration of the Dirichlet distribution; sizes differ more for smaller values.

    Examples
    --------
    >>> import jax
    >>> import numpy as np
    >>> sizes = np.bincount(quantity_skew(jax.random.key(0), 100, 4, concentration=0.5))
    >>> int(sizes.sum()), bool(sizes.min() >= 1)
    (100, True)
    """
    _check_counts(num_rows, num_clients)
    check_positive_numbers(concentration=concentration)
    rng = _seed_generator(rng_key)
    shares = rng.dirichlet(np.full(num_clients, concentration))
    sizes = 1 + _round_shares(shares, num_rows - num_clients)
    return rng.permutation(_repeat_ids(sizes))


def _seed_generator(rng_key: jax.Array) -> np.random.Generator:
    typed = jax.numpy.issubdtype(rng_key.dtype, jax.dtypes.prng_key)
    words = np.asarray(jax.random.key_data(rng_key) if typed else rng_key)
    return np.random.default_rng(words.ravel().astype(np.uint32))


def _repeat_ids(sizes: np.ndarray) -> np.ndarray:
    return np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)


def _round_shares(shares: np.ndarray, total: int) -> np.ndarray:
    """Round ``shares * total`` to integers that sum to `total`, each by less than one."""
    ends = np.round(np.cumsum(shares) / np.sum(shares) * total).astype(int)
    return np.diff(ends, prepend=0)


def _split_equally(num_rows: int, num_clients: int) -> np.ndarray:
    return num_rows // num_clients + (np.arange(num_clients) < num_rows % num_clients)


def _check_counts(num_rows: int, num_clients: int) -> None:
    positive_integer(num_rows, "num_rows")
    positive_integer(num_clients, "num_clients")
    if num_rows < num_clients:
        raise ValueError(f"{num_rows} rows cannot give each of {num_clients} clients one row.")


def _check_labels(labels: object, num_clients: int) -> tuple[np.ndarray, np.ndarray]:
    labels = np.asarray(labels)
    if labels.ndim != 1:
        raise ValueError(f"labels must be one per row, shape (num_rows,), got {labels.shape}.")
    _check_counts(labels.size, num_clients)
    return np.unique(labels, return_inverse=True)
