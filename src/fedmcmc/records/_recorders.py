"""Where the draws of a run go: into memory, or to a Zarr store on disk while it runs."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedmcmc._checks import not_installed
from fedmcmc._types import ArrayTree
from fedmcmc.placement import agreed
from fedmcmc.pytrees import named_leaves, num_bytes, variables
from fedmcmc.rounds import RoundRecord

CHUNK_BYTES = 2**22
"""Of an array's draws, in one file of a Zarr store."""


class Draws(NamedTuple):
    """The draws of a run so far.

    A value that nothing changes: a run replaces it together with its state, so that an interrupt
    leaves both of the same round. Recorders write to a store by the number of a draw, so whatever
    is written twice is the same.
    """

    num_stored: int = 0  # per chain, the first draws, which a store holds
    parts: tuple[RoundRecord, ...] = ()  # the draws after these, leaves [num_chains, n, ...]

    @property
    def num_draws(self) -> int:
        """Draws per chain."""
        return self.num_stored + sum(map(_num, self.parts))

    def after(self, num: int) -> RoundRecord:
        """Return the draws after the first `num`; none of those returned may be in a store."""
        parts, first = [], self.num_stored
        for part in self.parts:
            skipped = max(num - first, 0)
            if skipped < _num(part):
                parts.append(_sliced(part, slice(skipped, None)))
            first += _num(part)
        return _joined(parts)


class MemoryRecorder:
    """Keeps draws in memory; `shapes` are those of one draw of one chain."""

    def __init__(self, shapes: RoundRecord, num_chains: int) -> None:
        self.shapes, self.num_chains = shapes, num_chains

    def add(self, draws: Draws, new: RoundRecord) -> Draws:
        """Return `draws` with `new` ones, leaves ``[num_chains, n, ...]``."""
        return Draws(draws.num_stored, (*draws.parts, new))

    def all(self, draws: Draws) -> RoundRecord:
        """Return all draws, leaves ``[num_chains, num_draws, ...]``."""
        none = jax.tree.map(
            lambda s: np.zeros((self.num_chains, 0, *s.shape), s.dtype), self.shapes
        )
        return _joined(draws.parts) if draws.parts else none

    def check(self, draws: Draws) -> None:
        """Do nothing: a checkpoint holds all draws."""


class ZarrRecorder:
    """Writes draws to a Zarr store, groups ``posterior`` and ``sample_stats`` as ArviZ has them.

    Only whole chunks are written while the run goes on, and none is written again: a process that
    dies leaves no chunk half changed.
    """

    def __init__(
        self, path: Path, shapes: RoundRecord, num_chains: int, *, resume: bool, replace: bool
    ) -> None:
        try:
            import zarr
        except ImportError as error:
            raise not_installed("draws_to needs zarr", "zarr") from error
        if path.exists() and not (resume or replace):
            raise FileExistsError(
                f"{path} exists: give draws_to a new path, or the checkpoint= of the run to go on "
                "with."
            )
        self.shapes = shapes
        self.chunk = int(np.clip(CHUNK_BYTES // max(num_bytes(shapes) * num_chains, 1), 1, 2**12))
        group: Any = zarr.open_group(path, mode="a" if resume else "w")

        def array(kind: str, name: str, leaf: Any) -> Any:
            if f"{kind}/{name}" in group:
                return group[f"{kind}/{name}"]
            return group.require_group(kind).create_array(
                name,
                shape=(num_chains, 0, *leaf.shape),
                chunks=(num_chains, self.chunk, *leaf.shape),
                dtype=_stored(leaf.dtype),
                dimension_names=(
                    "chain",
                    "draw",
                    *(f"{name}_dim_{i}" for i in range(len(leaf.shape))),
                ),
            )

        self.arrays = _arrays(shapes, array)

    def add(self, draws: Draws, new: RoundRecord) -> Draws:
        """Return `draws` with `new` ones; the chunks that are full are written."""
        draws = Draws(draws.num_stored, (*draws.parts, new))
        full = (draws.num_draws - draws.num_stored) // self.chunk * self.chunk
        if not full:
            return draws
        whole = _joined(draws.parts)
        self._write(draws.num_stored, _sliced(whole, slice(full)))
        rest = jax.tree.map(np.copy, _sliced(whole, slice(full, None)))
        return Draws(draws.num_stored + full, (rest,))

    def _write(self, first: int, draws: RoundRecord) -> None:
        last = first + _num(draws)
        for array, leaf in zip(jax.tree.leaves(self.arrays), jax.tree.leaves(draws), strict=True):
            array.resize((array.shape[0], last, *array.shape[2:]))
            array[:, first:last] = np.asarray(leaf).astype(array.dtype, copy=False)

    def all(self, draws: Draws) -> RoundRecord:
        """Write the last chunk; return the arrays, which read from disk what is taken of them."""
        if draws.parts:
            self._write(draws.num_stored, _joined(draws.parts))
        else:
            self.check(draws)  # an interrupted `add` may have written more
        agreed(0.0)  # other processes of the run wait for this before they read
        return self.arrays

    def check(self, draws: Draws) -> None:
        """Raise `ValueError` unless the store holds what a checkpoint says; remove later draws."""
        for array in jax.tree.leaves(self.arrays):
            if array.shape[1] < draws.num_stored:
                raise ValueError(
                    f"The Zarr store holds {array.shape[1]} draws of {array.path}, fewer than the "
                    f"{draws.num_stored} of the checkpoint: it is not this run's."
                )
            array.resize((array.shape[0], draws.num_stored, *array.shape[2:]))


class ZarrReader:
    """Reads the draws that another process of the run writes to a Zarr store."""

    def __init__(self, path: Path, shapes: RoundRecord) -> None:
        self.path, self.shapes = path, shapes

    def add(self, draws: Draws, new: RoundRecord) -> Draws:
        """Return `draws` with `new` ones, which are counted and forgotten."""
        return Draws(draws.num_draws + _num(new))

    def all(self, draws: Draws) -> RoundRecord:
        """Return the store's arrays, once they are written."""
        import zarr

        agreed(0.0)
        group: Any = zarr.open_group(self.path, mode="r")
        return _arrays(self.shapes, lambda kind, name, leaf: group[f"{kind}/{name}"])

    def check(self, draws: Draws) -> None:
        """Leave the check to the process that writes."""


Recorder = MemoryRecorder | ZarrRecorder | ZarrReader
"""What takes in draws, or hands out those of a store."""


def _stored(dtype: Any) -> Any:
    """Return the type in which a store holds numbers: float32 for bfloat16, which Zarr lacks."""
    own = jnp.issubdtype(dtype, jnp.floating) and not np.issubdtype(dtype, np.floating)
    return np.dtype(np.float32) if own else dtype


def _num(part: RoundRecord) -> int:
    return next(iter(part.info.values())).shape[1]


def _sliced(part: RoundRecord, draws: slice) -> RoundRecord:
    sliced: RoundRecord = jax.tree.map(lambda leaf: leaf[:, draws], part)
    return sliced


def _joined(parts: Any) -> RoundRecord:
    joined: RoundRecord = jax.tree.map(lambda *leaves: np.concatenate(leaves, axis=1), *parts)
    return joined


def _arrays(shapes: RoundRecord, array: Any) -> RoundRecord:
    """Return ``array(group, name, shape)`` of each leaf of what a round keeps."""

    def group(kind: str, tree: ArrayTree) -> ArrayTree:
        named = variables(named_leaves(tree))
        leaves = [array(kind, name, leaf) for name, leaf in named.items()]
        return jax.tree.unflatten(jax.tree.structure(tree), leaves)

    return RoundRecord(
        group("posterior", shapes.draw),
        group("sample_stats", shapes.info),
        group("latents", shapes.latents),
    )
