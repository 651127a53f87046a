"""The entry for one data set, model and kernel: its commands, its errors, and every file."""

import json
import sys

import numpy as np
import pytest

hydra = pytest.importorskip("hydra")

import xarray  # noqa: E402

from experiments import arguments, metrics, problems, run, study, sweeping, tidy, wiring  # noqa: E402
from experiments.data import DataNotFound  # noqa: E402
from experiments.study import CONFIGS  # noqa: E402

TINY = ("num_rounds=8", "num_burnin=4", "num_chains=2")
SPHERICAL = ("data=spherical", "data.num_rows=60", "data.num_clients=3", "data.dim=3")
PROBLEM = (*SPHERICAL, "model=logistic", *TINY)
OWN = """
import numpy as np
import numpyro
import numpyro.distributions as dist
import fedmcmc
def hospitals(num_hospitals=2):
    rng = np.random.default_rng(0)
    tables = [{"x": rng.normal(size=9), "y": rng.integers(0, 2, 9)} for _ in range(num_hospitals)]
    return fedmcmc.FederatedData.from_clients(tables), tables[0]
def linear(x, y=None, scale=1.0):
    slope = numpyro.sample("slope", dist.Normal(0, scale))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Bernoulli(logits=slope * x), obs=y)
def flat(data, scale=1.0):
    return fedmcmc.from_numpyro(linear, example=data)
"""


def call(monkeypatch, *given):
    quiet = ("hydra/job_logging=none", "hydra/hydra_logging=none")
    monkeypatch.setattr(sys, "argv", ["run", *given, *(quiet if given else ())])
    run.main()


def compose(*given):
    (command,) = arguments.prepare(given)
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return run.plain(hydra.compose("config", [c for c in command if c != "--multirun"]))


def value(rows, metric, **where):
    return next(row.value for row in rows if row.metric == metric and row.matches(where))


def place(row):
    settings = {name: v for name, v in row.settings.items() if name != "parameter"}
    return row.method, tidy.setting_text(settings), row.seed


def test_a_run_leaves_rows_draws_a_figure_and_a_report(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("FEDMCMC_RESULTS", str(tmp_path))
    levels = "kernel.compressor.num_levels=8"
    call(monkeypatch, *PROBLEM, "kernel=qlsd_pp", levels, "kernel.step_size=1e-3", "seed=1")
    out = tmp_path / "spherical-logistic-qlsd_pp"
    for name in ("config.yaml", "draws.nc", "record.json", "report.html", "rows.csv", "trace.png"):
        assert (out / name).is_file()
    rows = tidy.read_rows(out / "rows.csv")
    assert {place(row) for row in rows} == {("qlsd_pp", f"{levels} kernel.step_size=0.001", 1)}
    assert 0 <= value(rows, "accuracy") <= 1 and value(rows, "nll") > 0
    with xarray.open_datatree(out / "draws.nc", engine="h5netcdf") as draws:
        mean = float(draws["posterior"]["theta"].mean(("chain", "draw"))[1])
    np.testing.assert_allclose(value(rows, "mean", parameter="theta[1]"), mean, rtol=1e-5)
    record = json.loads((out / "record.json").read_text())
    assert record["config"]["kernel"]["compressor"]["num_levels"] == 8
    assert "kernel=qlsd_pp kernel.compressor.num_levels=8" in record["command"]
    assert record["versions"]["jax"] and "accuracy" in capsys.readouterr().out


@pytest.mark.parametrize("model", ["linear", "flat"])
def test_data_and_model_by_import_path(monkeypatch, tmp_path, model):
    (tmp_path / "my_package.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("FEDMCMC_RESULTS", str(tmp_path))
    own = ("data=my_package.hospitals", "data.num_hospitals=3", f"model=my_package.{model}")
    kernel = ("kernel=fedmcmc.fa_hmc", "kernel.step_size=1e-3", "kernel.num_local_steps=1")
    steps = "kernel.num_integration_steps=2"
    call(monkeypatch, *own, *kernel, steps, *TINY, "metrics=[mean,accuracy]")
    out = f"my_package.hospitals-my_package.{model}-fedmcmc.fa_hmc"
    rows = tidy.read_rows(tmp_path / out / "rows.csv")
    assert [row.metric for row in rows] == ["mean", "accuracy", "accuracy s.e."]
    assert rows[0].settings["parameter"] == "slope"


def test_a_finished_run_is_kept_on_demand(monkeypatch, tmp_path):
    config = compose(*PROBLEM, "kernel=lsd", "kernel.step_size=1e-3")
    rows = run.execute(run.Job(config, tmp_path))
    kept = {**config, "keep_finished": True}
    with monkeypatch.context() as patched:
        patched.setattr(run, "sample", None)  # it is not called again
        assert run.execute(run.Job(kept, tmp_path)) == rows
    assert run.execute(run.Job({**kept, "seed": 1}, tmp_path)) != rows


def test_jobs_of_a_sweep_share_a_table_and_are_those_of_single_runs(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDMCMC_RESULTS", str(tmp_path))
    swept = ("kernel=lsd,dsgld", "kernel.step_size=1e-3,2e-3", "seed=range(0,2)")
    call(monkeypatch, *PROBLEM, *swept, "--multirun")
    rows = tidy.read_rows(tmp_path / "sweep" / "rows.csv")
    points = {place(row) for row in rows}
    steps = [f"kernel.step_size={step}" for step in (0.001, 0.002)]
    assert points == {
        (k, step, seed) for k in ("lsd", "dsgld") for step in steps for seed in (0, 1)
    }
    assert len(metrics.table(rows)) == len([*tmp_path.glob("*/*kernel=lsd*/record.json")]) == 4
    config = compose(*PROBLEM, "kernel=lsd", "kernel.step_size=2e-3", "seed=1")
    alone = run.execute(run.Job(config, tmp_path))
    job = [row for row in rows if place(row) == ("lsd", steps[1], 1)]
    assert [row.metric for row in job] == [row.metric for row in alone]
    values = [[row.value for row in part] for part in (job, alone)]
    np.testing.assert_allclose(*values, rtol=1e-3, atol=1e-5)


def test_jobs_one_after_another_and_one_that_fails(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("FEDMCMC_RESULTS", str(tmp_path))
    failing = ("kernel=qlsd", "kernel.compressor.num_levels=0,4", "vmapped=false")
    with pytest.raises(SystemExit, match=r"(?s)1 of 2 jobs failed:.*num_levels=0 .*got 0"):
        call(monkeypatch, *PROBLEM, *failing, "kernel.step_size=1e-3", "metrics=[bits_up]")
    assert "1 of 2 jobs; rows.csv and table.md in" in capsys.readouterr().out
    (row,) = sweeping.gather(tmp_path / "sweep")
    assert row.metric == "bits_up" and row.settings["kernel.compressor.num_levels"] == 4


def test_settings_of_all_jobs_are_checked_before_the_first(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDMCMC_RESULTS", str(tmp_path))
    with pytest.raises(SystemExit, match=r"error: lsd kernel.alpha=1: kernel.alpha=1: .*'alpha'"):
        call(monkeypatch, *PROBLEM, "kernel=fsgld,lsd", "kernel.alpha=1")
    assert not [*tmp_path.rglob("rows.csv")]


def test_a_study_is_its_grids_and_the_command_line_comes_first(monkeypatch, tmp_path):
    studies = [arguments.prepare([f"study={name}"]) for name in arguments.choices("study")]
    assert all("--multirun" in command for study in studies for command in study)
    monkeypatch.setenv("FEDMCMC_RESULTS", str(tmp_path))
    local = "kernel.num_local_steps=1,2"
    small = ("data.rows_per_client=12", "thinning=1", local)
    assert len(arguments.prepare(["study=fsgld/gaussian_small", *small, *TINY])) == 1
    call(monkeypatch, "study=fsgld/gaussian_small", *small, *TINY, "special.grid_points=5")
    tidy.take(tmp_path / "fsgld" / "gaussian_small", tmp_path)
    rows = tidy.read("fsgld/gaussian_small", tmp_path)
    for metric in ("variance", "variance s.e.", "variance_ratio", "exact_mse"):
        found = {(row.method, *row.settings.items()) for row in rows if row.metric == metric}
        steps = (("num_local_steps", num) for num in (1, 2))
        assert found == {(method, step) for step in steps for method in ("DSGLD", "FSGLD")}
    config = tidy.read_record("fsgld/gaussian_small", tmp_path)["config"]
    assert config["kernel.num_local_steps"] == [1, 2] and config["grid_points"] == 5


def fail():
    return 1 // 0


def test_a_study_extends_another():
    command = arguments.prepare(["study=qlsd/covtype_small"])[0]
    (job,) = arguments.jobs(command)
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        config = run.plain(hydra.compose("config", job))
    assert config["num_rounds"] == 5_000 and config["data"]["_target_"].endswith(".covtype")
    assert config["references"]["MALA"]["num_draws"] == 1_000
    assert len(arguments.jobs(["--multirun", *job, "seed=range(0,3)", "num_chains=1,2"])) == 6


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
    assert str(rows) == str(
        [("LSD", 1.0, {"key": "other"}), ("MALA", np.nan, {}), ("LSD", 2.0, {})]
    )


@pytest.mark.slow
def test_draws_are_compared_with_references(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDMCMC_RESULTS", str(tmp_path))
    counts = ("num_rounds=600", "num_burnin=100", "thinning=5", "num_chains=4")
    warmup = ("references.MALA.num_warmup=200", "references.MALA.num_draws=300")
    call(monkeypatch, "study=qlsd/covtype", *SPHERICAL, *counts, *warmup)
    rows = tidy.read_rows(tmp_path / "qlsd" / "covtype" / "rows.csv")
    found = {
        (row.method, tidy.setting_text(row.settings), row.x, row.metric): row.value for row in rows
    }
    assert len(found) == len(rows)
    for bits in (4, 8, 16):
        beside = found["QLSD++", f"bits={bits} reference=LSD++", None, "hpd_error"]
        assert beside < 1e-3 < found["DG-SGLD", "reference=LSD++", None, "hpd_error"]
    assert ("LSD++", "reference=LSD++", None, "hpd_error") not in found
    assert found["LSD++", "", None, "draws_beyond_threshold"] == 4
    assert found["QLSD++", "bits=4 reference=MALA", None, "efficiency"] > 1.5
    # The potential of a Gaussian posterior in d dimensions has the variance d / 2.
    assert found["MALA", "", None, "potential_sd"] == pytest.approx(np.sqrt(3 / 2), rel=0.15)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((), "data= is missing; give an import path or one of"),
        (
            ("kernel=lsd", "data=nope"),
            "data=nope does not exist; give one of .* or an import",
        ),
        (("kernel=a.b",), "kernel=a.b cannot be imported: No module named 'a'"),
        (("kernel=fa_hmc", "kernel.stepsize=1"), "no argument 'stepsize', its .* step_size, num"),
        (("kernel=fa_hmc", "kernel.num_local_steps=x"), "num_local_steps must be a whole num.*'x'"),
        (
            ("kernel=fa_hmc", "kernel.step_size=big"),
            "a number or {_target_: .*a function",
        ),
        (
            ("kernel=lsd", "kernel.participation=0.5"),
            "instance .*participation.uniform, cohort",
        ),
        (("kernel=fedmcmc.fa_hmc",), "needs kernel.step_size, kernel.num_integration_steps, "),
        (("kernel=lsd", f"data={__name__}.fail"), "data: ZeroDivisionError: .* .test_run.py, line"),
        (("kernel=fsgld", "kernel.surrogates=null"), "needs kernel.surrogates, for instance"),
        (("kernel=fedmcmc.qlsd", "kernel.step_size=1"), "needs kernel.compressor, for instance"),
        (("kernel=lsd", "rounds=3"), "rounds is not a setting; the settings are data, model"),
        (("kernel=lsd", "num_rounds=ten"), "num_rounds must be a whole number, got 'ten'"),
        (("kernel=lsd", "num_burnin=8"), "num_burnin must leave at least"),
        (("kernel=lsd", "metrics=[rhatt]"), "metrics has rhatt; the metrics are mean"),
        (("kernel=lsd", "data=gaussian"), "model=logistic does not fit data=gaussian"),
        (("kernel=lsd", "data=digits"), "labels must be 0 or 1, got 0 to 9; use model=multinomial"),
        (("kernel=lsd", "model=trial"), "model=trial does not fit data=spherical: The model takes"),
        (("kernel=fed_gibbs",), "kernel=fed_gibbs: fed_gibbs moves latents of groups"),
        (("kernel=fedmcmc.identity",), "must make a kernel, got Identity"),
        (("study=nope",), "study=nope does not exist"),
    ],
)
def test_errors_are_one_sentence_before_anything_runs(monkeypatch, tmp_path, given, message):
    monkeypatch.setenv("FEDMCMC_RESULTS", str(tmp_path))
    monkeypatch.setattr(run.fedmcmc, "sample", None)
    keys = {argument.partition("=")[0] for argument in given}
    other_data = ("data=", "data.") if "data" in keys else ()
    kept = [a for a in PROBLEM if given and a.split("=")[0] not in keys]
    kept = [a for a in kept if not a.startswith(other_data)]
    with pytest.raises(SystemExit, match=f"(?s)^error: .*{message}"):
        call(monkeypatch, *kept, *given)


SMALL = {
    "femnist_star": ("data.name=small_digits", "data.num_clients=2"),
    "covtype": ("data.num_rows=60", "data.num_test=5"),
    "isolet": ("data.pairs_per_client=6", "data.num_test=4"),
    "tags": ("data.num_clients=5", "data.num_words=30", "data.num_tags=3", "data.num_test=4"),
}
IMAGES = ("mnist", "digits", "fashion_mnist", "kmnist", "cifar2", "cifar10", "emnist_digits")


@pytest.mark.parametrize("name", arguments.choices("data"))
def test_every_data_set_is_loaded_or_says_how_to_get_it(name):
    small = SMALL.get(name, ())
    if name in IMAGES:
        small = ("data.num_rows=100", "data.num_test=5", "data.num_clients=2")
    config = compose(f"data={name}", "model=logistic", "kernel=lsd", *small)
    wiring.check(config["data"], "data", ())
    try:
        data, test, *_ = wiring.build(config["data"], "data", None)
    except DataNotFound as error:
        pytest.skip(str(error))
    assert data.num_clients > 1 and data.num_rows >= data.num_clients
    assert not isinstance(test, dict) or {*test} == {*data.rows}


def shown(name):
    images = ("data=digits", "data.num_rows=60", "data.num_test=5", "data.num_clients=2")
    return {
        "gaussian": ("data=gaussian", "data.dim=2"),
        "group_means": ("data=funnel",),
        "multinomial": images,
        **dict.fromkeys(("small_cnn", "resnet20"), (*images, "data.flat=false")),
        "lenet5": ("data=mnist", *images[1:], "data.flat=false"),
        "quadratic": ("data=quadratic",),
        "tags": ("data=tags", *SMALL["tags"], "model.num_words=30", "model.num_tags=3"),
        "trial": ("data=indomethacin",),
        "random_effects": ("data=schools",),
        "pair_metric": ("data=isolet", *SMALL["isolet"]),
    }.get(name, SPHERICAL)


@pytest.mark.parametrize("name", arguments.choices("model"))
def test_every_model_fits_its_data(name):
    config = compose(*shown(name), f"model={name}", "kernel=lsd")
    run.check(config)
    try:
        problem = problems.load(config)
    except DataNotFound as error:
        pytest.skip(str(error))
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


def test_every_run_is_checked():
    for name in arguments.choices("run"):
        run.check(compose(*PROBLEM[:-3], "kernel=lsd", f"run={name}"))
