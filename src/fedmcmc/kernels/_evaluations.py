"""Question for the log likelihoods of all clients at many points."""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc.compression import Quantized, WithExact, message_bits
from fedmcmc.data import CHUNK_ROWS
from fedmcmc.gaussian import Mixture
from fedmcmc.gradients import Terms, fold_terms, row_size
from fedmcmc.kernels._questions import (
    IMPOSSIBLE,
    LOG_ZERO_THRESHOLD,
    Answer,
    Question,
    below_range,
    impossible_in_sum,
    require_unbiased,
)
from fedmcmc.kernels._shared import check_model
from fedmcmc.pytrees import trees
from fedmcmc.types import (
    ArrayTree,
    Broadcast,
    Client,
    ClientTerms,
    Disclosure,
    Federation,
    Posterior,
    Sender,
    Uncompressed,
    as_functions,
    register_dataclass,
)

POINTS_BUDGET = 2**24
"""Numbers (row entries times points) that a client processes at a time."""
MAX_LEVELS = 2**23
"""Bound of the integer levels of a dithered value; minus this bound encodes minus infinity."""


class Points(NamedTuple):
    """Points to evaluate, leaves ``[num, *event]``, and the center of the differences.

    `centre` is a position, leaves ``[*event]``, with a finite log density. Without a center, values
    are no differences, and float32 loses digits of them.
    """

    points: ArrayTree
    centre: ArrayTree = ()


@register_dataclass
@dataclass(frozen=True, eq=False)
class PointRecipe:
    """Recipe with which clients draw the points, to send fewer bits than the points.

    Attributes
    ----------
    words
        ``[2]`` uint32, public key of the Threefry generator.
    mixture
        Distribution of the points, over raveled positions.
    centre
        Position, leaves ``[*event]``.
    num
        Number of points, static.
    """

    words: Array
    mixture: Mixture
    centre: ArrayTree
    num: int = field(metadata={"static": True})

    def draw(self) -> ArrayTree:
        """Return the points, leaves ``[num, *event]``."""
        return jax.vmap(lambda x: trees.unravel(x, self.centre))(
            self.mixture.draw(self._key, self.num)
        )

    def checksum(self) -> Array:
        """Return a sum of words of the generator in two halves, ``[2]`` floats below ``2**16``."""
        total = jnp.sum(jax.random.bits(self._key, (64,), jnp.uint32), dtype=jnp.uint32)
        return jnp.stack([total >> 16, total & 0xFFFF]).astype(jnp.result_type(float))

    @property
    def _key(self) -> Array:
        return jax.random.wrap_key_data(self.words, impl="threefry2x32")


class Dithered(NamedTuple):
    """Points whose log likelihoods are rounded to multiples of a step, with a shared dither.

    A client draws a uniform number ``u`` from the public key, adds it, and rounds to a multiple of
    `step`. The server subtracts the ``u`` of all clients (`dither_of`). The error is then uniform
    within half a step and independent of the value (Schuchman 1964). So it multiplies the mean of
    importance weights by the same factor at every point.

    Attributes
    ----------
    content
        `Points`, or a `PointRecipe`.
    words
        ``[2]`` uint32, public key of the Threefry generator, different for each question.
    step
        ``[]``, step in nats. Values are sent as integers of up to 24 bits.
    """

    content: ArrayTree
    words: Array
    step: Array


def dither_of(content: Dithered, client: Array | int, num: int) -> Array:
    """Return a client's dither of `num` values in units of the step, ``[num]`` in [-1/2, 1/2)."""
    key = jax.random.wrap_key_data(content.words, impl="threefry2x32")
    dtype = jnp.result_type(float)
    return jax.random.uniform(jax.random.fold_in(key, client), (num,), dtype, -0.5, 0.5)


class Evaluated(NamedTuple):
    """Sums of log likelihoods at many points.

    Attributes
    ----------
    value
        ``[num]``, ``log p(rows | point) - log p(rows | centre)``, summed row by row; without a
        center, ``log p(rows | point)``; below -1e29 for minus infinity.
    gradient
        Gradients of `value`, leaves ``[num, *event]``; zero if the value is not finite; or ``()``.
    at_centre
        ``[3]``, ``log p(rows | centre)`` in parts whose sums over clients lose no digits
        (`split_sum`); add the parts in float64.
    invalid
        ``[]``, number of values of clients that are NaN or plus infinity.
    checksum
        ``[2]``, checksum of the clients' generators, if they drew the points; or ``()``.
    """

    value: ArrayTree
    gradient: ArrayTree
    at_centre: Uncompressed
    invalid: Uncompressed
    checksum: ArrayTree

    def to_range(self, limit: float) -> "Evaluated":
        """Return the answer for a secure sum of numbers up to `limit`; see `Ranged`."""
        impossible = below_range(self.value, limit)
        return self._replace(
            value=jnp.where(impossible, -trees.cast(limit, self.value), self.value),
            gradient=zero_where(impossible, self.gradient),
        )

    def from_range(self, limit: float) -> "Evaluated":
        """Return the sum of such answers, with -1e30 for a density of zero."""
        impossible = impossible_in_sum(self.value, limit)
        value = jnp.where(impossible, trees.cast(IMPOSSIBLE, self.value), self.value)
        return self._replace(value=value, gradient=zero_where(impossible, self.gradient))


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Evaluations(Question):
    """Log likelihoods at many points; see `evaluations`."""

    gradients: bool = field(metadata={"static": True})

    traits = replace(Question.traits, check_compressor=require_unbiased)
    disclosure = Disclosure(
        "log likelihoods, and their gradients if the server asks for them, at positions that the "
        "server chooses",
        hidden_in_sums=True,
    )

    def answer(self, content: ArrayTree, client: Client) -> Evaluated:
        if isinstance(content, Dithered):
            content = content.content
        drawn = isinstance(content, PointRecipe)
        points = content.draw() if drawn else content.points
        value, gradient, at_centre = differences(
            self.posterior, points, content.centre, client, gradients=self.gradients
        )
        impossible = ~jnp.isfinite(value)
        invalid = jnp.sum(impossible & ~jnp.isneginf(value), dtype=value.dtype)
        value = jnp.where(impossible, trees.cast(IMPOSSIBLE, value), value)
        return Evaluated(
            value,
            zero_where(impossible, gradient),
            Uncompressed(at_centre),
            Uncompressed(invalid),
            Uncompressed(content.checksum()) if drawn else (),
        )

    def answer_like(self, content: ArrayTree) -> Evaluated:
        if isinstance(content, Dithered):
            content = content.content
        drawn = isinstance(content, PointRecipe)
        num = content.num if drawn else jax.tree.leaves(content.points)[0].shape[0]
        dtype = jnp.result_type(float)
        gradient = (
            content.points
            if not drawn
            else jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct((num, *leaf.shape), leaf.dtype), content.centre
            )
        )
        return Evaluated(
            jax.ShapeDtypeStruct((num,), dtype),
            gradient if self.gradients else (),
            Uncompressed(jax.ShapeDtypeStruct((3,), dtype)),
            Uncompressed(jax.ShapeDtypeStruct((), dtype)),
            Uncompressed(jax.ShapeDtypeStruct((2,), dtype)) if drawn else (),
        )

    def check_content(self, content: ArrayTree, federation: Federation) -> None:
        if isinstance(content, Dithered):
            if self.gradients:
                raise ValueError("Dithered log likelihoods have no gradients: use gradients=False.")
            content = content.content
        position = content.centre
        if trees.is_empty(position):
            position = jax.tree.map(lambda leaf: leaf[0], content.points)
        check_model(self.posterior, position, federation)

    def encode(self, content: ArrayTree, message: Answer, client: Client) -> tuple[Any, Array]:
        evaluated = message.value
        if not isinstance(content, Dithered):
            return super().encode(content, message, client)
        value = evaluated.value
        scaled = value / content.step + dither_of(content, client.index, value.shape[0])
        below, above = value < LOG_ZERO_THRESHOLD, scaled >= MAX_LEVELS
        levels = jnp.clip(jnp.round(scaled), 1 - MAX_LEVELS, MAX_LEVELS - 1)
        levels = jnp.where(below | above, -MAX_LEVELS, levels).astype(jnp.int32)
        num_above = jnp.sum(above, dtype=value.dtype)
        invalid = Uncompressed(evaluated.invalid.value + num_above)
        exact_part = message._replace(value=evaluated._replace(value=(), invalid=invalid))
        code = WithExact(Quantized(jnp.asarray(content.step, jnp.float32), levels), (exact_part,))
        return code, jnp.asarray(message_bits(code.code) + trees.num_bits(code.exact), jnp.int32)

    def decode(
        self, code: ArrayTree, sender: Sender | Client, memory: ArrayTree, like: ArrayTree
    ) -> ArrayTree:
        if not isinstance(code, WithExact):
            return code
        (exact_part,), (step, levels) = code.exact, code.code
        value = levels.astype(jnp.result_type(float)) * step
        value = jnp.where(levels == -MAX_LEVELS, trees.cast(IMPOSSIBLE, value), value)
        return exact_part._replace(value=exact_part.value._replace(value=value))

    def code_like(self, like: Broadcast) -> ArrayTree:
        message = self.message_like(like)
        if not isinstance(like.position, Dithered):
            return message
        evaluated = message.value
        levels = jax.ShapeDtypeStruct(evaluated.value.shape, jnp.int32)
        code = Quantized(jax.ShapeDtypeStruct((), jnp.float32), levels)
        return WithExact(code, (message._replace(value=evaluated._replace(value=())),))


def evaluations(posterior: Posterior, *, gradients: bool = False) -> Evaluations:
    """Return the question for the log likelihoods of all clients at many points.

    The broadcast's position is `Points`, a `PointRecipe` with which clients draw the points, or one
    of these in `Dithered`. Values are differences to a center, row by row, so that float32 loses no
    digits that matter.

    Parameters
    ----------
    posterior
        Model.
    gradients
        If true, clients also send gradients.

    Returns
    -------
    Evaluations
        Kernel whose round is one exchange with all clients; `draw` of its state returns `Answered`
        with an `Evaluated`. If a client's message is missing, the round changes nothing.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, fedmcmc
    >>> posterior = fedmcmc.Posterior(lambda t: -0.5 * t**2, lambda t, x: -0.5 * (x - t) ** 2)
    >>> data = fedmcmc.FederatedData.from_clients([jnp.ones(3), jnp.zeros(5)])
    >>> question = evaluations(posterior)
    >>> init, step = fedmcmc.simulate(question, data)
    >>> state, info = step(jax.random.key(0), init(Points(jnp.array([0.0, 1.0]), jnp.array(0.0))))
    >>> answered = question.draw(jax.random.key(0), state)
    >>> answered.value.value.tolist(), bool(answered.whole)
    ([0.0, -1.0], True)
    """
    return as_functions(Evaluations(posterior, gradients))


def differences(
    posterior: Posterior,
    points: ArrayTree,
    centre: ArrayTree,
    client: Client,
    *,
    gradients: bool,
    budget: int = POINTS_BUDGET,
) -> tuple[Array, ArrayTree, Array]:
    """Return a client's log likelihoods at points minus its log likelihood at a center.

    Points are processed in batches, so that points times rows times numbers per row fit `budget`.

    Returns
    -------
    value
        ``[num]``.
    gradient
        Leaves ``[num, *event]``, or ``()``.
    at_centre
        ``[3]``, log likelihood at the center in parts; see `Evaluated`.
    """
    loglikelihood_fn = posterior.loglikelihood_fn
    rows_per_batch = min(client.max_size, CHUNK_ROWS)
    if isinstance(loglikelihood_fn, ClientTerms):
        rows_per_batch = client.max_size * loglikelihood_fn.passes
    points_per_batch = max(1, budget // (rows_per_batch * max(row_size(client.rows), 1)))

    def evaluate_terms(terms_fn: Terms, mask: Array) -> tuple[Any, Array]:
        at_centre = jnp.zeros(mask.shape, jnp.result_type(float))
        if not trees.is_empty(centre):
            at_centre = terms_fn(centre)

        def total(point: ArrayTree) -> Array:
            return jnp.sum(jnp.where(mask, terms_fn(point) - at_centre, 0))

        fn = jax.value_and_grad(total) if gradients else total
        values = trees.map_in_batches(fn, points, points_per_batch)
        return values, split_sum(*compensated_sum(jnp.where(mask, at_centre, 0)))

    values, at_centre = fold_terms(loglikelihood_fn, evaluate_terms, client)
    value, gradient = values if gradients else (values, ())
    return value, gradient, at_centre


def zero_where(condition: Array, tree: ArrayTree) -> ArrayTree:
    """Return `tree`, leaves ``[num, ...]``, with zeros where `condition` ``[num]`` is true."""

    def zeroed(leaf: Array) -> Array:
        mask = condition.reshape(condition.shape + (1,) * (leaf.ndim - condition.ndim))
        return jnp.where(mask, jnp.zeros((), leaf.dtype), leaf)

    return jax.tree.map(zeroed, tree)


def compensated_sum(terms: Array) -> tuple[Array, Array]:
    """Return the sum of ``[num]`` terms as a rounded sum and its rounding error.

    Terms are added in pairs, with the exact error of each addition (Knuth's two-sum).
    """
    size = 1 << max(terms.shape[0] - 1, 0).bit_length()
    high = jnp.pad(terms, (0, size - terms.shape[0]))
    low = jnp.zeros_like(high)
    while high.shape[0] > 1:
        a, b = high[0::2], high[1::2]
        total = a + b
        part = total - a
        error = (a - (total - part)) + (b - part)
        high, low = total, low[0::2] + low[1::2] + error
    return high[0], low[0]


def split_sum(high: Array, low: Array) -> Array:
    """Return ``high + low`` as multiples of 256, of 1/256, and a remainder, ``[3]``.

    The parts have so few digits that float32 adds them without error: the first part over up to
    65,536 clients or chunks, the second over up to 256.
    """
    coarse = jnp.round(high / 256) * 256
    remainder = high - coarse
    fine = jnp.round(remainder * 256) / 256
    return jnp.stack([coarse, fine, (remainder - fine) + low])
