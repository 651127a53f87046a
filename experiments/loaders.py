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
from experiments import images, tff
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
    "principal_components",
    "quadratic",
    "radon",
    "schools",
    "spherical",
    "susy",
    "synthetic",
]

CROP = 24
"""Side of the crops of CIFAR-100."""
CIFAR100_MOMENTS = ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
"""Mean and standard deviation of CIFAR-100's training pixels on [0, 1], per channel."""
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
    min_rows: int = 1,
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
    min_rows
        Least number of rows of a client in the split `dirichlet`.
    seed
        Seed of the rows and the split.
    """
    from experiments.fa_hmc import image_data
    from experiments.qlsd.federations import some_rows

    by_name = {"cifar2": image_data.cifar2, "kmnist": image_data.kmnist}
    pictures = by_name[name]()[0] if name in by_name else getattr(images, name)()
    row_key, test_key, split_key = jax.random.split(jax.random.key(seed), 3)
    moments = images.CIFAR10_MOMENTS if name.startswith("cifar") else images.MNIST_MOMENTS

    def taken(x: np.ndarray, y: np.ndarray, key: jax.Array, num: int | None) -> dict[str, Any]:
        rows = some_rows(key, len(y), num)
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
        "dirichlet": lambda: partition.dirichlet(
            split_key, labels, num_clients, concentration, min_rows=min_rows
        ),
        "disjoint_labels": lambda: partition.disjoint_labels(split_key, labels, num_clients),
        "quantity_skew": lambda: partition.quantity_skew(
            split_key, total, num_clients, concentration
        ),
    }[split]()
    test = taken(pictures.x_test, pictures.y_test, test_key, num_test)
    return fedmcmc.FederatedData.from_arrays(train, ids), test


def _shrunk(x: np.ndarray, side: int) -> np.ndarray:
    """Return images of the means of squares of pixels."""
    num, height, width, channels = x.shape
    if height % side or width % side:
        raise ValueError(f"shrink must divide {height} and {width}, got {side}.")
    squares = x.reshape(num, height // side, side, width // side, side, channels)
    return squares.mean(axis=(2, 4), dtype=np.float32)


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


def cifar100(seed: int = 0) -> Loaded:
    """Return CIFAR-100 in 500 clients of 100 images, as crops of 24 by 24 pixels.

    Each training image is cropped at random and mirrored with probability a half, once; the
    published experiments crop again at every visit. Test images are cropped in the middle.
    """
    crop_key, split_key = jax.random.split(jax.random.key(seed))
    train, test, _ = tff.cifar100(split_key)
    rng = np.random.default_rng(np.asarray(jax.random.key_data(crop_key)))
    highest = train.x.shape[1] - CROP
    crops = _cropped(train.x, rng.integers(0, highest + 1, (len(train.x), 2)))
    is_mirrored = rng.random(len(crops)) < 0.5
    crops[is_mirrored] = crops[is_mirrored, :, ::-1]
    middles = _cropped(test.x, np.full((len(test.x), 2), highest // 2))
    scaled = (images.scale_pixels(x, "standard", CIFAR100_MOMENTS) for x in (crops, middles))
    rows, held_out = map(_labelled, scaled, (train.label, test.label))
    return fedmcmc.FederatedData.from_arrays(rows, train.client), held_out


def _cropped(x: np.ndarray, corners: np.ndarray) -> np.ndarray:
    rows, columns = (corners[:, i, None] + np.arange(CROP) for i in range(2))
    return x[np.arange(len(x))[:, None, None], rows[:, :, None], columns[:, None, :]]


def _labelled(features: np.ndarray, label: Any) -> dict[str, np.ndarray]:
    return {"features": features, "label": np.asarray(label, np.int32)}


def emnist62() -> Loaded:
    """Return EMNIST's digits and letters by writer, 3400 clients."""
    train, test, _ = tff.emnist62()
    rows, held_out = (_labelled(part.x[..., None], part.label) for part in (train, test))
    return fedmcmc.FederatedData.from_arrays(rows, train.client), held_out


def principal_components(of: Loaded, num_components: int = 100, scaled: bool = True) -> Loaded:
    """Return the coordinates of rows along the first principal components of all training rows.

    Parameters
    ----------
    of
        What another loader returned, with the columns `features`, of any shape, and `label`.
    num_components
        Number of components.
    scaled
        Whether each coordinate has variance one; else it has the variance of its component.
    """
    data, test = of
    x = np.asarray(data.rows["features"]).reshape(data.num_rows, -1)
    if not 1 <= num_components <= min(x.shape):
        raise ValueError(
            f"num_components must lie between 1 and {min(x.shape)}, got {num_components}."
        )
    center = x.mean(axis=0)
    values, vectors = np.linalg.eigh(np.cov(x - center, rowvar=False))
    largest = np.argsort(values)[::-1][:num_components]
    basis = vectors[:, largest] / np.sqrt(values[largest] if scaled else 1.0)

    def projected(rows: Any) -> dict[str, Any]:
        features = np.asarray(rows["features"]).reshape(len(rows["label"]), -1)
        return _labelled(((features - center) @ basis).astype(np.float32), rows["label"])

    owners = np.repeat(np.arange(data.num_clients), data.sizes)
    return fedmcmc.FederatedData.from_arrays(projected(data.rows), owners), projected(test)


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
