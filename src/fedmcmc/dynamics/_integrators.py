"""Dynamics: discretized stochastic and Hamiltonian differential equations.

Positions are moved along a gradient function ``(draws, position) -> gradient`` of a log density;
`draws` is one entry of whatever makes the gradient stochastic. Momenta appear as velocities,
``inverse_mass_matrix * momentum``.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import register_dataclass

from fedmcmc._types import ArrayTree
from fedmcmc.dynamics._mass_matrix import MassMatrix
from fedmcmc.pytrees import trees

__all__ = ["Integrator", "euler_maruyama", "half_kick", "leapfrog", "overdamped_langevin"]

GradientFn = Callable[[ArrayTree, ArrayTree], ArrayTree]


def overdamped_langevin(
    position: ArrayTree,
    gradient: ArrayTree,
    noise: ArrayTree,
    step_size: Any,
    temperature: Any = 1.0,
) -> ArrayTree:
    """One Euler step of overdamped Langevin dynamics.

    ``position + step_size * gradient + sqrt(2 * step_size * temperature) * noise``.

    Parameters
    ----------
    position
        A pytree.
    gradient
        Of the log density (ascending), shaped as `position`.
    noise
        Standard normals, shaped as `position`.
    step_size, temperature
        ``[]``. The step size ``h`` of Welling and Teh (2011) and of FSGLD is ``2 * step_size``.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> one = jnp.ones(1)
    >>> overdamped_langevin(one, -one, one, 0.5).tolist()
    [1.5]
    """
    spread: Array = jnp.sqrt(2 * jnp.asarray(step_size) * jnp.asarray(temperature))
    return jax.tree.map(
        lambda x, g, z: x + trees.cast(step_size, x) * g + trees.cast(spread, x) * z,
        position,
        gradient,
        noise,
    )


class Integrator:
    """How a trajectory moves.

    A subclass is a frozen dataclass registered as a pytree, whose fields hold numbers (leaves) and
    structure (static). Its methods are pure.
    """

    @property
    def num_calls(self) -> int:
        """Gradient calls per trajectory."""
        return 1

    def move(
        self,
        gradient_fn: GradientFn,
        draws: ArrayTree,
        position: ArrayTree,
        noise: ArrayTree,
        step_size: Array,
    ) -> tuple[ArrayTree, ArrayTree, Array]:
        """Return the position and velocity of the last drift, and the gradients' mean square.

        `draws` has leaves ``[num_calls, ...]``, `noise` are standard normals times the root of the
        temperature. The mean squared norm of the gradients is ``[]`` float32.
        """
        raise NotImplementedError

    def check(self, position: ArrayTree) -> None:
        """Raise `ValueError` where the integrator does not fit."""


@register_dataclass
@dataclass(frozen=True, eq=False)
class EulerMaruyama(Integrator):
    """One step of overdamped Langevin dynamics; see `euler_maruyama`."""

    def move(
        self,
        gradient_fn: GradientFn,
        draws: ArrayTree,
        position: ArrayTree,
        noise: ArrayTree,
        step_size: Array,
    ) -> tuple[ArrayTree, ArrayTree, Array]:
        """Take the step."""
        gradient = gradient_fn(jax.tree.map(lambda leaf: leaf[0], draws), position)
        position = overdamped_langevin(position, gradient, noise, step_size)
        return position, noise, trees.squared_norm(gradient)


def euler_maruyama() -> Integrator:
    """One step of overdamped Langevin dynamics, `overdamped_langevin`, as an integrator."""
    return EulerMaruyama()


@register_dataclass
@dataclass(frozen=True, eq=False)
class Leapfrog(Integrator):
    """Steps of Hamiltonian dynamics, up to the last drift; see `leapfrog`."""

    mass: MassMatrix
    num_steps: int = field(metadata={"static": True})
    fresh: bool = field(metadata={"static": True})  # whether half kicks have gradients of their own

    @property
    def num_calls(self) -> int:
        """One per half kick, or one per step."""
        return 2 * self.num_steps - 1 if self.fresh else self.num_steps

    def move(
        self,
        gradient_fn: GradientFn,
        draws: ArrayTree,
        position: ArrayTree,
        noise: ArrayTree,
        step_size: Array,
    ) -> tuple[ArrayTree, ArrayTree, Array]:
        """Take the steps."""
        half = jnp.asarray(step_size) / 2
        kick = self.mass.acceleration
        first = gradient_fn(jax.tree.map(lambda leaf: leaf[0], draws), position)
        velocity = trees.add_scaled(self.mass.velocity(noise), half, kick(first))
        position = trees.add_scaled(position, step_size, velocity)
        squares = _squares(first)
        num_later = self.num_steps - 1
        if num_later:
            later = _later_calls(draws, num_later)

            def step(
                carry: tuple[ArrayTree, ArrayTree, ArrayTree], drawn: ArrayTree
            ) -> tuple[tuple[ArrayTree, ArrayTree, ArrayTree], None]:
                position, velocity, squares = carry
                twice, own = _two_halves(gradient_fn, drawn, position)
                velocity = trees.add_scaled(velocity, half, kick(twice))
                position = trees.add_scaled(position, step_size, velocity)
                # Summed over coordinates once, at the end: in the loop a sum costs a tenth of it.
                return (position, velocity, trees.add(squares, own)), None

            start = (position, velocity, squares)
            moved, _ = jax.lax.scan(step, start, later, length=num_later)
            position, velocity, squares = moved
        leaves = jax.tree.leaves(draws)
        calls = leaves[0].shape[0] if leaves else self.num_steps
        sums = (jnp.sum(x).astype(jnp.float32) for x in jax.tree.leaves(squares))
        return position, velocity, sum(sums, jnp.float32(0)) / calls

    def check(self, position: ArrayTree) -> None:
        """Check the mass matrix."""
        self.mass.check(position)


def leapfrog(
    num_steps: int,
    *,
    gradients: Literal["fresh", "reuse"] = "fresh",
    inverse_mass_matrix: ArrayTree | None = None,
) -> Integrator:
    """Leapfrog steps of Hamiltonian dynamics, up to the last drift.

    From ``v = root * noise``, each step is half a kick, ``v += step_size / 2 * A gradient``, a
    drift, ``x += step_size * v``, and half a kick, with ``A`` the inverse mass matrix. The half
    kick after the last drift does not move the position and is left out; `half_kick` does it for
    whoever keeps the velocity.

    Parameters
    ----------
    num_steps
        Leapfrog steps per trajectory. One of them is a step of overdamped Langevin dynamics with
        ``step_size ** 2 / 2``.
    gradients
        Whether the two half kicks between two drifts have stochastic gradients of their own
        (``"fresh"``, ``2 * num_steps - 1`` calls) or share one (``"reuse"``, `num_steps` calls).
        The laws differ. Exact gradients are never computed twice.
    inverse_mass_matrix
        ``A``: shaped as the position for a diagonal, or ``[d, d]`` over the raveled position; the
        identity by default.

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
    >>> steps = leapfrog(2)
    >>> one, draws = jnp.ones(1), ()
    >>> position, velocity, _ = steps.move(lambda _, x: -x, draws, one, 0 * one, 0.5)
    >>> position.tolist(), half_kick(velocity, -position, 0.5).tolist()
    ([0.53125], [-0.8203125])
    """
    if int(num_steps) != num_steps or num_steps < 1:
        raise ValueError(f"num_steps must be a positive integer, got {num_steps!r}.")
    if gradients not in ("fresh", "reuse"):
        raise ValueError(f'gradients must be "fresh" or "reuse", got {gradients!r}.')
    return Leapfrog(MassMatrix.of(inverse_mass_matrix), int(num_steps), gradients == "fresh")


def half_kick(
    velocity: ArrayTree,
    gradient: ArrayTree,
    step_size: Any,
    inverse_mass_matrix: ArrayTree | None = None,
) -> ArrayTree:
    """Return ``velocity + step_size / 2 * inverse_mass_matrix * gradient``."""
    mass = MassMatrix.of(inverse_mass_matrix)
    return trees.add_scaled(velocity, jnp.asarray(step_size) / 2, mass.acceleration(gradient))


def _later_calls(draws: ArrayTree, num_steps: int) -> ArrayTree:
    """Return the draws behind the first call, leaves ``[num_steps, calls per step, ...]``."""
    return jax.tree.map(
        lambda leaf: leaf[1:].reshape(num_steps, -1, *leaf.shape[1:]),
        draws,
    )


def _two_halves(
    gradient_fn: GradientFn, drawn: ArrayTree, position: ArrayTree
) -> tuple[ArrayTree, ArrayTree]:
    """Return the sum of the gradients of two half kicks, and the calls' squares."""
    leaves = jax.tree.leaves(drawn)
    if not leaves or leaves[0].shape[0] == 1:
        gradient = gradient_fn(jax.tree.map(lambda leaf: leaf[0], drawn), position)
        return trees.scale(2, gradient), _squares(gradient)
    both = jax.vmap(gradient_fn, in_axes=(0, None))(drawn, position)
    return tuple(jax.tree.map(lambda g: jnp.sum(g, axis=0), x) for x in (both, _squares(both)))


def _squares(tree: ArrayTree) -> ArrayTree:
    return jax.tree.map(lambda leaf: jnp.square(trees.widen(leaf)), tree)
