"""The federations of TensorFlow Federated, from their HDF5 files.

``tff.simulation.datasets`` fetches them, and so do the scripts of FedML
(``data/fed_cifar100``, ``data/FederatedEMNIST``, ``data/stackoverflow``). Files lie in the folder
of `experiments.data`; in each a group ``examples/<client>`` holds a client's rows.
"""

import os
import pickle
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

import fedmcmc
from experiments import data
from experiments.data import DataNotFound, Fetch

__all__ = ["Examples", "cifar100", "emnist62", "read"]

# Of each of the 100 classes of CIFAR-100, in alphabetical order, one of 20, likewise.
SUPERCLASSES = np.array(
    [
        4, 1, 14, 8, 0, 6, 7, 7, 18, 3, 3, 14, 9, 18, 7, 11, 3, 9, 7, 11, 6, 11, 5, 10, 7,
        6, 13, 15, 3, 15, 0, 11, 1, 10, 12, 14, 16, 9, 11, 5, 5, 19, 8, 8, 15, 13, 14, 17, 18, 10,
        16, 4, 17, 4, 2, 0, 17, 4, 18, 17, 10, 3, 2, 12, 12, 16, 12, 1, 9, 19, 2, 10, 0, 1, 16,
        12, 9, 13, 15, 13, 16, 19, 2, 4, 6, 19, 5, 5, 8, 19, 18, 1, 2, 15, 6, 0, 17, 8, 14, 13,
    ]
)  # fmt: skip


class Examples(NamedTuple):
    """Images ``[n, ...]``, labels ``[n]`` and clients ``[n]`` from zero, sorted by client."""

    x: np.ndarray
    label: np.ndarray
    client: np.ndarray


def cifar100(
    rng_key: jax.Array, fetch: Fetch = data.fetch_openml
) -> tuple[Examples, Examples, str]:
    """CIFAR-100 in 500 clients of 100 images, 100 test images for each of 100 more.

    From ``fed_cifar100_train.h5`` and ``fed_cifar100_test.h5``; else the images themselves
    (``cifar-100-python/train`` and ``test``, or OpenML), in a Pachinko allocation of our own with
    the same settings. Source: Krizhevsky (2009).

    Parameters
    ----------
    rng_key
        Of our own allocation.
    fetch
        As `experiments.data.fetch_openml`.

    Raises
    ------
    DataNotFound
        If the data is neither in the folder nor to be fetched.
    """
    paths = [data.folder() / f"fed_cifar100_{part}.h5" for part in ("train", "test")]
    if all(path.is_file() for path in paths):
        train, test = (read(path, "image") for path in paths)
        return train, test, "the split of TensorFlow Federated"
    x, label, coarse, x_test, label_test = _cifar100_images(fetch)
    ids = fedmcmc.partition.pachinko(rng_key, label, coarse, len(label) // 100)
    order = np.argsort(ids, kind="stable")
    train = Examples(x[order], label[order], ids[order])
    test = Examples(x_test, label_test, np.zeros(len(label_test), np.int32))
    return train, test, "in a Pachinko allocation of our own"


def _cifar100_images(fetch: Fetch) -> tuple[np.ndarray, ...]:
    paths = [data.folder() / "cifar-100-python" / part for part in ("train", "test")]
    if all(path.is_file() for path in paths):
        parts = [_pickled(path) for path in paths]
        return (*parts[0], *parts[1][:2])
    files = "fed_cifar100_{train,test}.h5 or cifar-100-python/{train,test}"
    try:
        features, labels = fetch("CIFAR-100", "active")
    except (ImportError, OSError, ValueError) as error:
        raise data.not_found("CIFAR-100", files, error) from error
    if len(features) != 60_000:
        raise data.not_found("CIFAR-100", files, ValueError(f"it gave {len(features)} images"))
    x = _planes(np.asarray(features).astype(np.uint8))
    label = np.asarray(labels).astype(np.int32)
    first = label[:50_000]
    return x[:50_000], first, SUPERCLASSES[first], x[50_000:], label[50_000:]


def _pickled(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    # The files of the data set's own page are pickles of arrays and lists of numbers.
    with path.open("rb") as file:
        found = pickle.load(file, encoding="bytes")
    names = (b"fine_labels", b"coarse_labels")
    label, coarse = (np.asarray(found[name], np.int32) for name in names)
    return _planes(np.asarray(found[b"data"], np.uint8)), label, coarse


def _planes(rows: np.ndarray) -> np.ndarray:
    return rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)


def emnist62() -> tuple[Examples, Examples, str]:
    """EMNIST's digits and letters by writer: 3400 clients, rows of each in both parts.

    From ``fed_emnist_train.h5`` and ``fed_emnist_test.h5``, float pixels from 0 (ink) to 1.
    Source: Caldas et al. (2018), LEAF; Cohen et al. (2017).

    Raises
    ------
    DataNotFound
        If the files are not in the folder.
    """
    paths = [data.folder() / f"fed_emnist_{part}.h5" for part in ("train", "test")]
    require(paths, "EMNIST by writer", "data/FederatedEMNIST", "use study=fed_ep/mnist_small")
    train, test = (read(path, "pixels") for path in paths)
    return train, test, "by writer"


def require(paths: list[Path], name: str, script: str, instead: str) -> None:
    """Raise `DataNotFound` unless all files are there."""
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise DataNotFound(
            f"Data set {name!r} not found: put {', '.join(missing)} into the folder FEDMCMC_DATA "
            f"({os.path.normpath(data.folder())}); tff.simulation.datasets and FedML's script in "
            f"{script} fetch them. To do without, {instead}."
        )


def read(path: Path, column: str) -> Examples:
    """Read images, labels and clients of one HDF5 file; clients in the order of their names."""
    import h5py

    with h5py.File(path, "r") as file:
        clients = [file["examples"][name] for name in sorted(file["examples"])]
        x = [client[column][()] for client in clients]
        label = [client["label"][()].reshape(-1) for client in clients]
    ids = np.repeat(np.arange(len(x), dtype=np.int32), [len(part) for part in x])
    return Examples(np.concatenate(x), np.concatenate(label).astype(np.int32), ids)
