"""Questions: rounds in which all clients answer, whose whole result is the sum of the answers.

The log likelihood at many points, and whatever else the server needs summed once: every client
answers, or the round is void and the same question is asked again. A sum without one client would
be that of another posterior.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import register_dataclass

from fedmcmc._types import (
    ArrayTree,
    Broadcast,
    Client,
    ClientTerms,
    Exact,
    FederatedKernel,
    FederatedState,
    Federation,
    Participation,
    Posterior,
    Sender,
    StepInfo,
    as_functions,
)
from fedmcmc.compression import Memory, Quantized, WithExact, message_bits
from fedmcmc.data import CHUNK_ROWS
from fedmcmc.gaussian import Mixture
from fedmcmc.gradients import Terms, fold_terms, minus_hessian, row_size
from fedmcmc.kernels._shared import check_model
from fedmcmc.participation import full
from fedmcmc.pytrees import trees

POINTS_BUDGET = 2**24
"""Numbers of rows and points that one client takes at a time."""
IMPOSSIBLE = -1e30
"""What a client sends for a log likelihood of minus infinity, so that sums stay finite."""
BELOW = -1e29
"""Sums below this are read as minus infinity."""
MOST_LEVELS = 2**23
"""Steps of a dithered value on both sides of zero; one more stands for minus infinity."""
EVERYONE = replace(full(), weighted=False)


class Answer(NamedTuple):
    """A client's message: its answer, and one, whose sum says how many answered."""

    value: ArrayTree
    one: Exact


class Answered(NamedTuple):
    """What a server knows after a question: the sum of the answers, and whether it is whole."""

    value: ArrayTree
    whole: Array


class _Server(NamedTuple):
    answered: Answered
    num_clients: Array


@dataclass(frozen=True, eq=False, repr=False)
class Question(FederatedKernel):
    """A question to all clients; `draw` of its state is `Answered`.

    What is asked about (points, a center) is the broadcast's position, any pytree. A subclass
    writes `answer` and `check_content`.
    """

    posterior: Posterior
    participation: Participation = field(default=EVERYONE, kw_only=True)

    @property
    def needs_everyone(self) -> bool:
        return True

    def answer(self, content: ArrayTree, client: Client) -> ArrayTree:
        """Return the client's term of the sum."""
        raise NotImplementedError

    def answer_like(self, content: ArrayTree) -> ArrayTree:
        """Return the shapes of an answer, from those of the content."""
        raise NotImplementedError

    def check_content(self, content: ArrayTree, federation: Federation) -> None:
        """Raise `ValueError` unless model, content and rows fit together."""

    def encode(self, content: ArrayTree, message: Answer, client: Client) -> tuple[Any, Array]:
        """Return what leaves the client, which `decode` reads, and its bits, ``[]`` int32."""
        return message, jnp.asarray(trees.num_bits(message), jnp.int32)

    def server_init(
        self,
        rng_key: Array,
        position: ArrayTree,
        federation: Federation,
        totals: tuple[ArrayTree, ...],
    ) -> tuple[Broadcast, _Server]:
        self.check_content(position, federation)
        like = self.answer_like(trees.shapes_of(position))
        nothing = Answered(trees.zeros_like(like), jnp.zeros((), bool))
        count = jnp.asarray(federation.num_clients, jnp.result_type(float))
        return Broadcast(jnp.zeros((), jnp.int32), position), _Server(nothing, count)

    def step(
        self, draws: ArrayTree, broadcast: Broadcast, client_state: ArrayTree, client: Client
    ) -> tuple[Any, ArrayTree, StepInfo]:
        content = broadcast.position
        message = Answer(self.answer(content, client), Exact(jnp.ones((), jnp.result_type(float))))
        code, bits = self.encode(content, message, client)
        return code, client_state, StepInfo(bits, jnp.zeros((), jnp.result_type(float)))

    def aggregate(
        self, rng_key: ArrayTree, broadcast: Broadcast, server_state: _Server, total: Answer
    ) -> tuple[Broadcast, _Server, ArrayTree]:
        whole = total.one.value == server_state.num_clients
        value = trees.select(whole, total.value, server_state.answered.value)
        server = _Server(Answered(value, whole), server_state.num_clients)
        return broadcast._replace(round=broadcast.round + 1), server, ()

    def message_like(self, like: Broadcast) -> ArrayTree:
        count = jax.ShapeDtypeStruct((), jnp.result_type(float))
        return Answer(self.answer_like(like.position), Exact(count))

    @property
    def leaves_out_beyond(self) -> bool:
        """Whether an answer to be trusted lacks places where numbers are beyond a secure sum's."""
        return False

    def answer_in_range(self, answer: ArrayTree, most: float) -> ArrayTree:
        """Return an answer for a secure sum; see `in_range`."""
        return answer

    def answer_from_range(self, total: ArrayTree, most: float) -> ArrayTree:
        """Return a sum of such answers as it is read; see `from_range`."""
        return total

    def in_range(self, message: Answer, most: float) -> Answer:
        return message._replace(value=self.answer_in_range(message.value, most))

    def from_range(self, total: Answer, most: float) -> Answer:
        return total._replace(value=self.answer_from_range(total.value, most))

    def draw(self, rng_key: Array, state: FederatedState) -> Answered:
        answered: Answered = state.server.answered
        return answered


def below_range(value: Array, most: float) -> Array:
    """Return where log likelihoods mean a density of zero in a secure sum of this range."""
    return value < -trees.cast(most, value)


def impossible_in_sum(value: Array, most: float) -> Array:
    """Return where a sum is that of log likelihoods of which one was sent as the lowest number.

    The others cannot make up for it: they are differences to a center that is not far off.
    """
    return value < -trees.cast(most, value) / 2


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


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Evaluations(Question):
    """Log likelihoods at many points; see `evaluations`."""

    gradients: bool = field(metadata={"static": True})

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

    def answer_in_range(self, answer: Evaluated, most: float) -> Evaluated:
        impossible = below_range(answer.value, most)
        return answer._replace(
            value=jnp.where(impossible, -trees.cast(most, answer.value), answer.value),
            gradient=zero_where(impossible, answer.gradient),
        )

    def answer_from_range(self, total: Evaluated, most: float) -> Evaluated:
        impossible = impossible_in_sum(total.value, most)
        value = jnp.where(impossible, trees.cast(IMPOSSIBLE, total.value), total.value)
        return total._replace(value=value, gradient=zero_where(impossible, total.gradient))

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

    def check_compressor(self, compressor: Any) -> None:
        if not compressor.unbiased or isinstance(compressor, Memory):
            raise ValueError(
                "Log likelihoods need an unbiased compressor without memory (quantize): the error "
                "of another one follows the point, and weights made of them are wrong."
            )


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


class Expanded(NamedTuple):
    """Sums over clients of expansions of log likelihoods at some points.

    Attributes
    ----------
    value
        ``[num]``, ``log p(rows | point) - log p(rows | centre)``.
    gradient
        ``[num, d]`` over raveled positions.
    curvature
        Minus the Hessian: its upper triangle row by row, ``[num, d (d + 1) / 2]``; its diagonal,
        ``[num, d]``; or ``()``.
    """

    value: ArrayTree
    gradient: ArrayTree
    curvature: ArrayTree


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Expansions(Question):
    """Log likelihoods with their derivatives at a few points; see `expansions`."""

    curvature: str = field(metadata={"static": True})

    def answer(self, content: Points, client: Client) -> Expanded:
        loglikelihood_fn = self.posterior.loglikelihood_fn

        def of_terms(terms_fn: Terms, mask: Array) -> tuple[Array, Array, ArrayTree]:
            at_centre = terms_fn(content.centre)

            def one(point: ArrayTree) -> tuple[Array, Array, ArrayTree]:
                def total(flat: Array) -> Array:
                    place = trees.cast_like(trees.unravel(flat, point), point)
                    return jnp.sum(jnp.where(mask, terms_fn(place) - at_centre, 0))

                flat = trees.ravel(point)
                value, gradient = jax.value_and_grad(total)(flat)
                if self.curvature == "none":
                    return value, gradient, ()
                dense = self.curvature == "dense"
                curvature = minus_hessian(total, flat, dense=dense)
                upper = jnp.triu_indices(flat.shape[0])
                return value, gradient, curvature[upper] if dense else curvature

            return jax.lax.map(one, content.points)

        return Expanded(*fold_terms(loglikelihood_fn, of_terms, client))

    @property
    def leaves_out_beyond(self) -> bool:
        return True

    def answer_in_range(self, answer: Expanded, most: float) -> Expanded:
        """Return an answer with the lowest value where a place is of no use, as a mode is none.

        Twice that where derivatives or a large value do not fit, so that they are counted.
        """
        lowest = -trees.cast(most, answer.value)
        derivatives = answer.gradient, answer.curvature
        finite = jnp.isfinite(answer.value) & jax.vmap(trees.all_finite)(derivatives)
        impossible = ~finite | below_range(answer.value, most)
        sizes = jax.tree.map(
            lambda x: jnp.max(jnp.abs(x), axis=1), (answer.value[:, None], derivatives)
        )
        beyond = jnp.stack(jax.tree.leaves(sizes)).max(0) > most
        value = jnp.where(impossible, lowest, jnp.where(beyond, 2 * lowest, answer.value))
        none = impossible | beyond
        return Expanded(value, *zero_where(none, derivatives))

    def answer_from_range(self, total: Expanded, most: float) -> Expanded:
        impossible = impossible_in_sum(total.value, most)
        return total._replace(value=jnp.where(impossible, -jnp.inf, total.value))

    def answer_like(self, content: Points) -> Expanded:
        size = trees.num_elements(content.centre)
        num = jax.tree.leaves(content.points)[0].shape[0]
        dtype = jax.eval_shape(trees.ravel, content.centre).dtype
        curvature: ArrayTree = ()
        if self.curvature != "none":
            entries = size * (size + 1) // 2 if self.curvature == "dense" else size
            curvature = jax.ShapeDtypeStruct((num, entries), dtype)
        value = jax.ShapeDtypeStruct((num,), jnp.result_type(float))
        gradient = jax.ShapeDtypeStruct((num, size), dtype)
        return Expanded(value, gradient, curvature)

    def check_content(self, content: Points, federation: Federation) -> None:
        check_model(self.posterior, content.centre, federation)

    def check_compressor(self, compressor: Any) -> None:
        if not compressor.unbiased or isinstance(compressor, Memory):
            raise ValueError(
                "Gradients and curvatures at a point need an unbiased compressor without memory "
                "(quantize, with many levels): steps along others lead elsewhere."
            )


def expansions(
    posterior: Posterior, *, curvature: Literal["dense", "diagonal", "none"] = "dense"
) -> Expansions:
    """Ask all clients for log likelihoods, gradients and minus Hessians at a few `Points`.

    What Newton's method and the Laplace approximation at a mode need; numbers that are not finite
    are sent as they are.
    """
    return as_functions(Expansions(posterior, curvature))
