"""Experiments that are cut and started again with the same command."""

import contextlib
import json
import sys
import types

import numpy as np
import pytest

pytest.importorskip("hydra")

import xarray

from experiments import output, restarts, schemas
from experiments import settings_run as run
from experiments.fa_hmc.image_sweep import Curves
from tests.support.kills import Cut, kill_until_done
from tests.support.processes import environment
from tests.support.tiny_experiments import TINY, compose

SMALL = ("experiment=fsgld/gaussian", *TINY, "num_chains=4", "num_local_steps=[1]", "grid_points=5")


@pytest.fixture(scope="module")
def module():
    return schemas.register()["fsgld/gaussian"]


def assert_same_results(one, other):
    """Compare what two runs left, all but how long it took."""
    first, second = (json.loads((out / output.METRICS).read_text()) for out in (one, other))
    assert first["metrics"] == second["metrics"] and first["config"] == second["config"]
    names = sorted(path.name for path in one.glob("*.nc"))
    assert names == sorted(path.name for path in other.glob("*.nc")) and names
    for name in names:
        trees = [xarray.open_datatree(out / name, engine="h5netcdf") for out in (one, other)]
        for group in ("posterior", "sample_stats"):
            a, b = (tree[group].to_dataset() for tree in trees)
            assert set(a.data_vars) == set(b.data_vars)
            for variable in a.data_vars:
                assert a[variable].dtype == b[variable].dtype
                np.testing.assert_array_equal(a[variable].values, b[variable].values)
        for tree in trees:
            tree.close()


def execute(module, out, *overrides):
    return run.execute(module, compose(*overrides), out, experiment="x", command="x")


def test_an_experiment_that_was_cut_goes_on(module, tmp_path, monkeypatch):
    cut = Cut(monkeypatch)
    whole = execute(module, tmp_path / "whole", *SMALL)
    assert not whole["resumed"] and not (tmp_path / "whole" / restarts.FOLDER).exists()
    out, again = tmp_path / "cut", (*SMALL, "checkpoint_seconds=0")
    attempted, total = [], cut.rounds
    for segments in (1, 3):
        cut.left, cut.rounds = segments, 0
        with pytest.raises(KeyboardInterrupt):
            execute(module, out, *again)
        attempted.append(cut.rounds)
    assert not (out / output.METRICS).exists()
    with pytest.raises(schemas.SettingsError, match=r"seed=0 \(now 1\).* delete that folder"):
        execute(module, out, *again, "seed=1")
    cut.rounds = 0
    assert execute(module, out, *again)["resumed"]
    assert cut.rounds == total - sum(attempted)
    assert_same_results(tmp_path / "whole", out)
    assert not list(out.glob("checkpoints*"))
    assert "checkpoint" not in (out / "config.yaml").read_text()


def test_a_chain_that_was_cut_is_no_result(module, tmp_path, monkeypatch):
    Cut(monkeypatch).left = 1
    with pytest.raises(KeyboardInterrupt):
        execute(module, tmp_path, *SMALL)  # without checkpoints, too
    assert not (tmp_path / output.METRICS).exists()


def test_parts_that_were_done_are_kept(module, tmp_path, monkeypatch):
    done, ends = [], []

    def part(number):
        if number in ends:
            raise KeyboardInterrupt
        done.append(number)
        return {"draws": Curves({"a": np.full(2, 0.1 * number)}, {}, np.ones(1, bool), ())}

    def fake(config, out):
        parts = [restarts.once(lambda i=i: part(i)) for i in range(4)]
        return {"draws": [p["draws"].scores["a"] for p in parts]}

    fakes = types.SimpleNamespace(Config=module.Config, run=fake)
    again = (*SMALL, "checkpoint_seconds=60")
    for ends[:] in ([2], [3], []):
        with contextlib.suppress(KeyboardInterrupt):
            found = execute(fakes, tmp_path / "cut", *again)
    assert done == [0, 1, 2, 3]
    assert found["metrics"] == execute(fakes, tmp_path / "whole", *SMALL)["metrics"]

    done.clear()
    ends[:] = [3]
    for commit in "one", "two":  # what was kept may be what other code computed
        monkeypatch.setattr(output, "environment", lambda commit=commit: {"git_commit": commit})
        with pytest.raises(KeyboardInterrupt):
            execute(fakes, tmp_path / "cut", *again)
    assert done == [0, 1, 2, 0, 1, 2]


def test_settings_of_a_run_are_checked(module, tmp_path):
    with pytest.raises(schemas.SettingsError, match="checkpoint_seconds must be at least 0"):
        execute(module, tmp_path / "x", *SMALL, "checkpoint_seconds=-1")
    assert not (tmp_path / "x").exists()


def test_a_finished_job_is_kept_on_demand(module, tmp_path):
    calls = []

    def fake(config, out):
        calls.append(config.seed)
        return {"seed": config.seed, "lost": np.nan}

    fakes = types.SimpleNamespace(Config=module.Config, run=fake)
    first = execute(fakes, tmp_path, *SMALL)
    assert execute(fakes, tmp_path, *SMALL, "keep_finished=true") == first
    assert calls == [0]
    execute(fakes, tmp_path, *SMALL)
    execute(fakes, tmp_path, *SMALL, "keep_finished=true", "seed=3")
    assert calls == [0, 0, 3]
    record = json.loads((tmp_path / output.METRICS).read_text())
    record["versions"]["jax"] = "0.0"
    (tmp_path / output.METRICS).write_text(json.dumps(record))
    execute(fakes, tmp_path, *SMALL, "keep_finished=true", "seed=3")
    assert calls == [0, 0, 3, 3]


@pytest.mark.slow
def test_a_killed_experiment_goes_on_to_the_same_results(tmp_path):
    command = [
        *(sys.executable, "-m", "experiments.run", "experiment=fsgld/gaussian_small"),
        *("num_chains=4", "num_local_steps=[1,10]"),
    ]

    def killed(folder, num_kills, *more):
        out = folder / "fsgld" / "gaussian_small"
        out.mkdir(parents=True)
        return out, kill_until_done(
            [*command, *more],
            environment() | {"FEDMCMC_RESULTS": str(folder)},
            is_ready=(out / "config.yaml").exists,
            done=out / output.METRICS,
            before=lambda: (out / "config.yaml").unlink(missing_ok=True),
            num_kills=num_kills,
            longest=5.0,
            seed=5,
        )

    whole, _ = killed(tmp_path / "whole", 0)
    out, kills = killed(tmp_path / "killed", 8, "checkpoint_seconds=0.1")
    assert kills >= 4
    assert json.loads((out / output.METRICS).read_text())["resumed"]
    assert_same_results(whole, out)
    assert not list(out.glob("checkpoints*"))
