"""The entry for one data set, model and kernel: its commands, its errors, and every file."""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path

import hydra
import numpy as np
import pytest
import xarray

from experiments import arguments, claims, metrics, problems, run, study, sweeping, tidy, wiring
from experiments.study import CONFIGS
from tests.experiments.test_data import or_skip

ROOT = Path(__file__).resolve().parents[2]
TINY = ("num_rounds=8", "num_burnin=4", "num_chains=2")
SPHERICAL = ("data=spherical", "data.num_rows=60", "data.num_clients=3", "data.dim=3")
PROBLEM = (*SPHERICAL, "model=logistic", *TINY)
LSD = ("kernel=lsd", "kernel.step_size=1e-3")
README = (CONFIGS / "README.md").read_text()


@pytest.fixture
def call(monkeypatch, tmp_path):
    """Run a command whose results go below `tmp_path`."""
    monkeypatch.setenv("FEDMCMC_RESULTS", str(tmp_path))

    def call(*given):
        quiet = ("hydra/job_logging=none", "hydra/hydra_logging=none")
        monkeypatch.setattr(sys, "argv", ["run", *given, *(quiet if given else ())])
        run.main()

    return call


def compose(*given):
    """Return the config of the first job."""
    job = arguments.jobs(arguments.prepare(given)[0])[0]
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return run.plain(hydra.compose("config", job))


def place(row):
    settings = {name: v for name, v in row.settings.items() if name != "parameter"}
    return row.method, tidy.setting_text(settings), row.seed


def test_a_run_leaves_rows_draws_a_figure_and_a_report(call, tmp_path, capsys):
    levels = "kernel.compressor.num_levels=8"
    call(*PROBLEM, "kernel=qlsd_pp", levels, "kernel.step_size=1e-3", "seed=1")
    out = tmp_path / "spherical-logistic-qlsd_pp"
    for name in ("config.yaml", "draws.nc", "record.json", "report.html", "rows.csv", "trace.png"):
        assert (out / name).is_file()
    rows = tidy.read_rows(out / "rows.csv")
    assert {place(row) for row in rows} == {("qlsd_pp", f"{levels} kernel.step_size=0.001", 1)}
    assert 0 <= claims.value(rows, "accuracy") <= 1 and claims.value(rows, "nll") > 0
    with xarray.open_datatree(out / "draws.nc", engine="h5netcdf") as draws:
        mean = float(draws["posterior"]["theta"].mean(("chain", "draw"))[1])
    found = claims.value(rows, "mean", parameter="theta[1]")
    assert float(found) == pytest.approx(mean, rel=1e-5)
    record = json.loads((out / "record.json").read_text())
    assert record["config"]["kernel"]["compressor"]["num_levels"] == 8
    assert f"kernel=qlsd_pp {levels}" in record["command"]
    assert record["versions"]["jax"] and "accuracy" in capsys.readouterr().out


@pytest.fixture
def my_models(monkeypatch, tmp_path):
    """Put the module of the README on the path, with a function that returns a `Posterior`."""
    blocks = map(textwrap.dedent, re.findall(r"```python\n(.*?)```", README, re.DOTALL))
    flat = "def flat(data):\n    return fedmcmc.from_numpyro(robust, example=data)\n"
    text = "\n".join(["import fedmcmc", "import numpy as np", *blocks, flat])
    (tmp_path / "my_models.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("my_models")
@pytest.mark.parametrize("model", ["robust", "flat"])
def test_data_and_model_by_import_path(call, tmp_path, model):
    own = ("data=my_models.my_data", "data.num_clients=3", f"model=my_models.{model}")
    kernel = ("kernel=fedmcmc.fa_hmc", "kernel.step_size=1e-3", "kernel.num_local_steps=1")
    call(*own, *kernel, "kernel.num_integration_steps=2", *TINY, "metrics=[mean]")
    out = f"my_models.my_data-my_models.{model}-fedmcmc.fa_hmc"
    rows = tidy.read_rows(tmp_path / out / "rows.csv")
    assert [row.settings["parameter"] for row in rows] == [f"theta[{i}]" for i in range(3)]


@pytest.mark.usefixtures("my_models")
def test_commands_of_the_readme_are_checked():
    lines = re.findall(r"^python -m experiments.run (.*)", README.replace("\\\n", ""), re.MULTILINE)
    assert len(lines) == 6
    lines += [f"{lines[0]} run={name}" for name in arguments.choices("run")]
    for line in lines:
        run.check(compose(*shlex.split(line, comments=True)))


def test_a_finished_run_is_kept_on_demand(monkeypatch, tmp_path):
    config = compose(*PROBLEM, *LSD)
    rows = run.execute(run.Job(config, tmp_path))
    kept = {**config, "keep_finished": True}
    with monkeypatch.context() as patched:
        patched.setattr(run, "sample", None)  # it is not called again
        assert run.execute(run.Job(kept, tmp_path)) == rows
    assert run.execute(run.Job({**kept, "seed": 1}, tmp_path)) != rows


def test_jobs_of_a_sweep_share_a_table_and_are_those_of_single_runs(call, tmp_path):
    call(*PROBLEM, "kernel=lsd,dsgld", "kernel.step_size=1e-3,2e-3", "seed=range(0,2)")
    rows = tidy.read_rows(tmp_path / "sweep" / "rows.csv")
    points = {place(row) for row in rows}
    steps = [f"kernel.step_size={step}" for step in (0.001, 0.002)]
    assert points == {(k, step, i) for k in ("lsd", "dsgld") for step in steps for i in (0, 1)}
    assert len(metrics.table(rows)) == len([*tmp_path.glob("*/*kernel=lsd*/record.json")]) == 4
    config = compose(*PROBLEM, "kernel=lsd", "kernel.step_size=2e-3", "seed=1")
    alone = run.execute(run.Job(config, tmp_path))
    job = [row for row in rows if place(row) == ("lsd", steps[1], 1)]
    assert [row.metric for row in job] == [row.metric for row in alone]
    values = [[row.value for row in part] for part in (job, alone)]
    np.testing.assert_allclose(*values, rtol=1e-3, atol=1e-5)


def test_jobs_one_after_another_and_one_that_fails(call, tmp_path, capsys):
    failing = ("kernel=qlsd", "kernel.compressor.num_levels=0,4", "vmapped=false")
    with pytest.raises(SystemExit, match=r"(?s)1 of 2 jobs failed:.*num_levels=0 .*got 0"):
        call(*PROBLEM, *failing, "kernel.step_size=1e-3", "metrics=[bits_up]")
    assert "1 of 2 jobs; rows.csv and table.md in" in capsys.readouterr().out
    (row,) = sweeping.gather(tmp_path / "sweep")
    assert row.metric == "bits_up" and row.settings["kernel.compressor.num_levels"] == 4


def test_a_study_is_its_grids_and_the_command_line_comes_first():
    commands = [arguments.prepare([f"study={name}"]) for name in arguments.choices("study")]
    assert all("--multirun" in command for grids in commands for command in grids)
    run = ("num_rounds=8", "num_burnin=0", "thinning=1")
    line = ["study=fsgld/gaussian_small", *run, "kernel.num_local_steps=1,2"]
    (command,) = arguments.prepare(line)  # its grids differ in what the line gives
    assert len(arguments.jobs(command)) == 4 and "thinning=1" in command


def test_rows_of_a_study_have_given_settings_and_those_that_differ_once(tmp_path):
    shared = tidy.Row("MALA", "potential", np.nan, {}, seed=0)
    ours = {"key": "other", "reference": "MALA"}
    jobs = [
        study.JobRows({"setting": "key=other"}, [tidy.Row("lsd", "error", 1.0, ours, 0), shared]),
        study.JobRows({}, [tidy.Row("lsd", "error", 2.0, {"reference": "MALA"}, 0), shared]),
    ]
    made = {**dict.fromkeys(study.KEYS), "methods": {"lsd": "LSD"}}
    study.finish("made/up", made, jobs, tmp_path, command="", start_time=0.0)
    rows = [(r.method, r.value, r.settings) for r in tidy.read_rows(tmp_path / "rows.csv")]
    assert str(rows) == "[('LSD', 1.0, {'key': 'other'}), ('MALA', nan, {}), ('LSD', 2.0, {})]"


@pytest.mark.slow
def test_draws_are_compared_with_references(call, tmp_path):
    counts = ("num_rounds=600", "num_burnin=100", "thinning=5", "num_chains=4")
    warmup = ("references.MALA.num_warmup=200", "references.MALA.num_draws=300")
    call("study=qlsd/covtype", *SPHERICAL, *counts, *warmup)
    rows = tidy.read_rows(tmp_path / "qlsd" / "covtype" / "rows.csv")
    found = partial(claims.value, rows)
    errors = [found("hpd_error", method="QLSD++", bits=b, reference="LSD++") for b in (4, 8, 16)]
    assert max(errors) < 1e-3 < found("hpd_error", method="DG-SGLD", reference="LSD++")
    assert found("draws_beyond_threshold", method="LSD++") == 4
    assert found("efficiency", method="QLSD++", bits=4, reference="MALA") > 1.5
    # The potential of a Gaussian posterior in d dimensions has the variance d / 2.
    assert float(found("potential_sd", method="MALA")) == pytest.approx(1.5**0.5, rel=0.15)


def fail():
    return 1 // 0


ERRORS = {
    "": "data= is missing; give an import path or one of",
    "kernel=lsd data=nope": "data=nope does not exist; give one of .* or an import",
    "kernel=a.b": "kernel=a.b cannot be imported: No module named 'a'",
    "kernel=fa_hmc kernel.stepsize=1": "no argument 'stepsize', its .* step_size, num",
    "kernel=fa_hmc kernel.num_local_steps=x": "num_local_steps must be a whole num.*'x'",
    "kernel=fa_hmc kernel.step_size=big": "a number or {_target_: .*a function",
    "kernel=lsd kernel.participation=0.5": "instance .*participation.uniform, cohort",
    "kernel=fsgld,lsd kernel.alpha=1": "lsd kernel.alpha=1: kernel.alpha=1: .*'alpha'",
    "kernel=fedmcmc.fa_hmc": "needs kernel.step_size, kernel.num_integration_steps, ",
    f"kernel=lsd data={__name__}.fail": "data: ZeroDivisionError: .* .test_run.py, line",
    "kernel=fsgld kernel.surrogates=null": "needs kernel.surrogates, for instance",
    "kernel=fedmcmc.qlsd kernel.step_size=1": "needs kernel.compressor, for instance",
    "kernel=lsd rounds=3": "rounds is not a setting; the settings are data, model",
    "kernel=lsd num_rounds=ten": "num_rounds must be a whole number, got 'ten'",
    "kernel=lsd num_rounds=8 num_burnin=8": "num_burnin must leave at least",
    "kernel=lsd metrics=[rhatt]": "metrics has rhatt; the metrics are mean",
    "kernel=lsd data=gaussian": "model=logistic does not fit data=gaussian",
    "kernel=lsd data=digits": "labels must be 0 or 1, got 0 to 9; use model=multinomial",
    "kernel=lsd model=trial": "model=trial does not fit data=spherical: The model takes",
    "kernel=fed_gibbs": "kernel=fed_gibbs: fed_gibbs moves latents of groups",
    "kernel=fedmcmc.compression.identity": "must make a kernel, got Identity",
    "study=nope": "study=nope does not exist",
}


@pytest.mark.parametrize("given", ERRORS)
def test_errors_are_one_sentence_before_anything_runs(call, monkeypatch, tmp_path, given):
    monkeypatch.setattr(run.fedmcmc, "sample", None)
    command = {"data": "spherical", "model": "logistic"} if given else {}
    command |= dict(argument.split("=", 1) for argument in given.split())
    with pytest.raises(SystemExit, match=f"(?s)^error: .*{ERRORS[given]}"):
        call(*map("=".join, command.items()))
    assert not [*tmp_path.rglob("rows.csv")]


@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is not None, reason="JAX has GPUs here"
)
def test_a_platform_without_a_device_ends_the_program_with_one_sentence():
    command = [sys.executable, "-m", "experiments.run", "study=fsgld/gaussian_small"]
    env = {**os.environ, "JAX_PLATFORMS": "cuda"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and not done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: JAX finds no device for JAX_PLATFORMS=cuda: install JAX")
    assert 'pip install "jax[cuda12]"' in line and "make sweep-cpu" in line


IMAGES = ("data.num_rows=100", "data.num_test=5", "data.num_clients=2")
SMALL = {
    "femnist_star": ("data.name=small_digits", "data.num_clients=2"),
    "covtype": ("data.num_rows=60", "data.num_test=5"),
    "isolet": ("data.pairs_per_client=6", "data.num_test=4"),
    "tags": ("data.num_clients=5", "data.num_words=30", "data.num_tags=3", "data.num_test=4"),
    **dict.fromkeys(("mnist", "digits", "fashion_mnist", "kmnist"), IMAGES),
    **dict.fromkeys(("cifar2", "cifar10", "emnist_digits"), IMAGES),
}


@pytest.mark.parametrize("name", arguments.choices("data"))
def test_every_data_set_is_loaded_or_says_how_to_get_it(name):
    config = compose(f"data={name}", "model=logistic", "kernel=lsd", *SMALL.get(name, ()))
    wiring.check(config["data"], "data", ())
    data, test, *_ = or_skip(lambda: wiring.build(config["data"], "data", None))
    assert data.num_clients > 1 and data.num_rows >= data.num_clients
    assert not isinstance(test, dict) or {*test} == {*data.rows}


FITTING = {
    "gaussian": ("data=gaussian", "data.dim=2"),
    "group_means": ("data=funnel",),
    "multinomial": ("data=digits", *IMAGES),
    **dict.fromkeys(("small_cnn", "resnet20"), ("data=digits", *IMAGES, "data.flat=false")),
    "lenet5": ("data=mnist", *IMAGES, "data.flat=false"),
    "quadratic": ("data=quadratic",),
    "tags": ("data=tags", *SMALL["tags"], "model.num_words=30", "model.num_tags=3"),
    "trial": ("data=indomethacin",),
    "random_effects": ("data=schools",),
    "pair_metric": ("data=isolet", *SMALL["isolet"]),
}


@pytest.mark.parametrize("name", arguments.choices("model"))
def test_every_model_fits_its_data(name):
    config = compose(*FITTING.get(name, SPHERICAL), f"model={name}", "kernel=lsd")
    run.check(config)
    problem = or_skip(lambda: problems.load(config))
    assert problem.posterior.init_fn is not None


@pytest.mark.parametrize("name", arguments.choices("kernel"))
def test_every_kernel_is_built(name):
    problem = PROBLEM
    if name == "fed_gibbs":
        problem = ("data=funnel", "model=group_means", "model.marginal_nodes=null", *TINY)
    config = compose(*problem, f"kernel={name}")
    run.check(config)
    kernel = wiring.build(config["kernel"], "kernel", problems.load(config))
    assert isinstance(kernel, run.fedmcmc.FederatedKernel)
    assert config["kernel"]["_target_"] == f"fedmcmc.{name}"
