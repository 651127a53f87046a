"""What a site keeps on its own disk: each client state, on the disk before anything is answered.

The state of a run lies in one file with two places, of which the older one is written over. If a
site is killed while it writes, the other place holds what was before, and nothing was answered yet.
A file that had to be made anew and renamed in each round would take several times as long.
"""

import json
import os
import shutil
import struct
import weakref
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedmcmc.deploy._frames import Refused, digest_of, pack, pieces_of, printable, unpack
from fedmcmc.deploy._private import private_folder
from fedmcmc.storage import write_whole

MOST_RUNS = 16
"""Runs whose states are kept, so that a call may go on with each."""
MARKED = "mark-" + 12 * "[0-9]"
"""Names of states of earlier rounds; while one is written it has another name."""
NUMBERS = "numbers"
"""The file with the count of numbers that have left the site."""
OWNER = "site"
"""The file with the name of the site whose folder it is."""
COUNT = struct.Struct(">QI")
"""That count and a checksum."""
MARK = b"fmcstate"
PLACE = struct.Struct(">8sQQI")
"""Mark, number, bytes and checksum of what is in a place."""
ROOM, BLOCK = 256, 4096
"""Bytes that a place has at least more than its first content, as the numbers in its header grow;
and whole blocks of a disk, so that writing one place leaves those of the other alone."""


class _Found(NamedTuple):
    """What is in a place of a file; an empty or damaged one is before all others."""

    number: int
    content: bytes


class Disk:
    """A site's folder: one file with its state per run, marks of earlier rounds, and a count.

    Parameters
    ----------
    folder
        Of the site alone; made if missing, and closed to other users with all that is in it.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = private_folder(folder)
        self._number: tuple[Path, int] | None = None  # of the last state written, and its file
        self._counts: int | None = None  # the open file of the count, once it exists
        self._close_counts: Any = lambda: None

    def claim(self, site: str) -> None:
        """Write the site's name into the folder.

        Raises
        ------
        Refused
            If the folder is another site's.
        """
        path = self.folder / OWNER
        if not path.exists():
            write_whole(path, lambda file: file.write(site.encode()), private=True)
        owner = path.read_text(encoding="utf-8")
        if owner != site:
            raise Refused(
                f"The folder {self.folder} holds the state of {printable(owner)}, and this is "
                f"{site}: give each site a folder of its own."
            )

    def _of(self, run: str) -> Path:
        return self.folder / f"run-{digest_of(run.encode())[:32]}"

    def write(self, run: str, header: dict[str, Any], *parts: bytes) -> None:
        """Write the state of a run, on the disk when this returns."""
        path = self._of(run) / "state"
        pieces = pieces_of(json.dumps(header).encode(), *parts)
        if self._number is None or self._number[0] != path:
            found = max(_places(path)).number if path.exists() else 0
            self._number = path, found
        number = self._number[1] + 1
        size, crc = sum(map(len, pieces)), 0
        for piece in pieces:
            crc = zlib.crc32(piece, crc)
        data = [PLACE.pack(MARK, number, size, crc), *pieces]
        size += PLACE.size
        room = path.stat().st_size // 2 if path.exists() else 0
        if size > room:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            room = -(-(size + ROOM) // BLOCK) * BLOCK
            empty = bytes(room)
            of_places = [empty, empty]
            of_places[number % 2] = b"".join(data).ljust(room, b"\0")
            write_whole(path, lambda file: file.writelines(of_places), private=True)
        else:
            file = os.open(path, os.O_WRONLY)
            try:
                if os.pwritev(file, data, room * (number % 2)) != size:
                    raise OSError(f"{path} could not be written to its end: the disk may be full.")
                os.fsync(file)
            finally:
                os.close(file)
        self._number = path, number

    def read(self, run: str, num: int) -> tuple[dict[str, Any], list[bytes]] | None:
        """Return the state of a run with its `num` parts, ``None`` if there is none.

        Raises
        ------
        OSError
            If the file is damaged.
        """
        path = self._of(run) / "state"
        if not path.exists():
            return None
        found = max(_places(path))
        if not found.number:
            raise OSError(f"{path} is damaged: it does not hold what was written.")
        header, *parts = unpack(found.content, num + 1)
        return json.loads(header), parts

    def mark(self, run: str, rounds: Sequence[int], state: bytes, keep: Sequence[int]) -> None:
        """Keep the state before these rounds, for a server that goes on from there.

        Of those kept before, the ones of the rounds `keep` stay.
        """
        folder = self._of(run)
        for round_ in rounds:
            self._write(folder / f"mark-{round_:012d}", {}, state)
        for path in folder.glob(MARKED):
            if int(path.name[5:]) not in {*rounds, *keep}:
                path.unlink(missing_ok=True)

    def marked(self, run: str, round_: int, *, forget: bool = True) -> bytes | None:
        """Return the state that was kept before a round, and drop those of later ones.

        Without `forget` all stay.
        """
        folder = self._of(run)
        for path in folder.glob(MARKED):
            if forget and int(path.name[5:]) > round_:
                path.unlink(missing_ok=True)
        found = self._read(folder / f"mark-{round_:012d}", 1)
        return None if found is None else found[1][0]

    def begin(self, run: str) -> None:
        """Remove what an earlier attempt at a run left, and the oldest of many runs."""
        shutil.rmtree(self._of(run), ignore_errors=True)
        self._number = None
        by_age = sorted(self.folder.glob("run-*"), key=_age)
        for path in by_age[: max(len(by_age) - MOST_RUNS, 0)]:
            shutil.rmtree(path, ignore_errors=True)

    @property
    def num_numbers(self) -> int:
        """Count of numbers that have left the site.

        Raises
        ------
        OSError
            If the file is damaged.
        """
        path = self.folder / NUMBERS
        if not path.exists():
            return 0
        data = os.pread(self._count_file(), COUNT.size + 1, 0)
        if len(data) == COUNT.size:
            total, expected = COUNT.unpack(data)
            if zlib.crc32(data[:-4]) == expected:
                return int(total)
        raise OSError(
            f"{path} is damaged: it does not hold the count of numbers that left the site. Remove "
            f"it if the site has an audit log, whose count then holds."
        )

    def count_numbers(self, total: int) -> None:
        """Write the count of numbers that have left the site.

        One short write, which a kill leaves whole; nothing waits for the disk.
        """
        data = COUNT.pack(total, 0)[:-4]
        data += zlib.crc32(data).to_bytes(4, "big")
        if os.pwrite(self._count_file(), data, 0) != COUNT.size:
            path = self.folder / NUMBERS
            raise OSError(f"{path} could not be written to its end: the disk may be full.")

    def _count_file(self) -> int:
        """Return the file of the count, which stays open: it is used in each round.

        It is opened again if another file has its name now.
        """
        path = self.folder / NUMBERS
        if self._counts is not None:
            try:
                if os.path.samestat(os.stat(path), os.fstat(self._counts)):
                    return self._counts
            except FileNotFoundError:
                pass
        self._close_counts()
        self._counts = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self._close_counts = weakref.finalize(self, os.close, self._counts)
        self._close_counts.atexit = False  # threads may answer until the process ends
        return self._counts

    def _write(self, path: Path, header: dict[str, Any], *parts: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        whole = pack(json.dumps(header).encode(), *parts)
        digest = bytes.fromhex(digest_of(whole))
        write_whole(path, lambda file: file.writelines((digest, whole)), private=True)

    def _read(self, path: Path, num: int) -> tuple[dict[str, Any], list[bytes]] | None:
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        if data[:32].hex() != digest_of(data[32:]):
            raise OSError(f"{path} is damaged: it does not hold what was written.")
        header, *parts = unpack(data[32:], num + 1)
        return json.loads(header), parts


def _places(path: Path) -> list[_Found]:
    """Return what is in both places of a file."""
    data = path.read_bytes()
    room = len(data) // 2
    return [_found(data[:room]), _found(data[room:])]


def _found(place: bytes) -> _Found:
    if len(place) >= PLACE.size:
        mark, number, size, expected = PLACE.unpack_from(place)
        content = place[PLACE.size : PLACE.size + size]
        if mark == MARK and len(content) == size and zlib.crc32(content) == expected:
            return _Found(number, content)
    return _Found(0, b"")


def _age(folder: Path) -> float:
    """Return when a run's state was written last."""
    path = folder / "state"
    return (path if path.exists() else folder).stat().st_mtime
