"""The user's interface to checkpoints: `Checkpoint` for one run, `resumable` for many calls."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import ClassVar, NamedTuple, TypeVar

from fedmcmc._checks import positive_integer
from fedmcmc.storage._answers import Answers
from fedmcmc.storage._files import (
    MANIFEST,
    PREVIOUS_MANIFEST,
    CheckpointError,
    DamagedFileError,
    read_record,
    write_record,
)

T = TypeVar("T")
CLAIMED_FILES = "files.json"
"""Name of the record of the run's files outside of the directory."""


@dataclass(frozen=True)
class Checkpoint:
    """Directory and frequency of a run's checkpoints.

    ``sample(..., checkpoint=Checkpoint(directory))`` writes the state, the draws and the states of
    accumulators in a thread. If the process is killed, the same call continues from the last
    checkpoint, and its results are equal to the results of an uninterrupted run, to the last bit. A
    call with a larger `num_rounds` continues a finished run.

    A run raises `fedmcmc.CheckpointError` if the directory holds the checkpoint of another run
    (another model, kernel, key, start, data, number of chains, burn-in or thinning), or if another
    process writes to it. If the last checkpoint is damaged, the run continues from the previous one
    with a warning. See docs/guides/runs.md for the files.

    Parameters
    ----------
    directory
        Directory of this run only; created if missing.
    every_rounds
        Number of rounds between checkpoints.
    every_seconds
        Number of seconds between checkpoints, in place of `every_rounds`; 60 if neither is given.
        A run also writes a checkpoint when it ends, turns non-finite or is interrupted (but not if
        a run over a mesh of several processes is interrupted).

    Examples
    --------
    >>> import tempfile
    >>> import jax, numpy as np
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(lambda x: -(x**2), lambda x, rows: -((rows - x) ** 2))
    >>> data = fedmcmc.FederatedData.from_clients([np.ones(3), np.zeros(4)])
    >>> kernel = fedmcmc.lsd(posterior, step_size=0.01)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     settings = dict(progress=False, checkpoint=fedmcmc.Checkpoint(folder))
    ...     for num_rounds in (100, 150):  # the second call runs 50 rounds
    ...         fedmcmc.sample(
    ...             jax.random.key(0), kernel, data, 0.0, num_rounds=num_rounds, **settings
    ...         ).num_draws
    100
    150
    """

    directory: str | Path
    every_rounds: int | None = None
    every_seconds: float | None = None

    reraises_interrupts: ClassVar[bool] = False  # Ctrl-C ends the call, not the program

    def __post_init__(self) -> None:
        if self.every_rounds is not None and self.every_seconds is not None:
            raise ValueError("Give every_rounds= or every_seconds=, not both.")
        if self.every_rounds is not None:
            positive_integer(self.every_rounds, "every_rounds")
        if self.every_seconds is not None and not self.every_seconds >= 0:
            raise ValueError(f"every_seconds must be at least 0, got {self.every_seconds!r}.")

    @property
    def advice(self) -> str:
        """Remedy if the directory holds the checkpoint of another run."""
        return "Use a new directory, or the settings with which the checkpoint was written."

    @property
    def exists(self) -> bool:
        """True if the directory holds a checkpoint."""
        return any((Path(self.directory) / name).exists() for name in (MANIFEST, PREVIOUS_MANIFEST))

    def claims(self, *paths: str | Path | None) -> bool:
        """Return whether files at `paths` belong to this run; if none exists yet, claim them.

        Claims are recorded before the files are created, because the process may be killed between
        the creation of the files and its first checkpoint. Raise `CheckpointError` if the record of
        claims is damaged.
        """
        files = [str(Path(path).absolute()) for path in paths if path is not None]
        record = Path(self.directory) / CLAIMED_FILES
        try:
            claimed = read_record(record)["files"] if record.exists() else []
        except DamagedFileError as error:
            raise CheckpointError(
                f"{error} Restore a copy of it. To start again, delete {self.directory} and the "
                "files of draws_to= and of the store."
            ) from error
        if files and set(files) <= set(claimed):
            return True
        if files and not any(Path(path).exists() for path in files):
            Path(self.directory).mkdir(parents=True, exist_ok=True)
            write_record(record, {"files": files})
        return False


class _PerCallCheckpoint(Checkpoint):
    # Otherwise later calls would start from the few draws of an interrupted call, and store this.
    reraises_interrupts: ClassVar[bool] = True

    @property
    def advice(self) -> str:
        folder = Path(self.directory)
        return (
            f"fedmcmc.resumable identifies calls of `sample` by their order, and this is call "
            f"{int(folder.name)}: make the same calls with the same settings, or delete "
            f"{folder.parent} to start again."
        )


class _ResumableProgram(NamedTuple):
    checkpoints: Iterator[Checkpoint]  # of the next calls of `sample`
    answers: Answers


_PROGRAM: ContextVar[_ResumableProgram | None] = ContextVar("fedmcmc_resumable", default=None)
_IS_ENDING: ContextVar[bool] = ContextVar("fedmcmc_ending_programs", default=False)


@contextmanager
def _set(variable: ContextVar[T], value: T) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextmanager
def resumable(
    directory: str | Path,
    *,
    every_rounds: int | None = None,
    every_seconds: float | None = None,
) -> Iterator[None]:
    """Give each call of `fedmcmc.sample` in a ``with`` block a checkpoint, and store answers.

    If the program is killed, start it again with the same command. Finished calls are then read
    from ``directory/0001``, ``directory/0002``, ..., the killed call continues from its checkpoint,
    and later calls start. Each call returns what it would have returned in an uninterrupted
    program, to the last bit. The program must make the same calls in the same order; otherwise a
    call raises `fedmcmc.CheckpointError`.

    The sums of clients' answers to the questions of `fedmcmc.fit`, `fedmcmc.correct` and others
    are stored in ``directory/answers``. They are reused only for the same question, model, rows and
    versions of software. Consortia of real sites do not use this directory.

    Calls with their own `checkpoint`, calls inside another call (by a rule of `until`) and calls in
    other threads get no checkpoint and are not counted. After an interrupt (Ctrl-C), the call
    writes a checkpoint and ends the program, not only itself.

    Parameters
    ----------
    directory
        Directory of this program only; created if missing. Delete it once the results are safe.
        `draws_to` and the directory of a `HostStore` must be the same in each attempt.
    every_rounds, every_seconds
        Settings of each call's `fedmcmc.Checkpoint`.

    Examples
    --------
    >>> import tempfile
    >>> import jax, numpy as np
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(lambda x: -(x**2), lambda x, rows: -((rows - x) ** 2))
    >>> data = fedmcmc.FederatedData.from_clients([np.ones(3), np.zeros(4)])
    >>> kernel = fedmcmc.lsd(posterior, step_size=0.01)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for attempt in range(2):  # the second attempt runs no round
    ...         with fedmcmc.resumable(folder, every_seconds=60):
    ...             fedmcmc.sample(
    ...                 jax.random.key(0), kernel, data, 0.0, num_rounds=100, progress=False
    ...             ).num_draws
    100
    100
    """
    template = _PerCallCheckpoint(directory, every_rounds, every_seconds)
    calls = (replace(template, directory=Path(directory) / f"{call:04d}") for call in count(1))
    with _set(_PROGRAM, _ResumableProgram(calls, Answers(Path(directory) / "answers"))):
        yield


def checkpoint_of_call(checkpoint: Checkpoint | None) -> Checkpoint | None:
    """Return the `checkpoint` argument of a call or, without it, the next one of `resumable`."""
    program = _PROGRAM.get()
    if checkpoint is None and program is not None:
        return next(program.checkpoints)
    return checkpoint


def answers_of_program() -> Answers | None:
    """Return the stored answers of the program in `resumable`; ``None`` outside of it."""
    program = _PROGRAM.get()
    return None if program is None else program.answers


def without_resumable() -> AbstractContextManager[None]:
    """Hide `resumable` from calls inside a call.

    Nested calls of `sample` get no checkpoint, because their number depends on where the run was
    interrupted.
    """
    return _set(_PROGRAM, None)


def reraise_interrupts() -> AbstractContextManager[None]:
    """Let an interrupt (Ctrl-C) end the program in the ``with`` block, not only the current call.

    Otherwise a program may use the draws of an interrupted run as if the run were complete.
    """
    return _set(_IS_ENDING, True)


def hands_on_interrupts(checkpoint: Checkpoint | None) -> bool:
    """Return whether an interrupt in a call with this checkpoint must end the program."""
    return _IS_ENDING.get() or (checkpoint is not None and checkpoint.reraises_interrupts)
