"""R-hat and effective sample sizes."""

from importlib import import_module
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedmcmc.types import ArrayTree

MANY_CHAINS, SUPERCHAINS = 16, 8
"""Smallest number of chains for nested R-hat (Margossian et al. 2024), and its number of groups.
The usual R-hat of many short chains is high even if nothing is wrong."""
MAX_VALUES, MIN_COORDINATES, MAX_DRAWS = 2**19, 8, 2**15
"""Numbers, coordinates and draws that are judged, which takes about a second."""


class Mixing(NamedTuple):
    """R-hat and effective sample sizes of the judged coordinates.

    Attributes
    ----------
    rhat, ess_bulk, ess_tail
        ``[num_judged]`` float64: rank-normalized R-hat, and effective sample sizes of the bulk and
        of the 5 % and 95 % quantiles, over all chains. NaN for a coordinate that never moved.
    coordinates
        ``[num_judged]``, indices in the raveled draw.
    num_coordinates
        Number of coordinates of a raveled draw.
    num_parts
        Number of parts of chains whose means R-hat compares.
    reach
        ``[num_judged]``, largest distance from the median over the interquartile range. The other
        figures use ranks, which do not show how far away a few draws are.
    """

    rhat: np.ndarray
    ess_bulk: np.ndarray
    ess_tail: np.ndarray
    coordinates: np.ndarray
    num_coordinates: int
    num_parts: int
    reach: np.ndarray

    def disagree(self, threshold: float) -> np.ndarray:
        """Return where R-hat is above the threshold and above its own noise, ``[num_judged]``.

        Even if chains agree, the means of their parts vary: ``rhat**2 - 1`` is about
        ``num_parts / ess`` times a chi-square over its degrees of freedom.
        """
        tails = 1 + 3 * np.sqrt(2 / (self.num_parts - 1))
        return self.rhat > np.maximum(threshold, 1 + self.num_parts / self.ess_bulk / 2 * tails)


def judged_values(draws: ArrayTree) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the judged values of draws with leaves ``[num_chains, num_draws, *event]``.

    If there are more than 32,768 draws, or more than 524,288 numbers, evenly spaced draws and at
    least eight evenly spaced coordinates are judged. The results are the values ``[num_chains, num,
    num_judged]`` float64, their indices in the raveled draw, and the number of all coordinates.
    """
    leaves = [
        np.asarray(leaf).reshape(*leaf.shape[:2], -1)
        for leaf in jax.tree.leaves(draws)
        if jnp.issubdtype(leaf.dtype, jnp.number)  # NumPy's issubdtype lacks bfloat16
    ]
    num_chains, num_draws = leaves[0].shape[:2]
    thinning = -(-num_chains * num_draws // MAX_DRAWS)
    num_thinned = num_chains * len(range(0, num_draws, thinning))
    size = sum(leaf.shape[-1] for leaf in leaves)
    num_judged = min(size, max(MAX_VALUES // num_thinned, MIN_COORDINATES))
    chosen = np.unique(np.linspace(0, size - 1, num_judged).astype(int))
    columns, start = [], 0
    for leaf in leaves:
        inside = chosen[(chosen >= start) & (chosen < start + leaf.shape[-1])] - start
        columns.append(leaf[:, ::thinning, inside].astype(np.float64))
        start += leaf.shape[-1]
    return np.concatenate(columns, -1), chosen, size


def mixing(draws: ArrayTree) -> Mixing:
    """Compute the `Mixing` of draws with leaves ``[num_chains, num_draws, *event]``.

    `judged_values` selects the draws and coordinates.
    """
    values, chosen, size = judged_values(draws)
    num_chains = len(values)
    if num_chains == 1:  # its halves; R-hat cuts these into halves again
        values = values[:, : values.shape[1] // 2 * 2].reshape(2, -1, values.shape[-1])
    if num_chains < MANY_CHAINS:
        rhat, num_parts = _statistic("rhat", values, method="rank"), 2 * len(values)
    else:
        num_parts = SUPERCHAINS
        num_grouped = num_chains // SUPERCHAINS * SUPERCHAINS
        groups = np.arange(num_grouped) // (num_chains // SUPERCHAINS)
        rhat = _statistic("rhat_nested", values[:num_grouped], groups, method="rank")
    bulk = _statistic("ess", values, method="bulk")
    tail = _statistic("ess", values, method="tail", prob=(0.05, 0.95))
    moved = np.ptp(values, axis=(0, 1)) > 0
    rhat, bulk, tail = (np.where(moved, x, np.nan) for x in (rhat, bulk, tail))
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75], axis=(0, 1))
    with np.errstate(invalid="ignore", divide="ignore"):
        reach = np.abs(values - middle).max((0, 1)) / (high - low)
    return Mixing(rhat, bulk, tail, chosen, size, num_parts, reach)


def worst_mixing(draws: ArrayTree) -> tuple[float, float]:
    """Return the largest R-hat and the smallest bulk effective sample size of any coordinate.

    Unlike `mixing` it uses all coordinates and draws, and it is NaN if a coordinate never moved.
    """
    rhats, sizes = [], []
    for leaf in jax.tree.leaves(draws):
        values = np.asarray(leaf, np.float64)
        values = values.reshape(*values.shape[:2], -1)
        rhats.append(np.max(_statistic("rhat", values, method="rank")))
        sizes.append(np.min(_statistic("ess", values, method="bulk")))
    return float(np.max(rhats)), float(np.min(sizes))


def _statistic(
    name: str, values: np.ndarray, *arguments: np.ndarray, **settings: object
) -> np.ndarray:
    """Return an ArviZ statistic ``[n]`` of values ``[num_chains, num_draws, n]``."""
    # The import takes half a second.
    statistic = getattr(import_module("arviz_stats.base").array_stats, name)
    with np.errstate(invalid="ignore", divide="ignore"):
        return statistic(values, *arguments, chain_axis=0, draw_axis=1, **settings)
