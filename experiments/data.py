"""Data sets from the folder ``FEDMCMC_DATA`` (by default ``../shared/data``), else from OpenML.

OpenML is reached through scikit-learn, which caches. All functions raise `DataNotFound` if a data
set is at neither place.
"""

import functools
import gzip
import io
import itertools
import json
import os
import pathlib
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

DEFAULT_FOLDER = pathlib.Path(__file__).resolve().parents[1] / ".." / "shared" / "data"
MNIST_MOMENTS = (0.1307, 0.3081)
"""Mean and standard deviation of MNIST's training pixels on [0, 1], as commonly rounded."""
CIFAR10_MOMENTS = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
"""The same for each channel of CIFAR-10."""


class DataNotFound(RuntimeError):
    """A data set is missing; the message explains how to get it."""


class Table(NamedTuple):
    """Features ``[num_rows, num_features]`` float32 and labels ``[num_rows]`` int32."""

    features: np.ndarray
    labels: np.ndarray


class Images(NamedTuple):
    """Images ``[num, height, width]`` or with channels, uint8, and labels ``[num]``, int32."""

    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray


def folder() -> pathlib.Path:
    """Return the folder of data sets."""
    return pathlib.Path(os.environ.get("FEDMCMC_DATA") or DEFAULT_FOLDER)


def require(name: str, files: Sequence[str], advice: str) -> list[pathlib.Path]:
    """Return the paths of `files`; if one is not in the folder, raise an error with `advice`."""
    paths = [folder() / file for file in files]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise DataNotFound(
            f"Data set {name!r} not found: put {', '.join(missing)} into the folder FEDMCMC_DATA "
            f"({os.path.normpath(folder())}); {advice}."
        )
    return paths


def read_arrays(*names: str) -> list[dict[str, np.ndarray]]:
    """Return the arrays of each ``<name>.npz`` in the folder, nothing if one is missing."""
    paths = [folder() / f"{name}.npz" for name in names]
    is_complete = all(path.is_file() for path in paths)
    return [dict(np.load(path)) for path in paths] if is_complete else []


def fetch_openml(
    name: str, version: int | str, files: Sequence[str], num_rows: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Fetch features and labels, int32, of a table of `num_rows` that replaces `files`."""
    try:
        from sklearn import datasets

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="A network error occurred")
            settings = dict(as_frame=False, return_X_y=True, n_retries=1, parser="liac-arff")
            features, labels = datasets.fetch_openml(name=name, version=version, **settings)
        if num_rows not in (None, len(features)):
            raise ValueError(f"it gave {len(features)} rows")
        return features, np.asarray(labels).astype(np.float64).astype(np.int32)
    except (ImportError, OSError, ValueError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        advice = f"or run once with internet access, as OpenML did not answer ({reason})"
        require(name, files, advice)
        raise


def _load_table(file: str, name: str, version: int | str, first_label: int = 0) -> Table:
    """Load a table; sources count classes from zero or from one."""
    parts = read_arrays(file)
    if not parts:
        features, labels = fetch_openml(name, version, [f"{file}.npz"])
    else:
        (arrays,) = parts
        features = arrays["x"] if "x" in arrays else arrays["x_e4"] / np.float32(1e4)
        labels = arrays["y"].astype(np.int32)
    return Table(np.asarray(features, np.float32), labels - labels.min() + np.int32(first_label))


isolet = functools.partial(_load_table, "isolet", "isolet", 1)
"""ISOLET: 7797 spoken letters, 617 features in ``[-1, 1]``, labels 0 to 25 for A to Z.

Source: Cole and Fanty, UCI machine learning repository (CC BY 4.0).
"""
covtype = functools.partial(_load_table, "covtype_93k", "covertype", 3, first_label=1)
"""Covertype: 54 cartographic features of forest cells, labels 1 to 7 for the cover.

The file in the folder is a stratified random 16 % (92962 rows); OpenML has all 581012.
Source: Blackard and Dean, UCI machine learning repository (CC BY 4.0).
"""
susy = functools.partial(_load_table, "susy", "SUSY", "active")
"""SUSY: 5 million simulated collisions, 18 features, label 1 for a supersymmetric one.

Source: Baldi, Sadowski and Whiteson (2014), UCI machine learning repository (CC BY 4.0).
"""


def _load_gray(name: str, *files: str) -> Images:
    """Load gray images in the original order; an array's parts may be in several files."""
    parts = read_arrays(*files)
    if parts:
        arrays = ([part[key] for part in parts if key in part] for key in Images._fields)
        return _images(*map(np.concatenate, arrays))
    # OpenML has training images first.
    features, y = fetch_openml(name, 1, [f"{file}.npz" for file in files], 70_000)
    x = np.asarray(features).astype(np.uint8).reshape(-1, 28, 28)
    return _images(x[:60_000], y[:60_000], x[60_000:], y[60_000:])


def _images(x: np.ndarray, y: np.ndarray, x_test: np.ndarray, y_test: np.ndarray) -> Images:
    return Images(x, y.astype(np.int32), x_test, y_test.astype(np.int32))


mnist = functools.partial(_load_gray, "mnist_784", "mnist")
"""MNIST: 60000 + 10000 handwritten digits, 28 by 28 (LeCun, Cortes and Burges, CC BY-SA 3.0)."""
fashion_mnist = functools.partial(
    _load_gray, "Fashion-MNIST", *(f"fashion_mnist_{p}" for p in ("train_0", "train_1", "test"))
)
"""Fashion-MNIST: 60000 + 10000 articles of clothing, 28 by 28 (Xiao et al. 2017, MIT)."""


def kmnist() -> Images:
    """Kuzushiji-MNIST: 60000 + 10000 cursive Japanese characters of ten classes, 28 by 28.

    If the folder has ``kmnist_test.npz`` alone, 2000 of its images, 200 of each class, are the test
    set and the others are for training. Source: Clanuwat et al. (2018) (CC BY-SA 4.0).
    """
    parts = [] if (folder() / "kmnist.npz").is_file() else read_arrays("kmnist_test")
    if not parts:
        return _load_gray("Kuzushiji-MNIST", "kmnist")
    x, y = parts[0]["x_test"], parts[0]["y_test"]
    order = np.random.default_rng(0).permutation(len(y))
    rows = np.concatenate([order[y[order] == label][:200] for label in range(10)])
    held_out = np.isin(np.arange(len(y)), rows)
    return _images(x[~held_out], y[~held_out], x[held_out], y[held_out])


def small_digits() -> Images:
    """Return scikit-learn's 1797 handwritten digits of 8 by 8; the same 297 are always held out.

    Source: Alpaydin and Kaynak (1998) (CC BY 4.0).
    """
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    x = np.round(pixels[order].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    y = labels[order]
    return _images(x[297:], y[297:], x[:297], y[:297])


def cifar10(*, jpeg_test: bool = True) -> Images:
    """CIFAR-10: photographs of ten kinds of things, 32 by 32 by 3 (Krizhevsky 2009).

    The folder has the first 30000 training images, and all 10000 test images as JPEG of quality 75
    (about 30 dB from the originals), sorted by class, or with ``jpeg_test=False`` the first 1000
    exactly. OpenML has all 50000 and 10000 exactly.
    """
    ends = ("train_0", "train_1", "train_2", "test_jpeg" if jpeg_test else "test1000")
    names = [f"cifar10_{end}" for end in ends]
    parts = read_arrays(*names)
    if not parts:
        features, y = fetch_openml("CIFAR_10", 1, [f"{name}.npz" for name in names], 60_000)
        x = planes(features)
        return _images(x[:50_000], y[:50_000], x[50_000:], y[50_000:])
    *train, test = parts
    x = np.concatenate([_decode_residuals(part["x_resid"]) for part in train])
    y = np.concatenate([part["y"] for part in train])
    x_test = _decode_jpeg(test) if jpeg_test else _decode_residuals(test["x_resid"])
    return _images(x, y, x_test, test["y"])


def cifar2() -> Images:
    """Return airplanes and automobiles of CIFAR-10."""
    x, y, x_test, y_test = cifar10()
    return Images(x[y < 2], y[y < 2], x_test[y_test < 2], y_test[y_test < 2])


HEART_HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")


def heart_disease() -> dict[str, np.ndarray]:
    """Return UCI heart disease at four hospitals: ``x [920, 13]``, ``y`` (0 to 4), ``site``.

    The folder has ``heart_disease_4sites.npz``, or the four files ``processed.*.data`` of the UCI
    machine learning repository, where a question mark is a missing value (NaN in ``x``). Source:
    Janosi, Steinbrunn, Pfisterer and Detrano, UCI machine learning repository (CC BY 4.0).
    """
    parts = read_arrays("heart_disease_4sites")
    if parts:
        return {name: parts[0][name] for name in ("x", "y", "site")}
    files = [f"processed.{name}.data" for name in HEART_HOSPITALS]
    advice = 'they are in the zip of "Heart Disease" at archive.ics.uci.edu'
    tables = [
        np.genfromtxt(path, delimiter=",", missing_values="?", ndmin=2)
        for path in require("heart disease", files, advice)
    ]
    rows = np.concatenate(tables)
    sites = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
    return {"x": rows[:, :13].astype(np.float32), "y": rows[:, 13].astype(np.uint8), "site": sites}


def radon() -> dict[str, np.ndarray]:
    """Return radon in 386 counties: ``county``, ``floor``, ``log_uppm``, ``log_radon`` per house.

    The folder has ``radon_all.npz``, or posteriordb's ``radon_all.json.zip``. Source: Gelman and
    Hill (2006), as in posteriordb.
    """
    parts = read_arrays("radon_all")
    if parts:
        return parts[0]
    advice = "it is in posterior_database/data/data of github.com/stan-dev/posteriordb"
    (path,) = require("radon_all", ["radon_all.json.zip"], advice)
    with zipfile.ZipFile(path) as archive:
        columns = json.loads(archive.read("radon_all.json"))
    names = {"county": "county_idx", "floor": "floor_measure"}
    columns = {
        name: np.asarray(columns[names.get(name, name)])
        for name in ("county", "floor", "log_uppm", "log_radon")
    }
    return columns | {name: columns[name].astype(np.float32) for name in ("log_uppm", "log_radon")}


def emnist_digits() -> Images:
    """EMNIST's split "digits": 240000 + 40000 handwritten digits, 28 by 28.

    No package ships it and OpenML has other splits only. In NIST's files images lie on their side.
    Source: Cohen et al. (2017).
    """
    kinds = itertools.product(("train", "test"), ("images-idx3", "labels-idx1"))
    files = [f"emnist-digits-{part}-{kind}-ubyte.gz" for part, kind in kinds]
    advice = "they are in NIST's gzip.zip (nist.gov, the EMNIST dataset); use MNIST to do without"
    paths = require("EMNIST digits", files, advice)
    x, y, x_test, y_test = (
        np.frombuffer(gzip.decompress(path.read_bytes()), np.uint8) for path in paths
    )
    # Images follow a header of 16 bytes, labels one of 8.
    x, x_test = (pixels[16:].reshape(-1, 28, 28).transpose(0, 2, 1) for pixels in (x, x_test))
    return _images(x, y[8:], x_test, y_test[8:])


def standardize_pixels(pixels: np.ndarray, moments: Sequence[Any]) -> np.ndarray:
    """Return pixels on [0, 1], minus the mean, over the standard deviation (`moments`), float32."""
    mean, deviation = (np.asarray(moment, np.float32) for moment in moments)
    return (pixels.astype(np.float32) / np.float32(255) - mean) / deviation


def planes(features: np.ndarray) -> np.ndarray:
    """Return flat images of 3 channels, one after another, as ``[num, 32, 32, 3]`` uint8."""
    return np.asarray(features, np.uint8).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)


def _decode_residuals(residuals: np.ndarray) -> np.ndarray:
    """Undo the folder's coding, ``[3, num, 32, 32]`` to ``[num, 32, 32, 3]``, modulo 256.

    Planes are green, red minus green and blue minus green, each less what its left, upper and
    upper left neighbors predict: the differences along both axes.
    """
    rows = np.cumsum(residuals, axis=2, dtype=np.uint8)
    green, red, blue = np.cumsum(rows, axis=3, dtype=np.uint8)
    return np.stack([red + green, green, blue + green], axis=-1)


def _decode_jpeg(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    from PIL import Image

    code, offset = arrays["jpeg"].tobytes(), arrays["offset"].tolist()
    files = (io.BytesIO(code[a:b]) for a, b in itertools.pairwise(offset))
    return np.stack([np.asarray(Image.open(file)) for file in files])
