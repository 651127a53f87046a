"""Telling rows of another distribution by a score, such as the predictive entropy."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc.metrics._arguments import as_finite, broadcast, over_leading, same_precision


def ood_auc(scores_in: Any, scores_out: Any) -> Array:
    """Return the area under the ROC curve of a score that is to be higher out of distribution.

    ``P(S_in < S_out) + P(S_in = S_out) / 2`` over all pairs of a row in and a row out of
    distribution (the Mann-Whitney statistic), from ranks: ``O(n log n)``. 1 is a perfect
    separation, 1/2 that of a score which does not tell; swapping the arguments gives one minus it.
    (Ties counted in full, ``P(S_in <= S_out)``, would give 1 to a score that is constant.)

    Parameters
    ----------
    scores_in, scores_out
        ``[..., num_in]`` and ``[..., num_out]``, for instance `predictive_entropy` of the rows of
        a test set and of those of another data set.

    Returns
    -------
    Array
        ``[...]``, in ``[0, 1]``; leading axes are broadcast.

    Raises
    ------
    ValueError
        If shapes do not fit or concrete scores are not finite.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> float(ood_auc(jnp.array([0.1, 0.2, 0.3]), jnp.array([0.3, 0.9])))
    0.9166666865348816
    """
    inside = as_finite("scores_in", scores_in, "num_in")
    outside = as_finite("scores_out", scores_out, "num_out")
    return _auc(*broadcast(("scores_in", inside, 1), ("scores_out", outside, 1)))


@jax.jit
def _auc(inside: Array, outside: Array) -> Array:
    def one(a: Array, b: Array) -> Array:
        ordered = jnp.sort(b)
        # Twice the number of outside scores above plus that of ties: an integer, hence exact.
        below = jnp.searchsorted(ordered, a, side="left")
        up_to = jnp.searchsorted(ordered, a, side="right")
        twice = 2 * b.shape[0] - below - up_to
        return jnp.mean(twice.astype(a.dtype)) / (2 * b.shape[0])

    return over_leading(one, inside.ndim - 1)(*same_precision(inside, outside))
