"""Runs that survive being killed: checkpoints beside the results, and results that stand."""

import json
import pickle
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import fedmcmc
from experiments import output, schemas
from fedmcmc import distributed

__all__ = ["FOLDER", "finished", "once", "surviving"]

FOLDER, DONE, SETTINGS = "checkpoints", "checkpoints.done", "settings.json"
T = TypeVar("T")


@dataclass
class _Parts:
    folder: Path
    num: int = 0


_PARTS: ContextVar[_Parts | None] = ContextVar("parts", default=None)


@contextmanager
def surviving(out: Path, settings: Mapping[str, Any], seconds: float | None) -> Iterator[bool]:
    """Write checkpoints into the results folder `out` every so many seconds, until all is done.

    Yields whether an earlier attempt left any. Does nothing if `seconds` is ``None``.

    Raises
    ------
    SettingsError
        If there are checkpoints of a run with other `settings`: not every difference shows in what
        `sample` compares.
    """
    if seconds is None:
        yield False
        return
    folder, told = out / FOLDER, output.plain(settings)
    # Of several processes the first looks, and writes.
    resumed = bool(distributed.agreed((folder / SETTINGS).is_file()))
    if resumed:
        _check(folder, json.loads((folder / SETTINGS).read_text()), told)
    elif distributed.is_first():
        folder.mkdir(parents=True, exist_ok=True)
        output.write_whole(folder / SETTINGS, json.dumps(told))
    token = _PARTS.set(_Parts(folder))
    try:
        with fedmcmc.resumable(folder, every_seconds=seconds):
            yield resumed
    finally:
        _PARTS.reset(token)
    distributed.agreed(0)  # all are done
    if not distributed.is_first():
        return
    # Renamed first: of a folder that is half removed no run could go on.
    shutil.rmtree(out / DONE, ignore_errors=True)
    folder.rename(out / DONE)
    shutil.rmtree(out / DONE)


def once(compute: Callable[[], T]) -> T:
    """Return what ``compute()`` returns, NumPy arrays, or what an earlier attempt kept of it.

    For the long parts of an experiment that do not go through `fedmcmc.sample`. They are known by
    their order. Nothing in them is compared, so what another commit, version or device kept is
    computed anew.
    """
    parts = _PARTS.get()
    if parts is None:
        return compute()
    parts.num += 1
    path, now = parts.folder / f"part-{parts.num:04d}.pickle", output.environment()
    if path.is_file():
        then, found = pickle.loads(path.read_bytes())
        if then == now:
            return found
    found = compute()
    if distributed.is_first():
        output.write_whole(path, pickle.dumps((now, found)))
    return found


def _check(folder: Path, then: dict[str, Any], now: dict[str, Any]) -> None:
    different = [
        f"{name}={then.get(name)} (now {now.get(name)})"
        for name in sorted({*then, *now})
        if then.get(name) != now.get(name)
    ]
    if different:
        raise schemas.SettingsError(
            f"{output.relative(folder)} holds checkpoints of a run with {', '.join(different)}: "
            "go on with those settings, or delete that folder to start anew."
        )


def finished(out: Path, experiment: str, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what ``metrics.json`` holds, if it is there and what a run would write again.

    That is one of the same experiment, settings, versions, commit and device.
    """
    try:
        record = json.loads((out / output.METRICS).read_text())
    except FileNotFoundError:
        return None
    wanted = {
        "experiment": experiment,
        "config": output.plain(settings),
        **output.environment(),
    }
    return record if all(record.get(name) == value for name, value in wanted.items()) else None
