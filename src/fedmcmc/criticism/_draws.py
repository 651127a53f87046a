"""Draws of equal weight, of whatever a user has: weighted draws, a run, a pytree."""

import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._checks import expect, positive_integer
from fedmcmc._types import ArrayTree, Posterior
from fedmcmc.diagnostics import SamplingWarning, VerdictKind, mixing
from fedmcmc.exact import Corrected
from fedmcmc.fitting import Fitted
from fedmcmc.pytrees import trees
from fedmcmc.random import as_key
from fedmcmc.records import Samples

LEAST_DRAWS, MOST_DRAWS = 100, 4000
"""Draws of equal weight: the fewest that are enough, and by default the most that are sent."""


class WeightedDraws(NamedTuple):
    """Positions, leaves ``[num, *event]``, and their weights ``[num]``, which sum to one.

    `log_ratios` ``[num]`` are the logarithms of the weights before smoothing, up to a constant.
    """

    positions: ArrayTree
    weights: np.ndarray
    log_ratios: np.ndarray


class EqualDraws(NamedTuple):
    """Draws of equal weight.

    Attributes
    ----------
    positions
        Leaves ``[num, *event]``.
    num
        How many.
    efficiency
        Effective draws per draw, at most one.
    num_available
        Number of draws before thinning.
    """

    positions: ArrayTree
    num: int
    efficiency: float
    num_available: int


def equal_draws(
    draws: Any,
    posterior: Posterior,
    num_draws: int,
    rng_key: Array | None,
    *,
    least: int = LEAST_DRAWS,
) -> EqualDraws:
    """Return at most `num_draws` draws of equal weight that `posterior` takes.

    A `Fitted` contributes its samples. Draws of a `Corrected` are resampled (with `rng_key`, by
    default ``jax.random.key(0)``). Draws of `Samples` (from all chains) and of a pytree, leaves
    ``[num, *event]``, are thinned evenly.

    Raises
    ------
    ValueError
        If there are fewer than `least`, no leading axis, or `posterior` is in other coordinates.

    Warns
    -----
    SamplingWarning
        If they come of a correction that failed.
    """
    expect(posterior, Posterior, "posterior")
    num_draws = positive_integer(num_draws, "num_draws")
    if isinstance(draws, Fitted):
        draws = draws.samples
    if isinstance(draws, Corrected | Samples):
        refuse_whitened(posterior)
    if isinstance(draws, Corrected):
        if draws.verdict.kind == VerdictKind.FAILED:
            warnings.warn(
                f"These draws are of a correction that failed ({draws.verdict})",
                SamplingWarning,
                stacklevel=3,
            )
        key = jax.random.key(0) if rng_key is None else as_key(rng_key)
        num_draws = min(num_draws, max(draws.num_draws, least))
        positions, efficiency = draws.resample(key, num_draws), draws.ess / num_draws
        available = draws.num_draws
    elif isinstance(draws, Samples):
        found = draws.draws if draws.final_draws is None else draws.final_draws
        per_chain = max(1, num_draws // draws.num_chains)
        if per_chain * draws.num_chains < least:  # many chains, of which some give one more
            per_chain += 1
        chosen = jax.tree.map(lambda leaf: _evenly(np.asarray(leaf), 1, per_chain), found)
        joined = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), chosen)
        positions = jax.tree.map(lambda leaf: _evenly(leaf, 0, num_draws), joined)
        sizes = mixing(found).ess_bulk
        ess = sizes[np.isfinite(sizes)].sum() / max(np.isfinite(sizes).sum(), 1)
        efficiency = float(ess) / len(jax.tree.leaves(positions)[0])
        available = int(np.prod(np.shape(jax.tree.leaves(found)[0])[:2]))
    else:
        lengths = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(draws)}
        if len(lengths) != 1 or () in lengths:
            raise ValueError(
                "draws must be a fit, a fedmcmc.Corrected, a fedmcmc.Samples, or a pytree of "
                f"positions with one leading axis of draws; got leaves of shapes "
                f"{[np.shape(leaf) for leaf in jax.tree.leaves(draws)]}."
            )
        positions = jax.tree.map(lambda leaf: _evenly(np.asarray(leaf), 0, num_draws), draws)
        efficiency, available = 1.0, lengths.pop()[0]
    positions = jax.tree.map(trees.as_float, positions)
    num = jax.tree.leaves(positions)[0].shape[0]
    if num < least:
        raise ValueError(
            f"At least {least} draws are needed, got {num}. Of a pytree, the first axis is that of "
            f"the draws: join the axes of chains and draws, or pass the fedmcmc.Samples."
        )
    if not all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(positions)):
        raise ValueError("draws hold NaN or infinite numbers.")
    return EqualDraws(positions, num, float(min(1.0, max(efficiency, 1 / num))), available)


def weighted_draws(draws: Any, posterior: Posterior) -> WeightedDraws:
    """Return weighted draws of a fit or a `Corrected`, or draws of equal weight of all else.

    At most `MOST_DRAWS` draws of equal weight are taken.
    """
    if isinstance(draws, Fitted):
        draws = draws.samples if draws.corrected is None else draws.corrected
    if not isinstance(draws, Corrected):
        chosen = equal_draws(draws, posterior, MOST_DRAWS, None)
        equal = np.full(chosen.num, 1 / chosen.num)
        return WeightedDraws(chosen.positions, equal, np.zeros(chosen.num))
    refuse_whitened(posterior)
    positions = jax.tree.map(trees.as_float, draws.draws)
    return WeightedDraws(positions, draws.weights, draws.log_ratios)


def refuse_whitened(posterior: Posterior) -> None:
    """Raise `ValueError` if `posterior` is in whitened coordinates, which no draws are in."""
    expect(posterior, Posterior, "posterior")
    if posterior.position_fn is not None:
        raise ValueError(
            "These draws are in the model's own coordinates, and posterior is in whitened ones: "
            "pass the posterior that was given to whiten."
        )


def one_of(positions: ArrayTree) -> ArrayTree:
    """Return the shapes of one of several positions, leaves ``[num, *event]``."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), positions)


def _evenly(leaf: np.ndarray, axis: int, most: int) -> np.ndarray:
    """Return at most `most` entries along `axis`, at even distances."""
    num = leaf.shape[axis]
    if num <= most:
        return leaf
    return np.take(leaf, ((np.arange(most) + 0.5) * num / most).astype(int), axis)
