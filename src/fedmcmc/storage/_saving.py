"""How a run writes its checkpoints (`Saver.save`) and goes on from them (`Saver.load`)."""

import secrets
import time
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedmcmc._types import ArrayTree
from fedmcmc.records import Draws, Recorder
from fedmcmc.storage._checkpoints import Checkpoint
from fedmcmc.storage._files import (
    BEFORE,
    RUN,
    CheckpointError,
    DamagedFileError,
    Manifest,
    Part,
    arrays_of,
    changed_versions,
    read_part,
    versions,
    write_part,
)
from fedmcmc.storage._identity import differences, digest_of_identity


class Progress(NamedTuple):
    """Where a run is, and what it has: all of it of one round."""

    round: int
    state: Any  # a `FederatedState`; in a run, as the run's devices hold it
    accumulator_states: dict[str, ArrayTree]
    totals: dict[str, np.ndarray]
    draws: Draws
    stopped: dict[str, Any]


class LostDraws(NamedTuple):
    """Draws of a part that is damaged: per chain those with numbers ``[first, last)``."""

    first: int
    last: int
    damage: str


class Saver:
    """Writes and reads the checkpoints of one run.

    Parameters
    ----------
    checkpoint
        Where and how often.
    identity
        What tells this run from others, ``{what: digest or number}``.
    first
        The round in which the run began.
    writes
        Whether this process is the one that writes.
    """

    def __init__(
        self, checkpoint: Checkpoint, identity: dict[str, Any], first: int, *, writes: bool = True
    ) -> None:
        self.checkpoint, self.identity, self.first = checkpoint, identity, first
        self.writes = writes
        self.directory, self.run = Path(checkpoint.directory), digest_of_identity(identity)
        # Of the names of parts: no two processes share it, and none removes parts of another run.
        self.suffix = f"-{self.run[:8]}-{secrets.token_hex(4)}.npz"
        self.manifest: Manifest | None = None  # the last that is known to be on the disk
        self.writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.writing: Future[Manifest] | None = None
        self.lost: tuple[LostDraws, ...] = ()
        self.last_round, self.last_time = -1, time.monotonic()
        self.num_skipped = 0
        seconds = checkpoint.every_seconds
        self.seconds = 60.0 if seconds is None else seconds

    def load(self, recorder: Recorder, like: ArrayTree) -> Progress | None:
        """Return where the run was; ``None`` without a checkpoint.

        `like` is the state and those of the accumulators, in structure and types. Where a file of
        the last checkpoint is damaged, the run goes on from the one before, with a warning. Where
        that cannot be used either, and the damage is to draws alone, the run goes on without these
        draws, which are then in `lost`.

        Raises
        ------
        CheckpointError
            If the checkpoint is another run's, or both are damaged.
        """
        if not self.checkpoint.exists:
            return None
        damages = []
        for name, may_lose in ((RUN, False), (BEFORE, False), (RUN, True), (BEFORE, True)):
            try:
                progress = self._read(name, recorder, like, may_lose=may_lose)
                break
            except DamagedFileError as error:
                damages.append(error)
        else:
            raise CheckpointError(
                f"{damages[0]} The checkpoint before cannot be used either: {damages[1]} Put back "
                f"a copy of these files, or delete {self.directory} to start anew."
            ) from damages[1]
        if name == RUN:
            self.last_round = progress.round
        else:
            warnings.warn(
                f"{damages[0]} The run goes on from the checkpoint before, of round "
                f"{progress.round}; later rounds are computed again.",
                RuntimeWarning,
                stacklevel=5,
            )
        return progress

    def _read(self, name: str, recorder: Recorder, like: ArrayTree, *, may_lose: bool) -> Progress:
        path = self.directory / name
        manifest = Manifest.read(path)
        different = differences(manifest.identity, self.identity)
        if different:
            changed = changed_versions(manifest)
            note = f" It was written with {changed}." if changed else ""
            raise CheckpointError(
                f"The checkpoint in {self.directory} is that of another run: it differs in "
                f"{', '.join(different)}.{note} {self.checkpoint.advice}"
            )
        state, accumulator_states = read_part(self.directory, manifest.state, self.run, like)
        rounds = np.unique(np.asarray(state.broadcast.round)).tolist()
        if rounds != [manifest.round]:
            raise DamagedFileError(
                f"{path} is damaged (it says round {manifest.round}, the state in "
                f"{manifest.state.name} is of round {', '.join(map(str, rounds))})."
            )
        parts, lost, num = [], [], manifest.num_stored
        for part in manifest.draws:
            try:
                parts.append(read_part(self.directory, part, self.run, recorder.shapes))
            except DamagedFileError as error:
                if not may_lose or manifest.num_stored:  # a store has no gaps
                    raise
                lost.append(LostDraws(num, num + part.num_draws, str(error)))
            num += part.num_draws
        draws = Draws(manifest.num_stored, tuple(parts))
        recorder.check(draws)
        self.manifest, self.lost = manifest, tuple(lost)
        totals = {name: np.asarray(x, np.int64) for name, x in manifest.totals.items()}
        return Progress(manifest.round, state, accumulator_states, totals, draws, manifest.stopped)

    @property
    def num_lost(self) -> int:
        """Draws per chain that are lost."""
        return sum(draws.last - draws.first for draws in self.lost)

    @property
    def changed_versions(self) -> str:
        """Which versions of software are others than those that wrote the checkpoint, if any."""
        return "" if self.manifest is None else changed_versions(self.manifest)

    def stop_before(self, at: int) -> int | None:
        """Return the next round after which a checkpoint is due, if rounds decide."""
        every = self.checkpoint.every_rounds
        return None if every is None else self.first + ((at - self.first) // every + 1) * every

    def due(self, at: int) -> bool:
        """Return whether to write after round `at`."""
        if not self.writes:
            return False
        every = self.checkpoint.every_rounds
        if every is not None:
            return (at - self.first) % every == 0
        return time.monotonic() - self.last_time >= self.seconds

    def save(self, progress: Progress, *, wait: bool, depth: int = 2) -> None:
        """Write a checkpoint; without `wait` a thread does, while the run goes on.

        Without `wait` it is skipped if the checkpoint before is still being written. If the disk
        does not take it, which must not cost the draws, no more are written, with a warning, which
        names the line `depth` calls from here.
        """
        if not self.writes:
            return
        try:
            if self.writing is not None:
                if not wait and not self.writing.done():
                    self.num_skipped += 1
                    return
                self.manifest = self.writing.result()  # raises what went wrong
            if progress.round == self.last_round:
                return
            self.writing = self.writer.submit(
                self._write, progress, self.manifest, self.num_skipped
            )
            self.last_round, self.last_time = progress.round, time.monotonic()
            if wait:
                self.manifest = self.writing.result()
        except OSError as error:
            self.writes, self.writing = False, None
            warnings.warn(
                f"No checkpoint could be written up to round {progress.round} ({error}); the run "
                "goes on without. The last one before is still good.",
                RuntimeWarning,
                stacklevel=depth,
            )

    def _write(self, progress: Progress, before: Manifest | None, num_skipped: int) -> Manifest:
        """Write the parts of a checkpoint, then its manifest."""
        draws, name = progress.draws, f"{progress.round:012d}{self.suffix}"
        self.directory.mkdir(parents=True, exist_ok=True)

        def part(kind: str, tree: ArrayTree, num_draws: int = 0) -> Part:
            path = self.directory / f"{kind}-{name}"
            return Part(path.name, write_part(path, arrays_of(tree), self.run), num_draws)

        # Draws in parts of the checkpoint before stay there, unless a store took some of them.
        parts: tuple[Part, ...] = ()
        if before is not None and before.num_stored == draws.num_stored:
            parts = before.draws
        # A damaged part stays in the manifest: a copy of it can still be put back.
        num_saved = draws.num_stored + sum(part.num_draws for part in parts) - self.num_lost
        if draws.num_draws > num_saved:
            parts += (part("draws", draws.after(num_saved), draws.num_draws - num_saved),)
        manifest = Manifest(
            identity=self.identity,
            versions=versions(),
            first=self.first,
            round=progress.round,
            num_draws=draws.num_draws + self.num_lost,
            draws=parts,
            state=part("state", (progress.state, progress.accumulator_states)),
            totals={name: total.tolist() for name, total in progress.totals.items()},
            stopped=progress.stopped,
            num_skipped=num_skipped,
        )
        if before is not None:
            before.write(self.directory / BEFORE)
        manifest.write(self.directory / RUN)
        # Parts of older checkpoints, and what killed attempts of this run left.
        needed = manifest.files | (before.files if before is not None else set())
        for path in self.directory.glob(f"*-{self.run[:8]}-*"):
            if path.name not in needed:
                path.unlink(missing_ok=True)
        return manifest

    def close(self) -> None:
        """Wait for what is being written."""
        self.writer.shutdown(wait=True)
