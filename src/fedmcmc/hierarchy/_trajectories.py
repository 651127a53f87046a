"""Refreshes by leapfrog trajectories with a Metropolis test per group: latents of many numbers.

They take gradients alone, no matrix, and each group has a step size of its own.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc._checks import positive_integer
from fedmcmc._types import ArrayTree, register_dataclass
from fedmcmc.hierarchy._latents import Groups
from fedmcmc.hierarchy._refresh import Here, Moved, Refresh, per_group
from fedmcmc.pytrees import trees

POWER_STEPS = 8
"""Of the search for a group's largest curvature, which its first step size follows from."""
CHANGE, FORGETTING = 0.6, 0.75
"""After ``n`` trajectories a step size changes by about ``n ** -0.6``; it then stays at a mean."""


class Steps(NamedTuple):
    """What a client keeps of its groups' trajectories, ``[G]`` each."""

    log_step: Array  # while it adapts
    log_mean: Array  # from then on
    num: Array  # trajectories from which the step size has learned, int32


class _Draws(NamedTuple):
    momenta: Array  # [G, num, k]
    uniforms: Array  # [G, num]


@register_dataclass
@dataclass(frozen=True, eq=False)
class Trajectories(Refresh):
    """Leapfrog trajectories; see `hmc`."""

    num_adapt: Array
    target_accept: Array
    num_steps: int = field(metadata={"static": True})
    num_integration_steps: int = field(metadata={"static": True})

    def begin(self, groups: Groups, position: ArrayTree) -> Array:
        # Where there are many numbers, Newton's steps to the mode would be dear.
        like = jax.eval_shape(trees.ravel, groups.local.like.tree)
        return jnp.zeros((groups.num, groups.size), like.dtype)

    def init(self, groups: Groups, position: ArrayTree) -> Steps:
        flat = self.begin(groups, position)

        def sharper(direction: Array, _: None) -> tuple[Array, Array]:
            slope = lambda at: groups.slope(position, at)  # noqa: E731
            curved = -jax.jvp(slope, (flat,), (direction,))[1]
            size = jnp.linalg.norm(curved, axis=-1, keepdims=True)
            return curved / jnp.maximum(size, 1e-6), size[:, 0]

        first = jnp.full_like(flat, groups.size**-0.5)
        _, sizes = jax.lax.scan(sharper, first, None, length=POWER_STEPS)
        # In units of the smallest scale a trajectory's step is stable below two.
        log_step = -0.5 * jnp.log(jnp.maximum(sizes[-1], 1e-6))
        return Steps(log_step, log_step, jnp.zeros(groups.num, jnp.int32))

    def prepare(self, rng_key: Array, num_groups: int, size: int) -> _Draws:
        dtype, num = jnp.result_type(float), self.num_steps

        def of_group(key: Array) -> _Draws:
            momentum, uniform = jax.random.split(key)
            return _Draws(
                jax.random.normal(momentum, (num, size), dtype),
                jax.random.uniform(uniform, (num,), dtype),
            )

        drawn: _Draws = per_group(rng_key, num_groups, of_group)
        return drawn

    def move(self, groups: Groups, draws: ArrayTree, here: Here) -> Moved:
        adapts, flat = jnp.asarray(here.round) < self.num_adapt, here.flat

        def density(at: Array) -> tuple[Array, Array]:
            """Return log densities ``[G]`` and their gradients ``[G, k]``."""

            def total(place: Array) -> tuple[Array, Array]:
                values = groups.log_density(here.position, place)
                return jnp.sum(values), values

            (_, values), slope = jax.value_and_grad(total, has_aux=True)(at)
            return values, slope

        class Now(NamedTuple):
            flat: Array
            value: Array
            slope: Array
            steps: Steps
            accepted: Array

        def one(now: Now, drawn: _Draws) -> tuple[Now, None]:
            old = now.steps
            step = jnp.exp(jnp.where(adapts, old.log_step, old.log_mean))[:, None]

            def leap(state: tuple, _: None) -> tuple[tuple, None]:
                at, momentum, _, slope = state
                momentum = momentum + 0.5 * step * slope
                at = at + step * momentum
                value, slope = density(at)
                return (at, momentum + 0.5 * step * slope, value, slope), None

            begin = (now.flat, drawn.momenta.astype(flat.dtype), now.value, now.slope)
            end, _ = jax.lax.scan(leap, begin, None, length=self.num_integration_steps)
            at, momentum, value, slope = end
            kinetic = 0.5 * jnp.sum(begin[1] ** 2 - momentum**2, -1)
            log_ratio = value - now.value + kinetic
            chance = jnp.where(jnp.isnan(log_ratio), 0, jnp.exp(jnp.minimum(log_ratio, 0)))
            taken = (drawn.uniforms < chance) & groups.present
            num = old.num + 1
            rate, weight = (num.astype(step.dtype) ** -power for power in (CHANGE, FORGETTING))
            log_step = old.log_step + rate * (chance - self.target_accept).astype(step.dtype)
            log_mean = weight * log_step + (1 - weight) * old.log_mean
            steps = trees.select(adapts, Steps(log_step, log_mean, num), old)
            row = taken[:, None]
            return Now(
                jnp.where(row, at, now.flat),
                jnp.where(taken, value, now.value),
                jnp.where(row, slope, now.slope),
                steps,
                now.accepted + taken,
            ), None

        start = Now(flat, *density(flat), here.kept, jnp.zeros(groups.num, jnp.int32))
        drawn = jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), draws)
        end, _ = jax.lax.scan(one, start, drawn)
        return Moved(end.flat, end.accepted.astype(flat.dtype) / self.num_steps, end.steps)


def hmc(
    num_integration_steps: int = 5,
    *,
    num_steps: int = 1,
    num_adapt: int = 200,
    target_accept: float = 0.8,
) -> Refresh:
    """Move latents along leapfrog trajectories, accepted or rejected per group.

    For latents of more numbers than `independence` suits. A group's step size begins at the scale
    of its largest curvature and adapts in the first rounds to an acceptance; then it stays.

    Parameters
    ----------
    num_integration_steps
        Leapfrog steps per trajectory.
    num_steps
        Trajectories per round.
    num_adapt
        In rounds before this one step sizes adapt. Moves are exact from then on: give `sample` a
        ``num_burnin`` that is as large at least.
    target_accept
        In (0, 1).

    Raises
    ------
    ValueError
        If a number is out of range.
    """
    if not 0 < target_accept < 1:
        raise ValueError(f"target_accept must be in (0, 1), got {target_accept!r}.")
    if num_adapt != 0:
        num_adapt = positive_integer(num_adapt, "num_adapt")
    return Trajectories(
        jnp.asarray(num_adapt, jnp.int32),
        jnp.asarray(target_accept, jnp.result_type(float)),
        positive_integer(num_steps, "num_steps"),
        positive_integer(num_integration_steps, "num_integration_steps"),
    )


def mala(*, num_steps: int = 5, num_adapt: int = 200, target_accept: float = 0.57) -> Refresh:
    """Take Langevin steps with a Metropolis test per group: `hmc` with trajectories of one step.

    Parameters
    ----------
    num_steps, num_adapt, target_accept
        As those of `hmc`.
    """
    return hmc(1, num_steps=num_steps, num_adapt=num_adapt, target_accept=target_accept)
