"""The NumPyro model against densities that are written out, with arrays made by hand."""

import pickle
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pytest
from numpyro import distributions as dist
from numpyro.infer.util import log_density
from scipy import special, stats

import fedmcmc
from fedmcmc import FederatedData
from fedmcmc.models import Family, TermDesign
from fedmcmc.models._priors import Priors
from fedmcmc.models._regression import LinearPredictor, RegressionModel, draw_outcomes, draw_prior

RNG = np.random.default_rng(1)
NUM = 7
ROWS = {
    "x": RNG.normal(size=(NUM, 2)).astype(np.float32),
    "y": RNG.integers(0, 2, NUM).astype(np.float32),
    "offset": RNG.normal(size=NUM).astype(np.float32),
    "weights": np.array([1, 2, 3, 1, 1, 2, 1], np.float32),
    "z_site": np.stack([np.ones(NUM), RNG.normal(size=NUM)], 1).astype(np.float32),
    "z_ward": np.ones((NUM, 1), np.float32),
    "index_ward": np.array([0, 1, 2, 2, 1, 0, 1], np.int32),
}
SITE = TermDesign("site", ("Intercept", "age"), True, "client", 4, ("a", "b", "c", "d"))
WARD = TermDesign("ward", ("Intercept",), True, "shared", 3, ("u", "v", "w"))
NAMES = {
    "Intercept": dist.Normal(0.0, 2.5),
    "age": dist.Normal(0.0, 1.5),
    "sex": dist.StudentT(3.0, 0.0, 1.0),
    "sd_site[Intercept]": dist.HalfNormal(1.0),
    "sd_site[age]": dist.HalfNormal(0.5),
    "cor_site": dist.LKJCholesky(2, 2.0),
    "sd_ward": dist.Exponential(2.0),
}
PRIORS = Priors(NAMES, dict.fromkeys(NAMES, (0.0, 0.5)))
VALUES = {
    "Intercept": 0.3,
    "b": np.array([0.5, -0.8]),
    "sd_site": np.array([0.9, 0.4]),
    "cor_site": np.array([[1.0, 0.0], [0.6, 0.8]]),
    "effect_site": np.array([0.7, -0.2]),
    "sd_ward": np.array([0.6]),
    "z_ward": np.array([[0.1], [-1.3], [0.8]]),
}


def make(terms=(SITE, WARD), family="bernoulli"):
    predictor = LinearPredictor(("age", "sex"), terms, True, PRIORS)
    return RegressionModel(predictor, Family(family, "logit"))


def predicted(values):
    ward = 0.6 * values["z_ward"][ROWS["index_ward"], 0]
    fixed = 0.3 + ROWS["x"] @ values["b"]
    return fixed + ROWS["z_site"] @ values["effect_site"] + ward + ROWS["offset"]


def test_the_joint_density_is_that_of_the_formula():
    y, eta = ROWS["y"], predicted(VALUES)
    likelihood = ROWS["weights"] @ stats.bernoulli.logpmf(y, special.expit(eta))
    scale = VALUES["sd_site"][:, None] * VALUES["cor_site"]
    prior = [
        stats.norm.logpdf(0.3, 0, 2.5),
        stats.norm.logpdf(0.5, 0, 1.5),
        stats.t.logpdf(-0.8, 3),
        stats.halfnorm.logpdf(0.9),
        stats.halfnorm.logpdf(0.4, scale=0.5),
        dist.LKJCholesky(2, 2.0).log_prob(VALUES["cor_site"]),
        stats.multivariate_normal.logpdf(VALUES["effect_site"], np.zeros(2), scale @ scale.T),
        stats.expon.logpdf(0.6, scale=0.5),
        stats.norm.logpdf(VALUES["z_ward"]).sum(),
    ]
    value, trace = log_density(make(), (), ROWS, VALUES)
    np.testing.assert_allclose(value, likelihood + sum(prior), rtol=1e-5)
    assert trace["effect_site"]["infer"] == {"local": True}
    assert all("local" not in trace[name]["infer"] for name in ("z_ward", "sd_ward", "b"))


def test_weights_are_exactly_repeated_rows():
    repeated = {
        name: np.repeat(column, ROWS["weights"].astype(int), axis=0)
        for name, column in ROWS.items()
        if name != "weights"
    }
    weighted = log_density(make(), (), ROWS, VALUES)[0]
    np.testing.assert_allclose(log_density(make(), (), repeated, VALUES)[0], weighted, rtol=1e-5)


def test_a_term_without_correlations_has_independent_effects():
    term = TermDesign("site", ("Intercept", "age"), False, "client", 4, ())
    values = {name: VALUES[name] for name in ("Intercept", "b", "sd_site", "effect_site")}
    rows = {name: ROWS[name] for name in ("x", "y", "z_site")}
    trace = log_density(make((term,)), (), rows, values)[1]
    fn = trace["effect_site"]["fn"]
    exact = stats.norm.logpdf(values["effect_site"], 0, values["sd_site"]).sum()
    np.testing.assert_allclose(fn.log_prob(values["effect_site"]), exact, rtol=1e-5)
    assert "cor_site" not in trace


def test_the_posterior_has_local_effects_and_coordinates_in_units():
    data = FederatedData.from_clients([ROWS, ROWS])
    posterior = fedmcmc.from_numpyro(make(), example=data)
    assert list(posterior.local.like.tree) == ["effect_site"]
    position = posterior.init_fn(jax.random.key(0))
    assert sorted(position) == ["Intercept", "b", "cor_site", "sd_site", "sd_ward", "z_ward"]
    values = posterior.constrain_fn(position)
    np.testing.assert_allclose(values["b"], 0.5 * position["b"], rtol=1e-6)
    np.testing.assert_allclose(values["sd_site"], 0.5 * np.exp(position["sd_site"]), rtol=1e-5)


def test_data_sets_of_one_design_share_a_program():
    other = {**ROWS, "y": 1 - ROWS["y"]}
    built = [
        fedmcmc.from_numpyro(make(), example=FederatedData.from_clients([rows, rows]))
        for rows in (ROWS, other)
    ]
    assert built[0].logprior_fn == built[1].logprior_fn
    assert built[0].local.loglikelihood_fn == built[1].local.loglikelihood_fn


def test_a_model_can_be_pickled():
    model = pickle.loads(pickle.dumps(make()))
    value = log_density(make(), (), ROWS, VALUES)[0]
    np.testing.assert_array_equal(log_density(model, (), ROWS, VALUES)[0], value)
    assert repr(model.predictor.priors) == repr(PRIORS)


def test_a_model_without_columns_and_intercept_runs():
    predictor = LinearPredictor((), (WARD,), False, PRIORS)
    rows = {"x": np.zeros((NUM, 0)), **{k: ROWS[k] for k in ("y", "z_ward", "index_ward")}}
    trace = log_density(RegressionModel(predictor, Family("poisson", "log")), (), rows, VALUES)[1]
    assert "b" not in trace and "Intercept" not in trace


def test_prior_draws_have_all_shared_sites_and_no_effects():
    draw = draw_prior(make(), {name: x[:1] for name, x in ROWS.items()}, jax.random.key(0))
    assert sorted(draw) == ["Intercept", "b", "cor_site", "sd_site", "sd_ward", "z_ward"]


def test_drawn_outcomes_have_new_effects_per_group():
    """With huge effects and no other variation, outcomes of a group are equal."""
    num = 400
    rows = {
        "x": np.zeros((num, 2), np.float32),
        "y": np.zeros(num, np.float32),
        "z_site": np.tile([1.0, 0.0], (num, 1)).astype(np.float32),
    }
    values = {**VALUES, "Intercept": 0.0, "sd_site": np.array([1e4, 1.0])}
    del values["effect_site"]
    group = jnp.arange(num) % 40
    y = draw_outcomes(make((SITE,)), values, rows, group, 40, jax.random.key(1))
    by_group = np.asarray(y).reshape(10, 40)
    assert (by_group == by_group[0]).all() and 5 < by_group[0].sum() < 35


def test_correlated_effects_of_new_groups_have_their_covariance():
    priors = Priors({**NAMES, "sigma": dist.Exponential(1.0)}, {**PRIORS.units, "sigma": (0, 1)})
    predictor = LinearPredictor(("age", "sex"), (SITE,), True, priors)
    model = RegressionModel(predictor, Family("gaussian", "identity"))
    num = 4000
    z = np.zeros((2 * num, 2), np.float32)
    z[:num, 0], z[num:, 1] = 1, 1
    rows = {"x": np.zeros((2 * num, 2), np.float32), "y": np.zeros(2 * num), "z_site": z}
    values = {**VALUES, "Intercept": 0.0, "sigma": 1e-6}
    del values["effect_site"]
    group = jnp.tile(jnp.arange(num), 2)
    y = np.asarray(draw_outcomes(model, values, rows, group, num, jax.random.key(2)))
    scale = VALUES["sd_site"][:, None] * VALUES["cor_site"]
    np.testing.assert_allclose(np.cov(y.reshape(2, num)), scale @ scale.T, atol=0.05)


def test_numpyros_nuts_runs_the_model():
    kernel = numpyro.infer.NUTS(make())
    mcmc = numpyro.infer.MCMC(kernel, num_warmup=5, num_samples=5, progress_bar=False)
    mcmc.run(jax.random.key(0), **ROWS)
    assert mcmc.get_samples()["b"].shape == (5, 2)


def test_an_ordinal_model_has_ordered_cutpoints():
    priors = Priors({"age": dist.Normal(0, 1), "cutpoints": dist.Normal(0, 2.5)}, {"age": (0, 1)})
    predictor = LinearPredictor(("age",), (), False, priors)
    model = RegressionModel(predictor, Family("ordinal", "logit"), 3)
    rows = {"x": ROWS["x"][:, :1], "y": np.array([0, 1, 2, 2, 1, 0, 1])}
    posterior = fedmcmc.from_numpyro(model, example=rows)
    values = posterior.constrain_fn({"b": jnp.zeros(1), "cutpoints": jnp.array([-0.5, 0.2])})
    np.testing.assert_allclose(values["cutpoints"], [-0.5, -0.5 + np.exp(0.2)], rtol=1e-6)
    draws = draw_outcomes(
        model,
        {"b": jnp.zeros(1), "cutpoints": jnp.array([-30.0, 30.0])},
        rows,
        jnp.zeros(NUM, int),
        1,
        jax.random.key(0),
    )
    assert draws.tolist() == [1] * NUM


@pytest.mark.parametrize("response", ["pain", "C(pain)"])
def test_categories_are_counted(response):
    from fedmcmc.models._regression import count_categories

    formula = SimpleNamespace(response=response)
    coded = SimpleNamespace(levels={"pain": ("low", "mid", "high")}, outcome={})
    assert count_categories(SimpleNamespace(schema=coded, formula=formula)) == 3
