"""Draws of groups' latents carry labels, and are NaN for groups that do not exist."""

import jax
import numpy as np
import pandas as pd
import pytest

import fedmcmc
from fedmcmc import hierarchy
from fedmcmc.data import group_name, labels_of
from fedmcmc.hierarchy._local_draws import warn_of_few_accepted
from fedmcmc.runs import SimulatedConsortium
from tests.hierarchy.models import SD, SPREAD, gaussian

TABLE = pd.DataFrame(
    {
        "hospital": ["Chur", "Bern", "Bern", "Chur", "Bern", "Bern", "Chur"],
        "patient": ["P9", "P2", "P1", "P9", "P2", "P7", "P9"],
        "x": [0.1, 0.4, -0.3, 0.8, 1.2, -0.5, 0.0],
        "y": [1.0, -2.0, 3.0, 1.5, -2.5, 0.5, 0.7],
    }
)


@pytest.fixture(scope="module")
def drawn():
    data = fedmcmc.FederatedData.from_dataframe(TABLE, client="hospital", groups="patient")
    posterior = fedmcmc.from_numpyro(gaussian, example=data)
    shared = {"mu": np.full((1, 4000), 0.4), "slope": np.full((1, 4000), -0.2)}
    return data, fedmcmc.local_draws(posterior, data, shared, rng_key=jax.random.key(0))


def conditional_mean(rows):
    precision = len(rows) / SD**2 + 1 / SPREAD**2
    mean = (np.sum(rows.y + 0.2 * rows.x) / SD**2 + 0.4 / SPREAD**2) / precision
    return mean, 1 / np.sqrt(precision)


def test_groups_that_do_not_exist_are_nan(drawn):
    _, own = drawn
    assert own.mask.tolist() == [[True, True, True], [True, False, False]]
    effects = own.draws["effect"]
    assert effects.dtype == np.float32 and np.isfinite(effects[..., own.mask]).all()
    assert np.isnan(effects[..., ~own.mask]).all() and np.isnan(own.acceptance[~own.mask]).all()


def test_the_summary_has_the_labels_and_moments_of_each_group(drawn):
    _, own = drawn
    assert own.labels == ("Bern", "Chur") and own.group_labels == (("P2", "P1", "P7"), ("P9",))
    found = own.summary()
    assert [(x["client"], x["group"], x["name"]) for x in found] == [
        ("Bern", "P2", "effect"),
        ("Bern", "P1", "effect"),
        ("Bern", "P7", "effect"),
        ("Chur", "P9", "effect"),
    ]
    for entry in found:
        rows = TABLE[(TABLE.hospital == entry["client"]) & (TABLE.patient == entry["group"])]
        mean, sd = conditional_mean(rows)
        assert abs(entry["mean"] - mean) < 4 * sd / np.sqrt(4000)
        assert entry["sd"] == pytest.approx(sd, rel=0.06)
    names = own.to_datatree().posterior["group"].values.tolist()
    assert names == ["Bern, group P2", "Bern, group P1", "Bern, group P7", "Chur, group P9"]


def test_clients_of_one_group_each_have_no_labels_of_groups(drawn):
    data = fedmcmc.FederatedData.from_clients(
        {"Bern": {"x": np.zeros(2), "y": np.ones(2)}, "Chur": {"x": np.zeros(3), "y": np.ones(3)}}
    )
    posterior = fedmcmc.from_numpyro(gaussian, example=data)
    shared = {"mu": np.zeros((1, 50)), "slope": np.zeros((1, 50))}
    own = fedmcmc.local_draws(posterior, data, shared, rng_key=jax.random.key(0))
    assert own.group_labels is None and own.mask.all()
    assert [(x["client"], x["group"]) for x in own.summary()] == [("Bern", None), ("Chur", None)]
    assert own.to_datatree().posterior["group"].values.tolist() == ["Bern", "Chur"]


def test_messages_name_a_group_by_its_labels(drawn):
    data, own = drawn
    rare = own._replace(acceptance=np.where(own.mask, 0.9, np.nan))
    rare.acceptance[0, 2] = 0.1
    with pytest.warns(UserWarning, match="10% of the proposals for group 'P7' of client 'Bern'"):
        warn_of_few_accepted(rare, rare.mask, data)
    assert group_name((1, 2), ((7,), (8, 9)), 1, 1) == "group 9 of client 2"
    assert group_name((1, 2), ((7,), (8, 9)), 0, 5) == "group 5 of client 1"
    assert labels_of(SimulatedConsortium(data)) == ("Bern", "Chur")


def test_unpooled_draws_have_the_labels_too(drawn):
    data, _ = drawn
    posterior = fedmcmc.from_numpyro(gaussian, example=data)
    shared = {"mu": np.full((1, 50), 0.4), "slope": np.full((1, 50), -0.2)}
    alone = hierarchy.unpooled(posterior, data, shared, rng_key=jax.random.key(0))
    assert alone.group_labels == (("P2", "P1", "P7"), ("P9",))
    assert np.isnan(alone.draws["effect"][..., ~alone.mask]).all()
