"""Averaging: clients move copies of the chain by themselves, the server averages what they reach.

Client ``c`` with weight ``w_c`` moves along its weighted loss ``f_c = U_c / w_c``, where ``U_c`` is
minus its log likelihood and its part ``w_c`` of minus the log prior; so ``sum_c w_c f_c`` is minus
the log posterior. On Gaussian targets a round is an affine map with Gaussian noise, so mean and
covariance are known in closed form after any number of rounds (``docs/laws.md``).

Source: Liang et al. (2024), Algorithm 3, and Deng et al. (2021) for Langevin dynamics.
"""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc._checks import expect, parts_of_one, positive_integer
from fedmcmc._types import (
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
from fedmcmc.dynamics import EulerMaruyama, Integrator, Leapfrog, Momentum, shared_momentum
from fedmcmc.gradients import Noisy, Scaffold, over_weight
from fedmcmc.kernels._shared import TemperedKernel, expect_blocks, is_plain, name_of, report
from fedmcmc.participation import full
from fedmcmc.pytrees import schedules, trees


class _Draws(NamedTuple):
    momentum: ArrayTree  # leaves [num_local_steps, ...], or () where all of it is shared
    gradient: ArrayTree  # leaves [num_local_steps, calls per trajectory, ...]


def _name(kernel: "Averaging") -> str:
    estimator = kernel.estimator
    for wrapper in (Noisy, Scaffold):
        estimator = estimator.estimator if isinstance(estimator, wrapper) else estimator
    if not is_plain(estimator):
        return "averaging"
    if isinstance(kernel.integrator, Leapfrog):
        return "fa_hmc"
    return "fa_ld" if isinstance(kernel.integrator, EulerMaruyama) else "averaging"


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Averaging(TemperedKernel):
    """Clients move copies of the chain, the server averages them; see `averaging`."""

    integrator: Integrator
    momentum: Momentum
    step_size: Any
    temperature: Any
    weights: PerClient | None
    num_local_steps: int = field(metadata={"static": True})

    traits = replace(TemperedKernel.traits, has_local_steps=True)
    disclosure = Disclosure(
        "how far the site's own copy of the chain moved, times the weight of the site"
    )

    @property
    def name(self) -> str:
        return name_of(self, _name)

    @property
    def takes_control_variates(self) -> bool:
        return True

    def first_state(
        self, position: ArrayTree, federation: Federation, totals: tuple[ArrayTree, ...]
    ) -> ArrayTree:
        table = self.weights
        if table is not None:
            if table.values.shape != (federation.num_clients,):
                raise ValueError(
                    f"weights must have shape ({federation.num_clients},), one per client, got "
                    f"{table.values.shape}."
                )
            parts_of_one(table.values, "weights")  # checked here too if it was traced before
        self.integrator.check(position)
        return ()

    def prepare(self, rng_key: Array, like: Broadcast, client: Client) -> _Draws:
        momentum_key, gradient_key = jax.random.split(rng_key)
        num, calls = self.num_local_steps, self.integrator.num_calls
        drawn = self.estimator.prepare(gradient_key, like.position, client, num * calls)
        return _Draws(
            self.momentum.prepare(momentum_key, like.position, num),
            jax.tree.map(lambda leaf: leaf.reshape(num, calls, *leaf.shape[1:]), drawn),
        )

    def prepare_shared(self, rng_key: Array, like: Broadcast) -> ArrayTree:
        return self.momentum.prepare_shared(rng_key, like.position, self.num_local_steps)

    def step(
        self, draws: _Draws, broadcast: Broadcast, client_state: ArrayTree, client: Client
    ) -> tuple[ArrayTree, ArrayTree, StepInfo]:
        estimate, client_state, down = self.begin(broadcast, client_state, client)
        round_ = broadcast.round
        weight = client.share if self.weights is None else self.weights.of(client)
        step_size = schedules.value(self.step_size, round_)
        heat = jnp.sqrt(schedules.value(self.temperature, round_))
        correlation = self.momentum.correlation(round_)

        def gradient_fn(drawn: ArrayTree, position: ArrayTree) -> ArrayTree:
            prior = jax.grad(self.posterior.logprior_fn)(position)
            return trees.add(prior, over_weight(weight, estimate(drawn, position)))

        def trajectory(
            carry: tuple[ArrayTree, Array], drawn: tuple[_Draws, ArrayTree]
        ) -> tuple[tuple[ArrayTree, Array], ArrayTree]:
            position, mean_square = carry
            client_draws, shared = drawn
            noise = self.momentum.combine(
                client_draws.momentum, shared, weight, correlation, position
            )
            noise = trees.scale(heat, noise)
            position, _, square = self.integrator.move(
                gradient_fn, client_draws.gradient, position, noise, step_size
            )
            return (position, mean_square + square), position

        num = self.num_local_steps
        first = (broadcast.position, jnp.zeros((), jnp.float32))
        (position, mean_square), iterates = jax.lax.scan(
            trajectory, first, (draws, broadcast.shared), length=num
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
    return as_functions(
        Averaging(
            posterior,
            estimator,
            participation,
            integrator,
            momentum,
            schedules.number(step_size, "step_size", minimum=0.0, strict=True),
            schedules.number(temperature, "temperature", minimum=0.0),
            None if weights is None else PerClient(parts_of_one(weights, "weights")),
            positive_integer(num_local_steps, "num_local_steps"),
        )
    )
