"""Relay: each round hands one chain to one client, which moves it by local Langevin steps.

Source: Ahn et al. (2014); El Mekkaoui et al. (2021), Algorithm 1, where the step
size ``h`` is ``2 * step_size``. On Gaussian targets a round is a random affine map with Gaussian
noise, so the stationary mean and covariance at any step size have a closed form.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedmcmc._checks import integers_per_client, positive_integer
from fedmcmc.dynamics import Metric
from fedmcmc.gaussian import Gaussian
from fedmcmc.gradients import Conducive, importance
from fedmcmc.kernels._shared import (
    ClientDraws,
    LocalLangevin,
    expect_blocks,
    is_plain,
    report,
)
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
    Posterior,
    StepInfo,
    as_functions,
    register_dataclass,
)

ONE_CLIENT_PER_ROUND = "in each round only one site sends a message"


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Relay(LocalLangevin):
    """Kernel that hands one chain from client to client; see `relay`."""

    step_size: Number
    temperature: Number
    metric: Metric
    num_local_steps: int = field(metadata={"static": True})
    client_steps: ArrayTree = ()  # [num_clients], or () if all clients take the same number
    step_count_weights: ArrayTree = ()  # [num_clients], mean steps per visit / client_steps

    traits = replace(
        LocalLangevin.traits,
        visits_clients=True,
        divergence_hint="The step size is not the only cause: a relay multiplies the gradient of "
        "the visited client by the number of clients, and with it the error of that client's "
        "surrogate (fsgld). Take fewer local steps, or a kernel in whose rounds all clients take "
        "part.",
    )
    disclosure = Disclosure(
        "how far the site moved the chain, in rounds in which the chain is at this site. A site "
        "that has the chain just before and just after can compute how far this site moved it",
        reason=ONE_CLIENT_PER_ROUND,
    )

    @property
    def base_name(self) -> str:
        if isinstance(self.estimator, Conducive):
            return "fsgld"
        if not is_plain(self.estimator):
            return "relay"
        return "sgld" if self.participation.pooled else "dsgld"

    def init_server_state(
        self, position: ArrayTree, federation: Federation, totals: tuple[ArrayTree, ...]
    ) -> ArrayTree:
        if (self.participation.cohort_size or federation.num_clients) != 1:
            raise ValueError(
                "A relay hands its chain to one client per round: use a cohort of size 1."
            )
        has_client_steps = not isinstance(self.client_steps, tuple)
        if has_client_steps and len(self.client_steps) != federation.num_clients:
            raise ValueError(
                f"num_local_steps must have one number for each of {federation.num_clients} "
                f"clients, got {len(self.client_steps)}."
            )
        self.metric.check(position)
        return ()

    def step(
        self, draws: ClientDraws, broadcast: Broadcast, client_state: ArrayTree, client: Client
    ) -> tuple[ArrayTree, ArrayTree, StepInfo]:
        return self.visit(draws, broadcast, client_state, client)

    def visit(
        self,
        draws: ClientDraws,
        broadcast: Broadcast,
        client_state: ArrayTree,
        client: Client,
        correct_fn: Callable[[Client], Gaussian] | None = None,
    ) -> tuple[ArrayTree, ArrayTree, StepInfo]:
        """Return a client's displacement of the chain, the estimator's new state and a report.

        `correct_fn` maps the client, with one over its share of all steps as weight, to a Gaussian
        whose log gradient is added to the estimates.
        """
        count = None
        if not isinstance(self.client_steps, tuple):
            # The weight is one over the share of all steps, not of all visits.
            count = self.client_steps[client.index]
            client = replace(client, weight=client.weight * self.step_count_weights[client.index])
        estimate, client_state, down = self.begin(broadcast, client_state, client)
        step_size = schedules.value(self.step_size, broadcast.round)
        temperature = schedules.value(self.temperature, broadcast.round)
        correction = None if correct_fn is None else correct_fn(client)

        def gradient_fn(drawn: ArrayTree, position: ArrayTree) -> ArrayTree:
            prior = jax.grad(self.posterior.logprior_fn)(position)
            gradient = estimate(drawn, position)
            if correction is not None:
                gradient = trees.add(gradient, correction.grad_log(position))
            return trees.add(prior, importance(client, gradient))

        position, mean_square, iterates = self.move(
            gradient_fn, draws, broadcast.position, step_size, temperature, self.metric, count
        )
        message = trees.subtract(position, broadcast.position)
        info = report(message, mean_square, local_positions=iterates, bits_down=down)
        return message, client_state, info

    def aggregate(
        self, rng_key: ArrayTree, broadcast: Broadcast, server_state: ArrayTree, total: ArrayTree
    ) -> tuple[Broadcast, ArrayTree, ArrayTree]:
        position = trees.add(broadcast.position, total)
        return self.next_broadcast(broadcast, position), server_state, ()


def relay(
    posterior: Posterior,
    estimator: GradientEstimator,
    *,
    participation: Participation,
    step_size: Number,
    num_local_steps: int | Sequence[int] = 1,
    temperature: Number = 1.0,
    metric: ArrayTree | None = None,
) -> FederatedKernel:
    """Build a kernel that hands its chain to one client per round.

    The client takes `num_local_steps` Langevin steps along
    ``grad log prior + estimate / probability`` and returns its displacement of the chain.

    Parameters
    ----------
    posterior
        Model.
    estimator
        Gradient estimator for a client's log likelihood.
    participation
        Rule that chooses one client per round. One over its probability scales the client's
        gradient, and never the displacement of the chain.
    step_size, temperature, metric
        The same as in `fedmcmc.langevin`.
    num_local_steps
        Number of steps per round: one number, or one per client. If the numbers differ, a client's
        gradient is divided by its share of all steps instead of its probability.

    Raises
    ------
    ValueError
        If a number is out of range; from `init` if the data does not fit.
    """
    settings = relay_settings(
        posterior, estimator, participation, step_size, num_local_steps, temperature, metric
    )
    return as_functions(Relay(*settings))


def relay_settings(
    posterior: Posterior,
    estimator: GradientEstimator,
    participation: Participation,
    step_size: Number,
    num_local_steps: int | Sequence[int],
    temperature: Number,
    metric: ArrayTree | None,
) -> tuple[Any, ...]:
    """Return the fields of a `Relay` in their order, checked."""
    expect_blocks(posterior, estimator, participation)
    client_steps: ArrayTree = ()
    step_count_weights: ArrayTree = ()
    if np.ndim(num_local_steps):
        steps = integers_per_client(num_local_steps, "num_local_steps")
        participation.check(len(steps))
        counts = participation.counts(len(steps))
        if counts is None:
            raise ValueError("Numbers of local steps per client need visits of known probability.")
        visits = np.asarray(counts.mean, float)
        client_steps = jnp.asarray(steps, jnp.int32)
        step_count_weights = jnp.asarray(visits @ steps / visits.sum() / steps)
        num_local_steps = int(steps.max())
    return (
        posterior,
        estimator,
        replace(participation, weighted=False),
        schedules.number(step_size, "step_size", minimum=0.0, strict=True),
        schedules.number(temperature, "temperature", minimum=0.0),
        Metric.of(metric),
        positive_integer(num_local_steps, "num_local_steps"),
        client_steps,
        step_count_weights,
    )
