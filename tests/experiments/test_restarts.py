"""Runs that are killed and started again with the same command, or spread over devices."""

import contextlib
import json
import subprocess
import sys

import numpy as np
import pytest

from experiments import arguments, output, restarts, run, study, tidy
from experiments.wiring import ConfigError
from tests.experiments.test_run import LSD, PROBLEM, ROOT, compose
from tests.support.kills import Cut
from tests.support.processes import environment

LONG = (*PROBLEM, *LSD, "num_rounds=2_000", "num_burnin=200", "thinning=10")


def test_a_run_that_was_cut_continues(tmp_path, monkeypatch):
    cut = Cut(monkeypatch)
    config = compose(*LONG)
    rows, num_rounds = run.execute(run.Job(config, tmp_path / "whole")), cut.rounds
    config["checkpoint_seconds"], out = 0.0, tmp_path / "cut"
    cut.left, cut.rounds = 1, 0
    with pytest.raises(KeyboardInterrupt):
        run.execute(run.Job(config, out))
    assert not (out / study.RECORD).exists() and 0 < cut.rounds < num_rounds
    with pytest.raises(ConfigError, match=r"seed=0 \(now 1\).* delete that folder"):
        run.execute(run.Job({**config, "seed": 1}, out))
    assert run.execute(run.Job(config, out)) == rows and cut.rounds == num_rounds
    assert json.loads((out / study.RECORD).read_text())["resumed"]
    assert not [*out.glob("checkpoints*")]


def test_long_computations_are_stored(tmp_path, monkeypatch):
    calls, stops = [], []

    def part(number):
        if number in stops:
            raise KeyboardInterrupt
        calls.append(number)
        return np.full(2, number)

    def parts():
        with contextlib.suppress(KeyboardInterrupt), restarts.checkpointed(tmp_path, {}, 60):
            return [restarts.once(lambda i=i: part(i))[0] for i in range(4)]

    for stops[:] in ([2], [3], []):
        result = parts()
    assert calls == result == [0, 1, 2, 3]
    stops[:], calls[:] = [3], []
    for commit in ("one", "two"):  # other code computes again
        monkeypatch.setattr(output, "environment", lambda commit=commit: {"git_commit": commit})
        parts()
    assert calls == [0, 1, 2, 0, 1, 2]


@pytest.mark.slow
def test_one_device_eight_and_two_processes_give_the_same_rows(tmp_path):
    mesh = "placement.mesh={_target_: fedmcmc.distributed.mesh}"
    rows, records = [], []
    for name, devices, launcher, more in (
        ("one", 1, (), ()),
        ("eight", 8, (), (mesh,)),
        ("two", 1, ("-m", "experiments.launch", "-n", "2"), ()),
    ):
        out = tmp_path / name
        changed = ("data.num_clients=8", "num_chains=4", "placement.clients_at_a_time=1", *more)
        given = [*dict(a.split("=", 1) for a in (*LONG, *changed)).items()]
        command = [sys.executable, *launcher, "-m", "experiments.run", f"hydra.run.dir={out}"]
        command += map("=".join, given)
        subprocess.run(command, cwd=ROOT, env=environment(devices), timeout=1500, check=True)
        record = json.loads((out / study.RECORD).read_text())
        records.append((record["processes"], record["devices"]))
        rows.append(tidy.read_rows(out / "rows.csv"))
    assert records == [(1, 1), (1, 8), (2, 2)] and rows[0] == rows[1] == rows[2]


def test_several_processes_refuse_a_multirun(monkeypatch):
    monkeypatch.setattr(run.jax, "process_count", lambda: 2)
    monkeypatch.setattr(sys, "argv", ["run", *LONG, "--multirun"])
    with pytest.raises(SystemExit, match="one config at a time"):
        run.main()


def test_the_first_process_alone_opens_the_log(monkeypatch):
    given = ["--info", *PROBLEM, "kernel=lsd"]
    (command,) = arguments.prepare(given)
    monkeypatch.setattr(arguments.distributed, "is_first", lambda: False)
    assert arguments.prepare(given) == [[*command, "hydra/job_logging=stdout"]]
