"""Consensus: each client moves a position of its own, tied to the server's by a quadratic.

Source: Vono, Dobigeon and Chainais (2019, 2021) for the augmented density; Plassier, Vono, Durmus
and Moulines (2021) for the sampler. On Gaussian targets the server's and the clients' positions
together follow one linear recursion with Gaussian noise.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
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
    PerClient,
    Posterior,
    Reference,
    Static,
    StepInfo,
    as_functions,
)
from fedmcmc.data import FederatedData
from fedmcmc.dynamics import overdamped_langevin
from fedmcmc.gradients import next_broadcast, prior_share
from fedmcmc.kernels._shared import (
    LocalDraws,
    bits_down,
    chain_position,
    expect_blocks,
    prepare_local_steps,
    prepare_server_noise,
    start,
)
from fedmcmc.participation import full
from fedmcmc.pytrees import schedules, trees
from fedmcmc.random import realise_normals

__all__ = ["consensus"]


class _Parameters(NamedTuple):
    posterior: Posterior
    estimator: GradientEstimator
    step_size: Any
    tolerance: Any
    temperature: Any
    num_local_steps: Static[int]


class _ClientState(NamedTuple):
    position: ArrayTree
    estimator: ArrayTree


def consensus(
    posterior: Posterior,
    estimator: GradientEstimator,
    *,
    step_size: Number,
    num_local_steps: int,
    tolerance: Number,
    temperature: Number = 1.0,
) -> FederatedKernel:
    """Build a kernel whose clients keep positions of their own and whose server draws in between.

    The chain is one of the density of ``theta`` and of one ``z_i`` a client that is proportional
    to ``prod_i density_i(z_i) exp(-|z_i - theta|^2 / (2 tolerance_i))``, with ``density_i`` the
    client's likelihood and its share of the prior. In a round each client takes `num_local_steps`
    Langevin steps in its ``z_i``, and the server then draws ``theta`` given all of them:
    normal with precision ``Q = sum_i 1 / tolerance_i`` and mean
    ``theta + sum_i (z_i - theta) / tolerance_i / Q``, of which each client sends its term.

    Parameters
    ----------
    posterior
        The model. Each client adds to its log likelihood ``size / num_rows`` of the log prior.
    estimator
        Of the gradient of a client's log likelihood, taken at ``z_i``.
    step_size
        Of the clients' steps: a number or a schedule of the round, or ``[num_clients]``, one a
        client.
    num_local_steps
        Langevin steps a client takes in a round.
    tolerance
        The variance by which ``z_i`` may differ from ``theta``: as `step_size`.
    temperature
        Multiplies the variance of all noise, the clients' and the server's.

    Returns
    -------
    FederatedKernel
        Everyone takes part in every round: the rule has no other case. ``z_i`` is
        ``state.clients.position``, leaves ``[num_clients, *event]``, and starts at the position
        given to `init`.

    Raises
    ------
    ValueError
        On numbers out of range, and from `init` where they do not fit the data.
    """
    participation = full()
    expect_blocks(posterior, estimator, participation)
    parameters = as_functions(
        _Parameters(
            posterior,
            estimator,
            _number(step_size, "step_size"),
            _number(tolerance, "tolerance"),
            schedules.number(temperature, "temperature", minimum=0.0),
            Static(positive_integer(num_local_steps, "num_local_steps")),
        )
    )
    return FederatedKernel(
        init=Partial(_init, parameters, participation),
        prepare=Partial(prepare_local_steps, estimator, parameters.num_local_steps),
        step=Partial(_step, parameters),
        aggregate=Partial(_aggregate, estimator.reference, parameters),
        draw=Partial(chain_position),
        participation=participation,
        constrain_fn=parameters.posterior.constrain_fn,
        prepare_server=Partial(prepare_server_noise),
    )


def _number(x: Any, name: str) -> Any:
    """Return `x`, one positive number, a schedule, or one number a client, as leaves."""
    is_schedule = callable(x) and not isinstance(x, Array)
    array = jnp.zeros(()) if is_schedule else jnp.asarray(x)
    if array.ndim == 0:
        return schedules.number(x, name, minimum=0.0, strict=True)
    if array.ndim != 1 or not jnp.issubdtype(array.dtype, jnp.number):
        raise ValueError(
            f"{name} must be a number, a schedule of the round, or one number a client, got an "
            f"array of shape {array.shape} and dtype {array.dtype}."
        )
    if not isinstance(array, jax.core.Tracer):
        given = np.asarray(array)
        if not np.all(np.isfinite(given) & (given > 0)):
            raise ValueError(f"{name} must hold finite numbers above 0, got {given}.")
    return PerClient(array.astype(jnp.result_type(float)))


def _value(number: Any, round_: Array, client: Client) -> Array:
    return number.of(client) if isinstance(number, PerClient) else schedules.value(number, round_)


def _init(
    parameters: _Parameters,
    participation: Participation,
    rng_key: Array,
    position: ArrayTree,
    data: FederatedData,
) -> FederatedState:
    del rng_key
    for name in ("step_size", "tolerance"):
        number = getattr(parameters, name)
        if isinstance(number, PerClient) and number.values.shape[0] != data.num_clients:
            raise ValueError(
                f"{name} has {number.values.shape[0]} entries, but the data has "
                f"{data.num_clients} clients."
            )
    posterior, estimator = parameters.posterior, parameters.estimator
    broadcast, kept = start(posterior, estimator, participation, position, data)
    own = jax.tree.map(
        lambda x: jnp.broadcast_to(x, (data.num_states, *x.shape)), broadcast.position
    )
    num_clients = jnp.asarray(float(data.num_clients))
    return FederatedState(broadcast, num_clients, _ClientState(own, kept))


def _step(
    parameters: _Parameters,
    draws: LocalDraws,
    broadcast: Broadcast,
    client_state: _ClientState,
    client: Client,
) -> tuple[ArrayTree, _ClientState, StepInfo]:
    posterior, estimator = parameters.posterior, parameters.estimator
    loglikelihood_fn = posterior.loglikelihood_fn
    down = bits_down(estimator, broadcast, client_state.estimator)
    context, kept = estimator.start(loglikelihood_fn, broadcast, client_state.estimator, client)
    step_size = _value(parameters.step_size, broadcast.round, client)
    pull = 1 / _value(parameters.tolerance, broadcast.round, client)
    temperature = schedules.value(parameters.temperature, broadcast.round)

    def local_step(
        carry: tuple[ArrayTree, Array], draws_: LocalDraws
    ) -> tuple[tuple[ArrayTree, Array], None]:
        own, squared_norm = carry
        estimate = estimator.estimate(loglikelihood_fn, draws_.gradient, own, context, client)
        prior = prior_share(client, jax.grad(posterior.logprior_fn)(own))
        gap = trees.subtract(broadcast.position, own)
        gradient = trees.add_scaled(trees.add(estimate, prior), pull, gap)
        noise = realise_normals(draws_.noise, own)
        own = overdamped_langevin(own, gradient, noise, step_size, temperature)
        return (own, squared_norm + trees.squared_norm(gradient)), None

    num = parameters.num_local_steps.value
    start = (client_state.position, jnp.zeros((), jnp.float32))
    (own, squared_norm), _ = jax.lax.scan(local_step, start, draws, length=num)
    message = trees.scale(pull, trees.subtract(own, broadcast.position))
    info = StepInfo(
        bits=jnp.asarray(trees.num_bits(message), jnp.int32),
        gradient_norm=jnp.sqrt(squared_norm / num),
        bits_down=down,
    )
    return message, _ClientState(own, kept), info


def _aggregate(
    reference: Reference | None,
    parameters: _Parameters,
    rng_key: Array,
    broadcast: Broadcast,
    server_state: Array,  # the number of clients
    total: ArrayTree,
) -> tuple[Broadcast, Array, ArrayTree]:
    tolerance = parameters.tolerance
    if isinstance(tolerance, PerClient):
        variance = 1 / jnp.sum(1 / tolerance.values)
    else:
        variance = schedules.value(tolerance, broadcast.round) / server_state
    temperature = schedules.value(parameters.temperature, broadcast.round)
    position = trees.add_scaled(broadcast.position, variance, total)
    noise = realise_normals(rng_key, position)
    position = trees.add_scaled(position, jnp.sqrt(variance * temperature), noise)
    return next_broadcast(reference, broadcast, position), server_state, ()
