"""Products in single precision on every device, for what hangs on log densities."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import jax

F = TypeVar("F", bound=Callable[..., Any])


def in_single_precision(fn: F) -> F:
    """Have the products within `fn` keep all digits of float32.

    By default JAX rounds the factors of a product to three digits or fewer on a GPU (TF32) or TPU
    (bfloat16). A log likelihood summed over all rows then has an error that tests of Metropolis and
    importance weights take for a difference between places.
    """

    @wraps(fn)
    def called(*args: Any, **kwargs: Any) -> Any:
        with jax.default_matmul_precision("highest"):
            return fn(*args, **kwargs)

    return called  # type: ignore[return-value]
