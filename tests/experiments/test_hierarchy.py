"""Hierarchical models of real data: their columns have names, and the funnel's grid is exact."""

import numpy as np
import pytest

from experiments import loaders
from experiments.data import DataNotFound
from experiments.special import hierarchy_funnel, hierarchy_methods


@pytest.mark.parametrize("name", hierarchy_methods.SLOPES)
def test_slopes_have_names(name):
    try:
        data, _ = getattr(loaders, name)()
    except DataNotFound as error:
        pytest.skip(str(error))
    assert data.rows["x"].shape[1] == len(hierarchy_methods.SLOPES[name])
    clients = {"radon": 85, "exam": 65, "schools": 160, "contraception": 60, "immunization": 161}
    assert data.num_clients == clients[name]


def test_the_grid_of_the_funnel_is_bayes_rule():
    """Many rows of hospitals that differ much: `mu` and `tau` are those of the effects."""
    effects = np.random.default_rng(0).normal(0.4, 0.5, 200)
    mean, sd = hierarchy_funnel.exact([np.full(400, effect) for effect in effects])
    np.testing.assert_allclose(mean, [effects.mean(), np.log(effects.std())], atol=0.01)
    np.testing.assert_allclose(sd, [effects.std() / 200**0.5, 1 / 400**0.5], rtol=0.03)
