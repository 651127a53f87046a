import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

hydra = pytest.importorskip("hydra")

from hydra.errors import ConfigCompositionException  # noqa: E402

from experiments import output, report, run, schemas  # noqa: E402
from experiments.fsgld import (  # noqa: E402
    alpha,
    cost,
    gaussian,
    gaussian_figures,
    gaussian_law,
    gaussian_verdicts,
    metric_scores,
    mlp_scores,
    spreads,
)
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
def test_run_leaves_settings_metrics_figures_and_draws(results):
    arviz = pytest.importorskip("arviz_base")
    out = results / "fsgld" / "gaussian"
    record = json.loads((out / output.METRICS).read_text())
    assert record["config"]["num_local_steps"] == [20]
    assert record["versions"]["jax"]
    assert record["wall_seconds"] > 0
    assert "step_size: 0.001" in (out / "config.yaml").read_text()
    for figure in record["metrics"]["figures"]:
        assert (out / figure["file"]).stat().st_size > 1000
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


def test_exact_law_of_averages_matches_a_simulated_relay():
    from experiments.fsgld.gaussian_law import relay_law

    rng = np.random.default_rng(0)
    shards = rng.uniform(-2, 2, (3, 1, 2)) + rng.standard_normal((3, 20, 2))
    settings = dict(step_size=2e-3, batch_size=5, num_local_steps=4, alpha=0.0)
    law = relay_law(shards, **settings)
    root = np.linalg.cholesky(law.noise)
    num, times = 100_000, (2, 4)
    theta, kept = np.zeros((num, 2)), []
    for round_ in range(25):
        s = rng.integers(0, 3, num)
        states = []
        for _ in range(4):
            noise = np.einsum("cij,cj->ci", root[s], rng.standard_normal((num, 2)))
            theta = law.factor[s][:, None] * theta + law.shift[s] + noise
            states.append(theta)
        if round_ in (20, 22, 24):
            kept.append(np.mean([states[t - 1] for t in times], axis=0))
    mean, covariance = law.average(times, 2, 3)
    for length in (1, 3):
        average = np.mean(kept[:length], axis=0)
        deviation = np.sqrt(np.diag(covariance[length - 1]))
        z = (average.mean(axis=0) - mean) / deviation * np.sqrt(num)
        assert np.abs(z).max() < 5
        ratio = average.var(axis=0) / deviation**2 - 1
        assert np.abs(ratio).max() < 5 * np.sqrt(2 / num)


def test_multiples_of_the_conducive_gradient_have_their_law(tmp_path):
    config = alpha.Config(alphas=(0.0, 0.5, 1.0), errors=(0.0, 1.0), num_rounds=300)
    metrics = alpha.run(config, tmp_path)
    assert (tmp_path / "alpha.png").is_file()
    rows = metrics["table"]
    for row in rows[3:]:
        assert abs(row["measured"] - row["first draw"]) < 5 * row["s.e."]
    # Right surrogates leave the noise of minibatches alone, and none the scatter of the shards.
    assert rows[0][alpha.NAME] == pytest.approx(rows[3][alpha.NAME])
    assert rows[0][alpha.NAME] > 100 * rows[2][alpha.NAME]
    assert [row["alpha"] for row in alpha.best(metrics).values()] == [1.0, 0.5]
    # The best multiple is 1 / (1 + e^2) on average; with one draw of the errors it is not.
    right, wrong = metrics["least"]
    assert right["best alpha"] == pytest.approx(1) and wrong["theory"] == 0.5
    assert abs(wrong["best alpha"] - 0.5) < 3 * wrong["its s.e."] < 0.1
    assert wrong["lowest of a draw"] < 0.4 and wrong["highest of a draw"] > 0.6
    assert alpha.as_theory(metrics)
    text = alpha.commentary(metrics)
    assert "standard errors from its law" in text and "as in theory" in text
    wrong["best alpha"] = 0.75
    assert not alpha.as_theory(metrics) and "not as in theory" in alpha.commentary(metrics)


def test_a_conducive_gradient_costs_one_more_gaussian_with_any_number_of_clients(tmp_path):
    config = cost.Config(dims=(3, 5), num_clients=(2, 4), rows_per_client=4, batch_sizes=(2, 40))
    metrics = cost.run(config, tmp_path)
    for row in metrics["table"]:
        dim = row["parameters"]
        # The precision times the position, the difference to its mean, the sum with the estimate.
        wanted = {"diagonal": 3 * dim, "dense": 2 * dim * (dim + 1)}[row["surrogates"]]
        assert row[cost.OWN] == wanted < row["once a visit"] and row[cost.PRIOR] == 3 * dim
        assert 0 < 10 * row[cost.batch_of(2)] < row[cost.batch_of(40)]
    settings = dataclasses.asdict(config)
    word, number = gaussian_verdicts.price(metrics, settings)
    assert word == "partly" and "diagonal surrogates: 1 times the prior's" in number
    assert "dense surrogates: 2.7 to 4 times" in number
    metrics["table"][1][cost.OWN] += 1
    assert gaussian_verdicts.price(metrics, settings).word == "contradicted"


def test_sgld_on_one_machine_has_its_law():
    """Against a simulation of rows drawn with replacement; and what FSGLD's shards leave of it."""
    names = ("seed", "spread", "num_clients", "rows_per_client", "step_size", "batch_size")
    config = dict(zip(names, (3, 2.0, 3, 20, 2e-3, 5), strict=True))
    found = gaussian_law.one_machine(config)
    rows = gaussian_law.simulate_shards(*(config[name] for name in names[:4])).reshape(60, 2)
    rng = np.random.default_rng(0)
    theta = np.zeros((20_000, 2))
    for _ in range(60):
        minibatch = rows[rng.integers(0, 60, (len(theta), 5))].mean(axis=1)
        noise = rng.standard_normal(theta.shape) * np.sqrt(2 * 2e-3)
        theta = theta + 2e-3 * (60 * (minibatch - theta) - theta) + noise
    assert 61 * theta.var(axis=0).mean() == pytest.approx(found["minibatches"], rel=0.04)
    assert found["all rows"] == pytest.approx(1 / (1 - 2e-3 * 61 / 2))
    assert found["scatter"] == pytest.approx(rows.var(axis=0).mean())
    assert found["minibatches"] > found["all rows"] and found["within"] < found["scatter"]


def test_the_rows_of_one_machine_are_those_of_the_record():
    path = ROOT / "docs/results/runs/fsgld/gaussian.json"
    record = json.loads(path.read_text())
    config = gaussian.Config(**record["config"])
    shards = gaussian.simulate_shards(config)
    between = shards.mean(axis=1).var(axis=0).mean()
    assert between == pytest.approx(record["metrics"]["shard_means_variance"], rel=1e-5)
    text = gaussian.about(record["config"], record["metrics"])
    assert "has 149 times the posterior's variance, FSGLD 11.5 times" in text


def test_spreads_of_pairs_are_compared_as_pitman_and_morgan_do():
    rng = np.random.default_rng(1)
    one = rng.standard_normal(10)
    other = 2 * one + rng.standard_normal(10)
    found = spreads.compare([*one, None], [*other, 1.0])
    assert found.ratio == pytest.approx(one.std() / other.std())
    # Variances are equal if sums and differences are uncorrelated.
    assert found.p_value == pytest.approx(stats.pearsonr(one + other, one - other)[1])
    for bound in (found.low, found.high):
        assert spreads.compare(one, bound * other).p_value == pytest.approx(0.05)
    assert str(spreads.compare([1.0, 2.0], [1.0, 3.0])) == "too few repetitions"


def test_report_lists_what_was_not_run(modules, tmp_path):
    report.main(["--results", str(tmp_path / "none"), "--docs", str(tmp_path / "results")])
    page = (tmp_path / "results" / "fsgld.md").read_text()
    for name in run.available("fsgld"):
        assert f"`{name}`" in page
    assert "Command: `python -m experiments.run experiment=fsgld/gaussian` and so on." in page
    verdicts = [
        line.split("|")[3].strip() for line in page.splitlines() if line.startswith("| Fig")
    ]
    assert len(verdicts) > 5 and set(verdicts) == {"not run"}


@pytest.mark.slow
def test_report_shows_what_was_run_and_can_do_so_again_from_its_records(results, tmp_path):
    report.main(["--results", str(results), "--docs", str(tmp_path / "results")])
    page = (tmp_path / "results" / "fsgld.md").read_text()
    assert "python -m tiny" in page
    assert "`num_clients` 3 (10)" in page and "`num_chains` 16 (" in page
    assert "Not run: `fsgld/gaussian_small`." in page
    assert "| DSGLD | 20 |" in page
    for name in ("draws", "mse", "constants", "gradients"):
        assert page.count(f"figures/fsgld-gaussian-{name}.png)\n") == 1
        figure = tmp_path / "results" / "figures" / f"fsgld-gaussian-{name}.png"
        assert figure.stat().st_size < report.MAX_BYTES
    (line,) = [x for x in page.splitlines() if x.startswith("| Figure 4 |")]
    assert "**reproduced**" in line and "[figure](figures/fsgld-gaussian-constants.png)" in line
    report.main(["--results", str(tmp_path / "none"), "--docs", str(tmp_path / "results")])
    assert (tmp_path / "results" / "fsgld.md").read_text() == page


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("fa_hmc/logistic_low_small", "fa_hmc/logistic_low"),
        ("fsgld/mlp_small_paper_step", "fsgld/mlp"),
        ("fed_ep/cifar10_small", "fed_ep/cifar"),
        ("fsgld/metric_taylor", "fsgld/metric"),
        ("qlsd/digits", "qlsd/digits"),
    ],
)
def test_a_small_run_is_held_against_its_full_settings(modules, name, full):
    assert report.full_name(name) == full


def test_what_differs_from_the_full_settings_is_read_off_the_two(modules):
    config = json.loads(json.dumps(schemas.split(compose("experiment=fsgld/mlp_small"))[0]))
    text = report.differences({"experiment": "fsgld/mlp_small", "config": config})
    assert text.startswith("Settings that differ from `fsgld/mlp`, whose values are in brackets: ")
    assert "`table` covtype (susy)" in text and "`rows_per_shard` 2000 (90000)" in text
    assert "batch_size" not in text  # the same in both
    config = json.loads(json.dumps(schemas.split(compose("experiment=fsgld/mlp"))[0]))
    assert report.differences({"experiment": "fsgld/mlp", "config": config}) == "The full settings."


@pytest.mark.parametrize(
    ("name", "lost", "said", "not_said"),
    [
        ("mlp", 0, ("Data: SUSY.", "No repetition diverged."), ("covertype", "cannot be")),
        (
            "mlp_small",
            0,
            (
                "covertype",
                "`rows_per_shard` 2000 (90000)",
                "`num_rounds` 1000 (5000)",
                "1e-4 there",
            ),
            ("Diverged",),
        ),
        (
            "mlp_small_paper_step",
            10,
            ("covertype", "FSGLD on non-IID shards in 10 of 10", "they are not reproduced"),
            ("DSGLD on",),
        ),
    ],
)
def test_every_run_of_the_network_says_its_data(modules, name, lost, said, not_said):
    table = [
        {"split": split, "method": method, "diverged": lost if method == "FSGLD" else 0}
        for split in ("iid", "non_iid")
        for method in ("DSGLD", "FSGLD")
    ]
    config = json.loads(json.dumps(schemas.split(compose(f"experiment=fsgld/{name}"))[0]))
    text = report.differences({"experiment": f"fsgld/{name}", "config": config})
    text += modules["fsgld/mlp"].about(config, {"table": table})
    assert all(words in text for words in said)
    assert not any(words in text for words in not_said)


def test_a_single_repetition_has_no_spread_and_is_said():
    draws = {"gamma": np.array([[[0.0]], [[np.nan]]]), "mu": np.zeros((2, 1))}
    scores = {"learn": np.array([[-0.3], [-0.4]]), "test": np.array([[-0.5], [-0.6]])}
    made = metric_scores.summarise({"FSGLD": draws}, {"FSGLD": scores}, {"FSGLD": 0})
    (row,) = made["table"]
    assert row["learn"] == "-0.3000" and row["test"] == "-0.5000" and row["diverged"] == 1
    text = metric_scores.about({"num_repetitions": 2}, made)
    assert "diverged in 1 of 2" in text and "remaining 1" in text
    assert metric_scores.about({"num_repetitions": 2}, {"table": [row | {"diverged": 0}]}) == ""


def metric_run(lost=0, num=3):
    """Return what a run of metric learning keeps, of which FSGLD lost the first repetitions."""
    rng = np.random.default_rng(0)
    keys = ("learn", "test", "learn_predictive", "test_predictive")
    of = {
        name: {k: level + 0.01 * rng.standard_normal(num) for k in keys}
        for name, level in (("DSGLD", -0.4), ("FSGLD", -0.35), ("NUTS", -0.3))
    }
    for values in of.values():
        values["learn_accuracy"] = values["test_accuracy"] = np.full(num, 0.8)
    for name in ("DSGLD", "FSGLD"):
        of[name]["mean_off_sds"] = of[name]["sd_ratio_max"] = np.ones(num)
    for key in keys:
        of["FSGLD"][key][:lost] = np.nan
    of["FSGLD"]["learn_accuracy"][:lost] = 0.0  # of a comparison with what is not finite
    at = np.arange(4)
    curve = {"mean": np.full(4, -0.4), "spread": np.full(4, 0.02)}
    one = {"DSGLD": curve, "FSGLD": curve if lost < num else None, "difference": curve, "at": at}
    one["difference"] = one["FSGLD"]
    curves = dict.fromkeys(keys, one)
    table = [{"method": name, "diverged": lost if name == "FSGLD" else 0} for name in of]
    return {"methods": of, "curves": curves, "table": table, "burnin": 1, "samples_a_draw": 10}


def test_standard_deviations_of_metric_learning_have_one_divisor():
    metrics = metric_run(lost=1)
    dsgld, conducive = metric_scores.shown(metrics)[:2]
    deviation = metrics["methods"]["DSGLD"]["learn"].std(ddof=1)
    assert dsgld["learn"].endswith(f"+- {deviation:.4f}") and dsgld["diverged"] == 0
    assert conducive["diverged"] == 1
    deviation = metrics["methods"]["FSGLD"]["learn"][1:].std(ddof=1)
    assert conducive["learn"].endswith(f"+- {deviation:.4f}")
    draws = {"gamma": np.zeros((3, 2, 1)), "mu": np.zeros((3, 2))}
    scores = {"learn": np.arange(6.0).reshape(3, 2), "test": np.zeros((3, 2))}
    made = metric_scores.summarise({"FSGLD": draws}, {"FSGLD": scores}, {"FSGLD": 0})
    assert made["table"][0]["learn"] == "2.5000 +- 2.0000"


def test_methods_are_compared_where_neither_was_lost(tmp_path):
    whole, short = metric_run(), metric_run(lost=1)
    assert set(metric_scores.bars(whole)) == {"learn", "test"} and not metric_scores.bars(short)
    assert "error bars of Figure 5" in metric_scores.commentary(whole)
    text = metric_scores.commentary(short)
    assert "In the 2 repetitions that neither method lost FSGLD's samples are better" in text
    assert "error bars of Figure 5" not in text and "nan" not in text
    assert "the accuracies by 0.0000 (s.e. 0.0000)" in text
    assert "finite in 1 of the repetitions" in metric_scores.commentary(metric_run(lost=2))
    for lost, said in (
        (2, "of one repetition, and has no standard error"),
        (3, "and no difference"),
    ):
        (figure,) = metric_scores.draw(metric_run(lost), tmp_path)
        assert said in figure["caption"]


def network_run(conducive, pooled=-0.7):
    """Return what a run of networks keeps; `conducive` are the splits that FSGLD was lost on."""
    curves, values, table = {}, {}, []
    for split in ("iid", "non_iid"):
        curves[split] = {}
        for method, level in (("DSGLD", -0.7), ("FSGLD", -0.7), ("pooled SGLD", pooled)):
            lost = method == "FSGLD" and split in conducive
            of = {"at": [0, 1], "quantiles": np.full((3, 2), level)}
            curves[split][method] = {} if lost else {"test": of, "visited": of}
            each = level + np.array([0.0, 0.01, 0.02])
            values[f"{split} {method}"] = {"test": each, "train": each}
            table.append({"split": split, "method": method, "test": "old", "diverged": 3 * lost})
    metrics = {"curves": curves, "values": values, "table": table, "data": "Covertype"}
    return metrics | {"steps_a_draw": 10}


def test_standard_deviations_of_networks_have_one_divisor():
    row = mlp_scores.shown(network_run(()))[0]
    assert row["test"] == row["train"] == "-0.690 +- 0.010"  # 0.008 with the other divisor


@pytest.mark.parametrize(
    ("lost", "pooled", "said", "not_said"),
    [
        ((), -0.7, ("Dashes show", "of 3 repetitions by interpolation"), ("diverged", "ran off")),
        (("non_iid",), -0.7, ("FSGLD diverged on non-IID shards", "Dashes"), ("ran off",)),
        (
            ("iid", "non_iid"),
            -1e15,
            ("FSGLD diverged on IID and non-IID", "pooled SGLD ran off to finite values on IID"),
            ("Dashes",),
        ),
    ],
)
def test_captions_of_networks_say_who_is_missing_where(lost, pooled, said, not_said, tmp_path):
    (figure,) = mlp_scores.draw(network_run(lost, pooled), tmp_path)
    assert all(words in figure["caption"] for words in said)
    assert not any(words in figure["caption"] for words in not_said)


def test_insets_lie_where_no_rows_are(tmp_path):
    shards = np.random.default_rng(0).uniform(-9, 9, (2, 500, 2))
    shards = shards[:, (shards < 2).any(axis=-1).all(axis=0)]  # none above on the right
    with gaussian_figures.figure(tmp_path / "inset.png") as (fig, axes):
        axes[0, 0].set(xlim=(-10, 10), ylim=(-10, 10))
        inset = gaussian_figures._inset(axes[0, 0], shards, np.zeros(2), 1.0)
        fig.canvas.draw()
        left, bottom = axes[0, 0].transAxes.inverted().transform(inset.get_window_extent().min)
    assert left > 0.5 and bottom > 0.5


def test_a_difference_within_repetitions_has_its_own_standard_error():
    assert metric_scores._paired(np.array([0.1, 0.3, np.nan])) == "0.200 (s.e. 0.100)"


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
