"""Latents of a client's groups, raveled: log densities, and modes by Newton's method.

A latent is ``[k]`` numbers per group, all groups of a client are treated at once, ``[G, k]``.
Groups are independent given the shared position, so that second derivatives are those of one group.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._types import ArrayTree, Client, Local
from fedmcmc.data import CHUNK_ROWS, max_groups, own_rows_in_groups, single_chunk
from fedmcmc.pytrees import trees

MAX_STEPS = 50
"""Of the search for modes."""
LATELY = 100
"""Rounds over which acceptance is averaged, about."""
SETTLED = 1e-6
"""A Newton step that promises fewer nats than this in every group ends the search."""


class Groups(NamedTuple):
    """One client's groups, and its rows where they are few.

    Attributes
    ----------
    local
        The groups' part of the model.
    client
        Whose groups.
    kept
        Rows, mask and groups of rows, read once, where one chunk holds them; else ``()``.
    present
        ``[G]`` bool, which groups the client has.
    together
        Whether all rows are those of one latent, the client's; rows are then pairs of rows and
        their groups.
    """

    local: Local
    client: Client
    kept: ArrayTree
    present: Array
    together: bool = False

    @property
    def num(self) -> int:
        """Number of groups of the client with most of them (static)."""
        return self.present.shape[0]

    @property
    def size(self) -> int:
        """Numbers per latent (static)."""
        return trees.num_elements(self.local.like.tree)

    def unravel(self, flat: Array) -> ArrayTree:
        """Return the latent of one group, from ``[k]``."""
        return trees.unravel(flat, self.local.like.tree)

    def as_flat(self, latents: ArrayTree) -> Array:
        """Return latents of all groups, leaves ``[G, *event]``, as ``[G, k]``."""
        return jax.vmap(trees.ravel)(latents)

    def as_latents(self, flat: Array) -> ArrayTree:
        """Return latents of all groups, leaves ``[G, *event]``; zeros of those that are absent."""
        return jax.vmap(self.unravel)(jnp.where(self.present[:, None], flat, 0))

    def fold(self, fn: Callable[[ArrayTree, Array, Array], Array]) -> Array:
        """Return the sum of ``fn(rows, mask, groups)`` over chunks of the client's rows."""
        if self.kept:
            return fn(*self._read(*self.kept))
        # Of static length, so that it can be differentiated.
        num = -(-self.client.max_size // CHUNK_ROWS)

        @jax.checkpoint
        def chunk(i: Array) -> Array:
            return fn(*self._read(*own_rows_in_groups(self.client, i * CHUNK_ROWS)))

        def body(total: Array, i: Array) -> tuple[Array, None]:
            return total + chunk(i), None

        shape = jax.eval_shape(chunk, jax.ShapeDtypeStruct((), jnp.int32))
        zero = jnp.zeros(shape.shape, shape.dtype)
        return jax.lax.scan(body, zero, jnp.arange(num, dtype=jnp.int32))[0]

    def _read(self, rows: ArrayTree, mask: Array, group: Array) -> tuple[ArrayTree, Array, Array]:
        return (
            ((rows, group), mask, jnp.zeros_like(group)) if self.together else (rows, mask, group)
        )

    def log_density(self, position: ArrayTree, flat: Array) -> Array:
        """Return the log density of each group's latent and rows, ``[G]``, at ``[G, k]``."""

        def of_rows(rows: ArrayTree, mask: Array, group: Array) -> Array:
            latents = jax.vmap(self.unravel)(flat[group])
            terms = self.local.loglikelihood_fn(position, latents, rows)
            terms = jnp.where(mask, terms, 0)
            return jax.ops.segment_sum(terms, group, self.num)

        prior = jax.vmap(lambda one: self.local.logprior_fn(position, self.unravel(one)))(flat)
        return prior + self.fold(of_rows).astype(prior.dtype)

    def total(self, position: ArrayTree, flat: Array) -> Array:
        """Return the sum of `log_density` over the client's groups, ``[]``."""
        return jnp.sum(jnp.where(self.present, self.log_density(position, flat), 0))

    def rows_difference(
        self, position: ArrayTree, other: ArrayTree, flat: Array, other_flat: Array | None = None
    ) -> Array:
        """Return the log likelihood of all rows, given the latents, relative to that at `other`.

        There latents are the same by default.
        """
        there = flat if other_flat is None else other_flat

        def of_rows(rows: ArrayTree, mask: Array, group: Array) -> Array:
            latents, before = (jax.vmap(self.unravel)(x[group]) for x in (flat, there))
            terms = self.local.loglikelihood_fn(position, latents, rows)
            terms = terms - self.local.loglikelihood_fn(other, before, rows)
            return jnp.sum(jnp.where(mask, terms, 0))

        return self.fold(of_rows)

    def slope(self, position: ArrayTree, flat: Array) -> Array:
        """Return gradients of `log_density` with respect to the latents, ``[G, k]``."""
        return jax.grad(lambda at: jnp.sum(self.log_density(position, at)))(flat)

    def slope_and_curvature(self, position: ArrayTree, flat: Array) -> tuple[Array, Array]:
        """Return gradients ``[G, k]`` and minus Hessians ``[G, k, k]`` of `log_density`."""
        slope_fn = jax.grad(lambda at: jnp.sum(self.log_density(position, at)))

        def column(direction: Array) -> tuple[Array, Array]:
            return jax.jvp(slope_fn, (flat,), (jnp.broadcast_to(direction, flat.shape),))

        # One trace for all directions, as a model takes long to trace and to compile.
        slopes, columns = jax.vmap(column)(jnp.eye(self.size, dtype=flat.dtype))
        curvature = -jnp.moveaxis(columns, 0, -1)
        return slopes[0], (curvature + jnp.swapaxes(curvature, -1, -2)) / 2


def refuse_two_levels(local: Local | None) -> None:
    """Raise `ValueError` where a client has a latent besides those of its groups."""
    if local is not None and local.client is not None:
        raise ValueError(
            "This model has latents of clients and of their groups, which "
            "fedmcmc.lsd(posterior, refresh=fedmcmc.hierarchy.two_levels(...)) alone moves."
        )


def groups_of(local: Local, client: Client) -> Groups:
    """Return the groups of a client, of a model without a latent of the client itself."""
    refuse_two_levels(local)
    num = max_groups(client)
    kept = own_rows_in_groups(client) if single_chunk(client) else ()
    groups = Groups(local, client, kept, jnp.ones(num, bool))
    if num == 1:
        return groups
    counts = groups.fold(
        lambda rows, mask, group: jax.ops.segment_sum(mask.astype(jnp.int32), group, num)
    )
    return groups._replace(present=counts > 0)


class Accepted(NamedTuple):
    """Which share of proposals for a client's latents was accepted lately.

    Attributes
    ----------
    num
        ``[]`` int32, rounds in which there were some.
    mean
        ``[G]``, over about the last hundred of them; one for groups that the client has not.
    """

    num: Array
    mean: Array

    def with_round(self, share: Array, present: Array) -> "Accepted":
        """Return it with a round's `share` ``[G]``, of groups that are `present`."""
        num = self.num + 1
        weight = 1 / jnp.minimum(num, LATELY).astype(share.dtype)
        mean = self.mean + weight * (share - self.mean)
        return Accepted(num, jnp.where(present, mean, 1))


class Locals(NamedTuple):
    """What a client keeps of its groups' latents between rounds.

    Attributes
    ----------
    latents
        Unconstrained, leaves ``[max_groups, *event]``; zeros of groups that the client has not. Of
        two levels ``{"client": ..., "group": ...}``, the client's ``[*event]``.
    refresh
        What their refresh keeps.
    accepted
        How their moves fared lately.
    kernel
        What the kernel keeps besides.
    """

    latents: ArrayTree
    refresh: ArrayTree
    accepted: Accepted
    kernel: ArrayTree = ()


def made_up_rows(rows: ArrayTree, num: int, rng: np.random.Generator) -> ArrayTree:
    """Return rows that a server makes up to look at a model, leaves ``[num, ...]``.

    Of numbers between zero and one, which most models take for outcomes, sizes and chances.
    """

    def made_up(leaf: Any) -> Array:
        shape = (num, *leaf.shape[1:])
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        values = rng.uniform(size=shape) if is_float else rng.integers(0, 2, shape)
        return jnp.asarray(values, leaf.dtype)

    return jax.tree.map(made_up, rows)


def locals_in(states: ArrayTree) -> Locals | None:
    """Return the `Locals` in clients' states, whatever wraps them."""
    nodes = jax.tree.leaves(states, is_leaf=lambda node: isinstance(node, Locals))
    return next((node for node in nodes if isinstance(node, Locals)), None)


class Mode(NamedTuple):
    """Where the search for the groups' modes ended.

    `flat` is ``[G, k]``, `gain` ``[G]`` how many nats the next step promises.
    """

    flat: Array
    gain: Array


def find_modes(groups: Groups, position: ArrayTree) -> Mode:
    """Climb from zero to the mode of every group's latent, given the shared position.

    Newton's method; a step that leads down is taken back and halved, in its group alone. It depends
    on position and rows alone, as proposals have to that are accepted or rejected.
    """
    like = jax.eval_shape(trees.ravel, groups.local.like.tree)
    begin = jnp.zeros((groups.num, groups.size), like.dtype)

    class Climb(NamedTuple):
        flat: Array
        value: Array
        step: Array
        gain: Array
        fraction: Array
        tries: Array

    def direction(flat: Array) -> tuple[Array, Array]:
        slope, curvature = groups.slope_and_curvature(position, flat)
        step = solve(cholesky(curvature, guarded=True), slope)
        return step, jnp.sum(step * slope, -1) / 2

    def unfinished(now: Climb) -> Array:
        moving = groups.present & ~(now.gain < SETTLED) & (now.fraction > 1e-4)
        return (now.tries < MAX_STEPS) & jnp.any(moving)

    def body(now: Climb) -> Climb:
        flat = now.flat + now.fraction[:, None] * now.step
        value = groups.log_density(position, flat)
        noise = 8 * jnp.finfo(value.dtype).eps * jnp.abs(now.value)
        better = value >= now.value - noise
        kept = jnp.where(better[:, None], flat, now.flat)
        step, gain = direction(kept)
        return Climb(
            kept,
            jnp.where(better, value, now.value),
            step,
            gain,
            jnp.where(better, jnp.minimum(2 * now.fraction, 1), now.fraction / 4),
            now.tries + 1,
        )

    value = groups.log_density(position, begin)
    start = Climb(begin, value, *direction(begin), jnp.ones_like(value), jnp.zeros((), jnp.int32))
    end = jax.lax.while_loop(unfinished, body, start)
    return Mode(end.flat, end.gain)


def modes_and_factors(groups: Groups, position: ArrayTree) -> tuple[Array, Array]:
    """Return the groups' modes, ``[G, k]``, and lower factors of the curvature there.

    Both follow from position and rows alone, never from where latents are: a proposal that looked
    at these would need its density in the other direction, too.
    """
    mode = find_modes(groups, position).flat
    return mode, cholesky(groups.slope_and_curvature(position, mode)[1], guarded=True)


def missing_information(local: Local, client: Client, position: ArrayTree) -> Array:
    """Return the precision of the raveled position that not knowing the latents takes, ``[d, d]``.

    It is ``sum B inverse(D) B'`` over the client's groups, of minus second derivatives ``B`` with
    respect to position and latent and ``D`` with respect to the latent, at the latents' modes.
    """
    groups, place = groups_of(local, client), trees.ravel(position)
    flat = find_modes(groups, position).flat

    def slope(at: Array) -> Array:
        there = trees.cast_like(trees.unravel(at, position), position)
        return groups.slope(there, flat)

    mixed = jax.jacfwd(slope)(place)  # [G, k, d]
    factor = cholesky(groups.slope_and_curvature(position, flat)[1], guarded=True)
    whitened = jax.vmap(solve_lower, (None, 2), 2)(factor, mixed)
    whitened = jnp.where(groups.present[:, None, None], whitened, 0)
    return jnp.einsum("gki,gkj->ij", whitened, whitened)


def conditional_variances(local: Local, client: Client, position: ArrayTree) -> tuple[Array, Array]:
    """Return the sum over the client's groups of variances of their latents, and their number.

    ``[k]`` and ``[]``; given position and rows, by the curvature at the latents' modes.
    """
    groups = groups_of(local, client)
    _, factor = modes_and_factors(groups, position)
    axes = jnp.eye(groups.size, dtype=factor.dtype)
    inverse = jax.vmap(lambda axis: solve(factor, jnp.broadcast_to(axis, factor.shape[:2])))(axes)
    variances = jnp.einsum("igi->gi", inverse)
    variances = jnp.where(groups.present[:, None], variances, 0)
    return jnp.sum(variances, 0), jnp.sum(groups.present).astype(variances.dtype)


def cholesky(matrix: Array, *, guarded: bool = False) -> Array:
    """Return the lower factor of small matrices, ``[..., k, k]``.

    Written out, as a library's routine takes longer for thousands of matrices of one to three rows.
    If `guarded`, directions that are not curved get a curvature, so that steps still lead up;
    else factors are NaN there.
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
    found: list[Array] = []
    for i in range(factor.shape[-1]):
        rest = vector[..., i]
        for j, x in enumerate(found):
            rest = rest - factor[..., i, j] * x
        found.append(rest / factor[..., i, i])
    return jnp.stack(found, -1)


def solve_upper(factor: Array, vector: Array) -> Array:
    """Return ``x`` with ``factor' x = vector``, ``[..., k]``, of a lower factor."""
    size = factor.shape[-1]
    found: dict[int, Array] = {}
    for i in reversed(range(size)):
        rest = vector[..., i]
        for j in range(i + 1, size):
            rest = rest - factor[..., j, i] * found[j]
        found[i] = rest / factor[..., i, i]
    return jnp.stack([found[i] for i in range(size)], -1)


def solve(factor: Array, vector: Array) -> Array:
    """Return ``x`` with ``factor factor' x = vector``, ``[..., k]``."""
    return solve_upper(factor, solve_lower(factor, vector))


def log_diagonal(factor: Array) -> Array:
    """Return the log determinant of lower factors, ``[...]``."""
    return jnp.sum(jnp.log(jnp.diagonal(factor, axis1=-2, axis2=-1)), -1)
