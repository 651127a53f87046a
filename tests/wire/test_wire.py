"""Bit strings of messages: they have the counted length, and decoding restores every bit."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedmcmc
from fedmcmc import compression, wire
from fedmcmc.compression import Dense, OneOf, Quantized, Sparse, message_bits
from fedmcmc.pytrees import trees
from tests.oracles import omega
from tests.support.lanes import fast_and_slow

FLOATS = ("float16", "bfloat16", "float32", "float64")
SHAPES = st.lists(
    st.lists(st.integers(0, 7), min_size=0, max_size=3).map(tuple), min_size=1, max_size=4
)


def as_tree(leaves):
    """Return a tree whose leaves JAX orders in another way than the dictionary."""
    return {f"k{9 - i}": (leaf,) for i, leaf in enumerate(leaves)}


def check_same_bits(a, b):
    """Assert that two trees have the same structure, types, shapes and bits."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())


def check_round_trip(code, num_bits):
    data = wire.encode(code)
    assert len(data) == -(-num_bits // 8)
    check_same_bits(wire.decode(data, code), code)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), code)
    check_same_bits(wire.decode(data, shapes), code)
    return data


def flush(norm):
    """Return `norm`, or zero if it is subnormal."""
    return np.float32(0) if np.abs(norm) < 2.0**-126 else norm


@st.composite
def quantized(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    largest = draw(st.sampled_from([1, 2, 16, 300, 2**16, 2**23]))
    density = draw(st.sampled_from([0.0, 0.02, 0.3, 0.9, 1.0]))

    def levels(shape):
        sizes = np.ceil(largest ** rng.random(shape))
        sent = rng.random(shape) < density
        return np.asarray(rng.choice([-1, 1], shape) * sizes * sent, np.int32)

    tree = as_tree([levels(shape) for shape in draw(SHAPES)])
    if draw(st.booleans()):
        return Quantized(np.float32(rng.normal()), tree)
    # A norm of zero, which may be negative, has levels of zero.
    words = rng.integers(0, 2**32, len(tree), np.uint32) * rng.choice([0, 1, 1], len(tree))
    norms = words.astype(np.uint32).view(np.float32)
    tree = {
        key: (leaf * (flush(norm) != 0),)
        for (key, (leaf,)), norm in zip(tree.items(), norms, strict=True)
    }
    return Quantized({key: (n,) for key, n in zip(tree, norms, strict=True)}, tree)


@st.composite
def numbers(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    density = draw(st.sampled_from([0.0, 0.02, 0.3, 0.96, 1.0]))
    leaves = []
    for shape in draw(SHAPES):
        dtype = jnp.dtype(draw(st.sampled_from(FLOATS)))
        # Any bits, including infinities, subnormal numbers and NaN.
        words = rng.bytes(dtype.itemsize * int(np.prod(shape)))
        any_numbers = np.frombuffer(words, dtype).reshape(shape)
        leaves.append(np.where(rng.random(shape) < density, any_numbers, dtype.type(0)))
    return as_tree(leaves)


@given(quantized())
@settings(deadline=None, max_examples=200)
def test_any_quantized_message_is_restored(code):
    norms = jax.tree.map(flush, code.norm)
    check_round_trip(code, len(omega.message(Quantized(norms, code.levels))))


@given(numbers())
@settings(deadline=None, max_examples=200)
def test_any_numbers_are_restored(values):
    num_sparse = len(omega.message(Sparse(values)))
    data = wire.encode(Sparse(values))
    assert len(data) == -(-num_sparse // 8)
    # Only the sign of a zero may be lost.
    with np.errstate(invalid="ignore"):  # NaN in bfloat16
        bare = jax.tree.map(lambda x: np.where(x == 0, x.dtype.type(0), x), values)
    check_round_trip(Sparse(bare), num_sparse)
    check_round_trip(Dense(values), trees.num_bits(values))


count_bits = jax.jit(message_bits)
count_bits_of_each = jax.jit(jax.vmap(message_bits))


@pytest.mark.parametrize("largest", [1, 20, 2**16])
def test_messages_have_the_length_counted_inside_jit(largest):
    rng = np.random.default_rng(largest)
    levels = rng.integers(-largest, largest + 1, (30, 400)) * (rng.random((30, 400)) < 0.3)
    codes = Quantized(jnp.linspace(1, 3, 30), jnp.asarray(levels, jnp.int32))
    bits = count_bits_of_each(codes)
    for i in range(30):
        check_round_trip(jax.tree.map(lambda x, i=i: x[i], codes), int(bits[i]))


COMPRESSORS = {
    "quantize": compression.quantize(16),
    "per leaf": compression.quantize(300, per_leaf=True),
    "sparsify": compression.sparsify(0.1),
    "top_k": compression.top_k(0.05),
    "chain": compression.chain(compression.sparsify(0.1), compression.quantize(4)),
    "memory": compression.memory(compression.quantize(1)),
    "clip": compression.clip(1.0),
    "identity": compression.identity(),
}


@pytest.mark.parametrize("name", fast_and_slow(COMPRESSORS, ["per leaf", "chain", "identity"]))
def test_a_receiver_decodes_the_same_message(name):
    compressor = COMPRESSORS[name]

    @jax.jit
    def send(rng_key):
        keys = jax.random.split(rng_key, 3)
        v = {"b": jax.random.normal(keys[0], (13, 9)), "a": jax.random.normal(keys[1], (41,))}
        draws = compressor.prepare(keys[2], trees.shapes_of(v), None)
        code = compressor.encode(draws, v, compressor.init(trees.shapes_of(v)), None)[0]
        return code, message_bits(code), compressor.decode(code, None)

    code, bits, restored = send(jax.random.key(0))
    data = wire.encode(code)
    assert len(data) == -(-int(bits) // 8)
    received = wire.decode(data, trees.shapes_of(code))
    check_same_bits(jax.jit(lambda c: compressor.decode(c, None))(received), restored)


def bits_of(data):
    return "".join(f"{byte:08b}" for byte in data)


ONE, NORM = np.float32(1.5), f"{0x3FC00000:032b}"
LEVELS = Quantized(ONE, np.array([0, 2, 0, -1], np.int32))
NUMBERS = np.array([1.0, -2.0], np.float32)
TIED_LEVELS = np.ones(6, np.int32)
TIED_NUMBERS = np.array([1] * 9 + [0], np.float16)
BITS = {
    # The norm; 0; first bits of 1, 3, 1, 2; remaining bits of 3, 2; their ends; signs.
    "dense levels": (LEVELS, NORM + "0" + "0101" + "10" + "00" + "01"),
    # First bits of six 2 = 10 0; remaining bits of 10; their ends; signs.
    "tied levels": (Quantized(ONE, TIED_LEVELS), NORM + "0" + "1" * 6 + "0" * 18),
    # The norm; 1; the count 2 + 1 = 11 0. The gaps are 5 = 10 101 0 and 35 = 10 101 100011 0.
    # Their first bits, the rest of 10 and 10, the first bits of 101 and 101, the rest of both, the
    # ends: 0 and 1, the rest of 100011, 0. Signs. The levels are 9 = 11 1001 0 and 1 = 0.
    "sparse levels": (
        Quantized(ONE, np.array([0] * 4 + [-9] + [0] * 34 + [1], np.int32)),
        NORM + "1" + "110" + "11001101010100011" + "0" + "10" + "10110010",
    ),
    "dense numbers": (Dense(NUMBERS), f"{0x3F800000C0000000:064b}"),
    # 1; 2 = 10 0; the gap 2 = 10 0; the number.
    "sparse numbers": (
        Sparse(np.array([0, -2.0] + [0] * 7, np.float32)),
        "1" + "100" + "100" + f"{0xC0000000:032b}",
    ),
    "tied numbers": (Sparse(TIED_NUMBERS), "0" + 9 * f"{0x3C00:016b}" + 16 * "0"),
}


@pytest.mark.parametrize("name", BITS)
def test_a_message_has_these_bits(name):
    code, expected = BITS[name]
    assert len(omega.message(code)) == len(expected)
    assert bits_of(wire.encode(code)) == expected + "0" * (-len(expected) % 8)


def test_ties_in_the_table_are_ties():
    """Otherwise the table would not check which code is sent if both have the same length."""
    assert len(omega.places(TIED_LEVELS) + "+" * 6 + "0" * 6) == len("100" * 6 + "+" * 6)
    assert len(omega.places(TIED_NUMBERS)) == 16  # what the zero saves


def unsent(code):
    return jax.tree.map(np.zeros_like, code)


@pytest.mark.parametrize(("num", "width"), [(1, 0), (2, 1), (3, 2), (4, 2)])
def test_a_union_sends_its_place_and_one_code(num, width):
    codes = [LEVELS, Dense(NUMBERS), Sparse(np.ones(3, np.float32)), LEVELS][:num]
    for place in range(num):
        alone = bits_of(wire.encode(codes[place]))
        union = OneOf(
            np.int32(place),
            tuple(x if i == place else unsent(x) for i, x in enumerate(codes)),
        )
        length = len(omega.message(codes[place]))
        num_bits = int(count_bits(union))
        assert num_bits == width + length == len(omega.message(union))
        head = f"{place:b}".zfill(width) if width else ""
        assert bits_of(check_round_trip(union, num_bits))[:num_bits] == head + alone[:length]


def test_a_code_that_does_not_exist_is_refused():
    union = OneOf(np.int32(2), (unsent(Dense(np.ones(2, np.float32))),) * 3)
    data = wire.encode(union)
    assert data[0] >> 6 == 2
    with pytest.raises(ValueError, match="it claims to be code 3 of 3"):
        wire.decode(bytes([data[0] | 0b11000000]) + data[1:], union)
    with pytest.raises(ValueError, match="one of 3 codes, got place 3"):
        wire.encode(union._replace(place=np.int32(3)))
    with pytest.raises(ValueError, match=r"place must be \[\] int32, got \[2\] int32; several"):
        wire.encode(union._replace(place=np.zeros(2, np.int32)))


def test_levels_under_a_norm_of_zero_are_not_sent():
    code = Quantized(np.float32(0), np.ones(3, np.int32))
    assert wire.decode(wire.encode(code), code).levels.tolist() == [0, 0, 0]


def codes():
    rng = np.random.default_rng(0)
    levels = rng.integers(-20, 21, (12, 5)).astype(np.int32)
    few = np.where(rng.random(60) < 0.1, rng.normal(size=60), 0).astype(np.float32)
    return {
        "levels": Quantized(np.float32(2), levels),
        "few levels": Quantized(np.float32(2), np.sign(few).astype(np.int32)),
        "leaves": Quantized((np.float32(2), np.float32(3)), (levels, levels[0])),
        "sparse": Sparse((few, few.astype(np.float64))),
        "dense": Dense((few, few.astype(np.float16))),
        "one of three": OneOf(
            np.int32(1),
            (
                unsent(Quantized(np.float32(2), levels)),
                Sparse((few,)),
                OneOf(np.int32(0), (unsent(Dense(few)), unsent(Sparse(few)))),
            ),
        ),
    }


@pytest.mark.parametrize("name", codes())
def test_a_damaged_message_gives_a_message_or_one_error(name):
    code, rng = codes()[name], np.random.default_rng(1)
    data = wire.encode(code)
    for end in range(len(data)):
        with pytest.raises(ValueError, match=f"These {end} bytes are not a message of"):
            wire.decode(data[:end], code)
    with pytest.raises(ValueError, match=f"ends after {len(data)} bytes"):
        wire.decode(data + b"\0", code)
    if name != "dense":
        with pytest.raises(ValueError, match="the last byte are not zero"):
            wire.decode(data[:-1] + bytes([data[-1] | 1]), code)
    outcomes = set()
    for _ in range(300):
        damaged = bytearray(data)
        for place in rng.integers(0, len(data), 1 + rng.integers(4)):
            damaged[place] = rng.integers(256)
        try:
            decoded = wire.decode(bytes(damaged), code)
        except ValueError as error:
            assert "are not a message of" in str(error)
            outcomes.add("error")
        else:
            assert trees.shapes_of(decoded) == trees.shapes_of(code)
            outcomes.add("message")
    assert outcomes == ({"message"} if name == "dense" else {"message", "error"})


def test_integers_out_of_range_are_refused():
    like = Quantized(np.float32(1), np.zeros(1, np.int32))
    head = f"{0x3F800000:032b}"

    def read(bits):
        padded = head + bits + "0" * (-len(head + bits) % 8)
        return wire.decode(int(padded, 2).to_bytes(len(padded) // 8, "big"), like)

    assert read("0" + omega.omega(2**31) + "1").levels.tolist() == [1 - 2**31]
    for bits, reason in (
        ("0" + omega.omega(2**31 + 1) + "1", "one of its levels does not fit into int32"),
        ("0" + omega.omega(2**32), "does not fit into 32 bits"),
        ("1" + omega.omega(3), "it claims to contain 2 of 1 numbers"),
        ("1" + omega.omega(2) + omega.omega(2), "it claims to contain number 1 of 1"),
    ):
        with pytest.raises(ValueError, match=reason):
            read(bits)


@pytest.mark.parametrize(
    "like",
    [
        Quantized(np.float32(2), np.zeros((12, 6), np.int32)),
        Quantized(np.float32(2), np.zeros((12, 4), np.int32)),
        Quantized((np.float32(2),) * 2, (np.zeros((12, 4), np.int32), np.zeros(12, np.int32))),
        Dense(np.zeros((12, 5), np.float32)),
        Sparse(np.zeros((12, 5), np.float32)),
    ],
)
def test_a_message_of_other_shapes_is_refused(like):
    with pytest.raises(ValueError, match="are not a message of"):
        wire.decode(wire.encode(codes()["levels"]), like)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ({"a": 1.5}, "tree of arrays of numbers, got a leaf float"),
        (np.array(["a"]), "tree of arrays of numbers, got a leaf <U1"),
        (Quantized(np.ones(4, np.float32), np.ones((4, 3), np.int32)), r"\[\] float32, got \[4\]"),
        (Quantized(np.float64(1), np.ones(3, np.int32)), r"\[\] float32, got \[\] float64"),
        (Quantized(ONE, np.ones(3, np.int64)), "levels must be int32, got int64"),
        (Quantized((ONE, ONE), np.ones(3, np.int32)), "2 norms and 1 leaves"),
        (Quantized(1.5, np.ones(3, np.int32)), "made of arrays, got float"),
        (Dense(np.ones(3, np.int32)), "floating point, got int32"),
        (Sparse([np.ones(3, np.float32), np.ones(3, bool)]), "floating point, got bool"),
    ],
)
def test_a_tree_that_is_no_message_is_refused(code, message):
    with pytest.raises(ValueError, match=message):
        wire.encode(code)
    with pytest.raises(ValueError, match=message):
        wire.decode(b"", code)


def test_any_other_tree_of_numbers_is_restored():
    gaussian = fedmcmc.Gaussian.from_moments(jnp.ones(3), variance=jnp.full(3, 2.0))
    broadcast = fedmcmc.types.Broadcast(jnp.int32(-7), {"a": jnp.ones(()), "b": jnp.zeros((2, 0))})
    for tree in (
        gaussian,
        broadcast,
        (fedmcmc.types.Uncompressed(jnp.float32(0.25)), jnp.ones(2, jnp.bfloat16)),
        np.array([True, False]),
    ):
        num_bytes = sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(tree))
        check_round_trip(tree, 8 * num_bytes)
        with pytest.raises(ValueError, match=f"which take {num_bytes} bytes"):
            wire.decode(wire.encode(tree) + b"x", tree)


def test_exact_parts_follow_a_code():
    code = compression.WithExact(LEVELS, (fedmcmc.types.Uncompressed(np.float32(0.1)),))
    data = check_round_trip(code, 8 * (len(wire.encode(LEVELS)) + 4))
    assert data[:-4] == wire.encode(LEVELS)
    with pytest.raises(ValueError, match="ends with 4 bytes of exact parts"):
        wire.decode(data[:3], code)


@pytest.mark.slow
@pytest.mark.parametrize("largest", [1, 2**8, 2**16])
def test_a_million_levels_take_less_than_half_a_second(largest):
    rng = np.random.default_rng(0)
    levels = rng.integers(-largest, largest + 1, 10**6).astype(np.int32)
    code = Quantized(np.float32(1), levels)
    seconds = []
    for _ in range(3):
        start = time.process_time()
        data = wire.encode(code)
        encoded = time.process_time()
        decoded = wire.decode(data, code)
        seconds.append((encoded - start, time.process_time() - encoded))
        check_same_bits(decoded, code)
    assert np.min(seconds, axis=0).max() < 0.5
