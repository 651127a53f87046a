"""Sums of latents' statistics that a server keeps while their owners say how these change.

Sums of squares keep their digits only around an origin near the latents, and running sums gather
roundings. So clients count anew all the time: beside the changes of the sums that the server uses
they send sums around a newer origin, each client its own sums in the first message of a recount and
their changes from then on. Once everyone has been counted the new sums take the old ones' place,
and the next recount begins, around where the latents are expected then. If all clients take part,
every round is a recount.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._types import ArrayTree, Federation, LatentSums, Local, Population, Posterior, compiled
from fedmcmc.hierarchy import Groups, made_up_rows
from fedmcmc.pytrees import trees

ROUNDINGS = 8
"""By so many roundings of its largest value a running sum may be wrong."""


class Origins(NamedTuple):
    """What clients have to know to say how sums have changed; part of a broadcast.

    Attributes
    ----------
    now
        That of the sums in use.
    next
        That of the recount.
    recount
        ``[]`` int32, which one it is.
    """

    now: ArrayTree
    next: ArrayTree
    recount: Array


class Changes(NamedTuple):
    """A client's message on sums of its latents' statistics.

    Attributes
    ----------
    now
        By how much those in use have changed.
    next
        The same of those of the recount, of which nothing has been said before a client's first
        message in it.
    counted
        ``[]``, one in that first message, else zero.
    """

    now: ArrayTree
    next: ArrayTree
    counted: Any


class Running(NamedTuple):
    """A running sum of statistics, and the sizes that its numbers have had at most."""

    total: ArrayTree
    largest: ArrayTree

    def plus(self, change: ArrayTree) -> "Running":
        """Return the sum after a change."""
        total = trees.add(self.total, change)
        sizes = jax.tree.map(jnp.abs, total)
        return Running(total, jax.tree.map(jnp.maximum, self.largest, sizes))


class Sums(NamedTuple):
    """What a server keeps.

    Attributes
    ----------
    now
        Sums in use.
    next
        Those of the recount.
    num_counted
        ``[]``, clients in it.
    num_groups
        ``[]``, of all clients.
    """

    now: Running
    next: Running
    num_counted: Array
    num_groups: Array

    def known(self, origin: ArrayTree) -> LatentSums:
        """Return what is known of the latents, from sums around `origin`."""
        rounding = jax.tree.map(
            lambda leaf: ROUNDINGS * jnp.finfo(leaf.dtype).eps * leaf, self.now.largest
        )
        return LatentSums(self.num_groups, self.now.total, origin, rounding)

    def after(
        self, said: Changes, origins: Origins, num_clients: Array
    ) -> tuple["Sums", Origins, Array]:
        """Return sums and origins after a round, and whether a recount has ended with it.

        Then the next origin is the last one still: it is of the parameters that are drawn next.
        """
        now, next_ = self.now.plus(said.now), self.next.plus(said.next)
        num_counted = self.num_counted + said.counted
        ends = num_counted == num_clients
        sums = Sums(
            trees.select(ends, next_, now),
            trees.select(ends, trees.zeros_like(next_), next_),
            jnp.where(ends, 0, num_counted),
            self.num_groups,
        )
        origin = trees.select(ends, origins.next, origins.now)
        return sums, Origins(origin, origins.next, origins.recount + ends), ends


def first_sums(total: ArrayTree, num_groups: Array) -> Sums:
    """Return what a server begins with."""
    nothing = trees.zeros_like(total)
    empty = Running(nothing, nothing)
    return Sums(empty.plus(total), empty, jnp.zeros_like(num_groups), num_groups)


def origin_of(population: Population, position: ArrayTree) -> ArrayTree:
    """Return where latents are expected, or ``()``."""
    return () if population.origin_fn is None else population.origin_fn(position)


def sums_of(
    population: Population, groups: Groups, latents: ArrayTree, origin: ArrayTree
) -> ArrayTree:
    """Return the sums of the statistics over a client's groups."""
    each = jax.vmap(lambda latent: population.statistics_fn(latent, origin))(latents)

    def total(leaf: Array) -> Array:
        present = groups.present.reshape(-1, *(1,) * (leaf.ndim - 1))
        return jnp.sum(jnp.where(present, leaf, 0), axis=0)

    return jax.tree.map(total, each)


def sums_like(population: Population, latent: ArrayTree, position: ArrayTree) -> ArrayTree:
    """Return the shapes of sums of statistics."""

    def sums(one: ArrayTree, at: ArrayTree) -> ArrayTree:
        return population.statistics_fn(one, origin_of(population, at))

    return jax.eval_shape(sums, latent, position)


def changes_of(
    population: Population,
    groups: Groups,
    before: ArrayTree,
    after: ArrayTree,
    origins: Origins,
    last: Array,
) -> Changes:
    """Return what a client says when its latents have moved; `last` is where it counted last."""
    first = last != origins.recount

    def change(origin: ArrayTree, anew: Array | bool) -> ArrayTree:
        old = sums_of(population, groups, before, origin)
        said = trees.select(jnp.asarray(anew), trees.zeros_like(old), old)
        return trees.subtract(sums_of(population, groups, after, origin), said)

    counted = first.astype(jnp.result_type(float))
    return Changes(change(origins.now, False), change(origins.next, first), counted)


def check_population(
    posterior: Posterior, position: ArrayTree, federation: Federation, rows_at: np.ndarray
) -> None:
    """Raise `ValueError` unless statistics say all that shared parameters do to latents and rows.

    Looks at made-up latents and rows: a server, which checks, has no others. What is not finite
    there tells nothing.
    """
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(posterior)):
        return
    local: Any = posterior.local
    rng, num = np.random.default_rng(0), 8

    def near(leaf: Any) -> np.ndarray:
        center = 0.0 if isinstance(leaf, jax.core.Tracer) else np.asarray(leaf)
        return np.asarray(center + 0.3 * rng.normal(size=leaf.shape), leaf.dtype)

    with jax.ensure_compile_time_eval():
        made_up = made_up_rows(federation.rows, num, rng)
    latents = jax.tree.map(
        lambda leaf: rng.normal(size=(num, *leaf.shape)).astype(leaf.dtype), local.like.tree
    )
    first, other = (jax.tree.map(near, position) for _ in range(2))
    slope, priors, densities = _made_up_densities.now(local, first, other, latents, made_up)
    flat = np.array(slope)
    names = trees.element_names(position)
    flat[rows_at] = 0
    seen = [name for name, x in zip(names, flat, strict=True) if np.isfinite(x) and x != 0]
    if seen:
        raise ValueError(
            f"The log likelihood of rows depends on {seen[0]}, of which the population's of_rows "
            f"says that it does not."
        )
    wanted, found = np.diff(priors)[0], np.diff(densities)[0]
    if np.isfinite([wanted, found]).all() and abs(wanted - found) > 1e-2 * (1 + abs(wanted)):
        raise ValueError(
            f"The population's logdensity_fn is not the sum of the latents' log priors: between "
            f"two positions that changes by {wanted:.4g}, and by its statistics by {found:.4g} (of "
            f"made-up latents)."
        )


@compiled
def _made_up_densities(
    local: Local, first: ArrayTree, other: ArrayTree, latents: ArrayTree, rows: ArrayTree
) -> tuple[Array, Array, Array]:
    """Return the log likelihood's gradient, the log priors and what statistics say of those.

    The gradient at the `first` position, ``[d]``, the others at both.
    """
    population: Any = local.population
    slope = jax.grad(lambda at: jnp.sum(local.loglikelihood_fn(at, latents, rows)))(first)
    origin = origin_of(population, first)
    each = jax.vmap(lambda one: population.statistics_fn(one, origin))(latents)
    total = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), each)
    num = jax.tree.leaves(latents)[0].shape[0]
    sums = first_sums(total, jnp.asarray(float(num))).known(origin)
    priors, densities = (
        jnp.stack([fn(at) for at in (first, other)])
        for fn in (
            lambda at: jnp.sum(jax.vmap(lambda one: local.logprior_fn(at, one))(latents)),
            lambda at: population.logdensity_fn(at, sums),
        )
    )
    return trees.ravel(slope), priors, densities
