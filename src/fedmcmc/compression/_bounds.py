"""Published bounds on the expected bits of a quantized message."""

import numpy as np
from numpy.typing import ArrayLike

LOGARITHMS = {"log2": np.log2, "natural": np.log}


def bound_bits(
    dimension: ArrayLike, num_levels: ArrayLike, *, base: str = "log2"
) -> np.ndarray | np.float64:
    """Return the bound of Alistarh et al. (2017) on the expected bits of a quantized vector.

    With ``d = dimension``, ``s = num_levels`` and 32 bits for the norm, the bound is

    - for ``s**2 + sqrt(d) <= d / 2`` (sparse code),
      ``(3 + 1.5 log2(2 (s**2 + d) / m)) m + 32`` with ``m = s (s + sqrt(d))``;
    - for ``s = sqrt(d)``, ``2.8 d + 32``;
    - otherwise (dense code),
      ``((log2(1 + (s**2 + min(d, s sqrt(d))) / d) + 1) / 2 + 2) d + 32``.

    The factors ``1 + o(1)`` of the published logarithms are dropped, so with many levels a real
    message is longer; `message_bits` counts its bits.

    Parameters
    ----------
    dimension, num_levels
        Positive numbers or arrays, broadcast.
    base
        Base of the logarithm: ``"log2"``, or ``"natural"`` as in the numbers printed by Vono et
        al. (2022).

    Raises
    ------
    ValueError
        If a number is not positive or the base is unknown.

    References
    ----------
    Alistarh et al. (2017), QSGD, Theorem 3.2, Corollary 3.3 and Lemma A.2; Vono et al. (2022),
    QLSD, supplement, for the choice between the codes.

    Examples
    --------
    >>> (32 * 784 / bound_bits(784, 2 ** np.array([4, 8, 16]), base="natural")).round(2).tolist()
    [7.63, 6.71, 3.11]
    """
    if base not in LOGARITHMS:
        raise ValueError(f"base must be one of {', '.join(LOGARITHMS)}, got {base!r}.")
    log = LOGARITHMS[base]
    d, s = np.asarray(dimension, np.float64), np.asarray(num_levels, np.float64)
    if not (np.all(d > 0) and np.all(s > 0)):
        raise ValueError(
            f"dimension and num_levels must be positive, got {dimension!r} and {num_levels!r}."
        )
    root = np.sqrt(d)
    nonzeros = s * (s + root)
    sparse = (3 + 1.5 * log(2 * (s**2 + d) / nonzeros)) * nonzeros
    dense = (0.5 * (log(1 + (s**2 + np.minimum(d, s * root)) / d) + 1) + 2) * d
    dense_bits = np.where(s == root, 2.8 * d, dense)
    bits: np.ndarray = np.where(s**2 + root <= d / 2, sparse, dense_bits) + 32
    return bits[()]
