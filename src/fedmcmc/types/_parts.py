"""Base classes of a kernel's parts: participation rules and gradient estimators."""

from dataclasses import dataclass, field
from typing import ClassVar

from jax import Array

from fedmcmc.types._describing import Described, undefined
from fedmcmc.types._traits import Disclosure
from fedmcmc.types._values import (
    ArrayTree,
    Broadcast,
    Client,
    Cohort,
    Federation,
    LogDensity,
    ParticipationMoments,
)


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Participation(Described):
    """Rule that chooses the clients of a round and the weights of their messages.

    A subclass is a frozen dataclass registered as a pytree, whose own fields hold numbers (leaves)
    and structure (static). Its methods are pure.

    Attributes
    ----------
    cohort_size
        Static number of computed clients; ``None`` for all clients in order.
    weighted
        If true, messages are multiplied by the cohort's weights before they are summed.
    pooled
        If true, all rows are treated as the rows of one client.
    silent
        If true, nothing is sent and no bits are counted, as with pooled rows.
    may_drop
        If true, a cohort may contain clients that are not active.
    may_repeat
        If true, a cohort may contain a client more than once.
    excludes_broken_messages
        If true, the server excludes messages that are not finite. Their senders are inactive for
        the rest of the round and keep their state from before that phase.
    """

    cohort_size: int | None = field(default=None, metadata={"static": True})
    weighted: bool = field(default=True, repr=False, metadata={"static": True})
    pooled: bool = field(default=False, repr=False, metadata={"static": True})
    silent: bool = field(default=False, repr=False, metadata={"static": True})
    may_drop: bool = field(default=True, repr=False, metadata={"static": True})
    may_repeat: bool = field(default=False, repr=False, metadata={"static": True})
    excludes_broken_messages: bool = field(default=False, repr=False, metadata={"static": True})

    def prepare(self, rng_key: Array, num_clients: int) -> Cohort:
        """Return the cohort of a round."""
        raise undefined(self, "prepare")

    def check(self, num_clients: int) -> None:
        """Raise `ValueError` if the rule does not fit the federation."""

    def counts(self, num_clients: int) -> ParticipationMoments | None:
        """Return mean and covariance of the clients' participation counts, ``None`` if unknown."""
        return None


class Reference:
    """Values besides the position that all clients need for an estimator, such as a snapshot.

    The kernel's server keeps them in `Broadcast.extra`. A subclass is a frozen dataclass registered
    as a pytree.
    """

    def update(self, round_: Array, position: ArrayTree, previous: ArrayTree) -> ArrayTree:
        """Return the reference for the position of a round.

        `previous` is the reference of the previous round, ``None`` for the first.
        """
        raise undefined(self, "update")

    def missing(self, broadcast: Broadcast, state: ArrayTree) -> Array:
        """Return whether a client with this state needs the reference, ``[]`` bool."""
        raise undefined(self, "missing")


class GradientEstimator(Described):
    """Estimator of the gradient of one client's log likelihood (a sum over its rows).

    Summed over clients, its expectation is the gradient of the complete log likelihood.

    A subclass is a frozen dataclass registered as a pytree, whose fields hold numbers (leaves) and
    structure (static). Its methods are pure; only `estimate` is required.
    """

    disclosure: ClassVar[Disclosure] = Disclosure()
    """Information that estimates of this kind disclose to the server."""

    @property
    def reference(self) -> Reference | None:
        """Values to broadcast besides the position, or ``None``."""
        return None

    @property
    def needs_sum(self) -> bool:
        """True if a round first needs the sum of `summed` over clients."""
        return False

    def init(self, loglikelihood_fn: LogDensity, position: ArrayTree, client: Client) -> ArrayTree:
        """Return the client's state before the first round."""
        return ()

    def prepare(self, rng_key: Array, like: ArrayTree, client: Client, num_calls: int) -> ArrayTree:
        """Return all random draws of a round's calls, leaves ``[num_calls, ...]``.

        They include the rows of minibatches. `like` has the position's shapes.
        """
        return ()

    def summed(
        self, loglikelihood_fn: LogDensity, broadcast: Broadcast, client: Client
    ) -> ArrayTree:
        """Return the client's term of the sum that a round needs first, in `Broadcast.summed`.

        Terms are multiplied by one over the client's probability of taking part.
        """
        raise undefined(self, "summed")

    def start(
        self, loglikelihood_fn: LogDensity, broadcast: Broadcast, state: ArrayTree, client: Client
    ) -> tuple[ArrayTree, ArrayTree]:
        """Return the context, which is computed once per round, and the client's new state."""
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
        raise undefined(self, "estimate")

    def check(self, position: ArrayTree, federation: "Federation") -> None:
        """Raise `ValueError` if the estimator does not fit the position or the clients."""
