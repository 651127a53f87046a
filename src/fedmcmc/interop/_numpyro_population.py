"""Distribution of normal local sites given shared sites, computed from sums of statistics."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from numpyro import distributions as dist
from numpyro.distributions import Distribution

from fedmcmc.interop import _numpyro_trace as tracing
from fedmcmc.interop._dependence import NO_FLAGS, output_flags
from fedmcmc.interop._numpyro_structure import Structure
from fedmcmc.pytrees import trees
from fedmcmc.types import ArrayTree, LatentSums, Population, Static

Position = dict[str, Any]
TraceFn = Callable[[Position, Position], tracing.Trace]
"""``(position, latent) -> trace``, on arbitrary rows."""

_SHARED, _LOCAL = frozenset({"shared"}), frozenset({"local"})


def population_of(
    trace_fn: TraceFn, terms_fn: Callable[..., Array], rows: ArrayTree, structure: Structure
) -> Population | None:
    """Return the population of local sites that are normal given shared sites, or ``None``.

    ``None`` also if their distribution depends on a local site, or on no shared site. `terms_fn` is
    ``(position, latent, rows) -> [num_rows]``, the log likelihood of each row.
    """
    shared = tracing.position_shapes(structure.shared_shapes)
    local = tracing.position_shapes(structure.local_shapes)
    if set(structure.local_prior) != set(structure.local_shapes):
        return None  # a Jacobian, or a factor
    is_normal = True

    def parameters(position: Position, latent: Position) -> dict[str, tuple[Array, Array]]:
        nonlocal is_normal
        sites, by_site = trace_fn(position, latent), {}
        for name, shape in structure.local_shapes.items():
            site = sites[name]
            location_and_scale = _location_and_scale(site["fn"], shape)
            if location_and_scale is None or site["scale"] is not None:
                is_normal = False
            else:
                by_site[name] = location_and_scale
        return by_site

    flags = output_flags(parameters, (shared, local), (_SHARED, _LOCAL))
    if not is_normal or NO_FLAGS.union(*jax.tree.leaves(flags)) != _SHARED:
        return None
    zeros = trees.zeros_like(local)

    def origin_fn(position: Position) -> Position:
        return {name: loc for name, (loc, _) in parameters(position, zeros).items()}

    def statistics_fn(latent: Position, origin: Position) -> dict[str, tuple[Array, Array]]:
        away = {name: x - origin[name] for name, x in latent.items()}
        return {
            name: (x, jnp.outer(x, x) if multivariate[name] else x**2) for name, x in away.items()
        }

    def logdensity_fn(position: Position, sums: LatentSums) -> Array:
        terms, num = [], sums.num_latents
        for name, (loc, scale) in parameters(position, zeros).items():
            (total, squares), (_, lowest) = sums.total[name], sums.rounding[name]
            standardize = _by_factor if multivariate[name] else _by_scale
            mean, total, squares, lowest, log_scale = standardize(
                scale, loc - sums.origin[name], total, squares, lowest
            )
            # Both terms are sums of squares, but a difference of rounded sums may be negative.
            within = jnp.maximum(squares - total**2 / num, lowest)
            square = jnp.sum(within + num * (mean - total / num) ** 2)
            terms.append(-num * jnp.sum(log_scale) - square / 2)
        return sum(terms[1:], terms[0])

    shapes = jax.eval_shape(parameters, shared, local)
    multivariate = {name: loc.shape != scale.shape for name, (loc, scale) in shapes.items()}
    index_flags = {name: frozenset({i}) for i, name in enumerate(sorted(shared))}
    reached = output_flags(terms_fn, (shared, local, rows), (index_flags, NO_FLAGS, NO_FLAGS))
    return Population(
        statistics_fn,
        logdensity_fn,
        origin_fn=origin_fn,
        row_parameters=Static(tuple(i in reached for i in range(len(shared)))),
    )


def _location_and_scale(fn: Distribution, shape: tuple[int, ...]) -> tuple[Array, Array] | None:
    """Return location and scale, ``[*shape]`` each, of a normal distribution, otherwise ``None``.

    The scale of a multivariate normal distribution is its lower Cholesky factor ``[k, k]``.
    """
    fn = tracing.bare(fn)
    if type(fn) is dist.Normal:
        return jnp.broadcast_to(fn.loc, shape), jnp.broadcast_to(fn.scale, shape)
    if type(fn) is dist.MultivariateNormal and len(shape) == 1 and fn.scale_tril.ndim == 2:
        return jnp.broadcast_to(fn.loc, shape), fn.scale_tril
    return None


def _by_scale(
    scale: Array, mean: Array, total: Array, squares: Array, lowest: Array
) -> tuple[Array, ...]:
    """Return the arguments in units of scales, elementwise, and the logarithms of the scales."""
    return mean / scale, total / scale, squares / scale**2, lowest / scale**2, jnp.log(scale)


def _by_factor(
    factor: Array, mean: Array, total: Array, squares: Array, lowest: Array
) -> tuple[Array, ...]:
    """Return the arguments in the coordinates of a lower factor, and its diagonal's logarithm.

    `squares` and `lowest` are matrices; only diagonals in the new coordinates are returned,
    and of `lowest` only the diagonal is used.
    """

    def solve(x: Array) -> Array:
        return jax.scipy.linalg.solve_triangular(factor, x, lower=True)

    diagonal = jnp.diagonal(solve(solve(squares).T))
    bound = solve(jnp.eye(factor.shape[0], dtype=factor.dtype)) ** 2 @ jnp.diagonal(lowest)
    return solve(mean), solve(total), diagonal, bound, jnp.log(jnp.diagonal(factor))
