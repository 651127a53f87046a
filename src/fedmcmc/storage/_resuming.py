"""Checkpoints for a program that samples many times, without a change to its calls."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from fedmcmc.storage._checkpoints import Checkpoint

__all__ = [
    "alone",
    "checkpoint_of_call",
    "ending_programs",
    "hands_on_interrupts",
    "resumable",
]


@dataclass(frozen=True)
class _OfCall(Checkpoint):
    call: int = 0

    # Later calls would otherwise start from the few draws of an interrupted one, and be saved so.
    hands_on_interrupts: ClassVar[bool] = True

    @property
    def advice(self) -> str:
        folder = Path(self.directory).parent
        return (
            f"This is call {self.call} of `sample` in fedmcmc.resumable, which knows calls by "
            "their order: make the same calls with the same settings, or delete "
            f"{folder} to start anew."
        )


@dataclass
class _Calls:
    first: Checkpoint
    num: int = 0

    def next(self) -> Checkpoint:
        self.num += 1
        folder = Path(self.first.directory) / f"{self.num:04d}"
        return _OfCall(folder, self.first.every_rounds, self.first.every_seconds, self.num)


_CALLS: ContextVar[_Calls | None] = ContextVar("fedmcmc_resumable_calls", default=None)


@contextmanager
def resumable(
    directory: str | Path,
    *,
    every_rounds: int | None = None,
    every_seconds: float | None = None,
) -> Iterator[None]:
    """Give every call of `fedmcmc.sample` in a ``with`` block a checkpoint of its own.

    If the program is killed, start it again with the same command. Finished calls are then read
    back from ``directory/0001``, ``directory/0002``, ...; the call that was killed goes on from
    its checkpoint; later calls start. Each returns what it would have returned in an uninterrupted
    program, to the last bit. The calls must come in the same order: a call that finds the
    checkpoint of another one is refused.

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
    token = _CALLS.set(_Calls(Checkpoint(directory, every_rounds, every_seconds)))
    try:
        yield
    finally:
        _CALLS.reset(token)


def checkpoint_of_call(checkpoint: Checkpoint | None) -> Checkpoint | None:
    """Return the `checkpoint` argument of a call, or else the one of its place in `resumable`."""
    calls = _CALLS.get()
    return calls.next() if checkpoint is None and calls is not None else checkpoint


@contextmanager
def alone() -> Iterator[None]:
    """Hide `resumable` from calls within a call: how many there are depends on interruptions."""
    token = _CALLS.set(None)
    try:
        yield
    finally:
        _CALLS.reset(token)


_ENDING: ContextVar[bool] = ContextVar("fedmcmc_ending_programs", default=False)


@contextmanager
def ending_programs() -> Iterator[None]:
    """Let an interrupt (Ctrl-C) end the whole program within, as in `resumable`, not one call.

    For programs that would otherwise take the draws of an interrupted run for those of a whole one.
    """
    token = _ENDING.set(True)
    try:
        yield
    finally:
        _ENDING.reset(token)


def hands_on_interrupts(checkpoint: Checkpoint | None) -> bool:
    """Return whether an interrupt in a call with this checkpoint is to end the program."""
    return _ENDING.get() or (checkpoint is not None and checkpoint.hands_on_interrupts)
