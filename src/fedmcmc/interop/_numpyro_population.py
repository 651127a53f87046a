"""The distribution of normal local sites given shared ones, by sums of statistics."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from numpyro import distributions as dist

from fedmcmc._types import ArrayTree, LatentSums, Population, Static
from fedmcmc.interop import _numpyro_trace as tracing
from fedmcmc.interop._dependence import Tracer
from fedmcmc.interop._numpyro_inputs import position_shapes
from fedmcmc.interop._numpyro_structure import Structure

Position = dict[str, Any]
TraceFn = Callable[[Position, Position], tracing.Trace]
"""``(position, latent) -> trace``, on rows that do not matter."""

_SHARED, _LOCAL = frozenset({"shared"}), frozenset({"local"})


def population_of(
    trace_fn: TraceFn, terms_fn: Callable[..., Array], rows: ArrayTree, structure: Structure
) -> Population | None:
    """Return the population of local sites that are normal given shared ones, else ``None``.

    ``None`` too where their distribution depends on no shared site, or on a local one. `terms_fn`
    is ``(position, latent, rows) -> [num]``, the terms of rows.
    """
    shared, local = position_shapes(structure.shapes), position_shapes(structure.local)
    if set(structure.local_prior) != set(structure.local):
        return None  # a Jacobian, or a factor
    normal = True

    def parameters(position: Position, latent: Position) -> dict[str, tuple[Array, Array]]:
        nonlocal normal
        sites, found = trace_fn(position, latent), {}
        for name, shape in structure.local.items():
            site = sites[name]
            one = _normal(site["fn"], shape)
            if one is None or site["scale"] is not None:
                normal = False
            else:
                found[name] = one
        return found

    closed = jax.make_jaxpr(parameters)(shared, local)
    if not normal:
        return None
    labels = [(("shared", i), _SHARED) for i in range(len(shared))]
    labels += [(("local", i), _LOCAL) for i in range(len(local))]
    flags: frozenset = frozenset().union(*(x.flags for x in Tracer().outputs(closed, labels)))
    if flags != _SHARED:
        return None
    anywhere = {name: jnp.zeros(like.shape, like.dtype) for name, like in local.items()}

    def origin_fn(position: Position) -> Position:
        return {name: loc for name, (loc, _) in parameters(position, anywhere).items()}

    def statistics_fn(latent: Position, origin: Position) -> dict[str, tuple[Array, Array]]:
        away = {name: x - origin[name] for name, x in latent.items()}
        return {name: (x, _square(x, multivariate[name])) for name, x in away.items()}

    def logdensity_fn(position: Position, sums: LatentSums) -> Array:
        terms, num = [], sums.num_latents
        for name, (loc, scale) in parameters(position, anywhere).items():
            (first, second), (_, lowest) = sums.total[name], sums.rounding[name]
            units = _by_factor if multivariate[name] else _by_scale
            mean, first, second, lowest, log_scale = units(
                scale, loc - sums.origin[name], first, second, lowest
            )
            # Both terms are squares, though a difference of rounded sums may be below zero.
            within = jnp.maximum(second - first**2 / num, lowest)
            square = jnp.sum(within + num * (mean - first / num) ** 2)
            terms.append(-num * jnp.sum(log_scale) - square / 2)
        return sum(terms[1:], terms[0])

    def transport_fn(latent: Position, position: Position, other: Position) -> Position:
        before, after = parameters(position, anywhere), parameters(other, anywhere)
        moved = {}
        for name, x in latent.items():
            (loc, scale), (new_loc, new_scale) = before[name], after[name]
            if multivariate[name]:
                away = jax.scipy.linalg.solve_triangular(scale, x - loc, lower=True)
                moved[name] = new_loc + new_scale @ away
            else:
                moved[name] = new_loc + (x - loc) / scale * new_scale
        return moved

    shapes = jax.eval_shape(parameters, shared, local)
    multivariate = {name: loc.shape != scale.shape for name, (loc, scale) in shapes.items()}
    terms = jax.make_jaxpr(terms_fn)(shared, local, rows)
    flags_of = [frozenset({i}) for i in range(len(shared))]
    flags_of += [frozenset()] * (len(terms.in_avals) - len(shared))
    (of_rows,) = Tracer().outputs(terms, [(i, flags) for i, flags in enumerate(flags_of)])
    seen = tuple(i in of_rows.flags for i in range(len(shared)))
    return Population(
        statistics_fn,
        logdensity_fn,
        origin_fn=origin_fn,
        of_rows=Static(seen),
        transport_fn=transport_fn,
    )


def _normal(fn: Any, shape: tuple[int, ...]) -> tuple[Array, Array] | None:
    """Return location and scale, ``[*shape]`` each, or the scale's lower factor ``[k, k]``."""
    fn = tracing.bare(fn)
    if type(fn) is dist.Normal:
        return jnp.broadcast_to(fn.loc, shape), jnp.broadcast_to(fn.scale, shape)
    if type(fn) is dist.MultivariateNormal and len(shape) == 1 and fn.scale_tril.ndim == 2:
        return jnp.broadcast_to(fn.loc, shape), fn.scale_tril
    return None


def _square(latent: Array, multivariate: bool) -> Array:
    return jnp.outer(latent, latent) if multivariate else latent**2


def _by_scale(
    scale: Array, mean: Array, first: Array, second: Array, lowest: Array
) -> tuple[Array, ...]:
    """Return numbers in units of scales, elementwise, and the scales' logarithms."""
    return mean / scale, first / scale, second / scale**2, lowest / scale**2, jnp.log(scale)


def _by_factor(
    factor: Array, mean: Array, first: Array, second: Array, lowest: Array
) -> tuple[Array, ...]:
    """Return numbers in the coordinates of a lower factor, and its diagonal's logarithm.

    Of the matrix `second` the diagonal there, and of the bound `lowest` that of its own diagonal.
    """

    def solve(x: Array) -> Array:
        return jax.scipy.linalg.solve_triangular(factor, x, lower=True)

    diagonal = jnp.diagonal(solve(solve(second).T))
    bound = solve(jnp.eye(factor.shape[0], dtype=factor.dtype)) ** 2 @ jnp.diagonal(lowest)
    return solve(mean), solve(first), diagonal, bound, jnp.log(jnp.diagonal(factor))
