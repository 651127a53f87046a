"""Matrix products in full single precision on all devices, for log densities."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import jax

P = ParamSpec("P")
T = TypeVar("T")


def in_single_precision(fn: Callable[P, T]) -> Callable[P, T]:
    """Return `fn` with matrix products that keep all digits of float32.

    By default, JAX rounds factors to three digits on a GPU (TF32) and to fewer on a TPU (bfloat16).
    A log likelihood summed over all rows would then have an error that is comparable to the
    differences between positions in Metropolis tests and importance weights.
    """

    @wraps(fn)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        with jax.default_matmul_precision("highest"):
            return fn(*args, **kwargs)

    return called
