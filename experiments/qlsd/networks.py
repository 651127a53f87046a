"""Names that studies of networks share until all run by the new entry; `experiments.setup.adam`."""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array

import fedmcmc
from experiments.setup import adam
from fedmcmc.interop.flax import predictive

__all__ = ["Prediction", "adam", "make"]

Prediction = Callable[[Any, tuple[Any, ...]], Array]


def make(
    module: Any, data: fedmcmc.FederatedData, prior_scale: float
) -> tuple[fedmcmc.Posterior, Prediction]:
    """Return the posterior of a flax module, and what gives probabilities ``[n, num_classes]``."""
    example = jax.tree.map(lambda leaf: leaf[:2], data.client_rows(0))
    posterior = fedmcmc.from_flax(
        module,
        example=tuple(example),
        prior_scale=prior_scale,
        likelihood="categorical",
        inputs=0,
        outcome=1,
        check=False,
    )
    return posterior, predictive(module, likelihood="categorical", inputs=0)
