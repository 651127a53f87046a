"""Latents of groups given their own rows alone, and the figure of the shrinkage."""

import arviz_plots
import jax
import numpy as np
import numpyro
import pytest
from numpyro import distributions as dist

import fedmcmc
from fedmcmc import hierarchy
from tests.hierarchy.models import SD, clients, gaussian, in_two_clients, logistic

NUM, LIMIT = 1000, 5.0
SLOPE = 0.3
SHARED = {"mu": np.full((1, NUM), 2.0), "slope": np.full((1, NUM), SLOPE)}


def draw(model, data, shared, method=hierarchy.unpooled):
    posterior = fedmcmc.from_numpyro(model, example=data)
    return method(posterior, data, shared, rng_key=jax.random.key(0))


@pytest.mark.slow
def test_draws_are_those_of_the_groups_own_rows():
    groups = clients()
    latents = draw(gaussian, fedmcmc.FederatedData.from_clients(groups), SHARED)
    draws = np.float64(latents.draws["effect"])[0, :, :, 0]
    mean = np.array([np.mean(group["y"] - SLOPE * group["x"]) for group in groups])
    sd = SD / np.sqrt([len(group["x"]) for group in groups])
    assert np.abs((draws.mean(0) - mean) / sd).max() * np.sqrt(NUM) < LIMIT
    assert np.abs(draws.std(0) / sd - 1).max() * np.sqrt(2 * NUM) < LIMIT


@pytest.mark.slow
def test_a_group_of_equal_outcomes_has_no_draws():
    groups = clients("logistic")
    groups[2]["y"][:] = 1
    data = fedmcmc.FederatedData.from_clients({f"clinic {i}": x for i, x in enumerate(groups)})
    shared = {"tau": np.zeros((1, 40)), "slope": np.full((1, 40), SLOPE)}
    latents = draw(logistic, data, shared)
    is_missing = np.isnan(latents.draws["effect"]).all((0, 1))[:, 0]
    are_equal = [len(set(rows["y"].tolist())) == 1 for rows in groups]
    np.testing.assert_array_equal(is_missing, are_equal)
    assert 1 < sum(are_equal) < len(groups)
    tree = latents.to_datatree()
    assert tree.posterior["effect"].dims == ("chain", "draw", "group")
    assert tree.posterior["group"].values[1] == "clinic 1"


def two_effects(x, y=None):
    sds = numpyro.sample("sds", dist.HalfNormal(1).expand([2]).to_event(1))
    effects = dist.Normal(0, sds).to_event(1)
    effect = numpyro.sample("effect", effects, infer={"local": True})
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Normal(effect[0] + effect[1] * x, SD), obs=y)


@pytest.mark.slow
def test_the_figure_shows_effects_of_several_numbers_and_groups(tmp_path):
    """Two numbers need two rows if the group is alone; a group with a population needs none."""
    data, shared = in_two_clients(clients()), {"sds": np.zeros((1, 50, 2))}
    alone = draw(two_effects, data, shared)
    num_rows = np.bincount(np.asarray(data.rows.group)[: int(data.start[1])])
    exists = np.isfinite(alone.draws["effect"]).all((0, 1, 4))
    np.testing.assert_array_equal(exists[0], num_rows > 1)
    tree = alone.to_datatree()
    assert tree.posterior["effect"].shape == (1, 50, 5, 2)
    assert tree.posterior["group"].values.tolist()[3] == "1, group group 4"
    pooled = draw(two_effects, data, shared, fedmcmc.local_draws)
    exists = np.isfinite(pooled.draws["effect"]).all((0, 1, 4))
    np.testing.assert_array_equal(exists, pooled.mask)
    for latents in ((pooled,), (pooled, alone)):
        figure = hierarchy.forest(*latents)
        assert isinstance(figure, arviz_plots.PlotCollection)
        figure.savefig(tmp_path / "forest.png")
        assert (tmp_path / "forest.png").stat().st_size > 10_000
