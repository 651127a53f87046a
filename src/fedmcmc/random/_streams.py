"""Random streams: which key belongs to whom, and bulk draws made from it.

The key of a client's round is ``fold_in(fold_in(rng_key, round), client_id)``; the server and
the choice of the cohort have ids that no client has. Hence a subset of clients, another order,
a sharded run and a deployed run all draw the same numbers.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc._types import ArrayTree
from fedmcmc.pytrees import trees

_SERVER = 2**32 - 1
_COHORT = 2**32 - 2
_DRAW = 2**32 - 3
_SHARED = 2**32 - 4
_STREAM = 2**32 - 6
_START = 2**32 - 1  # in place of a round
_LATENTS = 2**32 - 7  # in place of a round
# Folded into the key of a client's round.
_COMPRESSOR = 2**32 - 4
_PHASE = 2**32 - 256
_PART = 2**32 - 512
_AUGMENTATION = 2**32 - 1024  # also into a key that is split from it
# Folded into the key that chooses the cohort.
_FAULT = 2**32 - 5
MAX_PREPARED_NORMALS = 2**22
"""Above this many numbers per client and round, keys of steps are prepared, not their normals."""


def as_keys(rng_key: Any) -> Array:
    """Return a typed key, or an array of typed keys, also from raw words of `jax.random.PRNGKey`.

    Raises
    ------
    TypeError
        If `rng_key` is no key.
    """
    if not isinstance(rng_key, jax.Array):
        raise TypeError(
            f"rng_key must be a JAX key, as from jax.random.key(0), got {type(rng_key).__name__}."
        )
    if jnp.issubdtype(rng_key.dtype, jax.dtypes.prng_key):
        return rng_key
    if rng_key.dtype != jnp.uint32 or rng_key.ndim == 0:
        raise TypeError(
            f"rng_key must be a JAX key, as from jax.random.key(0), got an array "
            f"{rng_key.dtype}{list(rng_key.shape)}."
        )
    return jax.random.wrap_key_data(rng_key)


def as_key(rng_key: Any) -> Array:
    """Return one typed key, also from the raw words of `jax.random.PRNGKey`.

    Raises
    ------
    TypeError
        If `rng_key` is no key, or an array of keys.
    """
    key = as_keys(rng_key)
    if key.shape:
        raise TypeError(
            f"rng_key must be a single key, got an array of keys with shape {key.shape}, as from "
            f"jax.random.split. Pass one of them, such as keys[0]."
        )
    return key


def client_key(rng_key: Array, round_: Array, index: Array) -> Array:
    """Return the key of client `index` in round `round_`."""
    return jax.random.fold_in(jax.random.fold_in(rng_key, round_), index)


def server_key(rng_key: Array, round_: Array) -> Array:
    """Return the server's key in round `round_`."""
    return jax.random.fold_in(jax.random.fold_in(rng_key, round_), jnp.uint32(_SERVER))


def cohort_key(rng_key: Array, round_: Array) -> Array:
    """Return the key that chooses the cohort of round `round_`."""
    return jax.random.fold_in(jax.random.fold_in(rng_key, round_), jnp.uint32(_COHORT))


def fault_key(rng_key: Array, seed: Array, index: Array) -> Array:
    """Return the key of the faults of client `index` in a round, from that of the round's cohort.

    `seed` is ``[]`` uint32. The stream is nobody else's, so that faults change no other draw.
    """
    fault_stream = jax.random.fold_in(jax.random.fold_in(rng_key, jnp.uint32(_FAULT)), seed)
    return jax.random.fold_in(fault_stream, index)


def shared_key(rng_key: Array, round_: Array) -> Array:
    """Return the key that all clients share in round `round_`."""
    return jax.random.fold_in(jax.random.fold_in(rng_key, round_), jnp.uint32(_SHARED))


def phase_key(rng_key: Array, index: int) -> Array:
    """Return the key of a round's phase `index`, from a client's or the server's round key.

    It is for phases before the kernel's own, whose key is the round key itself.
    """
    return jax.random.fold_in(rng_key, jnp.uint32(_PHASE - index))


def latents_key(rng_key: Array) -> Array:
    """Return the key of clients' first latents, where these are drawn."""
    return jax.random.fold_in(rng_key, jnp.uint32(_LATENTS))


def part_key(rng_key: Array, index: int) -> Array:
    """Return the key of kernel `index` of a sequence, from the key of a client's phase."""
    return jax.random.fold_in(rng_key, jnp.uint32(_PART - index))


def compressor_key(rng_key: Array, depth: int) -> Array:
    """Return the key of a compressor from the key of a client's round.

    `depth` counts the compressors around the kernel further in. The ids are none that
    `jax.random.split` uses, whose keys are those of `jax.random.fold_in` with 0, 1, 2, ...: a
    kernel that splits its key, and a compressor with such an id, would draw the same bits.
    """
    return jax.random.fold_in(rng_key, jnp.uint32(_COMPRESSOR - depth))


def augmentation_key(rng_key: Array) -> Array:
    """Return the key of the transformations of a round's rows, from that of their choice.

    The id is none that `jax.random.split` uses, as that of `compressor_key`.
    """
    return jax.random.fold_in(rng_key, jnp.uint32(_AUGMENTATION))


def draw_key(rng_key: Array, round_: Array) -> Array:
    """Return the key with which a kernel's `draw` is called after round `round_`."""
    return jax.random.fold_in(jax.random.fold_in(rng_key, round_), jnp.uint32(_DRAW))


def start_key(rng_key: Array) -> Array:
    """Return the key of a chain's random start, ``position(start_key)``, from the chain's key."""
    return draw_key(rng_key, jnp.uint32(_START))


def final_key(rng_key: Array) -> Array:
    """Return the key of draws of the last approximation of a run, from the chain's key."""
    return draw_key(rng_key, jnp.uint32(_START - 2))


def init_key(rng_key: Array) -> Array:
    """Return the key with which a chain's kernel is initialized, from the chain's key."""
    return draw_key(rng_key, jnp.uint32(_START - 1))


def stream_key(rng_key: Array, round_: Array) -> Array:
    """Return the key of what a run accumulates, after round `round_`."""
    return jax.random.fold_in(jax.random.fold_in(rng_key, round_), jnp.uint32(_STREAM))


def normals_like(rng_key: Array, like: ArrayTree) -> ArrayTree:
    """Draw one standard normal tree shaped as `like`, a tree of arrays or of their shapes.

    Each number is independent of all others, also of those in other leaves.

    Examples
    --------
    >>> draws = normals_like(jax.random.key(0), {"a": jnp.zeros(2), "b": jnp.zeros(())})
    >>> jax.tree.map(jnp.shape, draws)
    {'a': (2,), 'b': ()}
    """
    return _unravel(jax.random.normal(rng_key, (trees.num_elements(like),)), like)


def uniforms_like(rng_key: Array, like: ArrayTree) -> ArrayTree:
    """Draw one tree shaped as `like` of independent numbers that are uniform on ``[0, 1)``."""
    return _unravel(jax.random.uniform(rng_key, (trees.num_elements(like),)), like)


def normals(rng_key: Array, like: ArrayTree, num: int) -> ArrayTree:
    """Draw `num` standard normal trees shaped as `like`: leaves ``[num, *event]``.

    Where these would be more than `MAX_PREPARED_NORMALS` numbers, returns keys ``[num]`` from
    which `realize_normals` draws one tree at a time. The choice depends on shapes alone.
    """
    if num * trees.num_elements(like) > MAX_PREPARED_NORMALS:
        return jax.random.split(rng_key, num)
    size = trees.num_elements(like)
    # Drawn flat and reshaped: the same numbers, and half the compile time on CPU, where a short
    # last axis is unrolled within the generator.
    return _unravel(jax.random.normal(rng_key, (num * size,)).reshape(num, size), like)


def realize_normals(draws: ArrayTree, like: ArrayTree) -> ArrayTree:
    """Return one standard normal tree from one entry of what `normals` returned."""
    if isinstance(draws, Array) and jnp.issubdtype(draws.dtype, jax.dtypes.prng_key):
        return normals_like(draws, like)
    return draws


def random_words(rng_key: Array, like: ArrayTree) -> Array:
    """Draw 32 random bits for each number of `like`, in a form that `realize_words` unfolds.

    Where these would be more than `MAX_PREPARED_NORMALS` words, returns the key.
    """
    size = trees.num_elements(like)
    return rng_key if size > MAX_PREPARED_NORMALS else _half_words(rng_key, size)


def realize_words(draws: Array, like: ArrayTree) -> ArrayTree:
    """Return a tree shaped as `like` of uniform 32-bit words, uint32; see `word_halves`."""
    halves = word_halves(draws, trees.num_elements(like))
    return trees.unravel(jnp.concatenate(halves), like)


def word_halves(draws: Array, size: int) -> tuple[Array, Array]:
    """Return the first and the second half of `size` uniform 32-bit words, uint32.

    The second are those of the first with their 16-bit halves exchanged, for half the price. Each
    word is exactly uniform; events of the form ``word < threshold`` for two words of a pair differ
    from independent ones by less than ``2**-16`` in probability.
    """
    if jnp.issubdtype(draws.dtype, jax.dtypes.prng_key):
        draws = _half_words(draws, size)
    half = jnp.uint32(16)
    second = draws[: size // 2]
    return draws, (second << half) | (second >> half)


def _half_words(rng_key: Array, size: int) -> Array:
    return jax.random.bits(rng_key, ((size + 1) // 2,), jnp.uint32)


def _unravel(flat: Array, like: ArrayTree) -> ArrayTree:
    return trees.cast_like(trees.unravel(flat, like), like)


def integers_below(rng_key: Array, bound: Array, shape: tuple[int, ...]) -> Array:
    """Draw integers uniform on ``[0, bound)``, int32, one 32-bit word each.

    Takes the high half of the 64-bit product of a random word and `bound`, which is off from
    uniform by less than ``bound / 2**32``; ``floor(uniform * bound)`` is off by
    ``bound / 2**23`` in float32.
    """
    return _high_product(_words(rng_key, shape), bound)


def _words(rng_key: Array, shape: tuple[int, ...]) -> Array:
    # Flat and reshaped, as in `normals`.
    return jax.random.bits(rng_key, (math.prod(shape),), jnp.uint32).reshape(shape)


def _high_product(words: Array, bound: Array) -> Array:
    bound = jnp.asarray(bound).astype(jnp.uint32)
    low, high = jnp.uint32(0xFFFF), jnp.uint32(16)
    a, b = words & low, words >> high
    c, d = bound & low, bound >> high
    middle = b * c + ((a * c) >> high)
    carry = a * d + (middle & low)
    return (b * d + (middle >> high) + (carry >> high)).astype(jnp.int32)


def distinct_integers(
    rng_key: Array, bound: Array, shape: tuple[int, ...], take: Array | None = None
) -> Array:
    """Draw along the last axis distinct integers uniform on ``[0, bound)``, int32.

    Every subset is equally likely; the order within one is not uniform. Where `take` (by default
    `bound`) is below the length of the axis, only its first `take` entries are distinct and the
    rest are zero.

    References
    ----------
    Bentley and Floyd (1987), Programming pearls: a sample of brilliance, algorithm F2.
    """
    num = shape[-1]
    bound = jnp.asarray(bound, jnp.int32)
    # Along the first axis, so that a longer one begins with the same words.
    words = _words(rng_key, (num, *shape[:-1]))
    take = jnp.minimum(num, bound if take is None else take)
    slots = jnp.broadcast_to(jnp.arange(num, dtype=jnp.int32), shape)

    def pick(k: Array, chosen: Array) -> Array:
        last = bound - take + k
        candidate = _high_product(words[k], jnp.maximum(last + 1, 1))
        taken = jnp.any((chosen == candidate[..., None]) & (slots < k), axis=-1)
        entry = jnp.where(k < take, jnp.where(taken, last, candidate), 0)
        return jnp.where(slots == k, entry[..., None], chosen)

    return jax.lax.fori_loop(0, num, pick, jnp.zeros(shape, jnp.int32))
