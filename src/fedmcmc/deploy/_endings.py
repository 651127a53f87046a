"""The server's command: checks of the table ``run``, and what it leaves when a run ends early."""

import logging
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from fedmcmc.pytrees import named_leaves
from fedmcmc.records import Samples
from fedmcmc.storage import write_whole

LOG = logging.getLogger("fedmcmc.deploy")
MIN_COUNTS = {"num_rounds": 1, "num_burnin": 0, "thinning": 1, "num_chains": 1, "every_rounds": 1}
"""Smallest values of the counts in the table ``run``."""
INSISTING = 3
"""Signals after which a server ends without writing draws."""


class Interrupted(KeyboardInterrupt):
    """The server was told to stop, by Ctrl-C or SIGTERM.

    Attributes
    ----------
    status
        Exit status of a command that ends so: 130 after SIGINT, 143 after SIGTERM.
    """

    def __init__(self, number: int, text: str) -> None:
        super().__init__(text)
        self.status = 128 + number


@contextmanager
def handling_signals(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Call `handler` at SIGINT and SIGTERM, and set the handlers back at the end.

    Only the main thread of a program has signals; elsewhere nothing changes.
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
    """Interrupt the program at SIGINT and SIGTERM alike, and note which of them came.

    It is interrupted once, as a second signal would end what brings the draws to safety; whoever
    sends `INSISTING` of them insists.
    """
    received: list[int] = []

    def interrupt(number: int, frame: Any) -> None:
        received.append(number)
        if len(received) == 1 or len(received) >= INSISTING:
            raise KeyboardInterrupt

    with handling_signals(interrupt):
        yield received


def write_draws(samples: Samples, path: Path) -> None:
    """Write the draws of a whole run; log it if the file held more draws of another run."""
    held = _num_draws_in(path)
    arrays = {name: np.asarray(leaf) for name, leaf in named_leaves(samples.draws).items()}
    write_whole(path, lambda file: np.savez(file, allow_pickle=False, **arrays))
    if held is not None and held > samples.num_draws:
        LOG.warning(
            "%s held %s draws per chain of an earlier run, and holds %s now",
            *(path, held, samples.num_draws),
        )


def write_partial_draws(samples: Samples | None, path: Path, checkpoint: Path | None) -> str:
    """Write the draws of a run that ended early; return what was written, in words.

    A file that is no file of draws, or has more of them, stays as it is.

    Parameters
    ----------
    samples
        What the run kept; ``None`` if it had not begun.
    path
        Where to; beside it if that file stays.
    checkpoint
        Folder of the checkpoint.
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
        text += f" The checkpoint in {checkpoint} is of round {round_}: start again to go on."
    return text


def _num_draws_in(path: Path) -> int | None:
    """Return how many draws per chain a file holds, ``None`` if it holds none."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            return min(int(stored[name].shape[1]) for name in stored.files)
    except (OSError, EOFError, ValueError, IndexError, AttributeError, TypeError):
        return None


def check_run(path: str | Path, run: Mapping[str, Any], base: Path) -> None:
    """Raise `ValueError` unless the values of a server's table ``run`` are of the right types.

    Folders of files that are written at the end must exist.
    """

    def expect(name: str, right: bool, what: str) -> None:
        if not right:
            raise ValueError(f"{path}: run.{name} must be {what}, got {run[name]!r}.")

    for name, least in MIN_COUNTS.items():
        if name in run:
            right = type(run[name]) is int and run[name] >= least
            expect(name, right, f"a whole number of at least {least}")
    for name in ("timeout", "most_norm"):
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
            f"{path}: run.every_rounds says how often a checkpoint is written: give "
            f"run.checkpoint, a folder."
        )
