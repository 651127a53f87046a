"""Files in the directory of a checkpoint: part files with arrays, and manifests that list them.

Each file appears only when it is complete, and checksums detect damage. A manifest is written after
the part files that it lists. The previous manifest and its part files are kept, so that a run can
continue from them if the last checkpoint is damaged.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from fedmcmc.pytrees import is_key
from fedmcmc.types import ArrayTree

T = TypeVar("T")
MANIFEST, PREVIOUS_MANIFEST = "run.json", "run-before.json"
RUN_NAME = "run"
"""Name of the array in a part file that holds the digest of the run."""
FORMAT = 2
"""Version of the files' format."""


class CheckpointError(ValueError):
    """Checkpoint that is unusable: of another run or format, damaged, or in use."""


class DamagedFileError(CheckpointError):
    """File of a checkpoint with other content than was written."""


def write_atomically(path: Path, write: Callable[[IO[bytes]], T], *, private: bool = False) -> T:
    """Return ``write(file)`` of a new file, which gets its name once it is on disk.

    Only its owner can read a `private` file, from the first byte on.
    """
    partial = path.with_name(path.name + ".partial")
    if private:
        partial.unlink(missing_ok=True)  # a killed process may have left a readable one
    mode = 0o600 if private else 0o666
    try:
        with open(partial, "w+b", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            result = write(file)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        partial.unlink(missing_ok=True)  # the disk may be full
        if error.filename is None:
            error.filename = str(path)
        raise
    os.replace(partial, path)
    if os.name == "posix":
        # The new name must also survive a crash of the machine.
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    return result


def _checksum(file: Any) -> str:
    file.seek(0)
    return hashlib.file_digest(file, "sha256").hexdigest()[:32]


def _checksum_of_record(record: dict[str, Any]) -> str:
    text = json.dumps(record, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write a record as JSON, with the version of the format and a checksum."""
    record = {"format": FORMAT} | record
    text = json.dumps(record | {"checksum": _checksum_of_record(record)}, indent=1)
    write_atomically(path, lambda file: file.write(text.encode()))


def read_record(path: Path) -> dict[str, Any]:
    """Return the record in a file of `write_record`.

    Raise `DamagedFileError` if the file is missing or damaged, and `CheckpointError` if a version
    of fedmcmc with another format wrote it.
    """
    try:
        record = json.loads(path.read_bytes())
    except OSError as error:
        raise DamagedFileError(f"{path} cannot be read ({error.strerror}).") from error
    except ValueError as error:  # not JSON, or not text
        raise DamagedFileError(f"{path} is damaged ({error}).") from error
    if not isinstance(record, dict) or "format" not in record:
        raise DamagedFileError(f"{path} is damaged (it holds no record of fedmcmc).")
    checksum = record.pop("checksum", None)
    if checksum is not None and checksum != _checksum_of_record(record):
        raise DamagedFileError(f"{path} is damaged (its content does not match its checksum).")
    if record.pop("format") != FORMAT:
        raise CheckpointError(
            f"{path} was written by another version of fedmcmc, in a format that this version "
            f"cannot read: finish the run with that version, or delete {path.parent} to start "
            f"again."
        )
    if checksum is None:
        raise DamagedFileError(f"{path} is damaged (it has no checksum).")
    return record


class PartFile(NamedTuple):
    """Entry of a manifest for an ``.npz`` file of arrays, which also holds the run's digest."""

    name: str
    checksum: str
    num_draws: int = 0  # per chain


def arrays_of(tree: ArrayTree) -> dict[str, np.ndarray]:
    """Return the leaves of `tree` as NumPy arrays by name.

    Typed random keys become their data, and their names include the generator. Arrays of types that
    NumPy cannot store (bfloat16) become bytes.
    """
    return {_array_name(i, leaf): _as_stored(leaf) for i, leaf in enumerate(jax.tree.leaves(tree))}


def write_part(path: Path, arrays: Mapping[str, np.ndarray], run: str) -> str:
    """Write a part file of the run with the digest `run`, and return the file's checksum."""
    named: dict[str, Any] = {RUN_NAME: np.asarray(run), **arrays}

    def write(file: IO[bytes]) -> str:
        np.savez(file, allow_pickle=False, **named)
        return _checksum(file)

    return write_atomically(path, write)


def read_part(directory: Path, part: PartFile, run: str, like: ArrayTree) -> ArrayTree:
    """Return the tree in a part file, with the structure and types of `like`.

    Raise `DamagedFileError` if the file is missing, damaged or of another run, and
    `CheckpointError` if it holds other arrays than `like`.
    """
    path = directory / part.name
    try:
        with path.open("rb") as file:
            checksum = _checksum(file)
    except OSError as error:
        raise DamagedFileError(f"{path} cannot be read ({error.strerror}).") from error
    if checksum != part.checksum:
        raise DamagedFileError(
            f"{path} is damaged (its content does not match the checksum in the manifest)."
        )
    leaves, treedef = jax.tree.flatten(like)
    names = [_array_name(i, leaf) for i, leaf in enumerate(leaves)]
    with np.load(path, allow_pickle=False) as stored:
        if RUN_NAME not in stored or str(stored[RUN_NAME]) != run:
            raise DamagedFileError(f"{path} is a part of another run.")
        if set(stored.files) != {RUN_NAME, *names}:
            raise CheckpointError(
                f"{path} holds the arrays {sorted(stored.files)}, expected {sorted(names)}."
            )
        restored = [_restore(stored[name], leaf) for name, leaf in zip(names, leaves, strict=True)]
    return jax.tree.unflatten(treedef, restored)


def _array_name(index: int, leaf: Any) -> str:
    return f"leaf_{index}" + (f"_key_{jax.random.key_impl(leaf)}" if is_key(leaf) else "")


def _as_stored(leaf: Any) -> np.ndarray:
    array = np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)
    if array.dtype.kind == "V":
        array = np.ascontiguousarray(array)
        return array.reshape(-1).view(np.uint8).reshape(*array.shape, array.dtype.itemsize)
    return array


def _restore(array: np.ndarray, like: Any) -> Any:
    if is_key(like):
        return jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(like))
    if np.dtype(like.dtype).kind == "V":
        return array.reshape(-1).view(like.dtype).reshape(array.shape[:-1])
    return array


@dataclass(frozen=True)
class Manifest:
    """Content of ``run.json``."""

    identity: dict[str, Any]
    versions: dict[str, str]
    first: int  # the first round of the run; the name is part of the format
    round: int
    num_draws: int  # per chain
    draws: tuple[PartFile, ...]
    state: PartFile
    totals: dict[str, list[int]]
    stopped: dict[str, Any]
    num_skipped: int  # checkpoints that were due while the previous one was still being written

    @property
    def num_stored(self) -> int:
        """Number of draws per chain that are in a store instead of part files."""
        return self.num_draws - sum(part.num_draws for part in self.draws)

    @property
    def files(self) -> set[str]:
        return {self.state.name, *(part.name for part in self.draws)}

    @property
    def changed_versions(self) -> str:
        """Description of the versions that changed since the manifest was written."""
        return "; ".join(
            f"{name} {self.versions.get(name)}, now {current}"
            for name, current in versions().items()
            if self.versions.get(name) != current
        )

    def write(self, path: Path) -> None:
        write_record(path, asdict(self))

    @classmethod
    def read(cls, path: Path) -> "Manifest":
        record = read_record(path)
        if missing := [field.name for field in fields(cls) if field.name not in record]:
            raise DamagedFileError(f"{path} is damaged (it lacks {', '.join(missing)}).")
        draws = tuple(PartFile(*part) for part in record.pop("draws"))
        return cls(draws=draws, state=PartFile(*record.pop("state")), **record)


def versions() -> dict[str, str]:
    """Return the versions of software on which the bits of draws may depend."""
    return {"fedmcmc": version("fedmcmc"), "jax": jax.__version__, "numpy": np.__version__}
