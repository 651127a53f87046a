"""Detection of rows from another distribution by a score, such as the predictive entropy."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from fedmcmc.metrics._arguments import as_finite, broadcast_leading, map_leading, promote


def ood_auc(scores_in: ArrayLike, scores_out: ArrayLike) -> Array:
    """Return the area under the ROC curve of a score that should be higher out of distribution.

    ``P(S_in < S_out) + P(S_in = S_out) / 2`` over all pairs of a row in and a row out of
    distribution (the Mann-Whitney statistic), from ranks in ``O(n log n)``. The area is 1 for a
    perfect separation and 1/2 for an uninformative score. Swapped arguments give one minus it.

    Parameters
    ----------
    scores_in, scores_out
        ``[..., num_in]`` and ``[..., num_out]``, such as `predictive_entropy` of the rows of a test
        set and of another data set.

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
    return _auc(*broadcast_leading(("scores_in", inside, 1), ("scores_out", outside, 1)))


@jax.jit
def _auc(inside: Array, outside: Array) -> Array:
    def compute(a: Array, b: Array) -> Array:
        ordered = jnp.sort(b)
        # Twice the number of outside scores above plus the number of ties is an exact integer.
        below = jnp.searchsorted(ordered, a, side="left")
        up_to = jnp.searchsorted(ordered, a, side="right")
        twice = 2 * b.shape[0] - below - up_to
        return jnp.mean(twice.astype(a.dtype)) / (2 * b.shape[0])

    return map_leading(compute, inside.ndim - 1)(*promote(inside, outside))
