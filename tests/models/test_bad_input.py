"""Input of formula models that would give wrong numbers."""

from types import SimpleNamespace

import numpy as np
import numpyro.distributions as dist
import pandas as pd
import pytest

from fedmcmc import models
from fedmcmc.models._draws import expected_outcomes, named_draws
from fedmcmc.models._effects import arms_of

RNG = np.random.default_rng(0)
TABLE = pd.DataFrame(
    {
        "site": np.repeat(["a", "b", "c"], 20),
        "x": RNG.normal(40, 10, 60),
        "sigma": RNG.normal(size=60),
        "arm": np.resize(["p", "q", "r"], 60),
        "y": RNG.normal(size=60),
    }
)


def specify(formula, table=TABLE, **settings):
    return models.specify(formula, table, client="site", **settings)


def test_table_of_a_client_with_another_client_is_refused():
    with pytest.raises(ValueError, match="table of client 'first' holds 'a'"):
        specify("y ~ x + (1 | site)", {"first": TABLE, "b": TABLE[TABLE.site == "b"]})


def test_column_with_the_name_of_a_parameter_is_refused():
    with pytest.raises(ValueError, match="name 'sigma'"):
        specify("y ~ sigma")


def test_prior_of_a_standard_deviation_must_be_positive():
    with pytest.raises(ValueError, match="'sd_site' must be on positive numbers"):
        specify("y ~ x + (1 | site)", priors={"sd_site": dist.Normal(0, 1)})


def test_levels_that_a_formula_leaves_out_are_refused():
    with pytest.raises(ValueError, match="cannot be computed"):
        specify("y ~ C(arm, levels=['p', 'q'])")


def test_numbers_of_scale_are_the_formula_s():
    design = specify("y ~ scale(x, center=50, scale=10)").design
    table = TABLE[TABLE.site == "a"]
    x = design.rows(table, "a")["x"][:, 0] + design.centers[0]
    np.testing.assert_allclose(x, (table.x - 50) / 10, rtol=1e-5)


def test_categories_of_numbers_are_levels():
    table = TABLE.assign(dose=pd.Categorical(np.resize([10, 20, 30], 60), [10, 20, 30]))
    assert specify("y ~ dose", table).design.names == ("dose[20]", "dose[30]")


def test_cut_points_refer_to_the_user_s_columns():
    design = SimpleNamespace(names=("x",), centers=np.array([40.0]), terms=(), covariates=())
    sites = {"b": np.full((1, 1, 1), 0.5), "cutpoints": np.array([[[-1.0, 1.0]]])}
    draws = named_draws(sites, design, SimpleNamespace(parameters=("cutpoints",)))
    np.testing.assert_allclose([draws["cutpoints[0]"], draws["cutpoints[1]"]], [[[19.0]], [[21.0]]])


def test_priors_refer_to_the_outcome_minus_the_offset():
    table = TABLE.assign(base=1000 + TABLE.x, change=1000 + TABLE.x + TABLE.y)
    with_offset = specify("change ~ arm + offset(base)", table).priors
    without = specify("y ~ arm").priors
    for name in ("Intercept", "arm[q]", "sigma"):
        for argument in without[name].arg_constraints:
            np.testing.assert_allclose(
                getattr(with_offset[name], argument), getattr(without[name], argument), rtol=1e-6
            )


def test_levels_without_an_intercept_may_have_the_size_of_the_outcome():
    prior = specify("bp ~ 0 + arm", TABLE.assign(bp=2020 + TABLE.y)).priors["arm[p]"]
    assert prior.scale > 2020


def test_text_of_events_needs_an_order():
    table = TABLE.assign(time=TABLE.x.abs(), status=np.resize(["died", "lost"], 60))
    with pytest.raises(ValueError, match="event 'status' is text: 'died', 'lost'"):
        models.survival("Surv(time, status) ~ arm", table, client="site")


def test_effects_of_the_outcome_are_refused():
    table = TABLE.assign(died=np.resize(["no", "yes", "yes"], 60))
    design = specify("died ~ x + arm", table, family="bernoulli").design
    with pytest.raises(ValueError, match="right side, one of 'arm', 'x'; got 'died'"):
        arms_of("died", design, None)


def make_fit(formula, **settings):
    """Return a fit without draws."""
    specification = specify(formula, **settings)
    fields = dict.fromkeys(("fitted", "posterior"))
    return models.ModelFit(
        **fields,
        model=specification.model,
        data=specification.data,
        design=specification.design,
        family=specification.family,
        priors=specification.priors,
    )


def test_new_clients_have_new_effects_where_the_table_names_a_client():
    fit = make_fit("y ~ x + (1 | site/arm)")
    table = TABLE[TABLE.site == "b"]
    term = next(term for term in fit.design.terms if term.label == "site")
    rows = fit.design.rows(table, "b", outcome=False)
    assert (fit._place(term, rows, "b") == 1).all() and (fit._place(term, rows, "new") == -1).all()


def test_checks_of_rows_refuse_weights():
    fit = make_fit("y ~ x", table=TABLE.assign(w=2.0), weights="w")
    for check in (fit.loo, fit.pp_check):
        with pytest.raises(ValueError, match="repeat rows in place of weights"):
            check()


def test_outcomes_with_trials_are_not_predicted():
    table = TABLE.assign(y=np.resize([0, 2, 3], 60), n=3)
    fit = make_fit("y ~ x", table=table, trials="n", family="binomial")
    with pytest.raises(ValueError, match="needs numbers of trials"):
        fit.predict(table, client=None, kind="outcome")


def test_student_s_t_is_predicted_by_its_location():
    eta = np.array([[0.0, 1.0]])
    family = SimpleNamespace(name="student")
    values = {"nu": np.array([0.9]), "sigma": np.ones(1)}
    np.testing.assert_array_equal(expected_outcomes(family, eta, values, {}), eta)
