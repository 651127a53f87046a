"""Answers to questions that a program asks in `resumable`."""

import warnings
from pathlib import Path
from typing import Any, NamedTuple

from fedmcmc._types import ArrayTree
from fedmcmc.placement import is_first
from fedmcmc.storage._files import (
    DamagedFileError,
    Part,
    arrays_of,
    read_part,
    read_record,
    write_part,
    write_record,
)


class Answer(NamedTuple):
    """The answer to a question, and numbers that go with it."""

    value: ArrayTree
    numbers: dict[str, Any]


class Answers:
    """Answers in the files of a directory, named by digests of their questions."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.writes = is_first()

    def read(self, question: str, like: ArrayTree) -> Answer | None:
        """Return the answer to a question; ``None`` if there is none, or a file is damaged."""
        try:
            record = read_record(self.directory / f"{question}.json")
            part = Part(f"{question}.npz", record["checksum_of_answer"])
            return Answer(read_part(self.directory, part, question, like), record["numbers"])
        except DamagedFileError:
            return None  # the same question has the same answer again

    def write(self, question: str, answer: Answer) -> None:
        """Write the answer to a question; warn, once, if the disk does not take it."""
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
                f"Answers of clients cannot be written to {self.directory} ({error}): if the "
                "program is interrupted, it asks again.",
                RuntimeWarning,
                stacklevel=4,
            )
