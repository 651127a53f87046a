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
from experiments import images, shards
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
    """Return covertype by wilderness area or by label; `experiments.qlsd.federations.covertype`."""
    from experiments.qlsd import federations

    settings = dict(split=split, num_clients=num_clients, num_rows=num_rows, num_test=num_test)
    key, table = jax.random.key(seed), tables.covtype()
    return columns(federations.covertype(key, table, binary=binary, **settings))


def susy(
    num_clients: int = 30,
    rows_per_client: int = 90_000,
    num_test: int = 10_000,
    concentration: float = 0.5,
    seed: int = 0,
) -> Loaded:
    """Return SUSY in clients whose shares of positive labels are drawn from a Beta."""
    table = tables.susy()
    sizes = dict(num_clients=num_clients, rows_per_client=rows_per_client, num_test=num_test)
    data, held_out = shards.skewed_labels(
        jax.random.key(seed), table.labels, concentration=concentration, **sizes
    )
    features = shards.standardize(table.features)
    train, test = (
        {"features": features[rows], "label": table.labels[rows]}
        for rows in (np.asarray(data.rows), held_out)
    )
    return dataclasses.replace(data, rows=train), test


def letter_pairs(
    num_clients: int = 10,
    pairs_per_client: int = 1_000,
    num_test: int = 1_000,
    num_components: int = 10,
    seed: int = 0,
) -> Loaded:
    """Return pairs of ISOLET's utterances (`features`, `sign`); clients share no letter."""
    table = tables.isolet()
    projected = shards.project(table.features, num_components)
    sizes = dict(num_clients=num_clients, pairs_per_client=pairs_per_client, num_test=num_test)
    return shards.letter_pairs(jax.random.key(seed), projected, table.labels, **sizes)


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
    from experiments.qlsd.federations import some_rows

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
    """Draw Synthetic(alpha, beta) of Li et al. (2018), `experiments.qlsd.federations.synthetic`."""
    from experiments.qlsd import federations

    sizes = dict(num_clients=num_clients, dim=dim, num_classes=num_classes)
    federation = federations.synthetic(alpha, beta, seed=seed, shared_seed=shared_seed, **sizes)
    return columns(federation)


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
    """Draw clients of 10 to 199 rows ``N(mu_i, I)``, `experiments.qlsd.federations.gaussian`."""
    from experiments.qlsd import federations

    federation = federations.gaussian(num_clients, dim, spread=spread, times=times, seed=seed)
    return dataclasses.replace(federation.data, rows={"y": federation.data.rows}), None


def gaussian_shards(
    num_clients: int = 10, rows_per_client: int = 200, spread: float = 6.0, seed: int = 0
) -> Loaded:
    """Draw shards of two-dimensional rows around uniform means (El Mekkaoui et al. 2021, 5.1)."""
    rows = shards.gaussian(seed, spread, num_clients, rows_per_client)
    clients = [{"y": shard.astype(np.float32)} for shard in rows]
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
