"""Relay: one chain is handed from client to client, each moves it by local Langevin steps.

Source: Ahn, Shahbaba and Welling (2014); El Mekkaoui et al. (2021), Algorithm 1, where the step
size ``h`` is ``2 * step_size``. On Gaussian targets a round is a random affine map with Gaussian
noise, so the stationary mean and covariance are known in closed form at the step size used.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedmcmc._checks import integers_per_client, positive_integer
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
    Posterior,
    StepInfo,
    as_functions,
    register_dataclass,
)
from fedmcmc.dynamics import Metric
from fedmcmc.gaussian import Gaussian
from fedmcmc.gradients import Conducive, importance
from fedmcmc.kernels._shared import (
    LocalDraws,
    LocalLangevin,
    expect_blocks,
    is_plain,
    name_of,
    report,
)
from fedmcmc.pytrees import schedules, trees

ONE_CLIENT_PER_ROUND = "in a round one site alone has something to say"


def _name(kernel: "Relay") -> str:
    if isinstance(kernel.estimator, Conducive):
        return "fsgld"
    if not is_plain(kernel.estimator):
        return "relay"
    return "sgld" if kernel.participation.pooled else "dsgld"


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Relay(LocalLangevin):
    """Clients move the one chain in turn; see `relay`."""

    step_size: Any
    temperature: Any
    metric: Metric
    num_local_steps: int = field(metadata={"static": True})
    own_steps: Any = ()  # [num_clients], or () where all take as many
    evened: Any = ()  # [num_clients], the mean number of steps of a visit over the client's

    traits = replace(
        LocalLangevin.traits,
        divergence_hint="There is another cause than the step size: a relay multiplies the "
        "gradient of the visited client by the number of clients, and with it the error of that "
        "client's surrogate (fsgld). Take fewer local steps, or a kernel in whose rounds all "
        "clients take part.",
    )
    disclosure = Disclosure(
        "how far the site moved the chain, in rounds in which the chain is at this site. A site "
        "that has the chain just before and just after can compute how far this site moved it",
        reason=ONE_CLIENT_PER_ROUND,
    )

    @property
    def name(self) -> str:
        return name_of(self, _name)

    def first_state(
        self, position: ArrayTree, federation: Federation, totals: tuple[ArrayTree, ...]
    ) -> ArrayTree:
        if (self.participation.cohort_size or federation.num_clients) != 1:
            raise ValueError(
                "A relay hands its chain to one client per round; this cohort is larger."
            )
        varied = not isinstance(self.own_steps, tuple)
        if varied and len(self.own_steps) != federation.num_clients:
            raise ValueError(
                f"num_local_steps must be one number per client, {federation.num_clients}, got "
                f"{len(self.own_steps)}."
            )
        self.metric.check(position)
        return ()

    def step(
        self, draws: LocalDraws, broadcast: Broadcast, client_state: ArrayTree, client: Client
    ) -> tuple[ArrayTree, ArrayTree, StepInfo]:
        return self.visit(draws, broadcast, client_state, client)

    def visit(
        self,
        draws: LocalDraws,
        broadcast: Broadcast,
        client_state: ArrayTree,
        client: Client,
        correct_fn: Callable[[Client], Gaussian] | None = None,
    ) -> tuple[ArrayTree, ArrayTree, StepInfo]:
        """Return how far a client moves the chain, the estimator's new state and a report.

        `correct_fn` takes the client, whose weight is one over its share of all steps, to what the
        gradient of the logarithm of is added to its estimates.
        """
        count = None
        if not isinstance(self.own_steps, tuple):
            # What counts is how many of all steps are taken here, not how many visits.
            count = self.own_steps[client.index]
            client = replace(client, weight=client.weight * self.evened[client.index])
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
        Steps between two communications: one number, or one per client. Where they differ, a
        client's gradient is divided by its share of all steps in place of its probability.
    metric
        ``B = C C'``: a step is ``position + step_size * B gradient + sqrt(2 * step_size *
        temperature) * C normal``, the plain step in coordinates ``inverse(C) position``. Shaped as
        the position for a diagonal, or ``[d, d]`` over the raveled position; the identity by
        default. The posterior's covariance makes all directions alike (`fedmcmc.whiten`).

    Raises
    ------
    ValueError
        On numbers out of range, and from `init` where the data does not fit.
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
    own_steps: Any = ()
    evened: Any = ()
    if np.ndim(num_local_steps):
        steps = integers_per_client(num_local_steps, "num_local_steps")
        participation.check(len(steps))
        counts = participation.counts(len(steps))
        if counts is None:
            raise ValueError("Numbers of local steps per client take visits of known probability.")
        visits = np.asarray(counts.mean, float)
        own_steps = jnp.asarray(steps, jnp.int32)
        evened = jnp.asarray(visits @ steps / visits.sum() / steps)
        num_local_steps = int(steps.max())
    return (
        posterior,
        estimator,
        replace(participation, weighted=False),
        schedules.number(step_size, "step_size", minimum=0.0, strict=True),
        schedules.number(temperature, "temperature", minimum=0.0),
        Metric.of(metric),
        positive_integer(num_local_steps, "num_local_steps"),
        own_steps,
        evened,
    )
