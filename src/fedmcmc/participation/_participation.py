"""Participation rules: all clients, a Bernoulli subset, a uniform cohort, independent draws."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._checks import positive_integer, probability_vector
from fedmcmc.random import distinct_integers, integers_below
from fedmcmc.types import Cohort, Participation, ParticipationMoments, register_dataclass


def full() -> Participation:
    """Return the rule by which all clients take part in every round.

    Examples
    --------
    >>> full().prepare(jax.random.key(0), 3).ids.tolist()
    [0, 1, 2]
    """
    return Full(may_drop=False)


def pooled() -> Participation:
    """Return the rule for one client that owns all rows; it sends no messages."""
    return Full(pooled=True, silent=True, may_drop=False)


def cohorts_of(
    cohort_size: int | None, participation: Participation | None
) -> Participation | None:
    """Return the rule for an algorithm's two arguments, ``None`` for all clients.

    Raises
    ------
    ValueError
        If both are given.
    """
    if cohort_size is None:
        return participation
    if participation is not None:
        raise ValueError("Give either cohort_size= or participation=, and not both.")
    return uniform(cohort_size)


def mean_share(participation: Participation, num_clients: int) -> Array | None:
    """Return the mean over clients of the expected number of messages per round, ``[]``.

    A weighted sum times this mean is a plain sum if all clients take part equally often. The mean
    is ``None`` if all clients take part, and for other classes of rules.
    """
    if isinstance(participation, Bernoulli):
        return jnp.mean(participation.probability)
    if isinstance(participation, Uniform | Categorical):
        return jnp.asarray(participation.cohort_size / num_clients, jnp.result_type(float))
    return None


def bernoulli(
    probability: float | Array, *, rescale: Literal["probability", "realised"] = "probability"
) -> Participation:
    """Return the rule by which each client takes part independently, with its own probability.

    Parameters
    ----------
    probability
        ``[]``, or ``[num_clients]`` for one per client, in (0, 1].
    rescale
        Factor of the messages. ``"probability"``: one divided by the client's probability.
        ``"realised"``: the number of clients divided by the number that take part; rounds without
        any client are not drawn. Both keep the expectation of the sum, the second only if all
        clients share one probability.

    Raises
    ------
    ValueError
        If a probability is outside (0, 1], or ``"realised"`` comes with one probability per client.
    TypeError
        If the probability is a schedule: the cohort of a round is drawn before the round.

    Notes
    -----
    The number of active clients is random, so a simulation computes all clients and drops the
    messages of inactive ones.
    """
    if callable(probability):
        raise TypeError(
            "probability must be one number, or one per client; a schedule of the round is not "
            "supported."
        )
    p = jnp.asarray(probability, jnp.result_type(float))
    if not isinstance(p, jax.core.Tracer):
        values = np.asarray(p)  # inside jit a comparison in jax.numpy would be traced
        if not np.all((values > 0) & (values <= 1)):
            raise ValueError(
                f"bernoulli needs probabilities in (0, 1], got {np.asarray(probability)}."
            )
    if rescale not in ("probability", "realised"):
        raise ValueError(f'rescale must be "probability" or "realised", got {rescale!r}.')
    if rescale == "realised":
        if p.ndim:
            raise ValueError(
                "rescale='realised' needs one probability for all clients, got shape "
                f"{p.shape}: with different probabilities the weighted sum would be biased."
            )
        return Realised(p)
    return Bernoulli(p)


def uniform(cohort_size: int) -> Participation:
    """Return the rule that draws `cohort_size` of ``b`` clients uniformly without replacement.

    Messages are weighted by ``b / cohort_size``.

    Raises
    ------
    ValueError
        If `cohort_size` is not a positive integer, or larger than the number of clients.
    """
    return Uniform(cohort_size=positive_integer(cohort_size, "cohort_size"), may_drop=False)


def categorical(probabilities: Array | None = None, *, cohort_size: int = 1) -> Participation:
    """Return the rule that draws `cohort_size` clients with replacement.

    A message is weighted by one divided by `cohort_size` times the probability. Kernels that pass
    one chain from client to client weight the gradient instead (``weighted=False``). A client that
    is drawn twice draws the same numbers twice and counts twice, also in bits.

    Parameters
    ----------
    probabilities
        ``[num_clients]``, positive, summing to one; uniform by default.
    cohort_size
        Number of draws per round.

    Raises
    ------
    ValueError
        If a probability is not positive, they do not sum to one, or `cohort_size` is not a positive
        integer.
    """
    size = positive_integer(cohort_size, "cohort_size")
    if probabilities is None:
        return Categorical(cohort_size=size, may_drop=False, may_repeat=size > 1)
    p = probability_vector(probabilities, "probabilities")
    return Categorical(p, _edges(p), cohort_size=size, may_drop=False, may_repeat=size > 1)


def _edges(p: Array) -> Array:
    # Edges between clients, in 32-bit words. With sums and uniforms in float32, the frequencies of
    # 100,000 clients would be off by up to a tenth.
    if isinstance(p, jax.core.Tracer):
        share = jnp.cumsum(p)[:-1] / jnp.sum(p)
        return (jnp.minimum(share, 1 - 2.0**-24) * 2.0**32).astype(jnp.uint32)
    total = np.cumsum(np.asarray(p, np.float64))
    words = np.minimum(np.rint(total[:-1] / total[-1] * 2.0**32), 2.0**32 - 1)
    return jnp.asarray(words.astype(np.uint32))


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Full(Participation):
    """Rule by which all clients take part; see `full`."""

    def prepare(self, rng_key: Array, num_clients: int) -> Cohort:
        ones = jnp.ones(num_clients)
        return Cohort(_all_ids(num_clients), ones, jnp.ones(num_clients, bool))

    def counts(self, num_clients: int) -> ParticipationMoments:
        ones = np.ones(num_clients)
        return ParticipationMoments(ones, ones, 0 * ones, 0 * ones, 1.0, ones)


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Bernoulli(Participation):
    """Rule with independent participation of the clients; see `bernoulli`."""

    probability: Array  # [] or [num_clients]

    def prepare(self, rng_key: Array, num_clients: int) -> Cohort:
        p = self.probability
        probability = jnp.broadcast_to(p, (num_clients,))
        active = jax.random.uniform(rng_key, (num_clients,), p.dtype) < probability
        return Cohort(_all_ids(num_clients), 1 / probability, active)

    def counts(self, num_clients: int) -> ParticipationMoments:
        p = np.broadcast_to(np.asarray(self.probability, np.float64), (num_clients,))
        return ParticipationMoments(1 / p, p, p * (1 - p), 0 * p, 1.0, p)

    def check(self, num_clients: int) -> None:
        _check_length(self.probability, num_clients)


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Realised(Bernoulli):
    """Bernoulli rule that weights messages by the number of participants; see `bernoulli`."""

    def prepare(self, rng_key: Array, num_clients: int) -> Cohort:
        """Draw a coin per client, given that at least one client takes part."""
        # The smallest active id is then truncated geometric, and larger ids are independent coins:
        # invert P(min_id <= j) = (1 - q^(j+1)) / (1 - q^b) at a uniform u.
        p = self.probability
        min_key, coins_key = jax.random.split(rng_key)
        ids = _all_ids(num_clients)
        nobody = jnp.log1p(-p) * (ids + 1).astype(p.dtype)  # log of q^(j+1); -inf where p is one
        reached = -jnp.expm1(nobody) / -jnp.expm1(nobody[-1])
        u = jax.random.uniform(min_key, (), p.dtype)
        min_id = jnp.sum(reached <= u, dtype=jnp.int32)
        active = jax.random.uniform(coins_key, (num_clients,), p.dtype) < p
        active = jnp.where(ids > min_id, active, ids == min_id)
        weight = num_clients / jnp.sum(active.astype(p.dtype))
        return Cohort(ids, jnp.broadcast_to(weight, (num_clients,)), active)

    def counts(self, num_clients: int) -> ParticipationMoments:
        """Return moments of ``b a_i / |A|``, the factor of the messages."""
        b, p, ones = num_clients, float(self.probability), np.ones(num_clients)
        if b == 1 or p == 1:
            return ParticipationMoments(ones, ones, 0 * ones, 0 * ones, 1.0, ones)
        k = np.arange(1, b + 1)
        log_pmf = [math.lgamma(b + 1) - math.lgamma(j + 1) - math.lgamma(b - j + 1) for j in k]
        pmf = np.exp(log_pmf + k * np.log(p) + (b - k) * np.log1p(-p))
        inverse = float(pmf @ (1 / k) / pmf.sum())  # E 1 / |A|, given that A is not empty
        # Products of two counts have the mean b (1 - inverse) / (b - 1), squares b * inverse.
        variance = b * (b * inverse - 1) / (b - 1)
        active = p / (1 - (1 - p) ** b) * ones
        return ParticipationMoments(
            ones, ones, variance * ones, np.sqrt(variance / b) * ones, -1.0, active
        )


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Uniform(Participation):
    """Rule that draws distinct clients; see `uniform`."""

    cohort_size: int = field(kw_only=True, metadata={"static": True})

    def prepare(self, rng_key: Array, num_clients: int) -> Cohort:
        index = distinct_integers(rng_key, jnp.asarray(num_clients), (self.cohort_size,))
        return _equal_cohort(index, num_clients)

    def counts(self, num_clients: int) -> ParticipationMoments:
        ones, share = np.ones(num_clients), self.cohort_size / num_clients
        # Counts sum to a constant, so their covariances with all other counts sum to -variance.
        variance = share * (1 - share) * num_clients / max(num_clients - 1, 1)
        common = np.sqrt(variance / num_clients) * ones
        return ParticipationMoments(
            ones / share, share * ones, variance * ones, common, -1.0, share * ones
        )

    def check(self, num_clients: int) -> None:
        if self.cohort_size > num_clients:
            raise ValueError(
                f"A cohort of {self.cohort_size} clients cannot be drawn without replacement from "
                f"{num_clients} clients."
            )


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Categorical(Participation):
    """Rule that draws clients with replacement; see `categorical`."""

    probabilities: Any = ()  # [num_clients], or () if they are equal
    # [num_clients - 1], edges between the clients' ranges of 32-bit words
    edges: Any = field(default=(), repr=False)
    cohort_size: int = field(kw_only=True, metadata={"static": True})

    def prepare(self, rng_key: Array, num_clients: int) -> Cohort:
        size, p = self.cohort_size, self.probabilities
        if isinstance(p, tuple):
            index = integers_below(rng_key, jnp.asarray(num_clients), (size,))
            return _equal_cohort(index, num_clients)
        word = jax.random.bits(rng_key, (size,), jnp.uint32)
        index = jnp.searchsorted(self.edges, word, side="right").astype(jnp.int32)
        return Cohort(index, 1 / (size * p[index]), jnp.ones(size, bool))

    def counts(self, num_clients: int) -> ParticipationMoments:
        size = self.cohort_size
        if isinstance(self.probabilities, tuple):
            p = np.full(num_clients, 1 / num_clients)
        else:
            p = np.asarray(self.probabilities, np.float64)
            p = p / p.sum()
        return ParticipationMoments(
            1 / (size * p), size * p, size * p, np.sqrt(size) * p, -1.0, size * p
        )

    def check(self, num_clients: int) -> None:
        if not isinstance(self.probabilities, tuple):
            _check_length(self.probabilities, num_clients)


def _all_ids(num_clients: int) -> Array:
    return jnp.arange(num_clients, dtype=jnp.int32)


def _equal_cohort(index: Array, num_clients: int) -> Cohort:
    size = index.shape[0]
    weight = jnp.full(size, num_clients / size, jnp.result_type(float))
    return Cohort(index, weight, jnp.ones(size, bool))


def _check_length(p: Array, num_clients: int) -> None:
    if p.ndim and p.shape[0] != num_clients:
        raise ValueError(
            f"Got probabilities for {p.shape[0]} clients, but the data has {num_clients} clients."
        )
