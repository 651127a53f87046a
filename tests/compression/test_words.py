"""Numbers as integers modulo 2^64: the bits of NumPy's int64, and sums without an order."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedmcmc.compression import Grid, Limbs, Word, host_words, limbs, limbs_of_host
from fedmcmc.compression._words import carry
from tests.support.processes import environment

GRID = Grid.of(2.0**-32, 2.0**22 - 1)


def in_numpy(x, digits):
    """Return the integers of numbers, by the definition."""
    return np.rint(np.asarray(x, np.float64) * 2.0**digits).astype(np.int64)


def sum_of(numbers, grid):
    parts = jax.vmap(lambda x: limbs(grid.encode(x)))(numbers)
    return jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0, dtype=jnp.uint32), parts)


def signed(tree):
    return host_words(tree).astype(np.int64)


def messages(num_clients, scale, num=5_000, seed=0):
    return np.random.default_rng(seed).normal(0, scale, (num_clients, num)).astype(np.float32)


def test_the_vectors_of_the_specification():
    words = host_words(Grid.of(2.0**-32, 2.0**20).encode(jnp.array([1.5, -2.25, 1e-12, 3e4])))
    assert [f"{word:016x}" for word in words] == [
        "0000000180000000",
        "fffffffdc0000000",
        "0000000000000000",
        "0000753000000000",
    ]
    back = GRID.decode(GRID.encode(jnp.array([1.5, -2.25, 1e-12, 3e4])), jnp.float32)
    assert back.tolist() == [1.5, -2.25, 0.0, 3e4]


@pytest.mark.parametrize("scale", [1e-2, 1.0, 30.0, 1e4, 4e6 / 6])
@pytest.mark.parametrize("digits", [32, 20, -3])
def test_the_bits_are_those_of_numpy(scale, digits):
    grid = Grid.of(2.0**-digits, min(2.0**22 - 1, 2.0 ** (53 - digits)))
    x = np.clip(messages(3, scale).ravel(), -grid.max_abs, grid.max_abs)
    # Halves are rounded to even, whole numbers and the largest stay what they are.
    halves = (np.arange(-9, 9) + 0.5) * 2.0**-digits
    x = np.concatenate([x, halves, [0, -0.0, grid.max_abs, -grid.max_abs]]).astype(np.float32)
    np.testing.assert_array_equal(signed(jax.jit(grid.encode)(x)), in_numpy(x, digits))


@pytest.mark.parametrize("num_clients", [1, 2, 7, 300, 2000])
def test_a_sum_is_that_of_numpy_in_any_order_and_any_split(num_clients):
    scale, grid = 4e6, Grid.of(2.0**-20, 2.0**22)
    x = np.clip(messages(num_clients, scale, 300), -grid.max_abs, grid.max_abs)
    expected = in_numpy(x, grid.digits).sum(axis=0)
    total = sum_of(x, grid)
    np.testing.assert_array_equal(signed(carry(total)), expected)
    order = np.random.default_rng(1).permutation(num_clients)
    half = num_clients // 2
    parts = [sum_of(x[some], grid) for some in (order[:half], order[half:]) if len(some)]
    added = jax.tree.map(lambda *leaves: sum(leaves), *parts)
    np.testing.assert_array_equal(signed(carry(added)), expected)
    # From the host, where a server has one integer per number.
    back = limbs_of_host(expected.astype(np.uint64), total)
    np.testing.assert_array_equal(signed(carry(back)), expected)
    np.testing.assert_array_equal(
        grid.decode(back, jnp.float32), jax.jit(lambda t: grid.decode(t, jnp.float32))(total)
    )


def test_decoding_keeps_seven_digits_on_both_sides_of_zero_and_of_two_to_the_32():
    k = np.concatenate([np.arange(-300, 300), 2**32 + np.arange(-300, 300)])
    k = np.concatenate([k, -k, [2**63 - 1, -(2**63) + 1, -(2**53) - 1]]).astype(np.int64)
    words = k.astype(np.uint64)
    like = Limbs(*3 * [jax.ShapeDtypeStruct(k.shape, jnp.uint32)])
    read = GRID.decode(limbs_of_host(words, like), jnp.float32)
    np.testing.assert_allclose(read, k * 2.0**-32, rtol=1.2e-7)


def test_the_sum_is_more_accurate_than_that_of_floats():
    x = messages(2000, 3e3, 500)
    exact = x.astype(np.float64).sum(axis=0)
    grid = Grid.of(2.0**-32, 2.0**18)
    fixed = np.asarray(grid.decode(sum_of(x, grid), jnp.float32), np.float64)
    floats = np.asarray(jnp.sum(jnp.asarray(x), axis=0), np.float64)
    assert np.abs(fixed - exact).max() < 0.5 * np.abs(floats - exact).max()


def test_sums_at_the_bound_are_exact_and_beyond_it_refused():
    num = 2**9 - 1  # 511 (2^54 + 1) < 2^63
    with pytest.raises(ValueError, match=r"below 2\*\*54"):
        Grid.of(2.0**-32, 2.0**22)
    grid = Grid.of(2.0**-32, np.nextafter(np.float32(2**22), np.float32(0)))
    grid.check(num)
    for sign in (1, -1):
        x = np.full((num, 1), sign * grid.max_abs, np.float32)
        assert signed(carry(sum_of(x, grid)))[0] == num * in_numpy(x[0], 32)[0]
    with pytest.raises(ValueError, match="may overflow"):
        grid.check(num + 2)
    with pytest.raises(ValueError, match="65536"):
        Grid.of(1.0, 1.0).check(2**16 + 1)
    Grid.of(1.0, 1.0).check(2**16)
    x = np.full((2**16, 1), -1.0, np.float32)
    assert signed(carry(sum_of(x, Grid.of(1.0, 1.0))))[0] == -(2**16)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(resolution=1e-9, max_abs=1.0), "power of two"),
        (dict(resolution=2.0**-101, max_abs=1.0), "power of two"),
        (dict(resolution=0.0, max_abs=1.0), "positive"),
        (dict(resolution=2.0**-32, max_abs=-1.0), "max_abs must be positive"),
        (dict(resolution=2.0**-32, max_abs=float("inf")), "max_abs must be positive"),
        (dict(resolution=2.0**-32, max_abs="all"), "max_abs must be a concrete number"),
    ],
)
def test_what_a_grid_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message):
        Grid.of(**settings)


def test_sixteen_bit_numbers_come_back_as_such():
    x = jnp.array([1.5, -0.25], jnp.bfloat16)
    back = GRID.decode(limbs(GRID.encode(x)), x.dtype)
    assert back.dtype == jnp.bfloat16 and back.tolist() == [1.5, -0.25]


def test_chains_are_kept_in_front_and_wrong_vectors_refused():
    tree = {"a": jnp.zeros((2, 3)), "b": jnp.ones(2)}
    coded = jax.tree.map(GRID.encode, tree)
    assert host_words(coded, num_lead=1).shape == (2, 4)
    one = jax.tree.map(
        lambda word: limbs(jax.tree.map(lambda leaf: leaf[0], word)),
        coded,
        is_leaf=lambda node: isinstance(node, Word),
    )
    back = limbs_of_host(host_words(coded, num_lead=1), one, num_lead=1)
    assert back["a"].low.shape == (2, 3) and back["b"].high.tolist() == [1, 1]
    for wrong in (np.zeros(3, np.uint64), np.zeros(4, np.int64)):
        with pytest.raises(ValueError, match=r"is \[4\] uint64"):
            limbs_of_host(wrong, one)


IN_DOUBLE = """
import jax, jax.numpy as jnp, numpy as np
from tests.compression.test_words import Grid, carry, in_numpy, messages, signed, sum_of
for digits, most in ((32, 2.0**20), (40, 2.0**13)):
    grid = Grid.of(2.0**-digits, most)
    for x in (messages(50, most / 9), messages(50, most / 9).astype(np.float64) / 3):
        total = sum_of(jnp.asarray(x), grid)
        np.testing.assert_array_equal(signed(carry(total)), in_numpy(x, digits).sum(axis=0))
        back = grid.decode(total, jnp.float64)
        exact = in_numpy(x, digits).sum(axis=0) * 2.0**-digits
        np.testing.assert_allclose(back, exact, rtol=2.0**-51)
print("same")
"""


@pytest.mark.slow
def test_double_precision_has_the_same_integers():
    env = environment() | {"JAX_ENABLE_X64": "1", "JAX_NUMPY_DTYPE_PROMOTION": "strict"}
    done = subprocess.run(
        [sys.executable, "-c", IN_DOUBLE], env=env, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "same", done.stderr[-3000:]
