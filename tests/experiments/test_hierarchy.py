"""Hierarchical models of real data: each group is a client, and the funnel's grid is exact."""

import numpy as np
import pytest

from experiments import loaders
from experiments.data import DataNotFound
from experiments.special import hierarchy

CLIENTS = {"radon": 85, "exam": 65, "schools": 160, "contraception": 60, "immunization": 161}


@pytest.mark.parametrize("name", CLIENTS)
def test_groups_are_clients(name):
    try:
        data, _ = getattr(loaders, name)()
    except DataNotFound as error:
        pytest.skip(str(error))
    assert data.num_clients == CLIENTS[name]


def test_the_grid_of_the_funnel_is_bayes_rule():
    """Many rows of hospitals that differ much: `mu` and `tau` are those of the effects."""
    effects = np.random.default_rng(0).normal(0.4, 0.5, 200)
    mean, sd = hierarchy.exact([np.full(400, effect) for effect in effects])
    np.testing.assert_allclose(mean, [effects.mean(), np.log(effects.std())], atol=0.01)
    np.testing.assert_allclose(sd, [effects.std() / 200**0.5, 1 / 400**0.5], rtol=0.03)
