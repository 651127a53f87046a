"""Ensembles: clients train models, the server fits a distribution to them and draws from it.

Source: Chen and Chao (2021), FedBE: making Bayesian model ensemble applicable to federated
learning.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.tree_util import register_dataclass

from fedmcmc._checks import positive_integer
from fedmcmc._types import (
    ArrayTree,
    Broadcast,
    Client,
    FederatedKernel,
    FederatedState,
    Federation,
    GradientEstimator,
    Number,
    Participation,
    Posterior,
    StepInfo,
    as_functions,
)
from fedmcmc.dynamics import Length, Training, train, training
from fedmcmc.gradients import next_broadcast
from fedmcmc.kernels._ensembles import Ensemble
from fedmcmc.kernels._ensembles import dirichlet_ensemble as dirichlet_ensemble
from fedmcmc.kernels._ensembles import gaussian_ensemble as gaussian_ensemble
from fedmcmc.kernels._shared import EstimatorKernel, bits_down, expect_blocks, mean_loss
from fedmcmc.participation import full
from fedmcmc.pytrees import trees

__all__ = ["Ensemble", "dirichlet_ensemble", "ensemble", "gaussian_ensemble"]

Distiller = Callable[[Array, ArrayTree, ArrayTree], ArrayTree]
"""``(rng_key, mean, members) -> position``, members with leaves ``[num_models, *event]``."""


class _Draws(NamedTuple):
    gradient: ArrayTree  # leaves [num_local_steps, ...]
    family: ArrayTree


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class EnsembleKernel(EstimatorKernel):
    """Clients train models, the server fits a distribution to them; see `ensemble`."""

    posterior: Posterior
    estimator: GradientEstimator
    participation: Participation
    family: Ensemble
    training: Training
    distill: Any

    def server_init(
        self,
        rng_key: Array,
        position: ArrayTree,
        federation: Federation,
        totals: tuple[ArrayTree, ...],
    ) -> tuple[Broadcast, ArrayTree]:
        """Start at `position`, with an ensemble that is all there."""
        broadcast = self.first_broadcast(position, federation)
        return broadcast, self.family.init(broadcast.position)

    def message_like(self, like: Broadcast) -> ArrayTree:
        """Return the shapes of what the family needs of a model."""
        key = jax.eval_shape(lambda: jax.random.key(0))
        share = jax.ShapeDtypeStruct((), jnp.result_type(float))

        def message(rng_key: Array, share_: Array, moved: ArrayTree) -> ArrayTree:
            return self.family.message(self.family.prepare(rng_key), share_, moved)

        return jax.eval_shape(message, key, share, trees.shapes_of(like.position))

    def prepare(self, rng_key: Array, like: Broadcast, client: Client) -> _Draws:
        """Draw the minibatches of the training and what the family draws."""
        family_key, gradient_key = jax.random.split(rng_key)
        num = self.training.length.most(client)
        return _Draws(
            self.estimator.prepare(gradient_key, like.position, client, num),
            self.family.prepare(family_key),
        )

    def step(
        self, draws: _Draws, broadcast: Broadcast, client_state: ArrayTree, client: Client
    ) -> tuple[ArrayTree, ArrayTree, StepInfo]:
        """Train a model, and return what the family needs of it."""
        posterior, estimator = self.posterior, self.estimator
        down = bits_down(estimator, broadcast, client_state)
        gradient_fn, client_state = mean_loss(posterior, estimator, broadcast, client_state, client)
        position = broadcast.position
        trained = train(
            self.training, gradient_fn, draws.gradient, position, client, broadcast.round
        )
        moved = trees.subtract(trained.position, position)
        message = self.family.message(draws.family, client.share, moved)
        info = StepInfo(
            bits=jnp.asarray(trees.num_bits(message), jnp.int32),
            gradient_norm=jnp.sqrt(trained.mean_square),
            bits_down=down,
        )
        return message, client_state, info

    def prepare_server(self, rng_key: Array, like: Broadcast) -> ArrayTree:
        """Leave the key as it is: members and distillation draw from it."""
        return rng_key

    def aggregate(
        self, rng_key: Array, broadcast: Broadcast, server_state: Any, total: ArrayTree
    ) -> tuple[Broadcast, Any, ArrayTree]:
        """Fit the distribution, and broadcast its mean or what is distilled of its members."""
        family = self.family
        fitted = family.fit(broadcast.position, total, server_state)
        position = fitted.mean
        if self.distill is not None:
            members_key, distill_key = jax.random.split(rng_key)
            members = family.members(members_key, fitted)
            position = self.distill(distill_key, fitted.mean, members)
        reference = self.estimator.reference
        return next_broadcast(reference, broadcast, position), fitted, ()

    def draw(self, rng_key: Array, state: FederatedState) -> ArrayTree:
        """Draw a member of the fitted ensemble."""
        return self.family.draw(rng_key, state.server)


def ensemble(
    posterior: Posterior,
    estimator: GradientEstimator,
    family: Ensemble,
    *,
    client_optimizer: optax.GradientTransformation,
    num_local_steps: int,
    learning_rate: Number = 1.0,
    participation: Participation | None = None,
    distill: Distiller | None = None,
) -> FederatedKernel:
    """Build a kernel whose clients train models and whose server fits a distribution to them.

    In a round each client of the cohort takes `num_local_steps` of its optimizer from the
    broadcast position and sends what `family` needs of its model. The kernel's draws are members
    of the fitted ensemble.

    Parameters
    ----------
    posterior
        The model. A client minimizes minus the mean over its rows of the log likelihood and of
        its share of the log prior (``log prior / num_rows``, the same for all).
    estimator
        Of the gradient of a client's log likelihood.
    family
        `gaussian_ensemble` or `dirichlet_ensemble`.
    client_optimizer
        As from optax. Its state starts anew in every round, so a schedule in it counts local
        steps.
    num_local_steps
        Steps of the optimizer per round.
    learning_rate
        Multiplies the optimizer's updates: a number, or a schedule of the round. Another one
        needs no new compilation, another optimizer does.
    participation
        Everyone by default. Messages are weighted by one over the probability of taking part,
        which cancels where all have the same: means are over those who take part. If nobody
        does, the ensemble stays.
    distill
        ``(rng_key, mean, members) -> position`` makes one model of the ensemble, which is
        broadcast next; see `fedmcmc.distillation`. By default that is the weighted mean of the
        clients' models, as in federated averaging.

    Returns
    -------
    FederatedKernel
        ``state.server`` is the fitted ensemble: ``.mean``, and ``.scale`` or ``.models``. Its
        members are not those of the clients themselves, which the server never sees.

    Raises
    ------
    TypeError
        If `client_optimizer` is not one of optax, or `distill` not a function.
    ValueError
        On numbers out of range, and from `init` where they do not fit the data.

    Notes
    -----
    The weights of a weighted mean are part of a message. A compressor that treats a message as
    one vector adds noise to them too, and a quotient of two sums with noise has a bias of second
    order; with ``quantize(num_levels, per_leaf=True)`` the one weight of the Gaussian ensemble
    crosses exactly, and its mean is unbiased. A Dirichlet member's weight is drawn, may be small,
    and stands in the denominator: compressed coarsely, members spread much wider than uncompressed
    ones, and one whose weights are all rounded to zero stays that of the round before.
    """
    if not isinstance(family, Ensemble):
        raise TypeError(
            "family must be an Ensemble (gaussian_ensemble, dirichlet_ensemble), got "
            f"{type(family).__name__}."
        )
    if distill is not None and not callable(distill):
        raise TypeError(f"distill must be a function or None, got {type(distill).__name__}.")
    participation = full() if participation is None else participation
    expect_blocks(posterior, estimator, participation)
    length = Length(1, num_steps=positive_integer(num_local_steps, "num_local_steps"))
    kernel: EnsembleKernel = as_functions(
        EnsembleKernel(
            posterior,
            estimator,
            participation,
            family,
            training(client_optimizer, length, learning_rate, name="client_optimizer"),
            distill,
        )
    )
    return kernel
