"""Moves of the parameters of rows within Gibbs sampling: Metropolis-adjusted Langevin, by sums.

The server proposes from the sum of all clients' gradients at their present latents, and judges by
the sum of their differences of log likelihoods. All vectors are of the parameters of rows alone.

Each proposal has a step size of its own, the largest or a fourth, a sixteenth, ... of it, whatever
the chain's position: so chains get on where the metric, which is that of the start, is far off.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from fedmcmc._types import ArrayTree
from fedmcmc.dynamics import hmc_step_size
from fedmcmc.kernels._adjusted import probability
from fedmcmc.pytrees import trees

TARGET = 0.57
"""Acceptance that a step size is made for, and adapts to."""
POWERS = 4
"""Of a fourth, that step sizes are of the largest one."""
FORGETTING = 0.6
"""The step size's ``n``-th adaptation is of the order ``n ** -0.6``."""


class RowMoves(NamedTuple):
    """What a server keeps of the moves of the parameters of rows, ``[l]``.

    Attributes
    ----------
    factor
        ``[l, l]``, ``C`` of the metric ``C C'``.
    largest
        ``[]``, the largest step size.
    step
        ``[]``, that of the proposal.
    slope
        ``[l]``, gradient of the log density given all else where the chain is, times the factor.
    shift
        ``[l]``, of the proposal in units of the factor.
    ready
        ``[]`` bool, whether there is a proposal: every client's gradient was in the sum.
    num_judged
        ``[]`` int32, proposals of the largest step that were judged.
    acceptance
        ``[]``, the probability with which the last one was accepted.
    whole
        ``[]`` bool, whether every client's answer came last.
    """

    factor: Array
    largest: Array
    step: Array
    slope: Array
    shift: Array
    ready: Array
    num_judged: Array
    acceptance: Array
    whole: Array


def first_moves(information: Array, step_size: ArrayTree = ()) -> RowMoves:
    """Return what a server begins with, from the rows' information ``[l, l]`` at the start.

    It is that of their outer products of gradients, one more observation of unit scale beside. By
    default the step size is that of `TARGET`.
    """
    size, dtype = information.shape[0], information.dtype
    precision = information + jnp.eye(size, dtype=dtype)
    root = jnp.linalg.cholesky(precision)
    # The inverse transposed is a factor of the covariance; any factor does.
    factor = jnp.linalg.inv(root).T
    zeros, true = jnp.zeros(size, dtype), jnp.array(True)
    step = hmc_step_size(size, TARGET) ** 2 / 2 if trees.is_empty(step_size) else step_size
    none = jnp.zeros((), jnp.int32)
    return RowMoves(
        factor,
        jnp.asarray(step, dtype),
        jnp.asarray(step, dtype),
        zeros,
        zeros,
        ~true,
        none,
        jnp.ones((), dtype),
        true,
    )


def propose(
    moves: RowMoves, gradient: Array, whole: Array, normals: Array, uniform: Array
) -> RowMoves:
    """Return moves with a new proposal, from the gradient where the chain is."""
    # One in two is the largest, one in four a fourth, and so on.
    power = sum((uniform > 1 - 0.5**k).astype(gradient.dtype) for k in range(1, POWERS))
    slope, step = moves.factor.T @ gradient, moves.largest * 4.0**-power
    shift = step * slope + jnp.sqrt(2 * step) * normals
    ready = whole & jnp.all(jnp.isfinite(shift))
    shift = jnp.where(ready, shift, 0)
    return moves._replace(slope=slope, shift=shift, step=step, ready=ready)


def judge(
    moves: RowMoves,
    difference: Array,
    gradient: Array,
    whole: Array,
    uniform: Array,
    adapts: Array,
) -> tuple[Array, RowMoves]:
    """Return whether the proposal is accepted, and moves that have learned from it.

    `difference` is that of the log densities given all else, `gradient` that at the proposal.
    """
    step, slope = moves.step, moves.factor.T @ gradient
    there = jnp.sum((moves.shift - step * moves.slope) ** 2)
    back = jnp.sum((moves.shift + step * slope) ** 2)
    chance = probability(difference + (there - back) / (4 * step))
    judged = whole & moves.ready
    is_largest = judged & (step > 0.5 * moves.largest)
    num = moves.num_judged + is_largest
    rate = jnp.maximum(num, 1).astype(step.dtype) ** -FORGETTING
    adapted = moves.largest * jnp.exp(rate * (chance - TARGET))
    return judged & (uniform < chance), moves._replace(
        largest=jnp.where(is_largest & adapts, adapted, moves.largest),
        num_judged=num,
        acceptance=jnp.where(judged, chance, moves.acceptance),
        whole=judged,
    )
