"""Discretized stochastic and Hamiltonian differential equations.

A gradient function maps one entry of random draws and a position to the gradient of a log density.
Momenta are represented as velocities, ``inverse_mass_matrix * momentum``.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc._checks import positive_integer
from fedmcmc.dynamics._metrics import IDENTITY, Metric
from fedmcmc.pytrees import trees
from fedmcmc.types import ArrayTree, Described, register_dataclass, undefined

GradientFn = Callable[[ArrayTree, ArrayTree], ArrayTree]
"""Function ``(draws, position) -> gradient``."""


def overdamped_langevin(
    position: ArrayTree,
    gradient: ArrayTree,
    noise: ArrayTree,
    step_size: float | Array,
    temperature: float | Array = 1.0,
    metric: Metric = IDENTITY,
) -> ArrayTree:
    """Return the position after one Euler step of overdamped Langevin dynamics.

    ``position + step_size * B gradient + sqrt(2 * step_size * temperature) * C noise``, with the
    metric ``B = C C'``.

    Parameters
    ----------
    position
        Position, any pytree.
    gradient
        Gradient of the log density, shaped as `position`.
    noise
        Standard normals, shaped as `position`.
    step_size, temperature
        Scalars ``[]``. The step size ``h`` of Welling and Teh (2011) and of FSGLD is
        ``2 * step_size``.
    metric
        Metric, by default the identity.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> x = jnp.ones(1)
    >>> overdamped_langevin(x, -x, x, 0.5).tolist()
    [1.5]
    """
    spread: Array = jnp.sqrt(2 * jnp.asarray(step_size) * jnp.asarray(temperature))
    return jax.tree.map(
        lambda x, g, z: x + trees.cast(step_size, x) * g + trees.cast(spread, x) * z,
        position,
        metric.times(gradient),
        metric.root_times(noise),
    )


class Integrator(Described):
    """Rule that computes a trajectory.

    A subclass is a frozen dataclass registered as a pytree, whose fields hold numbers (leaves) and
    structure (static). Its methods are pure.
    """

    @property
    def num_calls(self) -> int:
        """Number of gradient calls per trajectory."""
        return 1

    def move(
        self,
        gradient_fn: GradientFn,
        draws: ArrayTree,
        position: ArrayTree,
        noise: ArrayTree,
        step_size: Array,
    ) -> tuple[ArrayTree, ArrayTree, Array]:
        """Return position and velocity after the last drift, and the gradients' mean square.

        `draws` has leaves ``[num_calls, ...]``. `noise` holds standard normals times the root of
        the temperature. The mean squared norm of the gradients is ``[]`` float32.
        """
        raise undefined(self, "move")

    def check(self, position: ArrayTree) -> None:
        """Raise `ValueError` if the integrator does not fit the position."""


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class EulerMaruyama(Integrator):
    """Integrator for one step of overdamped Langevin dynamics; see `euler_maruyama`."""

    metric: Metric = IDENTITY

    def move(
        self,
        gradient_fn: GradientFn,
        draws: ArrayTree,
        position: ArrayTree,
        noise: ArrayTree,
        step_size: Array,
    ) -> tuple[ArrayTree, ArrayTree, Array]:
        gradient = gradient_fn(jax.tree.map(lambda leaf: leaf[0], draws), position)
        position = overdamped_langevin(position, gradient, noise, step_size, metric=self.metric)
        return position, noise, trees.squared_norm(gradient)

    def check(self, position: ArrayTree) -> None:
        self.metric.check(position)


def euler_maruyama(metric: ArrayTree | None = None) -> Integrator:
    """Take one step of overdamped Langevin dynamics, see `overdamped_langevin`.

    Parameters
    ----------
    metric
        Metric, see `fedmcmc.lsd`.
    """
    return EulerMaruyama(Metric.of(metric))


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Leapfrog(Integrator):
    """Integrator for leapfrog steps of Hamiltonian dynamics; see `leapfrog`."""

    mass: Metric
    num_steps: int = field(metadata={"static": True})
    fresh: bool = field(metadata={"static": True})  # if true, each half kick has its own gradient

    @property
    def num_calls(self) -> int:
        return 2 * self.num_steps - 1 if self.fresh else self.num_steps

    def move(
        self,
        gradient_fn: GradientFn,
        draws: ArrayTree,
        position: ArrayTree,
        noise: ArrayTree,
        step_size: Array,
    ) -> tuple[ArrayTree, ArrayTree, Array]:
        half = jnp.asarray(step_size) / 2
        kick = self.mass.times
        gradient = gradient_fn(jax.tree.map(lambda leaf: leaf[0], draws), position)
        velocity = trees.add_scaled(self.mass.root_times(noise), half, kick(gradient))
        position = trees.add_scaled(position, step_size, velocity)
        squares = _squares(gradient)
        num_later = self.num_steps - 1
        if num_later:
            # Draws after the first call, leaves [num_later, calls per step, ...].
            later = jax.tree.map(lambda x: x[1:].reshape(num_later, -1, *x.shape[1:]), draws)

            def step(
                carry: tuple[ArrayTree, ArrayTree, ArrayTree], drawn: ArrayTree
            ) -> tuple[tuple[ArrayTree, ArrayTree, ArrayTree], None]:
                position, velocity, squares = carry
                twice, new_squares = _two_halves(gradient_fn, drawn, position)
                velocity = trees.add_scaled(velocity, half, kick(twice))
                position = trees.add_scaled(position, step_size, velocity)
                # Sum over coordinates after the loop: here a sum takes a tenth of the loop's time.
                return (position, velocity, trees.add(squares, new_squares)), None

            start = (position, velocity, squares)
            (position, velocity, squares), _ = jax.lax.scan(step, start, later, length=num_later)
        leaves = jax.tree.leaves(draws)
        calls = leaves[0].shape[0] if leaves else self.num_steps
        sums = (jnp.sum(x).astype(jnp.float32) for x in jax.tree.leaves(squares))
        return position, velocity, sum(sums, jnp.float32(0)) / calls

    def check(self, position: ArrayTree) -> None:
        self.mass.check(position, "inverse_mass_matrix")


def leapfrog(
    num_steps: int,
    *,
    gradients: Literal["fresh", "reuse"] = "fresh",
    inverse_mass_matrix: ArrayTree | None = None,
) -> Integrator:
    """Take leapfrog steps of Hamiltonian dynamics, up to the last drift.

    With the inverse mass matrix ``A``, each step is a half kick
    ``v += step_size / 2 * A gradient``, a drift ``x += step_size * v``, and another half kick. The
    half kick after the last drift does not change the position and is omitted.

    Parameters
    ----------
    num_steps
        Number of leapfrog steps per trajectory. A single step is a step of overdamped Langevin
        dynamics with step size ``step_size ** 2 / 2``.
    gradients
        ``"fresh"`` for one stochastic gradient per half kick (``2 * num_steps - 1`` calls), or
        ``"reuse"`` for one per pair of half kicks between two drifts (`num_steps` calls). The
        stationary distributions differ. Exact gradients are never computed twice.
    inverse_mass_matrix
        Matrix ``A``, shaped as the position for a diagonal, or ``[d, d]`` over the raveled
        position; by default the identity.

    Raises
    ------
    ValueError
        If a number is out of range or the matrix is not positive definite.

    References
    ----------
    Liang et al. (2024), Algorithm 1, with independent draws for the two halves ("fresh").

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> position, noise = jnp.ones(1), jnp.zeros(1)
    >>> position, velocity, _ = leapfrog(2).move(lambda _, x: -x, (), position, noise, 0.5)
    >>> position.tolist(), velocity.tolist()
    ([0.53125], [-0.6875])
    """
    num_steps = positive_integer(num_steps, "num_steps")
    if gradients not in ("fresh", "reuse"):
        raise ValueError(f'gradients must be "fresh" or "reuse", got {gradients!r}.')
    return Leapfrog(Metric.of(inverse_mass_matrix), num_steps, gradients == "fresh")


def _two_halves(
    gradient_fn: GradientFn, drawn: ArrayTree, position: ArrayTree
) -> tuple[ArrayTree, ArrayTree]:
    """Return the sum of the gradients of two half kicks, and the sum of their squares."""
    leaves = jax.tree.leaves(drawn)
    if not leaves or leaves[0].shape[0] == 1:
        gradient = gradient_fn(jax.tree.map(lambda leaf: leaf[0], drawn), position)
        return trees.scale(2, gradient), _squares(gradient)
    both = jax.vmap(gradient_fn, in_axes=(0, None))(drawn, position)
    return tuple(jax.tree.map(lambda g: jnp.sum(g, axis=0), x) for x in (both, _squares(both)))


def _squares(tree: ArrayTree) -> ArrayTree:
    return jax.tree.map(lambda leaf: jnp.square(trees.widen(leaf)), tree)
