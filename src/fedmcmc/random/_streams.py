"""Keys of random streams, and bulk draws from keys.

The key of a client's round is ``fold_in(fold_in(rng_key, round), client_id)``. The server and the
choice of the cohort have ids that no client has. A subset of clients, another order, a sharded run
and a deployed run therefore all draw the same numbers.
"""

import math

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc.pytrees import trees
from fedmcmc.types import ArrayTree, compiled

_SERVER = 2**32 - 1
_COHORT = 2**32 - 2
_DRAW = 2**32 - 3
_SHARED = 2**32 - 4
_STREAM = 2**32 - 6
# Folded in place of the number of a round.
_START = 2**32 - 1
_INIT = 2**32 - 2
_FINAL = 2**32 - 3
# Folded into the key of a client's round. `jax.random.split` has the keys of fold_in with 0, 1, 2,
# ..., so a kernel that splits its key never draws the bits of these streams.
_COMPRESSOR = 2**32 - 4
_PHASE = 2**32 - 256
_PART = 2**32 - 512
_AUGMENTATION = 2**32 - 1024
# Folded into the key that chooses the cohort.
_FAULT = 2**32 - 5
MAX_PREPARED_NORMALS = 2**22
"""Largest count of prepared numbers per client and round; above it, keys are prepared."""


def as_keys(rng_key: object) -> Array:
    """Return a typed key, or an array of typed keys, also from raw words of `jax.random.PRNGKey`.

    Raises
    ------
    TypeError
        If `rng_key` is not a key.
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


def as_key(rng_key: object) -> Array:
    """Return one typed key, also from the raw words of `jax.random.PRNGKey`.

    Raises
    ------
    TypeError
        If `rng_key` is not a key, or is an array of keys.
    """
    key = as_keys(rng_key)
    if key.shape:
        raise TypeError(
            f"rng_key must be a single key, got an array of keys with shape {key.shape}, as from "
            f"jax.random.split. Pass one of them, such as keys[0]."
        )
    return key


@compiled(optimize=False)
def folded_key(rng_key: Array, number: Array | int) -> Array:
    """Return `jax.random.fold_in` of a key and a number, by a program that compiles quickly."""
    return jax.random.fold_in(rng_key, number)


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
    """Return the key of client `index` for faults, from the round's cohort key.

    `seed` is ``[]`` uint32. No other stream uses this key, so faults do not change other draws.
    """
    fault_stream = jax.random.fold_in(jax.random.fold_in(rng_key, jnp.uint32(_FAULT)), seed)
    return jax.random.fold_in(fault_stream, index)


def shared_key(rng_key: Array, round_: Array) -> Array:
    """Return the key shared by all clients in round `round_`."""
    return jax.random.fold_in(jax.random.fold_in(rng_key, round_), jnp.uint32(_SHARED))


def phase_key(rng_key: Array, index: int) -> Array:
    """Return the key of an extra phase `index`, from the round key of a client or the server.

    The kernel's own phase uses the round key itself.
    """
    return jax.random.fold_in(rng_key, jnp.uint32(_PHASE - index))


def part_key(rng_key: Array, index: int) -> Array:
    """Return the key of kernel `index` of a sequence, from the key of a client's phase."""
    return jax.random.fold_in(rng_key, jnp.uint32(_PART - index))


def compressor_key(rng_key: Array, depth: int) -> Array:
    """Return the key of a compressor around `depth` others, from the key of a client's round."""
    return jax.random.fold_in(rng_key, jnp.uint32(_COMPRESSOR - depth))


def augmentation_key(rng_key: Array) -> Array:
    """Return the key for transforming a round's rows, from the key that chooses the rows."""
    return jax.random.fold_in(rng_key, jnp.uint32(_AUGMENTATION))


def draw_key(rng_key: Array, round_: Array) -> Array:
    """Return the key for a kernel's `draw` after round `round_`."""
    return jax.random.fold_in(jax.random.fold_in(rng_key, round_), jnp.uint32(_DRAW))


def start_key(rng_key: Array) -> Array:
    """Return the key of a chain's random start, ``position(start_key)``, from the chain's key."""
    return draw_key(rng_key, jnp.uint32(_START))


def final_key(rng_key: Array) -> Array:
    """Return the key for draws from a run's final approximation, from the chain's key."""
    return draw_key(rng_key, jnp.uint32(_FINAL))


def init_key(rng_key: Array) -> Array:
    """Return the key that initializes a chain's kernel, from the chain's key."""
    return draw_key(rng_key, jnp.uint32(_INIT))


def stream_key(rng_key: Array, round_: Array) -> Array:
    """Return the key for a run's accumulators after round `round_`."""
    return jax.random.fold_in(jax.random.fold_in(rng_key, round_), jnp.uint32(_STREAM))


def normals_like(rng_key: Array, like: ArrayTree) -> ArrayTree:
    """Draw one tree of independent standard normals, shaped as `like` (arrays or shapes).

    Examples
    --------
    >>> draws = normals_like(jax.random.key(0), {"a": jnp.zeros(2), "b": jnp.zeros(())})
    >>> jax.tree.map(jnp.shape, draws)
    {'a': (2,), 'b': ()}
    """
    return _unravel(jax.random.normal(rng_key, (trees.num_elements(like),)), like)


def uniforms_like(rng_key: Array, like: ArrayTree) -> ArrayTree:
    """Draw one tree of independent uniforms on ``[0, 1)``, shaped as `like`."""
    return _unravel(jax.random.uniform(rng_key, (trees.num_elements(like),)), like)


def normals(rng_key: Array, like: ArrayTree, num: int) -> ArrayTree:
    """Draw `num` standard normal trees shaped as `like`: leaves ``[num, *event]``.

    If there are more than `MAX_PREPARED_NORMALS` numbers, return keys ``[num]`` instead;
    `realize_normals` then draws one tree at a time.
    """
    if num * trees.num_elements(like) > MAX_PREPARED_NORMALS:
        return jax.random.split(rng_key, num)
    size = trees.num_elements(like)
    # Draw a flat vector and reshape it: the numbers are the same, and it takes half the compile
    # time on CPU, where XLA unrolls a short last axis within the generator.
    return _unravel(jax.random.normal(rng_key, (num * size,)).reshape(num, size), like)


def realize_normals(draws: ArrayTree, like: ArrayTree) -> ArrayTree:
    """Return one standard normal tree from one entry of the result of `normals`."""
    if isinstance(draws, Array) and jnp.issubdtype(draws.dtype, jax.dtypes.prng_key):
        return normals_like(draws, like)
    return draws


def random_words(rng_key: Array, like: ArrayTree) -> Array:
    """Draw random bits for `realize_words`: 32 bits per number of `like`, from half as many words.

    If there are more than `MAX_PREPARED_NORMALS` numbers, return the key instead.
    """
    size = trees.num_elements(like)
    return rng_key if size > MAX_PREPARED_NORMALS else _half_words(rng_key, size)


def realize_words(draws: Array, like: ArrayTree) -> ArrayTree:
    """Return a tree of uniform 32-bit words, uint32, shaped as `like`; see `word_halves`."""
    halves = word_halves(draws, trees.num_elements(like))
    return trees.unravel(jnp.concatenate(halves), like)


def word_halves(draws: Array, size: int) -> tuple[Array, Array]:
    """Return the first and the second half of `size` uniform 32-bit words, uint32.

    Words of the second half are words of the first half with exchanged 16-bit halves, which saves
    half the time. Each word is exactly uniform. For the two words of a pair, the joint probability
    of events ``word < threshold`` differs from independence by less than ``2**-16``.
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

    The result is the high half of the 64-bit product of a random word and `bound`. Its deviation
    from uniform is below ``bound / 2**32``, which is ``2**9`` times less than with a float32.
    """
    return _high_product(_words(rng_key, shape), bound)


def _words(rng_key: Array, shape: tuple[int, ...]) -> Array:
    # Draw a flat vector and reshape it, as in `normals`.
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
    rng_key: Array, bound: Array, shape: tuple[int, ...], take: Array | int | None = None
) -> Array:
    """Draw distinct integers along the last axis, uniform on ``[0, bound)``, int32.

    All subsets are equally likely, but their order is not uniform. If `take` (by default `bound`)
    is below the length of the axis, the first `take` entries are distinct and the others are zero.

    References
    ----------
    Bentley and Floyd (1987), Programming pearls: a sample of brilliance, algorithm F2.
    """
    num = shape[-1]
    bound = jnp.asarray(bound, jnp.int32)
    # Put the numbers along the first axis, so that a longer axis starts with the same words.
    words = _words(rng_key, (num, *shape[:-1]))
    take = jnp.minimum(num, bound if take is None else take)
    slots = jnp.broadcast_to(jnp.arange(num, dtype=jnp.int32), shape)

    def pick(k: Array, chosen: Array) -> Array:
        largest = bound - take + k
        candidate = _high_product(words[k], jnp.maximum(largest + 1, 1))
        is_chosen = jnp.any((chosen == candidate[..., None]) & (slots < k), axis=-1)
        entry = jnp.where(k < take, jnp.where(is_chosen, largest, candidate), 0)
        return jnp.where(slots == k, entry[..., None], chosen)

    return jax.lax.fori_loop(0, num, pick, jnp.zeros(shape, jnp.int32))
