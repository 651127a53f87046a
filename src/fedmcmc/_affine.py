"""Rounds that are affine maps: read off by differentiation, and solved for their stationary law."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree

from fedmcmc._types import ArrayTree, Broadcast, FederatedKernel
from fedmcmc.data import FederatedData
from fedmcmc.simulate import RoundDraws, prepare_round, run_round

__all__ = ["affine_map", "lyapunov"]

NOT_AFFINE = (
    "predict_bias needs a kernel whose round moves the position by an affine map of position and "
    "normals, and keeps nothing else: not one that compresses messages or refreshes snapshots."
)


def affine_map(
    kernel: FederatedKernel, data: FederatedData, position: ArrayTree, round_: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return ``(A, b, V)`` of a round, ``position' = A position + b + N(0, V)``."""
    participation = kernel.participation
    if participation.cohort_size is not None or participation.drops or participation.pooled:
        raise ValueError("predict_bias needs a kernel in whose rounds every client takes part.")
    key, number = jax.random.key(0), jnp.asarray(round_, jnp.int32)
    state = kernel.init(key, position, data)
    state = state._replace(broadcast=state.broadcast._replace(round=number))
    cohort, draws = prepare_round(kernel, data, key, state.broadcast, number)
    leaves, treedef = jax.tree.flatten(draws)
    floats = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    if any(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves):
        raise ValueError("The draws of a round are too many to be predicted.")
    normals, unravel_normals = ravel_pytree([leaves[i] for i in floats])
    flat, unravel = ravel_pytree(position)

    @jax.jit
    def after(x: Array, z: Array, rng_key: Array) -> tuple[Array, ArrayTree]:
        given = list(leaves)
        for i, leaf in zip(floats, unravel_normals(z), strict=True):
            given[i] = leaf
        drawn: RoundDraws = jax.tree.unflatten(treedef, given)
        start = state._replace(broadcast=_at(state.broadcast, unravel(x)))
        moved, _ = run_round(kernel, data, rng_key, start, cohort, drawn)
        return ravel_pytree(moved.broadcast.position)[0], (moved.server, moved.clients)

    zero = jnp.zeros_like(normals)
    try:
        jacobians, _ = jax.jit(jax.jacrev(after, argnums=(0, 1), has_aux=True))(flat, zero, key)
    except ValueError as error:  # of what has no derivative, as a quantiser's integers
        raise ValueError(NOT_AFFINE) from error
    on_position, on_normals = (np.asarray(j, np.float64) for j in jacobians)
    shift = np.asarray(after(flat, zero, key)[0], np.float64) - on_position @ np.asarray(flat)
    _check_affine(
        after, on_position, shift, on_normals, flat, normals, (state.server, state.clients)
    )
    return on_position, shift, on_normals @ on_normals.T


def _at(broadcast: Broadcast, position: ArrayTree) -> Broadcast:
    return broadcast._replace(position=position)


def _check_affine(
    after: Any,
    on_position: np.ndarray,
    shift: np.ndarray,
    on_normals: np.ndarray,
    flat: Array,
    normals: Array,
    kept: ArrayTree,
) -> None:
    """Raise unless the round elsewhere is what the map says, whatever its key."""
    place = flat + 1.0
    found, still = after(place, normals, jax.random.key(1))
    expected = on_position @ np.asarray(place) + shift + on_normals @ np.asarray(normals)
    scale = 1.0 + np.abs(expected).max()
    same = all(
        np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(still), jax.tree.leaves(kept), strict=True)
    )
    if not same or np.abs(np.asarray(found) - expected).max() > 1e-3 * scale:
        raise ValueError(NOT_AFFINE)


def lyapunov(a: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Return ``sum_k a^k v a^k'``, by doubling."""
    total, power = v, a
    while np.abs(power).max() > 1e-18:
        total = total + power @ total @ power.T
        power = power @ power
    return (total + total.T) / 2
