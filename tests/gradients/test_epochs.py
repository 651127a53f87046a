"""Epochs and shuffles: a pass takes each row once, and all orders are equally likely."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc.random import shuffle_words, shuffled
from tests.oracles.federations import LIMIT
from tests.support.lanes import fast_and_slow

SIZES = (7, 1, 4)
DATA = fedmcmc.FederatedData.from_clients(
    [10.0 * i + jnp.arange(n, dtype=jnp.float32) for i, n in enumerate(SIZES)]
)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_all_orders_are_equally_likely(size):
    num = 60_000
    keys = jax.random.split(jax.random.key(size), num)
    orders = np.asarray(
        jax.jit(jax.vmap(lambda key: shuffled(shuffle_words(key), jnp.arange(size), size)))(keys)
    )
    np.testing.assert_array_equal(np.sort(orders, axis=1), np.tile(np.arange(size), (num, 1)))
    _, counts = np.unique(orders, axis=0, return_counts=True)
    cells = math.factorial(size)
    assert len(counts) == cells
    expected = num / cells
    chi2, free = ((counts - expected) ** 2 / expected).sum(), cells - 1
    assert size == 1 or abs(chi2 - free) / math.sqrt(2 * free) < LIMIT


def test_large_permutations_are_permutations_without_pattern():
    size, num = 1000, 200
    keys = jax.random.split(jax.random.key(0), num)
    orders = np.asarray(
        jax.vmap(lambda key: shuffled(shuffle_words(key), jnp.arange(size), size))(keys)
    )
    np.testing.assert_array_equal(np.sort(orders, axis=1), np.tile(np.arange(size), (num, 1)))
    # Steps from one entry to the next, modulo the size, are uniform on 1 .. size - 1.
    steps = np.bincount(((orders[:, 1:] - orders[:, :-1]) % size).ravel(), minlength=size)[1:]
    expected = steps.mean()
    chi2 = ((steps - expected) ** 2 / expected).sum()
    assert abs(chi2 - (size - 2)) / math.sqrt(2 * (size - 2)) < LIMIT


def loglikelihood(position, rows):
    return jax.nn.one_hot(rows.astype(int), 30) @ position


@partial(jax.jit, static_argnums=0)
def gradients_of_calls(estimator, draws, client):
    position = jnp.zeros(30)
    return jax.vmap(lambda call: estimator.estimate(loglikelihood, call, position, (), client))(
        draws
    )


def estimates(client_index, batch_size, num_calls, key=0, data=DATA):
    """Return the weight of each row in each call, from gradients of a linear function."""
    estimator, client = fedmcmc.epochs(batch_size), data.client(client_index)
    draws = estimator.prepare(jax.random.key(key), jnp.zeros(()), client, num_calls)
    return np.asarray(gradients_of_calls(estimator, draws, client))


@pytest.mark.parametrize("batch_size", fast_and_slow([1, 2, 3, 7, 9], [3]))
@pytest.mark.parametrize("index", fast_and_slow([0, 1, 2], [1]))
def test_a_pass_holds_each_row_once(index, batch_size):
    size = SIZES[index]
    steps = -(-size // batch_size)
    gradients = estimates(index, batch_size, 2 * steps)
    indices = 10 * index + np.arange(size)
    for start in (0, steps):
        used = gradients[start : start + steps] > 0
        np.testing.assert_array_equal(used.sum(0)[indices], 1)
        assert used.sum() == size
        counts = used.sum(1)
        assert counts[:-1].tolist() == [batch_size] * (steps - 1)
        # Size over the number of rows in the minibatch.
        np.testing.assert_allclose(gradients[start : start + steps].sum(1), size, rtol=1e-6)
    if size > batch_size:
        passes = [estimates(index, batch_size, steps, key=k).tobytes() for k in range(4)]
        assert len(set(passes)) > 1


def test_keys_and_prepared_rows_give_the_same_batches(monkeypatch):
    ahead = estimates(0, 2, 8)
    monkeypatch.setattr("fedmcmc.gradients._minibatches.MAX_PREPARED_OFFSETS", 1)
    np.testing.assert_array_equal(estimates(0, 2, 8), ahead)


def test_orders_do_not_depend_on_the_other_clients():
    alone = fedmcmc.FederatedData.from_clients([jnp.arange(7.0)])
    np.testing.assert_array_equal(estimates(0, 2, 8, data=alone), estimates(0, 2, 8))


def test_bad_batch_sizes_are_named():
    for bad in (0, -1, 1.5):
        with pytest.raises(ValueError, match="batch_size must be a positive integer"):
            fedmcmc.epochs(bad)
