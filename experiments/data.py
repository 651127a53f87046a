"""Data sets of the experiments: from a folder, else from OpenML, else one line of advice.

The folder is the environment variable ``FEDMCMC_DATA``, by default ``../shared/data`` beside the
repository. OpenML is reached through scikit-learn, which keeps what it fetched. Here are tables;
images are in `experiments.images`.
"""

import os
import pathlib
import warnings
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

__all__ = [
    "DataNotFound",
    "Fetch",
    "Table",
    "covtype",
    "fetch_openml",
    "folder",
    "isolet",
    "not_found",
    "susy",
]

DEFAULT_FOLDER = pathlib.Path(__file__).resolve().parents[1] / ".." / "shared" / "data"

Fetch = Callable[[str, int | str], tuple[np.ndarray, np.ndarray]]


class DataNotFound(RuntimeError):
    """A data set is neither in the folder nor to be fetched; the message says what to do."""


class Table(NamedTuple):
    """Features ``[num_rows, num_features]`` float32 and labels ``[num_rows]`` int32."""

    features: np.ndarray
    labels: np.ndarray


def folder() -> pathlib.Path:
    """Return the folder that is looked into first."""
    return pathlib.Path(os.environ.get("FEDMCMC_DATA") or DEFAULT_FOLDER)


def not_found(name: str, files: str, error: Exception) -> DataNotFound:
    """Return what to raise where `files` are not in the folder and OpenML failed with `error`."""
    reason = " ".join(str(error).split()) or type(error).__name__
    return DataNotFound(
        f"Data set {name!r} not found: no {files} in the folder FEDMCMC_DATA "
        f"({os.path.normpath(folder())}) and OpenML did not answer ({reason}); run once with "
        f"internet access, or put {files} there (see experiments/data.py)."
    )


def fetch_openml(name: str, version: int | str) -> tuple[np.ndarray, np.ndarray]:
    """Fetch a numeric table from OpenML: features and labels."""
    from sklearn import datasets

    with warnings.catch_warnings():
        # A failure is reported once, in our own words.
        warnings.filterwarnings("ignore", message="A network error occurred")
        return datasets.fetch_openml(
            name=name,
            version=version,
            as_frame=False,
            return_X_y=True,
            n_retries=1,
            parser="liac-arff",
        )


def isolet(fetch: Fetch = fetch_openml) -> Table:
    """ISOLET: 7797 spoken letters, 617 features in ``[-1, 1]``, labels 0 to 25 for A to Z.

    Source: Cole and Fanty, UCI machine learning repository (CC BY 4.0).

    Raises
    ------
    DataNotFound
        If the data is neither in the folder nor to be fetched.
    """

    def read(arrays: dict[str, np.ndarray]) -> Table:
        return _table(arrays["x_e4"] / np.float32(1e4), arrays["y"])

    return _count_from(0, _load("isolet", read, fetch, "isolet", 1))


def covtype(fetch: Fetch = fetch_openml) -> Table:
    """Covertype: 54 cartographic features of forest cells, labels 1 to 7 for the cover.

    The file in the folder is a stratified random 16 % (92962 rows); OpenML has all 581012.
    Source: Blackard and Dean, UCI machine learning repository (CC BY 4.0).

    Raises
    ------
    DataNotFound
        If the data is neither in the folder nor to be fetched.
    """

    def read(arrays: dict[str, np.ndarray]) -> Table:
        return _table(arrays["x"], arrays["y"])

    return _count_from(1, _load("covtype_93k", read, fetch, "covertype", 3))


def susy(fetch: Fetch = fetch_openml) -> Table:
    """SUSY: 5 million simulated collisions, 18 features, label 1 for a supersymmetric one.

    Source: Baldi, Sadowski and Whiteson (2014), UCI machine learning repository (CC BY 4.0).

    Raises
    ------
    DataNotFound
        If the data is neither in the folder nor to be fetched.
    """

    def read(arrays: dict[str, np.ndarray]) -> Table:
        return _table(arrays["x"], arrays["y"])

    return _load("susy", read, fetch, "SUSY", "active")


def _load(
    file: str,
    read: Callable[[dict[str, np.ndarray]], Table],
    fetch: Fetch,
    name: str,
    version: int | str,
) -> Table:
    path = folder() / f"{file}.npz"
    if path.is_file():
        with np.load(path, allow_pickle=False) as arrays:
            return read(dict(arrays))
    try:
        return _table(*fetch(name, version))
    except (ImportError, OSError, ValueError) as error:
        raise not_found(name, f"{file}.npz", error) from error


def _count_from(first: int, table: Table) -> Table:
    # Sources count classes from zero or from one.
    return table._replace(labels=table.labels - table.labels.min() + first)


def _table(features: np.ndarray, labels: np.ndarray) -> Table:
    # OpenML's labels are strings of numbers.
    numbers = np.asarray(labels).astype(np.float64).astype(np.int32)
    return Table(np.asarray(features, np.float32), numbers)
