"""Network faults: clients that vanish, messages that arrive a round late or are not finite."""

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from fedmcmc._checks import expect
from fedmcmc.pytrees import trees
from fedmcmc.random import fault_key
from fedmcmc.transforms._compressed import arrived_late, holds_pooled_memory
from fedmcmc.transforms._secure import Words, check_overflow, is_secured, weights_at_clients
from fedmcmc.transforms._wrapping import WrappedKernel, WrappedPhase
from fedmcmc.types import (
    ArrayTree,
    Arrivals,
    Broadcast,
    Cohort,
    FederatedKernel,
    FederatedState,
    Federation,
    Participation,
    ParticipationMoments,
    Phase,
    register_dataclass,
)


class _Rates(NamedTuple):
    """Probabilities, ``[]`` or ``[num_clients]``, or ``()`` if they are zero."""

    drop: ArrayTree
    late: ArrayTree
    nan: ArrayTree


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class FaultyParticipation(Participation):
    """Participation over a network with faults, whose server checks messages."""

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

    def counts(self, num_clients: int) -> ParticipationMoments | None:
        """Return the inner rule's counts, thinned by the messages that do not arrive."""
        counts = self.inner.counts(num_clients)
        if counts is None or not trees.is_empty(self.rates.late):
            return None  # late messages move the chain a round later
        sent, intact = (
            np.ones(num_clients)
            if trees.is_empty(rate)
            else 1 - np.broadcast_to(np.asarray(rate, np.float64), (num_clients,))
            for rate in (self.rates.drop, self.rates.nan)
        )
        arrives = sent * intact
        weight, mean, diagonal, common, sign, active = counts
        square = diagonal + sign * common**2 + mean**2
        return ParticipationMoments(
            weight / arrives if self.rescale else weight,
            mean * arrives,
            diagonal * arrives**2 + square * arrives * (1 - arrives),
            common * arrives,
            sign,
            active * sent,
        )

    def prepare(self, rng_key: Array, num_clients: int) -> Cohort:
        cohort = self.inner.prepare(rng_key, num_clients)
        if trees.is_empty(self.rates):
            return cohort
        keys = jax.vmap(lambda i: fault_key(rng_key, self.seed, i))(cohort.ids)
        # Draw all kinds, so that the draws of one kind do not depend on the other rates.
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


class _FaultyServer(NamedTuple):
    kernel: ArrayTree
    pending: ArrayTree  # the sum of the messages that arrive in the next round


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class _Waiting(WrappedPhase):
    """Phase whose server stores the late messages of the previous round."""

    inner: Phase
    is_last: bool = field(metadata={"static": True})  # only its messages can be late

    def aggregate(
        self,
        rng_key: ArrayTree,
        broadcast: Broadcast,
        server_state: _FaultyServer,
        total: ArrayTree,
    ) -> tuple[Broadcast, _FaultyServer, ArrayTree]:
        pending = server_state.pending
        if self.is_last:
            # Add the waiting messages, and store the late ones. A total that is not an `Arrivals`
            # has no late messages.
            if not isinstance(total, Arrivals):
                total = Arrivals(total, trees.zeros_like(total))
            total, pending = trees.add(total.now, _settled(pending)), total.late
        moved, server, info = self.inner.aggregate(rng_key, broadcast, server_state.kernel, total)
        return moved, _FaultyServer(server, pending), info


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Faulty(WrappedKernel):
    """Kernel over a network with faults; see `faults`."""

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
        # Late messages may be relative to changed memories, which doubles their size.
        check_overflow(self.kernel, 3 * federation.num_clients)
        like = self.kernel.message_like(trees.shapes_of(broadcast))
        return broadcast, _FaultyServer(server, trees.zeros_like(like))

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
    """Run `kernel` over a network with faults, and make its server exclude broken messages.

    The server excludes a message with a number that is not finite, also without a fault, and counts
    it in ``samples.info["num_excluded"]``. The client keeps its previous state and is inactive for
    the rest of the round. Probabilities are scalars or ``[num_clients]``.
    docs/explanation/exact_distributions.md has the exact distribution.

    Parameters
    ----------
    kernel
        Any kernel, also compressed or a sequence: `faults` is the outermost transform.
    drop
        Probability that a client of the cohort sends nothing, as if it had not taken part.
    late
        Probability that a message of a round's last phase arrives one round late. The sum of such
        messages is ``state.server.pending``, next to ``state.server.kernel``.
    nan
        Probability that a message turns into NaN or infinities.
    seed
        Seed of the faults, an integer. All other randomness stays the same.
    rescale
        If true, weighted messages are multiplied by ``1 / ((1 - drop) * (1 - nan))``, so that
        faults do not change the mean of their sum: with full participation, ``faults(kernel,
        drop=q)`` has the distribution of `kernel` under ``bernoulli(1 - q)``.

    Raises
    ------
    TypeError, ValueError
        If `kernel` cannot have faults, or a probability or `seed` is out of range.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, fedmcmc
    >>> posterior = fedmcmc.Posterior(lambda t: -0.5 * t**2, lambda t, x: -0.5 * (x - t) ** 2)
    >>> data = fedmcmc.FederatedData.from_clients([jnp.ones(3), jnp.zeros(5), jnp.zeros(2)])
    >>> kernel = faults(fedmcmc.lsd(posterior, step_size=0.01), drop=0.1, late=0.2, nan=0.1)
    >>> run = fedmcmc.sample(jax.random.key(0), kernel, data, 0.0, num_rounds=99, progress=False)
    >>> bool(jnp.isfinite(run.draws).all()), bool(0 < run.info["num_excluded"].mean() < 0.5)
    (True, True)
    """
    expect(kernel, FederatedKernel, "kernel")
    if kernel.participation.excludes_broken_messages:
        raise ValueError("This kernel has faults already: set all of them in one call.")
    if not kernel.traits.accepts_late_messages and np.any(np.asarray(late)):
        raise ValueError(
            "late: this kernel needs a client's message of a round in that round; use drop= and "
            "nan= only."
        )
    if kernel.traits.noise_in_messages:
        raise ValueError(
            'The clients of this kernel add the noise to their messages (noise="clients"), so the '
            "noise of a round that lacks a message has the wrong variance: let the server draw it."
        )
    rates = _Rates(_rate(drop, "drop"), _rate(late, "late"), _rate(nan, "nan"))
    if is_secured(kernel) and not trees.is_empty(rates.nan):
        raise ValueError(
            "nan: a server sees no single message of a secure sum, so it could exclude none."
        )
    # If messages are not weighted, as in a relay, the weight multiplies the gradient of a client
    # whose message arrives, which needs no rescaling. With pooled memories and secure sums, clients
    # weight messages themselves.
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
        may_drop=inner.may_drop or not trees.is_empty((rates.drop, rates.nan)),
        may_repeat=inner.may_repeat,
        excludes_broken_messages=True,
    )
    return Faulty(kernel, participation, waits=not trees.is_empty(rates.late))


def _settled(pending: ArrayTree) -> ArrayTree:
    """Return the sum of late messages that the server adds, also for words."""
    if isinstance(pending, Words):
        return pending._replace(numbers=arrived_late(pending.numbers))
    return arrived_late(pending)


def _rate(probability: ArrayLike, name: str) -> ArrayTree:
    """Return a probability, or one per client, as a leaf, or ``()`` if it is known to be zero."""
    prefix = f"{name} must be a probability in [0, 1), or ``[num_clients]`` of them, got "
    try:
        array = jnp.asarray(probability)
    except TypeError:
        raise ValueError(f"{prefix}{probability!r}.") from None
    if array.ndim > 1 or not jnp.issubdtype(array.dtype, jnp.number):
        raise ValueError(f"{prefix}an array of shape {array.shape} and dtype {array.dtype}.")
    array = array.astype(jnp.result_type(float))
    if not isinstance(array, jax.core.Tracer):
        values = np.asarray(array)
        if not np.all((values >= 0) & (values < 1)):
            raise ValueError(f"{prefix}{probability!r}.")
        if not values.any():
            return ()
    return array


def _seed(seed: int) -> Array:
    if not isinstance(seed, jax.core.Tracer):
        array = np.asarray(seed)
        if array.ndim or array.dtype.kind not in "iu" or not 0 <= int(array) < 2**32:
            raise ValueError(f"seed must be an integer from 0 to 2**32 - 1, got {seed!r}.")
    return jnp.asarray(seed, jnp.uint32)
