"""FSGLD studies: exact distributions, statistics, tidy rows and verdicts."""

import dataclasses

import numpy as np
import pytest
from experiments.fsgld import (
    gaussian_law,
    metric_scores,
    mlp_scores,
    rows,
    spreads,
)
from scipy import stats

from experiments import tidy
from experiments.claims import Number, claims_of, evaluate, judge, value
from experiments.special import fsgld_alpha, fsgld_cost, fsgld_gaussian
from experiments.study import JobRows

CLAIMS = {claim.id: claim for claim in claims_of("fsgld")}
LOADED = {
    "_target_": "experiments.loaders.gaussian_shards",
    **dict(num_clients=3, rows_per_client=20, spread=6.0, seed=0),
}


def write(root, study, schema, config, metrics):
    """Write the record of a study."""
    tidy.write(study, rows.rows_of(schema, config, metrics), {"config": config}, root)


@pytest.mark.parametrize("name", CLAIMS)
def test_verdicts_are_those_the_page_is_written_for(name):
    assert judge(CLAIMS[name]) == CLAIMS[name].expect


def test_exact_law_of_averages_matches_a_simulated_relay():
    rng = np.random.default_rng(0)
    shards = rng.uniform(-2, 2, (3, 1, 2)) + rng.standard_normal((3, 20, 2))
    settings = dict(step_size=2e-3, batch_size=5, num_local_steps=4, alpha=0.0)
    law = gaussian_law.relay_law(shards, **settings)
    root = np.linalg.cholesky(law.noise)
    num, times = 100_000, (2, 4)
    theta, draws = np.zeros((num, 2)), []
    for round_ in range(25):
        s = rng.integers(0, 3, num)
        states = []
        for _ in range(4):
            noise = np.einsum("cij,cj->ci", root[s], rng.standard_normal((num, 2)))
            theta = law.factor[s][:, None] * theta + law.shift[s] + noise
            states.append(theta)
        if round_ in (20, 22, 24):
            draws.append(np.mean([states[t - 1] for t in times], axis=0))
    mean, covariance = law.average(times, 2, 3)
    for length in (1, 3):
        average = np.mean(draws[:length], axis=0)
        deviation = np.sqrt(np.diag(covariance[length - 1]))
        z = (average.mean(axis=0) - mean) / deviation * np.sqrt(num)
        assert np.abs(z).max() < 5
        ratio = average.var(axis=0) / deviation**2 - 1
        assert np.abs(ratio).max() < 5 * np.sqrt(2 / num)


def test_sgld_on_one_machine_has_its_law():
    """A simulation draws rows with replacement."""
    names = ("seed", "spread", "num_clients", "rows_per_client", "step_size", "batch_size")
    config = dict(zip(names, (3, 2.0, 3, 20, 2e-3, 5), strict=True))
    pooled = gaussian_law.one_machine(config)
    data = gaussian_law.simulate_shards(*(config[name] for name in names[:4])).reshape(60, 2)
    rng = np.random.default_rng(0)
    theta = np.zeros((20_000, 2))
    for _ in range(60):
        minibatch = data[rng.integers(0, 60, (len(theta), 5))].mean(axis=1)
        noise = rng.standard_normal(theta.shape) * np.sqrt(2 * 2e-3)
        theta = theta + 2e-3 * (60 * (minibatch - theta) - theta) + noise
    assert 61 * theta.var(axis=0).mean() == pytest.approx(pooled["minibatches"], rel=0.04)
    assert pooled["all rows"] == pytest.approx(1 / (1 - 2e-3 * 61 / 2))
    assert pooled["scatter"] == pytest.approx(data.var(axis=0).mean())
    assert pooled["minibatches"] > pooled["all rows"] and pooled["within"] < pooled["scatter"]


def test_constants_of_average_rows_follow_the_theorems():
    shards = gaussian_law.simulate_shards(seed=0, spread=6.0, num_clients=3, rows_per_client=20)
    settings = {k: v for k, v in LOADED.items() if k != "_target_"}
    settings |= dict(step_size=2e-3, batch_size=5, num_local_steps=[10, 100])
    mean = shards.mean(axis=(0, 1))
    gradients = ((shards - mean) ** 2).sum(axis=-1).mean(axis=1)
    remainders = ((shards - shards.mean(axis=1)[:, None]) ** 2).sum(axis=-1).mean(axis=1)
    assert gaussian_law.constants_of_means(settings) == pytest.approx(gradients / remainders)
    wide, fine = (gaussian_law.fsgld_width(settings, step=step) for step in (1.0, 0.1))
    assert 1 < fine < wide and gaussian_law.fsgld_width(settings, batch_size=500) < wide


def test_record_has_the_shards_of_its_settings():
    config = tidy.read_record("fsgld/gaussian")["config"]
    names = ("seed", "spread", "num_clients", "rows_per_client")
    shards = gaussian_law.simulate_shards(**{name: config[f"data.{name}"] for name in names})
    between = shards.mean(axis=1).var(axis=0).mean()
    recorded = evaluate('value("shard_means_variance")', "fsgld/gaussian")
    assert between == pytest.approx(recorded.value, rel=1e-5)


@pytest.mark.parametrize(
    ("bias", "plateau", "unbiased"),
    [(1e-15, "contradicted", "partly"), (0.5, "reproduced", "contradicted")],
)
def test_speed_and_plateau_are_judged_apart(bias, plateau, unbiased, tmp_path):
    config = {
        "data": LOADED,
        "model": {"_target_": "experiments.models.gaussian", "prior_precision": 1.0},
        "collect": None,
        **dict(num_rounds=400, num_burnin=0, thinning=1, num_chains=2),
    }
    measured = {"variance": Number(1.0, 1.0), "mse_of_average": Number(1.0)}
    jobs = [
        JobRows(
            config | {"kernel": {"num_local_steps": num, "step_size": 2e-3, "batch_size": 5}},
            tidy.from_numbers(method, {"num_local_steps": num}, measured),
        )
        for method in ("DSGLD", "FSGLD")
        for num in (10, 100)
    ]
    changed = {"exact_bias": bias, "bias_share_of_mse": bias}
    found = [
        dataclasses.replace(row, value=changed.get(row.metric, row.value))
        for row in fsgld_gaussian.rows(jobs, grid_points=5)
    ]
    tidy.write("fsgld/gaussian", found, {"config": {}}, tmp_path)
    words = [judge(CLAIMS[name], tmp_path) for name in ("as_fast", "plateau", "unbiased")]
    assert words == ["reproduced", plateau, unbiased]
    assert judge(CLAIMS["coin_gradients"], tmp_path) == "reproduced"
    assert judge(CLAIMS["constants"], tmp_path) == "reproduced"


def test_multiples_of_the_conducive_gradient_have_their_law():
    found = alpha_rows(alphas=(0.0, 0.5, 1.0), errors=(0.0, 1.0))
    for multiple in (0, 0.5, 1):
        where = dict(surrogate_error=1, alpha=multiple)
        measured = value(found, "variance_ratio_measured", **where)
        exact = value(found, "variance_ratio_of_first_draw", **where)
        assert abs(measured.value - exact.value) < 5 * measured.error
    # Correct surrogates leave only the noise of minibatches, none the scatter of the shards.
    none, _, whole = (
        [value(found, "variance_ratio", surrogate_error=e, alpha=a).value for e in (0, 1)]
        for a in (0, 0.5, 1)
    )
    assert none[0] == pytest.approx(none[1]) and none[0] > 100 * whole[0]
    # The best multiple is 1 / (1 + e^2) on average; with one draw of the errors it is not.
    best = value(found, "best_alpha", surrogate_error=1)
    assert value(found, "best_alpha", surrogate_error=0).value == pytest.approx(1)
    assert value(found, "best_alpha_in_theory", surrogate_error=1).value == 0.5
    assert abs(best.value - 0.5) < 3 * best.error < 0.1
    assert value(found, "lowest_best_alpha_of_a_draw", surrogate_error=1).value < 0.4
    assert value(found, "highest_best_alpha_of_a_draw", surrogate_error=1).value > 0.6


def test_a_multiple_moves_the_ends_of_visits():
    settings = dict(alphas=(0.0, 0.5, 1.0, 1.5), errors=(0.0,), num_clients=3, step_size=2e-4)
    settings |= dict(num_draws_of_errors=2, num_rounds=10, num_chains=2)
    ends = [r for r in alpha_rows(**settings) if r.metric == "visit_end"]
    assert all(row.value == pytest.approx(1 - row.settings["alpha"], abs=5e-3) for row in ends)
    # Visits of one step end where they began, whatever the multiple.
    short = alpha_rows(num_local_steps=1, **settings)
    assert max(row.value for row in short if row.metric == "visit_end") < 0.15


def alpha_rows(num_clients=10, step_size=5e-5, num_local_steps=100, **kwargs):
    data = dict(num_clients=num_clients, rows_per_client=200, spread=6.0, seed=0)
    kernel = dict(step_size=step_size, batch_size=10, num_local_steps=num_local_steps)
    sizes = dict(num_draws_of_errors=40, num_rounds=300, num_chains=30, seed=0)
    return fsgld_alpha.rows(data=data, kernel=kernel, **{**sizes, **kwargs})


def test_a_conducive_gradient_costs_one_more_gaussian_with_any_number_of_clients(tmp_path):
    sizes = dict(dims=(3, 5), num_clients=(2, 4), rows_per_client=4, batch_sizes=(2, 40), seed=0)
    found = fsgld_cost.rows(**sizes)
    tidy.write("fsgld/cost", found, {"config": sizes}, tmp_path)

    def number(metric, **where):
        return next(r.value for r in found if r.metric == metric and r.matches(where))

    for where in [row.settings for row in found if row.metric == "visit_operations"]:
        dim = where["dim"]
        # The precision times the position, the difference to its mean, the sum with the estimate.
        expected = {"diagonal": 3 * dim, "dense": 2 * dim * (dim + 1)}[where["surrogates"]]
        assert number("conducive_gradient_operations", **where) == expected
        assert number("visit_operations", **where) > expected
        assert number("prior_operations", **where) == 3 * dim
        few, many = (number("minibatch_operations", batch_size=n, **where) for n in (2, 40))
        assert 0 < 10 * few < many
    assert judge(CLAIMS["cost"], tmp_path) == "partly"
    largest = evaluate('largest("cost_over_prior", surrogates="dense")', "fsgld/cost", tmp_path)
    assert largest.value == 4


def test_spreads_of_pairs_are_compared_as_pitman_and_morgan_do():
    rng = np.random.default_rng(1)
    x = rng.standard_normal(10)
    y = 2 * x + rng.standard_normal(10)
    ratio = spreads.compare([*x, None], [*y, 1.0])
    assert ratio.ratio == pytest.approx(x.std() / y.std())
    # Variances are equal if sums and differences are uncorrelated.
    assert ratio.p_value == pytest.approx(stats.pearsonr(x + y, x - y)[1])
    for bound in (ratio.low, ratio.high):
        assert spreads.compare(x, bound * y).p_value == pytest.approx(0.05)
    assert spreads.compare([1.0, 2.0], [1.0, 3.0]).high == np.inf


def test_summaries_leave_out_repetitions_that_diverged():
    draws = {"gamma": np.array([[[0.0]], [[np.nan]]]), "mu": np.zeros((2, 1))}
    scores = {"learn": np.array([[-0.3], [-0.4]]), "test": np.array([[-0.5], [-0.6]])}
    summary = metric_scores.summarise({"FSGLD": draws}, {"FSGLD": scores}, {"FSGLD": 0})
    (row,) = summary["table"]
    assert row["learn"] == "-0.3000" and row["test"] == "-0.5000" and row["diverged"] == 1
    draws = {"gamma": np.zeros((3, 2, 1)), "mu": np.zeros((3, 2))}
    scores = {"learn": np.arange(6.0).reshape(3, 2), "test": np.zeros((3, 2))}
    summary = metric_scores.summarise({"FSGLD": draws}, {"FSGLD": scores}, {"FSGLD": 0})
    assert summary["table"][0]["learn"] == "2.5000 +- 2.0000"


METRIC = {"keep_every": 10, "num_burnin": 10}


def metric_run(num_lost=0, num=3):
    """Return the metrics of a run in which FSGLD lost the first repetitions."""
    rng = np.random.default_rng(0)
    keys = ("learn", "test", "learn_predictive", "test_predictive")
    methods = {
        name: {k: level + 0.01 * rng.standard_normal(num) for k in keys}
        for name, level in (("DSGLD", -0.4), ("FSGLD", -0.35), ("NUTS", -0.3))
    }
    for values in methods.values():
        values["learn_accuracy"] = values["test_accuracy"] = np.full(num, 0.8)
    for name in ("DSGLD", "FSGLD"):
        methods[name]["mean_off_sds"] = methods[name]["sd_ratio_max"] = np.ones(num)
    for key in keys:
        methods["FSGLD"][key][:num_lost] = np.nan
    methods["FSGLD"]["learn_accuracy"][:num_lost] = 0.0  # from a comparison with NaN
    curve = {"mean": np.full(4, -0.4), "spread": np.full(4, 0.02)}
    conducive = curve if num_lost < num else None
    panel = {"DSGLD": curve, "FSGLD": conducive, "difference": conducive, "at": np.arange(4)}
    curves = dict.fromkeys(keys, panel)
    return {"methods": methods, "curves": curves, "burnin": 1, "samples_a_draw": 10}


def test_methods_are_compared_where_neither_was_lost(tmp_path):
    complete, short = metric_run(), metric_run(num_lost=1)
    assert set(metric_scores.bars(complete)) == {"learn", "test"} and not metric_scores.bars(short)
    write(tmp_path, "fsgld/metric", "fsgld/metric", METRIC, short)

    def value(text):
        return evaluate(text, "fsgld/metric", tmp_path)

    gain = value('value("mean_learning_log_likelihood", method="FSGLD minus DSGLD")')
    scores = short["methods"]
    differences = (scores["FSGLD"]["learn"] - scores["DSGLD"]["learn"])[1:]
    assert gain.value == pytest.approx(differences.mean(), rel=1e-4)
    assert gain.error == pytest.approx(differences.std(ddof=1) / 2**0.5, rel=1e-4)
    assert value('value("diverged", method="FSGLD")').value == 1
    assert value('value("mean_learning_accuracy", method="FSGLD")').value == 0.8
    assert judge(CLAIMS["metric_better"], tmp_path) == "reproduced"
    for num_lost in (2, 3):
        (figure,) = metric_scores.draw(metric_run(num_lost), tmp_path)
        assert (tmp_path / figure["file"]).is_file()
        assert rows.rows_of("fsgld/metric", METRIC, metric_run(num_lost))


REPETITIONS = np.random.default_rng(3).standard_normal((2, 10))


@pytest.mark.parametrize(
    ("learn", "test", "bars", "word"),
    [
        (0.3, 0.3, 0.5, "reproduced"),
        (1.0, 0.3, 0.5, "partly"),
        (1.0, 1.0, 0.5, "partly"),  # smaller bars alone, without a test
        (1.0, 0.3, 2.0, "partly"),
        (1.0, 1.0, 2.0, "inconclusive"),  # the settings are not the paper's
    ],
)
def test_spreads_over_repetitions_are_judged_by_bars_and_a_test(learn, test, bars, word, tmp_path):
    scores, noise = REPETITIONS
    metrics = metric_run(num=10)
    for key, factor in (("learn", learn), ("test", test)):
        metrics["methods"]["DSGLD"][key] = scores - 2
        metrics["methods"]["FSGLD"][key] = factor * (scores + 0.2 * noise) - 1
        metrics["methods"]["NUTS"][key] = 1e-3 * noise[::-1]
        curve = {"mean": np.zeros(3), "spread": np.ones(3)}
        conducive = {"mean": np.zeros(3), "spread": np.array([9.0, bars, bars])}
        panel = {"DSGLD": curve, "FSGLD": conducive, "difference": curve, "at": np.arange(3)}
        metrics["curves"][key] = panel
    write(tmp_path, "fsgld/metric", "fsgld/metric", METRIC, metrics)
    assert judge(CLAIMS["metric_spread"], tmp_path) == word


@pytest.mark.parametrize(
    ("gains", "level", "word"),
    [
        ((0.07, 0.07), 0.3, "reproduced"),  # ahead, and earlier at DSGLD's level
        ((0.002, 0.002), 0.001, "inconclusive"),  # ahead, but not earlier at that level
        ((-0.05, -0.05), 0.0, "inconclusive"),
    ],
)
def test_a_faster_start_is_judged_by_the_level_of_dsgld(gains, level, word, tmp_path):
    steps = np.arange(20)
    slow = -0.7 + 0.3 * np.minimum(steps / 5, 1) - 1e-3 * (steps > 5)
    gap = np.where(steps < 3, gains[0], gains[1])
    spread = np.full(20, 1e-3 / 2)
    curve = {
        "at": steps,
        "DSGLD": {"mean": slow, "spread": spread},
        "FSGLD": {"mean": slow + gap + (steps > 5) * level, "spread": spread},
        "difference": {"mean": gap, "spread": spread},
    }
    metrics = metric_run() | {"curves": {"learn": curve, "test": curve}, "burnin": 0}
    config = {"keep_every": 1, "num_burnin": 0}
    write(tmp_path, "fsgld/metric_start", "fsgld/metric", config, metrics)
    assert judge(CLAIMS["metric_faster"], tmp_path) == word


def network_run(lost=(), pooled=-0.7, **scores):
    """Return the metrics of a run in which FSGLD was lost on some kinds of shards."""
    curves, values, table = {}, {}, []
    for split in ("iid", "non_iid"):
        curves[split] = {}
        for method, level in (("DSGLD", -0.7), ("FSGLD", -0.7), ("pooled SGLD", pooled)):
            is_lost = method == "FSGLD" and split in lost
            curve = {"at": list(range(8)), "quantiles": np.full((3, 8), level)}
            curves[split][method] = {} if is_lost else {"test": curve, "visited": curve}
            test = level + np.array([0.0, 0.01, 0.02])
            if method == "FSGLD":
                test = scores.get(split, test + np.array([0.001, 0.0, -0.002]))
            test = np.full(len(test), np.nan) if is_lost else np.array(test)
            names = ("train", "test", "visited", "accuracy", "constant")
            values[f"{split} {method}"] = dict.fromkeys(names, test)
            table.append({"split": split, "method": method, "diverged": len(test) * is_lost})
    metrics = {"curves": curves, "values": values, "table": table, "num_rows": 100}
    return metrics | {"steps_a_draw": 10, "step_size_times_rows": 1.0, "data": "Covertype"}


@pytest.mark.parametrize(
    ("gain", "non_iid", "iid"),
    [
        (0.1, "reproduced", "contradicted"),
        (0.02, "partly", "reproduced"),
        (-0.01, "contradicted", "reproduced"),
    ],
)
def test_networks_are_judged_within_repetitions(gain, non_iid, iid, tmp_path):
    test = -0.7 + gain + np.array([0.001, 0.01, 0.018])
    metrics = network_run(iid=test, non_iid=test)
    capped = {"reproduced": "partly", "contradicted": "inconclusive", "partly": "partly"}
    write(tmp_path, "fsgld/mlp", "fsgld/mlp", {"num_repetitions": 3}, metrics)
    assert judge(CLAIMS["network_non_iid"], tmp_path) == capped[non_iid]
    assert judge(CLAIMS["network_iid"], tmp_path) == capped[iid]


@pytest.mark.parametrize(
    ("lost", "pooled"), [((), -0.7), (("non_iid",), -0.7), (("iid", "non_iid"), -1e15)]
)
def test_chains_that_were_lost_are_left_out(lost, pooled, tmp_path):
    metrics = network_run(lost, pooled)
    (figure,) = mlp_scores.draw(metrics, tmp_path)
    assert (tmp_path / figure["file"]).is_file()
    write(tmp_path, "fsgld/mlp", "fsgld/mlp", {"num_repetitions": 3}, metrics)
    for split in ("iid", "non_iid"):
        text = f'value("diverged", method="FSGLD", split="{split}")'
        assert evaluate(text, "fsgld/mlp", tmp_path).value == 3 * (split in lost)
    if len(lost) == 2:
        assert judge(CLAIMS["paper_step"], tmp_path) == "inconclusive"
