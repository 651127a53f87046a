"""Items some at a time: the same values, and one program."""

import jax.numpy as jnp
import numpy as np
import pytest

from fedmcmc.pytrees import trees


@pytest.mark.parametrize("size", [1, 2, 5, 9])
def test_lots_are_filled_up_and_cut_again(size):
    items = {"a": jnp.arange(5.0), "b": jnp.arange(10.0).reshape(5, 2)}
    traced = []

    def fn(item):
        traced.append(item["b"].shape)
        return item["a"] + item["b"].sum(), item["b"]

    total, same = trees.map_in_batches(fn, items, size)
    np.testing.assert_array_equal(total, items["a"] + items["b"].sum(1))
    np.testing.assert_array_equal(same, items["b"])
    assert traced == [(2,)]  # a last lot of another size would be traced again
