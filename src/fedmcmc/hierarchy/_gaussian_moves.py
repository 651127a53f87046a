"""Refreshes with normal distributions: exact draws of normal latents, and Langevin steps.

Both are relative to the curvature of a group's log density, so one setting suits groups of one row
and of a thousand.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._checks import positive_integer
from fedmcmc.hierarchy._latents import (
    Groups,
    cholesky,
    groups_of,
    made_up_rows,
    modes_and_factors,
    solve,
    solve_upper,
)
from fedmcmc.hierarchy._refresh import Refresh, RefreshInput, RefreshResult, draw_normals
from fedmcmc.pytrees import schedules, trees
from fedmcmc.types import ArrayTree, Client, Local, compiled, register_dataclass

NUM_PROBE_ROWS = 8
"""Number of made-up rows with which a server checks a model."""


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
        return draw_normals(rng_key, num_groups, (self.num_steps, size))

    def move(self, groups: Groups, draws: ArrayTree, inputs: RefreshInput) -> RefreshResult:
        _, factor = modes_and_factors(groups, inputs.position)
        step = trees.cast(self.step_size, inputs.flat)

        def langevin(flat: Array, normals: Array) -> tuple[Array, None]:
            drift = solve(factor, groups.gradient(inputs.position, flat))
            noise = solve_upper(factor, normals.astype(flat.dtype))
            return flat + step * drift + jnp.sqrt(2 * step) * noise, None

        moved, _ = jax.lax.scan(langevin, inputs.flat, jnp.swapaxes(draws, 0, 1))
        return RefreshResult(moved, groups.present.astype(moved.dtype), inputs.state)


def ula(step_size: float = 0.2, *, num_steps: int = 1) -> Refresh:
    """Take Langevin steps without a Metropolis test.

    A step is ``latent + step_size * inverse(C) gradient + sqrt(2 * step_size) * inverse(C)**0.5
    normal``, with the curvature ``C`` at the group's mode given position and rows. If the latent is
    normal, its stationary variance is the true variance times ``1 / (1 - step_size / 2)``, so that
    the spread between groups is too large. Use `ula` for tests and comparisons, and `independence`
    to sample.

    Parameters
    ----------
    step_size
        Step size relative to the curvature, in (0, 2).
    num_steps
        Number of steps per round.

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
    """Draw from a normal distribution; see `conjugate`."""

    def check(self, local: Local, position: ArrayTree, rows: ArrayTree) -> None:
        _check_quadratic(local, position, rows)

    def prepare(self, rng_key: Array, num_groups: int, size: int) -> Array:
        return draw_normals(rng_key, num_groups, (size,))

    def move(self, groups: Groups, draws: ArrayTree, inputs: RefreshInput) -> RefreshResult:
        # Newton's step from any point ends at the mean.
        flat = inputs.flat
        slope, curvature = groups.gradient_and_curvature(inputs.position, jnp.zeros_like(flat))
        factor = cholesky(curvature)
        moved = solve(factor, slope) + solve_upper(factor, draws.astype(flat.dtype))
        moved = jnp.where(groups.present[:, None], moved, flat)
        return RefreshResult(moved, groups.present.astype(flat.dtype), inputs.state)


def conjugate() -> Refresh:
    """Draw latents that are normal given position and rows, exactly and independently.

    It serves normal effects of normal outcomes. `init` of the kernel raises if the log density is
    not quadratic in the latents, which it checks at two points with made-up rows.
    """
    return Conjugate()


def _check_quadratic(local: Local, position: ArrayTree, rows: ArrayTree) -> None:
    """Raise `ValueError` if second derivatives of a group's log density differ between two points.

    If a derivative is not finite, nothing is checked: the model may exclude the made-up rows.
    """
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(local)):
        return
    rng = np.random.default_rng(0)

    def concrete(leaf: object) -> Array:
        # `sample` maps `init` over chains; a traced position contributes its shape.
        if isinstance(leaf, jax.core.Tracer):
            return jnp.zeros(leaf.shape, leaf.dtype)
        return jnp.asarray(leaf)

    with jax.ensure_compile_time_eval():
        probe_rows = made_up_rows(rows, NUM_PROBE_ROWS, rng)
        place = jax.tree.map(concrete, position)
    dtype = jax.eval_shape(trees.ravel, local.like.tree).dtype
    latents = rng.normal(size=(2, 1, trees.num_elements(local.like.tree))).astype(dtype)
    curvatures = np.asarray(_curvatures.now(local, place, probe_rows, latents))
    if not np.isfinite(curvatures).all():
        return
    scale = np.abs(curvatures).max()
    if (gap := np.abs(curvatures[0] - curvatures[1]).max()) > 1e-3 * scale:
        raise ValueError(
            f"The latents of this model are not normal given position and rows: a second "
            f"derivative of their log density differs by {gap:.3g} between two points, where it "
            f"is up to {scale:.3g} (with made-up rows). conjugate() is for normal effects of "
            f"normal outcomes: use independence()."
        )


@compiled
def _curvatures(local: Local, position: ArrayTree, rows: ArrayTree, latents: Any) -> Array:
    """Return the curvature of a group with all `rows` at each of the `latents`."""
    zero, weight = jnp.zeros((), jnp.int32), jnp.ones(())
    client = Client(rows, zero, zero + NUM_PROBE_ROWS, zero, weight, weight, NUM_PROBE_ROWS)
    groups = groups_of(local, client)
    return jnp.stack([groups.gradient_and_curvature(position, latent)[1][0] for latent in latents])
