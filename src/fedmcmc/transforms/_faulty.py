"""Faults: clients that vanish, messages that come a round late or hold no finite number."""

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._checks import expect
from fedmcmc._types import (
    ArrayTree,
    Arrivals,
    Broadcast,
    Cohort,
    Counts,
    FederatedKernel,
    FederatedState,
    Federation,
    Participation,
    Phase,
    register_dataclass,
)
from fedmcmc.pytrees import trees
from fedmcmc.random import fault_key
from fedmcmc.transforms._compressed import arrived_late, holds_pooled_memory
from fedmcmc.transforms._secure import Words, check_room, is_secured, weights_at_clients
from fedmcmc.transforms._wrapping import WrappedKernel, WrappedPhase


class _Rates(NamedTuple):
    """Probabilities, ``[]`` or ``[num_clients]``, or ``()`` for what never happens."""

    drop: ArrayTree
    late: ArrayTree
    nan: ArrayTree


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class FaultyParticipation(Participation):
    """A participation over a network with faults, whose server checks what arrives."""

    inner: Participation
    rates: _Rates
    seed: Array  # [] uint32
    rescale: bool = field(metadata={"static": True})

    def check(self, num_clients: int) -> None:
        self.inner.check(num_clients)
        for name, rate in self.rates._asdict().items():
            if not trees.is_empty(rate) and rate.ndim and rate.shape[0] != num_clients:
                raise ValueError(
                    f"{name} has probabilities for {rate.shape[0]} clients, but the data has "
                    f"{num_clients} clients."
                )

    def counts(self, num_clients: int) -> Counts | None:
        """Return the inner rule's counts, thinned by what does not arrive."""
        counts = self.inner.counts(num_clients)
        if counts is None or not trees.is_empty(self.rates.late):
            return None  # what is late moves the chain a round later
        sends, crosses = (
            np.ones(num_clients)
            if trees.is_empty(rate)
            else 1 - np.broadcast_to(np.asarray(rate, np.float64), (num_clients,))
            for rate in (self.rates.drop, self.rates.nan)
        )
        arrives = sends * crosses
        weight, mean, own, common, sign, active = counts
        square = own + sign * common**2 + mean**2
        return Counts(
            weight / arrives if self.rescale else weight,
            mean * arrives,
            own * arrives**2 + square * arrives * (1 - arrives),
            common * arrives,
            sign,
            active * sends,
        )

    def prepare(self, rng_key: Array, num_clients: int) -> Cohort:
        cohort = self.inner.prepare(rng_key, num_clients)
        if trees.is_empty(self.rates):
            return cohort
        keys = jax.vmap(lambda i: fault_key(rng_key, self.seed, i))(cohort.ids)
        # All kinds are drawn, so that the draws of one kind do not depend on which others occur.
        u = jax.vmap(lambda key: jax.random.uniform(key, (4,)))(keys)
        drop, late, nan = jax.tree.map(
            lambda rate: rate[cohort.ids] if rate.ndim else rate, self.rates
        )
        if self.rescale:
            arrives = math.prod(1 - rate for rate in jax.tree.leaves((drop, nan)))
            cohort = cohort._replace(weight=cohort.weight / arrives)
        if not trees.is_empty(drop):
            cohort = cohort._replace(active=cohort.active & (u[:, 0] >= drop))
        if not trees.is_empty(late):
            cohort = cohort._replace(late=u[:, 1] < late)
        if not trees.is_empty(nan):
            kinds = jnp.array([jnp.nan, jnp.inf, -jnp.inf])
            kind = kinds[jnp.minimum((3 * u[:, 3]).astype(jnp.int32), 2)]
            cohort = cohort._replace(garbage=jnp.where(u[:, 2] < nan, kind, 0))
        return cohort


class _Server(NamedTuple):
    kernel: ArrayTree
    pending: ArrayTree  # the sum of the messages that arrive in the next round


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class _Waiting(WrappedPhase):
    """A phase of a kernel whose server keeps the late messages of the round before."""

    inner: Phase
    is_last: bool = field(metadata={"static": True})  # messages of other phases are never late

    def aggregate(
        self, rng_key: ArrayTree, broadcast: Broadcast, server_state: _Server, total: ArrayTree
    ) -> tuple[Broadcast, _Server, ArrayTree]:
        pending = server_state.pending
        if self.is_last:
            # Messages that waited are added, and those that are late now wait. A total that is no
            # `Arrivals` holds no late messages.
            if not isinstance(total, Arrivals):
                total = Arrivals(total, trees.zeros_like(total))
            total, pending = trees.add(total.now, _as_added(pending)), total.late
        moved, server, info = self.inner.aggregate(rng_key, broadcast, server_state.kernel, total)
        return moved, _Server(server, pending), info


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Faulty(WrappedKernel):
    """A kernel over a network with faults; see `faults`."""

    kernel: FederatedKernel
    participation: Participation
    waits: bool = field(metadata={"static": True})  # whether a message may be late

    @property
    def name(self) -> str:
        return f"faults({self.kernel.name})"

    @cached_property
    def wrapped(self) -> tuple[Phase, ...]:
        phases = self.kernel.phases
        return tuple(_Waiting(x, x is phases[-1]) for x in phases) if self.waits else phases

    def server_init(
        self,
        rng_key: Array,
        position: ArrayTree,
        federation: Federation,
        totals: tuple[ArrayTree, ...],
    ) -> tuple[Broadcast, ArrayTree]:
        self.participation.check(federation.num_clients)
        broadcast, server = super().server_init(rng_key, position, federation, totals)
        if not self.waits:
            return broadcast, server
        # Late messages may be relative to memories that have moved: of twice the size.
        check_room(self.kernel, 3 * federation.num_clients)
        like = self.kernel.message_like(trees.shapes_of(broadcast))
        return broadcast, _Server(server, trees.zeros_like(like))

    def draw(self, rng_key: Array, state: FederatedState) -> ArrayTree:
        if self.waits:
            state = state._replace(server=state.server.kernel)
        return super().draw(rng_key, state)


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
    ...     jax.random.key(0), kernel, data, 0.0, num_rounds=300, progress=False
    ... )
    >>> bool(jnp.isfinite(samples.draws).all()), samples.draws.shape
    (True, (1, 300))
    >>> info = samples.info
    >>> bool(info["num_excluded"].mean() < 0.5), bool(2 < info["num_active"].mean() < 3)
    (True, True)
    """
    expect(kernel, FederatedKernel, "kernel")
    if kernel.participation.guards:
        raise ValueError("This kernel has faults already: give all of them in one call.")
    if not kernel.traits.accepts_late_messages and np.any(np.asarray(late)):
        raise ValueError(
            "late: this kernel needs a client's message of a round in that round; drop= and nan= "
            "are taken."
        )
    rates = _Rates(_rate(drop, "drop"), _rate(late, "late"), _rate(nan, "nan"))
    if is_secured(kernel) and not trees.is_empty(rates.nan):
        raise ValueError(
            "nan: a server sees no single message of a secure sum, so it could leave none out."
        )
    # If no message is weighted, as in a relay, the weight multiplies a gradient instead: that of a
    # client whose message arrives, which needs no rescaling. Under pooled memories and secure sums
    # clients weight messages themselves.
    inner = kernel.participation
    weighted = inner.weighted or holds_pooled_memory(kernel) or weights_at_clients(kernel)
    participation = FaultyParticipation(
        inner,
        rates,
        _seed(seed),
        bool(rescale) and weighted,
        cohort_size=inner.cohort_size,
        weighted=inner.weighted,
        pooled=inner.pooled,
        silent=inner.silent,
        drops=inner.drops or not trees.is_empty((rates.drop, rates.nan)),
        repeats=inner.repeats,
        guards=True,
    )
    return Faulty(kernel, participation, waits=not trees.is_empty(rates.late))


def _as_added(pending: ArrayTree) -> ArrayTree:
    """Return the sum of late messages in the form in which the server adds it."""
    if isinstance(pending, Words):
        return pending._replace(numbers=arrived_late(pending.numbers))
    return arrived_late(pending)


def _rate(probability: Any, name: str) -> ArrayTree:
    """Return a probability, or one per client, as a leaf; ``()`` where it is known to be zero."""
    wanted = f"{name} must be a probability in [0, 1), or ``[num_clients]`` of them, got "
    try:
        array = jnp.asarray(probability)
    except TypeError:
        raise ValueError(f"{wanted}{probability!r}.") from None
    if array.ndim > 1 or not jnp.issubdtype(array.dtype, jnp.number):
        raise ValueError(f"{wanted}an array of shape {array.shape} and dtype {array.dtype}.")
    array = array.astype(jnp.result_type(float))
    if not isinstance(array, jax.core.Tracer):
        values = np.asarray(array)
        if not np.all((values >= 0) & (values < 1)):
            raise ValueError(f"{wanted}{probability!r}.")
        if not values.any():
            return ()
    return array


def _seed(seed: Any) -> Array:
    if not isinstance(seed, jax.core.Tracer):
        array = np.asarray(seed)
        if array.ndim or array.dtype.kind not in "iu" or not 0 <= int(array) < 2**32:
            raise ValueError(f"seed must be an integer from 0 to 2**32 - 1, got {seed!r}.")
    return jnp.asarray(seed, jnp.uint32)
