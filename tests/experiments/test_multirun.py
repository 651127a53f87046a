"""Sweeps of experiments: all jobs in one process, their numbers side by side, none lost."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("hydra")

import xarray

from experiments import sweep_results

ROOT = Path(__file__).resolve().parents[2]
# An experiment in place of the Gaussian one, that says what it was told and runs at once.
FAKE = """
import os, sys
from experiments import schemas
from experiments import settings_run as run
module = schemas.modules()["fsgld/gaussian"]
def fake(config, out):
    if config.seed == 1 and config.step_size == 2e-5:
        raise RuntimeError("lost the plot")
    rows = [{"method": m, "T": 7, "error": 100 * config.step_size * (1 + config.seed + i)}
            for i, m in enumerate(("DSGLD", "FSGLD"))]
    return {"table": rows, "process": os.getpid(), "bias": [0.5, config.seed], "nothing": None}
module.run = fake
run.main()
"""
TINY = (
    "num_clients=3",
    "rows_per_client=40",
    "num_local_steps=[20]",
    "num_burnin=100",
    "thinning=10",
    "num_draws=400",
    "num_chains=16",
    "grid_points=5",
)


def call(tmp_path, *arguments, program=("-c", FAKE)):
    env = {**os.environ, "FEDMCMC_RESULTS": str(tmp_path)}
    command = [sys.executable, *program, "-m", "hydra/launcher=sweep", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)


def the_only(folder, kind):
    (found,) = folder.glob(f"sweep-seed-step_size-*.{kind}")
    return found


@pytest.mark.slow
def test_a_failing_job_loses_no_other(tmp_path):
    given = ("seed=0,1,2", "step_size=1e-5,2e-5")
    done = call(tmp_path, "experiment=fsgld/gaussian", *given)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-2:] == [
        "error: 1 of 6 jobs failed:",
        "  experiment=fsgld/gaussian, seed=1, step_size=2e-05: RuntimeError: lost the plot",
    ]
    folder = tmp_path / "fsgld" / "gaussian"
    records = [json.loads(p.read_text()) for p in folder.glob("*/metrics.json")]
    assert len(records) == 5
    assert len({record["metrics"]["process"] for record in records}) == 1
    with xarray.open_dataset(the_only(folder, "nc"), engine="h5netcdf") as data:
        assert dict(data.sizes) == {"seed": 3, "step_size": 2, "bias_dim_0": 2, "table": 2}
        assert data.table.values.tolist() == ["DSGLD 7", "FSGLD 7"]
        assert data.attrs["experiment"] == "fsgld/gaussian"
        wanted = np.array([[[1, 2], [2, 4]], [[2, 3], [np.nan, np.nan]], [[3, 4], [6, 8]]]) / 1000
        np.testing.assert_allclose(data["table.error"], wanted)
        np.testing.assert_allclose(data["bias"][:, 0], [[0.5, 0], [0.5, 1], [0.5, 2]])
        assert np.isnan(data["bias"][1, 1]).all()
    table = the_only(folder, "md").read_text()
    assert "| 1e-05 | DSGLD 7: error | 0.002 | 0.001 | 3 |" in table
    assert "| 2e-05 | FSGLD 7: error | 0.006 | 0.00283 | 2 |" in table
    assert "- experiment=fsgld/gaussian, seed=1, step_size=2e-05: RuntimeError" in table
    assert the_only(folder, "png").stat().st_size > 1000

    # Again, as after a kill: jobs that were done keep their results, and files are called the same.
    again = call(
        tmp_path,
        *("experiment=fsgld/gaussian", *given),
        *("keep_finished=true", "checkpoint_seconds=60"),
    )
    assert "error: 1 of 6 jobs failed:" in again.stderr
    assert [json.loads(p.read_text()) for p in folder.glob("*/metrics.json")] == records
    assert the_only(folder, "nc") and len(list(folder.glob("*/checkpoints"))) == 1


def test_settings_out_of_range_are_one_message_before_the_first_job(tmp_path):
    done = call(tmp_path, "experiment=fsgld/gaussian", "seed=0,1", "step_size=1e-5,1")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: experiment=fsgld/gaussian, seed=0, step_size=1.0: step_size")
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("metrics.json"))
    unknown = call(tmp_path, "experiment=fsgld/gaussian", "stepsize=1,2")
    assert unknown.returncode == 1
    assert "stepsize" in unknown.stderr and "Traceback" not in unknown.stderr


@pytest.mark.slow
def test_an_experiment_in_a_grid_of_two_by_two(tmp_path):
    grid = ("experiment=fsgld/gaussian", *TINY, "seed=0,1", "step_size=1e-3,2e-3")
    done = call(tmp_path, *grid, program=("-m", "experiments.run"))
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "fsgld" / "gaussian"
    with xarray.open_dataset(the_only(folder, "nc"), engine="h5netcdf") as data:
        assert data["table.variance"].dims == ("seed", "step_size", "table")
        records = [json.loads(p.read_text()) for p in folder.glob("*/metrics.json")]
        assert len(records) == 4
        for record in records:
            at = {name: record["config"][name] for name in ("seed", "step_size")}
            for row in record["metrics"]["table"]:
                one = data.sel(**at, table=f"{row['method']} 20")
                assert float(one["table.variance"]) == row["variance"]
                assert float(one["table.variance over posterior's"]) > 0
    # All after the first share its programs.
    times = {tuple(r["overrides"][-2:]): r["wall_seconds"] for r in records}
    first = times.pop(("seed=0", "step_size=0.001"))
    assert max(times.values()) < first
    assert len(the_only(folder, "md").read_text().splitlines()) > 30


def test_another_sweep_is_called_otherwise():
    def points(**grid):
        fixed = {"experiment": "fsgld/gaussian"}
        values = itertools.product(*grid.values())
        return [fixed | dict(zip(grid, v, strict=True)) for v in values]

    names = [
        sweep_results.stem(points(**grid))
        for grid in (
            dict(seed=[0, 1], step_size=[1e-5, 2e-5]),
            dict(seed=[0, 2], step_size=[1e-5, 2e-5]),
            dict(seed=[0, 1], step_size=[1e-5, 2e-5], num_draws=[10]),
            dict(seed=[0, 1]),
            dict(seed=[0]),
        )
    ]
    assert len(set(names)) == len(names)
    assert names[0] == sweep_results.stem(points(seed=[1, 0], step_size=[2e-5, 1e-5]))
    starts = ["seed-step_size"] * 3 + ["seed", "experiment-seed"]
    assert [name[6:-7] for name in names] == starts


def test_what_jobs_lack_and_what_has_no_common_shape():
    points = [{"a": 1, "b": "x"}, {"a": "two", "b": "x"}]
    metrics = [
        {"deep": {"er": 1.5}, "a": 3, "ragged": [[1], [2, 3]], "list": [1, 2], "flag": True},
        {"a": 4, "list": [1, 2, 3], "rows": [{"n": 1, "x": 0.5}, {"n": 1, "x": 0.25}]},
    ]
    data = sweep_results.collect(points, metrics)
    assert data.a.values.tolist() == ["1", "two"]
    assert set(data.data_vars) == {"deep.er", "a_", "rows.x"}
    np.testing.assert_array_equal(data["deep.er"], [[1.5], [np.nan]])
    np.testing.assert_array_equal(data["a_"], [[3], [4]])
    assert data.rows.values.tolist() == ["1 (0)", "1 (1)"]
    np.testing.assert_array_equal(data["rows.x"][1, 0], [0.5, 0.25])


def test_numbers_of_one_job_by_name():
    metrics = {
        "table": [{"method": "DSGLD", "T": 1, "error": 0.5, "note": "x", "n": 3}],
        "nested": {"value": 2, "words": "y"},
        "figures": [{"file": "a.png", "caption": "b"}],
        "many": [1.0, 2.0],
    }
    assert sweep_results.scalars(metrics) == {
        "nested.value": 2.0,
        "DSGLD 1: error": 0.5,
        "DSGLD 1: n": 3.0,
    }
