"""Averaging: clients move copies of the chain by themselves, the server averages what they reach.

Client ``c`` with weight ``w_c`` moves along its weighted loss ``f_c = U_c / w_c``, where ``U_c`` is
minus its log likelihood and its part ``w_c`` of minus the log prior; so ``sum_c w_c f_c`` is minus
the log posterior. On Gaussian targets a round is an affine map with Gaussian noise, so mean and
covariance are known in closed form after any number of rounds (``docs/laws.md``).

Source: Liang et al. (2024), Algorithm 3, and Deng et al. (2021) for Langevin dynamics.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import Partial

from fedmcmc._checks import expect, positive_integer
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
    Static,
    StepInfo,
    as_functions,
)
from fedmcmc.data import FederatedData
from fedmcmc.dynamics import Integrator, Momentum, shared_momentum
from fedmcmc.gradients import over_weight
from fedmcmc.kernels._shared import (
    bits_down,
    chain_position,
    client_weights,
    expect_blocks,
    first_sums,
    move_by_total,
    refuse_partial_sums,
    start,
)
from fedmcmc.participation import full
from fedmcmc.pytrees import schedules, trees

__all__ = ["averaging"]


class _Parameters(NamedTuple):
    posterior: Posterior
    estimator: GradientEstimator
    integrator: Integrator
    momentum: Momentum
    step_size: Any
    temperature: Any
    num_local_steps: Static[int]
    weights: PerClient | None


class _Draws(NamedTuple):
    momentum: ArrayTree  # leaves [num_local_steps, ...], or () where all of it is shared
    gradient: ArrayTree  # leaves [num_local_steps, calls a trajectory, ...]


def averaging(
    posterior: Posterior,
    estimator: GradientEstimator,
    *,
    integrator: Integrator,
    step_size: Number,
    num_local_steps: int = 1,
    momentum: Momentum | None = None,
    weights: Array | None = None,
    participation: Participation | None = None,
    temperature: Number = 1.0,
) -> FederatedKernel:
    """Build a kernel whose clients take trajectories of their own and are averaged.

    Each client of the cohort starts at the broadcast position, runs `num_local_steps` trajectories
    of `integrator`, each with a new momentum, and sends its weight times how far it came; the
    server adds the sum.

    Parameters
    ----------
    posterior
        The model.
    estimator
        Of the gradient of a client's log likelihood. One over the client's weight times it, plus
        the prior's gradient, is what the client moves along.
    integrator
        `leapfrog` or `euler_maruyama`.
    step_size, temperature
        Numbers or schedules of the round; the step size is that of `integrator`.
    num_local_steps
        Trajectories between two communications.
    momentum
        How momenta of clients are correlated, `shared_momentum` by default: all have the same.
    weights
        ``[num_clients]``, positive, summing to one; by default a client's share of rows. The
        posterior is the target whatever the weights.
    participation
        Everyone by default, and everyone where the estimator is `scaffold`. With
        ``uniform(cohort_size)`` displacements are multiplied by ``b / S`` (scheme II of Deng et
        al., who average positions; the same where weights are equal); with
        ``categorical(weights, cohort_size=S)``, the displacements of ``S`` clients drawn with
        replacement are averaged (scheme I). Both are unbiased for the full average, and add its
        variance over cohorts.

    Raises
    ------
    ValueError, TypeError
        On numbers out of range and blocks of another kind, and from `init` where the data does not
        fit.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(
    ...     lambda theta: -0.5 * theta**2, lambda theta, x: -0.5 * (x - theta) ** 2
    ... )
    >>> surrogates = fedmcmc.Gaussian.from_moments(jnp.zeros(2), variance=jnp.ones(2))
    >>> conducive_fa_hmc = averaging(
    ...     posterior,
    ...     fedmcmc.conducive(fedmcmc.full_gradient(), surrogates),
    ...     integrator=fedmcmc.leapfrog(10),
    ...     step_size=0.1,
    ...     num_local_steps=5,
    ... )
    """
    participation = full() if participation is None else participation
    momentum = shared_momentum() if momentum is None else momentum
    expect_blocks(posterior, estimator, participation)
    expect(integrator, Integrator, "integrator")
    expect(momentum, Momentum, "momentum")
    parameters = as_functions(
        _Parameters(
            posterior,
            estimator,
            integrator,
            momentum,
            schedules.number(step_size, "step_size", minimum=0.0, strict=True),
            schedules.number(temperature, "temperature", minimum=0.0),
            Static(positive_integer(num_local_steps, "num_local_steps")),
            client_weights(weights),
        )
    )
    return FederatedKernel(
        init=Partial(_init, parameters, participation),
        prepare=Partial(_prepare, parameters),
        step=Partial(_step, parameters),
        aggregate=Partial(move_by_total, estimator.reference),
        draw=Partial(chain_position),
        participation=participation,
        constrain_fn=parameters.posterior.constrain_fn,
        prepare_shared=Partial(_prepare_shared, momentum, parameters.num_local_steps),
        before=first_sums(posterior, estimator),
        clients_apart=Static(True),
    )


def _init(
    parameters: _Parameters,
    participation: Participation,
    rng_key: Array,
    position: ArrayTree,
    data: FederatedData,
) -> FederatedState:
    del rng_key
    table = parameters.weights
    if table is not None and table.values.shape != (data.num_clients,):
        raise ValueError(
            f"weights must have shape ({data.num_clients},), one a client, got "
            f"{table.values.shape}."
        )
    client_weights(None if table is None else table.values)  # also where built from traced ones
    posterior, estimator = parameters.posterior, parameters.estimator
    refuse_partial_sums(estimator, participation)
    broadcast, clients = start(posterior, estimator, participation, position, data, sums=True)
    parameters.integrator.check(broadcast.position)
    return FederatedState(broadcast, (), clients)


def _prepare(parameters: _Parameters, rng_key: Array, like: Broadcast, client: Client) -> _Draws:
    momentum_key, gradient_key = jax.random.split(rng_key)
    num, calls = parameters.num_local_steps.value, parameters.integrator.num_calls.value
    drawn = parameters.estimator.prepare(gradient_key, like.position, client, num * calls)
    return _Draws(
        parameters.momentum.prepare(momentum_key, like.position, num),
        jax.tree.map(lambda leaf: leaf.reshape(num, calls, *leaf.shape[1:]), drawn),
    )


def _prepare_shared(
    momentum: Momentum, num_local_steps: Static[int], rng_key: Array, like: Broadcast
) -> ArrayTree:
    return momentum.prepare_shared(rng_key, like.position, num_local_steps.value)


def _step(
    parameters: _Parameters,
    draws: _Draws,
    broadcast: Broadcast,
    client_state: ArrayTree,
    client: Client,
) -> tuple[ArrayTree, ArrayTree, StepInfo]:
    posterior, estimator = parameters.posterior, parameters.estimator
    loglikelihood_fn, round_ = posterior.loglikelihood_fn, broadcast.round
    down = bits_down(estimator, broadcast, client_state)
    context, client_state = estimator.start(loglikelihood_fn, broadcast, client_state, client)
    weight = client.share if parameters.weights is None else parameters.weights.of(client)
    step_size = schedules.value(parameters.step_size, round_)
    heat = jnp.sqrt(schedules.value(parameters.temperature, round_))
    correlation = parameters.momentum.correlation(round_)

    def gradient_fn(drawn: ArrayTree, position: ArrayTree) -> ArrayTree:
        estimate = estimator.estimate(loglikelihood_fn, drawn, position, context, client)
        prior = jax.grad(posterior.logprior_fn)(position)
        return trees.add(prior, over_weight(weight, estimate))

    def trajectory(
        carry: tuple[ArrayTree, Array], drawn: tuple[_Draws, ArrayTree]
    ) -> tuple[tuple[ArrayTree, Array], ArrayTree]:
        position, mean_square = carry
        own, shared = drawn
        noise = parameters.momentum.combine(own.momentum, shared, weight, correlation, position)
        noise = trees.scale(heat, noise)
        position, _, square = parameters.integrator.move(
            gradient_fn, own.gradient, position, noise, step_size
        )
        return (position, mean_square + square), position

    num = parameters.num_local_steps.value
    first = (broadcast.position, jnp.zeros((), jnp.float32))
    (position, mean_square), iterates = jax.lax.scan(
        trajectory, first, (draws, broadcast.shared), length=num
    )
    message = trees.scale(weight, trees.subtract(position, broadcast.position))
    info = StepInfo(
        bits=jnp.asarray(trees.num_bits(message), jnp.int32),
        gradient_norm=jnp.sqrt(mean_square / num),
        local_positions=iterates,
        bits_down=down,
    )
    return message, client_state, info
