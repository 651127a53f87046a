"""Underdamped Langevin dynamics on the sum of the clients' gradients.

The server keeps a velocity. In a round it kicks the velocity by the gradient at the position that
was broadcast, drifts half a step, replaces part of the velocity by noise, and drifts the other half
step. With exact gradients of a Gaussian posterior the positions have exactly this posterior as
their stationary distribution, at every stable step size.

Source: Zhang et al. (2019), Unified efficient thermostat scheme for the canonical ensemble with
holonomic or isokinetic constraints via molecular dynamics, Journal of Physical Chemistry A 123
(the middle scheme); Leimkuhler and Matthews (2013), Rational construction of stochastic numerical
methods for molecular sampling, Applied Mathematics Research eXpress (BAOAB; this order is its
cyclic shift with one kick).
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc.dynamics import Metric
from fedmcmc.kernels._shared import TemperedKernel, expect_blocks, report
from fedmcmc.participation import full
from fedmcmc.pytrees import schedules, trees
from fedmcmc.random import realize_normals
from fedmcmc.types import (
    ArrayTree,
    Broadcast,
    Client,
    Disclosure,
    FederatedKernel,
    Federation,
    GradientEstimator,
    Number,
    Participation,
    Posterior,
    StepInfo,
    as_functions,
    register_dataclass,
)


class _UnderdampedServer(NamedTuple):
    velocity: ArrayTree  # shaped as the position


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Underdamped(TemperedKernel):
    """Kernel whose server moves position and velocity; see `underdamped`."""

    step_size: Number
    friction: Number
    temperature: Number
    metric: Metric

    disclosure = Disclosure(
        "the gradient of the log likelihood at the position of the chain", hidden_in_sums=True
    )

    @property
    def base_name(self) -> str:
        return "underdamped"

    def init_server_state(
        self, position: ArrayTree, federation: Federation, totals: tuple[ArrayTree, ...]
    ) -> _UnderdampedServer:
        self.metric.check(position)
        return _UnderdampedServer(trees.zeros_like(position))

    def step(
        self, draws: ArrayTree, broadcast: Broadcast, client_state: ArrayTree, client: Client
    ) -> tuple[ArrayTree, ArrayTree, StepInfo]:
        estimate, client_state, down = self.begin(broadcast, client_state, client)
        message = estimate(draws, broadcast.position)
        info = report(message, trees.squared_norm(message), bits_down=down)
        return message, client_state, info

    def prepare_server(self, rng_key: Array, like: Broadcast) -> ArrayTree:
        return realize_normals(rng_key, like.position)

    def aggregate(
        self,
        rng_key: ArrayTree,
        broadcast: Broadcast,
        server_state: _UnderdampedServer,
        total: ArrayTree,
    ) -> tuple[Broadcast, _UnderdampedServer, ArrayTree]:
        position, round_ = broadcast.position, broadcast.round
        step_size = schedules.value(self.step_size, round_)
        decay = jnp.exp(-schedules.value(self.friction, round_) * step_size)
        spread = jnp.sqrt((1 - decay**2) * schedules.value(self.temperature, round_))
        noise = realize_normals(rng_key, position)
        gradient = trees.add(total, jax.grad(self.posterior.logprior_fn)(position))
        kick = self.metric.times(gradient)
        velocity = trees.add_scaled(server_state.velocity, step_size, kick)
        position = trees.add_scaled(position, step_size / 2, velocity)
        velocity = trees.add_scaled(
            trees.scale(decay, velocity), spread, self.metric.root_times(noise)
        )
        position = trees.add_scaled(position, step_size / 2, velocity)
        return self.next_broadcast(broadcast, position), _UnderdampedServer(velocity), ()


def underdamped(
    posterior: Posterior,
    estimator: GradientEstimator,
    *,
    step_size: Number,
    friction: Number,
    temperature: Number = 1.0,
    participation: Participation | None = None,
    metric: ArrayTree | None = None,
) -> FederatedKernel:
    """Build a kernel whose server moves a position and a velocity along the clients' gradients.

    A round costs each client one gradient, as in `fedmcmc.langevin`. With a velocity, which starts
    at zero in ``state.server.velocity``, the chain crosses narrow posteriors in fewer rounds.

    Parameters
    ----------
    posterior, estimator, participation, temperature
        See `fedmcmc.langevin`.
    step_size
        Time step of the dynamics, a number or a schedule of the round. With exact gradients of all
        clients it must stay below two over the square root of the largest curvature of minus the
        log posterior. Cohorts, and minibatches of rows with different curvatures, need smaller
        steps, because they add noise that grows with the distance from the mode.
    friction
        Rate at which noise replaces the velocity, a number or a schedule of the round. The square
        root of the smallest curvature is a good start.
    metric
        Inverse of the mass matrix, as in `fedmcmc.langevin`.

    Raises
    ------
    ValueError, TypeError
        If a number is out of range; from `init` if kernel and data do not fit together.

    Examples
    --------
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(lambda t: -0.5 * t**2, lambda t, x: -0.5 * (x - t) ** 2)
    >>> estimator = fedmcmc.full_gradient()
    >>> underdamped(posterior, estimator, step_size=0.1, friction=3.0).name
    'underdamped'
    """
    participation = full() if participation is None else participation
    expect_blocks(posterior, estimator, participation)
    return as_functions(
        Underdamped(
            posterior,
            estimator,
            participation,
            schedules.number(step_size, "step_size", minimum=0.0, strict=True),
            schedules.number(friction, "friction", minimum=0.0, strict=True),
            schedules.number(temperature, "temperature", minimum=0.0),
            Metric.of(metric),
        )
    )
