"""Draws of groups' latents given the shared parameters, and their labels."""

from functools import cache

import jax
import numpy as np
import pandas as pd
import pytest

import fedmcmc
from fedmcmc import hierarchy
from fedmcmc.data import group_name, labels_of
from fedmcmc.hierarchy._local_draws import warn_of_few_accepted
from fedmcmc.runs import SimulatedConsortium
from tests.hierarchy.models import SD, SPREAD, clients, gaussian
from tests.support.lanes import fast_and_slow

NUM, MU, SLOPE = 4000, 0.4, -0.2
SHARED = {"mu": np.full((1, NUM), MU), "slope": np.full((1, NUM), SLOPE)}
TABLE = pd.DataFrame(
    {
        "hospital": ["Chur", "Bern", "Bern", "Chur", "Bern", "Bern", "Chur"],
        "patient": ["P9", "P2", "P1", "P9", "P2", "P7", "P9"],
        "x": [0.1, 0.4, -0.3, 0.8, 1.2, -0.5, 0.0],
        "y": [1.0, -2.0, 3.0, 1.5, -2.5, 0.5, 0.7],
    }
)


@cache
def draw(centered=0.0):
    data = fedmcmc.FederatedData.from_dataframe(TABLE, client="hospital", groups="patient")
    posterior = fedmcmc.from_numpyro(gaussian, example=data, centered=centered)
    return data, fedmcmc.local_draws(posterior, data, SHARED, rng_key=jax.random.key(0))


@pytest.mark.parametrize("centered", fast_and_slow([0.0, 1.0], fast=[0.0]))
def test_draws_follow_a_gaussian_conditional(centered):
    """Given what they share, groups are independent, within a client and between clients."""
    _, latents = draw(centered)
    assert latents.mask.tolist() == [[True, True, True], [True, False, False]]
    effects = latents.draws["effect"][0][:, latents.mask]
    entries = latents.summary()
    for entry, draws in zip(entries, effects.T, strict=True):
        rows = TABLE[(TABLE.hospital == entry["client"]) & (TABLE.patient == entry["group"])]
        precision = len(rows) / SD**2 + 1 / SPREAD**2
        mean = (np.sum(rows.y - SLOPE * rows.x) / SD**2 + MU / SPREAD**2) / precision
        assert abs(draws.mean() - mean) * np.sqrt(precision * NUM) < 4
        np.testing.assert_allclose(draws.std() * np.sqrt(precision), 1, rtol=0.05)
        np.testing.assert_allclose(entry["mean"], draws.mean(dtype=float), rtol=1e-5)
        np.testing.assert_allclose(entry["sd"], draws.std(dtype=float), rtol=1e-5)
    np.testing.assert_allclose(np.corrcoef(effects.T), np.eye(4), atol=4.5 / np.sqrt(NUM))


def test_draws_have_labels_and_are_nan_for_groups_that_do_not_exist():
    _, latents = draw()
    effects = latents.draws["effect"]
    assert effects.dtype == np.float32 and np.isfinite(effects[..., latents.mask]).all()
    assert np.isnan(effects[..., ~latents.mask]).all()
    assert np.isnan(latents.acceptance[~latents.mask]).all()
    assert latents.labels == ("Bern", "Chur")
    assert latents.group_labels == (("P2", "P1", "P7"), ("P9",))
    assert [(entry["client"], entry["group"], entry["name"]) for entry in latents.summary()] == [
        ("Bern", "P2", "effect"),
        ("Bern", "P1", "effect"),
        ("Bern", "P7", "effect"),
        ("Chur", "P9", "effect"),
    ]
    names = latents.to_datatree().posterior["group"].values.tolist()
    assert names == ["Bern, group P2", "Bern, group P1", "Bern, group P7", "Chur, group P9"]


def test_unpooled_draws_of_clients_without_groups_have_the_labels_of_clients():
    data = fedmcmc.FederatedData.from_clients(
        {"Bern": {"x": np.zeros(2), "y": np.ones(2)}, "Chur": {"x": np.zeros(3), "y": np.ones(3)}}
    )
    posterior = fedmcmc.from_numpyro(gaussian, example=data)
    shared = {"mu": np.zeros((1, 50)), "slope": np.zeros((1, 50))}
    latents = hierarchy.unpooled(posterior, data, shared, rng_key=jax.random.key(0))
    assert latents.group_labels is None and latents.mask.all()
    labels = [(entry["client"], entry["group"]) for entry in latents.summary()]
    assert labels == [("Bern", None), ("Chur", None)]
    assert latents.to_datatree().posterior["group"].values.tolist() == ["Bern", "Chur"]


def test_messages_name_a_group_by_its_labels():
    data, latents = draw()
    rare = latents._replace(acceptance=np.where(latents.mask, 0.9, np.nan))
    rare.acceptance[0, 2] = 0.1
    with pytest.warns(UserWarning, match="10% of the proposals for group 'P7' of client 'Bern'"):
        warn_of_few_accepted(rare, rare.mask, data)
    assert group_name((1, 2), ((7,), (8, 9)), 1, 1) == "group 9 of client 2"
    assert group_name((1, 2), ((7,), (8, 9)), 0, 5) == "group 5 of client 1"
    assert labels_of(SimulatedConsortium(data)) == ("Bern", "Chur")


def test_posteriors_without_latents_raise():
    data = fedmcmc.FederatedData.from_clients(clients())
    posterior = fedmcmc.marginal(fedmcmc.from_numpyro(gaussian, example=data))
    with pytest.raises(ValueError, match="marginal"):
        fedmcmc.local_draws(posterior, data, SHARED, rng_key=jax.random.key(0))
    with pytest.raises(ValueError, match="no latents of groups to draw"):
        hierarchy.new_group(posterior, data, SHARED, rng_key=jax.random.key(1))
