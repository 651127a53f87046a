"""Pseudo-gradients: clients train by themselves, the server's optimizer follows their average.

Source: Reddi et al. (2021), Adaptive federated optimization, Algorithm 1, for the loop, and
Al-Shedivat et al. (2021), Federated learning via posterior averaging, Algorithm 1, for
pseudo-gradients that are gradients of a local posterior's Gaussian fit.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.tree_util import register_dataclass

from fedmcmc._checks import expect
from fedmcmc._types import (
    ArrayTree,
    Broadcast,
    Client,
    Exact,
    FederatedKernel,
    Federation,
    GradientEstimator,
    Number,
    Participation,
    Phase,
    Posterior,
    StepInfo,
    as_functions,
)
from fedmcmc.dynamics import Training, train
from fedmcmc.gradients import next_broadcast
from fedmcmc.kernels._deltas import Delta
from fedmcmc.kernels._deltas import displacement as displacement
from fedmcmc.kernels._deltas import posterior_delta as posterior_delta
from fedmcmc.kernels._shared import (
    EstimatorKernel,
    bits_down,
    expect_blocks,
    first_sums,
    mean_loss,
    refuse_partial_sums,
)
from fedmcmc.participation import full
from fedmcmc.pytrees import schedules, trees

__all__ = ["Delta", "displacement", "posterior_delta", "pseudo_gradients"]


PLAIN_STEPS = optax.sgd(1.0)
"""One object, as kernels of other functions share no compilation."""


class _Message(NamedTuple):
    """A client's part of a weighted mean: what is summed is divided by the summed weights."""

    weight: Exact  # [], the client's share of rows, zero where it has nothing to say
    delta: ArrayTree  # weight times the pseudo-gradient


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class PseudoGradients(EstimatorKernel):
    """Clients train, the server's optimizer follows their mean; see `pseudo_gradients`."""

    posterior: Posterior
    estimator: GradientEstimator
    participation: Participation
    delta: Delta
    training: Training
    optimizer: Any
    learning_rate: Any

    @property
    def before(self) -> tuple[Phase, ...]:
        """The sum of the clients' gradients, where the estimator needs it."""
        return first_sums(self.posterior, self.estimator)

    @property
    def clients_apart(self) -> bool:
        """Clients move by themselves."""
        return True

    def server_init(
        self,
        rng_key: Array,
        position: ArrayTree,
        federation: Federation,
        totals: tuple[ArrayTree, ...],
    ) -> tuple[Broadcast, ArrayTree]:
        """Start at `position`, with the optimizer's first state."""
        refuse_partial_sums(self.estimator, self.participation)
        broadcast = self.first_broadcast(position, federation, sums=True)
        return broadcast, self.optimizer.init(broadcast.position)

    def message_like(self, like: Broadcast) -> ArrayTree:
        """Return the shapes of a weight and a weighted pseudo-gradient."""
        weight: Any = jax.ShapeDtypeStruct((), jnp.result_type(float))
        return _Message(Exact(weight), trees.shapes_of(like.position))

    def prepare(self, rng_key: Array, like: Broadcast, client: Client) -> ArrayTree:
        """Draw the minibatches of the training."""
        num = self.training.length.most(client)
        return self.estimator.prepare(rng_key, like.position, client, num)

    def step(
        self, draws: ArrayTree, broadcast: Broadcast, client_state: ArrayTree, client: Client
    ) -> tuple[ArrayTree, ArrayTree, StepInfo]:
        """Train, and return the client's part of a weighted mean."""
        posterior, estimator = self.posterior, self.estimator
        down = bits_down(estimator, broadcast, client_state)
        gradient_fn, client_state = mean_loss(posterior, estimator, broadcast, client_state, client)
        position, round_, length = broadcast.position, broadcast.round, self.training.length
        visitor = self.delta.visitor(length.num_windows - length.num_burnin, position, round_)
        trained = train(self.training, gradient_fn, draws, position, client, round_, visitor)
        delta = self.delta.finish(trained.kept, position, trained.position)
        finite = trees.all_finite(delta)
        weight = jnp.where(finite, client.share, 0)
        message = _Message(
            Exact(weight), trees.scale(weight, trees.select(finite, delta, trees.zeros_like(delta)))
        )
        info = StepInfo(
            bits=jnp.asarray(trees.num_bits(message), jnp.int32),
            gradient_norm=jnp.sqrt(trained.mean_square),
            usable=finite,
            bits_down=down,
        )
        return message, client_state, info

    def aggregate(
        self, rng_key: ArrayTree, broadcast: Broadcast, server_state: ArrayTree, total: _Message
    ) -> tuple[Broadcast, ArrayTree, ArrayTree]:
        """Descend the weighted mean; stay where nobody sent anything."""
        position, weight = broadcast.position, total.weight.value
        some = weight > 0
        mean = trees.scale(1 / jnp.where(some, weight, 1), total.delta)
        updates, moved_state = trees.descend(self.optimizer, mean, server_state, position)
        rate = schedules.value(self.learning_rate, broadcast.round)
        moved = trees.add_scaled(position, rate, updates)
        position, server_state = trees.select(some, (moved, moved_state), (position, server_state))
        reference = self.estimator.reference
        return next_broadcast(reference, broadcast, position), server_state, ()


def pseudo_gradients(
    posterior: Posterior,
    estimator: GradientEstimator,
    delta: Delta,
    *,
    training: Training,
    server_optimizer: optax.GradientTransformation | None = None,
    learning_rate: Number = 1.0,
    participation: Participation | None = None,
) -> FederatedKernel:
    """Build a kernel whose server moves along the mean of what its clients' trainings found.

    Each client of the cohort trains from the broadcast position and sends a pseudo-gradient,
    weighted by its share of the rows; the server's optimizer descends their weighted mean.

    Parameters
    ----------
    posterior
        The model. A client minimizes minus the mean over its rows of the log likelihood, and of its
        share of the log prior (``log prior / num_rows``, the same for all).
    estimator
        Of the gradient of a client's log likelihood, one call per step of `training`.
    delta
        `displacement` or `posterior_delta`.
    training
        The clients' optimizer and how long it runs, of `fedmcmc.training`.
    server_optimizer
        As from optax; plain steps of size one by default, with which `displacement` is federated
        averaging. Its state is kept from round to round.
    learning_rate
        Multiplies the server's updates: a number, or a schedule of the round.
    participation
        Everyone by default; means are over those who take part. If nobody does, nothing moves.

    Returns
    -------
    FederatedKernel
        Its position is a point estimate, and so are its draws. ``StepInfo.usable`` is whether the
        client's training stayed finite: one that did not is left out of the mean.

    Raises
    ------
    TypeError
        If an optimizer is not one of optax, or a block of another kind.
    ValueError
        On numbers out of range, and from `init` where they do not fit the data.
    """
    server = PLAIN_STEPS if server_optimizer is None else server_optimizer
    if not isinstance(server, optax.GradientTransformation):
        raise TypeError(
            "server_optimizer must be an optax.GradientTransformation or None, got "
            f"{type(server).__name__}."
        )
    participation = full() if participation is None else participation
    expect_blocks(posterior, estimator, participation)
    expect(delta, Delta, "delta")
    expect(training, Training, "training")
    rate = schedules.number(learning_rate, "learning_rate", minimum=0.0, strict=True)
    kernel: PseudoGradients = as_functions(
        PseudoGradients(posterior, estimator, participation, delta, training, server, rate)
    )
    return kernel
