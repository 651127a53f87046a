"""Random walks within Gibbs sampling whose every candidate takes all clients one number.

Asking all clients takes an exchange, whether for one candidate or for many. So the server proposes
many at once: around a point that is as far from where the chain is as they are from it, so that
each of them, and where the chain is, could have led to all the others. It then takes one of all in
proportion to their densities (Tjelmeland 2004). With sixteen a chain mixes about three times as
fast per exchange as with one.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc.kernels._gibbs_rows import FORGETTING, POWERS

NUM_CANDIDATES = 16
"""Beside where the chain is."""
SCALE = 2.4
"""Of steps of a walk in one dimension, in posterior sds; in ``d`` dimensions over ``sqrt(d)``."""
TARGET = 0.6
"""Chance of a candidate being taken that goes with it, for two to eight dimensions."""


class Walk(NamedTuple):
    """What a server keeps of a walk over ``m`` parameters.

    Attributes
    ----------
    factor
        ``[m, m]``, ``C`` of the metric ``C C'``; rows of zeros for parameters that stay.
    largest
        ``[]``, the largest step size.
    step
        ``[]``, that of the candidates.
    num_judged
        ``[]`` int32, choices among candidates of the largest step.
    """

    factor: Array
    largest: Array
    step: Array
    num_judged: Array


def first_walk(information: Array) -> Walk:
    """Return what a server begins with, from information ``[m, m]`` about the parameters.

    One more observation of unit scale is beside. Parameters about which there is none stay.
    """
    dtype = information.dtype
    walks = jnp.diagonal(information) > 0
    values, vectors = jnp.linalg.eigh((information + information.T) / 2)
    factor = vectors * (1 + jnp.maximum(values, 0)) ** -0.5
    largest = SCALE * jnp.maximum(jnp.sum(walks), 1).astype(dtype) ** -0.5
    none = jnp.zeros((), dtype)  # proposed so far
    return Walk(jnp.where(walks[:, None], factor, 0), largest, none, jnp.zeros((), jnp.int32))


def candidates(walk: Walk, rng_key: Array) -> tuple[Walk, Array]:
    """Return the walk with a step size for candidates, and how far they are, ``[num, m]``.

    Three in four times the step size is the largest, three in sixteen a fourth of it, and so on.
    """
    normal_key, step_key = jax.random.split(rng_key)
    dtype, size = walk.factor.dtype, walk.factor.shape[0]
    normals = jax.random.normal(normal_key, (1 + NUM_CANDIDATES, size), dtype)
    uniform = jax.random.uniform(step_key, (), dtype)
    power = sum((uniform < 0.25**k).astype(dtype) for k in range(1, POWERS))
    step = walk.largest * 4.0**-power
    return walk._replace(step=step), step * (normals[0] + normals[1:]) @ walk.factor.T


def choose(
    walk: Walk, differences: Array, whole: Array, uniform: Array, adapts: Array
) -> tuple[Array, Array, Walk]:
    """Return which candidate is taken, whether one is, and a walk that has learned from it.

    `differences` are those of their log densities, ``[num]``, to that of where the chain is, minus
    infinity where one cannot be.
    """
    every = jnp.concatenate([jnp.zeros(1, differences.dtype), differences])
    shares = jax.nn.softmax(every)
    taken = jnp.sum(uniform > jnp.cumsum(shares)[:-1])
    is_largest = whole & (walk.step > 0.5 * walk.largest)
    num = walk.num_judged + is_largest
    rate = jnp.maximum(num, 1).astype(shares.dtype) ** -FORGETTING
    adapted = walk.largest * jnp.exp(rate * (1 - shares[0] - TARGET))
    largest = jnp.where(is_largest & adapts, adapted, walk.largest)
    moved = whole & (taken > 0)
    return jnp.maximum(taken - 1, 0), moved, walk._replace(largest=largest, num_judged=num)
