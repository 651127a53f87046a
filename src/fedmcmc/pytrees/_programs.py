"""Programs that run at once."""

from typing import Any

import jax
import numpy as np

from fedmcmc._types import ArrayTree


def now(compiled_fn: Any, *args: ArrayTree) -> Any:
    """Return ``compiled_fn(*args)`` in NumPy, computed now though the caller may be traced.

    `compiled_fn` is what `jax.jit` returned, and `args` hold no tracer. Under
    `jax.ensure_compile_time_eval` each operation would be a program of its own, which takes ten
    times as long to compile.
    """
    return jax.tree.map(np.asarray, compiled_fn.lower(*args).compile()(*args))
