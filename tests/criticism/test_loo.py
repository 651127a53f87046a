"""Leave-one-out as sums against ArviZ on the pooled rows."""

from dataclasses import replace

import arviz_base
import arviz_stats
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import fedmcmc
from fedmcmc import criticism
from fedmcmc.criticism._draws import equal_draws
from fedmcmc.criticism._loo_question import LeaveOneOut
from fedmcmc.criticism._pareto import tail_length
from fedmcmc.diagnostics import mixing
from fedmcmc.exact import khat_threshold
from tests.criticism.federation import (
    LOGISTIC,
    MODELS,
    NORMAL,
    SIZES,
    clients,
    draws_near,
    federation,
    log_likelihoods,
    messages,
    numbers,
)
from tests.hierarchy import models as groups
from tests.support.lanes import fast_and_slow


def by_arviz(table, reff=1.0):
    """Return ArviZ's result of a table ``[num_draws, num_rows]``, with what each row has."""
    groups = {"posterior": {"t": np.zeros((1, len(table)))}, "log_likelihood": {"y": table[None]}}
    tree = arviz_base.from_dict(groups)
    return arviz_stats.loo(tree, pointwise=True, reff=reff)


def pooled(name, minimum=1):
    rows = [x for x in clients(name) if len(x["y"]) >= minimum]
    return jax.tree.map(lambda *x: np.concatenate(x), *rows)


@pytest.mark.parametrize("name", fast_and_slow(MODELS, ["logistic"]))
@pytest.mark.parametrize("efficiency", fast_and_slow([1.0, 0.4], [0.4]))
def test_loo_equals_that_of_arviz_on_pooled_rows(name, efficiency):
    data, draws = federation(name), draws_near(name)
    result = criticism.loo(MODELS[name], data, draws, minimum_rows=1, efficiency=efficiency)
    table = log_likelihoods(MODELS[name], pooled(name), draws).astype(float)
    expected = by_arviz(table, efficiency)
    np.testing.assert_allclose([result.elpd, result.p_loo], [expected.elpd, expected.p], atol=1e-4)
    # Later versions of ArviZ divide by one row fewer.
    each = np.asarray(expected.elpd_i).ravel()
    np.testing.assert_allclose(result.se, np.sqrt(len(each)) * each.std(), atol=1e-4)
    assert result.num_rows == sum(SIZES) and result.num_not_judged == 0
    assert result.good_k == expected.good_k and result.verdict == "good"
    assert result.totals["rounds"] == 1


def test_rows_of_large_weight_are_counted_and_warn():
    data, draws = federation("normal"), draws_near("normal")
    data.rows["y"] = data.rows["y"].at[0].set(14.0)  # eight sds away
    with pytest.warns(fedmcmc.SamplingWarning, match="k-hat of 1 of 74 rows above 0.67"):
        result = criticism.loo(NORMAL, data, draws, minimum_rows=1)
    table = log_likelihoods(NORMAL, data.rows, draws).astype(float)
    with pytest.warns(UserWarning, match="Pareto"):
        expected = by_arviz(table)
    k_hat = np.asarray(expected.pareto_k)
    assert result.num_bad == (k_hat > result.good_k).sum() == 1
    assert result.num_very_bad == (k_hat > 1).sum()
    assert result.verdict == ("failed" if result.num_very_bad else "doubtful")
    np.testing.assert_allclose(result.elpd, expected.elpd, atol=2e-3)
    assert "above 0.67" in repr(result) and result.to_dict()["verdict"] == result.verdict


GROUP_DRAWS = {
    "mu": np.random.default_rng(2).normal(0.6, 0.35, 1000).astype(np.float32),
    "slope": np.random.default_rng(3).normal(0.3, 0.15, 1000).astype(np.float32),
}


@pytest.mark.slow
@pytest.mark.parametrize("complete", [True, False])
def test_groups_with_latents_are_left_out_together(complete):
    """Groups of one client, and of two that have three and two: by hand, and by ArviZ."""
    rows = groups.clients()
    data = fedmcmc.FederatedData.from_clients(rows) if complete else groups.in_two_clients(rows)
    posterior = fedmcmc.marginal(fedmcmc.from_numpyro(groups.gaussian, example=data))
    result = criticism.loo(
        posterior, data, GROUP_DRAWS, secure_sum=complete, minimum_rows=2, efficiency=1.0
    )

    def densities(position):
        return jnp.stack([groups.closed_form(position, [group]) for group in rows])

    table = jax.vmap(densities)(GROUP_DRAWS)
    expected = by_arviz(np.asarray(table, float))
    np.testing.assert_allclose([result.elpd, result.p_loo], [expected.elpd, expected.p], atol=1e-3)
    each = np.asarray(expected.elpd_i).ravel()
    np.testing.assert_allclose(result.se, np.sqrt(len(each)) * each.std(), atol=1e-3)
    assert result.num_rows == len(rows) and result.unit == "groups"
    assert "5 groups, 1,000 draws" in repr(result)


@pytest.mark.slow
def test_clients_of_one_group_send_no_density():
    data = fedmcmc.FederatedData.from_clients(groups.clients())
    posterior = fedmcmc.marginal(fedmcmc.from_numpyro(groups.gaussian, example=data))
    with pytest.raises(ValueError, match="No client has at least 10 groups"):
        criticism.loo(posterior, data, GROUP_DRAWS)
    with pytest.raises(ValueError, match="single rows of a group have no densities"):
        criticism.loo(posterior, data, GROUP_DRAWS, unit="row", secure_sum=True)


def lines(theta, rows):
    gap = rows["y"] - rows["x"] @ theta
    return 0.5 * (jnp.log(rows["p"]) - jnp.log(2 * jnp.pi) - rows["p"] * gap**2)


LINES = fedmcmc.Posterior(lambda theta: -0.5 * jnp.sum(theta**2), lines)


@pytest.mark.slow
def test_rows_of_large_weight_are_refined_by_wider_points():
    """Rows of known precision, of which two make most of the posterior: all is exact."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=(60, 2)).astype(np.float32)
    p = np.ones(60, np.float32)
    p[7], p[40] = 1000.0, 3000.0
    y = (x @ [0.5, -1.0] + rng.normal(size=60) / np.sqrt(p)).astype(np.float32)
    data = fedmcmc.FederatedData.from_arrays({"x": x, "y": y, "p": p}, np.arange(60) // 25)
    each = p[:, None, None] * x[:, :, None] * x[:, None, :]
    precision, eta = np.eye(2) + each.sum(0), (p * y) @ x
    mean = np.linalg.solve(precision, eta)
    root = np.linalg.cholesky(np.linalg.inv(precision))
    draws = (mean + rng.normal(size=(1000, 2)) @ root.T).astype(np.float32)
    exact = []
    for i in range(60):
        without = precision - each[i]
        center = np.linalg.solve(without, eta - p[i] * y[i] * x[i])
        sd = np.sqrt(1 / p[i] + x[i] @ np.linalg.solve(without, x[i]))
        exact.append(stats.norm.logpdf(y[i], x[i] @ center, sd))
    with pytest.warns(fedmcmc.SamplingWarning, match=r"k-hat of 2 of 60 rows.* loo\(refine=True\)"):
        result = criticism.loo(LINES, data, draws)
    refined = criticism.loo(LINES, data, draws, refine=True)
    assert (refined.num_refined, refined.num_bad, refined.verdict) == (2, 0, "good")
    assert refined.totals["rounds"] == 3 and "2 rows by weighted points" in repr(refined)
    assert abs(refined.elpd - sum(exact)) < 0.1 < abs(result.elpd - sum(exact))
    lpd = refined.elpd + refined.p_loo
    np.testing.assert_allclose(lpd, result.elpd + result.p_loo, rtol=1e-5)
    # Nobody has to be judged again where all is well.
    ordinary = jax.tree.map(lambda leaf: leaf[p == 1], data.rows)
    ordinary = fedmcmc.FederatedData.from_arrays(ordinary, np.arange(58) // 29)
    assert criticism.loo(LINES, ordinary, draws[::2], refine=True).totals["rounds"] == 1


def test_clients_with_few_rows_send_only_their_number():
    data, draws = federation("normal"), draws_near("normal")
    result = criticism.loo(NORMAL, data, draws)
    expected = by_arviz(log_likelihoods(NORMAL, pooled("normal", 10), draws).astype(float))
    each = np.asarray(expected.elpd_i).ravel()
    se = np.sqrt(len(each)) * each.std()
    np.testing.assert_allclose([result.elpd, result.se], [expected.elpd, se], atol=1e-4)
    assert (result.num_rows, result.num_not_judged) == (71, 3)
    assert "3 rows are not judged: their clients have fewer than minimum_rows=10" in repr(result)
    secure = criticism.loo(NORMAL, data, draws, secure_sum=True)
    assert secure.num_rows == 74
    # Rounds without a client are repeated.
    faulty = fedmcmc.runs.SimulatedConsortium(
        data, rng_key=jax.random.key(4), transform=lambda kernel: fedmcmc.faults(kernel, drop=0.3)
    )
    again = criticism.loo(NORMAL, faulty, draws)
    assert again.elpd == pytest.approx(result.elpd, abs=1e-5) and again.totals["rounds"] > 1


def question(models, draws, minimum_rows=10):
    num = len(jax.tree.leaves(draws[0])[0])
    worst = jnp.full(len(models), khat_threshold(num))
    return LeaveOneOut(
        models[0], models[1:], minimum_rows, worst, (tail_length(num),) * len(models)
    )


@pytest.mark.slow
def test_messages_hold_no_row_and_no_density_of_a_row():
    data, draws = federation("normal"), jax.tree.map(jnp.asarray, draws_near("normal"))
    sent = messages(question((NORMAL,), (draws,)), data, (draws,))
    assert np.count_nonzero(numbers(sent[3].value)) == 1  # three rows: their number
    assert numbers(sent[3].value).max() == 3
    table = log_likelihoods(NORMAL, data.rows, draws).astype(float)
    densities = by_arviz(table).elpd_i.values
    values = numbers(sent[0].value)  # of 37 rows
    for private in (*densities[:37], *np.asarray(data.rows["y"])[:37]):
        assert np.abs(values - private).min() > 1e-6
    for message in sent:  # of one shape, however many rows there are
        assert jax.tree.map(np.shape, message) == jax.tree.map(np.shape, sent[0])
        assert numbers(message.value).size == 3 * 3 + 3 + 3 + 3


def constant(theta, rows):
    return rows["y"] * theta - jnp.logaddexp(0.0, theta)


INTERCEPT = fedmcmc.Posterior(lambda theta: -0.5 * (theta / 2.5) ** 2, constant)


def test_compare_uses_differences_by_rows():
    data, draws = federation("logistic"), draws_near("logistic")
    alone = np.random.default_rng(2).normal(0.3, 0.25, 1000).astype(np.float32)
    models = {"constant": (INTERCEPT, alone), "slope": (LOGISTIC, draws)}
    result = criticism.compare(models, data, minimum_rows=1)
    rows = pooled("logistic")
    tables = [log_likelihoods(model, rows, x).astype(float) for model, x in models.values()]
    rowwise = [by_arviz(table).elpd_i.values for table in tables]
    gaps = rowwise[1] - rowwise[0]
    assert list(result.models) == ["slope", "constant"]
    np.testing.assert_allclose(result.difference, [0, gaps.sum()], atol=1e-4)
    np.testing.assert_allclose(result.se, [0, np.sqrt(74 * gaps.var())], atol=1e-4)
    # It is not what the two standard errors make together.
    apart = np.hypot(result.models["slope"].se, result.models["constant"].se)
    assert result.se[1] < 0.95 * apart
    assert any("fewer than 100" in note for note in result.notes)
    for name, model in models.items():
        single = criticism.loo(model[0], data, model[1], minimum_rows=1)
        np.testing.assert_allclose(single.elpd, result.models[name].elpd, atol=1e-5)
    text = repr(result)
    assert text.index("slope") < text.index("constant")
    assert result.to_dict()["constant"]["difference"] == result.difference[1]


def test_a_small_difference_has_a_note():
    data, draws = federation("logistic"), draws_near("logistic")
    models = {"first": (LOGISTIC, draws), "same": (LOGISTIC, draws_near("logistic", seed=5))}
    result = criticism.compare(models, data)
    assert result.difference[1] < 1 and any("4 nats" in note for note in result.notes)
    assert any("not judged" in note for note in result.notes)


def laplace(data):
    mode = fedmcmc.surrogates.mode(LOGISTIC, data, jnp.zeros(2)).position
    clients = fedmcmc.surrogates.taylor(LOGISTIC, data, mode)
    prior = fedmcmc.Gaussian.from_moments(jnp.zeros(2), 2.5**2 * jnp.eye(2))
    return clients.sum() * prior


@pytest.mark.slow
def test_weighted_draws_are_resampled():
    data = federation("logistic")
    corrected = fedmcmc.correct(jax.random.key(0), LOGISTIC, data, laplace(data), num_draws=2000)
    result = criticism.loo(LOGISTIC, data, corrected, minimum_rows=1)
    weighted = corrected.resample(jax.random.key(0), 2000)
    table = log_likelihoods(LOGISTIC, pooled("logistic"), weighted).astype(float)
    expected = by_arviz(table, corrected.ess_share)
    np.testing.assert_allclose(result.elpd, expected.elpd, atol=1e-4)
    # They are in the model's own coordinates, whatever `correct` was asked in.
    white = LOGISTIC._replace(position_fn=lambda z: 2 * z)
    with pytest.raises(ValueError, match="posterior that was given to whiten"):
        criticism.loo(white, data, corrected)


@pytest.mark.slow
def test_draws_of_a_run_are_thinned_evenly():
    data = federation("logistic")
    kernel = fedmcmc.lsd(LOGISTIC, step_size=0.01)
    samples = fedmcmc.sample(
        jax.random.key(1),
        kernel,
        data,
        jnp.array([0.3, 0.8]),
        num_rounds=900,
        num_burnin=100,
        num_chains=4,
        progress=False,
    )
    chosen = equal_draws(samples, LOGISTIC, 202, None)
    assert chosen.num == 200  # fifty per chain, every sixteenth
    np.testing.assert_array_equal(chosen.positions[:50], samples.draws[0, 8::16])
    np.testing.assert_array_equal(chosen.positions[150:], samples.draws[3, 8::16])
    ess = mixing(samples.draws).ess_bulk.mean()
    assert chosen.efficiency == pytest.approx(min(1, ess / 200))
    many = replace(
        samples,
        draws=samples.draws.reshape(64, 50, *samples.draws.shape[2:]),
        info={name: values.reshape(64, 50) for name, values in samples.info.items()},
    )
    assert equal_draws(many, LOGISTIC, 99, None, minimum=99).num == 99
    complete = equal_draws(samples, LOGISTIC, 5000, None)
    assert complete.num == 3200 and complete.efficiency == pytest.approx(ess / 3200)
    result = criticism.loo(LOGISTIC, data, samples, minimum_rows=1, num_draws=1000)
    assert (result.num_draws, result.num_available) == (1000, 3200)
    assert "1,000 of 3,200 draws" in repr(result)
    assert criticism.loo(LOGISTIC, data, samples, minimum_rows=1).num_draws == 3200
    table = log_likelihoods(
        LOGISTIC, pooled("logistic"), equal_draws(samples, LOGISTIC, 1000, None).positions
    )
    expected = by_arviz(table.astype(float), ess / 1000)
    np.testing.assert_allclose([result.elpd, result.p_loo], [expected.elpd, expected.p], atol=1e-4)


def test_draws_of_a_failed_correction_warn():
    data = federation("logistic")
    far = fedmcmc.Gaussian.from_moments(jnp.array([4.0, 4.0]), variance=jnp.array(1e-3))
    with pytest.warns(fedmcmc.SamplingWarning, match="failed"):
        corrected = fedmcmc.correct(
            jax.random.key(0), LOGISTIC, data, far, num_draws=200, max_rounds=1
        )
    with pytest.warns(fedmcmc.SamplingWarning, match="a correction that failed"):
        equal_draws(corrected, LOGISTIC, 200, None)


def test_wrong_arguments_raise():
    data, draws = federation("logistic"), draws_near("logistic")
    broken = LOGISTIC._replace(
        loglikelihood_fn=lambda theta, rows: jnp.where(rows["y"] > 0, jnp.log(theta[0] - 0.3), 0.0)
    )
    ragged = {"mean": draws[:, 0], "log_sd": draws[:200, 0]}
    nonfinite = draws * np.where(np.arange(1000) == 3, np.nan, 1)[:, None]
    logistic = LOGISTIC.loglikelihood_fn
    for error, message, posterior, rows, values, settings in (
        (TypeError, r"posterior must be a fedmcmc\.Posterior", logistic, data, draws, {}),
        (ValueError, "At least 100 draws", LOGISTIC, data, draws[:99], {}),
        (ValueError, "one leading axis of draws", NORMAL, data, ragged, {}),
        (ValueError, "NaN or infinite", LOGISTIC, data, nonfinite, {}),
        (ValueError, "loglikelihood_fn", LOGISTIC, data, draws[:, :1], {}),
        (ValueError, "No client has at least 50 rows", LOGISTIC, data, draws, {"minimum_rows": 50}),
        (ValueError, "minimum_rows must be at least 1", LOGISTIC, data, draws, {"minimum_rows": 0}),
        (
            ValueError,
            r"efficiency must lie in \(0, 1\]",
            LOGISTIC,
            data,
            draws,
            {"efficiency": 0.0},
        ),
        (TypeError, "FederatedData or a consortium", LOGISTIC, clients("logistic"), draws, {}),
        (ValueError, r"not finite for \d+ rows", broken, data, draws, {}),
    ):
        with pytest.raises(error, match=message):
            criticism.loo(posterior, rows, values, **settings)
    with pytest.raises(ValueError, match="at least two models"):
        criticism.compare({"one": (LOGISTIC, draws)}, data)


@pytest.mark.slow
def test_loo_and_checks_support_strict_promotion():
    again = NORMAL._replace(loglikelihood_fn=lambda theta, rows: NORMAL[1](theta, rows))
    with jax.numpy_dtype_promotion("strict"):
        result = criticism.loo(again, federation("normal"), draws_near("normal"))
        criticism.predictive_check(
            jax.random.key(0),
            again,
            federation("normal"),
            draws_near("normal", 100),
            {
                "y": lambda rows: rows["y"],
                "cells": criticism.Histogram(lambda rows: rows["y"], [2]),
            },
        )
    assert result.num_rows == 71
