"""Input of formula models that would give wrong numbers."""

from types import SimpleNamespace

import numpy as np
import numpyro.distributions as dist
import pandas as pd
import pytest

from fedmcmc import models
from fedmcmc.models._draws import named_draws

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
