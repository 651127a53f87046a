"""Relay: one chain is handed from client to client, each moves it by local Langevin steps.

Source: Ahn, Shahbaba and Welling (2014); El Mekkaoui et al. (2021), Algorithm 1, where the step
size ``h`` is ``2 * step_size``. On Gaussian targets a round is a random affine map with Gaussian
noise, so the stationary mean and covariance are known in closed form at the step size used.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import register_dataclass

from fedmcmc._checks import positive_integer
from fedmcmc._types import (
    ArrayTree,
    Broadcast,
    Client,
    FederatedKernel,
    Federation,
    GradientEstimator,
    Number,
    Participation,
    Posterior,
    StepInfo,
    as_functions,
)
from fedmcmc.dynamics import overdamped_langevin
from fedmcmc.gradients import importance
from fedmcmc.kernels._shared import (
    EstimatorKernel,
    LocalDraws,
    bits_down,
    expect_blocks,
    move_by_total,
    prepare_local_steps,
)
from fedmcmc.pytrees import schedules, trees
from fedmcmc.random import realize_normals

__all__ = ["relay"]


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Relay(EstimatorKernel):
    """Clients move the one chain in turn; see `relay`."""

    posterior: Posterior
    estimator: GradientEstimator
    participation: Participation
    step_size: Any
    temperature: Any
    num_local_steps: int = field(metadata={"static": True})

    def server_init(
        self,
        rng_key: Array,
        position: ArrayTree,
        federation: Federation,
        totals: tuple[ArrayTree, ...],
    ) -> tuple[Broadcast, ArrayTree]:
        """Start at `position`."""
        if (self.participation.cohort_size or federation.num_clients) != 1:
            raise ValueError(
                "A relay hands its chain to one client per round; this cohort is larger."
            )
        return self.first_broadcast(position, federation), ()

    def prepare(self, rng_key: Array, like: Broadcast, client: Client) -> LocalDraws:
        """Draw the noise and the minibatches of all local steps."""
        return prepare_local_steps(self.estimator, self.num_local_steps, rng_key, like, client)

    def step(
        self, draws: LocalDraws, broadcast: Broadcast, client_state: ArrayTree, client: Client
    ) -> tuple[ArrayTree, ArrayTree, StepInfo]:
        """Move the chain, and return how far it came."""
        posterior, estimator = self.posterior, self.estimator
        loglikelihood_fn = posterior.loglikelihood_fn
        down = bits_down(estimator, broadcast, client_state)
        context, client_state = estimator.start(loglikelihood_fn, broadcast, client_state, client)
        step_size = schedules.value(self.step_size, broadcast.round)
        temperature = schedules.value(self.temperature, broadcast.round)

        def local_step(
            carry: tuple[ArrayTree, Array], draws_: LocalDraws
        ) -> tuple[tuple[ArrayTree, Array], ArrayTree]:
            position, squared_norm = carry
            estimate = estimator.estimate(
                loglikelihood_fn, draws_.gradient, position, context, client
            )
            gradient = trees.add(
                jax.grad(posterior.logprior_fn)(position), importance(client, estimate)
            )
            noise = realize_normals(draws_.noise, position)
            position = overdamped_langevin(position, gradient, noise, step_size, temperature)
            return (position, squared_norm + trees.squared_norm(gradient)), position

        num = self.num_local_steps
        start = (broadcast.position, jnp.zeros((), jnp.float32))
        (position, squared_norm), iterates = jax.lax.scan(local_step, start, draws, length=num)
        message = trees.subtract(position, broadcast.position)
        info = StepInfo(
            bits=jnp.asarray(trees.num_bits(message), jnp.int32),
            gradient_norm=jnp.sqrt(squared_norm / num),
            local_positions=iterates,
            bits_down=down,
        )
        return message, client_state, info

    def aggregate(
        self, rng_key: ArrayTree, broadcast: Broadcast, server_state: ArrayTree, total: ArrayTree
    ) -> tuple[Broadcast, ArrayTree, ArrayTree]:
        """Take the chain from the client that moved it."""
        return move_by_total(self.estimator.reference, broadcast, total), server_state, ()


def relay(
    posterior: Posterior,
    estimator: GradientEstimator,
    *,
    participation: Participation,
    step_size: Number,
    num_local_steps: int = 1,
    temperature: Number = 1.0,
) -> FederatedKernel:
    """Build a kernel that hands its chain to one client per round.

    The client takes `num_local_steps` Langevin steps along
    ``grad log prior + estimate / probability`` and returns how far it came.

    Parameters
    ----------
    posterior
        The model.
    estimator
        Of the gradient of a client's log likelihood.
    participation
        Must choose one client per round; one over its probability scales the client's gradient, and
        never how far it moved the chain.
    step_size, temperature
        Numbers or schedules of the round; one step is
        ``position + step_size * gradient + sqrt(2 * step_size * temperature) * normal``.
    num_local_steps
        Steps between two communications.

    Raises
    ------
    ValueError
        On numbers out of range, and from `init` where the data does not fit.
    """
    expect_blocks(posterior, estimator, participation)
    kernel: Relay = as_functions(
        Relay(
            posterior,
            estimator,
            replace(participation, weighted=False),
            schedules.number(step_size, "step_size", minimum=0.0, strict=True),
            schedules.number(temperature, "temperature", minimum=0.0),
            positive_integer(num_local_steps, "num_local_steps"),
        )
    )
    return kernel
