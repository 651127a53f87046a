"""Federations for ``data=``: functions that return rows by client, and rows held out.

Each returns ``(data, test)``: a `fedmcmc.FederatedData` whose rows are a dict of columns, and the
same columns of held-out rows, or ``None``. A classification has the columns ``features`` and
``label``. A loader of your own may also return a `fedmcmc.FederatedData` alone.
"""

import dataclasses
from typing import Any, Literal

import jax
import numpy as np

import fedmcmc
from experiments import data as tables
from experiments import images
from experiments.qlsd.federations import some_rows
from fedmcmc import partition

__all__ = [
    "Loaded",
    "cifar100",
    "columns",
    "contraception",
    "covtype",
    "emnist62",
    "exam",
    "femnist_star",
    "funnel",
    "gaussian",
    "gaussian_shards",
    "heart_disease",
    "image_classes",
    "immunization",
    "indomethacin",
    "label_dirichlet",
    "letter_pairs",
    "quadratic",
    "radon",
    "schools",
    "spherical",
    "stack_overflow",
    "susy",
    "synthetic",
    "tags",
]

Loaded = tuple[fedmcmc.FederatedData, Any]
Split = Literal["iid", "dominant_label", "dirichlet", "disjoint_labels", "quantity_skew", "blocks"]


def columns(federation: Any) -> Loaded:
    """Return a federation of named tuples as one of dicts, and its held-out rows too."""
    rows, test = federation[0], federation[1]
    if hasattr(rows.rows, "_asdict"):
        rows = dataclasses.replace(rows, rows=rows.rows._asdict())
    return rows, test._asdict() if hasattr(test, "_asdict") else test


def covtype(
    split: Literal["wilderness", "labels"] = "wilderness",
    num_clients: int = 4,
    num_rows: int = 10_000,
    num_test: int = 2_000,
    binary: bool = True,
    seed: int = 0,
) -> Loaded:
    """Return rows of covertype at random, by wilderness area or by `label_dirichlet`.

    Features get mean zero and variance one over these rows, except indicators, and a last column
    of ones. The label is one for class 2 (lodgepole pine, 49 %), or the class minus one.
    """
    from experiments.fsgld.mlp_model import standardise

    table = tables.covtype()
    row_key, split_key = jax.random.split(jax.random.key(seed))
    chosen = some_rows(row_key, len(table.labels), num_rows + num_test)
    label = table.labels[chosen] == 2 if binary else table.labels[chosen] - 1
    areas = table.features[chosen[:num_rows], 10:14]  # indicators of the wilderness
    features = np.c_[standardise(table.features[chosen]), np.ones(len(chosen), np.float32)]
    rows = {"features": features, "label": label.astype(np.int32)}
    parts = (slice(num_rows), slice(num_rows, None))
    train, test = ({name: x[part] for name, x in rows.items()} for part in parts)
    by_label = split == "labels"
    ids = label_dirichlet(split_key, train["label"], num_clients) if by_label else areas.argmax(1)
    return fedmcmc.FederatedData.from_arrays(train, ids), test


def label_dirichlet(rng_key: jax.Array, labels: np.ndarray, num_clients: int) -> np.ndarray:
    """Return client ids ``[num_rows]``: the shares of each label are Dirichlet.

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
            raise ValueError(f"label {label} has {len(rows)} rows for {num_clients} clients.")
        shares = rng.dirichlet(rng.uniform(size=num_clients))
        counts = 1 + np.round((len(rows) - num_clients) * shares).astype(int)
        ends = np.minimum(np.cumsum(counts), len(rows))
        ends[-1] = len(rows)
        ids[rows] = np.repeat(np.arange(num_clients), np.diff(ends, prepend=0))
    return ids


def susy(
    num_clients: int = 30,
    rows_per_client: int = 90_000,
    num_test: int = 10_000,
    concentration: float = 0.5,
    seed: int = 0,
) -> Loaded:
    """Return SUSY in clients whose shares of positive labels are drawn from a Beta."""
    from experiments.fsgld import mlp_model

    table = tables.susy()
    shards = mlp_model.make_shards(
        jax.random.key(seed),
        table.labels,
        num_shards=num_clients,
        rows_per_shard=rows_per_client,
        num_test=num_test,
        num_evaluated=1,
        concentration=concentration,
    )
    features = mlp_model.standardise(table.features)
    train, test = (
        {"features": features[rows], "label": table.labels[rows]}
        for rows in (np.asarray(shards.data.rows), shards.test)
    )
    return dataclasses.replace(shards.data, rows=train), test


def letter_pairs(
    num_clients: int = 10,
    pairs_per_client: int = 1_000,
    num_test: int = 1_000,
    num_components: int = 10,
    seed: int = 0,
) -> Loaded:
    """Return pairs of ISOLET's utterances (`features`, `sign`); clients share no letter."""
    from experiments.fsgld import metric_data

    table = tables.isolet()
    projected = metric_data.project(table, num_components)
    counts = dict(num_shards=num_clients, pairs_per_shard=pairs_per_client, test_pairs=num_test)
    key = jax.random.key(seed)
    shards, test = metric_data.make_pairs(key, projected, table.labels, **counts)
    return columns((fedmcmc.FederatedData.from_clients(shards), test))


def image_classes(
    name: Literal[
        "mnist", "small_digits", "fashion_mnist", "kmnist", "cifar10", "cifar2", "emnist_digits"
    ],
    split: Split = "iid",
    num_clients: int = 10,
    num_rows: int | None = None,
    num_test: int | None = None,
    flat: bool = True,
    shrink: int = 1,
    concentration: float = 0.3,
    proportion: float = 0.5,
    seed: int = 0,
) -> Loaded:
    """Return standardized images of ten classes (`cifar2`: of two).

    Parameters
    ----------
    name
        Images of `experiments.images`, or airplanes and automobiles of CIFAR-10.
    split
        How images are spread over clients: `fedmcmc.partition`, or `blocks` in their order.
    num_clients, num_rows, num_test
        Counts; rows are taken at random, ``None`` takes all.
    flat
        Whether rows are vectors; else images ``[height, width, channels]``.
    shrink
        Side of the squares of pixels that are averaged.
    concentration, proportion
        Of the splits `dirichlet` and `quantity_skew`, and of `dominant_label`.
    seed
        Seed of the rows and the split.
    """
    from experiments.fa_hmc import image_data
    from experiments.fed_ep.federations import _shrunk

    by_name = {"cifar2": image_data.cifar2, "kmnist": image_data.kmnist}
    pictures = by_name[name]()[0] if name in by_name else getattr(images, name)()
    row_key, test_key, split_key = jax.random.split(jax.random.key(seed), 3)
    moments = images.CIFAR10_MOMENTS if name.startswith("cifar") else images.MNIST_MOMENTS

    def taken(x: np.ndarray, y: np.ndarray, key: jax.Array, num: int | None) -> dict[str, Any]:
        rows = np.sort(some_rows(key, len(y), num))
        pixels = images.scale_pixels(x[rows], "standard", moments)
        pixels = _shrunk(pixels if pixels.ndim == 4 else pixels[..., None], shrink)
        return {"features": pixels.reshape(len(rows), -1) if flat else pixels, "label": y[rows]}

    train = taken(pictures.x_train, pictures.y_train, row_key, num_rows)
    labels, total = train["label"], len(train["label"])
    ids = {
        "iid": lambda: partition.iid(split_key, total, num_clients),
        "blocks": lambda: np.arange(total) * num_clients // total,
        "dominant_label": lambda: partition.dominant_label(
            split_key, labels, num_clients, proportion
        ),
        "dirichlet": lambda: partition.dirichlet(split_key, labels, num_clients, concentration),
        "disjoint_labels": lambda: partition.disjoint_labels(split_key, labels, num_clients),
        "quantity_skew": lambda: partition.quantity_skew(
            split_key, total, num_clients, concentration
        ),
    }[split]()
    test = taken(pictures.x_test, pictures.y_test, test_key, num_test)
    return fedmcmc.FederatedData.from_arrays(train, ids), test


def femnist_star(
    name: Literal["mnist", "small_digits", "emnist_digits"] = "mnist",
    num_clients: int = 10,
    num_test: int | None = None,
    shared_seed: bool = False,
    seed: int = 1994,
) -> Loaded:
    """Return FEMNIST* of Vono et al. (2022): `experiments.qlsd.image_federations.digits`."""
    from experiments.qlsd import image_federations

    pictures = getattr(images, name)()
    loaded = image_federations.digits(pictures, num_clients, seed=seed, shared_seed=shared_seed)
    rows, test = columns(loaded)
    return rows, {name: column[:num_test] for name, column in test.items()}


def cifar100(num_components: int | None = None, seed: int = 0) -> Loaded:
    """Return CIFAR-100 in 500 clients of 100 images, or its principal components."""
    from experiments.fed_ep import federations

    federation = federations.cifar100(jax.random.key(seed))
    return columns(
        federation if num_components is None else federations.with_pca(federation, num_components)
    )


def emnist62() -> Loaded:
    """Return EMNIST's digits and letters by writer, 3400 clients."""
    from experiments.fed_ep import federations

    return columns(federations.emnist62())


def tags(
    num_clients: int = 1_000,
    num_words: int = 1_000,
    num_tags: int = 50,
    num_test: int = 1_000,
    seed: int = 0,
) -> Loaded:
    """Draw users who write sentences of few topics; rows are `experiments.fed_ep.tag_data.Rows`."""
    from experiments.fed_ep import tag_data

    sizes = dict(num_clients=num_clients, num_words=num_words, num_tags=num_tags)
    federation = tag_data.synthetic(seed, num_test=num_test, **sizes)
    return federation.data, federation.test


def stack_overflow(
    num_words: int = 10_000, num_tags: int = 500, max_rows: int = 1_000, num_test: int = 10_000
) -> Loaded:
    """Return Stack Overflow by user; rows are `experiments.fed_ep.tag_data.Rows`."""
    from experiments.fed_ep import tag_data

    federation = tag_data.stack_overflow(num_words, num_tags, max_rows, num_test)
    return federation.data, federation.test


def synthetic(
    alpha: float = 1.0,
    beta: float = 1.0,
    num_clients: int = 20,
    dim: int = 10,
    num_classes: int = 2,
    shared_seed: bool = False,
    seed: int = 1994,
) -> Loaded:
    """Draw Synthetic(alpha, beta) of Li et al. (2018): clients of 10 to 49 rows, a tenth held out.

    ``u_i ~ N(0, alpha^2)``, ``B_i ~ N(0, beta^2)``, ``v_i ~ N(B_i, I)``,
    ``x ~ N(v_i, diag(j^-1.2))``, ``W_i ~ N(u_i, 1)``, ``b_i ~ N(u_i, 1)``, ``y = argmax(W_i'x +
    b_i)``. Calls are as in the notebooks that Vono et al. (2022) released; with `shared_seed`
    the seed is set again before each draw, as there, so that clients share all noise.
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
    centers = [fresh().normal(mean, 1, dim) for mean in row_means]
    drawn = []
    for size, model_mean, center in zip(sizes, model_means, centers, strict=True):
        weight = fresh().normal(model_mean, 1, (dim, num_classes))
        bias = fresh().normal(model_mean, 1, num_classes)
        features = fresh().multivariate_normal(center, covariance, size)
        drawn.append((features.astype(np.float32), (features @ weight + bias).argmax(axis=1)))
    orders = [rng.permutation(size) for size in sizes]
    shuffled = [[x[order] for x in rows] for rows, order in zip(drawn, orders, strict=True)]
    features, label = (np.concatenate(column) for column in zip(*shuffled, strict=True))
    rows = {"features": features, "label": label.astype(np.int32)}
    held_out = np.concatenate([np.arange(size) >= int(0.9 * size) for size in sizes])
    train, test = ({name: x[part] for name, x in rows.items()} for part in (~held_out, held_out))
    owners = np.repeat(np.arange(num_clients), sizes)[~held_out]
    return fedmcmc.FederatedData.from_arrays(train, owners), test


def spherical(
    num_clients: int = 20,
    num_rows: int = 1_000,
    dim: int = 10,
    prior_precision: float = 1.0,
    num_test: int = 200,
    seed: int = 0,
) -> Loaded:
    """Draw binary labels of features on the unit sphere (Liang et al. 2024), dealt out in turn."""
    from experiments.fa_hmc import logistic_data

    features, label = logistic_data.simulated(seed, num_rows + num_test, dim, prior_precision)
    rows = {"features": features.astype(np.float32), "label": label}
    train, test = (
        {name: column[part] for name, column in rows.items()}
        for part in (slice(num_rows), slice(num_rows, None))
    )
    owners = np.arange(num_rows) % num_clients
    return fedmcmc.FederatedData.from_arrays(train, owners), test


def gaussian(
    num_clients: int = 20, dim: int = 50, spread: float = 5.0, times: int = 1, seed: int = 1994
) -> Loaded:
    """Draw clients of 10 to 199 rows ``N(mu_i, I)`` with ``mu_i ~ N(0, spread^2 I)``.

    Calls are as in the notebook that Vono et al. (2022) released. Clients have `times` as many
    rows.
    """
    sizes = np.random.RandomState(seed).randint(10, 200, num_clients) * times
    rng = np.random.RandomState(seed)
    clients = []
    for size in sizes:
        mean = rng.normal(np.zeros(dim), spread)
        clients.append({"y": rng.normal(mean, 1.0, (size, dim)).astype(np.float32)})
    return fedmcmc.FederatedData.from_clients(clients), None


def gaussian_shards(
    num_clients: int = 10, rows_per_client: int = 200, spread: float = 6.0, seed: int = 0
) -> Loaded:
    """Draw shards of two-dimensional rows around uniform means (El Mekkaoui et al. 2021, 5.1)."""
    from experiments.fsgld import gaussian_law

    shards = gaussian_law.simulate_shards(seed, spread, num_clients, rows_per_client)
    clients = [{"y": shard.astype(np.float32)} for shard in shards]
    return fedmcmc.FederatedData.from_clients(clients), None


def quadratic(
    num_clients: int = 10,
    dim: int = 10,
    means: tuple[float, float] = (1.0, -1.0),
    variances: tuple[float, float] = (1.0, 0.5),
) -> Loaded:
    """Return two kinds of clients (Liang et al. 2024), a row each: `mean` and `curvature`."""
    half = num_clients // 2
    kinds = zip(np.repeat(means, half), np.repeat(variances, half), strict=True)
    rows = [
        {
            "mean": np.full((1, dim), mean, np.float32),
            "curvature": np.full((1, dim), 1 / variance / num_clients, np.float32),
        }
        for mean, variance in kinds
    ]
    return fedmcmc.FederatedData.from_clients(rows), None


def indomethacin() -> Loaded:
    """Return the indomethacin trial in four hospitals: `treated`, `risk`, `pancreatitis`."""
    from examples import demo

    return demo.load_trial()[0], None


def heart_disease(num_test: int = 200, seed: int = 0) -> Loaded:
    """Return UCI heart disease in four hospitals; missing values are zero after standardization.

    Raises
    ------
    DataNotFound
        If the file is not in the folder.
    """
    path = tables.folder() / "heart_disease_4sites.npz"
    if not path.is_file():
        raise tables.not_found("heart_disease", path.name, FileNotFoundError("it was not tried"))
    with np.load(path, allow_pickle=False) as file:
        arrays = dict(file)
    x, label, site = arrays["x"], (arrays["y"] > 0).astype(np.int32), arrays["site"]
    scaled = (x - np.nanmean(x, axis=0)) / np.nanstd(x, axis=0)
    intercept = np.ones((len(x), 1), np.float32)
    features = np.concatenate([np.nan_to_num(scaled).astype(np.float32), intercept], axis=1)
    order = np.random.default_rng(seed).permutation(len(x))
    train, test = (
        {"features": features[rows], "label": label[rows]}
        for rows in (order[num_test:], order[:num_test])
    )
    return fedmcmc.FederatedData.from_arrays(train, site[order[num_test:]]), test


def _groups(name: str) -> Loaded:
    from experiments.hierarchy import studies

    return studies.load(name).data, None


def radon() -> Loaded:
    """Return radon in houses of 85 counties: columns `z`, `x` and `y`."""
    return _groups("radon")


def exam() -> Loaded:
    """Return exam scores of pupils by school: columns `z`, `x` and `y`."""
    return _groups("exam")


def schools() -> Loaded:
    """Return mathematics scores by school: columns `z`, `x` and `y`."""
    return _groups("schools")


def contraception() -> Loaded:
    """Return contraceptive use by district: columns `z`, `x` and binary `y`."""
    return _groups("contraception")


def immunization() -> Loaded:
    """Return immunization by community: columns `z`, `x` and binary `y`."""
    return _groups("immunization")


def funnel(
    num_hospitals: int = 4, rows_per_hospital: int = 25, spread: float = 0.05, seed: int = 0
) -> Loaded:
    """Draw hospitals of few rows with small effects: column `y`."""
    rng = np.random.default_rng(seed)
    effects = rng.normal(0, spread, num_hospitals)
    rows = [{"y": rng.normal(e, 1, rows_per_hospital).astype(np.float32)} for e in effects]
    return fedmcmc.FederatedData.from_clients(rows), None
