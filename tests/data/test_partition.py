"""Splits of rows over clients: what each promises about sizes and labels."""

import jax
import numpy as np
import pytest

from fedmcmc import partition

KEY = jax.random.key(3)
LABELS = np.random.default_rng(0).integers(0, 10, 1003)

SPLITS = {
    "iid": lambda key: partition.iid(key, 1003, 7),
    "dirichlet": lambda key: partition.dirichlet(key, LABELS, 7, 0.3),
    "dominant_label": lambda key: partition.dominant_label(key, LABELS, 7, 0.8),
    "disjoint_labels": lambda key: partition.disjoint_labels(key, LABELS, 7),
    "quantity_skew": lambda key: partition.quantity_skew(key, 1003, 7, 0.3),
}


@pytest.mark.parametrize("name", SPLITS)
def test_every_row_has_a_client_and_every_client_a_row(name):
    ids = SPLITS[name](KEY)
    assert ids.shape == (1003,) and ids.dtype == np.int32
    assert np.unique(ids).tolist() == list(range(7))


@pytest.mark.parametrize("name", SPLITS)
def test_a_split_is_a_function_of_its_key(name):
    split = SPLITS[name]
    np.testing.assert_array_equal(split(KEY), split(KEY))
    assert (split(KEY) != split(jax.random.key(4))).any()


def test_old_style_keys_give_the_same_split():
    new, old = jax.random.key(5), jax.random.PRNGKey(5)
    np.testing.assert_array_equal(partition.iid(new, 20, 3), partition.iid(old, 20, 3))


@pytest.mark.parametrize("name", ["iid", "dominant_label"])
def test_equal_sizes(name):
    sizes = np.bincount(SPLITS[name](KEY))
    assert sizes.max() - sizes.min() <= 1


def test_iid_does_not_depend_on_the_order_of_rows():
    # Labels sorted by class: each client's share of a class is that of a random draw.
    labels = np.repeat(np.arange(2), 5000)
    ids = partition.iid(KEY, 10_000, 10)
    shares = np.array([labels[ids == c].mean() for c in range(10)])
    assert np.abs(shares - 0.5).max() < 5 * np.sqrt(0.25 / 1000)


def test_dirichlet_shares_have_the_law_of_the_concentration():
    labels = np.zeros(5000, int)
    for concentration in (0.5, 50.0):
        keys = jax.random.split(KEY, 200)
        sizes = [np.bincount(partition.dirichlet(k, labels, 4, concentration)) for k in keys]
        variance = np.var(np.array(sizes) / 5000)
        expected = (1 / 4) * (3 / 4) / (4 * concentration + 1)
        assert 0.75 * expected < variance < 1.3 * expected


def test_dirichlet_keeps_every_client_above_min_rows():
    ids = partition.dirichlet(KEY, LABELS, 7, 0.3, min_rows=50)
    assert np.bincount(ids).min() >= 50


def test_dominant_label_dominates():
    labels = np.repeat(np.arange(5), 400)
    ids = partition.dominant_label(KEY, labels, 5, 0.7)
    for client in range(5):
        shares = np.bincount(labels[ids == client], minlength=5) / np.sum(ids == client)
        assert shares.argmax() == client and shares[client] >= 0.7
    # The rest is spread over all labels, the dominant one included: 0.7 + 0.3 / 5 = 0.76.
    assert abs(np.mean(labels == ids) - 0.76) < 0.03


def test_dominant_label_of_everything_and_of_nothing():
    labels = np.repeat(np.arange(5), 400)
    np.testing.assert_array_equal(partition.dominant_label(KEY, labels, 5, 1.0), labels)
    ids = partition.dominant_label(KEY, labels, 5, 0.0)
    assert abs(np.mean(labels == ids) - 0.2) < 0.05


def test_dominant_label_when_the_label_runs_out():
    labels = np.r_[np.zeros(10, int), np.ones(990, int)]
    ids = partition.dominant_label(KEY, labels, 2, 0.9)
    assert np.bincount(ids).tolist() == [500, 500]
    assert (labels[ids == 0] == 0).sum() == 10


def test_disjoint_labels_share_none_and_are_spread_evenly():
    ids = partition.disjoint_labels(KEY, LABELS, 4)
    owners = [np.unique(ids[label == LABELS]) for label in range(10)]
    assert all(len(owner) == 1 for owner in owners)
    assert sorted(np.bincount(np.concatenate(owners))) == [2, 2, 3, 3]


def test_labels_need_not_be_numbers():
    words = np.array(["b", "a", "c"])[LABELS % 3]
    same = partition.disjoint_labels(KEY, LABELS % 3, 3)
    relabelled = partition.disjoint_labels(KEY, words, 3)
    assert sorted(np.bincount(same)) == sorted(np.bincount(relabelled))


def test_quantity_skew_follows_its_concentration():
    sizes = {c: np.bincount(partition.quantity_skew(KEY, 10_000, 20, c)) for c in (0.1, 1000.0)}
    assert sizes[0.1].std() > 10 * sizes[1000.0].std()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: partition.iid(KEY, 3, 4), "3 rows cannot give each of 4 clients"),
        (lambda: partition.iid(KEY, 3, 0), "num_clients must be a positive integer"),
        (lambda: partition.dirichlet(KEY, LABELS, 7, 0.0), "concentration must be positive"),
        (lambda: partition.dirichlet(KEY, LABELS, 7, float("nan")), "concentration must be"),
        (lambda: partition.dirichlet(KEY, LABELS, 7, 1.0, min_rows=500), "min_rows must be"),
        (
            lambda: partition.dirichlet(KEY, LABELS, 200, 0.001, max_tries=2),
            "None of 2 draws gave each of 200 clients",
        ),
        (lambda: partition.dominant_label(KEY, LABELS, 7, 1.5), r"proportion must lie in \[0, 1\]"),
        (lambda: partition.disjoint_labels(KEY, LABELS, 11), "there are only 10"),
        (lambda: partition.disjoint_labels(KEY, LABELS[:, None], 2), "labels must be one per row"),
        (lambda: partition.quantity_skew(KEY, 10, 2, -1.0), "concentration must be positive"),
    ],
)
def test_clear_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()
