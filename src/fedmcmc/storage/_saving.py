"""Writing the checkpoints of a run (`Saver.save`) and reading them (`Saver.load`)."""

import secrets
import time
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedmcmc.records import Draws, Recorder
from fedmcmc.storage._checkpoints import Checkpoint
from fedmcmc.storage._files import (
    MANIFEST,
    PREVIOUS_MANIFEST,
    CheckpointError,
    DamagedFileError,
    Manifest,
    PartFile,
    arrays_of,
    read_part,
    versions,
    write_part,
)
from fedmcmc.storage._identity import differences, digest_of_identity
from fedmcmc.types import ArrayTree, FederatedState

DEFAULT_SECONDS = 60.0


class Progress(NamedTuple):
    """Results of a run up to the start of a round."""

    round: int
    state: FederatedState  # in a run, in the layout of the run's devices
    accumulator_states: dict[str, ArrayTree]
    totals: dict[str, np.ndarray]
    draws: Draws
    stopped: dict[str, Any]


class LostDraws(NamedTuple):
    """Draws of a damaged part file, with numbers ``[start, stop)`` in each chain."""

    start: int
    stop: int
    damage: str


class Saver:
    """Writer and reader of the checkpoints of one run.

    `identity` identifies the run, ``{name: digest or number}``; `start_round` is its first round.
    `writes` is true in only one of the processes that share the run.
    """

    def __init__(
        self, checkpoint: Checkpoint, identity: dict[str, Any], start_round: int, *, writes: bool
    ) -> None:
        self.checkpoint, self.identity = checkpoint, identity
        self.start_round, self.writes = start_round, writes
        self.directory, self.run = Path(checkpoint.directory), digest_of_identity(identity)
        # Part files have names that no other process uses, and no other run deletes.
        self.suffix = f"-{self.run[:8]}-{secrets.token_hex(4)}.npz"
        self.manifest: Manifest | None = None  # the last one that is on disk
        self.writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.writing: Future[Manifest] | None = None
        self.lost: tuple[LostDraws, ...] = ()
        self.last_round, self.last_time = -1, time.monotonic()
        self.num_skipped = 0

    def load(self, recorder: Recorder, like: ArrayTree) -> Progress | None:
        """Return the progress in the last checkpoint; ``None`` if there is none.

        `like` is a pair of the run's state and the accumulators' states, with their structure and
        types. If a file of the last checkpoint is damaged, warn and use the previous one. If both
        are damaged, but only in their draws, omit the damaged draws and describe them in `lost`.
        Raise `CheckpointError` if the checkpoint belongs to another run or cannot be used.
        """
        if not self.checkpoint.exists:
            return None
        damages = []
        for may_lose_draws, name in product((False, True), (MANIFEST, PREVIOUS_MANIFEST)):
            try:
                progress = self._read(name, recorder, like, may_lose_draws=may_lose_draws)
                break
            except DamagedFileError as error:
                damages.append(error)
        else:
            raise CheckpointError(
                f"{damages[0]} The previous checkpoint cannot be used either: {damages[1]} Restore "
                f"a copy of these files, or delete {self.directory} to start again."
            ) from damages[1]
        if name == MANIFEST:
            self.last_round = progress.round
        else:
            warnings.warn(
                f"{damages[0]} The run continues from the previous checkpoint, of round "
                f"{progress.round}, and computes later rounds again.",
                RuntimeWarning,
                stacklevel=5,
            )
        return progress

    def _read(
        self, name: str, recorder: Recorder, like: ArrayTree, *, may_lose_draws: bool
    ) -> Progress:
        path = self.directory / name
        manifest = Manifest.read(path)
        different = differences(manifest.identity, self.identity)
        if different:
            changed = manifest.changed_versions
            note = f" It was written with {changed}." if changed else ""
            raise CheckpointError(
                f"The checkpoint in {self.directory} belongs to another run: it differs in "
                f"{', '.join(different)}.{note} {self.checkpoint.advice}"
            )
        state, accumulator_states = read_part(self.directory, manifest.state, self.run, like)
        rounds = np.unique(np.asarray(state.broadcast.round)).tolist()
        if rounds != [manifest.round]:
            raise DamagedFileError(
                f"{path} is damaged (its round is {manifest.round}, but the state in "
                f"{manifest.state.name} is of round {', '.join(map(str, rounds))})."
            )
        parts, lost, num = [], [], manifest.num_stored
        for part in manifest.draws:
            try:
                parts.append(read_part(self.directory, part, self.run, recorder.shapes))
            except DamagedFileError as error:
                if not may_lose_draws or manifest.num_stored:  # a store cannot have gaps
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
        """Number of lost draws per chain."""
        return sum(draws.stop - draws.start for draws in self.lost)

    @property
    def changed_versions(self) -> str:
        """Description of the versions that changed since the checkpoint was written."""
        return "" if self.manifest is None else self.manifest.changed_versions

    def stop_before(self, round_: int) -> int | None:
        """Return the next round after which a checkpoint is due, if rounds decide."""
        period = self.checkpoint.every_rounds
        if period is None:
            return None
        return self.start_round + ((round_ - self.start_round) // period + 1) * period

    def due(self, round_: int) -> bool:
        """Return whether a checkpoint is due after round `round_`."""
        if not self.writes:
            return False
        period, seconds = self.checkpoint.every_rounds, self.checkpoint.every_seconds
        if period is not None:
            return (round_ - self.start_round) % period == 0
        seconds = DEFAULT_SECONDS if seconds is None else seconds
        return time.monotonic() - self.last_time >= seconds

    def save(self, progress: Progress, *, wait: bool, depth: int = 2) -> None:
        """Write a checkpoint; without `wait`, in a thread while the run continues.

        Without `wait`, the checkpoint is skipped if the previous one is still being written. If the
        disk fails, the run must not lose draws: warn with the line `depth` calls above, and write
        no more checkpoints.
        """
        if not self.writes:
            return
        try:
            if self.writing is not None:
                if not wait and not self.writing.done():
                    self.num_skipped += 1
                    return
                self.manifest = self.writing.result()  # raises errors of the thread
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
                f"No checkpoint could be written up to round {progress.round} ({error}). The run "
                "continues without checkpoints, and earlier ones remain valid.",
                RuntimeWarning,
                stacklevel=depth,
            )

    def _write(self, progress: Progress, previous: Manifest | None, num_skipped: int) -> Manifest:
        """Write the part files of a checkpoint, then its manifest."""
        draws = progress.draws
        self.directory.mkdir(parents=True, exist_ok=True)

        def write_tree(kind: str, tree: ArrayTree, num_draws: int = 0) -> PartFile:
            path = self.directory / f"{kind}-{progress.round:012d}{self.suffix}"
            return PartFile(path.name, write_part(path, arrays_of(tree), self.run), num_draws)

        # Reuse the previous checkpoint's files of draws, unless a store has received some of them.
        parts: tuple[PartFile, ...] = ()
        if previous is not None and previous.num_stored == draws.num_stored:
            parts = previous.draws
        # A damaged file stays in the manifest, so that a copy of it can still be restored.
        num_saved = draws.num_stored + sum(part.num_draws for part in parts) - self.num_lost
        if draws.num_draws > num_saved:
            unsaved = draws.after(num_saved)
            parts += (write_tree("draws", unsaved, draws.num_draws - num_saved),)
        manifest = Manifest(
            identity=self.identity,
            versions=versions(),
            first=self.start_round,
            round=progress.round,
            num_draws=draws.num_draws + self.num_lost,
            draws=parts,
            state=write_tree("state", (progress.state, progress.accumulator_states)),
            totals={name: total.tolist() for name, total in progress.totals.items()},
            stopped=progress.stopped,
            num_skipped=num_skipped,
        )
        if previous is not None:
            previous.write(self.directory / PREVIOUS_MANIFEST)
        manifest.write(self.directory / MANIFEST)
        # Delete files of older checkpoints and of killed attempts of this run.
        needed = manifest.files | (previous.files if previous is not None else set())
        for path in self.directory.glob(f"*-{self.run[:8]}-*"):
            if path.name not in needed:
                path.unlink(missing_ok=True)
        return manifest

    def close(self) -> None:
        """Wait until the last checkpoint is written."""
        self.writer.shutdown(wait=True)
