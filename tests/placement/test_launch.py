"""The launcher of several processes on one machine, and how its processes end."""

import signal
import socket
import subprocess
import sys
import time

import pytest

from experiments import launch
from fedmcmc.placement import _distributed
from tests.support.processes import environment


@pytest.mark.slow
def test_a_launcher_ends_the_others_where_one_fails(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, time\n"
        "if os.environ['JAX_PROCESS_ID'] == '1':\n"
        "    print('failing'); sys.exit(3)\n"
        "time.sleep(600)\n"
    )
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "experiments.launch", "-n", "2", str(script)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert time.monotonic() - start < 90
    assert done.returncode == 3 and "[1] failing" in done.stdout, done.stdout + done.stderr


def test_processes_end_with_a_launcher_that_is_killed(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import socket, sys, time\n"
        "held = socket.create_connection(('127.0.0.1', int(sys.argv[1])))\n"
        "time.sleep(600)\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(100)
        command = ["-m", "experiments.launch", "-n", "2", str(script), str(server.getsockname()[1])]
        launcher = subprocess.Popen([sys.executable, *command], env=environment())
        try:
            connections = [server.accept()[0] for _ in range(2)]
        finally:
            launcher.kill()
            launcher.wait()
        for connection in connections:
            with connection:
                connection.settimeout(60)
                assert connection.recv(1) == b""  # its process has ended


def test_a_launcher_tells_which_processes_run(monkeypatch):
    killed = []
    monkeypatch.setattr(launch.os, "kill", lambda number, how: killed.append((number, how)))
    launch.kill_last(["12\n", "12 34\n", "34\n"])
    assert killed == [(34, signal.SIGKILL)]
    launch.kill_last(["12\n", "\n"])
    assert len(killed) == 1


@pytest.mark.parametrize("count", [["-n", "2"], ["-n2"], ["--num-processes=2"]])
def test_the_launcher_passes_arguments_on(monkeypatch, count):
    started = []
    monkeypatch.setattr(launch.signal, "signal", lambda *_: None)  # no handler in this process
    monkeypatch.setattr(launch, "launch", lambda command, num: started.append((command, num)) or 0)
    assert launch.main([*count, "-m", "room", "-n", "3"]) == 0
    assert started == [([sys.executable, "-u", "-m", "room", "-n", "3"], 2)]


def test_the_launcher_sets_what_processes_read():
    names = launch.ADDRESS, launch.COUNT, launch.INDEX
    assert names == (_distributed.ADDRESS, _distributed.COUNT, _distributed.INDEX)
