"""Recorders that store a run's draws in memory or in a Zarr store on disk."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from fedmcmc._checks import missing_extra_error
from fedmcmc.placement import broadcast_from_first
from fedmcmc.pytrees import named_leaves, num_bytes, variables
from fedmcmc.rounds import RoundRecord
from fedmcmc.types import ArrayTree

CHUNK_BYTES = 2**22
"""Approximate size of one file of a Zarr store."""


class Draws(NamedTuple):
    """Draws of a run so far.

    The value is immutable. A run replaces it together with its state, so that both belong to the
    same round after an interrupt. Recorders write a draw to the position of its index in a store,
    so that writing it twice changes nothing.

    Attributes
    ----------
    num_stored
        Number of initial draws per chain that are in a store.
    parts
        Later draws, leaves ``[num_chains, n, ...]``.
    """

    num_stored: int = 0
    parts: tuple[RoundRecord, ...] = ()

    @property
    def num_draws(self) -> int:
        """Number of draws per chain."""
        return self.num_stored + sum(map(_num_draws, self.parts))

    def after(self, num: int) -> RoundRecord:
        """Return the draws after the initial `num`, which must include all draws in a store."""
        parts, start = [], self.num_stored
        for part in self.parts:
            skipped = max(num - start, 0)
            if skipped < _num_draws(part):
                parts.append(_slice_draws(part, slice(skipped, None)))
            start += _num_draws(part)
        return _concatenate(parts)


class MemoryRecorder:
    """Recorder in memory; `shapes` describe one draw of one chain."""

    def __init__(self, shapes: RoundRecord, num_chains: int) -> None:
        self.shapes, self.num_chains = shapes, num_chains

    def add(self, draws: Draws, new: RoundRecord) -> Draws:
        """Return `draws` with `new` ones, leaves ``[num_chains, n, ...]``."""
        return Draws(draws.num_stored, (*draws.parts, new))

    def all(self, draws: Draws) -> RoundRecord:
        """Return all draws, leaves ``[num_chains, num_draws, ...]``."""
        if draws.parts:
            return _concatenate(draws.parts)
        return jax.tree.map(
            lambda s: np.zeros((self.num_chains, 0, *s.shape), s.dtype), self.shapes
        )

    def check(self, draws: Draws) -> None:
        """Do nothing: a checkpoint holds all draws."""


class ZarrRecorder:
    """Recorder in a Zarr store with ArviZ's groups ``posterior`` and ``sample_stats``.

    During the run it writes only full chunks, each once, so that a process that dies leaves no
    partly changed chunk.
    """

    def __init__(
        self, path: Path, shapes: RoundRecord, num_chains: int, *, resume: bool, replace: bool
    ) -> None:
        try:
            import zarr
        except ImportError as error:
            raise missing_extra_error("draws_to needs zarr", "zarr") from error
        if path.exists() and not (resume or replace):
            raise FileExistsError(
                f"{path} exists: give draws_to a new path, or pass the checkpoint= of the run that "
                "should continue."
            )
        self.shapes = shapes
        self.chunk = int(np.clip(CHUNK_BYTES // max(num_bytes(shapes) * num_chains, 1), 1, 2**12))
        group: Any = zarr.open_group(path, mode="a" if resume else "w")

        def create(kind: str, name: str, leaf: Array) -> Any:
            if f"{kind}/{name}" in group:
                return group[f"{kind}/{name}"]
            event_dims = (f"{name}_dim_{i}" for i in range(len(leaf.shape)))
            return group.require_group(kind).create_array(
                name,
                shape=(num_chains, 0, *leaf.shape),
                chunks=(num_chains, self.chunk, *leaf.shape),
                dtype=_storage_dtype(leaf.dtype),
                dimension_names=("chain", "draw", *event_dims),
            )

        self.arrays = _map_arrays(shapes, create)

    def add(self, draws: Draws, new: RoundRecord) -> Draws:
        """Return `draws` with `new` ones, after writing all full chunks."""
        draws = Draws(draws.num_stored, (*draws.parts, new))
        num_full = (draws.num_draws - draws.num_stored) // self.chunk * self.chunk
        if not num_full:
            return draws
        pending = _concatenate(draws.parts)
        self._write(draws.num_stored, _slice_draws(pending, slice(num_full)))
        remainder = jax.tree.map(np.copy, _slice_draws(pending, slice(num_full, None)))
        return Draws(draws.num_stored + num_full, (remainder,))

    def _write(self, start: int, draws: RoundRecord) -> None:
        stop = start + _num_draws(draws)
        for array, leaf in zip(jax.tree.leaves(self.arrays), jax.tree.leaves(draws), strict=True):
            array.resize((array.shape[0], stop, *array.shape[2:]))
            array[:, start:stop] = np.asarray(leaf).astype(array.dtype, copy=False)

    def all(self, draws: Draws) -> RoundRecord:
        """Write the remaining draws and return the arrays, which read from disk when sliced."""
        if draws.parts:
            self._write(draws.num_stored, _concatenate(draws.parts))
        else:
            self.check(draws)  # an interrupted `add` may have written more
        broadcast_from_first(0.0)  # other processes of the run wait for this before they read
        return self.arrays

    def check(self, draws: Draws) -> None:
        """Raise `ValueError` if the store lacks draws of a checkpoint; remove later draws."""
        for array in jax.tree.leaves(self.arrays):
            if array.shape[1] < draws.num_stored:
                raise ValueError(
                    f"The Zarr store holds {array.shape[1]} draws of {array.path}, fewer than the "
                    f"{draws.num_stored} of the checkpoint: it belongs to another run."
                )
            array.resize((array.shape[0], draws.num_stored, *array.shape[2:]))


class ZarrReader:
    """Reader of the Zarr store that another process of the run writes."""

    def __init__(self, path: Path, shapes: RoundRecord) -> None:
        self.path, self.shapes = path, shapes

    def add(self, draws: Draws, new: RoundRecord) -> Draws:
        """Return `draws` with the number of `new` ones, which are not kept."""
        return Draws(draws.num_draws + _num_draws(new))

    def all(self, draws: Draws) -> RoundRecord:
        """Return the store's arrays after the writing process has finished."""
        import zarr

        broadcast_from_first(0.0)
        group: Any = zarr.open_group(self.path, mode="r")
        return _map_arrays(self.shapes, lambda kind, name, leaf: group[f"{kind}/{name}"])

    def check(self, draws: Draws) -> None:
        """Do nothing: the writing process checks the store."""


Recorder = MemoryRecorder | ZarrRecorder | ZarrReader
"""Storage of the draws of a run: one of the recorders, or a reader of a finished store."""


def _storage_dtype(dtype: DTypeLike) -> Any:
    """Return the dtype in a store: float32 for bfloat16, which Zarr lacks."""
    is_extended = jnp.issubdtype(dtype, jnp.floating) and not np.issubdtype(dtype, np.floating)
    return np.dtype(np.float32) if is_extended else dtype


def _num_draws(part: RoundRecord) -> int:
    return next(iter(part.info.values())).shape[1]


def _slice_draws(part: RoundRecord, draws: slice) -> RoundRecord:
    sliced: RoundRecord = jax.tree.map(lambda leaf: leaf[:, draws], part)
    return sliced


def _concatenate(parts: Sequence[RoundRecord]) -> RoundRecord:
    joined: RoundRecord = jax.tree.map(lambda *leaves: np.concatenate(leaves, axis=1), *parts)
    return joined


def _map_arrays(shapes: RoundRecord, array: Callable[..., ArrayTree]) -> RoundRecord:
    """Return ``array(group, name, shape)`` for each leaf of a round's record."""

    def group(kind: str, tree: ArrayTree) -> ArrayTree:
        named = variables(named_leaves(tree))
        leaves = [array(kind, name, leaf) for name, leaf in named.items()]
        return jax.tree.unflatten(jax.tree.structure(tree), leaves)

    return RoundRecord(
        group("posterior", shapes.draw),
        group("sample_stats", shapes.info),
        group("latents", shapes.latents),
    )
