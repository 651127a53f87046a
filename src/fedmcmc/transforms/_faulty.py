"""Faults: clients that vanish, messages that come a round late or hold no finite number."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from jax import Array
from jax.tree_util import register_dataclass

from fedmcmc._checks import expect
from fedmcmc._types import (
    ArrayTree,
    Arrivals,
    Broadcast,
    Client,
    FederatedKernel,
    FederatedState,
    Federation,
    Participation,
    Phase,
    Sender,
    StepInfo,
)
from fedmcmc.pytrees import trees
from fedmcmc.transforms._compressed import arrived_late, holds_pooled_memory
from fedmcmc.transforms._faulty_participation import Rates, faulty_participation, rate_of, seed_of

__all__ = ["faults"]


class _Server(NamedTuple):
    kernel: ArrayTree
    pending: ArrayTree  # the sum of the messages that arrive in the next round


class _Waiting(Phase):
    """A phase of a kernel whose server keeps the late messages of the round before."""

    @property
    def inner(self) -> Phase:
        """The phase without faults."""
        raise NotImplementedError

    def prepare(self, rng_key: Array, like: Broadcast, client: Client) -> ArrayTree:
        """Draw what the kernel draws."""
        return self.inner.prepare(rng_key, like, client)

    def step(
        self, draws: ArrayTree, broadcast: Broadcast, client_state: ArrayTree, client: Client
    ) -> tuple[ArrayTree, ArrayTree, StepInfo]:
        """Do as the kernel's client does: faults happen to what it sends."""
        return self.inner.step(draws, broadcast, client_state, client)

    def prepare_server(self, rng_key: Array, like: Broadcast) -> ArrayTree:
        """Draw what the kernel's server draws."""
        return self.inner.prepare_server(rng_key, like)

    def message_like(self, like: Broadcast) -> ArrayTree:
        """Return the shapes of the kernel's messages."""
        return self.inner.message_like(like)

    def code_like(self, like: Broadcast) -> ArrayTree:
        """Return the shapes of the kernel's codes."""
        return self.inner.code_like(like)

    def decode(
        self, code: ArrayTree, sender: Sender | Client, memory: ArrayTree, like: ArrayTree
    ) -> ArrayTree:
        """Decode as the kernel does."""
        return self.inner.decode(code, sender, memory, like)

    def memory(self, client_state: ArrayTree) -> ArrayTree:
        """Return what the kernel's server needs a copy of."""
        return self.inner.memory(client_state)

    def first_memory(self, like: Broadcast) -> ArrayTree:
        """Return the kernel's first."""
        return self.inner.first_memory(like)

    def next_memory(self, code: ArrayTree, sender: Sender | Client, memory: ArrayTree) -> ArrayTree:
        """Move the copy as the kernel does."""
        return self.inner.next_memory(code, sender, memory)

    def commit(
        self, message: ArrayTree, broadcast: Broadcast, client_state: ArrayTree
    ) -> ArrayTree:
        """Keep of a message what the kernel's client keeps."""
        return self.inner.commit(message, broadcast, client_state)


@register_dataclass
@dataclass(frozen=True, eq=False)
class _WaitingBefore(_Waiting):
    """A phase before the kernel's own: its messages are never late."""

    phase: Phase

    @property
    def inner(self) -> Phase:
        """The phase without faults."""
        return self.phase

    def aggregate(
        self, rng_key: ArrayTree, broadcast: Broadcast, server_state: _Server, total: ArrayTree
    ) -> tuple[Broadcast, _Server, ArrayTree]:
        """Do as the kernel's server does, and let what is pending wait."""
        moved, server, info = self.phase.aggregate(rng_key, broadcast, server_state.kernel, total)
        return moved, server_state._replace(kernel=server), info


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Faulty(_Waiting, FederatedKernel):
    """A kernel over a network with faults; see `faults`."""

    kernel: FederatedKernel
    participation: Participation
    waits: bool = field(metadata={"static": True})  # whether a message may be late

    @property
    def inner(self) -> Phase:
        """The kernel without faults."""
        return self.kernel

    @property
    def before(self) -> tuple[Phase, ...]:
        """The kernel's."""
        if not self.waits:
            return self.kernel.before
        return tuple(_WaitingBefore(phase) for phase in self.kernel.before)

    @cached_property
    def setup(self) -> tuple[Phase, ...]:
        """The kernel's."""
        return self.kernel.setup

    @property
    def constrain_fn(self) -> Callable[[ArrayTree], ArrayTree] | None:
        """The kernel's."""
        return self.kernel.constrain_fn

    @property
    def clients_apart(self) -> bool:
        """The kernel's."""
        return self.kernel.clients_apart

    def server_init(
        self,
        rng_key: Array,
        position: ArrayTree,
        federation: Federation,
        totals: tuple[ArrayTree, ...],
    ) -> tuple[Broadcast, ArrayTree]:
        """Start as the kernel does, with nothing pending."""
        self.participation.check(federation.num_clients)
        broadcast, server = self.kernel.server_init(rng_key, position, federation, totals)
        if not self.waits:
            return broadcast, server
        like = self.kernel.message_like(trees.shapes_of(broadcast))
        return broadcast, _Server(server, trees.zeros_like(like))

    def client_init(self, broadcast: Broadcast, client: Client) -> ArrayTree:
        """Start as the kernel's client does."""
        return self.kernel.client_init(broadcast, client)

    def prepare_shared(self, rng_key: Array, like: Broadcast) -> ArrayTree:
        """Draw what the kernel's clients draw alike."""
        return self.kernel.prepare_shared(rng_key, like)

    def aggregate(
        self, rng_key: ArrayTree, broadcast: Broadcast, server_state: ArrayTree, total: ArrayTree
    ) -> tuple[Broadcast, ArrayTree, ArrayTree]:
        """Add what arrived late, and keep what is late now; a plain total is one all in time."""
        if not self.waits:
            return self.kernel.aggregate(rng_key, broadcast, server_state, total)
        if not isinstance(total, Arrivals):
            total = Arrivals(total, trees.zeros_like(total))
        arrived = trees.add(total.now, arrived_late(server_state.pending))
        moved, server, info = self.kernel.aggregate(
            rng_key, broadcast, server_state.kernel, arrived
        )
        return moved, _Server(server, total.late), info

    def draw(self, rng_key: Array, state: FederatedState) -> ArrayTree:
        """Draw as the kernel does."""
        if self.waits:
            state = state._replace(server=state.server.kernel)
        return self.kernel.draw(rng_key, state)


def faults(
    kernel: FederatedKernel,
    *,
    drop: float | Array = 0.0,
    late: float | Array = 0.0,
    nan: float | Array = 0.0,
    seed: int = 0,
    rescale: bool = True,
) -> FederatedKernel:
    """Run `kernel` over a network with faults, and guard its server against broken messages.

    Whatever the probabilities, the server leaves out a message in which any number is not finite,
    the whole of it, and the round goes on without its client: the client is told, keeps the state
    that it had before, and is out for the rest of the round. That also holds for messages that are
    not finite by themselves, as from a log likelihood that overflows at one client.
    ``samples.info["num_excluded"]`` counts them.

    Parameters
    ----------
    kernel
        Any kernel, compressed or not, a sequence included: faults go around everything else.
    drop
        Probability that a client of the cohort vanishes after computing: its message is never
        sent. It is as a client that does not take part, in its state, in `num_active` and in bits.
    late
        Probability that a message arrives a round late, given that it arrives: the server adds it
        to the next round's sum, as the difference that it was when it was sent. The client counts
        as active, and keeps its new state, in the round in which it sends. Of rounds with several
        exchanges only the last knows late messages: later exchanges wait for those before.
    nan
        Probability that a message that is sent turns into NaN or infinities on its way; its bits
        are counted.
    seed
        Another one draws other faults, and nothing else. Faults have a stream of their own, with a
        key a client and round: all else that is random is what it is without faults.
    rescale
        Whether messages that are weighted by one over the probability of taking part are also
        multiplied by ``1 / ((1 - drop) * (1 - nan))``, so that the mean of their sum is what it
        is without faults: ``faults(kernel, drop=q)`` of a kernel in which everyone takes part has
        the law of that kernel under ``bernoulli(1 - q)``. Without, `drop` and `nan` shrink the sum.

    Returns
    -------
    FederatedKernel
        With `late`, its ``state.server`` holds the kernel's own as ``.kernel``, and the sum of the
        late messages as ``.pending``; else states are those of `kernel`.

    Raises
    ------
    TypeError
        If `kernel` is no `FederatedKernel`.
    ValueError
        If a probability is not in [0, 1), `seed` is no integer from 0 to 2**32 - 1, or the kernel
        has faults already; and from `init` if probabilities do not fit the number of clients.

    Notes
    -----
    Each probability is a scalar or ``[num_clients]``, one per client. The three kinds are drawn
    independently of each other. A probability given as zero leaves its part of the program out;
    other values share one compilation.

    What is rescaled, and what is not: kernels whose messages are not weighted (a relay, expectation
    propagation with sites) are not rescaled, since a client's part of the chain or of the product
    then is what it sends, once. Weighted means (federated averaging, ensembles) are over those who
    arrived, and the weights cancel. A message that is not finite by itself comes with no known
    probability and is compensated by nothing: a client that always sends such is left out of the
    posterior. Warnings tell if that happens to most messages.

    Where nobody's message arrives, the server goes on without: a Langevin step follows the prior,
    a relay and a mean stay where they are. Losing many messages asks for smaller steps, as
    `bernoulli` does, and late ones too, since a gradient then lags by a round. Control variates of
    summed gradients (`fedmcmc.scaffold`) are for full participation: with `drop` or `nan` the mean
    is biased. Finite nonsense is not noticed, nor what the kernel's own `init` computes.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(
    ...     lambda theta: -0.5 * theta**2, lambda theta, x: -0.5 * (x - theta) ** 2
    ... )
    >>> data = fedmcmc.FederatedData.from_clients([jnp.ones(3), jnp.zeros(5), jnp.zeros(2)])
    >>> kernel = faults(fedmcmc.lsd(posterior, step_size=0.01), drop=0.1, late=0.2, nan=0.1)
    >>> samples = fedmcmc.sample(
    ...     jax.random.key(0), kernel, data, 0.0, num_rounds=500, progress=False
    ... )
    >>> bool(jnp.isfinite(samples.draws).all()), samples.draws.shape
    (True, (1, 500))
    >>> info = samples.info
    >>> bool(info["num_excluded"].mean() < 0.5), bool(2 < info["num_active"].mean() < 3)
    (True, True)
    """
    expect(kernel, FederatedKernel, "kernel")
    if kernel.participation.guards:
        raise ValueError("This kernel has faults already: give all of them in one call.")
    rates = Rates(rate_of(drop, "drop"), rate_of(late, "late"), rate_of(nan, "nan"))
    # Where no message is weighted, a weight multiplies a gradient, as in a relay: that of a client
    # that is heard of. Pooled memories weight messages at the client.
    weighted = kernel.participation.weighted or holds_pooled_memory(kernel)
    participation = faulty_participation(
        kernel.participation, rates, seed_of(seed), rescale=bool(rescale) and weighted
    )
    waits = not trees.is_empty(rates.late)
    return Faulty(kernel, participation, waits)
