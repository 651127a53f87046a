"""Types that every room shares: clients, posteriors, phases and kernels and their states.

A kernel is a frozen dataclass and a pytree. Its numbers (step sizes, surrogates, probabilities) are
leaves that enter a compiled program as arguments, its structure is static: two kernels that differ
by numbers alone share one compilation.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import Partial, register_dataclass, register_static

ArrayTree = Any
"""Any pytree of arrays."""

LogDensity = Callable[..., Array]
"""A log density of a position, or one of each row given a position."""

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
    """One entry per client: leaves ``[num_clients, ...]``; a step reads its own with `of`."""

    values: ArrayTree

    def of(self, client: "Client | Sender") -> ArrayTree:
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
        ``(position, batch) -> [batch_size]``, one term per row.
    resample_fn
        ``(rng_key, position, batch) -> batch`` with outcomes drawn from the model.
    constrain_fn
        Unconstrained position to the user's parameters.
    init_fn
        ``rng_key -> position``, a place to start from.
    position_fn
        Of a posterior in other coordinates, as from `fedmcmc.whiten`: sampled to user's position.

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
    position_fn: Callable[[ArrayTree], ArrayTree] | None = None

    def __repr__(self) -> str:
        """Return what the clients share, where the model says it, and which functions there are."""
        given = [name for name, fn in zip(self._fields, self, strict=True) if fn is not None]
        # Of a model with named sites, as `from_numpyro` leaves it.
        sites = getattr(self.logprior_fn, "sites", None)
        shared = "" if sites is None else f"shared by all clients: {sites}; "
        return f"Posterior({shared}{', '.join(given)})"


class Broadcast(NamedTuple):
    """All that goes down to a client.

    `round` is ``[]`` int32, `position` the chain's (or the approximation's) position, `extra`
    whatever else a kernel family sends (a snapshot, a cavity). Within a round only, `shared` holds
    what all clients draw alike from one common key, and `summed` what an earlier phase of the
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
    """The clients computed in one round, and which of them take part.

    `ids` is ``[cohort_size]`` int32, `weight` ``[cohort_size]`` one over the probability of
    taking part, `active` ``[cohort_size]`` bool; the entries that are not active are computed
    (shapes are static) but never summed. `late` ``[cohort_size]`` bool marks the clients whose
    message of the kernel's own phase arrives one round late. `garbage` ``[cohort_size]`` is the
    number that replaces all numbers of a message on its way, or zero for a message that arrives
    unchanged. Both are ``()`` where no message can be late or broken.
    """

    ids: Array
    weight: Array
    active: Array
    late: ArrayTree = ()
    garbage: ArrayTree = ()


@dataclass(frozen=True, eq=False, kw_only=True)
class Participation:
    """Who takes part in a round, and with which weights.

    A subclass is a frozen dataclass registered as a pytree, whose own fields hold numbers (leaves)
    and structure (static). Its methods are pure.

    Attributes
    ----------
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
        the rest of the round, and keeps the state that it had before that phase.
    """

    cohort_size: int | None = field(default=None, metadata={"static": True})
    weighted: bool = field(default=True, metadata={"static": True})
    pooled: bool = field(default=False, metadata={"static": True})
    silent: bool = field(default=False, metadata={"static": True})
    drops: bool = field(default=True, metadata={"static": True})
    repeats: bool = field(default=False, metadata={"static": True})
    guards: bool = field(default=False, metadata={"static": True})

    def prepare(self, rng_key: Array, num_clients: int) -> Cohort:
        """Return who takes part."""
        raise NotImplementedError

    def check(self, num_clients: int) -> None:
        """Raise `ValueError` where the rule does not fit the federation."""


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


class Reference:
    """What an estimator needs every client to know besides the position (a snapshot).

    The kernel's server keeps it in `Broadcast.extra`. A subclass is a frozen dataclass registered
    as a pytree.
    """

    def update(self, round_: Array, position: ArrayTree, previous: ArrayTree) -> ArrayTree:
        """Return the reference of a round whose position is given.

        `previous` is the reference of the round before, ``None`` for the first.
        """
        raise NotImplementedError

    def missing(self, broadcast: Broadcast, state: ArrayTree) -> Array:
        """Return whether a client with this state has to be sent the reference, ``[]`` bool."""
        raise NotImplementedError


class GradientEstimator:
    """An estimate of the gradient of one client's log likelihood (a sum over its rows).

    Summed over clients, its expectation is the gradient of the whole log likelihood.

    A subclass is a frozen dataclass registered as a pytree, whose fields hold numbers (leaves) and
    structure (static). Its methods are pure; only `estimate` has to be written.
    """

    @property
    def reference(self) -> Reference | None:
        """What has to be broadcast besides the position, if anything."""
        return None

    @property
    def needs_sum(self) -> bool:
        """Whether a round first needs the sum over clients of `summed`."""
        return False

    def init(self, loglikelihood_fn: LogDensity, position: ArrayTree, client: Client) -> ArrayTree:
        """Return what the client keeps between rounds.

        Called before the first round.
        """
        return ()

    def prepare(self, rng_key: Array, like: ArrayTree, client: Client, num_calls: int) -> ArrayTree:
        """Return all that is random in a round's calls, leaves ``[num_calls, ...]``.

        That includes the rows of minibatches. `like` is the position's shapes.
        """
        return ()

    def summed(
        self, loglikelihood_fn: LogDensity, broadcast: Broadcast, client: Client
    ) -> ArrayTree:
        """Return the client's term of the sum that a round needs first, in `Broadcast.summed`.

        Terms are multiplied by one over the client's probability of taking part.
        """
        raise NotImplementedError

    def start(
        self, loglikelihood_fn: LogDensity, broadcast: Broadcast, state: ArrayTree, client: Client
    ) -> tuple[ArrayTree, ArrayTree]:
        """Return what is computed once per round (the context), and the client's new state."""
        return (), state

    def estimate(
        self,
        loglikelihood_fn: LogDensity,
        draws: ArrayTree,
        position: ArrayTree,
        context: ArrayTree,
        client: Client,
    ) -> ArrayTree:
        """Return the estimate at `position`, from one entry of the draws; deterministic."""
        raise NotImplementedError

    def check(self, position: ArrayTree, federation: "Federation") -> None:
        """Raise `ValueError` where the estimator does not fit the position or the clients."""


class StepInfo(NamedTuple):
    """What a client's step reports.

    `bits` is ``[]`` int32, the size of the code; `gradient_norm` ``[]``, the root mean square
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


@register_dataclass
@dataclass(frozen=True)
class Sender:
    """What a server knows of the client whose code it decodes.

    Attributes
    ----------
    index
        ``[]`` int32, the client's id.
    weight
        ``[]``, one over the probability of taking part in a round.
    """

    index: Array
    weight: Array


class Federation(NamedTuple):
    """What a server knows of its clients before the first round.

    Attributes
    ----------
    num_clients, num_rows
        Numbers of clients and of all their rows.
    sizes
        ``[num_clients]`` int32, rows of each client.
    rows
        Shapes and types of rows, leaves ``[anything, ...]``: their first axis means nothing.
    """

    num_clients: int
    num_rows: int
    sizes: Array
    rows: ArrayTree


class Refined(NamedTuple):
    """What a kernel that refines an approximation reports of a round.

    Attributes
    ----------
    proper
        ``[]`` bool, whether the approximation is a proper density.
    shift
        ``[]``, how far the round moved it: the largest change of a mean in its sds, or of the
        logarithm of an sd; infinite where it is not proper, or was not.
    """

    proper: Array
    shift: Array


class Adjusted(NamedTuple):
    """What a kernel that accepts or rejects proposals (Metropolis-Hastings) reports of a round.

    Attributes
    ----------
    acceptance
        ``[]``, the probability with which the last proposal that came to its end was accepted; one
        before there was any. A round in which none does repeats it.
    whole
        ``[]`` bool, whether every client's message came. If not, nothing changes, and the same is
        asked again.
    adapting
        ``[]`` bool, whether settings still change, so that draws are not yet exact.
    """

    acceptance: Array
    whole: Array
    adapting: Array


class Phase:
    """One exchange of messages in a round: what clients compute and send, what the server makes.

    A subclass is a frozen dataclass registered as a pytree, whose fields hold numbers (leaves) and
    structure (static). Its methods are pure. `fedmcmc.rounds` calls them.
    """

    def prepare(self, rng_key: Array, like: Broadcast, client: Client) -> ArrayTree:
        """Return all that is random in this client's step.

        `like` holds the broadcast's shapes, never its values, so that blocks of rounds can be
        prepared ahead.
        """
        return ()

    def step(
        self, draws: ArrayTree, broadcast: Broadcast, client_state: ArrayTree, client: Client
    ) -> tuple[ArrayTree, ArrayTree, StepInfo]:
        """Return the code that leaves the client, its new state and its report; deterministic.

        A phase without compression has the message itself for its code. A message is a pytree, a
        term of a sum: the server only ever adds it.
        """
        raise NotImplementedError

    def aggregate(
        self, rng_key: ArrayTree, broadcast: Broadcast, server_state: ArrayTree, total: ArrayTree
    ) -> tuple[Broadcast, ArrayTree, ArrayTree]:
        """Return the next broadcast, the server's new state and its report.

        Instead of the key it also takes what `prepare_server` made of it. Phases that precede a
        kernel's own leave the round's number as it is.
        """
        raise NotImplementedError

    def prepare_server(self, rng_key: Array, like: Broadcast) -> ArrayTree:
        """Return all that is random in `aggregate`, so that it can be drawn ahead too."""
        return ()

    def message_like(self, like: Broadcast) -> ArrayTree:
        """Return the shapes of a message, from the broadcast's."""
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), like.position
        )

    def code_like(self, like: Broadcast) -> ArrayTree:
        """Return the shapes of a code, from the broadcast's."""
        return self.message_like(like)

    def decode(
        self, code: ArrayTree, sender: Sender | Client, memory: ArrayTree, like: ArrayTree
    ) -> ArrayTree:
        """Return the message that a code stands for, shaped as `like`.

        `memory` is the server's copy of the sender's memory, ``()`` where decoding needs none.
        """
        return code

    def memory(self, client_state: ArrayTree) -> ArrayTree:
        """Return what of a client's state the server needs a copy of in order to decode."""
        return ()

    def first_memory(self, like: Broadcast) -> ArrayTree:
        """Return what `memory` returns of a client before the first round."""
        return ()

    def next_memory(self, code: ArrayTree, sender: Sender | Client, memory: ArrayTree) -> ArrayTree:
        """Return the server's copy of a client's memory after a code, from codes alone."""
        return memory

    def commit(
        self, message: ArrayTree, broadcast: Broadcast, client_state: ArrayTree
    ) -> ArrayTree:
        """Return the client's state with what it keeps of its message as the server reads it."""
        return client_state

    @property
    def sums_rows(self) -> bool:
        """Whether the sum of clients' messages is the message of all their rows as one client's.

        Of a phase of set-up: all rows then take one pass.
        """
        return True

    def setup_message(self, broadcast: Broadcast, client: Client) -> ArrayTree:
        """Return a client's message in a phase of set-up, as a server adds it."""
        code, _, _ = self.step((), broadcast, (), client)
        like = self.message_like(jax.eval_shape(lambda: broadcast))
        return self.decode(code, client, (), like)


class FederatedKernel(Phase):
    """A federated sampler: what a client does, what the server does, where both start.

    A subclass is a frozen dataclass registered as a pytree (see `Phase`). It is the last phase of
    its own rounds.

    Attributes
    ----------
    participation
        Who takes part in a round; a field of every subclass.
    """

    participation: Participation

    @property
    def before(self) -> tuple[Phase, ...]:
        """Phases that precede the kernel's own in each round.

        The same clients take part in all phases of a round, and their state goes from one to the
        next; so do the broadcast and the server's state.
        """
        return ()

    @cached_property
    def setup(self) -> tuple[Phase, ...]:
        """Phases before the first round, whose sums over all clients `server_init` needs.

        Their messages are sums over a client's rows, neither random nor compressed.
        """
        return ()

    @property
    def constrain_fn(self) -> Callable[[ArrayTree], ArrayTree] | None:
        """Unconstrained position to the user's parameters, if the posterior has that."""
        return None

    @property
    def position_fn(self) -> Callable[[ArrayTree], ArrayTree] | None:
        """Sampled position to the user's, if the posterior is in coordinates of its own."""
        return None

    @property
    def target(self) -> "Posterior | None":
        """What draws are meant to follow; ``None`` of a kernel that does not sample."""
        return None

    @property
    def approximates(self) -> bool:
        """Whether draws are independent ones of an approximation that the kernel refines."""
        return False

    @property
    def clients_apart(self) -> bool:
        """Whether clients move positions of their own, over many gradients per round."""
        return False

    @property
    def needs_everyone(self) -> bool:
        """Whether a round counts only if every client's message is in its sum."""
        return False

    def check_compressor(self, compressor: Any) -> None:
        """Raise `ValueError` where messages compressed by this would make draws wrong."""

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """All phases of a round, the kernel's own last."""
        return (*self.before, self)

    def server_init(
        self,
        rng_key: Array,
        position: ArrayTree,
        federation: Federation,
        totals: tuple[ArrayTree, ...],
    ) -> tuple[Broadcast, ArrayTree]:
        """Return the first broadcast and the server's first state.

        `totals` are the sums of the messages of `setup`.

        Raises
        ------
        ValueError
            If model, position and federation do not fit together.
        """
        raise NotImplementedError

    def check_before_setup(
        self, rng_key: Array, position: ArrayTree, federation: Federation
    ) -> None:
        """Raise what `server_init` raises, before the phases of `setup` pass over any row.

        Raises
        ------
        ValueError
            If model, position and federation do not fit together.
        """
        if not self.setup:
            return
        first = jax.eval_shape(lambda: Broadcast(jnp.zeros((), jnp.int32), position))
        shapes = [phase.message_like(first) for phase in self.setup]

        def begin() -> tuple[Broadcast, ArrayTree]:
            totals = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), tuple(shapes))
            return self.server_init(rng_key, position, federation, totals)

        jax.eval_shape(begin)

    def client_init(self, broadcast: Broadcast, client: Client) -> ArrayTree:
        """Return what a client keeps between rounds, from the first broadcast and its own rows."""
        return ()

    def init(self, rng_key: Array, position: ArrayTree, data: Any) -> FederatedState:
        """Return the state before the first round, of clients whose rows are all in `data`.

        Raises
        ------
        ValueError
            If model, position and data do not fit together.
        """
        return self.init_some(rng_key, position, data, None)

    def init_some(
        self, rng_key: Array, position: ArrayTree, data: Any, clients: Array | None
    ) -> FederatedState:
        """Return what `init` returns, with the states of some clients alone.

        `clients` are their ids, ``[n]``: a store of states makes some at a time.
        """
        self.check_before_setup(rng_key, position, data.federation)
        first = Broadcast(jnp.zeros((), jnp.int32), position)
        totals = tuple(
            data.sum_over_clients(partial(phase.setup_message, first), apart=not phase.sums_rows)
            for phase in self.setup
        )
        broadcast, server = self.server_init(rng_key, position, data.federation, totals)
        states = data.map_clients(lambda client: self.client_init(broadcast, client), clients)
        return FederatedState(broadcast, server, states)

    def prepare_shared(self, rng_key: Array, like: Broadcast) -> ArrayTree:
        """Return what all clients draw alike, which they find in `Broadcast.shared`."""
        return ()

    def draw(self, rng_key: Array, state: FederatedState) -> ArrayTree:
        """Return the chain's position, or a draw from a fitted distribution.

        A run keeps it in the user's coordinates, `position_fn` of it. It reads the broadcast and
        the server's state alone: a deployed server has no other.
        """
        return state.broadcast.position

    def __repr__(self) -> str:
        """Name the class; the numbers and functions within would fill screens."""
        size = self.participation.cohort_size
        numbers = sum(getattr(leaf, "size", 1) for leaf in jax.tree.leaves(self))
        cohort = "all clients" if size is None else f"cohorts of {size}"
        return f"<{type(self).__name__}: {cohort}, {numbers} numbers>"


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
