"""Checkpoints: a run that is killed goes on where it was, to the last bit."""

import json
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import numpy as np

from fedmcmc._files import read_npz, write_whole, written_npz
from fedmcmc._keeping import Keeper
from fedmcmc._orbax import read_orbax, written_orbax
from fedmcmc._segments import Kept
from fedmcmc._types import ArrayTree
from fedmcmc.checks import positive_integer

__all__ = ["Checkpoint", "Saved", "Saver"]

RUN, CLAIMED = "run.json", "files.json"
FORMATS = ("npz", "orbax")


@dataclass(frozen=True)
class Checkpoint:
    """Where and how often a run writes down where it is.

    ``sample(..., checkpoint=Checkpoint(directory))`` writes the state, the draws so far and the
    accumulators' states. The same call goes on from there after the process was killed, whenever
    that was; draws, ``info`` and ``totals`` are those of an uninterrupted run, to the last bit.
    With more `num_rounds` a finished run goes on too. A directory that holds the checkpoint of
    another run (another model, kernel, key, start, data, number of chains, burn-in, thinning) is
    refused.

    Files are complete or not there, and a thread of its own writes them while the run goes on.

    Parameters
    ----------
    directory
        Created if missing. One run's own.
    every_rounds
        Rounds from one checkpoint to the next.
    every_seconds
        Seconds, in place of rounds; 60 if neither is given. The end of a run is written as well,
        and so are an interrupted run and one that turned non-finite.
    format
        Of the state: ``"npz"``, or ``"orbax"`` (``pip install "fedmcmc[orbax]"``), which writes
        large states in parallel. Draws are ``.npz`` files.

    Examples
    --------
    >>> import tempfile
    >>> import jax, jax.numpy as jnp
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(
    ...     lambda theta: -0.5 * theta**2, lambda theta, x: -0.5 * (x - theta) ** 2
    ... )
    >>> data = fedmcmc.FederatedData.from_clients([jnp.ones(3), jnp.zeros(4)])
    >>> kernel = fedmcmc.lsd(posterior, step_size=0.01)
    >>> folder = tempfile.TemporaryDirectory()
    >>> def run(num_rounds):
    ...     return fedmcmc.sample(
    ...         jax.random.key(0), kernel, data, 0.0, num_rounds=num_rounds, progress=False,
    ...         checkpoint=fedmcmc.Checkpoint(folder.name),
    ...     )
    >>> run(100).num_draws, run(150).num_draws  # the second runs 50 rounds
    (100, 150)
    >>> folder.cleanup()
    """

    directory: str | Path
    every_rounds: int | None = None
    every_seconds: float | None = None
    format: Literal["npz", "orbax"] = "npz"

    hands_on_interrupts: ClassVar[bool] = False  # or Ctrl-C ends the run, and not the program

    def __post_init__(self) -> None:
        if self.every_rounds is not None and self.every_seconds is not None:
            raise ValueError("Give every_rounds= or every_seconds=, and not both.")
        if self.every_rounds is not None:
            positive_integer(self.every_rounds, "every_rounds")
        if self.every_seconds is not None and not self.every_seconds >= 0:
            raise ValueError(f"every_seconds must be at least 0, got {self.every_seconds!r}.")
        if self.format not in FORMATS:
            raise ValueError(f"format must be one of {FORMATS}, got {self.format!r}.")

    @property
    def advice(self) -> str:
        """What to do where the directory holds the checkpoint of another run."""
        return (
            "Give the run a directory of its own, or the settings with which the checkpoint was "
            "written."
        )

    @property
    def exists(self) -> bool:
        """Whether the directory holds a checkpoint."""
        return (Path(self.directory) / RUN).is_file()

    def claims(self, *paths: Path | None) -> bool:
        """Return whether files at `paths` are this run's, and take note that they will be.

        A process may die after it made them and before its first checkpoint.
        """
        given = [str(path.absolute()) for path in paths if path is not None]
        marker = Path(self.directory) / CLAIMED
        known = json.loads(marker.read_text()) if marker.is_file() else []
        if given and set(given) <= set(known):
            return True
        if given and not any(Path(path).exists() for path in given):
            Path(self.directory).mkdir(parents=True, exist_ok=True)
            write_whole(marker, lambda file: file.write(json.dumps(given).encode()))
        return False


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
