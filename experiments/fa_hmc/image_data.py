"""The images of the applications, spread over clients at random, and a sentence on which they are.

KMNIST's training images may not be at hand where its test images are; then these are split.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

import fedmcmc
from experiments import data, images
from experiments.data import DataNotFound, Fetch
from experiments.images import Images, scale_pixels
from experiments.qlsd.federations import Rows, labelled, some_rows

__all__ = ["DATASETS", "Task", "cifar2", "federate", "kmnist", "split_test_images"]

HELD_OUT = 2_000
"""Of KMNIST's 10000 test images, where they stand in for all."""


class Task(NamedTuple):
    """Rows to learn from, by client, rows held out, and the number of classes."""

    data: fedmcmc.FederatedData
    test: Rows
    num_classes: int


def fashion_mnist() -> tuple[Images, str]:
    """Return Fashion-MNIST and what it is."""
    found = images.fashion_mnist()
    return found, f"Fashion-MNIST, {_counts(found)}"


def kmnist(fetch: Fetch = data.fetch_openml) -> tuple[Images, str]:
    """Return KMNIST and what it is: all of it, else its test images, split.

    Raises
    ------
    DataNotFound
        If there are not even the test images, ``kmnist_test.npz``, in the folder.
    """
    try:
        found = images.kmnist(fetch)
        return found, f"KMNIST, {_counts(found)}"
    except DataNotFound as error:
        path = data.folder() / "kmnist_test.npz"
        if not path.is_file():
            raise DataNotFound(
                f"{error} The 10000 test images alone, kmnist_test.npz, do in their place."
            ) from error
    with np.load(path, allow_pickle=False) as arrays:
        found = split_test_images(arrays["x_test"], arrays["y_test"])
    return found, (
        f"KMNIST's test images alone, because its training images were not at hand, split into "
        f"{_counts(found)}"
    )


def split_test_images(x: np.ndarray, labels: np.ndarray, num_held_out: int = HELD_OUT) -> Images:
    """Return `x` with `num_held_out` images, as many of each class, for testing.

    Which ones is fixed; both parts stay in their order.
    """
    classes = np.unique(labels)
    shuffled = np.random.default_rng(0).permutation(len(labels))
    of_each = num_held_out // len(classes)
    chosen = [shuffled[labels[shuffled] == label][:of_each] for label in classes]
    held_out = np.isin(np.arange(len(labels)), np.concatenate(chosen))
    numbers = labels.astype(np.int32)
    return Images(x[~held_out], numbers[~held_out], x[held_out], numbers[held_out])


def cifar2() -> tuple[Images, str]:
    """Return the first two classes of CIFAR-10, airplane and automobile, and what they are."""
    whole = images.cifar10()
    train, test = whole.y_train < 2, whole.y_test < 2
    found = Images(
        whole.x_train[train], whole.y_train[train], whole.x_test[test], whole.y_test[test]
    )
    text = f"Airplanes and automobiles of CIFAR-10, {_counts(found)}"
    if len(whole.y_train) < 50_000:
        text += (
            f" (of the {len(whole.y_train):,} training images at hand; the test images are JPEG "
            "of quality 75, the training images exact)"
        )
    return found, text


DATASETS: dict[str, Callable[[], tuple[Images, str]]] = {
    "fashion_mnist": fashion_mnist,
    "kmnist": kmnist,
    "cifar2": cifar2,
}


def federate(
    rng_key: jax.Array,
    given: Images,
    num_clients: int,
    *,
    num_rows: int | None = None,
    num_test: int | None = None,
) -> Task:
    """Spread images at random over clients of equal size (up to one image).

    Pixels get mean zero and variance one, over all training pixels (of a channel), and are
    flattened.

    Parameters
    ----------
    rng_key
        Decides which images are taken and who has them.
    given
        Of one of `DATASETS`.
    num_clients
        Number of clients.
    num_rows, num_test
        Training and test images taken at random, all by default.
    """
    row_key, test_key, split_key = jax.random.split(rng_key, 3)
    rows = some_rows(row_key, len(given.y_train), num_rows)
    held_out = some_rows(test_key, len(given.y_test), num_test)
    pixels = given.x_train / np.float32(255)
    axes = (0, 1, 2)
    moments = pixels.mean(axes, dtype=np.float64), pixels.std(axes, dtype=np.float64)

    def taken(x: np.ndarray, labels: np.ndarray, chosen: np.ndarray) -> Rows:
        scaled = scale_pixels(x[chosen], "standard", moments)
        return labelled(scaled.reshape(len(chosen), -1), labels[chosen])

    train = taken(given.x_train, given.y_train, rows)
    ids = fedmcmc.partition.iid(split_key, len(rows), num_clients)
    federation = fedmcmc.FederatedData.from_arrays(train, ids)
    classes = int(given.y_train.max()) + 1
    return Task(federation, taken(given.x_test, given.y_test, held_out), classes)


def _counts(found: Images) -> str:
    return f"{len(found.y_train):,} for training and {len(found.y_test):,} for testing"
