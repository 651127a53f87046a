"""Means and covariances of draws, one draw at a time."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import Partial

from fedmcmc._types import ArrayTree, Static, as_functions
from fedmcmc.pytrees import trees
from fedmcmc.streaming._types import Accumulator, Transform, first_mean, transformed

STRUCTURES = ("diagonal", "dense")


class Moments(NamedTuple):
    """Moments of draws.

    Attributes
    ----------
    num_draws
        Of a chain; of `pool`, of all.
    mean
        Leaves ``[num_chains, ...]``; of `pool` ``[...]``.
    variance
        Likewise, with the divisor ``num_draws - 1``; NaN for a single draw.
    covariance
        ``[num_chains, d, d]`` over the raveled tree, ``()`` unless the structure is ``"dense"``.
    """

    num_draws: int
    mean: ArrayTree
    variance: ArrayTree
    covariance: Any = ()


class _State(NamedTuple):
    shift: ArrayTree  # the first draw: means relative to it lose no digits to its size
    mean: ArrayTree
    squares: ArrayTree  # sums of squared differences from the mean; flat products if dense


def moments(
    fn: Transform | None = None, *, structure: Literal["diagonal", "dense"] = "diagonal"
) -> Accumulator:
    """Accumulate the mean and the variances of draws.

    Numbers are taken relative to the first draw, so that the rounding of float32 is small beside
    the spread of the draws also where their mean is large.

    Parameters
    ----------
    fn
        ``draw -> pytree``, of which moments are taken; by default of the draw itself.
    structure
        ``"diagonal"`` for variances, three times the memory of a draw; ``"dense"`` for the
        covariance matrix too.

    Returns
    -------
    Accumulator
        Its result is `Moments`, each chain's own; `pool` puts the chains together.

    References
    ----------
    Welford (1962), Note on a method for calculating corrected sums of squares and products.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(
    ...     lambda theta: -0.5 * theta**2, lambda theta, x: -0.5 * (x - theta) ** 2
    ... )
    >>> data = fedmcmc.FederatedData.from_clients([jnp.ones(3), jnp.zeros(4)])
    >>> samples = fedmcmc.sample(
    ...     jax.random.key(0), fedmcmc.lsd(posterior, step_size=0.01), data, 0.0, num_rounds=2000,
    ...     num_burnin=100, num_chains=4, progress=False,
    ...     record=fedmcmc.Record({"moments": fedmcmc.streaming.moments()}, keep_draws=False),
    ... )
    >>> found = fedmcmc.streaming.pool(samples.streams["moments"])
    >>> samples.num_draws, found.num_draws, bool(abs(found.mean - 0.375) < 0.05)
    (0, 7600, True)
    """
    if structure not in STRUCTURES:
        raise ValueError(f"structure must be one of {STRUCTURES}, got {structure!r}.")
    mapped, dense = as_functions(() if fn is None else fn), Static(structure == "dense")
    return Accumulator(
        Partial(_init, mapped, dense), Partial(_update, mapped, dense), Partial(_result, dense)
    )


def _init(fn: Any, dense: Static[bool], draw: ArrayTree) -> _State:
    zeros = first_mean(transformed(fn, draw))
    if not dense.value:
        return _State(zeros, zeros, zeros)
    flat = trees.ravel(zeros)
    return _State(zeros, zeros, jnp.outer(flat, flat))


def _update(
    fn: Any, dense: Static[bool], rng_key: Array, index: Array, draw: ArrayTree, state: _State
) -> _State:
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
    return _State(shift, mean, squares)


def _result(dense: Static[bool], state: _State, count: int) -> Moments:
    scale = 1 / (count - 1) if count > 1 else np.nan
    mean = jax.tree.map(lambda a, b: a + b, state.shift, state.mean)
    if not dense.value:
        return Moments(count, mean, jax.tree.map(lambda leaf: leaf * scale, state.squares))
    # Symmetric up to rounding, as the two differences in a product are not the same.
    covariance = (state.squares + np.swapaxes(state.squares, -1, -2)) / 2 * scale
    diagonal = np.diagonal(covariance, axis1=-2, axis2=-1)
    like = jax.tree.map(lambda leaf: leaf[0], mean)
    variance = jax.tree.map(np.asarray, trees.unravel(jnp.asarray(diagonal), like))
    return Moments(count, mean, variance, covariance)


def pool(found: Moments) -> Moments:
    """Return the moments of all chains' draws together, leaves without the chain axis.

    Raises
    ------
    TypeError
        If it is not given `Moments`.

    Examples
    --------
    >>> import numpy as np
    >>> two_chains = Moments(2, np.array([1.0, 3.0]), np.array([2.0, 2.0]))
    >>> whole = pool(two_chains)
    >>> whole.num_draws, float(whole.mean), round(float(whole.variance), 4)
    (4, 2.0, 2.6667)
    """
    if not isinstance(found, Moments):
        raise TypeError(f"pool takes Moments, got {type(found).__name__}.")
    chains = jax.tree.leaves(found.mean)[0].shape[0]
    count, total = found.num_draws, found.num_draws * chains
    mean = jax.tree.map(lambda leaf: leaf.mean(axis=0), found.mean)

    def whole(within: np.ndarray, between: np.ndarray) -> np.ndarray:
        # Sums of squares within chains and of the chains' means about the common one.
        return ((count - 1) * within.sum(axis=0) + count * between.sum(axis=0)) / (total - 1)

    away = jax.tree.map(lambda leaf, middle: leaf - middle, found.mean, mean)
    variance = jax.tree.map(lambda v, a: whole(v, a**2), found.variance, away)
    covariance: Any = ()
    if not trees.is_empty(found.covariance):
        flat = np.concatenate([a.reshape(chains, -1) for a in jax.tree.leaves(away)], axis=1)
        covariance = whole(found.covariance, flat[:, :, None] * flat[:, None, :])
    return Moments(total, mean, variance, covariance)
