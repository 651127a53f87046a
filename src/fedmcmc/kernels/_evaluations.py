"""Log likelihoods at many points, asked of all clients at once."""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc._types import (
    ArrayTree,
    Broadcast,
    Client,
    ClientTerms,
    Disclosure,
    Exact,
    Federation,
    Posterior,
    Sender,
    as_functions,
    register_dataclass,
)
from fedmcmc.compression import Memory, Quantized, WithExact, message_bits
from fedmcmc.data import CHUNK_ROWS
from fedmcmc.gaussian import Mixture
from fedmcmc.gradients import Terms, fold_terms, row_size
from fedmcmc.kernels._questions import (
    BELOW,
    IMPOSSIBLE,
    Answer,
    Question,
    below_range,
    impossible_in_sum,
)
from fedmcmc.kernels._shared import check_model
from fedmcmc.pytrees import trees

POINTS_BUDGET = 2**24
"""Numbers of rows and points that one client takes at a time."""
MOST_LEVELS = 2**23
"""Steps of a dithered value on both sides of zero; one more stands for minus infinity."""


class Points(NamedTuple):
    """Points to evaluate, leaves ``[num, *event]``, and the center that differences are taken to.

    `centre` is a position, leaves ``[*event]``, where the log density is finite; without one values
    are no differences, and float32 loses digits of them.
    """

    points: ArrayTree
    centre: ArrayTree = ()


@register_dataclass
@dataclass(frozen=True, eq=False)
class Recipe:
    """How clients draw the points by themselves: fewer bits where points are many.

    Attributes
    ----------
    words
        ``[2]`` uint32, a public key of the Threefry generator, whatever generator JAX is set to.
    mixture
        What points are drawn of, over raveled positions.
    centre
        A position, leaves ``[*event]``.
    num
        How many points, static.
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

    A client adds a uniform number ``u`` of its own from the public key and rounds to a multiple of
    `step`; whoever asks subtracts the ``u`` of all clients (`dither_of`). The error is then uniform
    within half a step and independent of the value (Schuchman 1964), so that weights made of the
    sums have a constant factor in the mean. Rounded without that, they have one that depends on the
    point.

    Attributes
    ----------
    content
        `Points`, or a `Recipe`.
    words
        ``[2]`` uint32, a public key of the Threefry generator, another one for each question.
    step
        ``[]``, in nats. Values are sent as integers of up to 24 bits.
    """

    content: Any
    words: Array
    step: Array


def dither_of(asked: Dithered, client: Array | int, num: int) -> Array:
    """Return what a client adds to `num` values in units of the step, ``[num]`` in [-1/2, 1/2)."""
    key = jax.random.wrap_key_data(asked.words, impl="threefry2x32")
    dtype = jnp.result_type(float)
    return jax.random.uniform(jax.random.fold_in(key, client), (num,), dtype, -0.5, 0.5)


class Evaluated(NamedTuple):
    """Sums of log likelihoods at many points.

    Attributes
    ----------
    value
        ``[num]``, ``log p(rows | point) - log p(rows | centre)``, summed row by row (without a
        center the former alone); below -1e29 where it is minus infinity.
    gradient
        Of `value`, leaves ``[num, *event]``; zero where the value is not finite; or ``()``.
    at_centre
        ``[3]``, ``log p(rows | centre)`` in parts whose sums over clients lose no digit; add them
        in float64 (`in_parts`).
    invalid
        ``[]``, at how many points a client's value was NaN or plus infinity.
    checksum
        ``[2]``, of the clients' generators, where they drew the points; or ``()``.
    """

    value: ArrayTree
    gradient: ArrayTree
    at_centre: Exact
    invalid: Exact
    checksum: ArrayTree

    def to_range(self, limit: float) -> "Evaluated":
        """Return the answer for a secure sum of numbers up to `limit`; see `Ranged`."""
        impossible = below_range(self.value, limit)
        return self._replace(
            value=jnp.where(impossible, -trees.cast(limit, self.value), self.value),
            gradient=zero_where(impossible, self.gradient),
        )

    def from_range(self, limit: float) -> "Evaluated":
        """Return a sum of such answers as the server reads it."""
        impossible = impossible_in_sum(self.value, limit)
        value = jnp.where(impossible, trees.cast(IMPOSSIBLE, self.value), self.value)
        return self._replace(value=value, gradient=zero_where(impossible, self.gradient))


def _check_unbiased(kernel: Any, compressor: Any) -> None:
    if not compressor.unbiased or isinstance(compressor, Memory):
        raise ValueError(
            "Log likelihoods need an unbiased compressor without memory (quantize): the error "
            "of another one follows the point, and weights made of them are wrong."
        )


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Evaluations(Question):
    """Log likelihoods at many points; see `evaluations`."""

    gradients: bool = field(metadata={"static": True})

    traits = replace(Question.traits, check_compressor=_check_unbiased)
    disclosure = Disclosure(
        "log likelihoods, and their gradients if the server asks for them, at positions that the "
        "server chooses",
        hidden_in_sums=True,
    )

    def answer(self, content: ArrayTree, client: Client) -> Evaluated:
        if isinstance(content, Dithered):
            content = content.content
        drawn = isinstance(content, Recipe)
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
            Exact(at_centre),
            Exact(invalid),
            Exact(content.checksum()) if drawn else (),
        )

    def answer_like(self, content: ArrayTree) -> Evaluated:
        if isinstance(content, Dithered):
            content = content.content
        drawn = isinstance(content, Recipe)
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
            Exact(jax.ShapeDtypeStruct((3,), dtype)),
            Exact(jax.ShapeDtypeStruct((), dtype)),
            Exact(jax.ShapeDtypeStruct((2,), dtype)) if drawn else (),
        )

    def check_content(self, content: ArrayTree, federation: Federation) -> None:
        if isinstance(content, Dithered):
            if self.gradients:
                raise ValueError("Only log likelihoods are dithered: ask without gradients.")
            content = content.content
        one = content.centre
        if trees.is_empty(one):
            one = jax.tree.map(lambda leaf: leaf[0], content.points)
        check_model(self.posterior, one, federation)

    def encode(self, content: ArrayTree, message: Answer, client: Client) -> tuple[Any, Array]:
        asked, evaluated = content, message.value
        if not isinstance(asked, Dithered):
            return super().encode(asked, message, client)
        value = evaluated.value
        exact = value / asked.step + dither_of(asked, client.index, value.shape[0])
        below, above = value < BELOW, exact >= MOST_LEVELS
        levels = jnp.clip(jnp.round(exact), 1 - MOST_LEVELS, MOST_LEVELS - 1)
        levels = jnp.where(below | above, -MOST_LEVELS, levels).astype(jnp.int32)
        num_above = jnp.sum(above, dtype=value.dtype)
        invalid = Exact(evaluated.invalid.value + num_above)
        rest = message._replace(value=evaluated._replace(value=(), invalid=invalid))
        code = WithExact(Quantized(jnp.asarray(asked.step, jnp.float32), levels), (rest,))
        return code, jnp.asarray(message_bits(code.code) + trees.num_bits(code.exact), jnp.int32)

    def decode(
        self, code: Any, sender: Sender | Client, memory: ArrayTree, like: ArrayTree
    ) -> ArrayTree:
        if not isinstance(code, WithExact):
            return code
        (rest,), (step, levels) = code.exact, code.code
        value = levels.astype(jnp.result_type(float)) * step
        value = jnp.where(levels == -MOST_LEVELS, trees.cast(IMPOSSIBLE, value), value)
        return rest._replace(value=rest.value._replace(value=value))

    def code_like(self, like: Broadcast) -> ArrayTree:
        message = self.message_like(like)
        if not isinstance(like.position, Dithered):
            return message
        evaluated = message.value
        levels = jax.ShapeDtypeStruct(evaluated.value.shape, jnp.int32)
        code = Quantized(jax.ShapeDtypeStruct((), jnp.float32), levels)
        return WithExact(code, (message._replace(value=evaluated._replace(value=())),))


def evaluations(posterior: Posterior, *, gradients: bool = False) -> Evaluations:
    """Ask all clients for their log likelihoods at many points.

    The broadcast's position is `Points`, a `Recipe` by which clients draw the points, or one of
    these `Dithered`. Values
    are differences to a center, row by row, so that float32 loses no digit that matters: for
    200,000 rows and a difference of -10.6 nats the error is 1e-6, as the difference of two sums it
    is 2e-3.

    Parameters
    ----------
    posterior
        The model.
    gradients
        Whether gradients are asked for, too.

    Returns
    -------
    Evaluations
        A kernel whose round is one exchange with all clients; `draw` of its state is `Answered`,
        with an `Evaluated`. A round in which a client is missing changes nothing.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(
    ...     lambda theta: -0.5 * theta**2, lambda theta, x: -0.5 * (x - theta) ** 2
    ... )
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
    """Return a client's log likelihoods at points minus that at a center, and the latter.

    As many points are taken at a time as rows times numbers of a row fit `budget`.

    Returns
    -------
    value
        ``[num]``.
    gradient
        Leaves ``[num, *event]``, or ``()``.
    at_centre
        ``[3]``, see `Evaluated`.
    """
    loglikelihood_fn = posterior.loglikelihood_fn
    rows_at_a_time = min(client.max_size, CHUNK_ROWS)
    if isinstance(loglikelihood_fn, ClientTerms):
        rows_at_a_time = client.max_size * loglikelihood_fn.passes
    at_a_time = max(1, budget // (rows_at_a_time * max(row_size(client.rows), 1)))

    def of_terms(terms_fn: Terms, mask: Array) -> tuple[Any, Array]:
        at_centre = jnp.zeros(mask.shape, jnp.result_type(float))
        if not trees.is_empty(centre):
            at_centre = terms_fn(centre)

        def total(point: ArrayTree) -> Array:
            return jnp.sum(jnp.where(mask, terms_fn(point) - at_centre, 0))

        one = jax.value_and_grad(total) if gradients else total
        values = trees.map_in_lots(one, points, at_a_time)
        return values, in_parts(*compensated_sum(jnp.where(mask, at_centre, 0)))

    values, at_centre = fold_terms(loglikelihood_fn, of_terms, client)
    value, gradient = values if gradients else (values, ())
    return value, gradient, at_centre


def zero_where(condition: Array, tree: ArrayTree) -> ArrayTree:
    """Return `tree`, leaves ``[num, ...]``, with zeros where `condition` ``[num]`` holds."""

    def zeroed(leaf: Array) -> Array:
        mask = condition.reshape(condition.shape + (1,) * (leaf.ndim - condition.ndim))
        return jnp.where(mask, jnp.zeros((), leaf.dtype), leaf)

    return jax.tree.map(zeroed, tree)


def compensated_sum(terms: Array) -> tuple[Array, Array]:
    """Return the sum of ``[num]`` terms as a pair of floats, the second what the first lost.

    Pairs of terms are added at a time, with the exact error of each addition (Knuth's two-sum).
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


def in_parts(high: Array, low: Array) -> Array:
    """Return ``high + low`` as multiples of 256, of 1/256, and the rest, ``[3]``.

    Each part has so few digits that float32 adds it without error: up to 65,536 clients or chunks
    the first, 256 the second.
    """
    first = jnp.round(high / 256) * 256
    rest = high - first
    second = jnp.round(rest * 256) / 256
    return jnp.stack([first, second, (rest - second) + low])
