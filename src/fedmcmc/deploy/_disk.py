"""What a site keeps on its own disk: each client state, on the disk before anything is answered."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedmcmc.deploy._frames import digest_of, pack, unpack
from fedmcmc.storage import write_whole

MOST_RUNS = 16
"""Runs whose states are kept, so that a call may go on with each."""
MARKED = "mark-" + 12 * "[0-9]"
"""Names of states of earlier rounds; while one is written it has another name."""
RESERVED = 100
"""Rounds of which the count is written ahead, so that not every round waits for the disk."""


class Disk:
    """A site's folder: one file with its state per run, marks of earlier rounds, and a count.

    Parameters
    ----------
    folder
        Of the site alone; made if missing.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    def _of(self, run: str) -> Path:
        return self.folder / f"run-{digest_of(run.encode())[:32]}"

    def write(self, run: str, header: dict[str, Any], *parts: bytes) -> None:
        """Write the state of a run, on the disk when this returns."""
        self._write(self._of(run) / "state", header, *parts)

    def read(self, run: str, num: int) -> tuple[dict[str, Any], list[bytes]] | None:
        """Return the state of a run with its `num` parts, ``None`` if there is none.

        Raises
        ------
        OSError
            If the file is damaged.
        """
        return self._read(self._of(run) / "state", num)

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
        by_age = sorted(self.folder.glob("run-*"), key=lambda path: path.stat().st_mtime)
        for path in by_age[: max(len(by_age) - MOST_RUNS, 0)]:
            shutil.rmtree(path, ignore_errors=True)

    @property
    def reserved(self) -> int:
        """How many rounds were answered, rounded up to what was written ahead."""
        found = self._read(self.folder / "rounds", 0)
        return 0 if found is None else int(found[0]["reserved"])

    def reserve(self, num: int) -> None:
        """Write down that up to `num` rounds are answered."""
        self._write(self.folder / "rounds", {"reserved": num})

    def _write(self, path: Path, header: dict[str, Any], *parts: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = pack(json.dumps(header).encode(), *parts)
        digest = bytes.fromhex(digest_of(whole))
        write_whole(path, lambda file: file.writelines((digest, whole)))

    def _read(self, path: Path, num: int) -> tuple[dict[str, Any], list[bytes]] | None:
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        if data[:32].hex() != digest_of(data[32:]):
            raise OSError(f"{path} is damaged: it does not hold what was written.")
        header, *parts = unpack(data[32:], num + 1)
        return json.loads(header), parts
