"""The owner of a checkpoint's directory: one run at a time writes there.

The owner holds a lock of the operating system on a file. The lock ends with the owner's process,
even if that is killed, so a dead run blocks nobody. The file says who holds the lock. On a file
system without locks, an owner on the same machine is looked up by its process number.
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
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

OWNER = "owner.json"
HELD = (errno.EACCES, errno.EAGAIN)
_DIRECTORIES: set[tuple[int, str]] = set()
"""Those that this process owns: locks are between processes, this between threads and calls."""
_MUTEX = threading.Lock()


@contextlib.contextmanager
def lock_checkpoint(checkpoint: Checkpoint | None) -> Iterator[None]:
    """Own the directory of a checkpoint. If processes share a run, the first one owns it.

    Raises
    ------
    CheckpointError
        If another run owns it; in all processes of this run.
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
                f"The checkpoint in {checkpoint.directory} is in use, as the first process says."
            )
        yield


@contextlib.contextmanager
def _lock(directory: Path) -> Iterator[None]:
    path, key = directory / OWNER, (os.getpid(), os.path.realpath(directory))
    with _MUTEX:
        # Before the file is opened: closing it would give up all locks of this process on it.
        if key in _DIRECTORIES:
            raise _refusal(directory, "another call of sample in this process")
        file = _open_locked(directory, path)
        _DIRECTORIES.add(key)
    try:
        yield
    finally:
        with _MUTEX:
            _DIRECTORIES.discard(key)
            if file is not None:
                with contextlib.suppress(OSError):
                    os.ftruncate(file, 0)
                os.close(file)


def _open_locked(directory: Path, path: Path) -> int | None:
    """Return the open lock file; ``None`` where there are no locks, or nothing can be written."""
    if fcntl is None:
        return None
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:
        return None  # reading a checkpoint works without a lock; writing one will warn
    try:
        holder = _holder(file)
        if not _try_lock(file, holder):
            raise _refusal(directory, _words(holder))
    except CheckpointError:
        os.close(file)
        raise
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    record = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
    with contextlib.suppress(OSError):  # a full disk
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps(record).encode(), 0)
    return file


def _try_lock(file: int, holder: dict[str, Any]) -> bool:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in HELD and not _is_alive(holder)
    return True


def _holder(file: int) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        record = json.loads(os.pread(file, 4096, 0))
        return record if isinstance(record, dict) else {}
    return {}


def _is_alive(holder: dict[str, Any]) -> bool:
    """Return whether the holder runs on this machine; of other machines nothing is known."""
    pid = holder.get("pid")
    if holder.get("host") != socket.gethostname() or not isinstance(pid, int):
        return False
    try:
        os.kill(pid, 0)  # no signal, but an error if there is no such process
    except OSError as error:
        return error.errno == errno.EPERM  # another user's
    return pid != os.getpid()


def _words(holder: dict[str, Any]) -> str:
    if not holder:
        return "another process"
    return f"process {holder.get('pid')} on {holder.get('host')}, since {holder.get('since')}"


def _refusal(directory: Path, owner: str) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint in {directory} is in use by {owner}. Wait for that run or end it, or give "
        "this run a directory of its own."
    )
