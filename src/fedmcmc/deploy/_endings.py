"""Parts of the server's command: checks of the table ``run``, signals, and files of draws."""

import logging
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from fedmcmc.diagnostics import MAX_RHAT, MIN_ESS
from fedmcmc.pytrees import named_leaves
from fedmcmc.records import Samples
from fedmcmc.storage import write_atomically

LOG = logging.getLogger("fedmcmc.deploy")
MIN_COUNTS = {"num_rounds": 1, "num_burnin": 0, "thinning": 1, "num_chains": 1, "every_rounds": 1}
"""Smallest values of the counts in the table ``run``."""
INSISTING = 3
"""Signals after which a server ends without writing draws."""


class Interrupted(KeyboardInterrupt):
    """Interruption of the server by Ctrl-C or SIGTERM.

    Attributes
    ----------
    status
        Exit status of the command: 130 after SIGINT, 143 after SIGTERM.
    """

    def __init__(self, number: int, text: str) -> None:
        super().__init__(text)
        self.status = 128 + number


@contextmanager
def handling_signals(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Call `handler` at SIGINT and SIGTERM, and restore the previous handlers at the end.

    Only the main thread of a program receives signals; in other threads nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, signal.SIG_DFL if previous is None else previous)


@contextmanager
def noting_signals() -> Iterator[list[int]]:
    """Interrupt the program at SIGINT or SIGTERM, and yield a list of the signals received.

    Only the first signal interrupts, since a second one would end the code that brings the draws to
    safety; the signal number `INSISTING` interrupts again.
    """
    received: list[int] = []

    def interrupt(number: int, frame: object) -> None:
        received.append(number)
        if len(received) == 1 or len(received) >= INSISTING:
            raise KeyboardInterrupt

    with handling_signals(interrupt):
        yield received


def write_draws(samples: Samples, path: Path) -> None:
    """Write the draws of a run; log a warning if the file held more draws of another run."""
    held = _num_draws_in(path)
    arrays = {name: np.asarray(leaf) for name, leaf in named_leaves(samples.draws).items()}
    write_atomically(path, lambda file: np.savez(file, allow_pickle=False, **arrays))
    if held is not None and held > samples.num_draws:
        LOG.warning(
            "%s held %s draws per chain of an earlier run, and holds %s now",
            *(path, held, samples.num_draws),
        )


def log_end(
    samples: Samples, settings: str | Path, draws: Path, checkpoint: Path | None, *, is_fit: bool
) -> None:
    """Log that a run is over and where its draws are; if they are too few, log how to continue.

    Parameters
    ----------
    samples
        Result of the run.
    settings, draws
        Files of the server's settings and of the draws.
    checkpoint
        Folder of the checkpoint, or ``None``.
    is_fit
        Flag for `fedmcmc.fit`, which chooses its number of rounds itself.
    """
    if is_fit:
        LOG.info("the fit is done; draws are in %s", draws)
        return
    num_rounds = int(np.asarray(samples.state.broadcast.round)[0])
    LOG.info("%s rounds are done; draws are in %s", f"{num_rounds:,}", draws)
    diagnosis = samples.diagnosis
    if diagnosis is None or (diagnosis.rhat <= MAX_RHAT and diagnosis.ess >= MIN_ESS):
        return
    start = "continues from the checkpoint" if checkpoint else "begins again without run.checkpoint"
    LOG.warning(
        "too few effective draws (%.0f, R-hat %.4g): raise run.num_rounds in %s, now %d, and start "
        "the server again, which %s",
        *(diagnosis.ess, diagnosis.rhat, settings, num_rounds, start),
    )


def write_partial_draws(samples: Samples | None, path: Path, checkpoint: Path | None) -> str:
    """Write the draws of a run that ended early; return a text about the files.

    An existing file is not replaced if it holds more draws, or none.

    Parameters
    ----------
    samples
        Draws so far; ``None`` if the run had not begun.
    path
        File for the draws. If it is not replaced, ``NAME.partial.npz`` is written in its folder.
    checkpoint
        Folder of the checkpoint, or ``None``.
    """
    if samples is None:
        text = f"No draw was kept, and {path} was not written."
        if checkpoint is not None and any(checkpoint.glob("run*.json")):
            text += f" What was kept before is in the checkpoint in {checkpoint}."
        return text
    num = samples.num_draws
    text = f"No draw was kept, and {path} was not written."
    if num:
        held = _num_draws_in(path)
        stays = path.exists() and (held is None or held > num)
        target = path.with_name(f"{path.stem}.partial{path.suffix}") if stays else path
        write_draws(samples, target)
        text = f"The {num} draws per chain that were kept before are in {target}."
        if stays:
            content = "no draws" if held is None else f"{held} draws per chain of an earlier run"
            text += f" {path} stays as it was, with {content}."
    if checkpoint is not None:
        round_ = int(np.asarray(samples.state.broadcast.round)[0])
        text += f" The checkpoint in {checkpoint} is of round {round_}: start again to continue."
    return text


def _num_draws_in(path: Path) -> int | None:
    """Return the number of draws per chain in a file, ``None`` if it is no file of draws."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            return min(int(stored[name].shape[1]) for name in stored.files)
    except (OSError, EOFError, ValueError, IndexError, AttributeError, TypeError):
        return None


def check_run(path: str | Path, run: Mapping[str, Any], base: Path) -> None:
    """Raise `ValueError` unless the values in a server's table ``run`` have the right types.

    The folders of files that are written at the end must exist.
    """

    def expect(name: str, right: bool, what: str) -> None:
        if not right:
            raise ValueError(f"{path}: run.{name} must be {what}, got {run[name]!r}.")

    for name, minimum in MIN_COUNTS.items():
        if name in run:
            right = type(run[name]) is int and run[name] >= minimum
            expect(name, right, f"a whole number of at least {minimum}")
    for name in ("timeout", "max_norm"):
        if name in run:
            right = type(run[name]) in (int, float) and run[name] > 0
            expect(name, right, "a number above 0")
    if "on_missing" in run:
        expect("on_missing", run["on_missing"] in ("wait", "leave_out"), "'wait' or 'leave_out'")
    if "progress" in run:
        expect("progress", isinstance(run["progress"], bool), "true or false")
    for name in ("kernel", "draws", "report", "checkpoint"):
        if name in run:
            expect(name, isinstance(run[name], str) and run[name] != "", "a text")
    for name in ("draws", "report"):
        if name in run:
            file = base / run[name]
            expect(name, file.parent.is_dir(), f"a file in a folder that exists ({file.parent})")
            expect(name, not file.is_dir(), "a file, and no folder")
    if "every_rounds" in run and "checkpoint" not in run:
        raise ValueError(
            f"{path}: run.every_rounds is the number of rounds between checkpoints: give "
            f"run.checkpoint, a folder."
        )
