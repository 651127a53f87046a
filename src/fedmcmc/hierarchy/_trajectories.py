"""Refresh by leapfrog trajectories with a Metropolis test per group, for latents of many numbers.

Trajectories need gradients but no matrices, and each group has its own step size.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc._checks import positive_integer
from fedmcmc.hierarchy._latents import Groups
from fedmcmc.hierarchy._refresh import Refresh, RefreshInput, RefreshResult, draw_per_group
from fedmcmc.pytrees import trees
from fedmcmc.types import ArrayTree, register_dataclass

POWER_STEPS = 8
"""Number of power iterations for a group's largest curvature, which sets its first step size."""
ADAPTATION_EXPONENT = 0.6
"""The ``n``-th adaptation of a step size has the rate ``n ** -0.6``."""
AVERAGING_EXPONENT = 0.75
"""The ``n``-th step size has weight ``n ** -0.75`` in the average that later rounds use."""


class StepSizes(NamedTuple):
    """Step sizes of a client's groups, ``[G]`` each."""

    log_step: Array  # in rounds that adapt
    log_mean: Array  # in later rounds
    num: Array  # number of trajectories that adapted it, int32


class _PathDraws(NamedTuple):
    momenta: Array  # [G, num, k]
    uniforms: Array  # [G, num]


class _PathState(NamedTuple):
    flat: Array
    value: Array
    gradient: Array
    steps: StepSizes
    num_accepted: Array


@register_dataclass
@dataclass(frozen=True, eq=False)
class Trajectories(Refresh):
    """Leapfrog trajectories; see `hmc`."""

    num_adapt: Array
    target_accept: Array
    num_steps: int = field(metadata={"static": True})
    num_integration_steps: int = field(metadata={"static": True})

    def begin(self, groups: Groups, position: ArrayTree) -> Array:
        return groups.zeros  # Newton's steps to the mode are expensive for many elements

    def init(self, groups: Groups, position: ArrayTree) -> StepSizes:
        flat = self.begin(groups, position)

        def power_step(direction: Array, _: None) -> tuple[Array, Array]:
            curved = -jax.jvp(lambda x: groups.gradient(position, x), (flat,), (direction,))[1]
            size = jnp.linalg.norm(curved, axis=-1, keepdims=True)
            return curved / jnp.maximum(size, 1e-6), size[:, 0]

        start = jnp.full_like(flat, groups.size**-0.5)
        _, sizes = jax.lax.scan(power_step, start, None, length=POWER_STEPS)
        # Leapfrog is stable for step sizes below 2 / sqrt(largest curvature).
        log_step = -0.5 * jnp.log(jnp.maximum(sizes[-1], 1e-6))
        return StepSizes(log_step, log_step, jnp.zeros(groups.num, jnp.int32))

    def prepare(self, rng_key: Array, num_groups: int, size: int) -> _PathDraws:
        dtype, num = jnp.result_type(float), self.num_steps

        def of_group(key: Array) -> _PathDraws:
            momentum, uniform = jax.random.split(key)
            return _PathDraws(
                jax.random.normal(momentum, (num, size), dtype),
                jax.random.uniform(uniform, (num,), dtype),
            )

        draws: _PathDraws = draw_per_group(rng_key, num_groups, of_group)
        return draws

    def move(self, groups: Groups, draws: ArrayTree, inputs: RefreshInput) -> RefreshResult:
        adapts, flat = jnp.asarray(inputs.round) < self.num_adapt, inputs.flat

        def density(flat: Array) -> tuple[Array, Array]:
            """Return log densities ``[G]`` and their gradients ``[G, k]``."""

            def total(flat: Array) -> tuple[Array, Array]:
                values = groups.log_density(inputs.position, flat)
                return jnp.sum(values), values

            (_, values), gradient = jax.value_and_grad(total, has_aux=True)(flat)
            return values, gradient

        def trajectory(state: _PathState, draw: _PathDraws) -> tuple[_PathState, None]:
            old = state.steps
            step = jnp.exp(jnp.where(adapts, old.log_step, old.log_mean))[:, None]

            def leap(point: tuple, _: None) -> tuple[tuple, None]:
                place, momentum, _, gradient = point
                momentum = momentum + 0.5 * step * gradient
                place = place + step * momentum
                value, gradient = density(place)
                return (place, momentum + 0.5 * step * gradient, value, gradient), None

            begin = (state.flat, draw.momenta.astype(flat.dtype), state.value, state.gradient)
            end, _ = jax.lax.scan(leap, begin, None, length=self.num_integration_steps)
            place, momentum, value, gradient = end
            kinetic = 0.5 * jnp.sum(begin[1] ** 2 - momentum**2, -1)
            log_ratio = value - state.value + kinetic
            chance = jnp.where(jnp.isnan(log_ratio), 0, jnp.exp(jnp.minimum(log_ratio, 0)))
            accepted = (draw.uniforms < chance) & groups.present
            num = old.num + 1
            rate = num.astype(step.dtype) ** -ADAPTATION_EXPONENT
            weight = num.astype(step.dtype) ** -AVERAGING_EXPONENT
            log_step = old.log_step + rate * (chance - self.target_accept).astype(step.dtype)
            log_mean = weight * log_step + (1 - weight) * old.log_mean
            steps = trees.select(adapts, StepSizes(log_step, log_mean, num), old)
            row = accepted[:, None]
            return _PathState(
                jnp.where(row, place, state.flat),
                jnp.where(accepted, value, state.value),
                jnp.where(row, gradient, state.gradient),
                steps,
                state.num_accepted + accepted,
            ), None

        start = _PathState(flat, *density(flat), inputs.state, jnp.zeros(groups.num, jnp.int32))
        by_step = jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), draws)
        end, _ = jax.lax.scan(trajectory, start, by_step)
        return RefreshResult(
            end.flat, end.num_accepted.astype(flat.dtype) / self.num_steps, end.steps
        )


def hmc(
    num_integration_steps: int = 5,
    *,
    num_steps: int = 1,
    num_adapt: int = 200,
    target_accept: float = 0.8,
) -> Refresh:
    """Move latents along leapfrog trajectories, accepted or rejected per group.

    It serves latents with more elements than `independence` suits. The step size of a group starts
    at one over the root of its largest curvature, adapts to `target_accept` in the first
    `num_adapt` rounds, and is then fixed at its average.

    Parameters
    ----------
    num_integration_steps
        Number of leapfrog steps per trajectory; 1 gives Metropolis-adjusted Langevin steps.
    num_steps
        Number of trajectories per round.
    num_adapt
        Number of initial rounds that adapt the step sizes. Moves are exact afterwards: pass
        `sample` a ``num_burnin`` of at least this size.
    target_accept
        Acceptance to which the step sizes adapt, in (0, 1).

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
