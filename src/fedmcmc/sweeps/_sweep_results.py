"""What the runs of a sweep keep, as labelled arrays."""

from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

import jax
import numpy as np

from fedmcmc._types import ArrayTree
from fedmcmc.records import Samples, named_leaves
from fedmcmc.rounds import Kept
from fedmcmc.sweeps._grids import Grid

__all__ = ["Results", "Rounds", "xarray"]

TOTALS = ("diverged", "num_rounds", "total_bits_up", "total_bits_down")
"""One number a chain: the first non-finite round, rounds that were run, bits of all of them."""


class Rounds(NamedTuple):
    """Which rounds every run has, and which it keeps."""

    num_rounds: int
    num_burnin: int
    thinning: int

    @property
    def num_draws(self) -> int:
        """Draws kept of a chain."""
        return (self.num_rounds - self.num_burnin) // self.thinning

    def kept(self) -> np.ndarray:
        """Return the rounds that are kept, ``[num_draws]``."""
        return self.num_burnin + self.thinning * (1 + np.arange(self.num_draws)) - 1


class Results:
    """Everything that the runs of a sweep keep, and which of it is there.

    Arrays have leading axes ``[num_points, num_seeds, num_chains]``; those of `draws` and `info`
    then one of kept rounds.
    """

    def __init__(
        self, num_points: int, num_seeds: int, num_chains: int, rounds: Rounds, shapes: list[Kept]
    ) -> None:
        self.rounds = rounds
        lead = (num_points, num_seeds, num_chains)
        self.there = np.zeros((*lead, rounds.num_draws), bool)
        self.first_bad = np.full(lead, -1)
        self.num_rounds = np.zeros(lead, np.int64)
        self.bits = {name: np.zeros(lead, np.int64) for name in ("bits_up", "bits_down")}

        def empty(shape: Any) -> np.ndarray:
            return np.zeros((*lead, rounds.num_draws, *shape.shape), shape.dtype)

        self.draws = jax.tree.map(empty, shapes[0].draw)
        self.info: dict[str, np.ndarray] = {}
        for shape in shapes:
            new = {k: empty(v) for k, v in shape.info.items() if k not in self.info}
            self.info |= {k: v for k, v in new.items() if k != "round"}
        # Kernels differ in what they report (lost clients).
        self.reported = {name: np.zeros(num_points, bool) for name in self.info}

    def put(
        self,
        points: Sequence[int],
        seeds: range,
        at_once: int,
        samples: Samples,
        first_bad: np.ndarray,
    ) -> None:
        """Store a run whose chains are those of `points`, of `at_once` seeds each.

        The first seeds are `seeds`; more of them, and more points, are padding.
        """
        num_chains = self.first_bad.shape[-1]
        where: Any = np.ix_(points, seeds)

        def own(leaf: np.ndarray) -> np.ndarray:
            leaf = leaf.reshape(-1, at_once, num_chains, *leaf.shape[1:])
            return leaf[: len(points), : len(seeds)]

        def store(all_: np.ndarray, leaf: np.ndarray) -> None:
            all_[(*where, slice(None), slice(leaf.shape[1]))] = own(leaf)

        jax.tree.map(store, self.draws, samples.draws)
        for name in self.info.keys() & samples.info.keys():
            store(self.info[name], samples.info[name])
            self.reported[name][list(points)] = True
        self.first_bad[where] = own(first_bad)
        self.num_rounds[where] = own(samples.totals["rounds"])
        for name, total in self.bits.items():
            total[where] = own(samples.totals[name])
        bad, kept = self.first_bad[where][..., None], self.rounds.kept()
        self.there[where] = (kept < self.num_rounds[where][..., None]) & ((bad < 0) | (kept < bad))

    def check_names(self, grid: Grid) -> None:
        """Raise if a name of the grid is that of something kept, or two of those are alike."""
        taken = [*named_leaves(self.draws), *self.info, *TOTALS]
        for name in {*grid.names, "seed", "chain", "draw"}.intersection(taken):
            raise ValueError(f"{name} is a name of the grid and of what runs keep: rename one.")
        if len(set(taken)) < len(taken):
            doubled = sorted({name for name in taken if taken.count(name) > 1})
            raise ValueError(f"Draws cannot be called {', '.join(doubled)}: runs keep such, too.")

    def dataset(self, grid: Grid, draws: ArrayTree | None = None) -> Any:
        """Return all as an `xarray.Dataset`; `draws` in place of those that were kept."""
        lead = (*grid.names, "seed", "chain")

        def labelled(name: str, leaf: np.ndarray, there: np.ndarray) -> tuple:
            there = there.reshape(*there.shape, *[1] * (leaf.ndim - there.ndim))
            if not there.all():
                dtype = np.result_type(leaf.dtype, np.float32)
                leaf = np.where(there, leaf, np.asarray(np.nan, dtype))
            event = tuple(f"{name}_dim_{i}" for i in range(leaf.ndim - 4))
            return (*lead, "draw", *event), leaf.reshape(*grid.shape, *leaf.shape[1:])

        kept = {
            name: labelled(name, leaf, self.there)
            for name, leaf in named_leaves(self.draws if draws is None else draws).items()
        }
        for name, leaf in self.info.items():
            reported = self.reported[name][:, None, None, None]
            kept[name] = labelled(name, leaf, self.there & reported)
        chains = (self.first_bad, self.num_rounds, *self.bits.values())
        for name, leaf in zip(TOTALS, chains, strict=True):
            kept[name] = lead, leaf.reshape(*grid.shape, *leaf.shape[1:])
        _, num_seeds, num_chains = self.first_bad.shape
        coords = {
            **dict(zip(grid.names, grid.labels, strict=True)),
            "seed": np.arange(num_seeds),
            "chain": np.arange(num_chains),
            "draw": np.arange(self.rounds.num_draws),
            "round": ("draw", self.rounds.kept()),
        }
        return xarray().Dataset(kept, coords)


def xarray() -> Any:
    """Return xarray."""
    try:
        return import_module("xarray")
    except ImportError as error:
        raise ImportError('sweep needs xarray: pip install "fedmcmc[arviz]".') from error
