"""Base class of kernels that accept or reject proposals.

The server proposes points and decides. Clients send their log likelihoods (and gradients) at the
proposals of all chains, minus the log likelihood at a center. The decision needs the sum over all
clients. If a message is missing, the round changes nothing, and the next round repeats it.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc.kernels._evaluations import POINTS_BUDGET, Points, differences, zero_where
from fedmcmc.kernels._questions import (
    EVERYONE,
    IMPOSSIBLE,
    LOG_ZERO_THRESHOLD,
    below_range,
    impossible_in_sum,
)
from fedmcmc.kernels._shared import check_model, report
from fedmcmc.pytrees import in_single_precision, trees
from fedmcmc.types import (
    ArrayTree,
    Broadcast,
    Client,
    FederatedKernel,
    Federation,
    Participation,
    Posterior,
    StepInfo,
    Traits,
    Uncompressed,
)

CHAINS = 64
"""Typical number of chains that share `POINTS_BUDGET`."""


class Proposed(NamedTuple):
    """Message of a client: its log likelihoods at the proposals.

    Attributes
    ----------
    value
        ``[num]``, ``log p(rows | point) - log p(rows | centre)``; below -1e29 if the value or its
        gradient is not finite.
    gradient
        Gradients of `value`, leaves ``[num, *event]``; zero if `value` is below -1e29; or ``()``.
    one
        ``[]``, the number 1, so that the sum counts the clients.
    """

    value: Uncompressed
    gradient: ArrayTree
    one: Uncompressed

    def to_range(self, limit: float) -> "Proposed":
        """Return the message for a secure sum of numbers up to `limit`; see `Ranged`."""
        value = self.value.value
        impossible = below_range(value, limit)
        for leaf in jax.tree.leaves(self.gradient):
            # The mask depends on the point and the rows only, so trajectories stay reversible.
            outside = jnp.abs(leaf) > trees.cast(limit, leaf)
            impossible = impossible | jnp.any(outside, axis=tuple(range(1, leaf.ndim)))
        return self._replace(
            value=Uncompressed(jnp.where(impossible, -trees.cast(limit, value), value)),
            gradient=zero_where(impossible, self.gradient),
        )

    def from_range(self, limit: float) -> "Proposed":
        """Return the sum of such messages, with -1e30 for a density of zero."""
        value = self.value.value
        impossible = impossible_in_sum(value, limit)
        return self._replace(
            value=Uncompressed(jnp.where(impossible, trees.cast(IMPOSSIBLE, value), value))
        )


class ProposalDensities(NamedTuple):
    """Log densities of the posterior at the proposals.

    Attributes
    ----------
    log_density
        ``[num]``, up to a constant; minus infinity if a proposal is impossible.
    gradient
        Gradients, leaves ``[num, *event]``; zero if a proposal is impossible; or ``()``.
    is_complete
        ``[]`` bool, true if the message of every client is in the sum.
    """

    log_density: Array
    gradient: ArrayTree
    is_complete: Array


@dataclass(frozen=True, eq=False, repr=False)
class AdjustedKernel(FederatedKernel):
    """Kernel whose server accepts or rejects the proposals in the broadcast's `extra` (`Points`).

    The broadcast's position is the position of the chain in every round.
    """

    posterior: Posterior
    participation: Participation = field(default=EVERYONE, kw_only=True)

    traits = Traits(needs_all_clients=True, accepts_late_messages=False)

    @property
    def uses_gradients(self) -> bool:
        """If true, clients also send gradients."""
        return False

    @property
    def target(self) -> Posterior | None:
        return self.posterior

    def check_start(
        self, position: ArrayTree, centre: ArrayTree, federation: Federation
    ) -> tuple[ArrayTree, ArrayTree]:
        """Check the chain's first position and the center, and return both as floats.

        Raises
        ------
        ValueError
            If model, center, participation and federation do not fit together.
        """
        rule = self.participation
        if rule.weighted or rule.may_drop or rule.cohort_size is not None:
            raise ValueError(
                f"{type(self).__name__} needs the log likelihood of every client in every round: "
                f"use full participation."
            )
        position = trees.as_floats(position, "position")
        if not trees.same_shapes(position, centre):
            raise ValueError(
                f"centre must have the shapes of the position, "
                f"{jax.tree.map(jnp.shape, position)}, got {jax.tree.map(jnp.shape, centre)}."
            )
        check_model(self.posterior, position, federation)
        return position, trees.cast_like(centre, position)

    @in_single_precision
    def step(
        self, draws: ArrayTree, broadcast: Broadcast, client_state: ArrayTree, client: Client
    ) -> tuple[Proposed, ArrayTree, StepInfo]:
        proposals: Points = broadcast.extra
        value, gradient, _ = differences(
            self.posterior,
            proposals.points,
            proposals.centre,
            client,
            gradients=self.uses_gradients,
            budget=POINTS_BUDGET // CHAINS,
        )
        # The mask depends on the point and the rows only, so all paths to a point agree.
        impossible = ~jnp.isfinite(value)
        if self.uses_gradients:
            impossible = impossible | ~jax.vmap(trees.all_finite)(gradient)
        value = value.astype(jnp.result_type(float))
        message = Proposed(
            Uncompressed(jnp.where(impossible, trees.cast(IMPOSSIBLE, value), value)),
            zero_where(impossible, gradient),
            Uncompressed(jnp.ones((), value.dtype)),
        )
        down = jnp.asarray(trees.num_bits(proposals), jnp.int32)
        square = trees.squared_norm(message.gradient) / value.shape[0]
        return message, client_state, report(message, square, bits_down=down)

    def message_like(self, like: Broadcast) -> Proposed:
        points = like.extra.points
        dtype = jnp.result_type(float)
        num = jax.tree.leaves(points)[0].shape[0]
        return Proposed(
            Uncompressed(jax.ShapeDtypeStruct((num,), dtype)),
            trees.shapes_of(points) if self.uses_gradients else (),
            Uncompressed(jax.ShapeDtypeStruct((), dtype)),
        )

    def read_sum(self, points: ArrayTree, total: Proposed, num_clients: Array) -> ProposalDensities:
        """Return the posterior's log densities at the proposals from the sum of all messages."""
        gradient: ArrayTree = ()
        if self.uses_gradients:
            prior, prior_gradient = jax.vmap(jax.value_and_grad(self.posterior.logprior_fn))(points)
            gradient = trees.add(total.gradient, trees.cast_like(prior_gradient, total.gradient))
        else:
            prior = jax.vmap(self.posterior.logprior_fn)(points)
        value = total.value.value
        log_density = value + prior.astype(value.dtype)
        possible = (value > LOG_ZERO_THRESHOLD) & jnp.isfinite(log_density)
        if self.uses_gradients:
            possible = possible & jax.vmap(trees.all_finite)(gradient)
        return ProposalDensities(
            jnp.where(possible, log_density, -jnp.inf),
            zero_where(~possible, gradient),
            total.one.value == num_clients,
        )


def repeat(position: ArrayTree, num: int) -> ArrayTree:
    """Return `num` copies of a position, leaves ``[num, *event]``."""
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num, *leaf.shape)), position)


def as_centre(centre: ArrayTree) -> ArrayTree:
    """Return a center as arrays of floats.

    Raises
    ------
    TypeError
        If the center holds integers.
    """
    for leaf in jax.tree.leaves(centre):
        dtype = jnp.result_type(leaf)
        if not isinstance(leaf, float) and not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(f"centre must hold floats, like a position; got {dtype}.")
    return trees.as_floats(centre, "centre")


def probability(log_ratio: Array) -> Array:
    """Return the acceptance probability ``min(1, exp(log_ratio))``; zero if the ratio is NaN."""
    return jnp.where(jnp.isnan(log_ratio), 0, jnp.exp(jnp.minimum(log_ratio, 0)))
