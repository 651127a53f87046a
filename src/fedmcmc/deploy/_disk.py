"""A site's folder on its disk. Each client state is on the disk before the site answers.

The file of a run's state has two slots; each write replaces the older one. If a site is killed
during a write, the other slot holds the previous state, and the site has not answered yet. Creating
and renaming a file in each round would take several times as long.
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
from fedmcmc.storage import write_atomically

MAX_RUNS = 16
"""Number of runs whose states stay on the disk, so that the server can continue each of them."""
MARKED = "mark-" + 12 * "[0-9]"
"""Pattern of the names of states of earlier rounds; an unfinished file has another name."""
NUMBERS = "numbers"
"""File with the count of numbers that have left the site."""
OWNER = "site"
"""File with the name of the site that owns the folder."""
COUNT = struct.Struct(">QI")
"""Count of numbers and a checksum."""
MARK = b"fmcstate"
SLOT_HEADER = struct.Struct(">8sQQI")
"""Mark, version, length and checksum of the content of a slot."""
SPARE_BYTES, BLOCK_BYTES = 256, 4096
"""Spare bytes of a slot for growing numbers in the header, and bytes of a disk block. A slot has a
whole number of blocks, so that a write to one slot cannot damage the other."""


class _Slot(NamedTuple):
    """Content of a slot of a file and its version, 0 if the slot is empty or damaged."""

    version: int
    content: bytes


class Disk:
    """Folder of one site: a state per run, marks of earlier rounds, and a count of numbers.

    The folder is created if it is missing. Other users get no access to its content.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = private_folder(folder)
        self._version: tuple[Path, int] | None = None  # file and version of the last written state
        self._count_fd: int | None = None  # descriptor of the open file of the count
        self._close_count: Any = lambda: None

    def claim(self, site: str) -> None:
        """Write the site's name into the folder; raise `Refused` if it belongs to another site."""
        path = self.folder / OWNER
        if not path.exists():
            write_atomically(path, lambda file: file.write(site.encode()), private=True)
        owner = path.read_text(encoding="utf-8")
        if owner != site:
            raise Refused(
                f"The folder {self.folder} holds the state of {printable(owner)}, but this is "
                f"{site}: give each site its own folder."
            )

    def _folder_of(self, run: str) -> Path:
        return self.folder / f"run-{digest_of(run.encode())[:32]}"

    def write(self, run: str, header: dict[str, Any], *parts: bytes) -> None:
        """Write the state of a run; it is on the disk when this returns."""
        path = self._folder_of(run) / "state"
        pieces = pieces_of(json.dumps(header).encode(), *parts)
        if self._version is None or self._version[0] != path:
            self._version = path, max(_read_slots(path)).version if path.exists() else 0
        version = self._version[1] + 1
        size, crc = sum(map(len, pieces)), 0
        for piece in pieces:
            crc = zlib.crc32(piece, crc)
        data = [SLOT_HEADER.pack(MARK, version, size, crc), *pieces]
        size += SLOT_HEADER.size
        slot_bytes = path.stat().st_size // 2 if path.exists() else 0
        if size > slot_bytes:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            slot_bytes = -(-(size + SPARE_BYTES) // BLOCK_BYTES) * BLOCK_BYTES
            empty = bytes(slot_bytes)
            slots = [empty, empty]
            slots[version % 2] = b"".join(data).ljust(slot_bytes, b"\0")
            write_atomically(path, lambda file: file.writelines(slots), private=True)
        else:
            file = os.open(path, os.O_WRONLY)
            try:
                if os.pwritev(file, data, slot_bytes * (version % 2)) != size:
                    raise OSError(f"{path} could not be written to its end: the disk may be full.")
                os.fsync(file)
            finally:
                os.close(file)
        self._version = path, version

    def read(self, run: str, num: int) -> tuple[dict[str, Any], list[bytes]] | None:
        """Return header and `num` parts of a run's state, ``None`` without a state.

        Raise `OSError` if the file is damaged.
        """
        path = self._folder_of(run) / "state"
        if not path.exists():
            return None
        slot = max(_read_slots(path))
        if not slot.version:
            raise OSError(f"{path} is damaged: its checksum does not match.")
        header, *parts = unpack(slot.content, num + 1)
        return json.loads(header), parts

    def mark(self, run: str, rounds: Sequence[int], state: bytes, keep: Sequence[int]) -> None:
        """Store the state before these rounds, so that a server can continue there.

        Remove all stored states except for the states of these rounds and of the rounds `keep`.
        """
        folder = self._folder_of(run)
        content = pack(b"{}", state)
        pieces = bytes.fromhex(digest_of(content)), content
        for round_ in rounds:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            path = folder / f"mark-{round_:012d}"
            write_atomically(path, lambda file: file.writelines(pieces), private=True)
        for path in folder.glob(MARKED):
            if int(path.name[5:]) not in {*rounds, *keep}:
                path.unlink(missing_ok=True)

    def marked(self, run: str, round_: int, *, forget: bool = True) -> bytes | None:
        """Return the stored state before a round; with `forget`, remove states of later rounds."""
        folder = self._folder_of(run)
        for path in folder.glob(MARKED):
            if forget and int(path.name[5:]) > round_:
                path.unlink(missing_ok=True)
        path = folder / f"mark-{round_:012d}"
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        if data[:32].hex() != digest_of(data[32:]):
            raise OSError(f"{path} is damaged: its checksum does not match.")
        state: bytes = unpack(data[32:], 2)[1]
        return state

    def begin(self, run: str) -> None:
        """Remove files of an earlier attempt at a run, and the oldest runs beyond `MAX_RUNS`."""
        shutil.rmtree(self._folder_of(run), ignore_errors=True)
        self._version = None
        by_age = sorted(self.folder.glob("run-*"), key=_age)
        for path in by_age[: max(len(by_age) - MAX_RUNS, 0)]:
            shutil.rmtree(path, ignore_errors=True)

    @property
    def num_numbers(self) -> int:
        """Count of numbers that have left the site; a damaged file raises `OSError`."""
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
            f"it if the site has an audit log; the count in the log then applies."
        )

    def count_numbers(self, total: int) -> None:
        """Write the count of numbers that have left the site.

        A kill cannot interrupt the single short write. The site does not wait for the disk.
        """
        data = COUNT.pack(total, 0)[:-4]
        data += zlib.crc32(data).to_bytes(4, "big")
        if os.pwrite(self._count_file(), data, 0) != COUNT.size:
            path = self.folder / NUMBERS
            raise OSError(f"{path} could not be written to its end: the disk may be full.")

    def _count_file(self) -> int:
        """Return the descriptor of the count's file, which stays open for the next round.

        If another file has replaced it, open the new file.
        """
        path = self.folder / NUMBERS
        if self._count_fd is not None:
            try:
                if os.path.samestat(os.stat(path), os.fstat(self._count_fd)):
                    return self._count_fd
            except FileNotFoundError:
                pass
        self._close_count()
        self._count_fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self._close_count = weakref.finalize(self, os.close, self._count_fd)
        self._close_count.atexit = False  # threads may answer until the process ends
        return self._count_fd


def _read_slots(path: Path) -> list[_Slot]:
    """Return both slots of a file."""
    data = path.read_bytes()
    slot_bytes = len(data) // 2
    return [_parse_slot(data[:slot_bytes]), _parse_slot(data[slot_bytes:])]


def _parse_slot(data: bytes) -> _Slot:
    if len(data) >= SLOT_HEADER.size:
        mark, version, size, expected = SLOT_HEADER.unpack_from(data)
        content = data[SLOT_HEADER.size : SLOT_HEADER.size + size]
        if mark == MARK and len(content) == size and zlib.crc32(content) == expected:
            return _Slot(version, content)
    return _Slot(0, b"")


def _age(folder: Path) -> float:
    """Return the time of the last write of a run's state."""
    path = folder / "state"
    return (path if path.exists() else folder).stat().st_mtime
