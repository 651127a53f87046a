"""The bits that are counted inside jit, against codewords spelled out one by one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedmcmc.compression import Dense, Quantized, Sparse, message_bits
from fedmcmc.compression._bounds import bound_bits
from fedmcmc.compression._elias import code_length, gap_lengths
from tests.oracles import omega

CODEWORDS = {
    1: "0",
    2: "100",
    3: "110",
    4: "101000",
    7: "101110",
    8: "1110000",
    15: "1111110",
    16: "10100100000",
}
# l(n) of the least and the greatest n of each length.
LENGTHS = {
    (1, 1): 1,
    (2, 3): 3,
    (4, 7): 6,
    (8, 15): 7,
    (16, 31): 11,
    (32, 63): 12,
    (64, 127): 13,
    (128, 255): 14,
    (256, 511): 16,
    (1024, 1024): 18,
    (65536, 65536): 28,
}


many_bits = jax.jit(jax.vmap(message_bits))
jitted_bits, jitted_gaps = jax.jit(message_bits), jax.jit(gap_lengths)


def length_by_loop(sent):
    return sum(len(omega.omega(int(gap))) for gap in np.diff(np.flatnonzero(sent), prepend=-1))


def bits(code):
    return int(jitted_bits(code))


def test_the_oracle_has_the_published_codewords():
    assert {n: omega.omega(n) for n in CODEWORDS} == CODEWORDS


def test_code_lengths_are_those_of_the_codewords():
    for (low, high), length in LENGTHS.items():
        assert code_length(jnp.array([low, high])).tolist() == [length, length]
    powers = [2**m + shift for m in range(31) for shift in (-1, 0, 1)]
    numbers = np.unique([*range(1, 2000), *powers[1:], 2**31 - 1])
    actual = jax.jit(code_length)(jnp.asarray(numbers[numbers > 0], jnp.int32))
    assert actual.tolist() == [len(omega.omega(int(n))) for n in numbers if n > 0]


@pytest.mark.slow
@given(
    st.sampled_from([1, 2, 3, 5, 31, 32, 33, 64, 127, 300]).flatmap(
        lambda size: arrays(bool, size, elements=st.booleans() | st.just(False))
    )
)
@settings(deadline=None, max_examples=100)
def test_gaps_agree_with_a_loop(sent):
    assert int(jitted_gaps(jnp.asarray(sent))) == length_by_loop(sent)


@pytest.mark.parametrize("size", [1, 2, 32, 33, 1024, 1025, 7850])
def test_a_single_gap_has_the_length_of_its_codeword(size):
    places = np.unique(np.minimum(size - 1, [0, 1, 2, 3, 7, 30, 31, 32, 63, 64, 511, 1023, size]))
    sent = jnp.arange(size) == jnp.asarray(places)[:, None]
    expected = [len(omega.omega(int(place) + 1)) for place in places]
    assert jax.jit(jax.vmap(gap_lengths))(sent).tolist() == expected


def test_gaps_may_exceed_the_integers_of_float32():
    size = 2**24 + 2
    sent = np.zeros(size, bool)
    sent[-1] = True
    assert int(jitted_gaps(jnp.asarray(sent))) == len(omega.omega(size))


def test_an_empty_message_has_no_gaps():
    assert int(jitted_gaps(jnp.zeros(0, bool))) == 0 == int(jitted_gaps(jnp.zeros(70, bool)))


@pytest.mark.parametrize("density", [0.003, 0.05, 0.3, 1.0])
@pytest.mark.parametrize("largest", [1, 16, 300, 70_000, 2**23])
def test_messages_have_the_length_of_their_codewords(density, largest):
    rng = np.random.default_rng(largest)
    levels = rng.integers(-largest, largest + 1, (6, 500)) * (rng.random((6, 500)) < density)
    levels = levels.astype(np.int32)
    norms = np.array([1.5, 0, -0.0, 3e-39, np.nan, np.inf], np.float32)
    actual = many_bits(Quantized(jnp.asarray(norms), jnp.asarray(levels)))
    # A subnormal norm counts as zero.
    expected = [
        len(omega.message(Quantized(np.float32(0 if n == np.float32(3e-39) else n), k)))
        for n, k in zip(norms, levels, strict=True)
    ]
    assert actual.tolist() == expected


def test_leaves_of_one_size_have_their_own_norms_and_gaps():
    rng = np.random.default_rng(2)
    shapes = [(40,), (8, 5), (7,), (40,), (7,)]
    densities = [0.1, 0.9, 0.3, 0.0, 1.0]
    levels = tuple(
        (rng.integers(-9, 10, shape) * (rng.random(shape) < density)).astype(np.int32)
        for shape, density in zip(shapes, densities, strict=True)
    )
    norms = tuple(np.float32([2.0, 1.5, 1.0, 3.0, 0.0]))
    code = Quantized(norms, levels)
    assert bits(code) == len(omega.message(code))


def test_leaves_have_a_common_norm_or_their_own():
    rng = np.random.default_rng(0)
    levels = {
        "a": rng.integers(-3, 4, (4, 5)).astype(np.int32),
        "b": np.int32(2),
        "c": (rng.random(40) < 0.1).astype(np.int32),
    }
    norm = np.float32(2.0)
    norms = {"a": norm, "b": np.float32(0), "c": norm}
    for code in (Quantized(norm, levels), Quantized(norms, levels)):
        assert bits(code) == len(omega.message(code))
    single = Quantized({"b": norm}, {"b": levels["b"]})
    assert bits(single) == bits(Quantized(norm, levels["b"])) == 32 + 1 + 3 + 1
    with pytest.raises(ValueError, match="2 norms and 3 leaves"):
        message_bits(Quantized((norm, norm), levels))
    with pytest.raises(ValueError, match="0 leaves"):
        message_bits(Quantized(norm, ()))


@pytest.mark.parametrize("dtypes", [("float32",), ("bfloat16", "float32"), ("float16", "float16")])
@pytest.mark.parametrize("density", [0.0, 0.1, 0.97, 1.0])
def test_sparse_numbers_have_the_bits_of_their_dtype(dtypes, density):
    rng = np.random.default_rng(1)
    leaves = [rng.normal(size=(9, 7)) * (rng.random((9, 7)) < density) for _ in dtypes]
    leaves[0][0, 0] = -0.0
    code = Sparse([jnp.asarray(x, t) for x, t in zip(leaves, dtypes, strict=True)])
    host = Sparse([np.asarray(x) for x in code.values])
    assert bits(code) == len(omega.message(host))


def test_numbers_in_double_precision_take_64_bits():
    with jax.enable_x64(True):
        code = Sparse({"a": jnp.zeros(50, jnp.float64).at[7].set(0.1), "b": jnp.ones(3)})
        assert bits(code) == len(omega.message(jax.tree.map(np.asarray, code)))
        assert bits(Dense(code.values)) == 64 * 53


def test_subnormal_numbers_are_sent():
    code = Sparse(jnp.asarray(np.array([0, 1e-42, 0, 0, -0.0], np.float32)))
    assert bits(code) == 1 + 3 + 3 + 32


def test_ten_million_levels_are_counted_exactly():
    size = 10**7
    levels = jnp.full(size, -(2**23), jnp.int32)
    each = len(omega.omega(2**23 + 1)) + 1
    assert bits(Quantized(jnp.float32(1), levels)) == 33 + each * size


@pytest.mark.parametrize(
    "code",
    [
        Quantized(jnp.float32(1), jax.ShapeDtypeStruct((59_000_000,), jnp.int32)),
        Sparse(jax.ShapeDtypeStruct((66_000_000,), jnp.float32)),
        Dense(jax.ShapeDtypeStruct((68_000_000,), jnp.float32)),
    ],
    ids=lambda code: type(code).__name__,
)
def test_messages_beyond_an_int32_are_refused(code):
    with pytest.raises(ValueError, match=r"000000 numbers might exceed; send it in parts"):
        jax.eval_shape(message_bits, code)


def test_bounds_are_the_published_ones():
    efficiency = [7.63, 6.71, 3.11], [6.61, 5.56, 2.33]
    for base, expected in zip(("natural", "log2"), efficiency, strict=True):
        actual = 32 * 784 / bound_bits(784, 2.0 ** np.array([4, 8, 16]), base=base)
        assert actual.round(2).tolist() == expected
    natural = bound_bits(784, 2 ** np.array([2, 4, 8, 16]), base="natural")
    assert natural.round(1).tolist() == [900.9, 3288.0, 3736.2, 8074.4]
    log2 = bound_bits(784, 2 ** np.array([2, 4, 8, 16]))
    assert log2.round(1).tolist() == [1115.6, 3794.5, 4508.4, 10767.0]
    small = bound_bits(50, 2 ** np.array([4, 8, 16]), base="natural")
    assert small.round(1).tolist() == [206.1, 336.5, 613.7]
    assert bound_bits(50, 2 ** np.array([4, 8, 16])).round(1).tolist() == [227.8, 416.0, 815.9]
    # Another bound holds if there are as many levels as the root of the dimension.
    np.testing.assert_allclose(bound_bits(784, 28), 2.8 * 784 + 32)
    assert bound_bits(1, 1) == 2.8 + 32


@pytest.mark.parametrize(
    ("dimension", "num_levels", "base", "message"),
    [
        (0, 2, "log2", "must be positive"),
        (5, -1, "log2", "must be positive"),
        (5, 2, "e", "log2, natural, got 'e'"),
    ],
)
def test_bad_arguments_of_bounds_are_named(dimension, num_levels, base, message):
    with pytest.raises(ValueError, match=message):
        bound_bits(dimension, num_levels, base=base)
