"""Ownership of a checkpoint's directory: only one run at a time writes there.

The owner holds a lock of the operating system on a file, which names the owner. The lock ends with
the owner's process, even if the process is killed, so a dead run blocks no other run. On a file
system without locks, the process number in the file is looked up if the machine is the same.
"""

import contextlib
import errno
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedmcmc.placement import broadcast_from_first, is_first
from fedmcmc.storage._checkpoints import Checkpoint
from fedmcmc.storage._files import CheckpointError

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]

OWNER = "owner.json"
LOCKED_ERRORS = (errno.EACCES, errno.EAGAIN)
_OWNED: set[tuple[int, str]] = set()
"""Directories that this process owns; locks of the system only exclude other processes."""
_MUTEX = threading.Lock()


@contextlib.contextmanager
def lock_checkpoint(checkpoint: Checkpoint | None) -> Iterator[None]:
    """Own the directory of a checkpoint; if processes share a run, its first process owns it.

    If another run owns the directory, raise `CheckpointError` in all processes of this run.
    """
    if checkpoint is None:
        yield
        return
    with contextlib.ExitStack() as stack:
        refusal = None
        if is_first():
            try:
                stack.enter_context(_lock(Path(checkpoint.directory)))
            except CheckpointError as error:
                refusal = error
        if broadcast_from_first(refusal is not None):
            raise refusal or CheckpointError(
                f"The checkpoint in {checkpoint.directory} is in use, according to the first "
                f"process of this run."
            )
        yield


@contextlib.contextmanager
def _lock(directory: Path) -> Iterator[None]:
    key = (os.getpid(), os.path.realpath(directory))
    with _MUTEX:
        # Check before opening the file: closing it would release this process's lock on it.
        if key in _OWNED:
            raise _in_use(directory, "another call of sample in this process")
        file = _open_locked(directory)
        _OWNED.add(key)
    try:
        yield
    finally:
        with _MUTEX:
            _OWNED.discard(key)
            if file is not None:
                with contextlib.suppress(OSError):
                    os.ftruncate(file, 0)
                os.close(file)


def _open_locked(directory: Path) -> int | None:
    """Return the open lock file; ``None`` if locking or writing is impossible."""
    if fcntl is None:
        return None
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = os.open(directory / OWNER, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:
        return None  # a checkpoint can be read without a lock, and writing one will warn
    holder = _read_holder(file)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in LOCKED_ERRORS or _is_alive(holder):
            os.close(file)
            raise _in_use(directory, _describe(holder)) from error
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    record = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
    with contextlib.suppress(OSError):  # a full disk
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps(record).encode(), 0)
    return file


def _read_holder(file: int) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        record = json.loads(os.pread(file, 4096, 0))
        return record if isinstance(record, dict) else {}
    return {}


def _is_alive(holder: dict[str, Any]) -> bool:
    """Return whether the holder is a running process of this machine."""
    pid = holder.get("pid")
    if holder.get("host") != socket.gethostname() or not isinstance(pid, int):
        return False
    try:
        os.kill(pid, 0)  # sends no signal, but raises if there is no such process
    except OSError as error:
        return error.errno == errno.EPERM  # a process of another user
    return pid != os.getpid()


def _describe(holder: dict[str, Any]) -> str:
    if not holder:
        return "another process"
    return f"process {holder.get('pid')} on {holder.get('host')}, since {holder.get('since')}"


def _in_use(directory: Path, owner: str) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint in {directory} is in use by {owner}. Wait for that run or end it, or use "
        "another directory for this run."
    )
