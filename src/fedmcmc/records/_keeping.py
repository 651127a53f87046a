"""Where the draws of a run go: into memory, or to a Zarr store on disk while it runs."""

from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from fedmcmc._types import ArrayTree
from fedmcmc.records._samples import named_leaves
from fedmcmc.rounds import Kept

__all__ = ["Keeper", "MemoryKeeper", "ZarrKeeper", "ZarrReader"]

CHUNK_BYTES = 2**22
"""Of an array's draws, in one file of a Zarr store."""


class Keeper(Protocol):
    """Takes in draws segment by segment.

    `count` is the number of draws per chain. What is not on disk yet is `unsaved`, for a
    checkpoint, whose draws `restore` puts back.
    """

    count: int
    shapes: Kept  # of one draw of one chain
    keeps_rest: bool  # whether `unsaved` is all that is not in files of its own, checkpoints aside

    def append(self, kept: Kept) -> None:
        """Take in draws, leaves ``[num_chains, n, ...]``."""

    def all(self) -> Kept:
        """Return all draws, leaves ``[num_chains, count, ...]``."""

    def unsaved(self, num_saved: int) -> Kept:
        """Return the draws that no file holds; checkpoints hold the first `num_saved`."""

    def restore(self, parts: list[Kept], count: int) -> None:
        """Go on from `count` draws, of which `parts` are those that a checkpoint held."""

    def finish(self) -> None:
        """Write what is left, at the end of a run."""


def _joined(parts: list[Kept], shapes: Kept, num_chains: int) -> Kept:
    if parts:
        return jax.tree.map(lambda *leaves: np.concatenate(leaves, axis=1), *parts)
    return jax.tree.map(lambda s: np.zeros((num_chains, 0, *s.shape), s.dtype), shapes)


def _num(kept: Kept) -> int:
    return next(iter(kept.info.values())).shape[1]


class MemoryKeeper:
    """Keep draws in memory."""

    keeps_rest = False

    def __init__(self, shapes: Kept, num_chains: int) -> None:
        self.shapes, self.num_chains = shapes, num_chains
        self.parts: list[Kept] = []
        self.count = 0

    def append(self, kept: Kept) -> None:
        """Take in draws."""
        if _num(kept):
            self.parts = [*self.parts, kept]
            self.count += _num(kept)

    def all(self) -> Kept:
        """Return all draws."""
        whole = _joined(self.parts, self.shapes, self.num_chains)
        self.parts = [whole]  # so that asking often does not copy often
        return whole

    def unsaved(self, num_saved: int) -> Kept:
        """Return the draws after the first `num_saved`."""
        parts, first = [], 0
        for part in self.parts:
            skipped = max(num_saved - first, 0)
            if skipped < _num(part):
                parts.append(jax.tree.map(lambda leaf, at=skipped: leaf[:, at:], part))
            first += _num(part)
        return _joined(parts, self.shapes, self.num_chains)

    def restore(self, parts: list[Kept], count: int) -> None:
        """Go on from the draws of a checkpoint."""
        self.parts, self.count = [part for part in parts if _num(part)], count

    def finish(self) -> None:
        """Do nothing."""


class ZarrKeeper:
    """Append draws to a Zarr store, groups ``posterior`` and ``sample_stats`` as ArviZ has them.

    Only whole chunks are written while the run goes on, and none is written again: a process that
    dies leaves no chunk half changed.
    """

    keeps_rest = True

    def __init__(
        self, path: Path, shapes: Kept, num_chains: int, *, resume: bool, replace: bool
    ) -> None:
        try:
            import zarr
        except ImportError as error:
            raise ImportError('draws_to needs zarr: pip install "fedmcmc[zarr]".') from error
        if path.exists() and not (resume or replace):
            raise FileExistsError(
                f"{path} exists: give draws_to a new path, or the checkpoint= of the run to go on "
                "with."
            )
        self.shapes, self.num_chains = shapes, num_chains
        self.rest: list[Kept] = []
        self.count = self.written = 0
        size = sum(
            int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes)
        )
        self.chunk = int(np.clip(CHUNK_BYTES // max(size * num_chains, 1), 1, 2**12))
        self.group = zarr.open_group(path, mode="a" if resume else "w")
        self.arrays = Kept(
            self._create("posterior", shapes.draw), self._create("sample_stats", shapes.info)
        )

    def _create(self, group: str, shapes: ArrayTree) -> ArrayTree:
        def one(path: Any, leaf: Any) -> Any:
            name = next(iter(named_leaves(_only(shapes, path))))
            if f"{group}/{name}" in self.group:
                return self.group[f"{group}/{name}"]
            dims = [f"{name}_dim_{i}" for i in range(len(leaf.shape))]
            return self.group.require_group(group).create_array(
                name,
                shape=(self.num_chains, 0, *leaf.shape),
                chunks=(self.num_chains, self.chunk, *leaf.shape),
                dtype=leaf.dtype,
                dimension_names=("chain", "draw", *dims),
            )

        return jax.tree_util.tree_map_with_path(one, shapes)

    def append(self, kept: Kept) -> None:
        """Take in draws, and write the chunks that are full."""
        if not _num(kept):
            return
        self.count += _num(kept)
        self.rest.append(kept)
        if self.count - self.written >= self.chunk:
            whole = self.unsaved()
            full = (self.count - self.written) // self.chunk * self.chunk
            self._write(jax.tree.map(lambda leaf: leaf[:, :full], whole))
            self.rest = [jax.tree.map(lambda leaf: leaf[:, full:].copy(), whole)]

    def _write(self, kept: Kept) -> None:
        for array, leaf in zip(jax.tree.leaves(self.arrays), jax.tree.leaves(kept), strict=True):
            array.append(np.asarray(leaf), axis=1)
        self.written += _num(kept)

    def all(self) -> Kept:
        """Return the Zarr arrays, which read from disk what is taken of them."""
        self.finish()
        return self.arrays

    def unsaved(self, num_saved: int = 0) -> Kept:
        """Return the draws of the last chunk, which is not full yet."""
        return _joined(self.rest, self.shapes, self.num_chains)

    def restore(self, parts: list[Kept], count: int) -> None:
        """Go on from a checkpoint: forget the chunks that were written after it."""
        self.rest = [part for part in parts[-1:] if _num(part)]
        self.count, self.written = count, count - sum(map(_num, self.rest))
        for array in jax.tree.leaves(self.arrays):
            if array.shape[1] < self.written:
                raise ValueError(
                    f"The Zarr store holds {array.shape[1]} draws of {array.path}, fewer than the "
                    f"{self.written} of the checkpoint: it is not this run's."
                )
            array.resize((self.num_chains, self.written, *array.shape[2:]))

    def finish(self) -> None:
        """Write the last chunk."""
        if self.count > self.written:
            self._write(self.unsaved())
            self.rest = []


class ZarrReader:
    """Read the draws that another process of the run writes to a Zarr store."""

    keeps_rest = True

    def __init__(self, path: Path, shapes: Kept) -> None:
        self.path, self.shapes, self.count = path, shapes, 0

    def append(self, kept: Kept) -> None:
        """Count draws."""
        self.count += _num(kept)

    def all(self) -> Kept:
        """Return the store's arrays, once they are written."""
        import zarr

        group: Any = zarr.open_group(self.path, mode="r")

        def arrays(name: str, shapes: ArrayTree) -> ArrayTree:
            found = [group[f"{name}/{leaf}"] for leaf in named_leaves(shapes)]
            return jax.tree.unflatten(jax.tree.structure(shapes), found)

        return Kept(arrays("posterior", self.shapes.draw), arrays("sample_stats", self.shapes.info))

    def unsaved(self, num_saved: int) -> Kept:
        """Raise: the process that writes knows."""
        raise NotImplementedError("Only the process that writes the draws saves them.")

    def restore(self, parts: list[Kept], count: int) -> None:
        """Go on counting."""
        self.count = count

    def finish(self) -> None:
        """Do nothing."""


def _only(tree: ArrayTree, path: Any) -> ArrayTree:
    """Return `tree` with nothing but the leaf at `path`."""
    return jax.tree_util.tree_map_with_path(lambda p, leaf: leaf if p == path else None, tree)
