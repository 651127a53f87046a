"""Likelihood sites of a model whose terms are weighted by `numpyro.handlers.scale`."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from fedmcmc._types import ArrayTree


def find_weighted(
    trace: Callable[[ArrayTree, ArrayTree], dict[str, dict[str, Any]]],
    likelihood: tuple[str, ...],
    position: ArrayTree,
    rows: ArrayTree,
) -> tuple[str, ...]:
    """Return the names among `likelihood` whose scale is not known to be one.

    `trace` returns the sites at a position and rows, of which shapes are enough.
    """
    weighted: list[str] = []

    def run(position: ArrayTree, rows: ArrayTree) -> None:
        sites = trace(position, rows)
        weighted.extend(name for name in likelihood if not is_one(sites[name]["scale"]))

    jax.eval_shape(run, position, rows)
    return tuple(weighted)


def is_one(scale: Any) -> bool:
    """Return whether the scale of a site is known to be one."""
    if scale is None:
        return True
    return not isinstance(scale, jax.core.Tracer) and bool(np.all(np.asarray(scale) == 1))
