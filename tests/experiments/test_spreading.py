"""Experiments over devices and processes: the results of one device, to the last bit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("hydra")

import hydra

from experiments import output
from tests.experiments.test_experiments import TINY
from tests.experiments.test_restarts import assert_same_results

ROOT = Path(__file__).resolve().parents[2]
RUNS = {
    "fsgld": ("experiment=fsgld/gaussian", *TINY, "num_chains=4", "num_local_steps=[1]"),
    "qlsd": ("experiment=qlsd/gaussian_small", "num_rounds=60", "num_burnin=20", "budget=3e3"),
}


def run(out, *arguments, launcher=(), devices=1):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "experiments.run", f"hydra.run.dir={out}", *arguments],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "results in" in done.stdout
    return json.loads((out / output.METRICS).read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_one_config_on_one_device_on_eight_and_in_two_processes(tmp_path, name):
    config = (*RUNS[name], "clients_at_a_time=1")
    alone, eight, two = (tmp_path / place for place in ("alone", "eight", "two"))
    run(alone, *config)
    assert run(eight, *config, "all_devices=true", devices=8)["devices"] == 8
    launcher = ("-m", "fedmcmc.launch", "-n", "2")
    record = run(two, *config, "checkpoint_seconds=0.5", launcher=launcher)
    assert (record["processes"], record["devices"]) == (2, 2)
    assert not (two / "checkpoints").exists()
    for other in (eight, two):
        first, second = (json.loads((out / output.METRICS).read_text()) for out in (alone, other))
        assert first["metrics"] == second["metrics"]
        if name == "fsgld":
            assert_same_results(alone, other)  # its draws, too


def test_several_processes_refuse_a_multirun(monkeypatch, tmp_path):
    from experiments import settings_run as entry

    monkeypatch.setattr(entry.jax, "process_count", lambda: 2)
    monkeypatch.setattr(sys, "argv", ["run", "experiment=fsgld/gaussian", "--multirun"])
    with pytest.raises(SystemExit, match="one experiment at a time"):
        entry.main()


@pytest.mark.parametrize("is_first", [True, False])
def test_the_first_process_alone_opens_the_log(monkeypatch, is_first):
    from experiments import settings_run as entry

    composed = []

    def main(**settings):
        def job():
            with hydra.initialize_config_dir(str(entry.CONFIGS), version_base="1.3"):
                given = sys.argv[2:]
                composed.append(hydra.compose("settings", given, return_hydra_config=True))

        return lambda _: job

    monkeypatch.setattr(entry.hydra, "main", main)
    monkeypatch.setattr(entry.distributed, "is_first", lambda: is_first)
    arguments = ["run", "--info", "experiment=fsgld/gaussian", "seed=3"]
    monkeypatch.setattr(sys, "argv", arguments)
    entry.main()
    assert composed[0].seed == 3
    assert ("file" in composed[0].hydra.job_logging.handlers) == is_first
    assert composed[0].hydra.job_logging.loggers.jax.level == "WARNING"
