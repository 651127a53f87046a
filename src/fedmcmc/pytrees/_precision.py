"""Products in single precision on every device, for what hangs on log densities."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import jax

P = ParamSpec("P")
T = TypeVar("T")


def in_single_precision(fn: Callable[P, T]) -> Callable[P, T]:
    """Have the products within `fn` keep all digits of float32.

    By default JAX rounds the factors of a product to three digits or fewer on a GPU (TF32) or TPU
    (bfloat16). A log likelihood summed over all rows then has an error that tests of Metropolis and
    importance weights take for a difference between places.
    """

    @wraps(fn)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        with jax.default_matmul_precision("highest"):
            return fn(*args, **kwargs)

    return called
