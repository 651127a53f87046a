"""Participation over a network with faults: whose messages arrive, when, and in which state."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import register_dataclass

from fedmcmc._types import ArrayTree, Cohort, Participation
from fedmcmc.pytrees import trees
from fedmcmc.random import fault_key

__all__ = ["Rates", "faulty_participation", "rate_of", "seed_of"]


class Rates(NamedTuple):
    """Probabilities, ``[]`` or ``[num_clients]``, or ``()`` for what never happens."""

    drop: ArrayTree
    late: ArrayTree
    nan: ArrayTree


@register_dataclass
@dataclass(frozen=True, eq=False)
class FaultyParticipation(Participation):
    """A participation over a network with faults, whose server checks what arrives."""

    inner: Participation
    rates: Rates
    seed: Array  # [] uint32
    rescale: bool = field(metadata={"static": True})

    def check(self, num_clients: int) -> None:
        """Check the participation without faults, and the number of probabilities."""
        self.inner.check(num_clients)
        for name, rate in self.rates._asdict().items():
            if not trees.is_empty(rate) and rate.ndim and rate.shape[0] != num_clients:
                raise ValueError(
                    f"{name} has probabilities for {rate.shape[0]} clients, but the data has "
                    f"{num_clients} clients."
                )

    def prepare(self, rng_key: Array, num_clients: int) -> Cohort:
        """Draw a cohort, and what happens to its messages."""
        cohort = self.inner.prepare(rng_key, num_clients)
        if trees.is_empty(self.rates):
            return cohort
        keys = jax.vmap(lambda i: fault_key(rng_key, self.seed, i))(cohort.ids)
        # All kinds are drawn, so that the draws of one kind do not depend on which others occur.
        u = jax.vmap(lambda key: jax.random.uniform(key, (4,)))(keys)

        def of_cohort(rate: ArrayTree) -> Array:
            return rate[cohort.ids] if rate.ndim else rate

        def arrives(rate: ArrayTree) -> Array:
            return jnp.ones_like(cohort.weight) if trees.is_empty(rate) else 1 - of_cohort(rate)

        drop, late, nan = self.rates
        if self.rescale and not (trees.is_empty(drop) and trees.is_empty(nan)):
            cohort = cohort._replace(weight=cohort.weight / (arrives(drop) * arrives(nan)))
        if not trees.is_empty(drop):
            cohort = cohort._replace(active=cohort.active & (u[:, 0] >= of_cohort(drop)))
        if not trees.is_empty(late):
            cohort = cohort._replace(late=u[:, 1] < of_cohort(late))
        if not trees.is_empty(nan):
            kinds = jnp.array([jnp.nan, jnp.inf, -jnp.inf])
            kind = kinds[jnp.minimum((3 * u[:, 3]).astype(jnp.int32), 2)]
            cohort = cohort._replace(garbage=jnp.where(u[:, 2] < of_cohort(nan), kind, 0))
        return cohort


def faulty_participation(
    inner: Participation, rates: Rates, seed: Array, *, rescale: bool
) -> Participation:
    """Return `inner` over a network with faults, whose server looks at what arrives."""
    return FaultyParticipation(
        inner,
        rates,
        seed,
        rescale,
        cohort_size=inner.cohort_size,
        weighted=inner.weighted,
        pooled=inner.pooled,
        silent=inner.silent,
        drops=inner.drops or not (trees.is_empty(rates.drop) and trees.is_empty(rates.nan)),
        repeats=inner.repeats,
        guards=True,
    )


def rate_of(probability: Any, name: str) -> ArrayTree:
    """Return a probability as a leaf, or ``()`` where it is known to be zero.

    Raises
    ------
    ValueError
        If it is no number in [0, 1), and no vector of such.
    """
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


def seed_of(seed: Any) -> Array:
    """Return a seed as a leaf, ``[]`` uint32.

    Raises
    ------
    ValueError
        If it is no integer that fits.
    """
    if not isinstance(seed, jax.core.Tracer):
        array = np.asarray(seed)
        if array.ndim or array.dtype.kind not in "iu" or not 0 <= int(array) < 2**32:
            raise ValueError(f"seed must be an integer from 0 to 2**32 - 1, got {seed!r}.")
    return jnp.asarray(seed, jnp.uint32)
