"""Audit log of a site's messages, whose lines each contain the hash of the previous line.

The site writes a line before the message leaves. A changed line can only go unnoticed if all later
lines change too. Anyone who can write the file can do that, or remove lines from its end, so the
owner should sometimes store the last hash at a place that others cannot change.
"""

import datetime
import hashlib
import json
import os
import re
import time
from pathlib import Path
from typing import Any, NamedTuple

from fedmcmc.deploy._private import close_to_others

try:
    import fcntl
except ImportError:  # pragma: no cover - systems without such locks
    fcntl = None  # type: ignore[assignment]

FIRST = "0" * 64
"""Previous hash in the first line."""
SYNC_SECONDS = 1.0
"""Age of lines after which the next write puts them on the disk."""
MAX_LINE_BYTES = 2**16
_END = re.compile(rb', "hash": "([0-9a-f]{64})"\}\Z')


class LogError(ValueError):
    """Log that differs from what a site wrote; the message names the first wrong line."""


class Verified(NamedTuple):
    """Result of `verify_log`.

    Attributes
    ----------
    num_lines
        Number of lines in the log.
    last
        Hash of the last line.
    num_answers
        Number of lines about messages that left.
    num_bytes
        Number of bytes in these messages.
    """

    num_lines: int
    last: str
    num_answers: int
    num_bytes: int


class AuditLog:
    """Append-only file to which a site writes each message before it leaves.

    A killed process loses no line; a power failure loses the lines of about the last second. If the
    last line is cut short, the next process removes it and logs the removal.

    Parameters
    ----------
    path
        File of the log; created if missing.

    Attributes
    ----------
    num_numbers
        Count of all numbers that have left the site, which each line contains. An opened log starts
        with the count in its last line.

    Raises
    ------
    LogError
        If the last complete line is not a line of a log, or if another site or process writes to
        the file.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "audit.log"
    >>> log = AuditLog(path)
    >>> log.write("answer", run="a", round=0, phase=0, attempt=1, bytes=20, digest="9f86...")
    >>> log.close()
    >>> verify_log(path).num_lines
    1
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        close_to_others(self.path)
        self._synced = time.monotonic()
        try:
            self._lock()
            self._last_hash, self.num_numbers, torn = self._read_end()
        except BaseException:
            os.close(self._file)
            raise
        if torn:
            self.write("repaired", removed=len(torn), digest=hashlib.sha256(torn).hexdigest())

    def _lock(self) -> None:
        """Lock the file until it is closed."""
        if fcntl is None:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LogError(
                f"Another site or process writes to {self.path}. Each site needs its own audit "
                f'log: set log = "FILE" in the settings of one of them.'
            ) from None

    def _read_end(self) -> tuple[str, int, bytes]:
        """Return hash and count of the last complete line; remove and return bytes after it."""
        size = os.fstat(self._file).st_size
        begin = max(size - 2 * MAX_LINE_BYTES, 0)
        os.lseek(self._file, begin, os.SEEK_SET)
        tail = b""
        while part := os.read(self._file, 2 * MAX_LINE_BYTES):
            tail += part
        complete, newline, torn = tail.rpartition(b"\n")
        if not newline and begin > 0:
            raise LogError(f"{self.path} does not end with lines of a log.")
        if torn:
            os.ftruncate(self._file, size - len(torn))
            os.fsync(self._file)
        if not newline:
            return FIRST, 0, torn
        line = complete.rpartition(b"\n")[2]
        line_hash = _verified_hash(line)
        if line_hash is None:
            raise LogError(
                f"The last line of {self.path} was not written by a site. Keep the file, find out "
                "who changed it, and set another file in the site's settings."
            )
        return line_hash, int(json.loads(line).get("numbers", 0)), torn

    def write(self, what: str, **entry: Any) -> None:
        """Add a line with the time, the event `what`, the entries, and `num_numbers`."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        fields = {"time": now, "what": what, **entry, "numbers": self.num_numbers}
        fields["previous"] = self._last_hash
        body = json.dumps(fields)
        line_hash = hashlib.sha256(body.encode()).hexdigest()
        # After a kill during this single write, the line is complete or cut short.
        line = f'{body[:-1]}, "hash": "{line_hash}"}}\n'.encode()
        try:
            num = os.write(self._file, line)
        except OSError as error:
            error.filename = str(self.path)
            raise
        if num != len(line):
            os.ftruncate(
                self._file, os.fstat(self._file).st_size - num
            )  # so that the next line is complete
            raise OSError(f"{self.path} could not be written to its end: the disk may be full.")
        self._last_hash = line_hash
        if time.monotonic() - self._synced > SYNC_SECONDS:
            os.fsync(self._file)
            self._synced = time.monotonic()

    def close(self) -> None:
        """Write the last lines to the disk and close the file."""
        os.fsync(self._file)
        os.close(self._file)


def verify_log(path: str | Path, *, holds: str | None = None) -> Verified:
    """Check each line of a log against the previous line.

    Parameters
    ----------
    path
        File of an `AuditLog`.
    holds
        Hash of a line from an earlier time; one line must have it. Without it, nobody notices if
        lines are missing at the end or if the whole log was replaced.

    Raises
    ------
    LogError
        If a line is not as a site wrote it (the message names the first), or no line has the hash
        `holds`.
    """
    previous, number, num_answers, num_bytes = FIRST, 0, 0, 0
    missing = holds
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                raise LogError(
                    f"Line {number} of {path} is cut short. If it is the last one and the site was "
                    "killed, the site removes it at its next start, and logs that."
                )
            line_hash = _verified_hash(line[:-1])
            if line_hash is None:
                raise LogError(f"Line {number} of {path} was changed: its hash does not match.")
            entry = json.loads(line)
            if entry.get("previous") != previous:
                raise LogError(
                    f"Line {number} of {path} does not follow line {number - 1}: lines before it "
                    "were removed, inserted, changed or put into another order."
                    if number > 1
                    else f"Line 1 of {path} is not the first line of a log: lines are missing."
                )
            if "bytes" in entry:
                num_answers, num_bytes = num_answers + 1, num_bytes + int(entry["bytes"])
            previous = line_hash
            missing = None if line_hash == holds else missing
    if missing is not None:
        raise LogError(
            f"{path} has {number} consistent lines, but none with the hash {holds}: lines were cut "
            "off its end, or it is another log."
        )
    return Verified(number, previous, num_answers, num_bytes)


def num_masked_answers(path: str | Path, study: str) -> int | None:
    """Return the number of masked answers in a log to the study with this digest.

    Return ``None`` if the site was in no session of the study.
    """
    current, num_answers = None, None
    with Path(path).open("rb") as file:
        for line in file:
            if b'"started"' not in line and b'"answers": ' not in line:
                continue
            try:
                entry = json.loads(line)
            except ValueError:
                continue  # `verify_log` reports it
            if entry.get("what") == "started":
                current = entry.get("study")
            if current == study and "answers" in entry:
                num_answers = max(num_answers or 0, int(entry["answers"]))
    return num_answers


def _verified_hash(line: bytes) -> str | None:
    """Return the hash at the end of a line, `None` if the line does not have this hash."""
    end = _END.search(line)
    if end is None:
        return None
    stored = end[1].decode()
    computed = hashlib.sha256(line[: end.start()] + b"}").hexdigest()
    return stored if computed == stored else None
