"""The federations of TensorFlow Federated, from their HDF5 files.

``tff.simulation.datasets`` fetches them, and so do the scripts of FedML
(``data/fed_cifar100``, ``data/FederatedEMNIST``, ``data/stackoverflow``). Files lie in the folder
of `experiments.data`; in each a group ``examples/<client>`` holds a client's rows.
"""

import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np

import fedmcmc
from experiments import data as sources

ADVICE = "tff.simulation.datasets and FedML's scripts fetch them. To do without,"
CROP = 24
"""Side of the crops of CIFAR-100."""
CIFAR100_MOMENTS = ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
"""Mean and standard deviation of CIFAR-100's training pixels on [0, 1], per channel."""
# The superclass of each of the 100 classes of CIFAR-100; both in alphabetical order.
SUPERCLASSES = np.array(
    [
        4, 1, 14, 8, 0, 6, 7, 7, 18, 3, 3, 14, 9, 18, 7, 11, 3, 9, 7, 11, 6, 11, 5, 10, 7,
        6, 13, 15, 3, 15, 0, 11, 1, 10, 12, 14, 16, 9, 11, 5, 5, 19, 8, 8, 15, 13, 14, 17, 18, 10,
        16, 4, 17, 4, 2, 0, 17, 4, 18, 17, 10, 3, 2, 12, 12, 16, 12, 1, 9, 19, 2, 10, 0, 1, 16,
        12, 9, 13, 15, 13, 16, 19, 2, 4, 6, 19, 5, 5, 8, 19, 18, 1, 2, 15, 6, 0, 17, 8, 14, 13,
    ]
)  # fmt: skip
Columns = dict[str, np.ndarray]
Examples = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Images ``[n, ...]``, labels ``[n]`` and clients ``[n]`` from zero, sorted by client."""


def cifar100(seed: int = 0) -> tuple[fedmcmc.FederatedData, Columns]:
    """Return CIFAR-100 in 500 clients of 100 images, as crops of 24 by 24 pixels.

    From ``fed_cifar100_train.h5`` and ``fed_cifar100_test.h5``; else the images themselves
    (``cifar-100-python/train`` and ``test``, or OpenML), in a Pachinko allocation of our own with
    the same settings. Source: Krizhevsky (2009).

    Each training image is cropped at random and mirrored with probability a half, once; the
    published experiments crop again at every visit. Test images are cropped in the middle.
    """
    crop_key, split_key = jax.random.split(jax.random.key(seed))
    (x, label, client), (x_test, label_test, _) = _cifar100_examples(split_key)
    rng = np.random.default_rng(np.asarray(jax.random.key_data(crop_key)))
    highest = x.shape[1] - CROP
    crops = _crop(x, rng.integers(0, highest + 1, (len(x), 2)))
    is_mirrored = rng.random(len(crops)) < 0.5
    crops[is_mirrored] = crops[is_mirrored, :, ::-1]
    middles = _crop(x_test, np.full((len(x_test), 2), highest // 2))
    rows, held_out = (
        {"features": sources.standardize_pixels(pixels, CIFAR100_MOMENTS), "label": labels}
        for pixels, labels in ((crops, label), (middles, label_test))
    )
    return fedmcmc.FederatedData.from_arrays(rows, client), held_out


def _crop(x: np.ndarray, corners: np.ndarray) -> np.ndarray:
    rows, columns = (corners[:, i, None] + np.arange(CROP) for i in range(2))
    return x[np.arange(len(x))[:, None, None], rows[:, :, None], columns[:, None, :]]


def _cifar100_examples(rng_key: jax.Array) -> tuple[Examples, Examples]:
    paths = [sources.folder() / f"fed_cifar100_{part}.h5" for part in ("train", "test")]
    if all(path.is_file() for path in paths):
        return read(paths[0], "image"), read(paths[1], "image")
    paths = [sources.folder() / "cifar-100-python" / part for part in ("train", "test")]
    if all(path.is_file() for path in paths):
        # The files of the data set's own page are pickles of arrays and lists of numbers.
        files = [pickle.loads(path.read_bytes(), encoding="bytes") for path in paths]
        x, x_test = (sources.planes(file[b"data"]) for file in files)
        label, label_test = (np.asarray(file[b"fine_labels"], np.int32) for file in files)
    else:
        files = ["fed_cifar100_train.h5", "fed_cifar100_test.h5"]
        features, labels = sources.fetch_openml("CIFAR-100", "active", files, 60_000)
        x, x_test = np.split(sources.planes(features), [50_000])
        label, label_test = np.split(labels, [50_000])
    ids = fedmcmc.partition.pachinko(rng_key, label, SUPERCLASSES[label], len(label) // 100)
    order = np.argsort(ids, kind="stable")
    test = x_test, label_test, np.zeros(len(label_test), np.int32)
    return (x[order], label[order], ids[order]), test


def emnist62() -> tuple[fedmcmc.FederatedData, Columns]:
    """Return EMNIST's digits and letters by writer: 3400 clients, rows of each in both parts.

    From ``fed_emnist_train.h5`` and ``fed_emnist_test.h5``, float pixels from 0 (ink) to 1.
    Source: Caldas et al. (2018), LEAF; Cohen et al. (2017).
    """
    files = [f"fed_emnist_{part}.h5" for part in ("train", "test")]
    paths = sources.require("EMNIST by writer", files, f"{ADVICE} use study=fed_ep/mnist_small")
    train, test = (read(path, "pixels") for path in paths)
    rows, held_out = ({"features": x[..., None], "label": label} for x, label, _ in (train, test))
    return fedmcmc.FederatedData.from_arrays(rows, train[2]), held_out


def read(path: Path, column: str) -> Examples:
    """Read images, labels and clients of one file."""
    x, label = zip(*clients(path, (column, "label")), strict=True)
    ids = np.repeat(np.arange(len(x), dtype=np.int32), [len(part) for part in x])
    return np.concatenate(x), np.concatenate([np.ravel(part) for part in label]).astype("i4"), ids


def clients(
    path: Path, columns: Sequence[str], max_rows: int | None = None
) -> Iterator[list[np.ndarray]]:
    """Return the first rows of each client's columns, clients in the order of their names."""
    import h5py

    with h5py.File(path, "r") as file:
        for name in sorted(file["examples"]):
            yield [file["examples"][name][column][:max_rows] for column in columns]
