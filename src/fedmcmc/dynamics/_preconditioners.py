"""Diagonal preconditioners of Langevin steps."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc.pytrees import schedules, trees
from fedmcmc.types import ArrayTree, Described, Federation, register_dataclass, undefined


class Preconditioner(Described):
    """Positive scale for each coordinate of a Langevin step.

    A subclass is a frozen dataclass registered as a pytree, whose fields hold numbers (leaves) and
    structure (static). Its methods are pure.
    """

    def init(self, position: ArrayTree, federation: Federation) -> ArrayTree:
        """Return the state before the first round."""
        return ()

    def update(self, gradient: ArrayTree, state: ArrayTree) -> tuple[ArrayTree, ArrayTree]:
        """Return the metric ``G``, shaped as the position, and the new state.

        `gradient` is the gradient of the log posterior. A step adds
        ``step_size * G * gradient + sqrt(2 * step_size * temperature * G) * normal``.
        """
        raise undefined(self, "update")

    def temperature(self, temperature: Array, round_: Array) -> Array:
        """Return the temperature of a round; zero during a warm-up without noise."""
        return temperature


class _RmsState(NamedTuple):
    square: ArrayTree  # running mean of squared gradients of the log posterior per row
    num_rows: Array


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Rms(Preconditioner):
    """Preconditioner from a running mean of squared gradients; see `rms`."""

    decay: Array
    damping: Array
    num_noiseless: Array

    def init(self, position: ArrayTree, federation: Federation) -> _RmsState:
        ones = jax.tree.map(jnp.ones_like, position)
        return _RmsState(ones, jnp.asarray(float(federation.num_rows)))

    def update(self, gradient: ArrayTree, state: _RmsState) -> tuple[ArrayTree, _RmsState]:
        mean = trees.scale(1 / state.num_rows, gradient)
        square = jax.tree.map(
            lambda v, g: trees.cast(self.decay, v) * v + trees.cast(1 - self.decay, v) * g * g,
            state.square,
            mean,
        )
        metric = jax.tree.map(lambda v: 1 / jnp.sqrt(v + trees.cast(self.damping, v)), square)
        return metric, _RmsState(square, state.num_rows)

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
        Weight of the previous ``V``, ``[]`` in [0, 1]. With one (and `damping` zero) the step is a
        plain Langevin step.
    damping
        Number ``[]`` added to ``V``, at least zero.
    num_noiseless
        Number of initial rounds without noise.

    Notes
    -----
    The curvature term ``div G`` of Li et al. (2016), eq. 7, is omitted, as in published
    implementations. The bias of the stationary distribution therefore grows with ``1 - decay`` and
    not only with the step size.

    References
    ----------
    Li et al. (2016), Preconditioned stochastic gradient Langevin dynamics,
    eqs. 4-5 with the damping under the root.

    Examples
    --------
    >>> preconditioner = rms(decay=0.99)
    """
    for name, x in (("decay", decay), ("damping", damping)):
        if callable(x):
            raise TypeError(f"{name} must be a number; a schedule is not supported.")
    weight = schedules.number(decay, "decay", minimum=0.0)
    if not isinstance(weight, jax.core.Tracer) and float(weight) > 1:
        raise ValueError(f"decay must be at most 1, got {decay}.")
    offset = schedules.number(damping, "damping", minimum=0.0)
    if int(num_noiseless) != num_noiseless or num_noiseless < 0:
        raise ValueError(f"num_noiseless must be an integer, at least 0, got {num_noiseless!r}.")
    return Rms(weight, offset, jnp.asarray(int(num_noiseless), jnp.int32))
