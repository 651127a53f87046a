import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

hydra = pytest.importorskip("hydra")

from hydra.errors import ConfigCompositionException  # noqa: E402

from experiments import output, schemas  # noqa: E402
from experiments import settings_run as run  # noqa: E402
from tests.support.tiny_experiments import TINY, compose  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def modules():
    return schemas.register()


@pytest.fixture(scope="module")
def results(modules, tmp_path_factory):
    results = tmp_path_factory.mktemp("results")
    cfg = compose("experiment=fsgld/gaussian", *TINY)
    out = results / "fsgld" / "gaussian"
    module = modules["fsgld/gaussian"]
    run.execute(module, cfg, out, experiment="fsgld/gaussian", command="python -m tiny")
    return results


def test_every_settings_file_composes_and_is_in_range(modules):
    names = run.available()
    assert {"fsgld/gaussian", "fsgld/gaussian_small"} <= set(names)
    for name in names:
        cfg = compose(f"experiment={name}")
        schemas.build(cfg, modules[schemas.name_of(cfg)])


def test_every_experiment_has_its_paper_settings_as_a_file(modules):
    for name, module in modules.items():
        assert name in run.available(), f"configs/experiment/{name}.yaml is missing"
        cfg = compose(f"experiment={name}")
        assert schemas.build(cfg, module) == module.Config()


def test_unknown_setting_is_named(modules):
    with pytest.raises(ConfigCompositionException) as caught:
        compose("experiment=fsgld/gaussian", "stepsize=1e-4")
    assert "stepsize" in str(caught.value)
    cfg = compose("experiment=fsgld/gaussian", "+stepsize=1e-4")
    with pytest.raises(schemas.SettingsError, match=r"'stepsize'.*step_size"):
        schemas.build(cfg, modules["fsgld/gaussian"])


def test_wrong_type_is_named(modules):
    with pytest.raises(ConfigCompositionException) as caught:
        compose("experiment=fsgld/gaussian", "seed=abc")
    assert "abc" in f"{caught.value} {caught.value.__cause__}"


@pytest.mark.parametrize(
    "override",
    [
        "step_size=-1e-4",
        "step_size=1.0",
        "batch_size=0",
        "num_local_steps=[]",
        "num_local_steps=[7]",
        "num_draws=1999",
    ],
)
def test_out_of_range_is_named(modules, tmp_path, override):
    cfg = compose("experiment=fsgld/gaussian", override)
    out = tmp_path / "out"
    with pytest.raises(schemas.SettingsError, match=override.split("=")[0]):
        run.execute(modules["fsgld/gaussian"], cfg, out, experiment="x", command="x")
    assert not out.exists()


@pytest.mark.slow
def test_run_leaves_settings_metrics_and_draws(results):
    arviz = pytest.importorskip("arviz_base")
    out = results / "fsgld" / "gaussian"
    record = json.loads((out / output.METRICS).read_text())
    assert record["config"]["num_local_steps"] == [20]
    assert record["versions"]["jax"]
    assert record["wall_seconds"] > 0
    assert "step_size: 0.001" in (out / "config.yaml").read_text()
    drawn = arviz.convert_to_datatree(str(out / "draws_fsgld_20.nc"))["posterior"]
    assert drawn["theta"].shape == (16, 200, 2, 2)  # two of a round's 20 local states a draw


@pytest.mark.slow
def test_measured_moments_fit_the_exact_law(results):
    record = json.loads((results / "fsgld/gaussian" / output.METRICS).read_text())
    table = record["metrics"]["table"]
    assert [row["method"] for row in table] == ["DSGLD", "FSGLD"]
    for row in table:
        # The standard error of a variance comes from 16 chains: |t| with 15 degrees of freedom.
        assert abs(row["z (variance)"]) < 8
        assert abs(row["z (MSE)"]) < 5.5
    assert table[0]["exact variance"] > 3 * table[1]["exact variance"]


def test_metrics_hold_plain_json(tmp_path):
    written = output.write_metrics(tmp_path, {"a": np.float32(1), "b": np.nan, "c": np.arange(2)})
    assert written == {"a": 1.0, "b": None, "c": [0, 1]}
    assert json.loads((tmp_path / output.METRICS).read_text()) == written
    with pytest.raises(TypeError, match="metrics"):
        output.write_metrics(tmp_path, {"a": object()})


@pytest.mark.slow
def test_command_line(tmp_path):
    env = {**os.environ, "FEDMCMC_RESULTS": str(tmp_path)}

    def call(*arguments):
        command = [sys.executable, "-m", "experiments.run", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)

    missing = call()
    assert missing.returncode != 0
    assert "experiment=fsgld/gaussian" in missing.stderr
    refused = call("experiment=fsgld/gaussian", "step_size=1")
    assert refused.returncode != 0
    assert refused.stderr.strip().splitlines()[-1].startswith("error: step_size")
    swept = call("--multirun", "experiment=fsgld/gaussian", *TINY, "grid_points=5,6")
    assert swept.returncode == 0, swept.stderr
    assert swept.stdout.count("FSGLD") == 2
    records = sorted(tmp_path.glob("fsgld/gaussian/*/metrics.json"))
    assert [json.loads(r.read_text())["config"]["grid_points"] for r in records] == [5, 6]


def test_a_bar_in_a_name_does_not_end_a_column_of_a_table():
    lines = output.markdown_table([{"error / |variances|": 0.5, "name": "a|b"}]).splitlines()
    assert lines == [r"| error / \|variances\| | name |", "|---|---|", r"| 0.5 | a\|b |"]
