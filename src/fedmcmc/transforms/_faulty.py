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
        """Do as the kernel's server does; pending messages go on waiting."""
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
        """Add the messages that waited, and let those that are late now wait.

        A total that is no `Arrivals` holds no late messages.
        """
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

    The server checks every message, whatever the probabilities. If any number of a message is not
    finite, the server leaves out the whole message and the round goes on without that client. The
    client is told, keeps the state that it had before, and is out for the rest of the round. This
    includes messages that no fault broke, as where a log likelihood overflows at one client.
    ``samples.info["num_excluded"]`` counts the messages that were left out.

    Parameters
    ----------
    kernel
        Any kernel, compressed or a sequence too: `faults` is the outermost transform.
    drop
        Probability that a client of the cohort vanishes after computing, so that its message is
        never sent. Its state, `num_active` and the bits are those of a round in which it does not
        take part.
    late
        Probability that a message arrives one round late, given that it arrives. The server adds
        it to the next round's sum, as the difference that it was when it was sent. The client is
        active, and keeps its new state, in the round in which it sends. In a round of several
        phases only messages of the last phase can be late, since each phase waits for the one
        before.
    nan
        Probability that a message that is sent turns into NaN or infinities on its way; its bits
        are counted.
    seed
        Selects the faults and nothing else. Faults have a key stream of their own, with one key
        per client and round, so all other randomness is the same with and without faults.
    rescale
        Whether messages that are weighted by one over the probability of taking part are also
        multiplied by ``1 / ((1 - drop) * (1 - nan))``. The mean of their sum is then the same as
        without faults: ``faults(kernel, drop=q)`` of a kernel in which everyone takes part has
        the law of that kernel under ``bernoulli(1 - q)``. With ``rescale=False`` `drop` and `nan`
        shrink the sum.

    Returns
    -------
    FederatedKernel
        With `late`, ``state.server.kernel`` is the kernel's own server state and
        ``state.server.pending`` the sum of the late messages. Otherwise states are those of
        `kernel`.

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

    Only weighted messages are rescaled. Kernels whose messages are not weighted (a relay,
    expectation propagation with sites) are not, since each message is then the client's whole part
    of the chain or of the product. Weighted means (federated averaging, ensembles) are taken over
    the messages that arrived, so the weights cancel. A message that is not finite by itself has no
    known probability, and nothing compensates for it: a client that always sends such messages is
    left out of the posterior. A warning says so if most messages are excluded.

    If no message arrives, the server goes on without any: a Langevin step follows the prior, while
    a relay and a mean stay where they are. If many messages are lost, take smaller steps, as with
    `bernoulli`; also if many are late, since gradients then lag by one round. Control variates of
    summed gradients (`fedmcmc.scaffold`) are for full participation: with `drop` or `nan` the mean
    is biased. Wrong but finite numbers are not noticed, and what the kernel's own `init` computes
    is not checked.

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
    # If no message is weighted, as in a relay, the weight multiplies a gradient instead: that of a
    # client whose message arrives, which needs no rescaling. Pooled memories weight messages at
    # the client.
    weighted = kernel.participation.weighted or holds_pooled_memory(kernel)
    participation = faulty_participation(
        kernel.participation, rates, seed_of(seed), rescale=bool(rescale) and weighted
    )
    waits = not trees.is_empty(rates.late)
    return Faulty(kernel, participation, waits)
