"""Runs that continue after they were killed: checkpoints in the folder of the results."""

import json
import pickle
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from pathlib import Path
from typing import Any

import fedmcmc
from experiments import output
from experiments.wiring import ConfigError
from fedmcmc import distributed

FOLDER, FINISHED, SETTINGS = "checkpoints", "checkpoints.done", "settings.json"
# Files of the results of `once`, in the order of its calls.
_PARTS: ContextVar[Iterator[Path] | None] = ContextVar("parts", default=None)


@contextmanager
def checkpointed(out: Path, settings: Mapping[str, Any], seconds: float | None) -> Iterator[bool]:
    """Write checkpoints of calls of `fedmcmc.sample` into `out`, and remove them at the end.

    Yields whether an earlier run left any, and raises `ConfigError` if that run had other
    `settings`. Does nothing if `seconds` is ``None``.
    """
    if seconds is None:
        yield False
        return
    folder, current = out / FOLDER, output.plain(settings)
    # The first of several processes reads and writes.
    resumed = bool(distributed.broadcast_from_first((folder / SETTINGS).is_file()))
    if resumed:
        stored = json.loads((folder / SETTINGS).read_text())
        different = [
            f"{name}={stored.get(name)} (now {current.get(name)})"
            for name in sorted({*stored, *current})
            if stored.get(name) != current.get(name)
        ]
        if different:
            raise ConfigError(
                f"{output.relative(folder)} holds checkpoints of a run with {', '.join(different)}"
                ": continue with those settings, or delete that folder to start again."
            )
    elif distributed.is_first():
        folder.mkdir(parents=True, exist_ok=True)
        output.write_atomically(folder / SETTINGS, json.dumps(current))
    token = _PARTS.set(folder / f"part-{i:04d}.pickle" for i in count())
    try:
        with fedmcmc.resumable(folder, every_seconds=seconds):
            yield resumed
    finally:
        _PARTS.reset(token)
    distributed.broadcast_from_first(0)  # waits for all processes
    if not distributed.is_first():
        return
    # Renamed first: a run cannot continue from a folder that is half removed.
    shutil.rmtree(out / FINISHED, ignore_errors=True)
    folder.rename(out / FINISHED)
    shutil.rmtree(out / FINISHED)


def once(compute: Callable[[], Any]) -> Any:
    """Return ``compute()``, or what an earlier run that was killed stored of it.

    It is for long computations that do not call `fedmcmc.sample`. They are recognized by their
    order. Results of another commit, version or device are not used.
    """
    parts = _PARTS.get()
    if parts is None:
        return compute()
    path, environment = next(parts), output.environment()
    if path.is_file():
        stored, result = pickle.loads(path.read_bytes())
        if stored == environment:
            return result
    result = compute()
    if distributed.is_first():
        output.write_atomically(path, pickle.dumps((environment, result)))
    return result
