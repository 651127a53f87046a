"""A launcher of several processes on one machine: ``python -m fedmcmc.launch -n 2 script.py``.

The script calls `fedmcmc.distributed.initialize` before anything else of JAX.
"""

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO

from fedmcmc.placement import ADDRESS, COUNT, INDEX, WARDEN

__all__ = ["launch", "main"]

GRACE_SECONDS = 10.0
"""Time for the other processes to end by themselves after one has failed."""


def launch(command: Sequence[str], num_processes: int) -> int:
    """Run `command` in several processes of this machine, and return its exit status.

    Each line that they print is shown with the number of its process. Where one fails the others
    are ended, as they would wait for it, and all are if this process dies.

    Parameters
    ----------
    command
        A program and its arguments.
    num_processes
        Processes; each has the devices that it would have alone, so on a GPU machine say in
        ``CUDA_VISIBLE_DEVICES`` or the command which.
    """
    if num_processes < 1:
        raise ValueError(f"num_processes must be positive, got {num_processes}.")
    shared = {ADDRESS: f"127.0.0.1:{_free_port()}", COUNT: str(num_processes)}
    processes: list[subprocess.Popen[bytes]] = []
    readers: list[threading.Thread] = []
    with _watched(processes) as tell:
        try:
            for i in range(num_processes):
                process = subprocess.Popen(
                    list(command),
                    env={**os.environ, **shared, INDEX: str(i)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                )
                processes.append(process)
                tell()
                reader = threading.Thread(target=_show, args=(i, process.stdout), daemon=True)
                readers.append(reader)
                reader.start()
            status = _wait(processes, tell)
        finally:
            _end(processes)
            tell()
    for reader in readers:
        reader.join(timeout=GRACE_SECONDS)
    return status


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def _show(index: int, lines: IO[bytes] | None) -> None:
    for line in lines or ():
        sys.stdout.write(f"[{index}] {line.decode(errors='replace')}")
        sys.stdout.flush()


@contextlib.contextmanager
def _watched(processes: Sequence[subprocess.Popen[bytes]]) -> Iterator[Callable[[], None]]:
    """Have those of `processes` that run killed if this process is; it could not do so itself.

    Yields what is to be called when one has begun or ended: the number of a process that ended
    may soon be another's.
    """
    command = [sys.executable, "-I", "-S", WARDEN]
    null = subprocess.DEVNULL
    # In a session of its own: an interrupt of the terminal is for the others.
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=null, stderr=null, bufsize=0, start_new_session=True
    ) as warden:
        told = ""

        def tell() -> None:
            nonlocal told
            running = " ".join(str(p.pid) for p in processes if p.returncode is None) + "\n"
            if running != told and warden.stdin is not None:
                told = running
                with contextlib.suppress(OSError):  # who killed the warden as well
                    warden.stdin.write(running.encode())

        yield tell


def _wait(processes: Sequence[subprocess.Popen[bytes]], tell: Callable[[], None]) -> int:
    """Wait for all, or for the first that fails and then a little; return its status."""
    while True:
        found = [process.poll() for process in processes]
        tell()
        failed = next((status for status in found if status), None)
        if failed is not None:
            deadline = time.monotonic() + GRACE_SECONDS
            while time.monotonic() < deadline and any(p.poll() is None for p in processes):
                time.sleep(0.1)
            return failed
        if all(status == 0 for status in found):
            return 0
        time.sleep(0.1)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    # A process of JAX that waits for others does not hear a polite signal.
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.wait()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a Python script, or with ``-m`` a module, in several processes of this machine."""
    parser = argparse.ArgumentParser(
        prog="python -m fedmcmc.launch",
        description=__doc__,
        usage="%(prog)s [-h] [-n NUM_PROCESSES] (script.py | -m module) ...",
    )
    parser.add_argument("-n", "--num-processes", type=int, default=2)
    # A parser of its own for the rest would take the script's options, or `-m`, for its own.
    given = list(sys.argv[1:] if arguments is None else arguments)
    own = 0
    while given[own:] and given[own].startswith("-") and given[own] not in ("-m", "-c"):
        own += 2 if given[own] in ("-n", "--num-processes") else 1
    settings = parser.parse_args(given[:own])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and end the others
    if not given[own:]:
        parser.error("say which script or module to run")
    return launch([sys.executable, "-u", *given[own:]], settings.num_processes)


if __name__ == "__main__":
    sys.exit(main())
