"""Clients' answers to the questions of a program in `resumable`, stored on disk."""

import warnings
from pathlib import Path
from typing import Any, NamedTuple

from fedmcmc.placement import is_first
from fedmcmc.storage._files import (
    DamagedFileError,
    PartFile,
    arrays_of,
    read_part,
    read_record,
    write_part,
    write_record,
)
from fedmcmc.types import ArrayTree


class StoredAnswer(NamedTuple):
    """Answer to a question, with the costs of obtaining it."""

    value: ArrayTree
    numbers: dict[str, Any]


class Answers:
    """Directory of answers, named by the digests of their questions."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.writes = is_first()

    def read(self, question: str, like: ArrayTree) -> StoredAnswer | None:
        """Return the answer to a question; ``None`` if it is missing or a file is damaged."""
        try:
            record = read_record(self.directory / f"{question}.json")
            part = PartFile(f"{question}.npz", record["checksum_of_answer"])
            return StoredAnswer(read_part(self.directory, part, question, like), record["numbers"])
        except DamagedFileError:
            return None  # clients then answer the question again

    def write(self, question: str, answer: StoredAnswer) -> None:
        """Write the answer to a question; warn once if the disk fails."""
        if not self.writes:
            return
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            path = self.directory / f"{question}.npz"
            checksum = write_part(path, arrays_of(answer.value), question)
            record = {"checksum_of_answer": checksum, "numbers": answer.numbers}
            write_record(self.directory / f"{question}.json", record)
        except OSError as error:
            self.writes = False
            warnings.warn(
                f"Answers of clients cannot be written to {self.directory} ({error}). If the "
                "program is interrupted, clients must answer these questions again.",
                RuntimeWarning,
                stacklevel=4,
            )
