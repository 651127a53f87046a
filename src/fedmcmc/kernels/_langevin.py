"""Langevin dynamics on a sum of gradients: clients send gradients, the server moves the chain.

On Gaussian targets a round is a random affine map with Gaussian noise, so the stationary mean and
covariance are known in closed form at the step size used (``docs/laws.md``).
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import Partial

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
from fedmcmc.data import FederatedData, total_of_clients
from fedmcmc.dynamics import Preconditioner, overdamped_langevin
from fedmcmc.gradients import client_gradient, next_broadcast, prior_share
from fedmcmc.kernels._shared import (
    bits_down,
    chain_position,
    expect_blocks,
    prepare_server_noise,
    start,
)
from fedmcmc.participation import full
from fedmcmc.pytrees import schedules, trees
from fedmcmc.random import realise_normals

__all__ = ["langevin"]


class _Parameters(NamedTuple):
    posterior: Posterior
    estimator: GradientEstimator
    step_size: Any
    temperature: Any
    split_prior: Static[bool]
    centre: ArrayTree  # where the estimator's gradients are zero by convention, or ()
    preconditioner: Preconditioner | None


class _Server(NamedTuple):
    at_centre: ArrayTree  # gradient of the log posterior at the centre, or ()
    preconditioner: ArrayTree


def langevin(
    posterior: Posterior,
    estimator: GradientEstimator,
    *,
    step_size: Number,
    temperature: Number = 1.0,
    participation: Participation | None = None,
    prior: Literal["server", "split"] = "server",
    centre: ArrayTree | None = None,
    preconditioner: Preconditioner | None = None,
) -> FederatedKernel:
    """Build a kernel whose server takes a Langevin step along the sum of the clients' gradients.

    Each client of the cohort sends its estimate of the gradient of its log likelihood; messages
    are weighted by one over the probability of taking part; the server adds the prior's gradient
    and the noise, every round, whoever took part.

    Parameters
    ----------
    posterior
        The model.
    estimator
        Of the gradient of a client's log likelihood.
    step_size, temperature
        Numbers or schedules of the round; one step is
        ``position + step_size * gradient + sqrt(2 * step_size * temperature) * normal``.
    participation
        Everyone by default.
    prior
        ``"server"``: the server adds the prior's gradient, which is then neither compressed nor
        dropped; ``"split"``: each client adds its share of it, ``size / num_rows``.
    centre
        Where clients send differences to their gradients at a point (`fixed_point` with
        ``centred=True``): that point. The server adds the gradient of the log posterior there,
        known from one pass over all rows before the first round, so that any centre gives the
        right drift; at the mode it is zero.
    preconditioner
        Scales the step coordinate by coordinate (`fedmcmc.preconditioners`).

    Raises
    ------
    ValueError
        On numbers out of range, and from `init` where the data does not fit.
    """
    if prior not in ("server", "split"):
        raise ValueError(f'prior must be "server" or "split", got {prior!r}.')
    participation = full() if participation is None else participation
    expect_blocks(posterior, estimator, participation)
    parameters = as_functions(
        _Parameters(
            posterior,
            estimator,
            schedules.number(step_size, "step_size", minimum=0.0, strict=True),
            schedules.number(temperature, "temperature", minimum=0.0),
            Static(prior == "split"),
            () if centre is None else jax.tree.map(trees.as_float, centre),
            preconditioner,
        )
    )
    return FederatedKernel(
        init=Partial(_init, parameters, participation),
        prepare=Partial(_prepare, estimator),
        step=Partial(_step, parameters),
        aggregate=Partial(_aggregate, parameters),
        draw=Partial(chain_position),
        participation=participation,
        constrain_fn=parameters.posterior.constrain_fn,
        prepare_server=Partial(prepare_server_noise),
    )


def _init(
    parameters: _Parameters,
    participation: Participation,
    rng_key: Array,
    position: ArrayTree,
    data: FederatedData,
) -> FederatedState:
    del rng_key
    posterior, estimator = parameters.posterior, parameters.estimator
    broadcast, clients = start(posterior, estimator, participation, position, data)
    position = broadcast.position
    at_centre: ArrayTree = ()
    if not trees.is_empty(parameters.centre):
        centre = parameters.centre
        of_rows = total_of_clients(
            lambda client: client_gradient(posterior.loglikelihood_fn, centre, client), data
        )
        at_centre = trees.add(of_rows, jax.grad(posterior.logprior_fn)(centre))
    scales: ArrayTree = ()
    if parameters.preconditioner is not None:
        scales = parameters.preconditioner.init(position, data)
    return FederatedState(broadcast, _Server(at_centre, scales), clients)


def _prepare(
    estimator: GradientEstimator, rng_key: Array, like: Broadcast, client: Client
) -> ArrayTree:
    draws = estimator.prepare(rng_key, like.position, client, 1)
    return jax.tree.map(lambda leaf: leaf[0], draws)


def _prior_gradient(parameters: _Parameters, position: ArrayTree) -> ArrayTree:
    gradient = jax.grad(parameters.posterior.logprior_fn)(position)
    if trees.is_empty(parameters.centre):
        return gradient
    return trees.subtract(gradient, jax.grad(parameters.posterior.logprior_fn)(parameters.centre))


def _step(
    parameters: _Parameters,
    draws: ArrayTree,
    broadcast: Broadcast,
    client_state: ArrayTree,
    client: Client,
) -> tuple[ArrayTree, ArrayTree, StepInfo]:
    posterior, estimator = parameters.posterior, parameters.estimator
    loglikelihood_fn, position = posterior.loglikelihood_fn, broadcast.position
    down = bits_down(estimator, broadcast, client_state)
    context, client_state = estimator.start(loglikelihood_fn, broadcast, client_state, client)
    message = estimator.estimate(loglikelihood_fn, draws, position, context, client)
    if parameters.split_prior.value:
        message = trees.add(message, prior_share(client, _prior_gradient(parameters, position)))
    info = StepInfo(
        bits=jnp.asarray(trees.num_bits(message), jnp.int32),
        gradient_norm=jnp.sqrt(trees.squared_norm(message)),
        bits_down=down,
    )
    return message, client_state, info


def _aggregate(
    parameters: _Parameters,
    rng_key: Array,
    broadcast: Broadcast,
    server_state: _Server,
    total: ArrayTree,
) -> tuple[Broadcast, _Server, ArrayTree]:
    position = broadcast.position
    gradient = total
    if not parameters.split_prior.value:
        gradient = trees.add(gradient, _prior_gradient(parameters, position))
    if not trees.is_empty(server_state.at_centre):
        gradient = trees.add(gradient, server_state.at_centre)
    step_size = schedules.value(parameters.step_size, broadcast.round)
    temperature = schedules.value(parameters.temperature, broadcast.round)
    noise = realise_normals(rng_key, position)
    scales = server_state.preconditioner
    if parameters.preconditioner is None:
        position = overdamped_langevin(position, gradient, noise, step_size, temperature)
    else:
        metric, scales = parameters.preconditioner.update(gradient, scales)
        temperature = parameters.preconditioner.temperature(temperature, broadcast.round)
        # The step along G with noise of covariance G, written as a plain step in other units.
        root = jax.tree.map(jnp.sqrt, metric)
        moved = overdamped_langevin(
            trees.zeros_like(position),
            jax.tree.map(jnp.multiply, root, gradient),
            noise,
            step_size,
            temperature,
        )
        position = trees.add(position, jax.tree.map(jnp.multiply, root, moved))
    moved_broadcast = next_broadcast(parameters.estimator.reference, broadcast, position)
    return moved_broadcast, _Server(server_state.at_centre, scales), ()
