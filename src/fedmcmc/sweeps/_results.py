"""What a sweep runs and keeps, as labelled arrays."""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._types import ArrayTree
from fedmcmc.records import named_leaves
from fedmcmc.rounds import Collect, Kept, Records
from fedmcmc.sweeps._grids import Grid

__all__ = ["Results", "Settings", "xarray"]

TOTALS = ("diverged", "num_rounds", "total_bits_up", "total_bits_down")
"""One number a chain: the first non-finite round, rounds that were run, bits of all of them."""


class Settings(NamedTuple):
    """What all runs of a sweep have in common."""

    rng_key: Array
    position: ArrayTree | Callable[[Array], ArrayTree]
    num_seeds: int
    num_chains: int
    num_rounds: int
    num_burnin: int
    thinning: int
    collect: Collect | None
    max_bytes: int

    def keys(self, seed: int) -> Array:
        """Return the keys of the chains of one seed, ``[num_chains]``, as `sample` makes them."""
        key = jax.random.fold_in(self.rng_key, seed)
        return jax.vmap(lambda c: jax.random.fold_in(key, c))(jnp.arange(self.num_chains))

    def num_kept(self, round_: int) -> int:
        """Return how many draws of a chain are kept before round `round_`."""
        return max(round_ - self.num_burnin, 0) // self.thinning

    @property
    def kept(self) -> np.ndarray:
        """The rounds that are kept, ``[num_draws]``."""
        num_draws = self.num_kept(self.num_rounds)
        return self.num_burnin + self.thinning * (1 + np.arange(num_draws)) - 1


class Results:
    """Everything that the runs of a sweep keep, arrays ``[num_points, num_seeds, num_chains]``.

    Those of `draws` and `info` then have an axis of kept rounds.
    """

    def __init__(self, num_points: int, settings: Settings, shapes: Sequence[Kept]) -> None:
        self.settings = settings
        lead = (num_points, settings.num_seeds, settings.num_chains)
        self.first_bad, self.num_rounds = np.full(lead, -1), np.zeros(lead, np.int64)
        self.bits = np.zeros((*lead, 2), np.int64)  # up and down

        def empty(shape: Any) -> np.ndarray:
            return np.zeros((*lead, len(settings.kept), *shape.shape), shape.dtype)

        self.draws = jax.tree.map(empty, shapes[0].draw)
        names = {name: shape for one in shapes for name, shape in one.info.items()}
        self.info = {name: empty(shape) for name, shape in names.items() if name != "round"}
        # Kernels differ in what they report (lost clients).
        self.reported = {name: np.zeros(num_points, bool) for name in self.info}

    @property
    def there(self) -> np.ndarray:
        """Which draws were kept and are finite."""
        kept, bad = self.settings.kept, self.first_bad[..., None]
        return (kept < self.num_rounds[..., None]) & ((bad < 0) | (kept < bad))

    def put(
        self, points: Sequence[int], seeds: range, at: int, stop: int, records: Records
    ) -> None:
        """Store rounds ``[at, stop)``, leaves ``[num_points, num_seeds * num_chains, ...]``.

        The first points and seeds are these; more of them are padding.
        """
        slots = slice(self.settings.num_kept(at), self.settings.num_kept(stop))
        where: Any = np.ix_(points, seeds)

        def own(leaf: Any) -> np.ndarray:
            leaf = np.asarray(leaf)
            leaf = leaf.reshape(len(leaf), -1, self.settings.num_chains, *leaf.shape[2:])
            return leaf[: len(points), : len(seeds)]

        def store(everything: np.ndarray, leaf: Any) -> None:
            everything[(*where, slice(None), slots)] = own(leaf)[
                :, :, :, : slots.stop - slots.start
            ]

        jax.tree.map(store, self.draws, records.draws)
        for name in self.info.keys() & records.info.keys():
            store(self.info[name], records.info[name])
            self.reported[name][list(points)] = True
        bad, before = own(records.first_bad), self.first_bad[where]
        self.first_bad[where] = np.where(before < 0, bad, before)
        high, low = np.moveaxis(own(records.bits).astype(np.int64), -2, 0)
        self.bits[where] += high * 2**32 + low
        self.num_rounds[where] = stop

    def check_names(self, grid: Grid) -> None:
        """Raise if a name of the grid is that of something kept, or two of those are alike."""
        taken = [*named_leaves(self.draws), *self.info, *TOTALS]
        for name in {*grid.names, "seed", "chain", "draw"}.intersection(taken):
            raise ValueError(f"{name} is a name of the grid and of what runs keep: rename one.")
        if len(set(taken)) < len(taken):
            doubled = sorted({name for name in taken if taken.count(name) > 1})
            raise ValueError(f"Draws cannot be called {', '.join(doubled)}: runs keep such, too.")

    def dataset(self, grid: Grid, draws: ArrayTree) -> Any:
        """Return all as an `xarray.Dataset`, with these draws."""
        lead = (*grid.names, "seed", "chain")

        def labelled(name: str, leaf: np.ndarray, there: np.ndarray) -> tuple:
            there = there.reshape(*there.shape, *[1] * (leaf.ndim - there.ndim))
            if not there.all():
                dtype = np.result_type(leaf.dtype, np.float32)
                leaf = np.where(there, leaf, np.asarray(np.nan, dtype))
            event = tuple(f"{name}_dim_{i}" for i in range(leaf.ndim - 4))
            return (*lead, "draw", *event), leaf.reshape(*grid.shape, *leaf.shape[1:])

        there = self.there
        kept = {name: labelled(name, leaf, there) for name, leaf in named_leaves(draws).items()}
        for name, leaf in self.info.items():
            reported = self.reported[name][:, None, None, None]
            kept[name] = labelled(name, leaf, there & reported)
        totals = (self.first_bad, self.num_rounds, self.bits[..., 0], self.bits[..., 1])
        for name, leaf in zip(TOTALS, totals, strict=True):
            kept[name] = lead, leaf.reshape(*grid.shape, *leaf.shape[1:])
        coords = {
            **dict(zip(grid.names, grid.labels, strict=True)),
            "seed": np.arange(self.settings.num_seeds),
            "chain": np.arange(self.settings.num_chains),
            "draw": np.arange(len(self.settings.kept)),
            "round": ("draw", self.settings.kept),
        }
        return xarray().Dataset(kept, coords)


def xarray() -> Any:
    """Return xarray."""
    try:
        return import_module("xarray")
    except ImportError as error:
        raise ImportError('sweep needs xarray: pip install "fedmcmc[arviz]".') from error
