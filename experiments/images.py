"""Images of ten classes, from the same places as the tables of `experiments.data`.

Pixels are ``uint8``; `scale_pixels` makes numbers of them.
"""

import gzip
import io
import itertools
import math
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from experiments import data
from experiments.data import read_arrays

__all__ = [
    "CIFAR10_MOMENTS",
    "MNIST_MOMENTS",
    "Images",
    "cifar10",
    "emnist_digits",
    "fashion_mnist",
    "kmnist",
    "mnist",
    "planes",
    "scale_pixels",
    "small_digits",
]

MNIST_MOMENTS = (0.1307, 0.3081)
"""Mean and standard deviation of MNIST's training pixels on [0, 1], as commonly rounded."""

CIFAR10_MOMENTS = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
"""The same for each channel of CIFAR-10."""


class Images(NamedTuple):
    """A training and a test set.

    `x_train` and `x_test` are ``[num, height, width]`` or ``[num, height, width, 3]`` uint8,
    `y_train` and `y_test` ``[num]`` int32 from 0 to 9.
    """

    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray


def mnist() -> Images:
    """MNIST: 60000 + 10000 handwritten digits, 28 by 28, in the original order.

    Source: LeCun, Cortes and Burges (CC BY-SA 3.0).
    """
    return _load(("mnist",), "mnist_784")


def fashion_mnist() -> Images:
    """Fashion-MNIST: 60000 + 10000 articles of clothing, 28 by 28, in the original order.

    Source: Xiao, Rasul and Vollgraf (2017) (MIT).
    """
    parts = ("train_0", "train_1", "test")
    return _load(tuple(f"fashion_mnist_{part}" for part in parts), "Fashion-MNIST")


def kmnist() -> Images:
    """Kuzushiji-MNIST: 60000 + 10000 cursive Japanese characters of ten classes, 28 by 28.

    Source: Clanuwat et al. (2018) (CC BY-SA 4.0).
    """
    return _load(("kmnist",), "Kuzushiji-MNIST")


def small_digits(num_test: int = 297) -> Images:
    """Return scikit-learn's 1797 handwritten digits of 8 by 8; the held-out ones are always equal.

    Source: Alpaydin and Kaynak (1998) (CC BY 4.0).
    """
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    x = np.round(pixels[order].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    y = labels[order]
    return _images(x[num_test:], y[num_test:], x[:num_test], y[:num_test])


def cifar10(*, jpeg_test: bool = True) -> Images:
    """CIFAR-10: photographs of ten kinds of things, 32 by 32 by 3, training in original order.

    The folder has the first 30000 images for training; OpenML has all 50000. For testing the
    folder has all 10000 images as JPEG of quality 75 (about 30 dB from the originals), sorted by
    class, or with ``jpeg_test=False`` the first 1000 exactly; OpenML has all of them exactly.
    Source: Krizhevsky (2009).
    """
    shards = [read_arrays(f"cifar10_train_{shard}") for shard in range(3)]
    test = read_arrays("cifar10_test_jpeg" if jpeg_test else "cifar10_test1000")
    train = [shard for shard in shards if shard is not None]
    if len(train) < len(shards) or test is None:
        files = "cifar10_{train_0,train_1,train_2,test_jpeg,test1000}.npz"
        return _fetched("CIFAR_10", files, 50_000, planes)
    x = np.concatenate([_from_residuals(shard["x_resid"]) for shard in train])
    y = np.concatenate([shard["y"] for shard in train])
    x_test = _from_jpeg(test) if jpeg_test else _from_residuals(test["x_resid"])
    return _images(x, y, x_test, test["y"])


def emnist_digits() -> Images:
    """EMNIST's split "digits": 240000 + 40000 handwritten digits, 28 by 28.

    No package ships it and OpenML has other splits only. Put into the folder either
    ``emnist_digits.npz`` (arrays `x_train`, `y_train`, `x_test`, `y_test`) or the four files
    ``emnist-digits-{train,test}-{images-idx3,labels-idx1}-ubyte.gz`` of NIST's ``gzip.zip``,
    whose images lie on their side and are turned here. Source: Cohen et al. (2017).
    """
    arrays = read_arrays("emnist_digits")
    if arrays is not None:
        return _images(*(arrays[name] for name in Images._fields))
    folder = data.folder()
    names = [
        f"emnist-digits-{part}-{kind}-ubyte.gz"
        for part in ("train", "test")
        for kind in ("images-idx3", "labels-idx1")
    ]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise data.DataNotFound(
            f"Data set 'EMNIST digits' not found: put emnist_digits.npz, or {', '.join(names)} of "
            f"NIST's gzip.zip (nist.gov, the EMNIST dataset), into the folder FEDMCMC_DATA "
            f"({os.path.normpath(folder)}); use MNIST to do without."
        )
    x, y, x_test, y_test = (_read_idx(folder / name) for name in names)
    return _images(x.transpose(0, 2, 1), y, x_test.transpose(0, 2, 1), y_test)


def scale_pixels(
    pixels: np.ndarray, scaling: str, moments: tuple[Any, Any] = MNIST_MOMENTS
) -> np.ndarray:
    """Return `pixels` as numbers.

    Parameters
    ----------
    pixels
        uint8, any shape; a last axis of channels if `moments` are a channel's.
    scaling
        ``"unit"``: float32 on [0, 1]; ``"standard"``: that, minus the mean, over the standard
        deviation; ``"raw"``: `pixels` unchanged.
    moments
        Mean and standard deviation on [0, 1].
    """
    if scaling == "raw":
        return pixels
    unit = pixels.astype(np.float32) / np.float32(255)
    if scaling == "unit":
        return unit
    if scaling == "standard":
        mean, deviation = (np.asarray(moment, np.float32) for moment in moments)
        return (unit - mean) / deviation
    raise ValueError(f"scaling must be 'unit', 'standard' or 'raw', got {scaling!r}.")


def planes(features: np.ndarray) -> np.ndarray:
    """Return flat images of 3 channels, one after another, as ``[num, 32, 32, 3]``."""
    return features.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)


def _load(files: tuple[str, ...], name: str) -> Images:
    """Load grey images whose arrays are in one or several files; an array's parts are in order."""
    parts = [arrays for arrays in map(read_arrays, files) if arrays is not None]
    if len(parts) < len(files):
        missing = ", ".join(f"{file}.npz" for file in files)
        return _fetched(name, missing, 60_000, lambda x: x.reshape(-1, 28, 28))
    arrays = ([part[key] for part in parts if key in part] for key in Images._fields)
    return _images(*map(np.concatenate, arrays))


def _fetched(
    name: str, files: str, num_train: int, shape: Callable[[np.ndarray], np.ndarray]
) -> Images:
    # OpenML keeps the original order, training images first.
    features, y = data.fetch_openml(name, 1, files)
    if len(features) != num_train + 10_000:
        raise data.not_found(name, files, ValueError(f"it gave {len(features)} images"))
    x = shape(np.asarray(features).astype(np.uint8))
    return _images(x[:num_train], y[:num_train], x[num_train:], y[num_train:])


def _images(x: np.ndarray, y: np.ndarray, x_test: np.ndarray, y_test: np.ndarray) -> Images:
    return Images(x, y.astype(np.int32), x_test, y_test.astype(np.int32))


def _from_residuals(residuals: np.ndarray) -> np.ndarray:
    """Undo the folder's coding, ``[3, num, 32, 32]`` to ``[num, 32, 32, 3]``, modulo 256.

    Planes are green, red minus green and blue minus green, each less what its left, upper and
    upper left neighbors predict: the differences along both axes.
    """
    rows = np.cumsum(residuals, axis=2, dtype=np.uint8)
    green, red, blue = np.cumsum(rows, axis=3, dtype=np.uint8)
    return np.stack([red + green, green, blue + green], axis=-1)


def _from_jpeg(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    from PIL import Image

    code, offset = arrays["jpeg"].tobytes(), arrays["offset"].tolist()
    files = (io.BytesIO(code[a:b]) for a, b in itertools.pairwise(offset))
    return np.stack([np.asarray(Image.open(file)) for file in files])


def _read_idx(path: pathlib.Path) -> np.ndarray:
    """Read an IDX file of bytes: two zeros, the type 8, the rank, big-endian sizes, the bytes."""
    with gzip.open(path) as file:
        content = file.read()
    if content[:3] != b"\0\0\x08":
        raise ValueError(f"{path.name} must be an IDX file of bytes, its head is {content[:4]!r}.")
    rank = content[3]
    shape = tuple(np.frombuffer(content, ">i4", rank, 4).tolist())
    return np.frombuffer(content, np.uint8, math.prod(shape), 4 + 4 * rank).reshape(shape)
