"""What lies in the directory of a checkpoint: parts with arrays, and manifests that name parts.

Each file appears only when it is complete, and damage to it is noticed. A manifest is written after
its parts, so the parts that it names are on the disk. The manifest before it and the parts of that
one are kept: if the last checkpoint is damaged, the run goes on from there.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedmcmc._types import ArrayTree
from fedmcmc.pytrees import is_key

RUN, BEFORE = "run.json", "run-before.json"
"""The last manifest of a directory, and the one before it."""
CHECKSUM, LABEL = "checksum", "run"
FORMAT = 2


class CheckpointError(ValueError):
    """A checkpoint is another run's, damaged, in use or of an earlier format."""


class DamagedFileError(CheckpointError):
    """A file of a checkpoint does not hold what was written to it."""


def write_whole(path: Path, write: Callable[[IO[bytes]], Any], *, private: bool = False) -> None:
    """Call ``write(file)`` on a new file, which gets its name once it is on the disk.

    A `private` file can be read by its owner alone, from the first byte on.
    """
    partial = path.with_name(path.name + ".partial")
    if private:
        partial.unlink(missing_ok=True)  # a process that was killed may have left one
    mode = 0o600 if private else 0o666
    try:
        with open(partial, "w+b", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        partial.unlink(missing_ok=True)  # it would take room on a disk that may be full
        if error.filename is None:
            error.filename = str(path)
        raise
    os.replace(partial, path)
    if os.name == "posix":
        # The new name, too, is to survive a crash of the machine.
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _checksum(file: Any) -> str:
    file.seek(0)
    return hashlib.file_digest(file, "sha256").hexdigest()[:32]


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write a record as JSON, with the number of the format and a checksum."""
    record = {"format": FORMAT} | record
    text = json.dumps(record | {CHECKSUM: _checksum_of_record(record)}, indent=1)
    write_whole(path, lambda file: file.write(text.encode()))


def read_record(path: Path) -> dict[str, Any]:
    """Return the record in a file of `write_record`.

    Raises
    ------
    DamagedFileError
        If it is missing, or not what was written.
    CheckpointError
        If it was written by a version with another format.
    """
    try:
        record = json.loads(path.read_bytes())
    except OSError as error:
        raise DamagedFileError(f"{path} cannot be read ({error.strerror}).") from error
    except ValueError as error:  # no JSON, or no text
        raise DamagedFileError(f"{path} is damaged ({error}).") from error
    if not isinstance(record, dict) or "format" not in record:
        raise DamagedFileError(f"{path} is damaged (it holds no record of fedmcmc).")
    checksum = record.pop(CHECKSUM, None)
    if checksum is not None and checksum != _checksum_of_record(record):
        raise DamagedFileError(f"{path} is damaged (its checksum is not that of what it holds).")
    if record.pop("format") != FORMAT:
        raise CheckpointError(
            f"{path} was written by another version of fedmcmc, in a format that this version does "
            f"not read: finish the run with that version, or delete {path.parent} to start anew."
        )
    if checksum is None:
        raise DamagedFileError(f"{path} is damaged (it has no checksum).")
    return record


def _checksum_of_record(record: dict[str, Any]) -> str:
    text = json.dumps(record, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class Part(NamedTuple):
    """What a manifest says of a part: an ``.npz`` file of arrays that also names its run."""

    name: str  # of the file
    checksum: str
    num_draws: int = 0  # per chain


def arrays_of(tree: ArrayTree) -> dict[str, np.ndarray]:
    """Return the leaves of `tree` as NumPy arrays by name, typed random keys as their data.

    The name of a key says of which generator it is. Arrays of a type that NumPy has no name for
    (bfloat16) become bytes.
    """
    return {_name(i, leaf): _plain(leaf) for i, leaf in enumerate(jax.tree.leaves(tree))}


def write_part(path: Path, arrays: Mapping[str, np.ndarray], run: str) -> str:
    """Write a part of the run with the digest `run`; return its checksum."""
    named: dict[str, Any] = {LABEL: np.asarray(run), **arrays}
    checksums = []

    def write(file: IO[bytes]) -> None:
        np.savez(file, allow_pickle=False, **named)
        checksums.append(_checksum(file))

    write_whole(path, write)
    return checksums[0]


def read_part(directory: Path, part: Part, run: str, like: ArrayTree) -> ArrayTree:
    """Return the tree in a part, in the structure and of the types of `like`.

    Raises
    ------
    DamagedFileError
        If the file is missing, is not what was written, or is of another run.
    CheckpointError
        If it holds other arrays than `like`.
    """
    path = directory / part.name
    try:
        with path.open("rb") as file:
            checksum = _checksum(file)
    except OSError as error:
        raise DamagedFileError(f"{path} cannot be read ({error.strerror}).") from error
    if checksum != part.checksum:
        raise DamagedFileError(f"{path} is damaged (its checksum is not that of the manifest).")
    leaves, treedef = jax.tree.flatten(like)
    names = [_name(i, leaf) for i, leaf in enumerate(leaves)]
    with np.load(path, allow_pickle=False) as stored:
        if LABEL not in stored or str(stored[LABEL]) != run:
            raise DamagedFileError(f"{path} is a part of another run.")
        if set(stored.files) != {LABEL, *names}:
            raise CheckpointError(
                f"{path} holds the arrays {sorted(stored.files)}, {sorted(names)} were expected."
            )
        typed = [_typed(stored[name], leaf) for name, leaf in zip(names, leaves, strict=True)]
    return jax.tree.unflatten(treedef, typed)


def _name(index: int, leaf: Any) -> str:
    return f"leaf_{index}" + (f"_key_{jax.random.key_impl(leaf)}" if is_key(leaf) else "")


def _plain(leaf: Any) -> np.ndarray:
    array = np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)
    if array.dtype.kind == "V":
        array = np.ascontiguousarray(array)
        return array.reshape(-1).view(np.uint8).reshape(*array.shape, array.dtype.itemsize)
    return array


def _typed(array: np.ndarray, like: Any) -> Any:
    if is_key(like):
        return jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(like))
    if np.dtype(like.dtype).kind == "V":
        return array.reshape(-1).view(like.dtype).reshape(array.shape[:-1])
    return array


@dataclass(frozen=True)
class Manifest:
    """What ``run.json`` holds."""

    identity: dict[str, Any]
    versions: dict[str, str]
    first: int  # the round in which the run began
    round: int
    num_draws: int  # per chain
    draws: tuple[Part, ...]
    state: Part
    totals: dict[str, list[int]]
    stopped: dict[str, Any]
    num_skipped: int  # checkpoints that were due while the one before was still being written

    @property
    def num_stored(self) -> int:
        """Draws per chain that are in no part, but in a store."""
        return self.num_draws - sum(part.num_draws for part in self.draws)

    @property
    def files(self) -> set[str]:
        return {self.state.name, *(part.name for part in self.draws)}

    def write(self, path: Path) -> None:
        write_record(path, asdict(self))

    @classmethod
    def read(cls, path: Path) -> "Manifest":
        record = read_record(path)
        if missing := [field.name for field in fields(cls) if field.name not in record]:
            raise DamagedFileError(f"{path} is damaged (it lacks {', '.join(missing)}).")
        draws = tuple(Part(*part) for part in record.pop("draws"))
        return cls(draws=draws, state=Part(*record.pop("state")), **record)


def versions() -> dict[str, str]:
    """Return the versions on which the bits of draws may depend."""
    return {"fedmcmc": version("fedmcmc"), "jax": jax.__version__, "numpy": np.__version__}


def changed_versions(manifest: Manifest) -> str:
    """Return in words which versions are others than those of a manifest, if any."""
    now = versions()
    return "; ".join(
        f"{name} {manifest.versions.get(name)}, now {now[name]}"
        for name in now
        if manifest.versions.get(name) != now[name]
    )
