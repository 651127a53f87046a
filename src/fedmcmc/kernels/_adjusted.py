"""What kernels that accept or reject proposals share: who is asked what, and how sums are read.

Proposals are made and judged at the server. Clients are asked for their log likelihoods (and
gradients) at the proposals of all chains, as differences to those at a center. All that matters is
in the sum over all clients: a round in which one is missing is void, and the same is asked again.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc._types import (
    ArrayTree,
    Broadcast,
    Client,
    Exact,
    FederatedKernel,
    Federation,
    Participation,
    Posterior,
    StepInfo,
    Traits,
)
from fedmcmc.kernels._evaluations import POINTS_BUDGET, Points, differences, zero_where
from fedmcmc.kernels._questions import BELOW, EVERYONE, IMPOSSIBLE, below_range, impossible_in_sum
from fedmcmc.kernels._shared import check_model, report
from fedmcmc.pytrees import in_single_precision, trees

CHAINS = 64
"""Chains that are computed together as a rule: each takes that share of what a question may."""


class Proposed(NamedTuple):
    """A client's message: its log likelihoods at the proposals.

    Attributes
    ----------
    value
        ``[num]``, ``log p(rows | point) - log p(rows | centre)``; below -1e29 where it or its
        gradient is not finite.
    gradient
        Of `value`, leaves ``[num, *event]``; zero where `value` is below -1e29; or ``()``.
    one
        ``[]``, one: the sum says how many clients there are.
    """

    value: Exact
    gradient: ArrayTree
    one: Exact

    def to_range(self, limit: float) -> "Proposed":
        """Return the message for a secure sum of numbers up to `limit`; see `Ranged`."""
        value = self.value.value
        impossible = below_range(value, limit)
        for leaf in jax.tree.leaves(self.gradient):
            # A function of the point and the rows alone, so that trajectories stay reversible.
            outside = jnp.abs(leaf) > trees.cast(limit, leaf)
            impossible = impossible | jnp.any(outside, axis=tuple(range(1, leaf.ndim)))
        return self._replace(
            value=Exact(jnp.where(impossible, -trees.cast(limit, value), value)),
            gradient=zero_where(impossible, self.gradient),
        )

    def from_range(self, limit: float) -> "Proposed":
        """Return a sum of such messages as the server reads it."""
        value = self.value.value
        impossible = impossible_in_sum(value, limit)
        return self._replace(
            value=Exact(jnp.where(impossible, trees.cast(IMPOSSIBLE, value), value))
        )


class Judged(NamedTuple):
    """What the sum of all clients' messages says of the proposals.

    Attributes
    ----------
    log_density
        ``[num]``, of the posterior, up to a constant; minus infinity where a proposal is
        impossible.
    gradient
        Of it, leaves ``[num, *event]``; zero where a proposal is impossible; or ``()``.
    whole
        ``[]`` bool, whether every client's message is in the sum.
    """

    log_density: Array
    gradient: ArrayTree
    whole: Array


@dataclass(frozen=True, eq=False, repr=False)
class AdjustedKernel(FederatedKernel):
    """A kernel whose server accepts or rejects; the broadcast's `extra` holds `Points` to judge.

    The broadcast's position is where the chain is, in every round.
    """

    posterior: Posterior
    participation: Participation = field(default=EVERYONE, kw_only=True)

    traits = Traits(needs_all_clients=True, accepts_late_messages=False)

    @property
    def asks_for_gradients(self) -> bool:
        """Whether clients send gradients."""
        return False

    @property
    def target(self) -> Posterior | None:
        return self.posterior

    def checked_start(
        self, position: ArrayTree, centre: ArrayTree, federation: Federation
    ) -> tuple[ArrayTree, ArrayTree]:
        """Return where the chain starts and the center, checked.

        Raises
        ------
        ValueError
            If model, center, participation and federation do not fit together.
        """
        rule = self.participation
        if rule.weighted or rule.drops or rule.cohort_size is not None:
            raise ValueError(
                f"{type(self).__name__} needs every client's log likelihood in every round: it has "
                f"no cohorts, and its messages are not weighted."
            )
        position = trees.as_floats(position, "position")
        if not trees.same_shapes(position, centre):
            raise ValueError(
                f"The center must be shaped as the position, {jax.tree.map(jnp.shape, position)}, "
                f"got {jax.tree.map(jnp.shape, centre)}."
            )
        check_model(self.posterior, position, federation)
        return position, trees.cast_like(centre, position)

    @in_single_precision
    def step(
        self, draws: ArrayTree, broadcast: Broadcast, client_state: ArrayTree, client: Client
    ) -> tuple[Proposed, ArrayTree, StepInfo]:
        asked: Points = broadcast.extra
        value, gradient, _ = differences(
            self.posterior,
            asked.points,
            asked.centre,
            client,
            gradients=self.asks_for_gradients,
            budget=POINTS_BUDGET // CHAINS,
        )
        # A function of the point and the rows alone: whatever path leads there meets the same.
        impossible = ~jnp.isfinite(value)
        if self.asks_for_gradients:
            impossible = impossible | ~jax.vmap(trees.all_finite)(gradient)
        value = value.astype(jnp.result_type(float))
        message = Proposed(
            Exact(jnp.where(impossible, trees.cast(IMPOSSIBLE, value), value)),
            zero_where(impossible, gradient),
            Exact(jnp.ones((), value.dtype)),
        )
        down = jnp.asarray(trees.num_bits(asked), jnp.int32)
        square = trees.squared_norm(message.gradient) / value.shape[0]
        return message, client_state, report(message, square, bits_down=down)

    def message_like(self, like: Broadcast) -> Proposed:
        points = like.extra.points
        dtype = jnp.result_type(float)
        num = jax.tree.leaves(points)[0].shape[0]
        return Proposed(
            Exact(jax.ShapeDtypeStruct((num,), dtype)),
            trees.shapes_of(points) if self.asks_for_gradients else (),
            Exact(jax.ShapeDtypeStruct((), dtype)),
        )

    def judge(self, points: ArrayTree, total: Proposed, num_clients: Array) -> Judged:
        """Return what a sum of messages says of the points that were asked about."""
        gradient: ArrayTree = ()
        if self.asks_for_gradients:
            prior, of_prior = jax.vmap(jax.value_and_grad(self.posterior.logprior_fn))(points)
            gradient = trees.add(total.gradient, trees.cast_like(of_prior, total.gradient))
        else:
            prior = jax.vmap(self.posterior.logprior_fn)(points)
        value = total.value.value
        log_density = value + prior.astype(value.dtype)
        possible = (value > BELOW) & jnp.isfinite(log_density)
        if self.asks_for_gradients:
            possible = possible & jax.vmap(trees.all_finite)(gradient)
        return Judged(
            jnp.where(possible, log_density, -jnp.inf),
            zero_where(~possible, gradient),
            total.one.value == num_clients,
        )


def repeated(position: ArrayTree, num: int) -> ArrayTree:
    """Return a position `num` times, leaves ``[num, *event]``."""
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num, *leaf.shape)), position)


def as_centre(centre: Any, name: str) -> ArrayTree:
    """Return a center as arrays of floats.

    Raises
    ------
    TypeError
        If it holds integers: positions are floats.
    """
    for leaf in jax.tree.leaves(centre):
        dtype = jnp.result_type(leaf)
        if not isinstance(leaf, float) and not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(f"{name} must hold floats, as positions do; got {dtype}.")
    return trees.as_floats(centre, "centre")


def probability(log_ratio: Array) -> Array:
    """Return ``min(1, exp(log_ratio))``; zero for a difference of infinities."""
    return jnp.where(jnp.isnan(log_ratio), 0, jnp.exp(jnp.minimum(log_ratio, 0)))
