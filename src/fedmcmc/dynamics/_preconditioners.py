"""Preconditioners of a Langevin step, coordinate by coordinate."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import Partial

from fedmcmc._types import ArrayTree
from fedmcmc.data import FederatedData
from fedmcmc.pytrees import schedules, trees

__all__ = ["Preconditioner", "rms"]


class Preconditioner(NamedTuple):
    """A positive scale for each coordinate of a Langevin step.

    Attributes
    ----------
    init
        ``(position, data) -> state``.
    update
        ``(gradient, state) -> (metric, state)``: the metric ``G``, shaped as the position, from
        the gradient of the log posterior. A step moves by ``step_size * G * gradient`` and
        ``sqrt(2 * step_size * temperature * G) * normal``.
    temperature
        ``(temperature, round) -> []``, which a warm-up without noise sets to zero.
    """

    init: Callable[..., ArrayTree]
    update: Callable[..., tuple[ArrayTree, ArrayTree]]
    temperature: Callable[..., Array]


class _State(NamedTuple):
    square: ArrayTree  # running mean of the squared gradient of the mean log posterior
    num_rows: Array


def rms(
    decay: float | Array = 0.95, damping: float | Array = 1e-8, *, num_noiseless: int = 0
) -> Preconditioner:
    """Scale by one over the root of a running mean of squared gradients (RMSprop).

    ``V <- decay * V + (1 - decay) * (gradient / num_rows)**2`` from ``V = 1``, and
    ``G = (V + damping) ** -0.5``.

    Parameters
    ----------
    decay
        ``[]``, in [0, 1]; one freezes ``V``, which is a plain Langevin step for `damping` zero.
    damping
        ``[]``, at least zero.
    num_noiseless
        Rounds at the start without noise.

    Notes
    -----
    The curvature term ``div G`` of Li et al. (2016), eq. 7, is left out, as in every published use
    we know of: the chain's stationary law is then off by an amount that grows with
    ``1 - decay``, not only with the step size.

    References
    ----------
    Li, Chen, Carlson and Carin (2016), Preconditioned stochastic gradient Langevin dynamics,
    eqs. 4-5 with the damping under the root.

    Examples
    --------
    >>> preconditioner = rms(decay=0.99)
    """
    numbers = (
        schedules.number(decay, "decay", minimum=0.0),
        schedules.number(damping, "damping", minimum=0.0),
    )
    for name, number in zip(("decay", "damping"), numbers, strict=True):
        if isinstance(number, schedules.Scheduled):
            raise TypeError(f"{name} must be a number; a schedule is not supported.")
    if not isinstance(numbers[0], jax.core.Tracer) and float(numbers[0]) > 1:
        raise ValueError(f"decay must be at most 1, got {decay}.")
    if int(num_noiseless) != num_noiseless or num_noiseless < 0:
        raise ValueError(f"num_noiseless must be an integer, at least 0, got {num_noiseless!r}.")
    return Preconditioner(
        init=Partial(_init),
        update=Partial(_update, *numbers),
        temperature=Partial(_temperature, jnp.asarray(int(num_noiseless), jnp.int32)),
    )


def _init(position: ArrayTree, data: FederatedData) -> _State:
    return _State(jax.tree.map(jnp.ones_like, position), jnp.asarray(float(data.num_rows)))


def _update(
    decay: Any, damping: Any, gradient: ArrayTree, state: _State
) -> tuple[ArrayTree, _State]:
    mean = trees.scale(1 / state.num_rows, gradient)
    square = jax.tree.map(
        lambda v, g: trees.cast(decay, v) * v + trees.cast(1 - decay, v) * g * g,
        state.square,
        mean,
    )
    metric = jax.tree.map(lambda v: 1 / jnp.sqrt(v + trees.cast(damping, v)), square)
    return metric, _State(square, state.num_rows)


def _temperature(num_noiseless: Array, temperature: Array, round_: Array) -> Array:
    return jnp.where(round_ < num_noiseless, 0.0, temperature)
