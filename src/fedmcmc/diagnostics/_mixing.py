"""Whether chains agree and draws are many enough: R-hat and effective sample sizes."""

from importlib import import_module
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedmcmc._types import ArrayTree

MANY_CHAINS, SUPERCHAINS = 16, 8
"""From so many chains on, R-hat is nested, of so many groups: of short chains the usual one is high
even where all is well."""
NUMBERS, FEWEST_COORDINATES, MOST_DRAWS = 2**19, 8, 2**15
"""How many numbers, coordinates and draws are judged: a second's work."""


class Mixing(NamedTuple):
    """R-hat and effective sample sizes of the judged coordinates.

    Attributes
    ----------
    rhat, ess_bulk, ess_tail
        ``[num_judged]`` float64: rank-normalized, of the bulk, and of the 5 % and 95 % quantiles,
        each over all chains. NaN for a coordinate that never moved.
    coordinates
        ``[num_judged]``, which numbers of the raveled draw they are.
    num_coordinates
        Of how many.
    num_parts
        Of how many parts of chains R-hat compares the means.
    reach
        ``[num_judged]``, the largest distance from the median over the interquartile range: ranks,
        and so all figures above, do not see how far a few draws are away.
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

        Of chains without fault the means of the parts still vary: ``rhat**2 - 1`` is about
        ``num_parts / ess`` times a chi-square over its degrees of freedom.
        """
        tails = 1 + 3 * np.sqrt(2 / (self.num_parts - 1))
        return self.rhat > np.maximum(threshold, 1 + self.num_parts / self.ess_bulk / 2 * tails)


def judged_values(draws: ArrayTree) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the numbers that are judged, ``[num_chains, num, num_judged]`` float64.

    Return also which coordinates of the raveled draw they are, ``[num_judged]``, and of how many.
    Draws have leaves ``[num_chains, num_draws, *event]``. Of more than 32,768 draws evenly spaced
    ones are judged, and of many coordinates evenly spaced ones: at least eight, and 524,288 numbers
    in all.
    """
    leaves = [
        np.asarray(leaf).reshape(*leaf.shape[:2], -1)
        for leaf in jax.tree.leaves(draws)
        if jnp.issubdtype(leaf.dtype, jnp.number)  # NumPy's own does not know bfloat16
    ]
    num_chains, num_draws = leaves[0].shape[:2]
    every = -(-num_chains * num_draws // MOST_DRAWS)
    num_kept = num_chains * len(range(0, num_draws, every))
    size = sum(leaf.shape[-1] for leaf in leaves)
    num_judged = min(size, max(NUMBERS // num_kept, FEWEST_COORDINATES))
    chosen = np.unique(np.linspace(0, size - 1, num_judged).astype(int))
    columns, first = [], 0
    for leaf in leaves:
        own = chosen[(chosen >= first) & (chosen < first + leaf.shape[-1])] - first
        columns.append(leaf[:, ::every, own].astype(np.float64))
        first += leaf.shape[-1]
    return np.concatenate(columns, -1), chosen, size


def mixing(draws: ArrayTree) -> Mixing:
    """Judge draws with leaves ``[num_chains, num_draws, *event]``; see `judged_values`."""
    values, chosen, size = judged_values(draws)
    num_chains = len(values)
    if num_chains == 1:  # its halves; R-hat cuts these into halves again
        values = values[:, : values.shape[1] // 2 * 2].reshape(2, -1, values.shape[-1])
    if num_chains < MANY_CHAINS:
        rhat, num_parts = _statistic("rhat", values, method="rank"), 2 * len(values)
    else:
        num_parts = SUPERCHAINS
        whole = num_chains // SUPERCHAINS * SUPERCHAINS
        groups = np.arange(whole) // (num_chains // SUPERCHAINS)
        rhat = _statistic("rhat_nested", values[:whole], groups, method="rank")
    bulk = _statistic("ess", values, method="bulk")
    tail = _statistic("ess", values, method="tail", prob=(0.05, 0.95))
    moved = np.ptp(values, axis=(0, 1)) > 0
    rhat, bulk, tail = (np.where(moved, x, np.nan) for x in (rhat, bulk, tail))
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75], axis=(0, 1))
    with np.errstate(invalid="ignore", divide="ignore"):
        reach = np.abs(values - middle).max((0, 1)) / (high - low)
    return Mixing(rhat, bulk, tail, chosen, size, num_parts, reach)


def worst(draws: ArrayTree) -> tuple[float, float]:
    """Return the largest R-hat and the smallest bulk effective sample size of any coordinate.

    Unlike `mixing` it looks at all coordinates and draws, and is NaN where one never moved.
    """
    rhats, sizes = [], []
    for leaf in jax.tree.leaves(draws):
        values = np.asarray(leaf, np.float64)
        values = values.reshape(*values.shape[:2], -1)
        rhats.append(np.max(_statistic("rhat", values, method="rank")))
        sizes.append(np.min(_statistic("ess", values, method="bulk")))
    return float(np.max(rhats)), float(np.min(sizes))


def _statistic(name: str, values: np.ndarray, *arguments: Any, **settings: Any) -> np.ndarray:
    """Return ArviZ's statistic of ``[num_chains, num_draws, n]``, ``[n]``.

    ArviZ is imported when needed: it takes half a second.
    """
    statistic = getattr(import_module("arviz_stats.base").array_stats, name)
    with np.errstate(invalid="ignore", divide="ignore"):
        return statistic(values, *arguments, chain_axis=0, draw_axis=1, **settings)
