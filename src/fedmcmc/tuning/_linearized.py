"""A round as an affine map, read off a kernel by running and differentiating it.

Where not all clients take part, what a client adds is read off a round in which it is alone: the
server adds messages, so a cohort's map is what nobody's is plus what each of its clients adds.
"""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._types import (
    ArrayTree,
    Cohort,
    FederatedKernel,
    FederatedState,
    Participation,
    ParticipationMoments,
    compiled,
    register_dataclass,
)
from fedmcmc.compression import Compressor
from fedmcmc.data import FederatedData
from fedmcmc.hierarchy import Locals, locals_in
from fedmcmc.kernels import RefreshedRelay
from fedmcmc.pytrees import trees
from fedmcmc.rounds import SINGLE_DEVICE, RoundDraws, prepare_round, run_round
from fedmcmc.transforms import is_secured
from fedmcmc.tuning._gaussian_clients import nodes_of
from fedmcmc.tuning._laws import RandomMap

MAX_NUMBERS = 2**25
"""In the maps of all clients: above, a law would not fit into memory."""
TOLERANCE = 1e-3


class _NotAffineError(Exception):
    """A round that is no affine map, or whose law would be too large; the message is a reason."""


class Begun(NamedTuple):
    """A round of given draws, in which the position and the normals can be exchanged."""

    kernel: FederatedKernel
    data: FederatedData
    state: FederatedState
    cohort: Cohort
    draws: RoundDraws


class _Read(NamedTuple):
    """``position' = on_position position + shift + own z + common z``, z standard normal."""

    on_position: np.ndarray  # [d, d]
    shift: np.ndarray  # [d]
    own: np.ndarray  # [d, anything], on the clients' normals
    common: np.ndarray  # [d, anything], on those of the server, and on those that clients share

    @property
    def noise(self) -> np.ndarray:
        return np.asarray(self.own @ self.own.T + self.common @ self.common.T)


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Alone(Participation):
    """One client per round, whom the caller names."""

    cohort_size: int = field(default=1, kw_only=True, metadata={"static": True})

    def prepare(self, rng_key: Array, num_clients: int) -> Cohort:
        return Cohort(jnp.zeros(1, jnp.int32), jnp.ones(1), jnp.ones(1, bool))


def affine_map(
    kernel: FederatedKernel, data: FederatedData, position: ArrayTree, round_: int
) -> tuple[RandomMap, float] | str:
    """Return the map of a round and the bits that it sends, or a reason why there is none."""
    try:
        if nodes_of(kernel, Compressor):
            # Also where a round looks like an affine map: clipped, but not here.
            raise _NotAffineError("it compresses messages")
        if is_secured(kernel):
            raise _NotAffineError("it sends integers")
        if nodes_of(kernel, RefreshedRelay):
            # Also in a round in which nobody refits.
            raise _NotAffineError("it refits surrogates")
        counts = kernel.participation.counts(data.num_clients)
        if counts is None:
            raise _NotAffineError("no law of who takes part is known")
        if kernel.participation.cohort_size is None and not kernel.participation.may_drop:
            return _of_everyone(begin(kernel, data, position, round_))
        return _of_cohorts(kernel, data, position, round_, counts)
    except _NotAffineError as reason:
        return str(reason)


def begin(
    kernel: FederatedKernel,
    data: FederatedData,
    position: ArrayTree,
    round_: int,
    state: FederatedState | None = None,
) -> Begun:
    """Return a round of a kernel, with the cohort and the numbers that it draws from some key."""
    key, number = jax.random.key(0), jnp.asarray(round_, jnp.int32)
    if state is None:
        state = kernel.init(key, position, data)
        state = state._replace(broadcast=state.broadcast._replace(round=number))
    cohort, draws = prepare_round(kernel, data, SINGLE_DEVICE, key, state.broadcast, number)
    if not all(map(_is_normal, jax.tree.leaves(draws))):
        raise _NotAffineError("it draws more than normals")
    return Begun(kernel, data, state, cohort, draws)


def _of_everyone(begun: Begun) -> tuple[RandomMap, float]:
    read = _read(begun)
    bits = _check(begun, read, with_normals=True)
    return RandomMap(read.on_position, read.shift, read.noise), bits


def _of_cohorts(
    kernel: FederatedKernel,
    data: FederatedData,
    position: ArrayTree,
    round_: int,
    counts: ParticipationMoments,
) -> tuple[RandomMap, float]:
    num = data.num_clients
    if len(kernel.phases) > 1:
        raise _NotAffineError("its clients take part in several exchanges per round")
    if num * trees.num_elements(position) ** 2 > MAX_NUMBERS:
        raise _NotAffineError("the maps of all clients are too large")
    begun = begin(kernel, data, position, round_)
    whole: Any = kernel
    alone = replace(whole, participation=Alone(weighted=kernel.participation.weighted))
    single = begin(alone, data, position, round_, begun.state)

    def cohort(client: int, active: bool) -> Cohort:
        weight = jnp.asarray(counts.weight[client : client + 1], jnp.result_type(float))
        return Cohort(jnp.full(1, client, jnp.int32), weight, jnp.full(1, active))

    nobody = _read(single._replace(cohort=cohort(0, False)))
    size = len(nobody.shift)
    of_client, shifts = np.zeros((num, size, size)), np.zeros((num, size))
    squares = counts.own + counts.sign * counts.common**2 + counts.mean**2
    noise = np.zeros((size, size))
    mean_common, joint_common = nobody.common.copy(), np.zeros_like(nobody.common)
    for i in range(num):
        read = _read(single._replace(cohort=cohort(i, True)))
        of_client[i] = read.on_position - nobody.on_position
        shifts[i] = read.shift - nobody.shift
        noise += squares[i] * read.own @ read.own.T
        common = read.common - nobody.common
        noise += counts.own[i] * common @ common.T
        mean_common += counts.mean[i] * common
        joint_common += counts.common[i] * common
    noise += mean_common @ mean_common.T + counts.sign * joint_common @ joint_common.T
    with_last = single._replace(cohort=cohort(num - 1, True))
    bits = _check(with_last, read, with_normals=True) * float(counts.active.sum())
    # A cohort as it is drawn: is its map what its clients add?
    ids, weight, active = (np.asarray(leaf) for leaf in begun.cohort[:3])
    if not trees.is_empty(begun.cohort.garbage):
        active = active & (np.asarray(begun.cohort.garbage) == 0)
    times = weight / counts.weight[ids] if kernel.participation.weighted else 1.0
    taken = np.where(active, times, 0.0)
    together = _Read(
        nobody.on_position + np.tensordot(taken, of_client[ids], 1),
        nobody.shift + taken @ shifts[ids],
        nobody.own,
        nobody.common,
    )
    _check(begun, together, with_normals=False)
    return (
        RandomMap(
            nobody.on_position + np.tensordot(counts.mean, of_client, 1),
            nobody.shift + counts.mean @ shifts,
            noise,
            counts,
            of_client,
            shifts,
        ),
        bits,
    )


def _read(begun: Begun) -> _Read:
    """Differentiate a round."""
    x = trees.ravel(begun.state.broadcast.position)
    zero = trees.zeros_like(normals_of(begun.draws))
    try:
        (on_position, on_normals), (moved, _, _) = _jacobians(x, zero, *begun)
    except ValueError as error:  # of what has no derivative, as a quantizer's integers
        raise _NotAffineError("its messages have no derivative") from error
    a = np.asarray(on_position, np.float64)
    b = np.asarray(moved, np.float64) - a @ np.asarray(x)
    columns = [np.asarray(leaf, np.float64).reshape(x.size, -1) for leaf in on_normals]
    num_own = len(normals_of(begun.draws.clients))
    nothing = [np.zeros((x.size, 0))]
    own, common = (np.concatenate(nothing + c, 1) for c in (columns[:num_own], columns[num_own:]))
    return _Read(a, b, own, common)


def _check(begun: Begun, read: _Read, *, with_normals: bool) -> float:
    """Return the bits of a round, after checking that elsewhere it is what was read off.

    Raises
    ------
    _NotAffineError
        If it is not, or keeps anything besides the position.
    """
    state, normals = begun.state, normals_of(begun.draws)
    x = trees.ravel(state.broadcast.position)
    normals = normals if with_normals else trees.zeros_like(normals)
    _, (moved, kept, bits) = _after(x + 1.0, normals, *begun)
    expected = read.on_position @ (np.asarray(x) + 1.0) + read.shift
    if with_normals:
        z = np.concatenate([np.zeros(0), *(np.asarray(leaf).ravel() for leaf in normals)])
        expected = expected + np.concatenate([read.own, read.common], 1) @ z
    before = (state.server, _but_latents(state.clients), state.broadcast.extra)
    pairs = zip(jax.tree.leaves(kept), jax.tree.leaves(before), strict=True)
    if not all(np.array_equal(new, old) for new, old in pairs):
        raise _NotAffineError("it keeps more than the position between rounds")
    error = np.abs(np.asarray(moved) - expected).max()
    if not error <= TOLERANCE * (1 + np.abs(expected).max()):
        raise _NotAffineError("it does not move the position by an affine map")
    if locals_in(state.clients) is not None:
        elsewhere = begun._replace(state=state._replace(clients=_with_latents_moved(state.clients)))
        _, (again, _, _) = _after(x + 1.0, normals, *elsewhere)
        if np.abs(np.asarray(again - moved)).max() > 1e-5 * (1 + np.abs(expected).max()):
            raise _NotAffineError("its latents move on from where they were")
    return float(bits)


def _but_latents(states: ArrayTree) -> ArrayTree:
    """Return clients' states without what moves of latents leave behind."""
    return jax.tree.map(lambda x: () if _is_locals(x) else x, states, is_leaf=_is_locals)


def _with_latents_moved(states: ArrayTree) -> ArrayTree:
    def moved(node: Any) -> Any:
        if not _is_locals(node):
            return node
        return node._replace(latents=jax.tree.map(lambda x: x + 1.0, node.latents))

    return jax.tree.map(moved, states, is_leaf=_is_locals)


def _is_locals(node: Any) -> bool:
    return isinstance(node, Locals)


def normals_of(draws: ArrayTree) -> list[Array]:
    """Return those of a round's draws that are normals."""
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

    Return the position, and again with what else is kept and the bits: beside a derivative.
    """
    rest = iter(normals)
    draws = jax.tree.map(lambda leaf: next(rest) if _is_normal(leaf) else leaf, draws)
    broadcast = state.broadcast
    position = trees.cast_like(trees.unravel(x, broadcast.position), broadcast.position)
    start = state._replace(broadcast=broadcast._replace(position=position))
    moved, info = run_round(kernel, data, SINGLE_DEVICE, start, cohort, draws)
    kept = (moved.server, _but_latents(moved.clients), moved.broadcast.extra)
    position = trees.ravel(moved.broadcast.position)
    return position, (position, kept, info.bits_up + info.bits_down)


_after = compiled(run_from)
_jacobians = compiled(jax.jacrev(run_from, argnums=(0, 1), has_aux=True))
