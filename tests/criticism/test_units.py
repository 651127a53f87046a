"""Groups and clients that are left out, against closed forms; weighted terms warn."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest
from scipy import stats

import fedmcmc
from fedmcmc import criticism
from fedmcmc.criticism import _rows
from fedmcmc.criticism._units import weighted_sites
from tests.criticism.test_loo import by_arviz
from tests.hierarchy import models as groups

PRIOR_SD = 3.0


def log_density(theta, rows):
    return -0.5 * (rows["y"] - theta) ** 2 - 0.5 * jnp.log(2 * jnp.pi)


NORMAL = fedmcmc.Posterior(lambda theta: -0.5 * (theta / PRIOR_SD) ** 2, log_density)
RAGGED = np.array([1, 2, 3, 4, 3, 2, 1, 2, 5, 2, 3, 3])  # rows per patient


def table():
    """Return visits of patients, who are more alike within themselves than the model has them."""
    rng = np.random.default_rng(0)
    patient = np.repeat(np.arange(len(RAGGED)), RAGGED)
    y = 0.5 + rng.normal(size=len(RAGGED))[patient] + 0.5 * rng.normal(size=len(patient))
    order = rng.permutation(len(patient))  # visits of a patient do not follow one another
    hospital = np.where(patient < 5, "Bern", "Chur")
    return pd.DataFrame({"hospital": hospital, "patient": patient, "y": y}).iloc[order]


TABLE = table()
DATA = fedmcmc.FederatedData.from_dataframe(TABLE, client="hospital", groups="patient")


def exact_draws(num=4000):
    precision = 1 / PRIOR_SD**2 + len(TABLE)
    z = np.random.default_rng(1).normal(size=num)
    return (TABLE.y.sum() / precision + z / np.sqrt(precision)).astype(np.float32)


def left_out(column):
    """Return log p(rows of a unit | all others), exactly."""
    result = []
    for _, unit in TABLE.groupby(column):
        remaining = TABLE.drop(unit.index).y
        precision = 1 / PRIOR_SD**2 + len(remaining)
        covariance = np.eye(len(unit)) + 1 / precision
        mean = np.full(len(unit), remaining.sum() / precision)
        result.append(stats.multivariate_normal.logpdf(unit.y, mean, covariance))
    return np.array(result)


@pytest.mark.parametrize("unit", [None, "group", "row", "client"])
def test_the_density_of_a_unit_that_is_left_out_is_exact(unit):
    indexed = TABLE.assign(row=np.arange(len(TABLE)))
    column = {None: "patient", "group": "patient", "row": "row", "client": "hospital"}[unit]
    expected = left_out(indexed[column])
    settings = {} if unit is None else {"unit": unit}
    with warnings.catch_warnings():
        if unit == "client":  # half of all rows at once: k-hat may be high
            warnings.simplefilter("ignore", fedmcmc.SamplingWarning)
        result = criticism.loo(NORMAL, DATA, exact_draws(), minimum_rows=1, **settings)
    units = {None: "groups", "group": "groups", "row": "rows", "client": "clients"}[unit]
    assert result.unit == units and result.num_rows == len(expected)
    assert f"{len(expected)} {units}, 4,000 draws" in repr(result)
    tolerance = 0.3 if unit == "client" else 0.05
    np.testing.assert_allclose(result.elpd, expected.sum(), atol=tolerance)
    np.testing.assert_allclose(result.se, np.sqrt(len(expected)) * expected.std(), rtol=0.1)


@pytest.mark.parametrize(("unit", "rtol"), [("group", 1e-5), ("row", 1e-6)])
def test_blocks_of_rows_change_nothing(monkeypatch, unit, rtol):
    draws, settings = exact_draws(500), dict(minimum_rows=1, unit=unit)
    reference = criticism.loo(NORMAL, DATA, draws, **settings)
    monkeypatch.setattr(_rows, "BUDGET", 5 * 500)  # five rows at a time
    # Another function object, so that nothing compiled is used again.
    again = NORMAL._replace(loglikelihood_fn=lambda theta, rows: log_density(theta, rows))
    simulated = fedmcmc.runs.SimulatedConsortium(DATA)
    parts = criticism.loo(again, simulated, draws, **settings)
    np.testing.assert_allclose([parts.elpd, parts.se], [reference.elpd, reference.se], rtol=rtol)
    assert parts.num_rows == reference.num_rows and parts.unit == f"{unit}s"


def test_few_groups_and_unknown_units_raise():
    with pytest.raises(ValueError, match=r"No client has at least 10 groups.*unit='row'"):
        criticism.loo(NORMAL, DATA, exact_draws())
    with pytest.raises(ValueError, match="unit='client' the sum of a client is its own density"):
        criticism.loo(NORMAL, DATA, exact_draws(), unit="client")
    with pytest.raises(ValueError, match=r"unit must be one of .row., .group., .client., got .hos"):
        criticism.loo(NORMAL, DATA, exact_draws(), unit="hospital")
    few = criticism.loo(NORMAL, DATA, exact_draws(), minimum_rows=6)
    assert (few.num_rows, few.num_not_judged) == (7, 5)
    assert "5 groups are not judged: their clients have fewer than minimum_rows=6" in repr(few)


@pytest.mark.slow
def test_a_model_with_effects_is_compared_with_one_without_on_the_same_groups():
    rows = groups.clients()
    data = groups.in_two_clients(rows)
    posterior = fedmcmc.marginal(fedmcmc.from_numpyro(groups.gaussian, example=data))
    rng = np.random.default_rng(2)
    shared = {
        "mu": rng.normal(0.6, 0.35, 1000).astype(np.float32),
        "slope": rng.normal(0.3, 0.15, 1000).astype(np.float32),
    }

    def terms(position, rows):
        gap = (rows["y"] - position["mu"] - position["slope"] * rows["x"]) / groups.SD
        return -0.5 * gap**2 - jnp.log(groups.SD) - 0.5 * jnp.log(2 * jnp.pi)

    pooled = fedmcmc.Posterior(posterior.logprior_fn, terms)
    models = {"effects": (posterior, shared), "pooled": (pooled, shared)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fedmcmc.SamplingWarning)
        result = criticism.compare(models, data, minimum_rows=1)
        alone = {
            name: criticism.loo(model, data, draws, minimum_rows=1)
            for name, (model, draws) in models.items()
        }
    assert {x.unit for x in result.models.values()} == {"groups"}
    for name, single in alone.items():
        assert single.unit == "groups" and single.num_rows == len(rows)
        np.testing.assert_allclose(result.models[name].elpd, single.elpd, rtol=1e-5)
    table = np.stack(
        [jax.vmap(lambda position, x=x: terms(position, x).sum())(shared) for x in rows], 1
    )
    with pytest.warns(UserWarning, match="Pareto"):
        expected = by_arviz(table.astype(float))
    np.testing.assert_allclose(alone["pooled"].elpd, expected.elpd, atol=1e-3)


def ones_like(w):
    return 1.0


WEIGHTS = np.array([1.5, 0.7, 2.2, 1.0, 0.4, 3.0, 1.2, 0.9] * 3)
ONES = np.array([1, 0, 1, 1, 0, 1, 0, 0] * 3)
WEIGHTED_DATA = fedmcmc.FederatedData.from_clients(
    [{"w": WEIGHTS[:12], "y": ONES[:12]}, {"w": WEIGHTS[12:], "y": ONES[12:]}]
)


def weighted_by(scale_fn):
    def model(w, y=None):
        b = numpyro.sample("b", dist.Normal(0, 2.5))
        with numpyro.plate("rows", len(w)), numpyro.handlers.scale(scale=scale_fn(w)):
            numpyro.sample("y", dist.Bernoulli(logits=b), obs=y)

    return fedmcmc.from_numpyro(model, example=WEIGHTED_DATA, check_rows=False)


BETAS = {"b": np.random.default_rng(0).normal(0, 0.1, 500).astype(np.float32)}


def test_weighted_terms_warn():
    for scale_fn in (
        lambda w: w,
        lambda w: 0.5,
        lambda w: jnp.exp(-w),
        lambda w: np.full(len(w), 2.0),
    ):
        posterior = weighted_by(scale_fn)
        assert weighted_sites(posterior) == ("y",)
    with pytest.warns(UserWarning, match=r"loo: the likelihood of y is weighted"):
        result = criticism.loo(posterior, WEIGHTED_DATA, BETAS)
    (note,) = result.notes
    assert "not the log density of an outcome" in note and note in repr(result)
    models = {"weighted": (posterior, BETAS), "plain": (weighted_by(ones_like), BETAS)}
    with pytest.warns(UserWarning, match="compare: weighted: the likelihood of y is weighted"):
        result = criticism.compare(models, WEIGHTED_DATA)
    assert any("Compare only models with the same weights" in note for note in result.notes)


def test_weights_of_one_are_no_weights():
    assert weighted_sites(weighted_by(ones_like)) == weighted_sites(NORMAL) == ()
    posterior = weighted_by(lambda w: np.ones(len(w)))
    assert weighted_sites(posterior) == ()
    assert criticism.loo(posterior, WEIGHTED_DATA, BETAS).notes == ()


def test_weights_within_groups_count():
    def model(w, y=None):
        mu = numpyro.sample("mu", dist.Normal(0, 2))
        effect = numpyro.sample("effect", dist.Normal(mu, 1), infer={"local": True})
        with numpyro.plate("rows", len(w)), numpyro.handlers.scale(scale=w):
            numpyro.sample("y", dist.Bernoulli(logits=effect), obs=y)

    posterior = fedmcmc.from_numpyro(model, example=WEIGHTED_DATA)
    assert weighted_sites(fedmcmc.marginal(posterior)) == ("y",)


def test_a_check_of_rows_with_groups_has_a_note():
    posterior = NORMAL._replace(
        resample_fn=lambda key, theta, rows: {
            **rows,
            "y": theta + jax.random.normal(key, rows["y"].shape),
        }
    )
    sums = {"y": lambda rows: rows["y"]}
    key = jax.random.key(0)
    result = criticism.predictive_check(key, posterior, DATA, exact_draws(), sums)
    assert any("rows of a group are more similar" in note for note in result.notes)
    plain = fedmcmc.FederatedData.from_dataframe(TABLE[["hospital", "y"]], client="hospital")
    assert criticism.predictive_check(key, posterior, plain, exact_draws(), sums).notes == ()
