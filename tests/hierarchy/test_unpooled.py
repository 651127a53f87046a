"""What each group's rows say alone, and the figure of how far groups are drawn to the others."""

import arviz_plots
import jax
import numpy as np
import numpyro
import pytest
from numpyro import distributions as dist

import fedmcmc
from fedmcmc import hierarchy
from tests.hierarchy.models import SD, clients, gaussian, in_two_clients, logistic

KEY, NUM, LIMIT = jax.random.key(0), 1000, 5.0
SLOPE = 0.3
SHARED = {"mu": np.full((1, NUM), 2.0), "slope": np.full((1, NUM), SLOPE)}


def drawn(model, data, shared, how=hierarchy.unpooled):
    return how(fedmcmc.from_numpyro(model, example=data), data, shared, rng_key=KEY)


@pytest.mark.slow
def test_draws_are_those_of_the_groups_own_rows():
    own = clients()
    found = drawn(gaussian, fedmcmc.FederatedData.from_clients(own), SHARED)
    draws = np.float64(found.draws["effect"])[0, :, :, 0]
    mean = np.array([np.mean(group["y"] - SLOPE * group["x"]) for group in own])
    sd = SD / np.sqrt([len(group["x"]) for group in own])
    assert np.abs((draws.mean(0) - mean) / sd).max() * np.sqrt(NUM) < LIMIT
    assert np.abs(draws.std(0) / sd - 1).max() * np.sqrt(2 * NUM) < LIMIT


@pytest.mark.slow
def test_a_group_whose_outcomes_are_all_alike_has_none():
    own = clients("logistic")
    own[2]["y"][:] = 1
    data = fedmcmc.FederatedData.from_clients({f"clinic {i}": rows for i, rows in enumerate(own)})
    shared = {"tau": np.zeros((1, 40)), "slope": np.full((1, 40), SLOPE)}
    alone = drawn(logistic, data, shared)
    open_ = np.isnan(alone.draws["effect"]).all((0, 1))[:, 0]
    alike = [len(set(rows["y"].tolist())) == 1 for rows in own]
    np.testing.assert_array_equal(open_, alike)
    assert 1 < sum(alike) < len(own)
    tree = alone.to_datatree()
    assert tree.posterior["effect"].dims == ("chain", "draw", "group")
    assert tree.posterior["group"].values[1] == "clinic 1"


def two_effects(x, y=None):
    sds = numpyro.sample("sds", dist.HalfNormal(1).expand([2]).to_event(1))
    own = numpyro.sample("own", dist.Normal(0, sds).to_event(1), infer={"local": True})
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Normal(own[0] + own[1] * x, SD), obs=y)


@pytest.mark.slow
def test_effects_of_several_numbers_and_groups_are_in_a_figure(tmp_path):
    """Two numbers take two rows; beside the other groups one does, too."""
    data, shared = in_two_clients(clients()), {"sds": np.zeros((1, 50, 2))}
    found = drawn(two_effects, data, shared)
    rows = np.bincount(np.asarray(data.rows.group)[: int(data.start[1])])
    np.testing.assert_array_equal(np.isfinite(found.draws["own"]).all((0, 1, 4))[0], rows > 1)
    tree = found.to_datatree()
    assert tree.posterior["own"].shape == (1, 50, 5, 2)
    assert tree.posterior["group"].values.tolist()[3] == "1, group 0"
    together = drawn(two_effects, data, shared, fedmcmc.local_draws)
    there = np.isfinite(together.draws["own"]).all((0, 1, 4))
    np.testing.assert_array_equal(there, together.mask)
    for given in ((together,), (together, found)):
        figure = hierarchy.forest(*given)
        assert isinstance(figure, arviz_plots.PlotCollection)
        figure.savefig(tmp_path / "forest.png")
        assert (tmp_path / "forest.png").stat().st_size > 10_000
