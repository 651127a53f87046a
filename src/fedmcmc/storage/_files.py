"""Files of a checkpoint: each one appears only when it is complete, and damage is noticed."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

__all__ = [
    "CheckpointError",
    "DamagedFileError",
    "checksum_of",
    "read_record",
    "write_record",
    "write_whole",
]

CHECKSUM = "checksum"
FORMAT = 2


class CheckpointError(ValueError):
    """A checkpoint is another run's, damaged, in use or of an earlier format."""


class DamagedFileError(CheckpointError):
    """A file of a checkpoint does not hold what was written to it."""


def write_whole(path: Path, write: Callable[[IO[bytes]], Any]) -> str:
    """Call ``write(file)`` on a new file, which gets its name once it is on the disk.

    Returns
    -------
    str
        The checksum of the file.
    """
    partial = path.with_name(path.name + ".partial")
    with partial.open("w+b") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
        checksum = _checksum(file)
    os.replace(partial, path)
    if os.name == "posix":
        # The new name, too, is to survive a crash of the machine.
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    return checksum


def checksum_of(path: Path) -> str:
    """Return the checksum of a file.

    Raises
    ------
    DamagedFileError
        If it is missing or cannot be read.
    """
    try:
        with path.open("rb") as file:
            return _checksum(file)
    except OSError as error:
        raise DamagedFileError(f"{path} cannot be read ({error.strerror}).") from error


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
    checksum = record.pop(CHECKSUM, None) if isinstance(record, dict) else None
    if checksum is not None and checksum != _checksum_of_record(record):
        raise DamagedFileError(f"{path} is damaged (its checksum is not that of what it holds).")
    if checksum is None or record.pop("format") != FORMAT:
        raise CheckpointError(
            f"{path} was written by another version of fedmcmc, in a format that this version does "
            f"not read: finish the run with that version, or delete {path.parent} to start anew."
        )
    return record


def _checksum_of_record(record: dict[str, Any]) -> str:
    text = json.dumps(record, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
