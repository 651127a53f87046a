"""Compressors: distributions per coordinate, extreme numbers, and empty leaves."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc import wire
from fedmcmc.compression import message_bits
from fedmcmc.pytrees import trees
from fedmcmc.random import random_words, realize_words
from tests.oracles.federations import LIMIT, z_scores
from tests.support.lanes import fast_and_slow

KEY = jax.random.key(11)
DATA = fedmcmc.FederatedData.from_clients([np.ones((n, 2)) for n in (2, 3, 1)])
CLIENT = DATA.client(0)
VECTOR = jnp.array([0.3, -1.7, 0.9, 0.0, 0.05])


@jax.jit
def send(compressor, message, key=KEY, state=None, client=CLIENT):
    """Return the code, what is decoded, and the state after."""
    state = compressor.init(message) if state is None else state
    draws = compressor.prepare(key, message, client)
    code, state = compressor.encode(draws, message, state, client)
    return code, compressor.decode(code, client), state


def many(compressor, message, num):
    """Return `num` independent decoded messages and their codes."""
    code, decoded, _ = all_keys(compressor, message, jax.random.split(KEY, num))
    return decoded, code


all_keys = jax.jit(jax.vmap(send, in_axes=(None, None, 0)))


def hard_vectors(d, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "one-hot": np.eye(d)[d // 2] * -3.0,
        "constant": np.full(d, 0.7),
        "gaussian": rng.normal(size=d),
        "heavy": rng.standard_t(1.2, size=d),
        "two sizes": np.where(np.arange(d) % 7, 1e-3, 1.0),
    }


def rounding_variance(v, s):
    """``(|v| / s)^2 f (1 - f)`` with ``f`` the fraction of ``s |v_j| / |v|``."""
    norm = np.linalg.norm(v)
    f = np.modf(s * np.abs(v) / norm)[0]
    return (norm / s) ** 2 * f * (1 - f)


# Quantization


@pytest.mark.parametrize("s", [1, 3, 16])
def test_i30_rounding_is_unbiased_with_the_variance_of_its_formula(s):
    compressor, v = fedmcmc.quantize(s), np.asarray(VECTOR, float)
    decoded, code = many(compressor, VECTOR, 40000)
    variance = rounding_variance(v, s)
    errors, free = np.asarray(decoded, float) - v, variance > 1e-12
    assert np.abs(z_scores(errors[:, free], 0.0)).max() < LIMIT
    assert np.abs(z_scores(errors[:, free] ** 2, variance[free])).max() < LIMIT
    assert np.abs(errors[:, ~free]).max() < 1e-6
    assert np.abs(np.asarray(code.levels)).max() <= s
    nonzero = (np.asarray(code.levels) != 0).sum(1)
    assert nonzero.mean() <= s * (s + np.sqrt(v.size))
    a = np.minimum(s * np.abs(v) / np.linalg.norm(v), 1).sum()
    assert abs(z_scores(nonzero, a)) < LIMIT


@pytest.mark.parametrize("d", [1, 4, 100])
@pytest.mark.parametrize("s", [1, 4])
def test_i30_errors_are_within_omega_whatever_the_vector(d, s):
    compressor = fedmcmc.quantize(s)
    assert float(compressor.omega(jnp.zeros(d))) == pytest.approx(min(d / s**2, np.sqrt(d) / s))
    for name, v in hard_vectors(d).items():
        bound = min(d / s**2, np.sqrt(d) / s) * (v @ v)
        assert rounding_variance(v, s).sum() <= bound, name
        decoded, code = many(compressor, jnp.asarray(v, jnp.float32), 2000)
        errors = ((np.asarray(decoded, float) - v) ** 2).sum(1)
        error = rounding_variance(v, s).sum()
        assert (
            abs(errors.mean() - error) < LIMIT * errors.std() / np.sqrt(2000) + 1e-5 * error + 1e-9
        ), name
        if d == 1 or name == "one-hot":
            np.testing.assert_array_equal(decoded, np.broadcast_to(np.float32(v), decoded.shape))
            assert (np.abs(np.asarray(code.levels)).sum(1) == s).all()


def test_i30_scaling_oddness_and_fixed_points():
    compressor = fedmcmc.quantize(5)
    code, decoded, _ = send(compressor, VECTOR)
    for c in (2.0**-40, 0.5, 8.0, 2.0**40):
        scaled, larger, _ = send(compressor, c * VECTOR)
        np.testing.assert_array_equal(scaled.levels, code.levels)
        np.testing.assert_array_equal(larger, c * decoded)
    np.testing.assert_array_equal(send(compressor, -VECTOR)[1], -decoded)
    # A vector on its grid is sent unchanged.
    fixed = jnp.array([3.0, 0.0, -4.0, 0.0])
    for key in jax.random.split(KEY, 5):
        np.testing.assert_array_equal(send(compressor, fixed, key)[1], fixed)


@pytest.mark.parametrize("per_leaf", [False, True])
def test_i30_zero_takes_only_the_bits_of_its_norms(per_leaf):
    compressor = fedmcmc.quantize(4, per_leaf=per_leaf)
    zero = {"a": jnp.zeros(3), "b": jnp.zeros(())}
    code, decoded, _ = send(compressor, zero)
    chex.assert_trees_all_equal(decoded, zero)
    assert int(message_bits(code)) == (64 if per_leaf else 32)


def test_leaves_have_a_common_norm_or_their_own():
    tree = {"a": VECTOR, "b": jnp.array([[100.0, -20.0]])}
    common, flat = fedmcmc.quantize(6), jnp.concatenate([VECTOR, tree["b"][0]])
    code, decoded, _ = send(common, tree)
    code_flat, decoded_flat, _ = send(common, flat)
    np.testing.assert_array_equal(np.concatenate([decoded["a"], decoded["b"][0]]), decoded_flat)
    assert code.norm == code_flat.norm and float(common.omega(tree)) == pytest.approx(7 / 36)
    per_leaf = fedmcmc.quantize(6, per_leaf=True)
    decoded, code = many(per_leaf, tree, 4000)
    for name, leaf in tree.items():
        assert float(code.norm[name][0]) == pytest.approx(float(jnp.linalg.norm(leaf)), rel=1e-6)
        errors = np.asarray(decoded[name], float).reshape(4000, -1) - np.ravel(leaf)
        variance = rounding_variance(np.ravel(np.asarray(leaf, float)), 6)
        free = variance > 1e-9
        assert np.abs(z_scores(errors[:, free] ** 2, variance[free])).max() < LIMIT
    assert float(per_leaf.omega(tree)) == pytest.approx(5 / 36)


def test_clients_may_have_different_levels():
    levels = np.array([2, 9, 30])
    together = fedmcmc.quantize(levels)
    for i, s in enumerate(levels):
        client, alone = DATA.client(i), fedmcmc.quantize(int(s))
        actual, expected = (send(c, VECTOR, client=client)[:2] for c in (together, alone))
        chex.assert_trees_all_equal(actual, expected)
        assert together.omega(VECTOR)[i] == alone.omega(VECTOR)


KINDS = (
    fedmcmc.quantize(5),
    fedmcmc.sparsify(0.4),
    fedmcmc.top_k(0.4),
    fedmcmc.compression.chain(
        fedmcmc.compression.clip(1.0), fedmcmc.quantize(jnp.array([9, 2, 30]))
    ),
    fedmcmc.compression.identity(),
)


@pytest.mark.slow
@pytest.mark.parametrize("which", [(0, 1, 2), (3, 2, 4), (1, 1, 3)])
def test_per_client_sends_the_code_of_the_client_compressor(which):
    """Code, decoded message and state agree over two rounds; the place takes extra bits."""
    together = fedmcmc.per_client(KINDS, which)
    clients = jax.tree.map(lambda *x: jnp.stack(x), *(DATA.client(i) for i in range(3)))
    tree = {"a": VECTOR, "b": jnp.array([[2.0]])}

    def first(compressor):
        return jax.tree.map(lambda x: jnp.stack([x] * 3), compressor.init(tree))

    def at_once(compressor, key, state):
        return jax.vmap(send, (None, None, None, 0, 0))(compressor, tree, key, state, clients)

    state, separate = first(together), [first(KINDS[kind]) for kind in which]
    for key in jax.random.split(KEY, 2):
        codes, decoded, state = at_once(together, key, state)
        bits = jax.vmap(message_bits)(codes)
        for i, kind in enumerate(which):
            code, alone, separate[i] = at_once(KINDS[kind], key, separate[i])
            actual = (codes.codes[kind], decoded, state[kind])
            expected = (code, alone, separate[i])
            actual, expected = jax.tree.map(lambda x, i=i: x[i], (actual, expected))
            chex.assert_trees_all_equal(actual, expected)
            assert int(codes.place[i]) == kind
            assert int(bits[i]) == int(jax.vmap(message_bits)(code)[i]) + 3  # one of five places
            unsent = codes.codes[:kind] + codes.codes[kind + 1 :]
            assert not any(np.any(leaf[i]) for leaf in jax.tree.leaves(unsent))
            assert together.omega(tree)[i] == jnp.broadcast_to(KINDS[kind].omega(tree), (3,))[i]
    assert together.unbiased is False
    assert fedmcmc.per_client(KINDS[:2], [0, 1, 1]).unbiased


@pytest.mark.slow
def test_an_unused_compressor_changes_only_the_bits():
    posterior = fedmcmc.Posterior(
        lambda theta: -0.5 * jnp.sum(theta**2),
        lambda theta, x: -0.5 * jnp.sum((x - theta) ** 2, axis=-1),
    )
    kernel = fedmcmc.lsd(posterior, step_size=0.05, participation=fedmcmc.bernoulli(0.7))

    def run(compressor):
        compressed = fedmcmc.compress(kernel, compressor)
        return fedmcmc.sample(KEY, compressed, DATA, jnp.ones(2), num_rounds=6, progress=False)

    for around in (lambda inner: inner, fedmcmc.memory):
        plain = run(around(fedmcmc.quantize(3)))
        kinds = fedmcmc.per_client([fedmcmc.sparsify(0.5), fedmcmc.quantize(3)], [1, 1, 1])
        assigned = run(around(kinds))
        np.testing.assert_array_equal(assigned.draws, plain.draws)
        messages = assigned.info["num_active"]
        np.testing.assert_array_equal(assigned.info["bits_up"] - messages, plain.info["bits_up"])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_clients_exchange_compressors_without_a_new_trace(dtype):
    kinds, message = (fedmcmc.quantize(3), fedmcmc.compression.identity()), VECTOR.astype(dtype)
    chex.clear_trace_counter()
    traced_send = jax.jit(chex.assert_max_traces(send.__wrapped__, n=1))
    for which in ([0, 1, 0], [1, 0, 1]):
        for i, kind in enumerate(which[:2]):
            client = DATA.client(i)
            decoded = traced_send(fedmcmc.per_client(kinds, which), message, client=client)[1]
            expected = send(kinds[kind], message, client=client)[1]
            np.testing.assert_array_equal(decoded, expected.astype(decoded.dtype))


def test_published_rates_of_memory():
    omega = [float(fedmcmc.quantize(2**p).omega(jnp.zeros(784))) for p in (4, 8, 16)]
    assert [round(1 / (1 + w), 3) for w in omega] == [0.364, 0.988, 1.0]
    np.testing.assert_allclose(omega, [28 / 16, 784 / 2**16, 784 / 2**32], rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_sixteen_bits_are_rounded_by_their_true_norm(dtype):
    # In float16 the norm of these would be infinite, and 2**16 levels would not be integers.
    v = jnp.full(400, 6e4, dtype)
    for s in (4, 2**16):
        decoded, code = many(fedmcmc.quantize(s), v, 500)
        share = s / 20
        assert np.all(np.isin(np.asarray(code.levels), [np.floor(share), np.ceil(share)]))
        np.testing.assert_allclose(code.norm, 20 * float(v[0]), rtol=1e-3)
        mean = np.asarray(decoded, float).mean(1)
        assert abs(z_scores(mean, float(v[0]))) < LIMIT or np.ptp(mean) < 1


@pytest.mark.parametrize("size", [1e-30, 1e-18, 1e18, 1e30])
def test_huge_and_tiny_numbers_stay_what_they_are(size):
    v = size * VECTOR
    for compressor in (fedmcmc.quantize(7), fedmcmc.compression.clip(1e36), fedmcmc.sparsify(0.5)):
        decoded = send(compressor, v)[1]
        expected = np.asarray(send(compressor, VECTOR)[1], float) * size
        np.testing.assert_allclose(np.asarray(decoded, float), expected, rtol=1e-5)
    clipped = np.asarray(send(fedmcmc.compression.clip(size / 2), v)[1], float)
    np.testing.assert_allclose(np.linalg.norm(clipped), size / 2, rtol=1e-5)


# Other compressors


def test_sparsify_has_exactly_its_variance():
    for q in (0.25, 0.9):
        compressor, v = fedmcmc.sparsify(q), np.asarray(VECTOR, float)
        decoded, code = many(compressor, VECTOR, 40000)
        errors, free = np.asarray(decoded, float) - v, v != 0
        assert float(compressor.omega(VECTOR)) == pytest.approx((1 - q) / q)
        assert np.abs(z_scores(errors[:, free], 0.0)).max() < LIMIT
        variance = (1 - q) / q * v[free] ** 2
        assert np.abs(z_scores(errors[:, free] ** 2, variance)).max() < LIMIT
        num_sent = (np.asarray(code.values)[:, free] != 0).sum(1)
        assert abs(z_scores(num_sent, q * free.sum())) < LIMIT
    np.testing.assert_array_equal(send(fedmcmc.sparsify(1.0), VECTOR)[1], VECTOR)


def test_top_k_sends_the_largest_of_all_leaves_together():
    tree = {"a": jnp.array([1.0, -5.0, 0.1]), "b": jnp.array([[3.0], [-0.2]])}
    decoded = send(fedmcmc.top_k(0.4, error_feedback=False), tree)[1]
    np.testing.assert_array_equal(decoded["a"], [0, -5, 0])
    np.testing.assert_array_equal(decoded["b"], [[3], [0]])
    single = send(fedmcmc.top_k(0.01, error_feedback=False), tree)[1]
    assert sum(int((leaf != 0).sum()) for leaf in jax.tree.leaves(single)) == 1
    compressor = fedmcmc.top_k(0.2, error_feedback=False)
    for v in hard_vectors(40).values():
        error = np.asarray(send(compressor, jnp.asarray(v, jnp.float32))[1]) - v
        assert error @ error <= float(compressor.omega(jnp.zeros(40))) * (v @ v) * (1 + 1e-5)


def test_error_feedback_loses_nothing():
    compressor, rng = fedmcmc.top_k(0.3), np.random.default_rng(0)
    state, sent, total = compressor.init(jnp.zeros(10)), np.zeros(10), np.zeros(10)
    for _ in range(30):
        message = rng.normal(size=10).astype(np.float32)
        _, decoded, state = send(compressor, jnp.asarray(message), state=state)
        total, sent = total + message, sent + np.asarray(decoded)
        np.testing.assert_allclose(sent + np.asarray(state), total, atol=1e-5)
        assert (np.asarray(decoded) != 0).sum() == 3


def test_clip_bounds_the_norm_and_keeps_the_direction():
    norm = float(jnp.linalg.norm(VECTOR))
    np.testing.assert_array_equal(send(fedmcmc.compression.clip(norm * 1.01), VECTOR)[1], VECTOR)
    clipped = send(fedmcmc.compression.clip(0.5), {"a": VECTOR, "b": jnp.zeros(2)})[1]["a"]
    np.testing.assert_allclose(clipped, VECTOR * 0.5 / norm, rtol=1e-6)


def test_a_chain_sends_the_last_code_of_the_first_message():
    sparse, fine = fedmcmc.sparsify(0.5), fedmcmc.quantize(3)
    chain = fedmcmc.compression.chain(sparse, fine)
    assert float(chain.omega(VECTOR)) == pytest.approx(2 * (1 + 5 / 9) - 1)
    decoded, _ = many(chain, VECTOR, 40000)
    errors = np.asarray(decoded, float) - np.asarray(VECTOR, float)
    free = np.asarray(VECTOR) != 0
    assert np.abs(z_scores(errors[:, free], 0.0)).max() < LIMIT
    keys = jax.random.split(KEY, 2)
    sparse_message = send(sparse, VECTOR, keys[0])[1]
    last_code, expected, _ = send(fine, sparse_message, keys[1])
    chain_code, decoded, _ = send(chain, VECTOR)
    np.testing.assert_array_equal(decoded, expected)
    assert int(message_bits(chain_code)) == int(message_bits(last_code))
    assert type(chain_code) is type(last_code)
    assert not fedmcmc.compression.chain(fedmcmc.compression.clip(1.0), fine).unbiased
    # In the other order the norm is clipped after it was rounded up.
    after = send(
        fedmcmc.compression.chain(fedmcmc.quantize(1), fedmcmc.compression.clip(0.5)), VECTOR
    )[1]
    assert np.linalg.norm(after) <= 0.5 * (1 + 1e-6)


@pytest.mark.parametrize("per_leaf", [False, True])
def test_leaves_without_numbers_take_no_bits(per_leaf):
    compressor = fedmcmc.quantize(3, per_leaf=per_leaf)
    empty = {"a": jnp.zeros((0,)), "c": jnp.zeros((2, 0))}
    tree = {"b": VECTOR, "d": jnp.ones((2, 2))}
    code, decoded, _ = send(compressor, tree | empty)
    plain, expected, _ = send(compressor, tree)
    assert int(message_bits(code)) == int(message_bits(plain)) > 0
    assert trees.shapes_of(decoded) == trees.shapes_of(tree | empty)
    for name in tree:
        np.testing.assert_array_equal(decoded[name], expected[name])
    received = wire.decode(wire.encode(code), code)
    chex.assert_trees_all_equal(received, code)
    nothing, decoded, _ = send(compressor, empty)
    assert int(message_bits(nothing)) == 0 and wire.encode(nothing) == b""
    assert trees.shapes_of(decoded) == trees.shapes_of(empty)
    assert float(compressor.omega(empty)) == 0


@pytest.mark.parametrize(
    "compressor",
    [
        fedmcmc.quantize(4),
        *(
            pytest.param(compressor, marks=pytest.mark.slow)
            for compressor in (
                fedmcmc.sparsify(0.5),
                fedmcmc.top_k(0.5),
                fedmcmc.compression.clip(0.5),
            )
        ),
    ],
)
def test_empty_leaves_change_no_round(compressor):
    posterior = fedmcmc.Posterior(
        lambda theta: -0.5 * jnp.sum(theta["x"] ** 2),
        lambda theta, rows: -0.5 * jnp.sum((rows - theta["x"]) ** 2, axis=-1),
    )
    kernel = fedmcmc.compress(fedmcmc.lsd(posterior, step_size=0.05), compressor)
    init, step = fedmcmc.simulate(kernel, DATA)

    def run_round(position):
        state, info = jax.jit(step)(KEY, init(position))
        return state.broadcast.position["x"], int(info.bits_up)

    plain, plain_bits = run_round({"x": jnp.zeros(2)})
    padded, padded_bits = run_round(
        {"x": jnp.zeros(2), "a": jnp.zeros((0,)), "z": jnp.zeros((2, 0))}
    )
    np.testing.assert_allclose(padded, plain, rtol=1e-6)
    assert padded_bits == plain_bits > 0


@pytest.mark.parametrize("size", fast_and_slow([1, 6], [6]))
def test_large_messages_are_drawn_from_their_key(size, monkeypatch):
    tree = {"a": VECTOR, "b": jnp.ones(size)}
    kinds = (fedmcmc.quantize(3), fedmcmc.sparsify(0.4))
    small = [send.__wrapped__(compressor, tree)[1] for compressor in kinds]
    monkeypatch.setattr("fedmcmc.random._streams.MAX_PREPARED_NORMALS", 4)
    for compressor, expected in zip(kinds, small, strict=True):
        draws = compressor.prepare(KEY, tree, CLIENT)
        assert jnp.issubdtype(draws.dtype, jax.dtypes.prng_key)
        decoded = send.__wrapped__(compressor, tree)[1]  # traced again
        chex.assert_trees_all_equal(decoded, expected)


def test_two_words_of_one_draw_are_as_good_as_independent():
    """Enumerate the joint distribution for all thresholds, with halves of 4 bits instead of 16."""
    half, words = 4, np.arange(256)
    swapped = ((words << half) | (words >> half)) & 255
    below = words[:, None] < words[None]  # [word, threshold]
    joint = below.T.astype(float) @ (swapped[:, None] < words[None]) / 256
    p = below.mean(0)
    assert np.abs(joint - p[:, None] * p[None]).max() < 2.0**-half
    np.testing.assert_array_equal(np.sort(swapped), words)
    drawn = np.asarray(realize_words(random_words(KEY, jnp.zeros(7)), jnp.zeros(7)))
    np.testing.assert_array_equal(drawn[4:], (drawn[:3] << 16) | (drawn[:3] >> 16))
    assert len(set(drawn.tolist())) == 7
