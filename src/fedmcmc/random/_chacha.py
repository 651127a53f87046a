"""ChaCha20 as a random generator of JAX, with keys of 256 bits, for secret randomness.

JAX's default generator has keys of 64 bits, and a search can recover such a key from a few draws.
"""

from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.random import define_prng_impl
from jax.typing import ArrayLike

KEY_WORDS = 8
BLOCK_WORDS = 16
_CONSTANTS = np.frombuffer(b"expand 32-byte k", "<u4").astype(np.uint32)
# First word of the nonce, so that bits, split keys and folded keys come from different streams.
_BITS, _SPLIT, _FOLD_IN = 0, 1, 2


def chacha_block(key: Array, counter: Array, nonce: Array) -> Array:
    """Return blocks of the ChaCha20 key stream, uint32 ``[num, 16]``.

    Parameters
    ----------
    key
        Key, ``[8]`` uint32.
    counter
        Index of each block, ``[num]`` uint32.
    nonce
        Nonce, ``[3]`` uint32.

    References
    ----------
    Nir and Langley (2018), ChaCha20 and Poly1305 for IETF protocols, RFC 8439, section 2.3.
    """
    fixed = jnp.concatenate([jnp.asarray(_CONSTANTS), key, nonce])[:, None]
    fixed = jnp.broadcast_to(fixed, (15, counter.shape[0]))
    initial = jnp.concatenate([fixed[:12], counter[None], fixed[12:]]).reshape(4, 4, -1)

    def double_round(_: Array, rows: tuple[Array, ...]) -> tuple[Array, ...]:
        a, b, c, d = _quarter_rounds(*rows)  # columns
        diagonals = a, jnp.roll(b, -1, 0), jnp.roll(c, -2, 0), jnp.roll(d, -3, 0)
        a, b, c, d = _quarter_rounds(*diagonals)
        return a, jnp.roll(b, 1, 0), jnp.roll(c, 2, 0), jnp.roll(d, 3, 0)

    mixed = jnp.stack(jax.lax.fori_loop(0, 10, double_round, tuple(initial)))
    return (mixed + initial).reshape(BLOCK_WORDS, -1).T


def _quarter_rounds(a: Array, b: Array, c: Array, d: Array) -> tuple[Array, Array, Array, Array]:
    a, d = _add_and_rotate(a, b, d, 16)
    c, b = _add_and_rotate(c, d, b, 12)
    a, d = _add_and_rotate(a, b, d, 8)
    c, b = _add_and_rotate(c, d, b, 7)
    return a, b, c, d


def _add_and_rotate(x: Array, y: Array, z: Array, distance: int) -> tuple[Array, Array]:
    x = x + y
    z = z ^ x
    return x, (z << jnp.uint32(distance)) | (z >> jnp.uint32(32 - distance))


def _words(key: Array, stream: int, data: ArrayLike, num: int) -> Array:
    """Return the first `num` words of one of a key's streams, uint32."""
    num_blocks = -(-num // BLOCK_WORDS)
    if num_blocks > 2**32:
        raise ValueError(f"A key has at most 2**36 words of 32 bits, got a request for {num}.")
    nonce = jnp.stack([jnp.uint32(stream), jnp.asarray(data).astype(jnp.uint32), jnp.uint32(0)])
    counter = jnp.arange(num_blocks, dtype=jnp.uint32)
    return chacha_block(key, counter, nonce).reshape(-1)[:num]


def _seed(seed: Array) -> Array:
    """Return the key of an integer, with no more randomness than the integer."""
    low = jnp.asarray(seed)
    wide = low.dtype.itemsize > 4
    high = jax.lax.shift_right_logical(low, jnp.asarray(32, low.dtype)) if wide else 0 * low
    words = jnp.stack([low.astype(jnp.uint32), high.astype(jnp.uint32)])
    return jnp.zeros(KEY_WORDS, jnp.uint32).at[:2].set(words)


def _split(key: Array, shape: tuple[int, ...]) -> Array:
    num = int(np.prod(shape, dtype=np.int64))
    return _words(key, _SPLIT, 0, num * KEY_WORDS).reshape(*shape, KEY_WORDS)


def _fold_in(key: Array, data: ArrayLike) -> Array:
    return _words(key, _FOLD_IN, data, KEY_WORDS)


def _random_bits(key: Array, bit_width: int, shape: tuple[int, ...]) -> Array:
    num = int(np.prod(shape, dtype=np.int64))
    words = _words(key, _BITS, 0, -(-num * bit_width // 32))
    if bit_width == 64:
        words = words.reshape(-1, 2)
    if bit_width != 32:
        words = jax.lax.bitcast_convert_type(words, jnp.dtype(f"uint{bit_width}"))
    return words.reshape(-1)[:num].reshape(shape)


CHACHA: Hashable = define_prng_impl(
    key_shape=(KEY_WORDS,),
    seed=_seed,
    split=_split,
    random_bits=_random_bits,
    fold_in=_fold_in,
    name="fedmcmc_chacha20",
    tag="chacha20",
)
"""Generator of keys from `secret_key`, comparable with `jax.random.key_impl`."""


def generator_named(name: str) -> Hashable:
    """Return the argument `impl` of `jax.random.wrap_key_data` for ``str(key_impl(key))``."""
    return CHACHA if name == str(CHACHA) else name


def secret_words(digests: Sequence[bytes]) -> np.ndarray:
    """Return key words for the ChaCha20 generator `CHACHA`, ``[len(digests), 8]`` uint32.

    Parameters
    ----------
    digests
        Secret digests of 32 bytes each.

    Raises
    ------
    ValueError
        If a digest does not have 32 bytes.
    """
    for digest in digests:
        if len(digest) != 4 * KEY_WORDS:
            raise ValueError(f"A secret key has {4 * KEY_WORDS} bytes, got {len(digest)}.")
    return np.frombuffer(b"".join(digests), "<u4").astype(np.uint32).reshape(-1, KEY_WORDS)


def secret_key(digest: bytes) -> Array:
    """Return a typed key of the ChaCha20 generator from 32 secret bytes.

    Raises
    ------
    ValueError
        If `digest` does not have 32 bytes.

    Examples
    --------
    >>> import hashlib
    >>> key = secret_key(hashlib.sha256(b"a secret").digest())
    >>> jax.random.normal(key, (3,)).shape
    (3,)
    """
    return jax.random.wrap_key_data(jnp.asarray(secret_words([digest])[0]), impl=CHACHA)
