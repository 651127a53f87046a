"""Types that every room shares: clients, posteriors, kernels and their states.

A kernel is a pytree. Its functions are `jax.tree_util.Partial` objects around module-level
functions, so that its numbers (step sizes, surrogates, probabilities) are leaves that enter a
compiled program as arguments: two kernels that differ by numbers alone share one compilation.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import jax
from jax import Array
from jax.tree_util import Partial, register_dataclass, register_static

__all__ = [
    "ArrayTree",
    "Arrivals",
    "Broadcast",
    "Client",
    "Cohort",
    "Exact",
    "Exchange",
    "FederatedKernel",
    "FederatedState",
    "GradientEstimator",
    "Number",
    "Participation",
    "PerClient",
    "Posterior",
    "Reference",
    "Static",
    "StepInfo",
    "as_functions",
]

ArrayTree = Any
"""Any pytree of arrays."""

Number = float | Array | Callable[[Array], Array]
"""A float, a traced scalar, or an optax schedule of the communication round."""


T = TypeVar("T", bound=Hashable)


@register_static
@dataclass(frozen=True)
class Static(Generic[T]):
    """A hashable value that is part of a kernel's structure, not of its numbers."""

    value: T


@register_dataclass
@dataclass(frozen=True)
class PerClient:
    """One entry a client: leaves ``[num_clients, ...]``; a step reads its own with `of`."""

    values: ArrayTree

    def of(self, client: "Client") -> ArrayTree:
        """Return the entry of `client`, leaves ``[...]``."""
        return jax.tree.map(lambda leaf: leaf[client.index], self.values)


@register_dataclass
@dataclass(frozen=True)
class Client:
    """One client's rows, as a step sees them.

    Attributes
    ----------
    rows
        The store of all rows, leaves ``[num_rows_in_store, ...]``; the client owns
        ``[start, start + size)`` and reaches them through `fedmcmc.data.fold` and
        `fedmcmc.data.gather` only.
    start, size
        ``[]`` int32.
    index
        ``[]`` int32, the client's id.
    share
        ``[]``, size over the total size; sums to one over all clients.
    weight
        ``[]``, one over the probability of taking part in a round; one where all take part.
    max_size
        Static bound on `size`, the size of the largest client in the store.
    """

    rows: ArrayTree
    start: Array
    size: Array
    index: Array
    share: Array
    weight: Array
    max_size: int = field(metadata={"static": True})


class Posterior(NamedTuple):
    """A model, split so that it can be federated.

    Attributes
    ----------
    logprior_fn
        ``position -> []``, log density of the prior.
    loglikelihood_fn
        ``(position, batch) -> [batch_size]``, one term a row.
    resample_fn
        ``(rng_key, position, batch) -> batch`` with outcomes drawn from the model.
    constrain_fn
        Unconstrained position to the user's parameters.
    init_fn
        ``rng_key -> position``, a place to start from.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> posterior = Posterior(
    ...     logprior_fn=lambda theta: -0.5 * jnp.sum(theta**2),
    ...     loglikelihood_fn=lambda theta, rows: -0.5 * jnp.sum((rows - theta) ** 2, axis=-1),
    ... )
    >>> posterior.loglikelihood_fn(jnp.zeros(2), jnp.ones((3, 2))).shape
    (3,)
    """

    logprior_fn: Callable[[ArrayTree], Array]
    loglikelihood_fn: Callable[[ArrayTree, ArrayTree], Array]
    resample_fn: Callable[[Array, ArrayTree, ArrayTree], ArrayTree] | None = None
    constrain_fn: Callable[[ArrayTree], ArrayTree] | None = None
    init_fn: Callable[[Array], ArrayTree] | None = None


class Broadcast(NamedTuple):
    """All that goes down to a client.

    `round` is ``[]`` int32, `position` the chain's (or the approximation's) position, `extra`
    whatever else a kernel family sends (a snapshot, a cavity). Within a round only, `shared` holds
    what all clients draw alike from one common key, and `summed` what an earlier exchange of the
    round summed; between rounds both are ``()``.
    """

    round: Array
    position: ArrayTree
    extra: ArrayTree = ()
    shared: ArrayTree = ()
    summed: ArrayTree = ()


class FederatedState(NamedTuple):
    """The state of one chain.

    `broadcast` goes down to every client, `server` stays on the server, `clients` has leaves
    ``[num_clients, ...]`` and is ``()`` for kernels whose clients keep nothing.
    """

    broadcast: Broadcast
    server: ArrayTree
    clients: ArrayTree


class Cohort(NamedTuple):
    """Who takes part in one round.

    `ids` is ``[cohort_size]`` int32, `weight` ``[cohort_size]`` one over the probability of
    taking part, `active` ``[cohort_size]`` bool; the entries that are not active are computed
    (shapes are static) but never summed. `late` ``[cohort_size]`` bool is whose message of the
    kernel's own exchange arrives a round late, `garbage` ``[cohort_size]`` the number that all
    numbers of a message turn into on their way, zero where it crosses as it is; both are ``()``
    where that cannot be.
    """

    ids: Array
    weight: Array
    active: Array
    late: ArrayTree = ()
    garbage: ArrayTree = ()


@register_dataclass
@dataclass(frozen=True)
class Participation:
    """Who takes part in a round, and with which weights.

    Attributes
    ----------
    prepare
        ``(rng_key, num_clients) -> Cohort``.
    check
        ``num_clients -> None``, raises `ValueError` where the rule does not fit the federation.
    cohort_size
        Static number of computed clients, ``None`` for all of them in their own order.
    weighted
        Whether messages are multiplied by the cohort's weights before they are summed.
    pooled
        Whether all rows are treated as those of one client.
    silent
        Whether nothing is sent, as by the one client of pooled rows: no bits are counted then.
    drops
        Whether a cohort may hold clients that are not active.
    repeats
        Whether a cohort may hold a client more than once.
    guards
        Whether the server leaves out messages that are not finite: who sent one is not active for
        the rest of the round, and keeps the state that it had before that exchange.
    """

    prepare: Callable[[Array, int], Cohort]
    check: Callable[[int], None]
    cohort_size: int | None = field(metadata={"static": True})
    weighted: bool = field(default=True, metadata={"static": True})
    pooled: bool = field(default=False, metadata={"static": True})
    silent: bool = field(default=False, metadata={"static": True})
    drops: bool = field(default=True, metadata={"static": True})
    repeats: bool = field(default=False, metadata={"static": True})
    guards: bool = field(default=False, metadata={"static": True})


class Arrivals(NamedTuple):
    """The two sums that a server makes of a cohort's messages where some arrive a round late.

    Each has the structure of a message; the sum of the late ones waits for the next round.
    """

    now: ArrayTree
    late: ArrayTree


class Cached(NamedTuple):
    """A part of a client's state that follows from what the server broadcast and the client's rows.

    A simulation that computes silent clients too keeps it for them, so that it is computed once;
    a client that was really absent computes the same when it comes back.
    """

    value: ArrayTree


class Exact(NamedTuple):
    """A part of a message that compressors leave alone.

    For a number that the server divides by: a code is unbiased for a sum, not for a quotient.
    """

    value: ArrayTree


class Reference(NamedTuple):
    """What an estimator needs every client to know besides the position (a snapshot).

    The kernel's server keeps it in `Broadcast.extra`.

    Attributes
    ----------
    update
        ``(round, position, previous) -> reference``: the reference of `round`, whose position is
        given; `previous` is that of the round before, ``None`` for the first.
    missing
        ``(broadcast, state) -> [] bool``: whether a client with this state has to be sent the
        reference besides the position.
    """

    update: Callable[..., ArrayTree]
    missing: Callable[..., Array]


class GradientEstimator(NamedTuple):
    """An estimate of the gradient of one client's log likelihood (a sum over its rows).

    Summed over clients, its expectation is the gradient of the whole log likelihood.

    Attributes
    ----------
    init
        ``(loglikelihood_fn, position, client) -> state``: what the client keeps between rounds.
        Called with a client of the whole federation at a time, before the first round.
    prepare
        ``(rng_key, like, client, num_calls) -> draws``, leaves ``[num_calls, ...]``: all that is
        random in the round's calls, rows of minibatches included. `like` is the position's shapes.
    start
        ``(loglikelihood_fn, broadcast, state, client) -> (context, state)``: what is computed
        once a round.
    estimate
        ``(loglikelihood_fn, draws, position, context, client) -> gradient``, deterministic.
    check
        ``(position, data) -> None``, raises `ValueError` where the estimator does not fit.
    reference
        What has to be broadcast besides the position, if anything.
    summed
        ``(loglikelihood_fn, broadcast, client) -> tree`` whose sum over clients (times one over
        their probability of taking part) the round needs first, in `Broadcast.summed`; ``None``
        where it needs none.
    """

    init: Callable[..., ArrayTree]
    prepare: Callable[..., ArrayTree]
    start: Callable[..., tuple[ArrayTree, ArrayTree]]
    estimate: Callable[..., ArrayTree]
    check: Callable[..., None]
    reference: Reference | None = None
    summed: Callable[..., ArrayTree] | None = None


class Exchange(NamedTuple):
    """One exchange of messages that a round holds before that of the kernel itself.

    The same clients take part in all exchanges of a round, and their state goes from one to the
    next; so do the broadcast and the server's state.

    Attributes
    ----------
    prepare, step, prepare_server, message_fn, commit
        As those of `FederatedKernel`.
    aggregate
        Likewise, but leaves the round's number as it is.
    """

    prepare: Callable[..., ArrayTree]
    step: Callable[..., tuple[ArrayTree, ArrayTree, "StepInfo"]]
    aggregate: Callable[..., tuple[Broadcast, ArrayTree, ArrayTree]]
    prepare_server: Callable[..., ArrayTree] | None = None
    message_fn: Callable[..., ArrayTree] | None = None
    commit: Callable[..., ArrayTree] | None = None

    def take_part(
        self, draws: ArrayTree, broadcast: Broadcast, client_state: ArrayTree, client: Client
    ) -> tuple[ArrayTree, ArrayTree, "StepInfo"]:
        """Return what a client sends, what it keeps and what it reports: step, then commit."""
        message, kept, info = self.step(draws, broadcast, client_state, client)
        if self.commit is not None:
            kept = self.commit(message, broadcast, kept)
        return message, kept, info


class StepInfo(NamedTuple):
    """What a client's step reports.

    `bits` is ``[]`` int32, the size of the message; `gradient_norm` ``[]``, the root mean square
    over the round's gradient calls; `local_positions` the client's iterates, leaves
    ``[num_local_steps, ...]`` (or ``()``); `extra` anything else; `bits_down` ``[]`` int32, what
    had to be sent to the client, where that is not the whole broadcast; `usable` ``[]`` bool, false
    where what the client found was of no use and its message changes nothing (``()`` where that
    cannot be).
    """

    bits: Array
    gradient_norm: Array
    local_positions: ArrayTree = ()
    extra: ArrayTree = ()
    bits_down: ArrayTree = ()
    usable: ArrayTree = ()


class FederatedKernel(NamedTuple):
    """A federated sampler: what a client does, what the server does, where both start.

    Attributes
    ----------
    init
        ``(rng_key, position, data) -> FederatedState``; raises `ValueError` on what does not fit.
    prepare
        ``(rng_key, like, client) -> draws``: all that is random in this client's round; `like`
        holds the broadcast's shapes, never its values, so that blocks of rounds can be prepared
        ahead.
    step
        ``(draws, broadcast, client_state, client) -> (message, client_state, StepInfo)``,
        deterministic. A message is a pytree of differences that the server only ever sums.
    aggregate
        ``(rng_key, broadcast, server_state, total) -> (broadcast, server_state, info)``; instead
        of the key it also takes what `prepare_server` made of it.
    draw
        ``(rng_key, state) -> position``: the chain's position, or a draw from a fitted Gaussian.
    participation
        Who takes part in a round.
    constrain_fn
        Unconstrained position to the user's parameters, if the posterior has one.
    prepare_server
        ``(rng_key, like) -> draws``: all that is random in `aggregate`, so that the runner can
        draw it ahead too; ``None`` where `aggregate` needs nothing but its key.
    message_fn
        ``like -> shapes`` of a message, from the broadcast's shapes; ``None`` where a message is
        shaped as the position.
    prepare_shared
        ``(rng_key, like) -> draws``: what all clients draw alike, from a key that they share; they
        find it in `Broadcast.shared`.
    before
        Exchanges of messages that precede this one in each round.
    commit
        ``(message, broadcast, client_state) -> client_state``: what a client keeps of a message as
        it is sent, after any compression; ``None`` where it keeps nothing of it.
    clients_apart
        Whether clients move positions of their own, over many gradients a round.
    """

    init: Callable[..., FederatedState]
    prepare: Callable[..., ArrayTree]
    step: Callable[..., tuple[ArrayTree, ArrayTree, StepInfo]]
    aggregate: Callable[..., tuple[Broadcast, ArrayTree, ArrayTree]]
    draw: Callable[..., ArrayTree]
    participation: Participation
    constrain_fn: Callable[[ArrayTree], ArrayTree] | None = None
    prepare_server: Callable[..., ArrayTree] | None = None
    message_fn: Callable[..., ArrayTree] | None = None
    prepare_shared: Callable[..., ArrayTree] | None = None
    before: tuple[Exchange, ...] = ()
    clients_apart: Static[bool] = Static(False)
    commit: Callable[..., ArrayTree] | None = None

    def __repr__(self) -> str:
        """Name the module of the step; the numbers and functions within would fill screens."""
        step = getattr(self.step, "func", self.step)
        module, size = getattr(step, "__module__", "?"), self.participation.cohort_size
        numbers = sum(getattr(leaf, "size", 1) for leaf in jax.tree.leaves(self))
        cohort = "all clients" if size is None else f"cohorts of {size}"
        return f"<FederatedKernel of {module}: {cohort}, {numbers} numbers>"

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """All exchanges of a round, the kernel's own last."""
        own = Exchange(
            self.prepare,
            self.step,
            self.aggregate,
            self.prepare_server,
            self.message_fn,
            self.commit,
        )
        return (*self.before, own)


def as_functions(tree: ArrayTree) -> ArrayTree:
    """Wrap every plain function in `tree` as a `Partial`, so that the tree can enter `jax.jit`.

    A wrapped function is compared by identity: pass the same function object to share a
    compilation.
    """

    def wrap(leaf: Any) -> Any:
        if callable(leaf) and not isinstance(leaf, Array):
            return Partial(leaf)
        return leaf

    return jax.tree.map(wrap, tree)
