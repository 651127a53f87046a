"""What a run does for its checkpoint: write it, and go on from it."""

import json
import time
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedmcmc._types import ArrayTree
from fedmcmc.records import Keeper
from fedmcmc.rounds import Kept
from fedmcmc.storage._checkpoints import RUN, Checkpoint
from fedmcmc.storage._files import read_npz, write_whole, written_npz
from fedmcmc.storage._orbax import read_orbax, written_orbax

__all__ = ["Saved", "Saver"]


class Saved(NamedTuple):
    """Where a run is."""

    first: int  # the round in which it began
    round: int
    state: ArrayTree
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
        self.directory = Path(checkpoint.directory)
        self.parts: list[tuple[str, int]] = []  # files of draws, and how many each holds
        self.writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.writing: Future[None] | None = None
        self.last_round, self.last_time = -1, time.monotonic()
        seconds = checkpoint.every_seconds
        self.seconds = 60.0 if seconds is None else seconds

    def load(self, keeper: Keeper, state: ArrayTree, found: ArrayTree) -> Saved | None:
        """Return where the run was, and give `keeper` its draws; ``None`` without a checkpoint.

        `state` and `found` tell structure and types.

        Raises
        ------
        ValueError
            If the checkpoint is another run's.
        """
        path = self.directory / RUN
        if not path.is_file():
            return None
        record = json.loads(path.read_text())
        self._check(record)
        shapes = Kept(*_kept_like(keeper))
        self.parts = [(name, num) for name, num in record["draws"]]
        parts = [read_npz(self.directory / name, shapes) for name, _ in self.parts]
        keeper.restore([Kept(*part) for part in parts], record["num_draws"])
        place = self.directory / record["state"]
        read = read_orbax if record["format"] == "orbax" else read_npz
        old_state, old_found = read(place, (state, found))
        totals = {name: np.asarray(x, np.int64) for name, x in record["totals"].items()}
        self.last_round = record["round"]
        return Saved(
            record["first"], record["round"], old_state, old_found, totals, record["stopped"]
        )

    def _check(self, record: dict[str, Any]) -> None:
        different = [
            f"{name} ({record['identity'].get(name)}, now {value})"
            if isinstance(value, int | bool)
            else name
            for name, value in self.identity.items()
            if record["identity"].get(name) != value
        ]
        if not different:
            return
        now, then = _versions(), record["versions"]
        changed = [
            f"{name} {then.get(name)}, now {now[name]}" for name in now if then[name] != now[name]
        ]
        note = f" It was written with {'; '.join(changed)}." if changed else ""
        raise ValueError(
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
        """Write down where the run is; without `wait` while it goes on.

        Where the one before is still being written, nothing is done unless `wait`.
        """
        if not self.writes:
            return
        if self.writing is not None:
            if not wait and not self.writing.done():
                return
            self.writing.result()  # raises what went wrong
        if saved.round == self.last_round and self.checkpoint.exists:
            return
        self.writing = self.writer.submit(self._writes(saved, keeper, copy=not wait))
        self.last_round, self.last_time = saved.round, time.monotonic()
        if wait:
            self.writing.result()

    def _writes(self, saved: Saved, keeper: Keeper, *, copy: bool) -> Any:
        """Return what writes everything; with `copy` what may change later is copied here."""
        self.directory.mkdir(parents=True, exist_ok=True)
        new = keeper.unsaved()
        num = next(iter(new.info.values())).shape[1] if new.info else 0
        rest = keeper.keeps_rest
        parts = [] if rest else list(self.parts)
        draws = None
        if num:
            name = f"draws-{saved.round:012d}.npz"
            parts.append((name, num))
            draws = (self.directory / name, written_npz(new, copy=False))
        self.parts = parts
        keeper.mark_saved()
        orbax = self.checkpoint.format == "orbax"
        place = self.directory / f"state-{saved.round:012d}{'' if orbax else '.npz'}"
        tree = (saved.state, saved.found)
        write_state = written_orbax(tree, copy) if orbax else written_npz(tree, copy)
        record = {
            "identity": self.identity,
            "versions": _versions(),
            "format": self.checkpoint.format,
            "first": saved.first,
            "round": saved.round,
            "num_draws": keeper.count,
            "draws": parts,
            "state": place.name,
            "totals": {name: total.tolist() for name, total in saved.totals.items()},
            "stopped": saved.stopped,
        }
        text = json.dumps(record, indent=1).encode()

        def write() -> None:
            if draws is not None:
                draws[1](draws[0])
            write_state(place)
            write_whole(self.directory / RUN, lambda file: file.write(text))
            self._remove_old({RUN, place.name, *(name for name, _ in parts)})

        return write

    def _remove_old(self, needed: set[str]) -> None:
        for path in self.directory.iterdir():
            if path.name not in needed and path.name.startswith(("draws-", "state-", RUN)):
                if path.is_dir():
                    _remove_folder(path)
                else:
                    path.unlink()

    def give_up(self) -> None:
        """Write no more."""
        self.writes, self.writing = False, None

    def close(self) -> None:
        """Wait for what is being written."""
        self.writer.shutdown(wait=True)


def _remove_folder(path: Path) -> None:
    for child in path.iterdir():
        if child.is_dir():
            _remove_folder(child)
        else:
            child.unlink()
    path.rmdir()


def _kept_like(keeper: Keeper) -> tuple[ArrayTree, Any]:
    return keeper.shapes.draw, keeper.shapes.info


def _versions() -> dict[str, str]:
    return {"fedmcmc": version("fedmcmc"), "jax": jax.__version__, "numpy": np.__version__}
