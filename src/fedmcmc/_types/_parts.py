"""Base classes of a kernel's parts: who takes part, and how a client estimates gradients."""

from dataclasses import dataclass, field
from typing import ClassVar

from jax import Array

from fedmcmc._types._describing import Described, undefined
from fedmcmc._types._traits import Disclosure
from fedmcmc._types._values import (
    ArrayTree,
    Broadcast,
    Client,
    Cohort,
    Counts,
    Federation,
    LogDensity,
)


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Participation(Described):
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
    weighted: bool = field(default=True, repr=False, metadata={"static": True})
    pooled: bool = field(default=False, repr=False, metadata={"static": True})
    silent: bool = field(default=False, repr=False, metadata={"static": True})
    drops: bool = field(default=True, repr=False, metadata={"static": True})
    repeats: bool = field(default=False, repr=False, metadata={"static": True})
    guards: bool = field(default=False, repr=False, metadata={"static": True})

    def prepare(self, rng_key: Array, num_clients: int) -> Cohort:
        """Return who takes part."""
        raise undefined(self, "prepare")

    def check(self, num_clients: int) -> None:
        """Raise `ValueError` where the rule does not fit the federation."""

    def counts(self, num_clients: int) -> Counts | None:
        """Return mean and covariance of how often clients take part, ``None`` where not known."""
        return None


class Reference:
    """What an estimator needs every client to know besides the position (a snapshot).

    The kernel's server keeps it in `Broadcast.extra`. A subclass is a frozen dataclass registered
    as a pytree.
    """

    def update(self, round_: Array, position: ArrayTree, previous: ArrayTree) -> ArrayTree:
        """Return the reference of a round whose position is given.

        `previous` is the reference of the round before, ``None`` for the first.
        """
        raise undefined(self, "update")

    def missing(self, broadcast: Broadcast, state: ArrayTree) -> Array:
        """Return whether a client with this state has to be sent the reference, ``[]`` bool."""
        raise undefined(self, "missing")


class GradientEstimator(Described):
    """An estimate of the gradient of one client's log likelihood (a sum over its rows).

    Summed over clients, its expectation is the gradient of the whole log likelihood.

    A subclass is a frozen dataclass registered as a pytree, whose fields hold numbers (leaves) and
    structure (static). Its methods are pure; only `estimate` has to be written.
    """

    disclosure: ClassVar[Disclosure] = Disclosure()
    """What a server learns that may ask for estimates of this kind."""

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
        raise undefined(self, "summed")

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
        raise undefined(self, "estimate")

    def check(self, position: ArrayTree, federation: "Federation") -> None:
        """Raise `ValueError` where the estimator does not fit the position or the clients."""
