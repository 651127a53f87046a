"""Distances of marginal distributions, from histograms of draws."""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc._checks import positive_integer
from fedmcmc.metrics._arguments import as_finite, promote
from fedmcmc.pytrees import trees
from fedmcmc.types import ArrayTree


def marginal_error(draws: ArrayTree, reference: ArrayTree, num_bins: int = 50) -> Array:
    """Return the total variation distance of marginals, averaged over coordinates.

    ``ME = (1 / (2 d)) sum_j int |mu_j(x) - nu_j(x)| dx`` (one minus the accuracy of Faes et
    al. 2011), with both densities replaced by histograms: `num_bins` bins of equal width on the
    range of the coordinate in `reference`, and one bin for all values outside. Histograms of
    different draws from one distribution differ: compare with `marginal_error_floor`.

    Parameters
    ----------
    draws, reference
        Positions, leaves ``[num_draws, *event]`` and ``[num_reference, *event]``. For a batch of
        samplers use `jax.vmap`.
    num_bins
        Number of bins within the range of `reference`, static. Fewer bins hide differences, more
        raise the floor.

    Returns
    -------
    Array
        ``[]``, in ``[0, 1]``: 0 for equal histograms, 1 for marginals that share no bin.

    Raises
    ------
    ValueError
        If structures or shapes do not fit, concrete draws are not finite, or `num_bins` is no
        positive integer.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> x = jnp.linspace(0.0, 1.0, 101)
    >>> round(float(marginal_error(x, x)), 4), round(float(marginal_error(x + 2, x)), 4)
    (0.0, 1.0)
    """
    num_bins = positive_integer(num_bins, "num_bins")
    if not trees.same_structure(draws, reference):
        raise ValueError(
            f"draws and reference must have the same structure, got {jax.tree.structure(draws)} "
            f"and {jax.tree.structure(reference)}."
        )
    rows, reference_rows = _coordinates("draws", draws), _coordinates("reference", reference)
    shapes = [jnp.shape(leaf)[1:] for leaf in jax.tree.leaves(draws)]
    if shapes != [jnp.shape(leaf)[1:] for leaf in jax.tree.leaves(reference)]:
        raise ValueError(
            f"draws and reference must agree beyond their first axis, the draws, got "
            f"{_shapes(draws)} and {_shapes(reference)}."
        )
    return _marginal_error(rows, reference_rows, num_bins=num_bins)


def marginal_error_floor(
    rng_key: Array,
    reference: ArrayTree,
    num_draws: int,
    *,
    num_reference: int | None = None,
    num_bins: int = 50,
    num_repeats: int = 20,
) -> Array:
    """Return marginal errors of a perfect sampler, between independent samples of `reference`.

    Each repetition draws two samples from `reference` with replacement and computes their marginal
    error in the bins of `reference`. A `marginal_error` among these values is no evidence against
    the sampler.

    Parameters
    ----------
    rng_key, num_repeats
        JAX key, and number of repetitions.
    reference, num_bins
        See `marginal_error`.
    num_draws, num_reference
        Sizes of the two samples: the effective sample size of the sampler, and of its reference, by
        default the number of draws in `reference`.

    Returns
    -------
    Array
        ``[num_repeats]``, in ``[0, 1]``.

    Raises
    ------
    ValueError
        For the reasons listed in `marginal_error`, or if a number is no positive integer.

    Examples
    --------
    >>> import jax
    >>> reference = jax.random.normal(jax.random.key(0), (4000, 3))
    >>> floor = marginal_error_floor(jax.random.key(1), reference, 1000)
    >>> bool(0.03 < floor.mean() < 0.09)
    True
    """
    rows = _coordinates("reference", reference)
    num_reference = rows.shape[1] if num_reference is None else num_reference
    num_draws = positive_integer(num_draws, "num_draws")
    return _floor(
        rng_key,
        rows,
        sizes=(num_draws, positive_integer(num_reference, "num_reference")),
        num_bins=positive_integer(num_bins, "num_bins"),
        num_repeats=positive_integer(num_repeats, "num_repeats"),
    )


def _coordinates(name: str, draws: ArrayTree) -> Array:
    """Return draws as ``[d, num_draws]``, with a row per coordinate of a leaf."""
    leaves = jax.tree.leaves(draws)
    if not leaves or len({jnp.shape(leaf)[:1] for leaf in leaves}) != 1:
        raise ValueError(
            f"All leaves of {name} need the same number of draws on their first axis, got "
            f"{_shapes(draws)}."
        )
    rows = []
    for leaf in leaves:
        flat = leaf.reshape(leaf.shape[0], -1) if jnp.ndim(leaf) else leaf
        rows.append(as_finite(name, flat, "num_draws, num_coordinates").T)
    return jnp.concatenate(promote(*rows))


def _shapes(tree: ArrayTree) -> list[tuple[int, ...]]:
    return [jnp.shape(leaf) for leaf in jax.tree.leaves(tree)]


def _histogram(values: Array, low: Array, high: Array, num_bins: int) -> Array:
    """Return counts of values ``[num_draws]`` in `num_bins` bins, and outside of them."""
    width = high - low
    scaled = (values - low) / jnp.where(width > 0, width, jnp.ones_like(width)) * num_bins
    index = jnp.clip(scaled.astype(jnp.int32), 0, num_bins - 1)
    index = jnp.where((values >= low) & (values <= high), index, jnp.full_like(index, num_bins))
    counts = jnp.zeros(num_bins + 1, jnp.int32).at[index].add(1)
    return counts.astype(values.dtype)


def _distance(draws: Array, reference: Array, low: Array, high: Array, num_bins: int) -> Array:
    histogram = jax.vmap(partial(_histogram, num_bins=num_bins))
    # With a common denominator, counts of samples of one size differ exactly by integers.
    common = math.lcm(draws.shape[1], reference.shape[1])
    counts = histogram(draws, low, high) * float(common // draws.shape[1])
    reference_counts = histogram(reference, low, high) * float(common // reference.shape[1])
    return jnp.mean(jnp.sum(jnp.abs(counts - reference_counts), axis=-1) / float(2 * common))


@partial(jax.jit, static_argnames="num_bins")
def _marginal_error(draws: Array, reference: Array, *, num_bins: int) -> Array:
    draws, reference = promote(draws, reference)
    low, high = jnp.min(reference, axis=1), jnp.max(reference, axis=1)
    return _distance(draws, reference, low, high, num_bins)


@partial(jax.jit, static_argnames=("sizes", "num_bins", "num_repeats"))
def _floor(
    rng_key: Array, reference: Array, *, sizes: tuple[int, int], num_bins: int, num_repeats: int
) -> Array:
    low, high = jnp.min(reference, axis=1), jnp.max(reference, axis=1)

    def compute(key: Array) -> Array:
        indices = (
            jax.random.randint(k, (size,), 0, reference.shape[1], jnp.int32)
            for k, size in zip(jax.random.split(key), sizes, strict=True)
        )
        draws, reference_draws = (jnp.take(reference, index, axis=1) for index in indices)
        return _distance(draws, reference_draws, low, high, num_bins)

    return jax.lax.map(compute, jax.random.split(rng_key, num_repeats))
