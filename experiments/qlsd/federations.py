"""The federations of Vono et al. (2022): rows and who has them; `image_federations` has images.

Where the released notebooks draw data with NumPy's legacy generator, so does this module, with
the same calls in the same order, so that the same seed gives the same data. They set the seed
anew before each draw of the synthetic rows and of a client's images, which makes clients alike;
``shared_seed=True`` selects that.
"""

from typing import NamedTuple

import jax
import numpy as np

import fedmcmc
from experiments.data import Table
from experiments.shards import standardize

__all__ = [
    "SEED",
    "Federation",
    "GaussianFederation",
    "Rows",
    "covertype",
    "gaussian",
    "label_dirichlet",
    "labelled",
    "some_rows",
    "synthetic",
]

SEED = 1994
"""The seed of the released notebooks."""

WILDERNESS = slice(10, 14)  # columns of covertype


class Rows(NamedTuple):
    """Labelled rows: `features` ``[num, ...]`` and `label` ``[num]`` int32."""

    features: np.ndarray
    label: np.ndarray


class Federation(NamedTuple):
    """Rows to learn from, by client, and rows held out."""

    data: fedmcmc.FederatedData
    test: Rows


class GaussianFederation(NamedTuple):
    """Rows ``[num_rows, d]`` by client and the posterior ``N(mean, I / precision)``."""

    data: fedmcmc.FederatedData
    mean: np.ndarray
    precision: float


def gaussian(
    num_clients: int = 20,
    dim: int = 50,
    *,
    spread: float = 5.0,
    seed: int = SEED,
    times: int = 1,
) -> GaussianFederation:
    """Draw clients of 10 to 199 rows ``y ~ N(mu_i, I)`` with ``mu_i ~ N(0, spread^2 I)``.

    The potential of a row is ``|theta - y|^2 / 2`` and the prior is flat. Clients have `times` as
    many rows.
    """
    sizes = np.random.RandomState(seed).randint(10, 200, num_clients) * times
    rng = np.random.RandomState(seed)
    clients = []
    for size in sizes:
        centre = rng.normal(np.zeros(dim), spread)
        clients.append(rng.normal(centre, 1.0, (size, dim)).astype(np.float32))
    # The posterior of the rows as they are stored.
    mean = np.concatenate(clients).mean(axis=0, dtype=np.float64)
    data = fedmcmc.FederatedData.from_clients(clients)
    return GaussianFederation(data, mean, float(sizes.sum()))


def synthetic(
    alpha: float = 1.0,
    beta: float = 1.0,
    *,
    num_clients: int = 20,
    dim: int = 10,
    num_classes: int = 2,
    train_share: float = 0.9,
    seed: int = SEED,
    shared_seed: bool = False,
) -> Federation:
    """Draw Synthetic(alpha, beta) of Li et al. (2018): clients of 10 to 49 rows.

    ``u_i ~ N(0, alpha^2)``, ``B_i ~ N(0, beta^2)``, ``v_i ~ N(B_i, I)``,
    ``x ~ N(v_i, diag(j^-1.2))``, ``W_i ~ N(u_i, 1)``, ``b_i ~ N(u_i, 1)``, ``y = argmax(W_i'x +
    b_i)``. As ``u_i`` moves all classes alike, labels do not depend on `alpha`.

    Parameters
    ----------
    alpha, beta
        Standard deviations.
    num_clients, dim, num_classes
        Sizes.
    train_share
        Of a client's rows, rounded down; the others are held out.
    seed
        Decides all.
    shared_seed
        Whether the seed is set anew before each draw, as in the released notebooks: then
        ``u_i = B_i`` where `alpha` is `beta`, and all clients share the noise of ``v``, ``W``,
        ``b`` and ``x``. Otherwise all draws are independent.
    """
    rng = np.random.RandomState(seed)

    def fresh() -> np.random.RandomState:
        if shared_seed:
            rng.seed(seed)
        return rng

    sizes = fresh().randint(10, 50, num_clients)
    model_means = fresh().normal(0, alpha, num_clients)
    row_means = fresh().normal(0, beta, num_clients)
    covariance = np.diag(np.arange(1.0, dim + 1) ** -1.2)
    centres = [fresh().normal(mean, 1, dim) for mean in row_means]
    drawn = []
    for size, model_mean, centre in zip(sizes, model_means, centres, strict=True):
        weight = fresh().normal(model_mean, 1, (dim, num_classes))
        bias = fresh().normal(model_mean, 1, num_classes)
        features = fresh().multivariate_normal(centre, covariance, size)
        drawn.append((features.astype(np.float32), (features @ weight + bias).argmax(axis=1)))
    clients, held_out = [], []
    for features, labels in drawn:
        order, num = rng.permutation(len(labels)), int(train_share * len(labels))
        clients.append(labelled(features[order[:num]], labels[order[:num]]))
        held_out.append(labelled(features[order[num:]], labels[order[num:]]))
    test = Rows(*(np.concatenate(column) for column in zip(*held_out, strict=True)))
    return Federation(fedmcmc.FederatedData.from_clients(clients), test)


def covertype(
    rng_key: jax.Array,
    table: Table,
    *,
    split: str = "wilderness",
    num_clients: int = 4,
    num_rows: int = 10_000,
    num_test: int = 2_000,
    binary: bool = True,
) -> Federation:
    """Split covertype for logistic regression (the paper states no settings).

    Features get mean zero and variance one over the rows taken, except indicators, and a last
    column of ones. Indicators of the wilderness and of the soil sum to one, so that only a proper
    prior gives a proper posterior.

    Parameters
    ----------
    rng_key
        Decides which rows are taken, and the split.
    table
        Of `experiments.data.covtype`.
    split
        ``"wilderness"``: the four wilderness areas, in the table's order, are the clients;
        ``"labels"``: `num_clients` by `label_dirichlet`.
    num_clients
        Of the split by labels.
    num_rows, num_test
        How many rows are learnt from and held out.
    binary
        Whether the label is 1 for class 2 (lodgepole pine, 49 %) and 0 else, or the class minus
        one.
    """
    row_key, split_key = jax.random.split(rng_key)
    rows = some_rows(row_key, len(table.labels), num_rows + num_test)
    classes = table.labels[rows]
    labels = (classes == 2).astype(np.int32) if binary else classes - 1
    areas = table.features[rows, WILDERNESS]
    if not np.array_equal(areas.sum(axis=1), np.ones(len(rows))):
        raise ValueError(f"columns {WILDERNESS} of the table must indicate the wilderness area.")
    scaled = standardize(table.features[rows])
    features = np.concatenate([scaled, np.ones((len(rows), 1), np.float32)], axis=1)
    if split == "wilderness":
        ids = areas[:num_rows].argmax(axis=1)
    elif split == "labels":
        ids = label_dirichlet(split_key, labels[:num_rows], num_clients)
    else:
        raise ValueError(f"split must be 'wilderness' or 'labels', got {split!r}.")
    train = labelled(features[:num_rows], labels[:num_rows])
    data = fedmcmc.FederatedData.from_arrays(train, ids)
    return Federation(data, labelled(features[num_rows:], labels[num_rows:]))


def label_dirichlet(rng_key: jax.Array, labels: np.ndarray, num_clients: int) -> np.ndarray:
    """Return client ids ``[num_rows]``: each label dealt in proportions of its own.

    The split of Plassier et al. (2021, 2023): for each label, ``p ~ U[0, 1]^b`` and shares
    ``~ Dirichlet(p)``; a client takes ``1 + round((n - b) share)`` consecutive rows of it, as far
    as they last, and the last client what remains.
    """
    words = np.asarray(jax.random.key_data(rng_key)).ravel().astype(np.uint32)
    rng = np.random.default_rng(words)
    ids = np.empty(len(labels), np.int32)
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        if len(rows) < num_clients:
            raise ValueError(
                f"label {label} has {len(rows)} rows, fewer than one for each of {num_clients} "
                f"clients."
            )
        shares = rng.dirichlet(rng.uniform(size=num_clients))
        wanted = 1 + np.round((len(rows) - num_clients) * shares).astype(int)
        ends = np.minimum(np.cumsum(wanted), len(rows))
        ends[-1] = len(rows)
        ids[rows] = np.repeat(np.arange(num_clients), np.diff(ends, prepend=0))
    return ids


def labelled(features: np.ndarray, labels: np.ndarray) -> Rows:
    """Return rows with labels of the type that they have everywhere."""
    return Rows(features, labels.astype(np.int32))


def some_rows(rng_key: jax.Array, total: int, num: int | None) -> np.ndarray:
    """Return `num` of `total` row numbers at random, in random order; all in order for ``None``."""
    if num is None:
        return np.arange(total)
    if not 0 < num <= total:
        raise ValueError(f"cannot take {num} of {total} rows.")
    return np.asarray(jax.random.permutation(rng_key, total)[:num])
