"""Data sets from the folder ``FEDMCMC_DATA`` (by default ``../shared/data``), else from OpenML.

OpenML is reached through scikit-learn, which caches. Here are tables; images are in
`experiments.images`. All functions raise `DataNotFound` if a data set is at neither place.
"""

import os
import pathlib
import warnings
from typing import NamedTuple

import numpy as np

__all__ = [
    "DataNotFound",
    "Table",
    "covtype",
    "fetch_openml",
    "folder",
    "isolet",
    "not_found",
    "read_arrays",
    "susy",
]

DEFAULT_FOLDER = pathlib.Path(__file__).resolve().parents[1] / ".." / "shared" / "data"


class DataNotFound(RuntimeError):
    """A data set is missing; the message explains how to get it."""


class Table(NamedTuple):
    """Features ``[num_rows, num_features]`` float32 and labels ``[num_rows]`` int32."""

    features: np.ndarray
    labels: np.ndarray


def folder() -> pathlib.Path:
    """Return the folder of data sets."""
    return pathlib.Path(os.environ.get("FEDMCMC_DATA") or DEFAULT_FOLDER)


def read_arrays(name: str) -> dict[str, np.ndarray] | None:
    """Return the arrays of ``<name>.npz`` in the folder, ``None`` if there is no such file."""
    path = folder() / f"{name}.npz"
    if not path.is_file():
        return None
    with np.load(path, allow_pickle=False) as arrays:
        return dict(arrays)


def not_found(name: str, files: str, error: Exception) -> DataNotFound:
    """Return the error for `files` that are not in the folder when OpenML failed with `error`."""
    reason = " ".join(str(error).split()) or type(error).__name__
    return DataNotFound(
        f"Data set {name!r} not found: no {files} in the folder FEDMCMC_DATA "
        f"({os.path.normpath(folder())}) and OpenML did not answer ({reason}); run once with "
        f"internet access, or put {files} there (see experiments/data.py)."
    )


def fetch_openml(name: str, version: int | str, files: str) -> tuple[np.ndarray, np.ndarray]:
    """Fetch features and labels, int32, of a table that replaces `files`."""
    try:
        from sklearn import datasets

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="A network error occurred")
            features, labels = datasets.fetch_openml(
                name=name,
                version=version,
                as_frame=False,
                return_X_y=True,
                n_retries=1,
                parser="liac-arff",
            )
        return features, np.asarray(labels).astype(np.float64).astype(np.int32)
    except (ImportError, OSError, ValueError) as error:
        raise not_found(name, files, error) from error


def isolet() -> Table:
    """ISOLET: 7797 spoken letters, 617 features in ``[-1, 1]``, labels 0 to 25 for A to Z.

    Source: Cole and Fanty, UCI machine learning repository (CC BY 4.0).
    """
    return _load("isolet", "isolet", 1, first_label=0)


def covtype() -> Table:
    """Covertype: 54 cartographic features of forest cells, labels 1 to 7 for the cover.

    The file in the folder is a stratified random 16 % (92962 rows); OpenML has all 581012.
    Source: Blackard and Dean, UCI machine learning repository (CC BY 4.0).
    """
    return _load("covtype_93k", "covertype", 3, first_label=1)


def susy() -> Table:
    """SUSY: 5 million simulated collisions, 18 features, label 1 for a supersymmetric one.

    Source: Baldi, Sadowski and Whiteson (2014), UCI machine learning repository (CC BY 4.0).
    """
    return _load("susy", "SUSY", "active", first_label=0)


def _load(file: str, name: str, version: int | str, first_label: int) -> Table:
    """Load a table; sources count classes from zero or from one."""
    arrays = read_arrays(file)
    if arrays is None:
        features, labels = fetch_openml(name, version, f"{file}.npz")
    else:
        features = arrays["x"] if "x" in arrays else arrays["x_e4"] / np.float32(1e4)
        labels = arrays["y"].astype(np.int32)
    return Table(np.asarray(features, np.float32), labels - labels.min() + np.int32(first_label))
