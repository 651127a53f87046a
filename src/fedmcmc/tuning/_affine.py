"""Rounds that are affine maps: read off by differentiation, and solved for their stationary law."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._types import ArrayTree, Cohort, FederatedKernel, FederatedState
from fedmcmc.data import FederatedData
from fedmcmc.pytrees import trees
from fedmcmc.rounds import TOGETHER, RoundDraws, prepare_round, run_round

NOT_AFFINE = (
    "predict_bias needs a kernel whose round moves the position by an affine map of position and "
    "normals, and keeps nothing else: not one that compresses messages or refreshes snapshots."
)


def affine_map(
    kernel: FederatedKernel, data: FederatedData, position: ArrayTree, round_: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return ``(A, b, V)`` of a round, ``position' = A position + b + N(0, V)``."""
    participation = kernel.participation
    if participation.pooled:
        raise ValueError("predict_bias needs a federated kernel, not one on pooled rows.")
    if participation.cohort_size is not None or participation.drops:
        raise ValueError("predict_bias needs a kernel in whose rounds every client takes part.")
    key, number = jax.random.key(0), jnp.asarray(round_, jnp.int32)
    state = kernel.init(key, position, data)
    state = state._replace(broadcast=state.broadcast._replace(round=number))
    cohort, draws = prepare_round(kernel, data, TOGETHER, key, state.broadcast, number)
    if _holds_key(draws.server):  # it draws from a key, and not as a normal that is added
        raise ValueError(NOT_AFFINE)
    if _holds_key(draws):
        raise ValueError("The draws of a round are too many to be predicted.")
    parts = _Round(kernel, data, state, cohort, draws)
    x, normals = trees.ravel(position), _normals(draws)
    zero = trees.zeros_like(normals)
    try:
        (on_position, on_normals), _ = _jacobians(x, zero, parts)
    except ValueError as error:  # of what has no derivative, as a quantizer's integers
        raise ValueError(NOT_AFFINE) from error
    a = np.asarray(on_position, np.float64)
    b = np.asarray(_after(x, zero, parts)[0], np.float64) - a @ np.asarray(x)
    columns = [np.asarray(leaf, np.float64).reshape(x.size, -1) for leaf in on_normals]
    z = [np.asarray(leaf).ravel() for leaf in normals]
    # Elsewhere the round must be what the map says, and keep nothing.
    moved, states = _after(x + 1.0, normals, parts)
    expected = a @ (np.asarray(x) + 1.0) + b
    expected = expected + sum(c @ v for c, v in zip(columns, z, strict=True))
    still = all(
        np.array_equal(new, old)
        for new, old in zip(
            jax.tree.leaves(states), jax.tree.leaves((state.server, state.clients)), strict=True
        )
    )
    if not still or np.abs(np.asarray(moved) - expected).max() > 1e-3 * (
        1 + np.abs(expected).max()
    ):
        raise ValueError(NOT_AFFINE)
    return a, b, np.asarray(sum(c @ c.T for c in columns)) + np.zeros_like(a)


class _Round(NamedTuple):
    kernel: FederatedKernel
    data: FederatedData
    state: FederatedState
    cohort: Cohort
    draws: RoundDraws


def _holds_key(tree: ArrayTree) -> bool:
    return any(jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in jax.tree.leaves(tree))


def _is_normal(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jnp.floating))


def _normals(draws: ArrayTree) -> list[Array]:
    """Return the numbers among the draws: clients of one row, an integer, have no others."""
    return [leaf for leaf in jax.tree.leaves(draws) if _is_normal(leaf)]


def _run(
    x: Array, normals: list[Array], parts: _Round
) -> tuple[Array, tuple[ArrayTree, ArrayTree]]:
    leaves, treedef = jax.tree.flatten(parts.draws)
    rest = iter(normals)
    draws = jax.tree.unflatten(treedef, [next(rest) if _is_normal(x) else x for x in leaves])
    broadcast = parts.state.broadcast
    position = trees.cast_like(trees.unravel(x, broadcast.position), broadcast.position)
    start = parts.state._replace(broadcast=broadcast._replace(position=position))
    moved, _ = run_round(parts.kernel, parts.data, TOGETHER, start, parts.cohort, draws)
    return trees.ravel(moved.broadcast.position), (moved.server, moved.clients)


_after = jax.jit(_run)
_jacobians = jax.jit(jax.jacrev(_run, argnums=(0, 1), has_aux=True))


def lyapunov(a: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Return ``sum_k a^k v a^k'``, by doubling."""
    total, power = v, a
    while np.abs(power).max() > 1e-18:
        total = total + power @ total @ power.T
        power = power @ power
    return (total + total.T) / 2
