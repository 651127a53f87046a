"""Predictive checks against sums of pooled rows, with the clients' own random numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import stats

import fedmcmc
from fedmcmc import criticism
from fedmcmc.criticism import _rows
from fedmcmc.criticism._histogram import merge_cells, merge_targets
from fedmcmc.criticism._predictive import Replicates, Replication
from tests.criticism.federation import (
    LOGISTIC,
    MODELS,
    NORMAL,
    SIZES,
    clients,
    draws_near,
    federation,
    messages,
    numbers,
)

KEY = jax.random.key(7)
EDGES = (0.0, 1.0, 2.0, 3.0, 4.0)
HISTOGRAM = criticism.Histogram(lambda rows: rows["y"], EDGES)
same = np.testing.assert_array_equal


def statistic(rows):
    return jnp.stack([rows["y"], rows["y"] ** 2, rows["y"] * rows["x"][:, 1]], 1)


def words_of(key):
    return jax.random.bits(jax.random.fold_in(key, 1), (2,), jnp.uint32)


def outcomes(posterior, rows, index, draws):
    """Return a client's replicated rows, leaves ``[num_draws, num_rows, ...]``."""
    size = len(rows["y"])
    places = np.where(np.arange(max(SIZES)) < size, np.arange(max(SIZES)), 0)
    padded = jax.tree.map(lambda leaf: leaf[places], rows)
    client_key = jax.random.fold_in(
        jax.random.wrap_key_data(words_of(KEY), impl="threefry2x32"), index
    )
    block = jax.random.fold_in(client_key, 0)
    num = len(jax.tree.leaves(draws)[0])
    keys = jax.vmap(lambda s: jax.random.fold_in(block, s))(jnp.arange(num))
    drawn = jax.vmap(lambda key, theta: posterior.resample_fn(key, theta, padded))(keys, draws)
    return jax.tree.map(lambda leaf: leaf[:, :size], drawn)


@pytest.mark.parametrize("name", MODELS)
def test_sums_equal_those_of_pooled_rows(name):
    data, draws = federation(name), draws_near(name, 300)
    result = criticism.predictive_check(
        KEY,
        MODELS[name],
        data,
        draws,
        {"moments": statistic, "y": lambda rows: rows["y"]},
        minimum_rows=1,
    )
    observed, replicated = 0, 0
    for index, rows in enumerate(clients(name)):
        observed = observed + np.asarray(statistic(rows), float).sum(0)
        drawn = outcomes(MODELS[name], rows, index, draws)
        replicated = replicated + np.asarray(jax.vmap(statistic)(drawn), float).sum(1)
    assert result.names == ("moments[0]", "moments[1]", "moments[2]", "y")
    np.testing.assert_allclose(result.observed[:3], observed, rtol=1e-5)
    np.testing.assert_allclose(result.replicated[:, :3], replicated, rtol=1e-4, atol=1e-3)
    expected = (replicated > observed + 1e-3).mean(0)
    expected += 0.5 * (np.abs(replicated - observed) <= 1e-3).mean(0)
    np.testing.assert_allclose(result.p_values[:3], expected, atol=1e-9)
    assert result.p_values[3] == result.p_values[0]
    if name == "logistic":  # counts: ties are by half
        assert (result.replicated[:, 0] == result.observed[0]).any()
    assert result.num_rows == sum(SIZES) and result.totals["rounds"] == 1


def test_replicated_sums_have_their_exact_distribution():
    data = federation("normal")
    draws = {"mean": np.full(1000, 2.0), "log_sd": np.full(1000, np.log(1.5))}
    result = criticism.predictive_check(
        KEY, NORMAL, data, draws, lambda rows: rows["y"], minimum_rows=1
    )
    law = stats.norm(2.0 * 74, 1.5 * np.sqrt(74))
    assert stats.kstest(result.replicated[:, 0], law.cdf).pvalue > 1e-3
    exact = law.sf(result.observed[0])
    assert abs(result.p_values[0] - exact) < 4 * np.sqrt(exact * (1 - exact) / 1000)
    low, high = result.interval(0.5)
    np.testing.assert_allclose([low[0], high[0]], law.ppf([0.25, 0.75]), atol=2.0)


def test_large_sums_lose_no_digit():
    # Float32 holds these sums to 64 units; what replicated ones differ by is a few.
    shifted = NORMAL._replace(
        resample_fn=lambda key, theta, rows: {
            **rows,
            "y": rows["y"] + jnp.round(jax.random.normal(key, rows["y"].shape)),
        }
    )
    rows = [{"y": x["y"] + np.float32(2**20), "x": x["x"]} for x in clients("normal")]
    for x in rows:
        x["y"] = np.round(x["y"])
    data = fedmcmc.FederatedData.from_clients(rows)
    draws = draws_near("normal", 200)
    result = criticism.predictive_check(
        KEY, shifted, data, draws, lambda rows: rows["y"] * 1024, minimum_rows=1
    )
    gaps = (result.replicated - result.observed)[:, 0] / 1024
    assert np.abs(gaps - np.round(gaps)).max() < 1e-3
    assert 5 < gaps.std() < 14


def test_blocks_of_rows_are_complete(monkeypatch):
    monkeypatch.setattr(_rows, "BUDGET", 5 * 3)  # five rows of three numbers
    data, draws = federation("normal"), draws_near("normal", 200)
    again = NORMAL._replace(loglikelihood_fn=lambda theta, rows: NORMAL[1](theta, rows))
    result = criticism.predictive_check(KEY, again, data, draws, statistic, minimum_rows=1)
    rows = data.rows
    np.testing.assert_allclose(result.observed, np.asarray(statistic(rows)).sum(0), rtol=1e-5)
    mean = np.asarray(draws["mean"]).mean() * 74
    assert abs(result.replicated[:, 0].mean() - mean) < 5 * np.std(result.replicated[:, 0]) / 14
    assert 0.5 < result.replicated[:, 0].std() / np.hypot(1.5 * np.sqrt(74), 0.17 * 74) < 1.5
    # Each block and each client draws its own numbers.
    assert np.corrcoef(result.replicated[:, 0], result.replicated[:, 2])[0, 1] < 0.9


def test_means_and_sds_are_functions_of_sums():
    data, draws = federation("normal"), draws_near("normal")
    result = criticism.predictive_check(KEY, NORMAL, data, draws, statistic)
    num = result.num_rows
    sd = result.of(lambda sums: np.sqrt(sums[1] / num - (sums[0] / num) ** 2), "sd")
    y = np.concatenate([x["y"] for x in clients("normal")[:3]])
    assert sd.names == ("sd",) and sd.observed[0] == pytest.approx(y.std(), rel=1e-5)
    assert 0 < sd.p_values[0] < 1
    assert "sd" in repr(sd) and "3 rows are not judged: their" in repr(sd)
    assert sd.to_dict()["sd"]["p_value"] == sd.p_values[0]
    with pytest.raises(ValueError, match="one number"):
        result.of(lambda sums: sums, "all")
    with pytest.raises(ValueError, match="share"):
        result.interval(1.0)
    # Only a model that is too narrow has a small p-value.
    narrow = {**draws, "log_sd": draws["log_sd"] - 0.7}
    assert 0.05 < result.p_values[1] < 0.95
    assert criticism.predictive_check(KEY, NORMAL, data, narrow, statistic).p_values[1] < 0.01


def merge_greedily(counts, minimum):
    """Return the cell that receives the counts of each cell, by a loop over cells."""
    receiver, group, total, last = [None] * len(counts), [], 0, None
    for j, count in enumerate(counts):
        group.append(j)
        total += count
        if total >= minimum:
            for i in group:
                receiver[i] = j
            group, total, last = [], 0, j
    for i in group:
        receiver[i] = len(counts) - 1 if last is None else last
    return receiver


def test_small_cells_are_merged_with_the_next():
    rng = np.random.default_rng(0)
    rule = jax.jit(merge_targets)
    for _ in range(200):
        counts = rng.poisson(rng.choice([0.5, 3, 10]), size=6)
        result = np.asarray(rule(jnp.asarray(counts, jnp.float32), 5))
        assert result.tolist() == merge_greedily(counts, 5)
        joined = np.asarray(merge_cells(jnp.asarray(counts, jnp.float32), jnp.asarray(result)))
        assert joined.sum() == counts.sum()
        small = (joined > 0) & (joined < 5)
        assert not small.any() or counts.sum() < 5
    assert rule(jnp.array([0.0, 0, 0]), 0).tolist() == [0, 1, 2]


def test_clients_merge_small_cells_of_observed_and_replicated_rows():
    data, draws = federation("normal"), draws_near("normal", 300)
    result = criticism.predictive_check(KEY, NORMAL, data, draws, HISTOGRAM, minimum_rows=1)
    observed, replicated, moved = 0, 0, 0
    for index, rows in enumerate(clients("normal")):
        counts = np.histogram(rows["y"], [-np.inf, *EDGES, np.inf])[0]
        receiver = np.array(merge_greedily(counts, 5))
        table = np.zeros((len(counts), len(counts)))
        table[np.arange(len(counts)), receiver] = 1
        drawn = np.asarray(outcomes(NORMAL, rows, index, draws)["y"])
        each = np.array([np.histogram(y, [-np.inf, *EDGES, np.inf])[0] for y in drawn])
        observed, replicated = observed + counts @ table, replicated + each @ table
        moved = moved + (receiver != np.arange(len(counts)))
    assert moved.max() > moved.min() > 0
    same(result.observed, observed)
    same(result.replicated, replicated)
    same(result.merged, moved)
    assert "small cells were merged" in repr(result)


def question(minimum_rows=10, minimum_count=5):
    return Replication(
        NORMAL, (HISTOGRAM, statistic), minimum_rows, minimum_count, (6, 3), (True, False)
    )


def content(num=200):
    draws = jax.tree.map(jnp.asarray, draws_near("normal", num))
    return Replicates(words_of(KEY), draws)


def test_messages_hold_no_row_no_replicated_row_and_no_small_cell():
    data, question_content = federation("normal"), content()
    sent = messages(question(), data, question_content)
    for index, (message, rows) in enumerate(zip(sent, clients("normal"), strict=True)):
        value = message.value.value
        cells = value.observed[:6]
        assert not ((cells > 0) & (cells < 5)).any()
        assert value.gaps.shape == (200, 9)  # whatever the number of rows
        if len(rows["y"]) < 10:
            assert np.count_nonzero(numbers(value)) == 1 and value.not_judged == len(rows["y"])
            continue
        where = np.flatnonzero((cells == 0) & (value.merged[:6] > 0))
        assert where.size and not value.gaps[:, where].any()  # merged in both
        drawn = np.asarray(outcomes(NORMAL, rows, index, question_content.positions)["y"]).ravel()
        ordered = np.sort(numbers(value))
        for private in (*rows["y"], *drawn[:500]):
            place = np.searchsorted(ordered, private).clip(1, ordered.size - 1)
            assert np.abs(ordered[[place - 1, place]] - private).min() > 1e-7


@pytest.mark.slow
def test_a_secure_sum_merges_small_cells_of_the_total():
    data, draws = federation("normal"), draws_near("normal", 200)
    result = criticism.predictive_check(KEY, NORMAL, data, draws, HISTOGRAM, secure_sum=True)
    y = np.concatenate([x["y"] for x in clients("normal")])
    counts = np.histogram(y, [-np.inf, *EDGES, np.inf])[0]
    receiver = np.array(merge_greedily(counts, 5))
    same(result.observed, np.bincount(receiver, counts, 6))
    assert result.num_rows == 74 and result.num_not_judged == 0
    edges = (-9.0, *EDGES)  # a first cell that holds nobody
    empty = criticism.Histogram(lambda rows: rows["y"], edges)
    result = criticism.predictive_check(KEY, NORMAL, data, draws, empty, secure_sum=True)
    assert result.observed[0] == 0 and result.merged[0] == 1 and not result.replicated[:, 0].any()


def test_prior_predictive_checks_draw_from_the_prior():
    data = federation("normal")

    def prior(key):
        keys = jax.random.split(key)
        return {"mean": 10 * jax.random.normal(keys[0]), "log_sd": jax.random.normal(keys[1])}

    result = criticism.prior_predictive(
        KEY, NORMAL, data, prior, statistic, num_draws=500, minimum_rows=1
    )
    assert result.replicated.shape[0] == 500
    # Sums of 74 rows: the prior's sd is ten, that of outcomes one at the median.
    spread = result.replicated[:, 0].std() / (10 * 74)
    assert 0.8 < spread < 1.25
    assert 0.2 < result.p_values[0] < 0.6


def test_wrong_arguments_raise():
    data, draws = federation("logistic"), draws_near("logistic")
    silent = LOGISTIC._replace(resample_fn=None)
    short = LOGISTIC._replace(resample_fn=lambda key, theta, rows: {"y": rows["y"]})
    mean, largest = (lambda rows: rows["y"].mean()), {"largest": lambda rows: rows["y"].max()}
    for error, message, key, posterior, statistics, settings in (
        (ValueError, "resample_fn", KEY, silent, statistic, {}),
        (ValueError, "rows with the shapes of its argument", KEY, short, statistic, {}),
        (ValueError, "one term per row", KEY, LOGISTIC, mean, {}),
        (ValueError, r"one term per row.*largest returned", KEY, LOGISTIC, largest, {}),
        (TypeError, "statistics must be a function", KEY, LOGISTIC, {"mean": 3}, {}),
        (ValueError, "needs a statistic", KEY, LOGISTIC, {}, {}),
        (ValueError, "minimum_count", KEY, LOGISTIC, statistic, {"minimum_count": -1}),
        (
            ValueError,
            "No client has at least 40 rows",
            KEY,
            LOGISTIC,
            statistic,
            {"minimum_rows": 40},
        ),
        (TypeError, "rng_key must be a JAX key", 3, LOGISTIC, statistic, {}),
    ):
        with pytest.raises(error, match=message):
            criticism.predictive_check(key, posterior, data, draws, statistics, **settings)
    for edges in ([], [1.0, 1.0], [2.0, 1.0], [[1.0]]):
        with pytest.raises(ValueError, match="edges must be ascending numbers"):
            criticism.Histogram(lambda rows: rows["y"], edges)


def mixed(x, y=None):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    effect = numpyro.sample("effect", dist.Normal(mu, 1.0), infer={"local": True})
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Normal(effect, 1.0), obs=y)


def test_random_effects_are_named_as_in_the_model():
    data = federation("normal")
    posterior = fedmcmc.from_numpyro(mixed, example=data)
    assert list(posterior.local.like.tree) == ["effect_decentered"]
    draws = {"mu": np.zeros(200)}
    with pytest.raises(
        ValueError, match=r"random effects \(effect\).*docs/tutorials/random_effects\.md"
    ):
        criticism.predictive_check(KEY, fedmcmc.marginal(posterior), data, draws, statistic)
