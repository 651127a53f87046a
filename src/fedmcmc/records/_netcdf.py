"""Results in NetCDF files, which ArviZ and R can read: arrays, and a record in JSON.

A file contains no code. Pickled functions can be part of it, but they are loaded on request only.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedmcmc._checks import missing_extra_error
from fedmcmc.diagnostics import Verdict
from fedmcmc.pytrees import named_leaves, variables
from fedmcmc.types import ArrayTree

FORMAT = 1
GROUP = "fedmcmc"
"""Group of a file with the arrays that only fedmcmc reads."""
RECORD = "record"
"""Variable with the record, because the size of attributes is limited."""


@dataclass
class SavedResult:
    """Content of a file.

    Attributes
    ----------
    record
        Facts that JSON can express.
    arrays
        Arrays by path, such as ``"posterior/b"``.
    """

    record: dict[str, Any]
    arrays: dict[str, np.ndarray] = field(default_factory=dict)

    def store(self, tree: ArrayTree, group: str) -> Any:
        """Add the arrays of a tree, and return its structure for the record.

        Raises
        ------
        ValueError
            If the tree has containers other than dictionaries, lists and tuples.
        """
        named = iter(variables(named_leaves(tree)).items())

        def encode(node: Any) -> Any:
            if node is None:
                return None
            if type(node) is dict and all(isinstance(key, str) for key in node):
                # Leaves have the order of sorted keys.
                return {"dict": {key: encode(node[key]) for key in sorted(node)}}
            if type(node) in (list, tuple):
                return {type(node).__name__: [encode(x) for x in node]}
            if not jax.tree_util.all_leaves([node]):
                raise ValueError(
                    f"Draws are saved if they are dictionaries, lists and tuples of arrays; got a "
                    f"{type(node).__name__}. Pickle this result instead."
                )
            name, leaf = next(named)
            array = np.asarray(leaf)
            if array.dtype.kind == "V":  # NetCDF has no bfloat16
                array = array.astype(np.float32)
            self.arrays[f"{group}/{name}"] = array
            return {"array": f"{group}/{name}"}

        return encode(tree)

    def restore(self, structure: Any) -> Any:
        """Return the tree with a structure of `store`."""
        if structure is None:
            return None
        ((kind, content),) = structure.items()
        if kind == "array":
            return self.arrays[content]
        if kind == "dict":
            return {key: self.restore(x) for key, x in content.items()}
        return {"list": list, "tuple": tuple}[kind](self.restore(x) for x in content)


def as_json(value: Any) -> Any:
    """Return a value in the form of JSON; a verdict keeps its figures."""
    if isinstance(value, Verdict):
        arguments, keywords = value.__getnewargs_ex__()
        return {"verdict": [*arguments, keywords]}
    if isinstance(value, Mapping):
        return {str(key): as_json(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(x) for x in value]
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return np.asarray(value).tolist()
    return value if value is None or isinstance(value, str | bool | int | float) else str(value)


def from_json(value: Any) -> Any:
    """Return a value of `as_json`."""
    if isinstance(value, list):
        return [from_json(x) for x in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {"verdict"} and isinstance(value["verdict"], list):
        kind, method, keywords = value["verdict"]
        return Verdict(kind, method, **keywords)
    return {key: from_json(x) for key, x in value.items()}


def write_netcdf(path: str | Path, saved: SavedResult, datatree: Any) -> Path:
    """Write a result and the `DataTree` of its draws, replace an earlier file, and return the path.

    Arrays whose group is a node of `datatree` are not written twice.
    """
    try:
        import h5netcdf  # type: ignore[import-untyped]  # noqa: F401
        import xarray
    except ImportError as error:
        raise missing_extra_error("Saving a result needs h5netcdf", "arviz") from error
    path = Path(path)
    record = {"format": FORMAT, **saved.record}
    text = json.dumps(as_json(record)).encode()
    values: dict[str, Any] = {RECORD: (("byte",), np.frombuffer(text, np.uint8))}
    present = {node.path.strip("/") for node in datatree.subtree}
    for name, array in saved.arrays.items():
        group, _, variable = name.partition("/")
        if group not in present:
            dims = tuple(f"{group}.{variable}_{i}" for i in range(array.ndim))
            values[f"{group}.{variable}"] = (dims, array)
    datatree[GROUP] = xarray.DataTree(xarray.Dataset(values))
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    datatree.to_netcdf(partial, engine="h5netcdf")
    os.replace(partial, path)
    return path


def read_netcdf(path: str | Path) -> SavedResult:
    """Return the content of a file of `write_netcdf`.

    Raises
    ------
    ValueError
        If the file is not of this kind, or of another version of the format.
    """
    try:
        import h5netcdf  # noqa: F401
        import xarray
    except ImportError as error:
        raise missing_extra_error("Loading a result needs h5netcdf", "arviz") from error
    try:
        with xarray.open_datatree(path, engine="h5netcdf") as datatree:
            arrays = {
                f"{node.path.strip('/')}/{name}": np.asarray(x.values)
                for node in datatree.subtree
                for name, x in node.data_vars.items()
            }
        record = json.loads(arrays.pop(f"{GROUP}/{RECORD}").tobytes())
    except FileNotFoundError:
        raise
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(f"{path} is damaged, or no result that fedmcmc saved: {error}") from error
    if record.get("format") != FORMAT:
        raise ValueError(
            f"{path} has format {record.get('format')!r}, and this version of fedmcmc reads format "
            f"{FORMAT}."
        )
    prefix = f"{GROUP}/"
    named = {
        name.removeprefix(prefix).replace(".", "/", 1) if name.startswith(prefix) else name: x
        for name, x in arrays.items()
    }
    return SavedResult(from_json(record), named)
