"""Conversion of weighted draws, runs and pytrees to draws of equal weight."""

import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._checks import expect, positive_integer
from fedmcmc.diagnostics import SamplingWarning, VerdictKind, mixing
from fedmcmc.exact import Corrected
from fedmcmc.fitting import Fitted
from fedmcmc.pytrees import trees
from fedmcmc.random import as_key
from fedmcmc.records import Samples
from fedmcmc.types import ArrayTree, Posterior

PosteriorDraws = Fitted | Corrected | Samples | ArrayTree
"""Results with draws, or pytrees of positions."""

MIN_DRAWS, MAX_DRAWS = 100, 4000
"""Smallest number of draws, and default for the largest number of draws that is sent."""


class WeightedDraws(NamedTuple):
    """Positions with leaves ``[num, *event]`` and normalized weights ``[num]``.

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
        Pytree with leaves ``[num, *event]``.
    num
        Number of draws.
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
    draws: PosteriorDraws,
    posterior: Posterior,
    num_draws: int,
    rng_key: Array | None,
    *,
    minimum: int = MIN_DRAWS,
) -> EqualDraws:
    """Return at most `num_draws` draws of equal weight in the coordinates of `posterior`.

    A `Fitted` contributes its samples. Draws of a `Corrected` are resampled (with `rng_key`, by
    default ``jax.random.key(0)``). Draws of `Samples` (from all chains) and of a pytree with leaves
    ``[num, *event]`` are thinned evenly.

    Raises
    ------
    ValueError
        If there are fewer than `minimum` draws, there is no leading axis, or `posterior` is
        whitened.

    Warns
    -----
    SamplingWarning
        If the draws come from a failed correction.
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
                f"These draws come from a correction that failed ({draws.verdict})",
                SamplingWarning,
                stacklevel=3,
            )
        key = jax.random.key(0) if rng_key is None else as_key(rng_key)
        num_draws = min(num_draws, max(draws.num_draws, minimum))
        positions, efficiency = draws.resample(key, num_draws), draws.ess / num_draws
        available = draws.num_draws
    elif isinstance(draws, Samples):
        chains = draws.draws if draws.final_draws is None else draws.final_draws
        per_chain = max(1, num_draws // draws.num_chains)
        if per_chain * draws.num_chains < minimum:  # with many chains, one more draw per chain
            per_chain += 1
        chosen = jax.tree.map(lambda leaf: _thin(np.asarray(leaf), 1, per_chain), chains)
        joined = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), chosen)
        positions = jax.tree.map(lambda leaf: _thin(leaf, 0, num_draws), joined)
        sizes = mixing(chains).ess_bulk
        ess = sizes[np.isfinite(sizes)].sum() / max(np.isfinite(sizes).sum(), 1)
        efficiency = float(ess) / len(jax.tree.leaves(positions)[0])
        available = int(np.prod(np.shape(jax.tree.leaves(chains)[0])[:2]))
    else:
        lengths = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(draws)}
        if len(lengths) != 1 or () in lengths:
            raise ValueError(
                "draws must be a fit, a fedmcmc.exact.Corrected, a fedmcmc.Samples, or a pytree of "
                f"positions with one leading axis of draws; got leaves of shapes "
                f"{[np.shape(leaf) for leaf in jax.tree.leaves(draws)]}."
            )
        positions = jax.tree.map(lambda leaf: _thin(np.asarray(leaf), 0, num_draws), draws)
        efficiency, available = 1.0, lengths.pop()[0]
    positions = jax.tree.map(trees.as_float, positions)
    num = jax.tree.leaves(positions)[0].shape[0]
    if num < minimum:
        raise ValueError(
            f"At least {minimum} draws are needed, got {num}. A pytree must have one leading axis "
            f"of draws: merge the axes of chains and draws, or pass the fedmcmc.Samples."
        )
    if not all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(positions)):
        raise ValueError("draws contain NaN or infinite numbers.")
    return EqualDraws(positions, num, float(min(1.0, max(efficiency, 1 / num))), available)


def weighted_draws(draws: PosteriorDraws, posterior: Posterior) -> WeightedDraws:
    """Return the weighted draws of a fit or a `Corrected`, or else at most `MAX_DRAWS` draws."""
    if isinstance(draws, Fitted):
        draws = draws.samples if draws.corrected is None else draws.corrected
    if not isinstance(draws, Corrected):
        chosen = equal_draws(draws, posterior, MAX_DRAWS, None)
        equal = np.full(chosen.num, 1 / chosen.num)
        return WeightedDraws(chosen.positions, equal, np.zeros(chosen.num))
    refuse_whitened(posterior)
    positions = jax.tree.map(trees.as_float, draws.draws)
    return WeightedDraws(positions, draws.weights, draws.log_ratios)


def refuse_whitened(posterior: Posterior) -> None:
    """Raise `ValueError` if `posterior` is in whitened coordinates."""
    expect(posterior, Posterior, "posterior")
    if posterior.position_fn is not None:
        raise ValueError(
            "These draws are in the model's original coordinates, but posterior is in whitened "
            "coordinates: pass the posterior that was given to whiten."
        )


def position_shapes(positions: ArrayTree) -> ArrayTree:
    """Return the shapes and types of a single position from leaves ``[num, *event]``."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), positions)


def _thin(leaf: np.ndarray, axis: int, limit: int) -> np.ndarray:
    """Return at most `limit` evenly spaced entries along `axis`."""
    num = leaf.shape[axis]
    if num <= limit:
        return leaf
    return np.take(leaf, ((np.arange(limit) + 0.5) * num / limit).astype(int), axis)
