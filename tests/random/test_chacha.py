"""The ChaCha20 generator: its bits, and what JAX makes of its keys."""

import hashlib
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from scipy import stats

import fedmcmc
from fedmcmc.placement._processes import on_words
from fedmcmc.random import CHACHA, generator_named, secret_key, secret_words
from fedmcmc.random._chacha import chacha_block
from fedmcmc.storage import _files
from tests.contracts.model import DATA, POSITIONS, POSTERIOR

SECRET = hashlib.sha256(b"a test").digest()
KEY = secret_key(SECRET)
WORDS = np.frombuffer(bytes(range(32)), "<u4").astype(np.uint32)


def key_stream(secret, nonce, num_bytes, counter=0):
    """Return bytes of the key stream of another implementation."""
    start = counter.to_bytes(4, "little") + nonce
    return Cipher(ChaCha20(secret, start), None).encryptor().update(bytes(num_bytes))


def test_a_block_is_that_of_rfc_8439():
    """Section 2.3.2."""
    nonce = np.frombuffer(bytes.fromhex("000000090000004a00000000"), "<u4").astype(np.uint32)
    block = chacha_block(WORDS, jnp.ones(1, jnp.uint32), nonce)
    assert np.asarray(block).astype("<u4").tobytes().hex() == (
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
    )


@pytest.mark.parametrize("width", [8, 16, 32, 64])
def test_bits_are_the_key_stream(width):
    with jax.enable_x64(width == 64):
        bits = jax.random.bits(secret_key(SECRET), (5, 41), jnp.dtype(f"uint{width}"))
    expected = key_stream(SECRET, bytes(12), 5 * 41 * width // 8)
    assert np.asarray(bits).astype(f"<u{width // 8}").tobytes() == expected


def test_seeds_have_different_keys():
    seeds = [0, 1, 2**31 - 1, -1]
    words = [tuple(jax.random.key_data(jax.random.key(i, impl=CHACHA)).tolist()) for i in seeds]
    assert len({*words}) == len(seeds)
    with jax.enable_x64(True):
        wide = [jax.random.key_data(jax.random.key(i, impl=CHACHA)) for i in (5, 5 + 2**32)]
    assert (np.asarray(wide)[:, :2] == [[5, 0], [5, 1]]).all()
    with pytest.raises(ValueError, match="has 32 bytes, got 16"):
        secret_key(bytes(16))


def test_split_and_folded_keys_have_other_streams():
    """Their nonces begin with another word, and the nonce of a folded key has the number next."""
    keys = np.asarray(jax.random.key_data(jax.random.split(KEY, (2, 3))))
    stream = key_stream(SECRET, b"\1" + bytes(11), 6 * 32)
    np.testing.assert_array_equal(keys.ravel(), np.frombuffer(stream, "<u4"))
    folded = np.asarray(jax.random.key_data(jax.random.fold_in(KEY, 7)))
    stream = key_stream(SECRET, b"\2\0\0\0\7" + bytes(7), 32)
    np.testing.assert_array_equal(folded, np.frombuffer(stream, "<u4"))
    assert jax.random.split(KEY, 0).shape == (0,)


def test_keys_are_mapped_compiled_wrapped_and_unwrapped():
    words = secret_words([hashlib.sha256(bytes([i])).digest() for i in range(3)])
    keys = jax.random.wrap_key_data(words, impl=CHACHA)
    mapped = jax.jit(jax.vmap(lambda key: jax.random.normal(key, (4,))))(keys)
    separate = jnp.stack([jax.random.normal(key, (4,)) for key in keys])
    np.testing.assert_allclose(mapped, separate, rtol=1e-6)
    folded = jax.vmap(jax.random.fold_in, (None, 0))(KEY, jnp.arange(3))
    np.testing.assert_array_equal(
        jax.random.key_data(folded[2]), jax.random.key_data(jax.random.fold_in(KEY, 2))
    )
    again = jax.random.wrap_key_data(jax.random.key_data(keys), impl=jax.random.key_impl(keys))
    np.testing.assert_array_equal(jax.random.bits(again[1]), jax.random.bits(keys[1]))
    assert keys.dtype == KEY.dtype and generator_named(str(jax.random.key_impl(KEY))) == CHACHA
    assert generator_named("threefry2x32") == "threefry2x32"


@pytest.mark.parametrize(
    ("draw", "distribution"),
    [
        (lambda: jax.random.normal(KEY, (4000,)), stats.norm()),
        (lambda: jax.random.uniform(KEY, (4000,)), stats.uniform()),
        (lambda: jax.random.gamma(KEY, 2.5, (4000,)), stats.gamma(2.5)),
    ],
    ids=["normal", "uniform", "gamma"],
)
def test_draws_have_their_distribution(draw, distribution):
    assert stats.kstest(draw(), distribution.cdf).pvalue > 1e-3


def test_integers_and_permutations_are_uniform():
    counts = np.bincount(jax.random.randint(KEY, (7000,), 0, 7), minlength=7)
    assert stats.chisquare(counts).pvalue > 1e-3
    keys = jax.random.split(KEY, 2400)
    orders = jax.vmap(lambda key: jax.random.permutation(key, 4))(keys)
    counts = np.unique(np.asarray(orders) @ [64, 16, 4, 1], return_counts=True)[1]
    assert counts.size == 24 and stats.chisquare(counts).pvalue > 1e-3
    chosen = jax.vmap(lambda key: jax.random.choice(key, 5, (2,), replace=False))(keys)
    assert (chosen[:, 0] != chosen[:, 1]).all()
    assert stats.chisquare(np.bincount(chosen.ravel(), minlength=5)).pvalue > 1e-3


def test_bits_of_split_and_folded_keys_are_independent():
    """Bytes of sums of two streams are uniform, and a changed bit of a key changes half of all."""
    keys = [KEY, *jax.random.split(KEY), jax.random.fold_in(KEY, 0)]
    keys.append(jax.random.fold_in(keys[-1], 0))
    bits = [np.asarray(jax.random.bits(key, (4096,), jnp.uint32)) for key in keys]
    for a, b in itertools.combinations(bits, 2):
        counts = np.bincount((a ^ b).view(np.uint8), minlength=256)
        assert stats.chisquare(counts).pvalue > 1e-4
    near = secret_key(bytes([SECRET[0] ^ 1]) + SECRET[1:])
    changed = np.bitwise_count(bits[0] ^ np.asarray(jax.random.bits(near, (4096,), jnp.uint32)))
    assert abs(changed.mean() - 16) < 4 * 8**0.5 / 4096**0.5


def test_a_run_continues_from_its_checkpoint_with_an_equal_key(tmp_path):
    """Clients of `lsd_pp` store keys of the generator; the key of the run is compared."""
    kernel = fedmcmc.lsd_pp(POSTERIOR, step_size=0.01, batch_size=2, refresh_every=2)
    checkpoint = fedmcmc.Checkpoint(tmp_path, every_rounds=2)

    def run(num_rounds, key=KEY, **settings):
        settings = dict(num_rounds=num_rounds, progress=False) | settings
        return fedmcmc.sample(key, kernel, DATA, POSITIONS["nested"], **settings)

    expected = run(6)
    run(3, checkpoint=checkpoint)
    chex.assert_trees_all_equal(run(6, checkpoint=checkpoint).draws, expected.draws)
    with pytest.raises(fedmcmc.CheckpointError, match="rng_key"):
        run(7, secret_key(bytes(32)), checkpoint=checkpoint)


def test_keys_are_stored_and_gathered_with_their_generator(tmp_path):
    tree = {"keys": jax.random.split(KEY, 2), "x": np.ones(3)}
    leaves = jax.tree.leaves(tree)
    assert _files._array_name(0, leaves[0]) == "leaf_0_key_chacha20"
    again = _files._restore(_files._as_stored(leaves[0]), leaves[0])
    np.testing.assert_array_equal(jax.random.bits(again[1]), jax.random.bits(leaves[0][1]))
    doubled = on_words(lambda words: jnp.concatenate([words, words]))(leaves[0])
    assert doubled.shape == (4,) and doubled.dtype == KEY.dtype
