"""Running means and covariances of draws."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import Partial

from fedmcmc.pytrees import trees
from fedmcmc.streaming._types import Accumulator, Transform, transformed, zero_mean
from fedmcmc.types import ArrayTree, Static, as_functions

STRUCTURES = ("diagonal", "dense")


class Moments(NamedTuple):
    """Moments of draws.

    Attributes
    ----------
    num_draws
        Number of draws per chain; after `pool`, number of all draws.
    mean
        Leaves ``[num_chains, ...]``; after `pool` ``[...]``.
    variance
        Leaves as in `mean`, with the divisor ``num_draws - 1``; NaN for a single draw.
    covariance
        ``[num_chains, d, d]`` over the raveled tree, ``()`` unless the structure is ``"dense"``.
    """

    num_draws: int
    mean: ArrayTree
    variance: ArrayTree
    covariance: ArrayTree = ()


class _MomentsState(NamedTuple):
    shift: ArrayTree  # first draw, subtracted from all draws to keep digits
    mean: ArrayTree
    squares: ArrayTree  # sums of squared differences from the mean; flat products if dense


def moments(
    fn: Transform | None = None, *, structure: Literal["diagonal", "dense"] = "diagonal"
) -> Accumulator:
    """Accumulate the mean and the variances of draws.

    The first draw is subtracted from all draws, so that the rounding error of float32 is small
    compared with the spread of the draws even if their mean is large (Welford 1962).

    Parameters
    ----------
    fn
        Function ``draw -> pytree`` whose moments are accumulated; by default the identity.
    structure
        ``"diagonal"`` for variances, with three times the memory of a draw; ``"dense"`` for the
        covariance matrix as well.

    Returns
    -------
    Accumulator
        Accumulator of each chain's `Moments`; `pool` combines the chains.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, fedmcmc
    >>> posterior = fedmcmc.Posterior(lambda t: -0.5 * t**2, lambda t, x: -0.5 * (x - t) ** 2)
    >>> data = fedmcmc.FederatedData.from_clients([jnp.ones(3), jnp.zeros(4)])
    >>> kernel = fedmcmc.lsd(posterior, step_size=0.01)
    >>> record = fedmcmc.Record({"moments": fedmcmc.streaming.moments()}, keep_draws=False)
    >>> settings = dict(num_rounds=2000, num_burnin=100, num_chains=4, progress=False)
    >>> samples = fedmcmc.sample(jax.random.key(0), kernel, data, 0.0, record=record, **settings)
    >>> pooled = fedmcmc.streaming.pool(samples.streams["moments"])
    >>> samples.num_draws, pooled.num_draws, bool(abs(pooled.mean - 0.375) < 0.05)
    (0, 7600, True)
    """
    if structure not in STRUCTURES:
        raise ValueError(f"structure must be one of {STRUCTURES}, got {structure!r}.")
    mapped, dense = as_functions(() if fn is None else fn), Static(structure == "dense")
    return Accumulator(
        Partial(_init, mapped, dense), Partial(_update, mapped, dense), Partial(_result, dense)
    )


def _init(fn: Transform | tuple[()], dense: Static[bool], draw: ArrayTree) -> _MomentsState:
    zeros = zero_mean(transformed(fn, draw))
    if not dense.value:
        return _MomentsState(zeros, zeros, zeros)
    flat = trees.ravel(zeros)
    return _MomentsState(zeros, zeros, jnp.outer(flat, flat))


def _update(
    fn: Transform | tuple[()],
    dense: Static[bool],
    rng_key: Array,
    index: Array,
    draw: ArrayTree,
    state: _MomentsState,
) -> _MomentsState:
    del rng_key
    value = jax.tree.map(
        lambda leaf, place: jnp.asarray(leaf).astype(place.dtype),
        transformed(fn, draw),
        state.shift,
    )
    shift = trees.select(index == 0, value, state.shift)
    value = trees.subtract(value, shift)
    before = trees.subtract(value, state.mean)
    mean = trees.add_scaled(state.mean, 1 / (index + 1).astype(jnp.result_type(float)), before)
    after = trees.subtract(value, mean)
    if dense.value:
        squares = state.squares + jnp.outer(trees.ravel(before), trees.ravel(after))
    else:
        squares = jax.tree.map(lambda s, a, b: s + a * b, state.squares, before, after)
    return _MomentsState(shift, mean, squares)


def _result(dense: Static[bool], state: _MomentsState, count: int) -> Moments:
    scale = 1 / (count - 1) if count > 1 else np.nan
    mean = jax.tree.map(lambda a, b: a + b, state.shift, state.mean)
    if not dense.value:
        return Moments(count, mean, jax.tree.map(lambda leaf: leaf * scale, state.squares))
    # The products are not exactly symmetric, since their two factors use different means.
    covariance = (state.squares + np.swapaxes(state.squares, -1, -2)) / 2 * scale
    diagonal = np.diagonal(covariance, axis1=-2, axis2=-1)
    like = jax.tree.map(lambda leaf: leaf[0], mean)
    variance = jax.tree.map(np.asarray, trees.unravel(jnp.asarray(diagonal), like))
    return Moments(count, mean, variance, covariance)


def pool(per_chain: Moments) -> Moments:
    """Return the moments of all chains' draws together, leaves without the chain axis.

    Raises
    ------
    TypeError
        If `per_chain` is not `Moments`.

    Examples
    --------
    >>> import numpy as np
    >>> two_chains = Moments(2, np.array([1.0, 3.0]), np.array([2.0, 2.0]))
    >>> pooled = pool(two_chains)
    >>> pooled.num_draws, float(pooled.mean), round(float(pooled.variance), 4)
    (4, 2.0, 2.6667)
    """
    if not isinstance(per_chain, Moments):
        raise TypeError(f"pool expects Moments, got {type(per_chain).__name__}.")
    chains = jax.tree.leaves(per_chain.mean)[0].shape[0]
    count, total = per_chain.num_draws, per_chain.num_draws * chains
    mean = jax.tree.map(lambda leaf: leaf.mean(axis=0), per_chain.mean)

    def pooled(within: np.ndarray, between: np.ndarray) -> np.ndarray:
        return ((count - 1) * within.sum(axis=0) + count * between.sum(axis=0)) / (total - 1)

    away = jax.tree.map(lambda leaf, middle: leaf - middle, per_chain.mean, mean)
    variance = jax.tree.map(lambda v, a: pooled(v, a**2), per_chain.variance, away)
    covariance: ArrayTree = ()
    if not trees.is_empty(per_chain.covariance):
        flat = np.concatenate([a.reshape(chains, -1) for a in jax.tree.leaves(away)], axis=1)
        covariance = pooled(per_chain.covariance, flat[:, :, None] * flat[:, None, :])
    return Moments(total, mean, variance, covariance)
