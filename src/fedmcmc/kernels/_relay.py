"""Relay: one chain is handed from client to client, each moves it by local Langevin steps.

Source: Ahn, Shahbaba and Welling (2014); El Mekkaoui et al. (2021), Algorithm 1, where the step
size ``h`` is ``2 * step_size``. On Gaussian targets a round is a random affine map with Gaussian
noise, so the stationary mean and covariance are known in closed form at the step size used.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import Partial

from fedmcmc._checks import positive_integer
from fedmcmc._types import (
    ArrayTree,
    Broadcast,
    Client,
    FederatedKernel,
    FederatedState,
    GradientEstimator,
    Number,
    Participation,
    Posterior,
    Static,
    StepInfo,
    as_functions,
)
from fedmcmc.data import FederatedData
from fedmcmc.dynamics import overdamped_langevin
from fedmcmc.gradients import importance
from fedmcmc.kernels._shared import (
    LocalDraws,
    bits_down,
    chain_position,
    expect_blocks,
    move_by_total,
    prepare_local_steps,
    start,
)
from fedmcmc.pytrees import schedules, trees
from fedmcmc.random import realise_normals

__all__ = ["relay"]


class _Parameters(NamedTuple):
    posterior: Posterior
    estimator: GradientEstimator
    step_size: Any
    temperature: Any
    num_local_steps: Static[int]


def relay(
    posterior: Posterior,
    estimator: GradientEstimator,
    *,
    participation: Participation,
    step_size: Number,
    num_local_steps: int = 1,
    temperature: Number = 1.0,
) -> FederatedKernel:
    """Build a kernel that hands its chain to one client a round.

    The client takes `num_local_steps` Langevin steps along
    ``grad log prior + estimate / probability`` and returns how far it came.

    Parameters
    ----------
    posterior
        The model.
    estimator
        Of the gradient of a client's log likelihood.
    participation
        Must choose one client a round; one over its probability scales the client's gradient, and
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
    parameters = as_functions(
        _Parameters(
            posterior,
            estimator,
            schedules.number(step_size, "step_size", minimum=0.0, strict=True),
            schedules.number(temperature, "temperature", minimum=0.0),
            Static(positive_integer(num_local_steps, "num_local_steps")),
        )
    )
    participation = replace(participation, weighted=False)
    return FederatedKernel(
        init=Partial(_init, parameters.posterior, estimator, participation),
        prepare=Partial(prepare_local_steps, estimator, parameters.num_local_steps),
        step=Partial(_step, parameters),
        aggregate=Partial(move_by_total, estimator.reference),
        draw=Partial(chain_position),
        participation=participation,
        constrain_fn=parameters.posterior.constrain_fn,
    )


def _init(
    posterior: Posterior,
    estimator: GradientEstimator,
    participation: Participation,
    rng_key: Array,
    position: ArrayTree,
    data: FederatedData,
) -> FederatedState:
    del rng_key
    if (participation.cohort_size or data.num_clients) != 1:
        raise ValueError("A relay hands its chain to one client a round; this cohort is larger.")
    broadcast, clients = start(posterior, estimator, participation, position, data)
    return FederatedState(broadcast, (), clients)


def _step(
    parameters: _Parameters,
    draws: LocalDraws,
    broadcast: Broadcast,
    client_state: ArrayTree,
    client: Client,
) -> tuple[ArrayTree, ArrayTree, StepInfo]:
    posterior, estimator = parameters.posterior, parameters.estimator
    loglikelihood_fn = posterior.loglikelihood_fn
    down = bits_down(estimator, broadcast, client_state)
    context, client_state = estimator.start(loglikelihood_fn, broadcast, client_state, client)
    step_size = schedules.value(parameters.step_size, broadcast.round)
    temperature = schedules.value(parameters.temperature, broadcast.round)

    def local_step(
        carry: tuple[ArrayTree, Array], draws_: LocalDraws
    ) -> tuple[tuple[ArrayTree, Array], ArrayTree]:
        position, squared_norm = carry
        estimate = estimator.estimate(loglikelihood_fn, draws_.gradient, position, context, client)
        gradient = trees.add(
            jax.grad(posterior.logprior_fn)(position), importance(client, estimate)
        )
        noise = realise_normals(draws_.noise, position)
        position = overdamped_langevin(position, gradient, noise, step_size, temperature)
        return (position, squared_norm + trees.squared_norm(gradient)), position

    num = parameters.num_local_steps.value
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
