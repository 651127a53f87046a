"""Maps over items of trees."""

import chex
import jax.numpy as jnp
import pytest

from fedmcmc.pytrees import trees


@pytest.mark.parametrize("size", [1, 2, 5, 9])
def test_a_map_in_lots_equals_a_map_and_traces_a_single_lot(size):
    """The last lot is filled up: with another size it would be traced again."""
    items = {"a": jnp.arange(5.0), "b": jnp.arange(10.0).reshape(5, 2)}
    shapes = []

    def fn(item):
        shapes.append(item["b"].shape)
        return item["a"] + item["b"].sum(), item["b"]

    result = trees.map_in_batches(fn, items, size)
    assert shapes == [(2,)]
    chex.assert_trees_all_equal(result, (items["a"] + items["b"].sum(1), items["b"]))
