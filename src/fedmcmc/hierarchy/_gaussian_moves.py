"""Refreshes by the normal distribution: exact draws where a latent is normal, Langevin steps else.

Both take the curvature of a group's log density for their unit, so that one number suits groups of
one row and of a thousand.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._checks import positive_integer
from fedmcmc._types import ArrayTree, Client, Local, compiled, register_dataclass
from fedmcmc.hierarchy._latents import (
    Groups,
    cholesky,
    groups_of,
    made_up_rows,
    modes_and_factors,
    solve,
    solve_upper,
)
from fedmcmc.hierarchy._refresh import Here, Moved, Refresh, per_group
from fedmcmc.pytrees import schedules, trees

_MADE_UP = 8
"""Rows that a server makes up to look at a model."""


@register_dataclass
@dataclass(frozen=True, eq=False)
class Ula(Refresh):
    """Langevin steps without a Metropolis test; see `ula`."""

    step_size: Array
    num_steps: int = field(metadata={"static": True})

    @property
    def exact(self) -> bool:
        return False

    def prepare(self, rng_key: Array, num_groups: int, size: int) -> Array:
        shape, dtype = (self.num_steps, size), jnp.result_type(float)
        return jnp.asarray(
            per_group(rng_key, num_groups, lambda key: jax.random.normal(key, shape, dtype))
        )

    def move(self, groups: Groups, draws: ArrayTree, here: Here) -> Moved:
        _, factor = modes_and_factors(groups, here.position)
        step = trees.cast(self.step_size, here.flat)

        def one(now: Array, normals: Array) -> tuple[Array, None]:
            drift = solve(factor, groups.slope(here.position, now))
            noise = solve_upper(factor, normals.astype(now.dtype))
            return now + step * drift + jnp.sqrt(2 * step) * noise, None

        moved, _ = jax.lax.scan(one, here.flat, jnp.swapaxes(draws, 0, 1))
        return Moved(moved, groups.present.astype(moved.dtype), here.kept)


def ula(step_size: float = 0.2, *, num_steps: int = 1) -> Refresh:
    """Take Langevin steps that are never rejected: biased, whose law is known exactly.

    A step is ``latent + step_size * inverse(C) gradient + sqrt(2 * step_size) * inverse(C)**0.5
    normal``, ``C`` the curvature at the group's mode given position and rows. Of a latent that is
    normal given these it leaves the variance ``1 / (1 - step_size / 2)`` times too large, which the
    shared scales of effects inherit: take it for tests and comparisons, and `independence` to
    sample.

    Parameters
    ----------
    step_size
        Relative to the curvature, in (0, 2).
    num_steps
        Steps per round.

    Raises
    ------
    ValueError
        If a number is out of range.
    """
    number = schedules.number(step_size, "step_size", minimum=0.0, strict=True, maximum=2.0)
    if isinstance(number, schedules.Scheduled):
        raise TypeError("step_size of ula must be a number, not a schedule.")
    return Ula(number, positive_integer(num_steps, "num_steps"))


@register_dataclass
@dataclass(frozen=True, eq=False)
class Conjugate(Refresh):
    """A draw of a normal distribution; see `conjugate`."""

    def check(self, local: Local, position: ArrayTree, rows: ArrayTree) -> None:
        _check_quadratic(local, position, rows)

    def prepare(self, rng_key: Array, num_groups: int, size: int) -> Array:
        dtype = jnp.result_type(float)
        return jnp.asarray(
            per_group(rng_key, num_groups, lambda key: jax.random.normal(key, (size,), dtype))
        )

    def move(self, groups: Groups, draws: ArrayTree, here: Here) -> Moved:
        # Newton's step from anywhere ends in the mean.
        flat = here.flat
        slope, curvature = groups.slope_and_curvature(here.position, jnp.zeros_like(flat))
        factor = cholesky(curvature)
        moved = solve(factor, slope) + solve_upper(factor, draws.astype(flat.dtype))
        moved = jnp.where(groups.present[:, None], moved, flat)
        return Moved(moved, groups.present.astype(flat.dtype), here.kept)


def conjugate() -> Refresh:
    """Draw latents that are normal given position and rows, exactly and independently.

    For normal effects of normal outcomes. Its kernel refuses a model whose log density is not
    quadratic in the latents, from two places and made-up rows.
    """
    return Conjugate()


def _check_quadratic(local: Local, position: ArrayTree, rows: ArrayTree) -> None:
    """Raise `ValueError` unless a group's log density has constant second derivatives.

    Where these are not finite, as of rows that no data could hold, they tell nothing.
    """
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(local)):
        return
    rng = np.random.default_rng(0)

    def at(leaf: Any) -> Array:
        # `sample` maps `init` over chains: of a position that is traced the shape suffices.
        if isinstance(leaf, jax.core.Tracer):
            return jnp.zeros(leaf.shape, leaf.dtype)
        return jnp.asarray(leaf)

    with jax.ensure_compile_time_eval():
        some, place = made_up_rows(rows, _MADE_UP, rng), jax.tree.map(at, position)
    dtype = jax.eval_shape(trees.ravel, local.like.tree).dtype
    latents = rng.normal(size=(2, 1, trees.num_elements(local.like.tree))).astype(dtype)
    first, other = _curvatures.now(local, place, some, latents)
    if not (np.isfinite(first).all() and np.isfinite(other).all()):
        return
    unit = np.maximum(np.abs(first), np.abs(other)).max()
    if (gap := np.abs(first - other).max()) > 1e-3 * unit:
        raise ValueError(
            f"The latents of this model are not normal given the rest: a second derivative differs "
            f"by {gap:.3g} between two places, where it is up to {unit:.3g} (of made-up rows). "
            f"conjugate() is for normal effects of normal outcomes: use independence()."
        )


@compiled
def _curvatures(local: Local, position: ArrayTree, rows: ArrayTree, latents: Any) -> Any:
    """Return the curvature of a group that has all `rows`, at each of the `latents`."""
    zero, one = jnp.zeros((), jnp.int32), jnp.ones(())
    groups = groups_of(local, Client(rows, zero, zero + _MADE_UP, zero, one, one, _MADE_UP))
    return jnp.stack([groups.slope_and_curvature(position, latent)[1][0] for latent in latents])
