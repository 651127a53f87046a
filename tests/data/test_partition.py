"""Splits of rows over clients: sizes, labels and randomness."""

from functools import partial

import jax
import numpy as np
import pytest

from fedmcmc import partition

KEY = jax.random.key(3)
LABELS = np.random.default_rng(0).integers(0, 10, 1003)
SORTED = np.repeat(np.arange(5), 400)

SPLITS = {
    "iid": lambda key: partition.iid(key, 1003, 7),
    "dirichlet": lambda key: partition.dirichlet(key, LABELS, 7, 0.3),
    "dominant_label": lambda key: partition.dominant_label(key, LABELS, 7, 0.8),
    "disjoint_labels": lambda key: partition.disjoint_labels(key, LABELS, 7),
    "quantity_skew": lambda key: partition.quantity_skew(key, 1003, 7, 0.3),
}


@pytest.mark.parametrize("name", SPLITS)
def test_a_split_is_a_function_of_its_key_and_leaves_no_client_empty(name):
    split = SPLITS[name]
    ids = split(KEY)
    assert ids.shape == (1003,) and ids.dtype == np.int32
    assert np.unique(ids).tolist() == list(range(7))
    np.testing.assert_array_equal(ids, split(KEY))
    assert (ids != split(jax.random.key(4))).any()
    if name in ("iid", "dominant_label"):
        assert np.ptp(np.bincount(ids)) <= 1


def test_raw_keys_give_the_same_split():
    typed, raw = jax.random.key(5), jax.random.PRNGKey(5)
    np.testing.assert_array_equal(partition.iid(typed, 20, 3), partition.iid(raw, 20, 3))


def test_iid_does_not_depend_on_the_order_of_rows():
    labels = np.repeat(np.arange(2), 5000)
    ids = partition.iid(KEY, 10_000, 10)
    shares = np.array([labels[ids == c].mean() for c in range(10)])
    assert np.abs(shares - 0.5).max() < 5 * np.sqrt(0.25 / 1000)


def test_dirichlet_shares_have_the_variance_of_the_concentration():
    labels = np.zeros(5000, int)
    for concentration in (0.5, 50.0):
        keys = jax.random.split(KEY, 200)
        sizes = [np.bincount(partition.dirichlet(k, labels, 4, concentration)) for k in keys]
        variance = np.var(np.array(sizes) / 5000)
        expected = (1 / 4) * (3 / 4) / (4 * concentration + 1)
        assert 0.75 * expected < variance < 1.3 * expected
    assert np.bincount(partition.dirichlet(KEY, LABELS, 7, 0.3, min_rows=50)).min() >= 50


def test_a_dominant_label_has_its_proportion():
    """The remaining rows have all labels, including the dominant label."""
    ids = partition.dominant_label(KEY, SORTED, 5, 0.7)
    for client in range(5):
        shares = np.bincount(SORTED[ids == client], minlength=5) / np.sum(ids == client)
        assert shares.argmax() == client and shares[client] >= 0.7
    assert abs(np.mean(ids == SORTED) - 0.76) < 0.03
    np.testing.assert_array_equal(partition.dominant_label(KEY, SORTED, 5, 1.0), SORTED)
    assert abs(np.mean(partition.dominant_label(KEY, SORTED, 5, 0.0) == SORTED) - 0.2) < 0.05


def test_a_dominant_label_may_run_out():
    labels = np.r_[np.zeros(10, int), np.ones(990, int)]
    ids = partition.dominant_label(KEY, labels, 2, 0.9)
    assert np.bincount(ids).tolist() == [500, 500]
    assert (labels[ids == 0] == 0).sum() == 10


@pytest.mark.parametrize("labels", [LABELS, np.array(list("jihgfedcba"))[LABELS]])
def test_disjoint_labels_are_spread_evenly(labels):
    ids = partition.disjoint_labels(KEY, labels, 4)
    clients = [np.unique(ids[label == labels]) for label in np.unique(labels)]
    assert all(len(client) == 1 for client in clients)
    assert sorted(np.bincount(np.concatenate(clients))) == [2, 2, 3, 3]


def test_quantity_skew_follows_its_concentration():
    sizes = {c: np.bincount(partition.quantity_skew(KEY, 10_000, 20, c)) for c in (0.1, 1000.0)}
    assert sizes[0.1].std() > 10 * sizes[1000.0].std()


@pytest.mark.parametrize(
    ("split", "arguments", "message"),
    [
        (partition.iid, (3, 4), "3 rows cannot give each of 4 clients"),
        (partition.iid, (3, 0), "num_clients must be a positive integer"),
        (partition.dirichlet, (LABELS, 7, 0.0), "concentration must be a positive number"),
        (partition.dirichlet, (LABELS, 7, float("nan")), "concentration must be"),
        (partial(partition.dirichlet, min_rows=500), (LABELS, 7, 1.0), "min_rows must be"),
        (
            partial(partition.dirichlet, max_tries=2),
            (LABELS, 200, 0.001),
            "None of 2 draws gave each of 200 clients",
        ),
        (partition.dominant_label, (LABELS, 7, 1.5), r"proportion must lie in \[0, 1\]"),
        (partition.disjoint_labels, (LABELS, 11), "there are only 10"),
        (partition.disjoint_labels, (LABELS[:, None], 2), "labels must be one per row"),
        (partition.quantity_skew, (10, 2, -1.0), "concentration must be a positive number"),
    ],
)
def test_invalid_arguments_raise(split, arguments, message):
    with pytest.raises(ValueError, match=message):
        split(KEY, *arguments)
