"""Sums of the latents' statistics, stored by the server and updated by the clients' changes.

Sums of squares keep their digits only if the origin is near the latents, and running sums collect
rounding errors. In addition to the changes of the current sums, the clients therefore report sums
around a newer origin: the sums themselves in their first message of a recount, changes in later
messages. When all clients have been counted, the new sums replace the current ones, and the next
recount starts, around the origin that is then expected. If all clients take part, every round is a
recount.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc.hierarchy import Groups, made_up_rows
from fedmcmc.pytrees import trees
from fedmcmc.types import ArrayTree, Federation, LatentSums, Local, Population, Posterior, compiled

MAX_ROUNDINGS = 8
"""Bound on the error of a running sum, in rounding errors of its largest value."""
NUM_PROBES = 8
"""Number of made-up rows and latents with which a population is checked."""


class Origins(NamedTuple):
    """Origins of the sums, part of a broadcast."""

    now: ArrayTree  # of the current sums
    next: ArrayTree  # of the recount
    recount: Array  # [] int32, number of the recount


class Changes(NamedTuple):
    """Changes of a client's sums."""

    now: ArrayTree
    next: ArrayTree  # in the recount; a client's first message there holds the sums
    counted: ArrayTree  # [], one in this first message, otherwise zero


class RunningSum(NamedTuple):
    """Sum of statistics, and the largest absolute values that its numbers have had."""

    total: ArrayTree
    largest: ArrayTree

    def plus(self, change: ArrayTree) -> "RunningSum":
        """Return the sum after a change."""
        total = trees.add(self.total, change)
        sizes = jax.tree.map(jnp.abs, total)
        return RunningSum(total, jax.tree.map(jnp.maximum, self.largest, sizes))


class Sums(NamedTuple):
    """Sums that the server stores."""

    now: RunningSum
    next: RunningSum  # of the recount
    num_counted: Array  # [], clients in the recount
    num_groups: Array  # [], groups of all clients

    def latent_sums(self, origin: ArrayTree) -> LatentSums:
        """Return the current sums, which are around `origin`, with their rounding errors."""
        rounding = jax.tree.map(
            lambda leaf: MAX_ROUNDINGS * jnp.finfo(leaf.dtype).eps * leaf, self.now.largest
        )
        return LatentSums(self.num_groups, self.now.total, origin, rounding)

    def updated(
        self, changes: Changes, origins: Origins, num_clients: Array
    ) -> tuple["Sums", Origins, Array]:
        """Return sums and origins after a round, and a flag for the end of a recount.

        At the end of a recount, the caller replaces `Origins.next`.
        """
        now, next_ = self.now.plus(changes.now), self.next.plus(changes.next)
        num_counted = self.num_counted + changes.counted
        ends = num_counted == num_clients
        sums = Sums(
            trees.select(ends, next_, now),
            trees.select(ends, trees.zeros_like(next_), next_),
            jnp.where(ends, 0, num_counted),
            self.num_groups,
        )
        origin = trees.select(ends, origins.next, origins.now)
        return sums, Origins(origin, origins.next, origins.recount + ends), ends


def init_sums(total: ArrayTree, num_groups: Array) -> Sums:
    """Return the server's initial sums."""
    zeros = trees.zeros_like(total)
    empty = RunningSum(zeros, zeros)
    return Sums(empty.plus(total), empty, jnp.zeros_like(num_groups), num_groups)


def compute_origin(population: Population, position: ArrayTree) -> ArrayTree:
    """Return the expected place of the latents, or ``()``."""
    return () if population.origin_fn is None else population.origin_fn(position)


def sum_statistics(
    population: Population, groups: Groups, latents: ArrayTree, origin: ArrayTree
) -> ArrayTree:
    """Return the sums of the statistics over a client's groups."""
    terms = jax.vmap(lambda latent: population.statistics_fn(latent, origin))(latents)

    def total(leaf: Array) -> Array:
        present = groups.present.reshape(-1, *(1,) * (leaf.ndim - 1))
        return jnp.sum(jnp.where(present, leaf, 0), axis=0)

    return jax.tree.map(total, terms)


def compute_changes(
    population: Population,
    groups: Groups,
    before: ArrayTree,
    after: ArrayTree,
    origins: Origins,
    last_recount: Array,
) -> Changes:
    """Return a client's changes; `last_recount` is the last recount that it took part in."""
    is_new = last_recount != origins.recount

    def change(origin: ArrayTree, starts: Array | bool) -> ArrayTree:
        old = sum_statistics(population, groups, before, origin)
        reported = trees.select(jnp.asarray(starts), trees.zeros_like(old), old)
        return trees.subtract(sum_statistics(population, groups, after, origin), reported)

    counted = is_new.astype(jnp.result_type(float))
    return Changes(change(origins.now, False), change(origins.next, is_new), counted)


def check_population(
    posterior: Posterior, position: ArrayTree, federation: Federation, row_indices: np.ndarray
) -> None:
    """Raise `ValueError` if the population does not fit the model.

    The check uses made-up latents and rows, and skips values that are not finite there.
    """
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(posterior)):
        return
    local: Any = posterior.local
    rng = np.random.default_rng(0)

    def near(leaf: Any) -> np.ndarray:
        center = 0.0 if isinstance(leaf, jax.core.Tracer) else np.asarray(leaf)
        return np.asarray(center + 0.3 * rng.normal(size=leaf.shape), leaf.dtype)

    with jax.ensure_compile_time_eval():
        rows = made_up_rows(federation.rows, NUM_PROBES, rng)
    latents = jax.tree.map(
        lambda leaf: rng.normal(size=(NUM_PROBES, *leaf.shape)).astype(leaf.dtype), local.like.tree
    )
    place, new_place = (jax.tree.map(near, position) for _ in range(2))
    gradient, priors, densities = _probe_densities.now(local, place, new_place, latents, rows)
    flat = np.array(gradient)
    flat[row_indices] = 0
    names = trees.element_names(position)
    undeclared = [name for name, x in zip(names, flat, strict=True) if np.isfinite(x) and x != 0]
    if undeclared:
        raise ValueError(
            f"The log likelihood of rows depends on {undeclared[0]}, but the "
            "population's row_parameters is false for it."
        )
    expected, actual = np.diff(priors)[0], np.diff(densities)[0]
    is_finite = np.isfinite([expected, actual]).all()
    if is_finite and abs(expected - actual) > 1e-2 * (1 + abs(expected)):
        raise ValueError(
            f"The population's logdensity_fn is not the sum of the latents' log priors: between "
            f"two positions, with made-up latents, the sum changes by {expected:.4g} and "
            f"logdensity_fn by {actual:.4g}."
        )


@compiled
def _probe_densities(
    local: Local, position: ArrayTree, new_position: ArrayTree, latents: ArrayTree, rows: ArrayTree
) -> tuple[Array, Array, Array]:
    """Return the gradient ``[d]`` of the log likelihood, sums of log priors, and `logdensity_fn`.

    The gradient is at `position`, the sums and `logdensity_fn` are at both positions, ``[2]``.
    """
    population: Any = local.population
    gradient = jax.grad(lambda x: jnp.sum(local.loglikelihood_fn(x, latents, rows)))(position)
    origin = compute_origin(population, position)
    terms = jax.vmap(lambda latent: population.statistics_fn(latent, origin))(latents)
    total = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), terms)
    num = jax.tree.leaves(latents)[0].shape[0]
    sums = init_sums(total, jnp.asarray(float(num))).latent_sums(origin)
    priors, densities = (
        jnp.stack([fn(x) for x in (position, new_position)])
        for fn in (
            lambda x: jnp.sum(jax.vmap(lambda latent: local.logprior_fn(x, latent))(latents)),
            lambda x: population.logdensity_fn(x, sums),
        )
    )
    return trees.ravel(gradient), priors, densities
