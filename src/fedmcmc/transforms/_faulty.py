"""Faults: clients that vanish, messages that come a round late or hold no finite number."""

from typing import NamedTuple

from jax import Array
from jax.tree_util import Partial

from fedmcmc._checks import expect
from fedmcmc._types import (
    ArrayTree,
    Arrivals,
    Broadcast,
    Exchange,
    FederatedKernel,
    FederatedState,
    Participation,
    Static,
)
from fedmcmc.data import FederatedData
from fedmcmc.pytrees import trees
from fedmcmc.transforms._compressed import arrived_late, holds_pooled_memory
from fedmcmc.transforms._faulty_participation import Rates, faulty_participation, rate_of, seed_of

__all__ = ["faults"]


class _Server(NamedTuple):
    kernel: ArrayTree
    pending: ArrayTree  # the sum of the messages that arrive in the next round


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
    Each probability is a scalar or ``[num_clients]``, one a client. The three kinds are drawn
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
    init = Partial(_init, kernel, participation, Static(waits))
    faulty = kernel._replace(init=init, participation=participation)
    if not waits:
        return faulty
    before = tuple(e._replace(aggregate=Partial(_aggregate_before, e)) for e in kernel.before)
    aggregate, draw = Partial(_aggregate, kernel), Partial(_draw, kernel)
    return faulty._replace(aggregate=aggregate, draw=draw, before=before)


def _init(
    kernel: FederatedKernel,
    participation: Participation,
    waits: Static[bool],
    rng_key: Array,
    position: ArrayTree,
    data: FederatedData,
) -> FederatedState:
    participation.check(data.num_clients)
    state: FederatedState = kernel.init(rng_key, position, data)
    if not waits.value:
        return state
    like = state.broadcast.position
    if kernel.message_fn is not None:
        like = kernel.message_fn(trees.shapes_of(state.broadcast))
    return state._replace(server=_Server(state.server, trees.zeros_like(like)))


def _aggregate(
    kernel: FederatedKernel,
    rng_key: Array,
    broadcast: Broadcast,
    server_state: _Server,
    total: ArrayTree,
) -> tuple[Broadcast, _Server, ArrayTree]:
    """Add what arrived late, and keep what is late now; a plain total is one all in time."""
    if not isinstance(total, Arrivals):
        total = Arrivals(total, trees.zeros_like(total))
    heard = trees.add(total.now, arrived_late(server_state.pending))
    moved, server, info = kernel.aggregate(rng_key, broadcast, server_state.kernel, heard)
    return moved, _Server(server, total.late), info


def _aggregate_before(
    exchange: Exchange,
    rng_key: Array,
    broadcast: Broadcast,
    server_state: _Server,
    total: ArrayTree,
) -> tuple[Broadcast, _Server, ArrayTree]:
    moved, server, info = exchange.aggregate(rng_key, broadcast, server_state.kernel, total)
    return moved, server_state._replace(kernel=server), info


def _draw(kernel: FederatedKernel, rng_key: Array, state: FederatedState) -> ArrayTree:
    drawn: ArrayTree = kernel.draw(rng_key, state._replace(server=state.server.kernel))
    return drawn
