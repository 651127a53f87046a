"""Preconditioners of a Langevin step, coordinate by coordinate."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc._types import ArrayTree, Described, Federation, register_dataclass
from fedmcmc.pytrees import schedules, trees


class Preconditioner(Described):
    """A positive scale for each coordinate of a Langevin step.

    A subclass is a frozen dataclass registered as a pytree, whose fields hold numbers (leaves) and
    structure (static). Its methods are pure.
    """

    def init(self, position: ArrayTree, federation: Federation) -> ArrayTree:
        """Return the state before the first round."""
        return ()

    def update(self, gradient: ArrayTree, state: ArrayTree) -> tuple[ArrayTree, ArrayTree]:
        """Return the metric ``G``, shaped as the position, and the new state.

        `gradient` is that of the log posterior. A step moves by ``step_size * G * gradient`` and
        ``sqrt(2 * step_size * temperature * G) * normal``.
        """
        raise NotImplementedError

    def temperature(self, temperature: Array, round_: Array) -> Array:
        """Return a round's temperature, which a warm-up without noise sets to zero."""
        return temperature


class _State(NamedTuple):
    square: ArrayTree  # running mean of the squared gradient of the mean log posterior
    num_rows: Array


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Rms(Preconditioner):
    """One over the root of a running mean of squared gradients; see `rms`."""

    decay: Any
    damping: Any
    num_noiseless: Array

    def init(self, position: ArrayTree, federation: Federation) -> _State:
        ones = jax.tree.map(jnp.ones_like, position)
        return _State(ones, jnp.asarray(float(federation.num_rows)))

    def update(self, gradient: ArrayTree, state: _State) -> tuple[ArrayTree, _State]:
        mean = trees.scale(1 / state.num_rows, gradient)
        square = jax.tree.map(
            lambda v, g: trees.cast(self.decay, v) * v + trees.cast(1 - self.decay, v) * g * g,
            state.square,
            mean,
        )
        metric = jax.tree.map(lambda v: 1 / jnp.sqrt(v + trees.cast(self.damping, v)), square)
        return metric, _State(square, state.num_rows)

    def temperature(self, temperature: Array, round_: Array) -> Array:
        return jnp.where(round_ < self.num_noiseless, 0.0, temperature)


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
    return Rms(*numbers, jnp.asarray(int(num_noiseless), jnp.int32))
