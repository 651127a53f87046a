"""Averaging: clients move copies of the chain, and the server averages the results.

Client ``c`` with weight ``w_c`` moves along its weighted loss ``f_c = U_c / w_c``. Here ``U_c`` is
minus its log likelihood, minus its part ``w_c`` of the log prior, so ``sum_c w_c f_c`` is minus the
log posterior. On Gaussian targets a round is an affine map with Gaussian noise, so mean and
covariance after any number of rounds have a closed form
(``docs/explanation/exact_distributions.md``).

Source: Liang et al. (2024), Algorithm 3, and Deng et al. (2021) for Langevin dynamics.
"""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc._checks import expect, positive_integer, probability_vector
from fedmcmc.dynamics import EulerMaruyama, Integrator, Leapfrog, Momentum, shared_momentum
from fedmcmc.gradients import Noisy, Scaffold, over_weight
from fedmcmc.kernels._shared import TemperedKernel, expect_blocks, is_plain, report
from fedmcmc.participation import full
from fedmcmc.pytrees import schedules, trees
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
    PerClient,
    Posterior,
    StepInfo,
    as_functions,
    register_dataclass,
)


class _AveragingDraws(NamedTuple):
    momentum: ArrayTree  # leaves [num_local_steps, ...], or () if clients share it
    gradient: ArrayTree  # leaves [num_local_steps, calls per trajectory, ...]


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Averaging(TemperedKernel):
    """Kernel whose server averages the clients' copies of the chain; see `averaging`."""

    integrator: Integrator
    momentum: Momentum
    step_size: Number
    temperature: Number
    weights: PerClient | None
    num_local_steps: int = field(metadata={"static": True})

    traits = replace(TemperedKernel.traits, has_local_steps=True)
    disclosure = Disclosure(
        "how far the site's own copy of the chain moved, times the weight of the site"
    )

    @property
    def base_name(self) -> str:
        estimator = self.estimator
        for wrapper in (Noisy, Scaffold):
            estimator = estimator.estimator if isinstance(estimator, wrapper) else estimator
        if not is_plain(estimator):
            return "averaging"
        if isinstance(self.integrator, Leapfrog):
            return "fa_hmc"
        return "fa_ld" if isinstance(self.integrator, EulerMaruyama) else "averaging"

    @property
    def averages_local_moves(self) -> bool:
        return True

    def init_server_state(
        self, position: ArrayTree, federation: Federation, totals: tuple[ArrayTree, ...]
    ) -> ArrayTree:
        table = self.weights
        if table is not None:
            if table.values.shape != (federation.num_clients,):
                raise ValueError(
                    f"weights must have shape ({federation.num_clients},), one per client, got "
                    f"{table.values.shape}."
                )
            probability_vector(table.values, "weights")  # a traced array is checked only now
        self.integrator.check(position)
        return ()

    def prepare(self, rng_key: Array, like: Broadcast, client: Client) -> _AveragingDraws:
        momentum_key, gradient_key = jax.random.split(rng_key)
        num, calls = self.num_local_steps, self.integrator.num_calls
        drawn = self.estimator.prepare(gradient_key, like.position, client, num * calls)
        return _AveragingDraws(
            self.momentum.prepare(momentum_key, like.position, num),
            jax.tree.map(lambda leaf: leaf.reshape(num, calls, *leaf.shape[1:]), drawn),
        )

    def prepare_shared(self, rng_key: Array, like: Broadcast) -> ArrayTree:
        return self.momentum.prepare_shared(rng_key, like.position, self.num_local_steps)

    def step(
        self, draws: _AveragingDraws, broadcast: Broadcast, client_state: ArrayTree, client: Client
    ) -> tuple[ArrayTree, ArrayTree, StepInfo]:
        estimate, client_state, down = self.begin(broadcast, client_state, client)
        round_ = broadcast.round
        weight = client.share if self.weights is None else self.weights.of(client)
        step_size = schedules.value(self.step_size, round_)
        noise_scale = jnp.sqrt(schedules.value(self.temperature, round_))
        correlation = self.momentum.correlation(round_)

        def gradient_fn(drawn: ArrayTree, position: ArrayTree) -> ArrayTree:
            prior = jax.grad(self.posterior.logprior_fn)(position)
            return trees.add(prior, over_weight(weight, estimate(drawn, position)))

        def trajectory(
            carry: tuple[ArrayTree, Array], drawn: tuple[_AveragingDraws, ArrayTree]
        ) -> tuple[tuple[ArrayTree, Array], ArrayTree]:
            position, mean_square = carry
            client_draws, shared = drawn
            noise = self.momentum.combine(
                client_draws.momentum, shared, weight, correlation, position
            )
            noise = trees.scale(noise_scale, noise)
            position, _, square = self.integrator.move(
                gradient_fn, client_draws.gradient, position, noise, step_size
            )
            return (position, mean_square + square), position

        num = self.num_local_steps
        start = (broadcast.position, jnp.zeros((), jnp.float32))
        (position, mean_square), iterates = jax.lax.scan(
            trajectory, start, (draws, broadcast.shared), length=num
        )
        message = trees.scale(weight, trees.subtract(position, broadcast.position))
        info = report(message, mean_square / num, local_positions=iterates, bits_down=down)
        return message, client_state, info

    def aggregate(
        self, rng_key: ArrayTree, broadcast: Broadcast, server_state: ArrayTree, total: ArrayTree
    ) -> tuple[Broadcast, ArrayTree, ArrayTree]:
        position = trees.add(broadcast.position, total)
        return self.next_broadcast(broadcast, position), server_state, ()


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
    """Build a kernel whose clients take local trajectories and whose server averages them.

    Each client of the cohort starts at the broadcast position and runs `num_local_steps`
    trajectories of `integrator`, each with a new momentum. It sends its weight times its
    displacement, which the server adds to the position.

    Parameters
    ----------
    posterior, estimator
        Model, and gradient estimator for a client's log likelihood. A client moves along the
        gradient of the prior plus one over its weight times the estimate.
    integrator
        `leapfrog` or `euler_maruyama`.
    step_size, temperature
        Step size and factor of the variance of all noise, numbers or schedules of the round.
    num_local_steps
        Number of trajectories per round.
    momentum
        Correlation of the clients' momenta; by default `shared_momentum`: all have the same.
    weights
        ``[num_clients]``, positive, with sum one; by default the clients' shares of the rows. The
        target is the posterior for all weights.
    participation
        Rule that chooses who takes part; everyone by default, and always with `scaffold`. Schemes I
        and II of Deng et al. are ``categorical(weights, cohort_size=S)`` and, with equal weights,
        `uniform`.

    Raises
    ------
    ValueError, TypeError
        If a number is out of range or a block has the wrong type; from `init` if data do not fit.

    Examples
    --------
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(lambda t: -0.5 * t**2, lambda t, x: -0.5 * (x - t) ** 2)
    >>> estimator, integrator = fedmcmc.full_gradient(), fedmcmc.dynamics.leapfrog(10)
    >>> averaging(posterior, estimator, integrator=integrator, step_size=0.1).name
    'fa_hmc'
    """
    participation = full() if participation is None else participation
    momentum = shared_momentum() if momentum is None else momentum
    expect_blocks(posterior, estimator, participation)
    expect(integrator, Integrator, "integrator")
    expect(momentum, Momentum, "momentum")
    return as_functions(
        Averaging(
            posterior,
            estimator,
            participation,
            integrator,
            momentum,
            schedules.number(step_size, "step_size", minimum=0.0, strict=True),
            schedules.number(temperature, "temperature", minimum=0.0),
            None if weights is None else PerClient(probability_vector(weights, "weights")),
            positive_integer(num_local_steps, "num_local_steps"),
        )
    )
