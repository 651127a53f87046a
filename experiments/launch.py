"""Launcher of several processes on one machine: ``python -m experiments.launch -n 2 script.py``.

The script must call `fedmcmc.distributed.initialize` before any other function of JAX. This file
imports nothing but the standard library: it also runs by its path, with ``WATCH`` as its argument,
as the program that ends the processes of a killed launcher.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO

ADDRESS, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
"""Environment variables that `fedmcmc.distributed.initialize` reads."""
WATCH = "--watch-processes-from-standard-input"
KILL = 9  # Windows has no signal.SIGKILL; there any number ends a process
GRACE_SECONDS = 10.0
"""Time for the other processes to end by themselves after a failure."""


def launch(command: Sequence[str], num_processes: int) -> int:
    """Run `command` in several processes of this machine, and return its exit status.

    Each line of output is prefixed with the number of its process. If a process fails, the other
    processes, which would wait for it, are killed. If the launcher dies, all processes are killed.

    Parameters
    ----------
    command
        Program and its arguments.
    num_processes
        Number of processes. Each uses all visible devices: on a GPU machine, choose devices with
        ``CUDA_VISIBLE_DEVICES`` or in the command.
    """
    if num_processes < 1:
        raise ValueError(f"num_processes must be positive, got {num_processes}.")
    shared = {ADDRESS: f"127.0.0.1:{_free_port()}", COUNT: str(num_processes)}
    processes: list[subprocess.Popen[bytes]] = []
    readers: list[threading.Thread] = []
    with _watch(processes) as update:
        try:
            for i in range(num_processes):
                process = subprocess.Popen(
                    list(command),
                    env={**os.environ, **shared, INDEX: str(i)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                )
                processes.append(process)
                update()
                reader = threading.Thread(target=_show, args=(i, process.stdout), daemon=True)
                readers.append(reader)
                reader.start()
            status = _wait(processes, update)
        finally:
            _end(processes)
            update()
    for reader in readers:
        reader.join(timeout=GRACE_SECONDS)
    return status


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _show(index: int, lines: IO[bytes] | None) -> None:
    for line in lines or ():
        sys.stdout.write(f"[{index}] {line.decode(errors='replace')}")
        sys.stdout.flush()


@contextlib.contextmanager
def _watch(processes: Sequence[subprocess.Popen[bytes]]) -> Iterator[Callable[[], None]]:
    """Start a program that kills the running `processes` if this process is killed.

    The context yields a function to call after a process starts or ends, because the operating
    system reuses the id of an ended process.
    """
    command = [sys.executable, "-I", "-S", __file__, WATCH]
    null = subprocess.DEVNULL
    # In a new session, which an interrupt from the terminal does not reach.
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=null, stderr=null, bufsize=0, start_new_session=True
    ) as watcher:
        previous = ""

        def update() -> None:
            nonlocal previous
            running = " ".join(str(p.pid) for p in processes if p.returncode is None) + "\n"
            if running != previous and watcher.stdin is not None:
                previous = running
                with contextlib.suppress(OSError):  # the watcher was killed as well
                    watcher.stdin.write(running.encode())

        yield update


def kill_last(lines: Iterable[str]) -> None:
    """Kill the processes that the last line lists.

    Each line lists the processes that run now. The lines end when the launcher dies, because the
    launcher alone holds the other end of the pipe.
    """
    running: list[str] = []
    for line in lines:
        running = line.split()
    for number in running:
        with contextlib.suppress(OSError):  # it ended in the meantime
            os.kill(int(number), KILL)


def _wait(processes: Sequence[subprocess.Popen[bytes]], update: Callable[[], None]) -> int:
    """Wait for all processes, or for a failure and a grace period; return the exit status."""
    while True:
        statuses = [process.poll() for process in processes]
        update()
        failure = next((status for status in statuses if status), None)
        if failure is not None:
            deadline = time.monotonic() + GRACE_SECONDS
            while time.monotonic() < deadline and any(p.poll() is None for p in processes):
                time.sleep(0.1)
            return failure
        if all(status == 0 for status in statuses):
            return 0
        time.sleep(0.1)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    # A process that waits for others in JAX does not react to SIGTERM.
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.wait()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a Python script, or a module with ``-m``, in several processes of this machine."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.launch",
        description=__doc__,
        usage="%(prog)s [-h] [-n NUM_PROCESSES] (script.py | -m module) ...",
    )
    parser.add_argument("-n", "--num-processes", type=int, default=2)
    # The parser must not see the script's options or `-m`, which it would interpret itself.
    words = list(sys.argv[1:] if arguments is None else arguments)
    end = 0
    while words[end:] and words[end].startswith("-") and words[end] not in ("-m", "-c"):
        end += 2 if words[end] in ("-n", "--num-processes") else 1
    settings = parser.parse_args(words[:end])
    # An exit runs the `finally` of `launch`, which ends the processes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if not words[end:]:
        parser.error("give a script, or a module with -m, to run")
    return launch([sys.executable, "-u", *words[end:]], settings.num_processes)


if __name__ == "__main__":
    if sys.argv[1:] == [WATCH]:
        kill_last(sys.stdin)
    else:
        sys.exit(main())
