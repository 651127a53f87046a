"""How a run writes its checkpoints and goes on from them."""

import secrets
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedmcmc._types import ArrayTree, FederatedState
from fedmcmc.records import Keeper
from fedmcmc.rounds import Kept
from fedmcmc.storage._checkpoints import Checkpoint
from fedmcmc.storage._files import CheckpointError, DamagedFileError
from fedmcmc.storage._identity import differences, digest_of_identity
from fedmcmc.storage._manifest import BEFORE, RUN, Manifest, changed_versions, versions
from fedmcmc.storage._parts import Part, arrays_of, read_part, write_part

__all__ = ["Saved", "Saver"]


class Saved(NamedTuple):
    """Where a run is."""

    first: int  # the round in which it began
    round: int
    state: FederatedState
    found: ArrayTree  # of the accumulators
    totals: dict[str, np.ndarray]
    stopped: dict[str, Any]


class Saver:
    """Writes and reads the checkpoints of one run.

    Parameters
    ----------
    checkpoint
        Where and how often.
    identity
        What tells this run from others, ``{what: digest or number}``.
    writes
        Whether this process is the one that writes.
    """

    def __init__(
        self, checkpoint: Checkpoint, identity: dict[str, Any], *, writes: bool = True
    ) -> None:
        self.checkpoint, self.identity, self.writes = checkpoint, identity, writes
        self.directory, self.run = Path(checkpoint.directory), digest_of_identity(identity)
        # Of the names of parts: no two processes share it, and none removes parts of another run.
        self.suffix = f"-{self.run[:8]}-{secrets.token_hex(4)}.npz"
        self.manifest: Manifest | None = None  # the last that is known to be on the disk
        self.writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.writing: Future[Manifest] | None = None
        self.last_round, self.last_time = -1, time.monotonic()
        self.num_skipped = 0
        seconds = checkpoint.every_seconds
        self.seconds = 60.0 if seconds is None else seconds

    def load(self, keeper: Keeper, state: FederatedState, found: ArrayTree) -> Saved | None:
        """Return where the run was, and give `keeper` its draws; ``None`` without a checkpoint.

        `state` and `found` tell structure and types. Where a file of the last checkpoint is
        damaged, the run goes on from the one before, with a warning.

        Raises
        ------
        CheckpointError
            If the checkpoint is another run's, or both are damaged.
        """
        if not self.checkpoint.exists:
            return None
        try:
            saved = self._read(RUN, keeper, (state, found))
            self.last_round = saved.round
        except DamagedFileError as damage:
            saved = self._read_before(damage, keeper, (state, found))
        return saved

    def _read_before(self, damage: DamagedFileError, keeper: Keeper, like: ArrayTree) -> Saved:
        try:
            saved = self._read(BEFORE, keeper, like)
        except DamagedFileError as second:
            raise CheckpointError(
                f"{damage} The checkpoint before cannot be used either: {second} Put back a copy "
                f"of these files, or delete {self.directory} to start anew."
            ) from second
        warnings.warn(
            f"{damage} The run goes on from the checkpoint before, of round {saved.round}; later "
            "rounds are computed again.",
            RuntimeWarning,
            stacklevel=6,
        )
        return saved

    def _read(self, name: str, keeper: Keeper, like: ArrayTree) -> Saved:
        """Return what a manifest and its parts say, and give `keeper` its draws."""
        path = self.directory / name
        manifest = Manifest.read(path)
        self._check_identity(manifest)
        state, found = read_part(self.directory, manifest.state, self.run, like)
        rounds = np.unique(np.asarray(state.broadcast.round)).tolist()
        if rounds != [manifest.round]:
            raise DamagedFileError(
                f"{path} is damaged (it says round {manifest.round}, the state in "
                f"{manifest.state.name} is of round {', '.join(map(str, rounds))})."
            )
        shapes = Kept(keeper.shapes.draw, keeper.shapes.info)
        parts = [
            Kept(*read_part(self.directory, part, self.run, shapes)) for part in manifest.draws
        ]
        keeper.restore(parts, manifest.num_draws)
        self.manifest = manifest
        totals = {name: np.asarray(x, np.int64) for name, x in manifest.totals.items()}
        return Saved(manifest.first, manifest.round, state, found, totals, manifest.stopped)

    def _check_identity(self, manifest: Manifest) -> None:
        different = differences(manifest.identity, self.identity)
        if not different:
            return
        changed = changed_versions(manifest)
        note = f" It was written with {changed}." if changed else ""
        raise CheckpointError(
            f"The checkpoint in {self.directory} is that of another run: it differs in "
            f"{', '.join(different)}.{note} {self.checkpoint.advice}"
        )

    def stop_before(self, at: int, first: int) -> int | None:
        """Return the next round after which a checkpoint is due, if rounds decide."""
        every = self.checkpoint.every_rounds
        return None if every is None else first + ((at - first) // every + 1) * every

    def due(self, at: int, first: int) -> bool:
        """Return whether to write after round `at`."""
        if not self.writes:
            return False
        every = self.checkpoint.every_rounds
        if every is not None:
            return (at - first) % every == 0
        return time.monotonic() - self.last_time >= self.seconds

    def save(self, saved: Saved, keeper: Keeper, *, wait: bool) -> None:
        """Write a checkpoint; without `wait` the run goes on meanwhile.

        Without `wait` it is skipped if the checkpoint before is still being written.
        """
        if not self.writes:
            return
        if self.writing is not None:
            if not wait and not self.writing.done():
                self.num_skipped += 1
                return
            self.manifest = self.writing.result()  # raises what went wrong
        if saved.round == self.last_round:
            return
        self.writing = self.writer.submit(self._generation(saved, keeper, copy=not wait))
        self.last_round, self.last_time = saved.round, time.monotonic()
        if wait:
            self.manifest = self.writing.result()

    def _generation(self, saved: Saved, keeper: Keeper, *, copy: bool) -> Callable[[], Manifest]:
        """Return a function that writes everything; with `copy`, what may change is copied now."""
        before, name = self.manifest, f"{saved.round:012d}{self.suffix}"
        # If draws go to a store, those that it does not hold are written again each time.
        old = () if before is None or keeper.keeps_rest else before.draws
        unsaved = keeper.unsaved(sum(part.num_draws for part in old))
        num_unsaved = next(iter(unsaved.info.values())).shape[1] if unsaved.info else 0
        draws, num_draws = arrays_of(unsaved, copy=False), keeper.count
        state = arrays_of((saved.state, saved.found), copy=copy)
        num_skipped = self.num_skipped

        def part(kind: str, arrays: dict[str, np.ndarray], num_draws: int = 0) -> Part:
            path = self.directory / f"{kind}-{name}"
            return Part(path.name, write_part(path, arrays, self.run), num_draws)

        def write() -> Manifest:
            self.directory.mkdir(parents=True, exist_ok=True)
            new = (part("draws", draws, num_unsaved),) if num_unsaved else ()
            manifest = Manifest(
                identity=self.identity,
                versions=versions(),
                first=saved.first,
                round=saved.round,
                num_draws=num_draws,
                draws=(*old, *new),
                state=part("state", state),
                totals={name: total.tolist() for name, total in saved.totals.items()},
                stopped=saved.stopped,
                num_skipped=num_skipped,
            )
            if before is not None:
                before.write(self.directory / BEFORE)
            manifest.write(self.directory / RUN)
            self._remove_all_but(manifest.files | (before.files if before is not None else set()))
            return manifest

        return write

    def _remove_all_but(self, parts: set[str]) -> None:
        """Remove the parts of older checkpoints, and what killed attempts of this run left."""
        for path in self.directory.glob(f"*-{self.run[:8]}-*"):
            if path.name not in parts:
                path.unlink(missing_ok=True)

    def give_up(self) -> None:
        """Write no more."""
        self.writes, self.writing = False, None

    def close(self) -> None:
        """Wait for what is being written."""
        self.writer.shutdown(wait=True)
