"""A round of a kernel as an affine map, found by running and differentiating the round.

If only some of the clients take part, each client's contribution comes from a round with this
client alone. Servers add messages, so the map of a cohort is the map of a round without clients
plus the contributions of the cohort.
"""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc.compression import Compressor
from fedmcmc.data import FederatedData
from fedmcmc.hierarchy import LatentState, find_latent_state
from fedmcmc.pytrees import trees
from fedmcmc.rounds import SINGLE_DEVICE, RoundDraws, prepare_round, run_round
from fedmcmc.transforms import is_secured
from fedmcmc.tuning._gaussian_clients import bare_kernels, nodes_of, replace_nodes
from fedmcmc.tuning._random_maps import RandomMap
from fedmcmc.types import (
    ArrayTree,
    Cohort,
    FederatedKernel,
    FederatedState,
    Participation,
    ParticipationMoments,
    compiled,
    register_dataclass,
)

MAX_ELEMENTS = 2**25
"""Limit on the numbers in the maps of all clients, so that they fit into memory."""
TOLERANCE = 1e-3


class _NotAffineError(Exception):
    """A round is no affine map, or its map is too large; the message is the reason."""


class PreparedRound(NamedTuple):
    """Round with fixed draws, whose position and normals can be replaced."""

    kernel: FederatedKernel
    data: FederatedData
    state: FederatedState
    cohort: Cohort
    draws: RoundDraws


class _AffineMap(NamedTuple):
    """Map to ``on_position @ position + shift + on_client_normals @ z1 + on_common_normals @ z2``.

    `z1` and `z2` are standard normal. The clients draw `z1`. The server draws `z2`, or the clients
    share it.
    """

    on_position: np.ndarray  # [d, d]
    shift: np.ndarray  # [d]
    on_client_normals: np.ndarray  # [d, num_client_normals]
    on_common_normals: np.ndarray  # [d, num_common_normals]

    @property
    def noise(self) -> np.ndarray:
        """Covariance of the normals, ``[d, d]``."""
        client, common = self.on_client_normals, self.on_common_normals
        return np.asarray(client @ client.T + common @ common.T)


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class SingleClient(Participation):
    """Participation of one client per round, chosen by the caller."""

    cohort_size: int = field(default=1, kw_only=True, metadata={"static": True})

    def prepare(self, rng_key: Array, num_clients: int) -> Cohort:
        return Cohort(jnp.zeros(1, jnp.int32), jnp.ones(1), jnp.ones(1, bool))


def with_single_client(kernel: FederatedKernel) -> FederatedKernel:
    """Return the kernel with `SingleClient` participation."""
    any_kernel: Any = kernel
    participation = SingleClient(weighted=kernel.participation.weighted)
    changed: FederatedKernel = replace(any_kernel, participation=participation)
    return changed


def affine_map(
    kernel: FederatedKernel, data: FederatedData, position: ArrayTree, round_: int
) -> tuple[RandomMap, float] | str:
    """Return the map of a round and the bits that it sends, or the reason why there is no map."""
    try:
        # In a round that clips nothing or refits nothing, these kernels would look affine.
        if nodes_of(kernel, Compressor):
            raise _NotAffineError("it compresses messages")
        if is_secured(kernel):
            raise _NotAffineError("it sends integers")
        if any(bare.traits.refits_surrogates for bare in bare_kernels(kernel)):
            raise _NotAffineError("it refits surrogates")
        counts = kernel.participation.counts(data.num_clients)
        if counts is None:
            raise _NotAffineError("the distribution of its cohorts is unknown")
        if kernel.participation.cohort_size is None and not kernel.participation.may_drop:
            return _linearize_full_round(prepare(kernel, data, position, round_))
        return _linearize_cohorts(kernel, data, position, round_, counts)
    except _NotAffineError as reason:
        return str(reason)


def prepare(
    kernel: FederatedKernel,
    data: FederatedData,
    position: ArrayTree,
    round_: int,
    state: FederatedState | None = None,
) -> PreparedRound:
    """Return a round of a kernel, with the cohort and the draws of a fixed key."""
    key, number = jax.random.key(0), jnp.asarray(round_, jnp.int32)
    if state is None:
        state = kernel.init(key, position, data)
        state = state._replace(broadcast=state.broadcast._replace(round=number))
    cohort, draws = prepare_round(kernel, data, SINGLE_DEVICE, key, state.broadcast, number)
    if not all(map(_is_normal, jax.tree.leaves(draws))):
        raise _NotAffineError("it draws more than normals")
    return PreparedRound(kernel, data, state, cohort, draws)


def _linearize_full_round(prepared: PreparedRound) -> tuple[RandomMap, float]:
    affine = _linearize(prepared)
    bits = _check_map(prepared, affine, with_normals=True)
    return RandomMap(affine.on_position, affine.shift, affine.noise), bits


def _linearize_cohorts(
    kernel: FederatedKernel,
    data: FederatedData,
    position: ArrayTree,
    round_: int,
    counts: ParticipationMoments,
) -> tuple[RandomMap, float]:
    num = data.num_clients
    if len(kernel.phases) > 1:
        raise _NotAffineError("its clients take part in several exchanges per round")
    if num * trees.num_elements(position) ** 2 > MAX_ELEMENTS:
        raise _NotAffineError("the maps of all clients are too large")
    prepared = prepare(kernel, data, position, round_)
    single = prepare(with_single_client(kernel), data, position, round_, prepared.state)

    def cohort_of(client: int, active: bool) -> Cohort:
        weight = jnp.asarray(counts.weight[client : client + 1], jnp.result_type(float))
        return Cohort(jnp.full(1, client, jnp.int32), weight, jnp.full(1, active))

    empty = _linearize(single._replace(cohort=cohort_of(0, False)))
    size = len(empty.shift)
    client_maps, client_shifts = np.zeros((num, size, size)), np.zeros((num, size))
    squares = counts.own + counts.sign * counts.common**2 + counts.mean**2
    noise = np.zeros((size, size))
    mean_common = empty.on_common_normals.copy()
    joint_common = np.zeros_like(mean_common)
    for i in range(num):
        alone = single._replace(cohort=cohort_of(i, True))
        affine = _linearize(alone)
        client_maps[i] = affine.on_position - empty.on_position
        client_shifts[i] = affine.shift - empty.shift
        noise += squares[i] * affine.on_client_normals @ affine.on_client_normals.T
        common = affine.on_common_normals - empty.on_common_normals
        noise += counts.own[i] * common @ common.T
        mean_common += counts.mean[i] * common
        joint_common += counts.common[i] * common
    noise += mean_common @ mean_common.T + counts.sign * joint_common @ joint_common.T
    bits = _check_map(alone, affine, with_normals=True) * float(counts.active.sum())
    # The map of a cohort that the kernel draws must be the sum of the clients' contributions.
    ids, weight, active = (np.asarray(leaf) for leaf in prepared.cohort[:3])
    if not trees.is_empty(prepared.cohort.garbage):
        active = active & (np.asarray(prepared.cohort.garbage) == 0)
    times = weight / counts.weight[ids] if kernel.participation.weighted else 1.0
    multiplicities = np.where(active, times, 0.0)
    on_position = empty.on_position + np.tensordot(multiplicities, client_maps[ids], 1)
    shift = empty.shift + multiplicities @ client_shifts[ids]
    together = empty._replace(on_position=on_position, shift=shift)
    _check_map(prepared, together, with_normals=False)
    mean_map = empty.on_position + np.tensordot(counts.mean, client_maps, 1)
    mean_shift = empty.shift + counts.mean @ client_shifts
    return RandomMap(mean_map, mean_shift, noise, counts, client_maps, client_shifts), bits


def _linearize(prepared: PreparedRound) -> _AffineMap:
    x = trees.ravel(prepared.state.broadcast.position)
    zero = trees.zeros_like(normals_of(prepared.draws))
    try:
        (on_position, on_normals), (moved, _, _) = _jacobians(x, zero, *prepared)
    except ValueError as error:  # from JAX, for example if a quantizer sends integers
        raise _NotAffineError("its messages have no derivative") from error
    a = np.asarray(on_position, np.float64)
    b = np.asarray(moved, np.float64) - a @ np.asarray(x)
    columns = [np.asarray(leaf, np.float64).reshape(x.size, -1) for leaf in on_normals]
    num = len(normals_of(prepared.draws.clients))
    empty = [np.zeros((x.size, 0))]
    client, common = (np.concatenate(empty + c, 1) for c in (columns[:num], columns[num:]))
    return _AffineMap(a, b, client, common)


def _check_map(prepared: PreparedRound, affine: _AffineMap, *, with_normals: bool) -> float:
    """Return the bits of a round, after checking the map at another position.

    Raises
    ------
    _NotAffineError
        If the round differs from the map, or changes more than the position.
    """
    state, normals = prepared.state, normals_of(prepared.draws)
    x = trees.ravel(state.broadcast.position)
    normals = normals if with_normals else trees.zeros_like(normals)
    _, (moved, stored, bits) = _run_compiled(x + 1.0, normals, *prepared)
    expected = affine.on_position @ (np.asarray(x) + 1.0) + affine.shift
    if with_normals:
        z = np.concatenate([np.zeros(0), *(np.asarray(leaf).ravel() for leaf in normals)])
        on_normals = np.concatenate([affine.on_client_normals, affine.on_common_normals], 1)
        expected = expected + on_normals @ z
    before = (state.server, _without_latents(state.clients), state.broadcast.extra)
    pairs = zip(jax.tree.leaves(stored), jax.tree.leaves(before), strict=True)
    if not all(np.array_equal(new, old) for new, old in pairs):
        raise _NotAffineError("it keeps more than the position between rounds")
    error = np.abs(np.asarray(moved) - expected).max()
    if not error <= TOLERANCE * (1 + np.abs(expected).max()):
        raise _NotAffineError("it does not move the position by an affine map")
    if find_latent_state(state.clients) is not None:
        state = state._replace(clients=replace_nodes(state.clients, LatentState, _shift_latents))
        _, (again, _, _) = _run_compiled(x + 1.0, normals, *prepared._replace(state=state))
        if np.abs(np.asarray(again - moved)).max() > 1e-5 * (1 + np.abs(expected).max()):
            raise _NotAffineError("new latents depend on the previous ones")
    return float(bits)


def _without_latents(states: ArrayTree) -> ArrayTree:
    """Return the clients' states without latents and their samplers' states."""
    return replace_nodes(states, LatentState, lambda _: ())


def _shift_latents(node: LatentState) -> LatentState:
    return node._replace(latents=jax.tree.map(lambda x: x + 1.0, node.latents))


def normals_of(draws: ArrayTree) -> list[Array]:
    """Return the normals among the draws of a round."""
    return [leaf for leaf in jax.tree.leaves(draws) if _is_normal(leaf)]


def _is_normal(leaf: Array) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jnp.floating))


def run_from(
    x: Array,
    normals: list[Array],
    kernel: FederatedKernel,
    data: FederatedData,
    state: FederatedState,
    cohort: Cohort,
    draws: RoundDraws,
) -> tuple[Array, tuple[Array, ArrayTree, Array]]:
    """Run a round from `x` with these `normals`.

    Return the position; and, as auxiliary output of a derivative, the position again, all else that
    the round stores, and the bits.
    """
    remaining = iter(normals)
    draws = jax.tree.map(lambda leaf: next(remaining) if _is_normal(leaf) else leaf, draws)
    broadcast = state.broadcast
    position = trees.cast_like(trees.unravel(x, broadcast.position), broadcast.position)
    start = state._replace(broadcast=broadcast._replace(position=position))
    moved, info = run_round(kernel, data, SINGLE_DEVICE, start, cohort, draws)
    stored = (moved.server, _without_latents(moved.clients), moved.broadcast.extra)
    position = trees.ravel(moved.broadcast.position)
    return position, (position, stored, info.bits_up + info.bits_down)


_run_compiled = compiled(run_from)
_jacobians = compiled(jax.jacrev(run_from, argnums=(0, 1), has_aux=True))
