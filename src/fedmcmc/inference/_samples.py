"""Means of tilted distributions from iterates, whose moments are the samples'."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc._types import ArrayTree, Client, Federation, GradientEstimator, Posterior
from fedmcmc.dynamics import Training, Visitor, train
from fedmcmc.inference._types import Found, Mean
from fedmcmc.pytrees import trees

__all__ = ["SampleMean"]


@dataclass(frozen=True, eq=False)
class SampleMean(Mean):
    """Moments of the iterates at the ends of a training's windows, which are the samples."""

    estimator: GradientEstimator
    training: Training

    def num_calls(self, client: Client) -> int:
        """Return a static bound on the client's gradients per round."""
        return self.training.length.most(client)

    def check(
        self,
        posterior: Posterior,
        position: ArrayTree,
        federation: Federation,
        second: str | None,
    ) -> None:
        """Refuse the variance of a single sample."""
        if second is not None and self._num_samples < 2:
            raise ValueError("A variance of samples takes num_samples of at least 2, got 1.")

    def moments(
        self,
        gradient_fn: Callable[[ArrayTree, ArrayTree], ArrayTree],
        draws: ArrayTree,
        position: ArrayTree,
        client: Client,
        round_: Array,
        second: str | None,
    ) -> Found:
        """Train, and return the samples' moments."""
        trained = train(
            self.training, gradient_fn, draws, position, client, round_, _Moments(second)
        )
        divisor = max(self._num_samples - 1, 1)
        variance = jax.tree.map(lambda leaf: leaf / divisor, trained.kept.scatter)
        return Found(trained.kept.mean, variance, jnp.sqrt(trained.mean_square))

    @property
    def _num_samples(self) -> int:
        length = self.training.length
        return length.num_windows - length.num_burnin


class _Welford(NamedTuple):
    mean: ArrayTree
    scatter: ArrayTree  # (), shaped as the mean, or [d, d]


@dataclass(frozen=True, eq=False)
class _Moments(Visitor):
    """Keeps mean and scatter of the windows' last iterates."""

    second: str | None

    def init(self, position: ArrayTree) -> _Welford:
        scatter: ArrayTree = ()
        if self.second == "diagonal":
            scatter = trees.zeros_like(position)
        elif self.second == "dense":
            flat = trees.ravel(position)
            scatter = jnp.zeros((flat.size, flat.size), flat.dtype)
        return _Welford(trees.zeros_like(position), scatter)

    def visit(self, summary: _Welford, index: Array, last: ArrayTree, average: Any) -> _Welford:
        moved = trees.subtract(last, summary.mean)
        mean = trees.add_scaled(summary.mean, 1 / (index + 1).astype(jnp.result_type(float)), moved)
        left = trees.subtract(last, mean)
        if self.second is None:
            return _Welford(mean, ())
        if self.second == "diagonal":
            products = jax.tree.map(jnp.multiply, moved, left)
            return _Welford(mean, trees.add(summary.scatter, products))
        return _Welford(mean, summary.scatter + jnp.outer(trees.ravel(moved), trees.ravel(left)))
