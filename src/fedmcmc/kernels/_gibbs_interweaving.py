"""Interweaving: shared parameters are proposed with all latents going along.

All clients are asked for how much likelier rows and latents are there. Latents that are to go along
do so in the round's last exchange, so that no client may be lost in between.

There are two ways to go along, which help where the other does not (Yu and Meng 2011). A latent
stays as far from the population's mean, in units of its spread, as it was: for groups of which rows
say little. Or it makes up for what a slope changes, so that predictions stay: for slopes of what
varies between groups, of which rows say much.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._types import (
    ArrayTree,
    Broadcast,
    Client,
    Phase,
    StepInfo,
    Uncompressed,
    register_dataclass,
)
from fedmcmc.hierarchy import Groups, Locals, groups_of
from fedmcmc.kernels._gibbs_walks import NUM_CANDIDATES, Walk, candidates, choose
from fedmcmc.kernels._questions import (
    IMPOSSIBLE,
    LOG_ZERO_THRESHOLD,
    below_range,
    impossible_in_sum,
)
from fedmcmc.kernels._shared import report
from fedmcmc.pytrees import in_single_precision, trees

RIDGE = 1e-3
"""Of the rows' information about a latent, added where latents are to make up for slopes."""


class Compared(NamedTuple):
    """A client's answer: differences of log densities, ``[num]``, and a one to count."""

    differences: Any
    one: Any

    def to_range(self, limit: float) -> "Compared":
        """Return the message for a secure sum of numbers up to `limit`; see `Ranged`."""
        lowest = -trees.cast(limit, self.differences)
        impossible = below_range(self.differences, limit)
        return self._replace(differences=jnp.where(impossible, lowest, self.differences))

    def from_range(self, limit: float) -> "Compared":
        """Return a sum of such messages as the server reads it."""
        impossible = impossible_in_sum(self.differences, limit)
        lowest = trees.cast(IMPOSSIBLE, self.differences)
        return self._replace(differences=jnp.where(impossible, lowest, self.differences))


class Proposed(NamedTuple):
    """What clients have to know of a walk, part of a broadcast.

    Attributes
    ----------
    shifts
        How far candidates are from where the chain is, ``[num, m]``.
    came_from
        The position before one was chosen.
    """

    shifts: Array
    came_from: ArrayTree


@register_dataclass
@dataclass(frozen=True, eq=False)
class GoingAlong(Phase):
    """Asks how much likelier rows and latents are at candidates that take the latents along."""

    kernel: Any  # the `FederatedGibbs` that asks

    kind: ClassVar[str]
    """Under which the server and the broadcast have its walk."""

    def places(self, position: ArrayTree) -> np.ndarray:
        """Return where the parameters that it moves lie in a raveled position (static)."""
        raise NotImplementedError

    def information(self, groups: Groups, position: ArrayTree, latents: ArrayTree) -> Array:
        """Return what rows and latents tell of these parameters at the start, ``[m, m]``."""
        raise NotImplementedError

    def taken(
        self, latents: ArrayTree, own: Locals, position: ArrayTree, other: ArrayTree
    ) -> ArrayTree:
        """Return latents, leaves ``[G, *event]``, that went along to another position."""
        raise NotImplementedError

    def latents_difference(
        self,
        groups: Groups,
        latents: ArrayTree,
        there: ArrayTree,
        position: ArrayTree,
        other: ArrayTree,
    ) -> Array:
        """Return by how much the log density of latents that went along has changed, ``[]``."""
        raise NotImplementedError

    def shifted(self, position: ArrayTree, shift: Array) -> ArrayTree:
        """Return a position whose parameters are so far from the given ones, ``[m]``."""
        flat = trees.ravel(position)
        flat = flat.at[self.places(position)].add(shift.astype(flat.dtype))
        return trees.cast_like(trees.unravel(flat, position), position)

    @in_single_precision
    def step(
        self, draws: ArrayTree, broadcast: Broadcast, client_state: Locals, client: Client
    ) -> tuple[Uncompressed, ArrayTree, StepInfo]:
        kernel, position = self.kernel, broadcast.position
        groups = groups_of(kernel.local, client)
        latents = gone_along(kernel, client_state, broadcast, before=self)
        flat, shifts = groups.as_flat(latents), broadcast.extra.walks[self.kind].shifts

        @jax.vmap
        def difference(shift: Array) -> Array:
            other = self.shifted(position, shift)
            there = self.taken(latents, client_state, position, other)
            rows = groups.rows_difference(other, position, groups.as_flat(there), flat)
            return rows + self.latents_difference(groups, latents, there, position, other)

        dtype, values = jnp.result_type(float), difference(shifts)
        values = jnp.where(jnp.isfinite(values), values, IMPOSSIBLE).astype(dtype)
        message = Compared(values, jnp.ones((), dtype))
        down = trees.num_bits(position) + trees.num_bits(shifts)
        info = report(message, jnp.zeros(()), bits_down=jnp.asarray(down, jnp.int32))
        return Uncompressed(message), client_state, info

    def message_like(self, like: Broadcast) -> Uncompressed:
        dtype = jnp.result_type(float)
        values = jax.ShapeDtypeStruct((NUM_CANDIDATES,), dtype)
        return Uncompressed(Compared(values, jax.ShapeDtypeStruct((), dtype)))

    def prepare_server(self, rng_key: Array, like: Broadcast) -> Array:
        return jax.random.uniform(rng_key, (), jnp.result_type(float))

    @in_single_precision
    def aggregate(
        self, rng_key: ArrayTree, broadcast: Broadcast, server_state: Any, total: Uncompressed
    ) -> tuple[Broadcast, Any, ArrayTree]:
        kernel, position, said = self.kernel, broadcast.position, total.value
        uniform = self.prepare_server(rng_key, broadcast) if trees.is_key(rng_key) else rng_key
        proposed = broadcast.extra.walks[self.kind]
        prior_fn = kernel.posterior.logprior_fn

        @jax.vmap
        def prior(shift: Array) -> Array:
            return prior_fn(self.shifted(position, shift)) - prior_fn(position)

        priors = prior(proposed.shifts)
        possible = (said.differences > LOG_ZERO_THRESHOLD) & jnp.isfinite(priors)
        which, moved, walk = choose(
            server_state.walks[self.kind],
            jnp.where(possible, said.differences + priors, -jnp.inf),
            said.one == server_state.num_clients,
            uniform,
            broadcast.round < kernel.num_adapt,
        )
        other = self.shifted(position, proposed.shifts[which])
        walks = broadcast.extra.walks | {self.kind: proposed._replace(came_from=position)}
        extra = broadcast.extra._replace(walks=walks)
        server = server_state._replace(walks=server_state.walks | {self.kind: walk})
        position = trees.select(moved, other, position)
        return broadcast._replace(position=position, extra=extra), server, ()


@register_dataclass
@dataclass(frozen=True, eq=False)
class Rescaling(GoingAlong):
    """Parameters of the population, with latents as far from its mean in units of its spread."""

    kind = "rescaling"

    def places(self, position: ArrayTree) -> np.ndarray:
        return self.kernel.other_places(position)

    def information(self, groups: Groups, position: ArrayTree, latents: ArrayTree) -> Array:
        kernel, places = self.kernel, self.places(position)
        every = trees.ravel(position)

        def terms_fn(at: Array, own: ArrayTree, rows: ArrayTree) -> Array:
            other = self.shifted(position, at)
            moved = transported(kernel, own, position, other)
            terms: Array = kernel.local.loglikelihood_fn(other, moved, rows)
            return terms

        none = jnp.zeros(len(places), every.dtype)
        found: Array = kernel.information(groups, latents, none, terms_fn)
        return found

    def taken(
        self, latents: ArrayTree, own: Locals, position: ArrayTree, other: ArrayTree
    ) -> ArrayTree:
        return transported(self.kernel, latents, position, other)

    def latents_difference(
        self,
        groups: Groups,
        latents: ArrayTree,
        there: ArrayTree,
        position: ArrayTree,
        other: ArrayTree,
    ) -> Array:
        # In units of their spread latents have one density wherever the parameters are.
        return jnp.zeros(())


@register_dataclass
@dataclass(frozen=True, eq=False)
class Recentering(GoingAlong):
    """Parameters of rows and the population's means, with latents that make up for the former."""

    kind = "recentering"

    def places(self, position: ArrayTree) -> np.ndarray:
        return np.arange(trees.num_elements(position))

    def information(self, groups: Groups, position: ArrayTree, latents: ArrayTree) -> Array:
        return information_along(self.kernel, groups, position, latents)

    def taken(
        self, latents: ArrayTree, own: Locals, position: ArrayTree, other: ArrayTree
    ) -> ArrayTree:
        kernel = self.kernel
        rows = kernel.row_places(position)
        change = (trees.ravel(other) - trees.ravel(position))[rows]
        flat = jax.vmap(trees.ravel)(latents)
        moved = flat - own.kernel.slopes @ change.astype(flat.dtype)
        return jax.vmap(lambda one: trees.unravel(one, kernel.local.like.tree))(moved)

    def latents_difference(
        self,
        groups: Groups,
        latents: ArrayTree,
        there: ArrayTree,
        position: ArrayTree,
        other: ArrayTree,
    ) -> Array:
        density = jax.vmap(self.kernel.local.logprior_fn, (None, 0))
        change = density(other, there) - density(position, latents)
        return jnp.sum(jnp.where(groups.present, change, 0))


def transported(
    kernel: Any, latents: ArrayTree, position: ArrayTree, other: ArrayTree
) -> ArrayTree:
    """Return latents that are as far from the population's mean, in units of its spread."""
    transport_fn = kernel.population.transport_fn
    assert transport_fn is not None
    return jax.vmap(lambda latent: transport_fn(latent, position, other))(latents)


def gone_along(
    kernel: Any, own: Locals, broadcast: Broadcast, before: GoingAlong | None = None
) -> ArrayTree:
    """Return a client's latents after the walks of this round, or those before one of them."""
    ways: tuple[GoingAlong, ...] = kernel.ways_along
    if before is not None:
        ways = ways[: [way.kind for way in ways].index(before.kind)]
    latents, walks = own.latents, broadcast.extra.walks
    ends = [walks[way.kind].came_from for way in ways[1:]] + [broadcast.position]
    for way, new in zip(ways, ends, strict=False):
        old = walks[way.kind].came_from
        went = jnp.any(trees.ravel(old) != trees.ravel(new))
        latents = trees.select(went, way.taken(latents, own, old, new), latents)
    return latents


def nothing_proposed(walks: dict[str, Walk], position: ArrayTree) -> dict[str, Proposed]:
    """Return what is broadcast before the first candidates: all are where the chain is."""
    shape = {kind: (NUM_CANDIDATES, walk.factor.shape[0]) for kind, walk in walks.items()}
    dtype = jnp.result_type(float)
    return {kind: Proposed(jnp.zeros(shape[kind], dtype), position) for kind in walks}


def proposed(kernel: Any, rng_key: Array, position: ArrayTree, server: Any, extra: Any) -> Any:
    """Return what a server keeps and broadcasts, with new candidates of all walks."""
    walks, said = {}, {}
    for i, (kind, walk) in enumerate(sorted(server.walks.items())):
        walks[kind], shifts = candidates(walk, jax.random.fold_in(rng_key, i))
        said[kind] = Proposed(shifts, position)
    return server._replace(walks=walks), extra._replace(walks=said)


def slopes_of(kernel: Any, groups: Groups, position: ArrayTree, latents: ArrayTree) -> Array:
    """Return by how much latents make up for the parameters of rows, ``[G, k, l]``.

    It is the weighted regression, over a group's rows, of what these parameters multiply on what
    the latent multiplies: for an intercept the group's mean of a covariate.
    """
    own, mixed = _curvatures(kernel, groups, position, groups.as_flat(latents))
    diagonal = jnp.diagonal(own, axis1=-2, axis2=-1)
    ridge = jnp.where(diagonal > 0, RIDGE * diagonal, 1)
    found = jnp.linalg.solve(own + jax.vmap(jnp.diag)(ridge), mixed)
    usable = groups.present[:, None, None] & jnp.isfinite(found)
    return jnp.where(usable, found, 0)


def information_along(
    kernel: Any, groups: Groups, position: ArrayTree, latents: ArrayTree
) -> Array:
    """Return the information of rows and latents where the latter make up for slopes, ``[d, d]``.

    Parameters of which the population's mean does not depend, and rows neither, have none.
    """
    flat, rows = groups.as_flat(latents), kernel.row_places(position)
    every, like = trees.ravel(position), groups.local.like.tree
    slopes = slopes_of(kernel, groups, position, latents)
    to_all = jnp.zeros((rows.size, every.size), every.dtype).at[jnp.arange(rows.size), rows].set(1)

    def of_rows(shift: Array) -> Array:
        other = kernel.placed(position, every[rows] + shift)
        return groups.rows_difference(other, position, flat - slopes @ shift, flat)

    known = -jax.hessian(of_rows)(jnp.zeros(rows.size, every.dtype))

    def mean(at: Array) -> Array:
        there = trees.cast_like(trees.unravel(at, position), position)
        return trees.ravel(kernel.population.origin_fn(there))

    def density(one: Array) -> Array:
        return kernel.local.logprior_fn(position, trees.unravel(one, like))

    # How a latent's distance from the mean changes, and its precision.
    away = slopes @ to_all + jax.jacfwd(mean)(every)
    precision = -jax.vmap(jax.hessian(density))(flat)
    present = groups.present[:, None, None]
    each = jnp.where(present, jnp.einsum("gki,gkl,glj->gij", away, precision, away), 0)
    total = to_all.T @ known @ to_all + jnp.sum(each, 0)
    return jnp.where(jnp.isfinite(total), total, 0).astype(jnp.result_type(float))


def _curvatures(
    kernel: Any, groups: Groups, position: ArrayTree, flat: Array
) -> tuple[Array, Array]:
    """Return minus second derivatives of rows by latents, and by these and what is of rows."""
    place = trees.ravel(position)[kernel.row_places(position)]

    def slope(at: Array, own: Array) -> Array:
        other = kernel.placed(position, at)
        return jax.grad(lambda some: groups.rows_difference(other, position, some, flat))(own)

    def column(axis: Array) -> Array:
        direction = jnp.broadcast_to(axis, flat.shape)
        return -jax.jvp(lambda own: slope(place, own), (flat,), (direction,))[1]

    axes = jnp.eye(groups.size, dtype=flat.dtype)
    own = jnp.stack([column(axis) for axis in axes], -1)
    return (own + jnp.swapaxes(own, -1, -2)) / 2, -jax.jacfwd(slope)(place, flat)
