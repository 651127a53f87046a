"""The federations of TensorFlow Federated, from their HDF5 files.

``tff.simulation.datasets`` fetches them, and so do the scripts of FedML
(``data/fed_cifar100``, ``data/FederatedEMNIST``, ``data/stackoverflow``). Files lie in the folder
of `experiments.data`; in each a group ``examples/<client>`` holds a client's rows.
"""

import pickle
from pathlib import Path
from typing import NamedTuple

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


class Examples(NamedTuple):
    """Images ``[n, ...]``, labels ``[n]`` and clients ``[n]`` from zero, sorted by client."""

    x: np.ndarray
    label: np.ndarray
    client: np.ndarray


def cifar100(seed: int = 0) -> tuple[fedmcmc.FederatedData, Columns]:
    """Return CIFAR-100 in 500 clients of 100 images, as crops of 24 by 24 pixels.

    From ``fed_cifar100_train.h5`` and ``fed_cifar100_test.h5``; else the images themselves
    (``cifar-100-python/train`` and ``test``, or OpenML), in a Pachinko allocation of our own with
    the same settings. Source: Krizhevsky (2009).

    Each training image is cropped at random and mirrored with probability a half, once; the
    published experiments crop again at every visit. Test images are cropped in the middle.
    """
    crop_key, split_key = jax.random.split(jax.random.key(seed))
    train, test = _cifar100_examples(split_key)
    rng = np.random.default_rng(np.asarray(jax.random.key_data(crop_key)))
    highest = train.x.shape[1] - CROP
    crops = _crop(train.x, rng.integers(0, highest + 1, (len(train.x), 2)))
    is_mirrored = rng.random(len(crops)) < 0.5
    crops[is_mirrored] = crops[is_mirrored, :, ::-1]
    middles = _crop(test.x, np.full((len(test.x), 2), highest // 2))
    rows, held_out = (
        {"features": sources.standardize_pixels(x, CIFAR100_MOMENTS), "label": label}
        for x, label in ((crops, train.label), (middles, test.label))
    )
    return fedmcmc.FederatedData.from_arrays(rows, train.client), held_out


def _crop(x: np.ndarray, corners: np.ndarray) -> np.ndarray:
    rows, columns = (corners[:, i, None] + np.arange(CROP) for i in range(2))
    return x[np.arange(len(x))[:, None, None], rows[:, :, None], columns[:, None, :]]


def _cifar100_examples(rng_key: jax.Array) -> tuple[Examples, Examples]:
    parts = ("train", "test")
    paths = [sources.folder() / f"fed_cifar100_{part}.h5" for part in parts]
    if all(path.is_file() for path in paths):
        return read(paths[0], "image"), read(paths[1], "image")
    paths = [sources.folder() / "cifar-100-python" / part for part in parts]
    if all(path.is_file() for path in paths):
        (x, label), (x_test, label_test) = map(_read_pickle, paths)
    else:
        files = ["fed_cifar100_train.h5", "fed_cifar100_test.h5"]
        features, labels = sources.fetch_openml("CIFAR-100", "active", files, 60_000)
        x, x_test = np.split(sources.planes(features), [50_000])
        label, label_test = np.split(labels, [50_000])
    ids = fedmcmc.partition.pachinko(rng_key, label, SUPERCLASSES[label], len(label) // 100)
    order = np.argsort(ids, kind="stable")
    train = Examples(x[order], label[order], ids[order])
    return train, Examples(x_test, label_test, np.zeros(len(label_test), np.int32))


def _read_pickle(path: Path) -> tuple[np.ndarray, np.ndarray]:
    # The files of the data set's own page are pickles of arrays and lists of numbers.
    with path.open("rb") as file:
        arrays = pickle.load(file, encoding="bytes")
    return sources.planes(arrays[b"data"]), np.asarray(arrays[b"fine_labels"], np.int32)


def emnist62() -> tuple[fedmcmc.FederatedData, Columns]:
    """Return EMNIST's digits and letters by writer: 3400 clients, rows of each in both parts.

    From ``fed_emnist_train.h5`` and ``fed_emnist_test.h5``, float pixels from 0 (ink) to 1.
    Source: Caldas et al. (2018), LEAF; Cohen et al. (2017).
    """
    files = [f"fed_emnist_{part}.h5" for part in ("train", "test")]
    paths = sources.require("EMNIST by writer", files, f"{ADVICE} use study=fed_ep/mnist_small")
    train, test = (read(path, "pixels") for path in paths)
    rows, held_out = ({"features": p.x[..., None], "label": p.label} for p in (train, test))
    return fedmcmc.FederatedData.from_arrays(rows, train.client), held_out


def read(path: Path, column: str) -> Examples:
    """Read images, labels and clients of one HDF5 file; clients in the order of their names."""
    import h5py

    with h5py.File(path, "r") as file:
        clients = [file["examples"][name] for name in sorted(file["examples"])]
        x = [client[column][()] for client in clients]
        label = [client["label"][()].reshape(-1) for client in clients]
    ids = np.repeat(np.arange(len(x), dtype=np.int32), [len(part) for part in x])
    return Examples(np.concatenate(x), np.concatenate(label).astype(np.int32), ids)
