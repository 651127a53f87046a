"""Latents of a client's groups, raveled: log densities, and modes by Newton's method.

The random effects of one group form a vector of ``k`` elements, the group's latent. All groups of a
client are computed at once, ``[G, k]``. They
are independent given the shared position, so second derivatives are per group.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc.data import CHUNK_ROWS, max_groups, own_rows_in_groups, single_chunk
from fedmcmc.pytrees import trees
from fedmcmc.types import ArrayTree, Client, Local, as_functions, compiled

MAX_STEPS = 50
"""Maximum number of steps of the search for modes."""
AVERAGED_ROUNDS = 100
"""Approximate number of rounds over which the acceptance is averaged."""
CONVERGED_GAIN = 1e-6
"""Predicted increase of the log density by the next Newton step, in nats, that ends a search."""


class Groups(NamedTuple):
    """Groups of one client.

    Attributes
    ----------
    local
        Part of the model that belongs to a group.
    client
        Owner of the groups.
    rows
        ``(rows, mask, group of each row)`` if all rows fit in one chunk; otherwise ``()``, and
        `fold` reads the rows chunk by chunk.
    present
        ``[G]`` bool, mask of the groups that the client has.
    """

    local: Local
    client: Client
    rows: ArrayTree
    present: Array

    @property
    def num(self) -> int:
        """Number of groups of the client with the most groups (static)."""
        return self.present.shape[0]

    @property
    def size(self) -> int:
        """Number of elements of a latent (static)."""
        return trees.num_elements(self.local.like.tree)

    @property
    def zeros(self) -> Array:
        """Latents of zero, ``[G, k]``."""
        like = jax.eval_shape(trees.ravel, self.local.like.tree)
        return jnp.zeros((self.num, self.size), like.dtype)

    def unravel(self, flat: Array) -> ArrayTree:
        """Return the latent of one group, from ``[k]``."""
        return trees.unravel(flat, self.local.like.tree)

    def as_flat(self, latents: ArrayTree) -> Array:
        """Return latents of all groups, leaves ``[G, *event]``, as ``[G, k]``."""
        return jax.vmap(trees.ravel)(latents)

    def as_latents(self, flat: Array) -> ArrayTree:
        """Return latents of all groups, leaves ``[G, *event]``, with zeros for absent groups."""
        return jax.vmap(self.unravel)(jnp.where(self.present[:, None], flat, 0))

    def fold(self, fn: Callable[[ArrayTree, Array, Array], Array]) -> Array:
        """Return the sum of ``fn(rows, mask, groups)`` over chunks of the client's rows."""
        if self.rows:
            return fn(*self.rows)
        # The length is static, so that the sum can be differentiated.
        num = -(-self.client.max_size // CHUNK_ROWS)

        @jax.checkpoint
        def chunk(i: Array) -> Array:
            return fn(*own_rows_in_groups(self.client, i * CHUNK_ROWS))

        def body(total: Array, i: Array) -> tuple[Array, None]:
            return total + chunk(i), None

        shape = jax.eval_shape(chunk, jax.ShapeDtypeStruct((), jnp.int32))
        zero = jnp.zeros(shape.shape, shape.dtype)
        return jax.lax.scan(body, zero, jnp.arange(num, dtype=jnp.int32))[0]

    def log_density(self, position: ArrayTree, flat: Array) -> Array:
        """Return the log density of each group's latent and rows, ``[G]``, at ``[G, k]``."""
        return _log_density(as_functions(self), position, flat)

    def total(self, position: ArrayTree, flat: Array) -> Array:
        """Return the sum of `log_density` over the client's groups, ``[]``."""
        return jnp.sum(jnp.where(self.present, self.log_density(position, flat), 0))

    def log_likelihood_change(
        self,
        position: ArrayTree,
        reference: ArrayTree,
        flat: Array,
        reference_flat: Array | None = None,
    ) -> Array:
        """Return the log likelihood of all rows minus its value at the reference position.

        By default, the latents are the same at both positions.
        """
        before = flat if reference_flat is None else reference_flat

        def of_rows(rows: ArrayTree, mask: Array, group: Array) -> Array:
            latents, old_latents = (jax.vmap(self.unravel)(x[group]) for x in (flat, before))
            terms = self.local.loglikelihood_fn(position, latents, rows)
            terms = terms - self.local.loglikelihood_fn(reference, old_latents, rows)
            return jnp.sum(jnp.where(mask, terms, 0))

        return self.fold(of_rows)

    def gradient(self, position: ArrayTree, flat: Array) -> Array:
        """Return gradients of `log_density` by the latents, ``[G, k]``."""
        return jax.grad(lambda x: jnp.sum(self.log_density(position, x)))(flat)

    def gradient_and_curvature(self, position: ArrayTree, flat: Array) -> tuple[Array, Array]:
        """Return gradients ``[G, k]`` and minus Hessians ``[G, k, k]`` of `log_density`."""
        return _gradient_and_curvature(as_functions(self), position, flat)


# `compiled`, because a program evaluates these functions at several places, and a model takes long
# to trace.
@compiled
def _log_density(groups: Groups, position: ArrayTree, flat: Array) -> Array:
    local = groups.local

    def of_rows(rows: ArrayTree, mask: Array, group: Array) -> Array:
        latents = jax.vmap(groups.unravel)(flat[group])
        terms = jnp.where(mask, local.loglikelihood_fn(position, latents, rows), 0)
        return jax.ops.segment_sum(terms, group, groups.num)

    prior = jax.vmap(lambda x: local.logprior_fn(position, groups.unravel(x)))(flat)
    return prior + groups.fold(of_rows).astype(prior.dtype)


@compiled
def _gradient_and_curvature(
    groups: Groups, position: ArrayTree, flat: Array
) -> tuple[Array, Array]:
    gradient_fn = jax.grad(lambda x: jnp.sum(groups.log_density(position, x)))

    def column(direction: Array) -> tuple[Array, Array]:
        return jax.jvp(gradient_fn, (flat,), (jnp.broadcast_to(direction, flat.shape),))

    # One trace for all directions.
    gradients, columns = jax.vmap(column)(jnp.eye(groups.size, dtype=flat.dtype))
    curvature = -jnp.moveaxis(columns, 0, -1)
    return gradients[0], (curvature + jnp.swapaxes(curvature, -1, -2)) / 2


def groups_of(local: Local, client: Client) -> Groups:
    """Return the groups of a client."""
    num = max_groups(client)
    rows = own_rows_in_groups(client) if single_chunk(client) else ()
    groups = Groups(local, client, rows, jnp.ones(num, bool))
    if num == 1:
        return groups
    counts = groups.fold(
        lambda rows, mask, group: jax.ops.segment_sum(mask.astype(jnp.int32), group, num)
    )
    return groups._replace(present=counts > 0)


class Accepted(NamedTuple):
    """Recent acceptance of the proposals for a client's latents.

    Attributes
    ----------
    num
        ``[]`` int32, number of rounds with proposals.
    mean
        ``[G]``, share of accepted proposals in about the last hundred rounds; one for groups that
        the client does not have.
    """

    num: Array
    mean: Array

    def update(self, share: Array, present: Array) -> "Accepted":
        """Return the average after a round with the shares ``[G]``."""
        num = self.num + 1
        weight = 1 / jnp.minimum(num, AVERAGED_ROUNDS).astype(share.dtype)
        mean = self.mean + weight * (share - self.mean)
        return Accepted(num, jnp.where(present, mean, 1))


class LatentState(NamedTuple):
    """State of a client's latents between rounds.

    Attributes
    ----------
    latents
        Unconstrained, leaves ``[max_groups, *event]``; zeros for groups that the client does not
        have.
    refresh
        State of the refresh.
    accepted
        Recent acceptance of the moves.
    kernel
        Other state of the kernel.
    """

    latents: ArrayTree
    refresh: ArrayTree
    accepted: Accepted
    kernel: ArrayTree = ()


def made_up_rows(rows: ArrayTree, num: int, rng: np.random.Generator) -> ArrayTree:
    """Return rows with which a server can check a model, leaves ``[num, ...]``.

    Their numbers are between zero and one, which most models accept as outcomes, sizes and
    probabilities.
    """

    def draw(leaf: Any) -> Array:
        shape = (num, *leaf.shape[1:])
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        values = rng.uniform(size=shape) if is_float else rng.integers(0, 2, shape)
        return jnp.asarray(values, leaf.dtype)

    return jax.tree.map(draw, rows)


def find_latent_state(states: ArrayTree) -> LatentState | None:
    """Return the `LatentState` in clients' states, whatever wraps them."""
    nodes = jax.tree.leaves(states, is_leaf=lambda node: isinstance(node, LatentState))
    return next((node for node in nodes if isinstance(node, LatentState)), None)


class LatentModes(NamedTuple):
    """Modes ``[G, k]``, and the increase in nats that the next Newton step predicts, ``[G]``."""

    flat: Array
    gain: Array


class _Climb(NamedTuple):
    flat: Array
    value: Array
    step: Array
    gain: Array
    fraction: Array
    num_steps: Array


def find_modes(groups: Groups, position: ArrayTree) -> LatentModes:
    """Search for the mode of each group's latent, given the shared position.

    Newton's method starts at zero. If a step decreases a group's log density, the group returns to
    its previous point and tries a shorter step. The result does not depend on current latents, so
    it can be the center of an independence proposal.
    """
    start = groups.zeros

    def newton_step(flat: Array) -> tuple[Array, Array]:
        gradient, curvature = groups.gradient_and_curvature(position, flat)
        step = solve(cholesky(curvature, guarded=True), gradient)
        return step, jnp.sum(step * gradient, -1) / 2

    def continues(climb: _Climb) -> Array:
        moving = groups.present & ~(climb.gain < CONVERGED_GAIN) & (climb.fraction > 1e-4)
        return (climb.num_steps < MAX_STEPS) & jnp.any(moving)

    def body(climb: _Climb) -> _Climb:
        flat = climb.flat + climb.fraction[:, None] * climb.step
        value = groups.log_density(position, flat)
        noise = 8 * jnp.finfo(value.dtype).eps * jnp.abs(climb.value)
        better = value >= climb.value - noise
        flat = jnp.where(better[:, None], flat, climb.flat)
        step, gain = newton_step(flat)
        return _Climb(
            flat,
            jnp.where(better, value, climb.value),
            step,
            gain,
            jnp.where(better, jnp.minimum(2 * climb.fraction, 1), climb.fraction / 4),
            climb.num_steps + 1,
        )

    value = groups.log_density(position, start)
    zero = jnp.zeros((), jnp.int32)
    climb = _Climb(start, value, *newton_step(start), jnp.ones_like(value), zero)
    climb = jax.lax.while_loop(continues, body, climb)
    return LatentModes(climb.flat, climb.gain)


def modes_and_factors(groups: Groups, position: ArrayTree) -> tuple[Array, Array]:
    """Return the modes of the groups, ``[G, k]``, and lower factors of the curvature there."""
    mode = find_modes(groups, position).flat
    return mode, cholesky(groups.gradient_and_curvature(position, mode)[1], guarded=True)


def missing_information(local: Local, client: Client, position: ArrayTree) -> Array:
    """Return the precision of the raveled position that is lost with unknown latents, ``[d, d]``.

    It is the sum of ``B inverse(D) B'`` over the client's groups. ``B`` ``[d, k]`` is minus the
    mixed second derivative of the log density by position and latent; ``D`` ``[k, k]`` is minus
    its Hessian by the latent, both at the mode of the latent.
    """
    groups, place = groups_of(local, client), trees.ravel(position)
    flat = find_modes(groups, position).flat

    def gradient(values: Array) -> Array:
        new_position = trees.cast_like(trees.unravel(values, position), position)
        return groups.gradient(new_position, flat)

    mixed = jax.jacfwd(gradient)(place)  # [G, k, d]
    factor = cholesky(groups.gradient_and_curvature(position, flat)[1], guarded=True)
    whitened = jax.vmap(solve_lower, (None, 2), 2)(factor, mixed)
    whitened = jnp.where(groups.present[:, None, None], whitened, 0)
    return jnp.einsum("gki,gkj->ij", whitened, whitened)


def sum_conditional_variances(
    local: Local, client: Client, position: ArrayTree
) -> tuple[Array, Array]:
    """Return the sum of the latents' variances over a client's groups, and the number of groups.

    The variances, ``[k]``, given position and rows, are inverse curvatures at the modes.
    """
    groups = groups_of(local, client)
    _, factor = modes_and_factors(groups, position)
    axes = jnp.eye(groups.size, dtype=factor.dtype)
    inverse = jax.vmap(lambda axis: solve(factor, jnp.broadcast_to(axis, factor.shape[:2])))(axes)
    variances = jnp.einsum("igi->gi", inverse)
    variances = jnp.where(groups.present[:, None], variances, 0)
    return jnp.sum(variances, 0), jnp.sum(groups.present).astype(variances.dtype)


def cholesky(matrix: Array, *, guarded: bool = False) -> Array:
    """Return the lower factors of small matrices, ``[..., k, k]``.

    The loops are unrolled: for thousands of matrices with one to three rows, LAPACK takes longer.
    If `guarded`, pivots that are not clearly positive are replaced by positive ones, so that Newton
    steps increase the log density. Otherwise factors of matrices that are not positive definite are
    NaN.
    """
    size = matrix.shape[-1]
    rows: list[list[Array]] = []
    for i in range(size):
        row: list[Array] = []
        for j in range(i):
            entry = matrix[..., i, j]
            for m in range(j):
                entry = entry - row[m] * rows[j][m]
            row.append(entry / rows[j][j])
        pivot = matrix[..., i, i]
        for x in row:
            pivot = pivot - x * x
        if guarded:
            scale = jnp.abs(matrix[..., i, i])
            pivot = jnp.where(pivot > 1e-6 * scale, pivot, jnp.maximum(scale, 1e-6))
        rows.append([*row, jnp.sqrt(pivot)])
    zero = jnp.zeros_like(matrix[..., 0, 0])
    padded = [jnp.stack([*row, *[zero] * (size - len(row))], -1) for row in rows]
    return jnp.stack(padded, -2)


def solve_lower(factor: Array, vector: Array) -> Array:
    """Return ``x`` with ``factor x = vector``, ``[..., k]``."""
    solution: list[Array] = []
    for i in range(factor.shape[-1]):
        residual = vector[..., i]
        for j, x in enumerate(solution):
            residual = residual - factor[..., i, j] * x
        solution.append(residual / factor[..., i, i])
    return jnp.stack(solution, -1)


def solve_upper(factor: Array, vector: Array) -> Array:
    """Return ``x`` with ``factor' x = vector``, ``[..., k]``, for a lower factor."""
    size = factor.shape[-1]
    solution: dict[int, Array] = {}
    for i in reversed(range(size)):
        residual = vector[..., i]
        for j in range(i + 1, size):
            residual = residual - factor[..., j, i] * solution[j]
        solution[i] = residual / factor[..., i, i]
    return jnp.stack([solution[i] for i in range(size)], -1)


def solve(factor: Array, vector: Array) -> Array:
    """Return ``x`` with ``factor factor' x = vector``, ``[..., k]``."""
    return solve_upper(factor, solve_lower(factor, vector))


def log_diagonal(factor: Array) -> Array:
    """Return the log determinants of lower factors, ``[...]``."""
    return jnp.sum(jnp.log(jnp.diagonal(factor, axis1=-2, axis2=-1)), -1)
