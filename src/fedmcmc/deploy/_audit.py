"""What left a site: a log of lines that each hold the hash of the line before.

A line is written before what it tells of leaves. Whoever changes a line has to change all that
follow. Whoever can write the file can do that, or cut lines off its end, so an owner notes down the
last hash now and then, where others cannot reach it.
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
except ImportError:  # pragma: no cover - where there are no such locks
    fcntl = None  # type: ignore[assignment]

FIRST = "0" * 64
"""What the first line has in the place of the hash of the line before."""
SYNC_SECONDS = 1.0
"""Lines that were written this long ago are on the disk at the latest when the next one is."""
MOST_LINE_BYTES = 2**16
_END = re.compile(rb', "hash": "([0-9a-f]{64})"\}\Z')


class LogError(ValueError):
    """A log is not what a site wrote; the message names the first line that is not."""


class Verified(NamedTuple):
    """What `verify_log` found.

    Attributes
    ----------
    num_lines
        Lines in the log.
    last
        The hash of the last one.
    num_answers
        Lines about messages that left.
    num_bytes
        Bytes of these messages.
    """

    num_lines: int
    last: str
    num_answers: int
    num_bytes: int


class AuditLog:
    """An append-only file, to which a site writes what it is about to send.

    A process that is killed loses no line, and a machine that loses power those of about the last
    second. A last line that was cut short is removed when the log is opened again, which the log
    then says.

    Parameters
    ----------
    path
        A file; made if missing.

    Attributes
    ----------
    num_numbers
        Numbers that have left the site in all, which each line carries; when a log is opened, what
        its last line says.

    Raises
    ------
    LogError
        If its last whole line is none of a log, or another site or process writes to it.

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
            self._last, self.num_numbers, torn = self._end()
        except BaseException:
            os.close(self._file)
            raise
        if torn:
            self.write("repaired", removed=len(torn), digest=hashlib.sha256(torn).hexdigest())

    def _lock(self) -> None:
        """Keep others from writing to the file until it is closed."""
        if fcntl is None:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LogError(
                f"Another site or process writes to {self.path}. Each site needs an audit log of "
                f'its own: set log = "FILE" in the settings of one of them.'
            ) from None

    def _end(self) -> tuple[str, int, bytes]:
        """Return the hash and the count of the last whole line, and what is behind it, removed."""
        size = os.fstat(self._file).st_size
        begin = max(size - 2 * MOST_LINE_BYTES, 0)
        os.lseek(self._file, begin, os.SEEK_SET)
        tail = b""
        while part := os.read(self._file, 2 * MOST_LINE_BYTES):
            tail += part
        whole, newline, torn = tail.rpartition(b"\n")
        if not newline and begin > 0:
            raise LogError(f"{self.path} does not end with lines of a log.")
        if torn:
            os.ftruncate(self._file, size - len(torn))
            os.fsync(self._file)
        if not newline:
            return FIRST, 0, torn
        line = whole.rpartition(b"\n")[2]
        found = _hash_of(line)
        if found is None:
            raise LogError(
                f"The last line of {self.path} is not one that a site wrote. Keep the file, find "
                "out who changed it, and name another one in the site's settings."
            )
        return found, int(json.loads(line).get("numbers", 0)), torn

    def write(self, what: str, **entry: Any) -> None:
        """Add a line: the time, what happened, what more there is to say, and `num_numbers`."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        fields = {"time": now, "what": what, **entry, "numbers": self.num_numbers}
        fields["previous"] = self._last
        body = json.dumps(fields)
        own = hashlib.sha256(body.encode()).hexdigest()
        # One write, which a kill leaves whole or cut short.
        line = f'{body[:-1]}, "hash": "{own}"}}\n'.encode()
        try:
            num = os.write(self._file, line)
        except OSError as error:
            error.filename = str(self.path)
            raise
        if num != len(line):
            os.ftruncate(self._file, os.fstat(self._file).st_size - num)  # the next one is whole
            raise OSError(f"{self.path} could not be written to its end: the disk may be full.")
        self._last = own
        if time.monotonic() - self._synced > SYNC_SECONDS:
            os.fsync(self._file)
            self._synced = time.monotonic()

    def close(self) -> None:
        """Put the last lines on the disk, and close the file."""
        os.fsync(self._file)
        os.close(self._file)


def verify_log(path: str | Path, *, holds: str | None = None) -> Verified:
    """Check each line of a log against the one before.

    Parameters
    ----------
    path
        Of an `AuditLog`.
    holds
        A hash that was noted down: it must be that of a line. Otherwise lines that were cut off the
        end go unnoticed, and so does a log that was written anew as a whole.

    Raises
    ------
    LogError
        Naming the first line that is not as a site wrote it, or saying that `holds` is missing.
    """
    last, number, num_answers, num_bytes = FIRST, 0, 0, 0
    missing = holds
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                raise LogError(
                    f"Line {number} of {path} is cut short. If it is the last one and the site was "
                    "killed, the site removes it, and says so, when it is started again."
                )
            found = _hash_of(line[:-1])
            if found is None:
                raise LogError(f"Line {number} of {path} was changed: it does not have its hash.")
            entry = json.loads(line)
            if entry.get("previous") != last:
                raise LogError(
                    f"Line {number} of {path} does not follow line {number - 1}: lines before it "
                    "were removed, inserted, changed or put into another order."
                    if number > 1
                    else f"Line 1 of {path} is not the first one of a log: lines are missing."
                )
            if "bytes" in entry:
                num_answers, num_bytes = num_answers + 1, num_bytes + int(entry["bytes"])
            last = found
            missing = None if found == holds else missing
    if missing is not None:
        raise LogError(
            f"{path} has {number} lines that follow one another, and none with the hash {holds}: "
            "lines were cut off its end, or it is another log."
        )
    return Verified(number, last, num_answers, num_bytes)


def num_masked_answers(path: str | Path, study: str) -> int | None:
    """Return how many answers under masks a log says that its site gave in a study.

    Parameters
    ----------
    path
        Of an `AuditLog`.
    study
        The study's digest.

    Returns
    -------
    int or None
        ``None`` where the site was in no session of the study.
    """
    current, found = None, None
    with Path(path).open("rb") as file:
        for line in file:
            if b'"started"' not in line and b'"answers": ' not in line:
                continue
            try:
                entry = json.loads(line)
            except ValueError:
                continue  # which verifying finds
            if entry.get("what") == "started":
                current = entry.get("study")
            if current == study and "answers" in entry:
                found = max(found or 0, int(entry["answers"]))
    return found


def _hash_of(line: bytes) -> str | None:
    """Return the hash that a line ends with, `None` if it is not its own."""
    end = _END.search(line)
    if end is None:
        return None
    own = end[1].decode()
    return own if hashlib.sha256(line[: end.start()] + b"}").hexdigest() == own else None
