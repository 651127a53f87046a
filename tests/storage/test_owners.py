"""One run at a time writes into a directory, and a run that was killed blocks none."""

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import fedmcmc
from fedmcmc.storage import _owner
from tests.storage import small_run
from tests.storage.small_run import numbers, rule_at, run
from tests.support.killed_run import assert_same

fcntl = pytest.importorskip("fcntl")

OWNER_SCRIPT = """
import sys
import fedmcmc
from fedmcmc.storage import lock_checkpoint
with lock_checkpoint(fedmcmc.Checkpoint(sys.argv[1])):
    print("owned", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def run_owner(folder):
    """Have another process own the directory, as one that samples does."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNER_SCRIPT, str(folder)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        try:
            assert process.stdout.readline() == b"owned\n"
            yield process
        finally:
            process.kill()


def content(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.slow
def test_a_second_process_is_refused_and_a_killed_one_blocks_nobody(tmp_path):
    pytest.importorskip("zarr")

    def run_stored(num_rounds):
        return run(tmp_path / "c", num_rounds, draws_to=tmp_path / "draws.zarr")

    run_stored(30)
    with run_owner(tmp_path / "c") as process:
        before = content(tmp_path)
        message = f"in use by process {process.pid} on .*, since .* another directory for this run"
        with pytest.raises(fedmcmc.CheckpointError, match=message):
            run_stored(60)
        assert content(tmp_path) == before
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert (tmp_path / "c" / _owner.OWNER).read_bytes()  # by which it still owns it
        samples = run_stored(60)
    assert_same(numbers(samples), numbers(run(None, 60)))


def test_a_second_call_in_one_process_is_refused(tmp_path):
    refused = []

    def call():
        with pytest.raises(fedmcmc.CheckpointError, match="another call of sample in this process"):
            run(tmp_path, 30)
        refused.append(True)

    def check(num_draws):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    run(tmp_path, None, until=rule_at(20, check), max_rounds=60)
    assert refused == [True]
    run(tmp_path, None, until=rule_at(20), max_rounds=60)  # the first call has ended


def fail(*_, **__):
    raise ValueError("draws_to")


def test_a_failed_run_owns_nothing(tmp_path):
    with pytest.raises(ValueError, match="draws_to"), pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedmcmc.runs._sample.begin", fail)
        run(tmp_path, 30)
    run(tmp_path, 30)


def test_without_locks_a_running_process_of_this_machine_owns_the_directory(tmp_path, monkeypatch):
    def lockf(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: process.pid)
            with _owner.lock_checkpoint(fedmcmc.Checkpoint(tmp_path)):
                left = (tmp_path / _owner.OWNER).read_bytes()
        (tmp_path / _owner.OWNER).write_bytes(left)
        monkeypatch.setattr(fcntl, "lockf", lockf)
        with pytest.raises(fedmcmc.CheckpointError, match=f"in use by process {process.pid}"):
            run(tmp_path, 30)
        process.kill()
        process.wait()
    run(tmp_path, 30)


def test_all_processes_of_a_run_refuse_a_directory_in_use(tmp_path, monkeypatch):
    """The first process takes the lock, and sends the result to the others."""
    monkeypatch.setattr(_owner, "is_first", lambda: False)
    with _owner.lock_checkpoint(fedmcmc.Checkpoint(tmp_path / "a")):
        assert not (tmp_path / "a").exists()
    monkeypatch.setattr(_owner, "broadcast_from_first", lambda number: 1.0)
    with (
        pytest.raises(fedmcmc.CheckpointError, match="is in use"),
        _owner.lock_checkpoint(fedmcmc.Checkpoint(tmp_path / "b")),
    ):
        pass


def test_a_directory_that_cannot_be_written_loses_no_draw(tmp_path):
    (tmp_path / "file").write_text("no directory")
    with pytest.warns(RuntimeWarning, match="No checkpoint could be written") as warned:
        samples = run(tmp_path / "file" / "c", 30)
    assert [warning.filename for warning in warned] == [small_run.__file__]
    assert_same(numbers(samples), numbers(run(None, 30)))


@pytest.mark.slow
def test_two_runs_that_start_at_once_never_mix(tmp_path, monkeypatch):
    """A file system without locks admits a second seed."""
    monkeypatch.setattr(_owner, "_lock", lambda directory: contextlib.nullcontext())
    manifest = tmp_path / "c" / "run.json"
    started, saved_by_first, saved_by_second, ended = (threading.Event() for _ in range(4))

    def wait_for_manifest(before=b""):
        deadline = time.monotonic() + 60
        while not manifest.exists() or manifest.read_bytes() == before:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def act_first(num_draws):
        if num_draws == 20:
            started.wait(60)
        elif num_draws == 40:
            wait_for_manifest()
            saved_by_first.set()
            saved_by_second.wait(60)

    def act_second(num_draws):
        if num_draws == 20:
            started.set()
            saved_by_first.wait(60)
            act_second.before = manifest.read_bytes()
        elif num_draws == 40:
            wait_for_manifest(act_second.before)
            saved_by_second.set()
            ended.wait(60)

    def run_seed(seed, then=lambda _: None, folder=tmp_path / "c"):
        rule = rule_at(60, then)
        checkpoint = fedmcmc.Checkpoint(folder, every_rounds=20)
        return run(None, None, seed=seed, until=rule, max_rounds=100, checkpoint=checkpoint)

    thread = threading.Thread(target=run_seed, args=(1, act_second))
    thread.start()
    run_seed(0, act_first)
    shutil.copytree(tmp_path / "c", tmp_path / "copy")
    ended.set()
    thread.join()
    for seed, folder in ((0, tmp_path / "copy"), (1, tmp_path / "c")):
        folders = (folder, tmp_path / str(seed))
        resumed, expected = (run_seed(seed, folder=each).draws for each in folders)
        np.testing.assert_array_equal(resumed, expected)
