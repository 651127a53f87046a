"""What a user says of checkpoints: `Checkpoint` for one run, `resumable` for a program of many."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from fedmcmc._checks import positive_integer
from fedmcmc.storage._answers import Answers
from fedmcmc.storage._files import (
    BEFORE,
    RUN,
    CheckpointError,
    DamagedFileError,
    read_record,
    write_record,
)

CLAIMS = "files.json"
"""Files of the run outside of the directory."""


@dataclass(frozen=True)
class Checkpoint:
    """Where and how often a run saves its progress.

    ``sample(..., checkpoint=Checkpoint(directory))`` writes the state, the draws so far and the
    accumulators' states. If the process is killed at any time, the same call goes on from the last
    checkpoint. Its draws, ``info`` and ``totals`` are those of an uninterrupted run, to the last
    bit. A call with more `num_rounds` continues a finished run.

    A run raises `fedmcmc.CheckpointError` if the directory holds the checkpoint of another run
    (another model, kernel, key, start, data, number of chains, burn-in or thinning), or if another
    process writes there.

    A thread writes the files while the run goes on, and each file appears only once it is
    complete. Files have checksums, and the last two checkpoints are kept: if a file of the last
    one is damaged, the run goes on from the one before, with a warning.
    If the damage is to draws that both hold, the run continues without these draws, and a warning
    names their rounds. A checkpoint that other versions of JAX, NumPy or fedmcmc wrote warns, too.

    Parameters
    ----------
    directory
        Created if missing. Each run needs one of its own.
    every_rounds
        Rounds from one checkpoint to the next.
    every_seconds
        Seconds, in place of rounds; 60 if neither is given. A checkpoint is also written at the end
        of a run, when it turns non-finite and when it is interrupted. An interrupted run over a
        mesh of several processes writes none.

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

    hands_on_interrupts: ClassVar[bool] = False  # Ctrl-C ends the call alone, not the program

    def __post_init__(self) -> None:
        if self.every_rounds is not None and self.every_seconds is not None:
            raise ValueError("Give every_rounds= or every_seconds=, and not both.")
        if self.every_rounds is not None:
            positive_integer(self.every_rounds, "every_rounds")
        if self.every_seconds is not None and not self.every_seconds >= 0:
            raise ValueError(f"every_seconds must be at least 0, got {self.every_seconds!r}.")

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
        return any((Path(self.directory) / name).exists() for name in (RUN, BEFORE))

    def claims(self, *paths: str | Path | None) -> bool:
        """Return whether files at `paths` are this run's, and note them as its own if they are new.

        The note is written before the files, since a process may die after it made them and before
        its first checkpoint.

        Raises
        ------
        CheckpointError
            If the record of such files is damaged.
        """
        files = [str(Path(path).absolute()) for path in paths if path is not None]
        record = Path(self.directory) / CLAIMS
        try:
            known = read_record(record)["files"] if record.exists() else []
        except DamagedFileError as error:
            raise CheckpointError(
                f"{error} Put back a copy of it, or delete {self.directory} and the files of "
                "draws_to= and of the store to start anew."
            ) from error
        if files and set(files) <= set(known):
            return True
        if files and not any(Path(path).exists() for path in files):
            Path(self.directory).mkdir(parents=True, exist_ok=True)
            write_record(record, {"files": files})
        return False


class _OfCall(Checkpoint):
    # Later calls would otherwise start from the few draws of an interrupted one, and be saved so.
    hands_on_interrupts: ClassVar[bool] = True

    @property
    def advice(self) -> str:
        folder = Path(self.directory)
        return (
            f"This is call {int(folder.name)} of `sample` in fedmcmc.resumable, which knows calls "
            "by their order: make the same calls with the same settings, or delete "
            f"{folder.parent} to start anew."
        )


class _Program(NamedTuple):
    """What a program in `resumable` keeps."""

    checkpoints: Iterator[Checkpoint]  # of the next calls of `sample`
    answers: Answers


_PROGRAM: ContextVar[_Program | None] = ContextVar("fedmcmc_resumable", default=None)
_ENDING: ContextVar[bool] = ContextVar("fedmcmc_ending_programs", default=False)


@contextmanager
def _having(variable: ContextVar[Any], value: Any) -> Iterator[None]:
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
    """Give every call of `fedmcmc.sample` in a ``with`` block a checkpoint, and keep answers.

    If the program is killed, start it again with the same command. Finished calls are then read
    back from ``directory/0001``, ``directory/0002``, ...; the call that was killed goes on from
    its checkpoint; later calls start. Each returns what it would have returned in an uninterrupted
    program, to the last bit. The calls must come in the same order: a call that finds the
    checkpoint of another one is refused.

    The sums of clients' answers to questions, which `fedmcmc.fit`, `fedmcmc.correct` and others
    ask, are kept in ``directory/answers``. An interrupted fit therefore asks only what it had not
    asked, and its chains are calls of `sample`. An answer is read back only for the same question,
    model, rows and versions of software. Consortia of real sites do not use this directory.

    Three kinds of calls get no checkpoint here and are not counted: those with a `checkpoint` of
    their own, those made within another call (by a rule of `until`), and those in other threads.
    An interrupt (Ctrl-C) makes the call write a checkpoint and then ends the program, not just the
    call.

    Parameters
    ----------
    directory
        Created if missing. Delete it once the results are safe.
    every_rounds, every_seconds
        Of each call's `fedmcmc.Checkpoint`.

    Notes
    -----
    `draws_to` and the directory of a `HostStore` must be the same in every attempt, as for any
    run with a checkpoint. Whatever the program does between calls is done again. The directory
    holds the draws of all calls and the last two states of each.

    Examples
    --------
    >>> import tempfile
    >>> import jax, jax.numpy as jnp
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(
    ...     lambda theta: -0.5 * theta**2, lambda theta, x: -0.5 * (x - theta) ** 2
    ... )
    >>> data = fedmcmc.FederatedData.from_clients([jnp.ones(3), jnp.zeros(4)])
    >>> def program():
    ...     return [
    ...         fedmcmc.sample(
    ...             jax.random.key(0), fedmcmc.lsd(posterior, step_size=step_size), data, 0.0,
    ...             num_rounds=100, progress=False,
    ...         )
    ...         for step_size in (0.01, 0.02)
    ...     ]
    >>> folder = tempfile.TemporaryDirectory()
    >>> with fedmcmc.resumable(folder.name, every_seconds=60):
    ...     first = program()
    >>> with fedmcmc.resumable(folder.name, every_seconds=60):
    ...     again = program()  # runs no round
    >>> [bool((a.draws == b.draws).all()) for a, b in zip(first, again)]
    [True, True]
    >>> folder.cleanup()
    """
    first = _OfCall(directory, every_rounds, every_seconds)
    calls = (replace(first, directory=Path(directory) / f"{call:04d}") for call in count(1))
    with _having(_PROGRAM, _Program(calls, Answers(Path(directory) / "answers"))):
        yield


def checkpoint_of_call(checkpoint: Checkpoint | None) -> Checkpoint | None:
    """Return the `checkpoint` argument of a call, or else the one of its place in `resumable`."""
    program = _PROGRAM.get()
    if checkpoint is None and program is not None:
        return next(program.checkpoints)
    return checkpoint


def answers_of_program() -> Answers | None:
    """Return the answers that the program in `resumable` keeps, ``None`` outside of one."""
    program = _PROGRAM.get()
    return None if program is None else program.answers


def without_resumable() -> AbstractContextManager[None]:
    """Hide `resumable` from calls within a call.

    Nested calls of `sample` get no checkpoint, because their number depends on where the run was
    interrupted.
    """
    return _having(_PROGRAM, None)


def ending_programs() -> AbstractContextManager[None]:
    """Let an interrupt (Ctrl-C) end the whole program within, as in `resumable`, not one call.

    For programs that would otherwise take the draws of an interrupted run for those of a whole one.
    """
    return _having(_ENDING, True)


def hands_on_interrupts(checkpoint: Checkpoint | None) -> bool:
    """Return whether an interrupt in a call with this checkpoint is to end the program."""
    return _ENDING.get() or (checkpoint is not None and checkpoint.hands_on_interrupts)
