"""Minibatches with randomly transformed rows."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import jax
from jax import Array
from jax.tree_util import Partial

from fedmcmc.gradients._estimators import Derived, contains
from fedmcmc.gradients._minibatches import SIZE_WARNING, Epochs, Minibatch
from fedmcmc.pytrees import trees
from fedmcmc.random import augmentation_key
from fedmcmc.types import (
    ArrayTree,
    Client,
    Disclosure,
    GradientEstimator,
    LogDensity,
    register_dataclass,
)

T = TypeVar("T")

Augmentation = Callable[[Array, ArrayTree], ArrayTree]
"""Transformation ``(rng_key, rows) -> rows`` that keeps shapes and types."""


class _AugmentedDraws(NamedTuple):
    rows: ArrayTree  # draws of the minibatches
    keys: Array  # [num_calls], keys of the transformations


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Augmented(Derived):
    """Estimator with transformed rows; see `augmented`."""

    disclosure = Disclosure(
        "no separate question: allows minibatches whose rows are transformed at random",
        warning=SIZE_WARNING,
    )

    estimator: GradientEstimator
    augment_fn: Augmentation

    def prepare(
        self, rng_key: Array, like: ArrayTree, client: Client, num_calls: int
    ) -> _AugmentedDraws:
        # The minibatches use the key that they use without transformations, for the same rows.
        rows = self.estimator.prepare(rng_key, like, client, num_calls)
        return _AugmentedDraws(rows, jax.random.split(augmentation_key(rng_key), num_calls))

    def estimate(
        self,
        loglikelihood_fn: LogDensity,
        draws: _AugmentedDraws,
        position: ArrayTree,
        context: ArrayTree,
        client: Client,
    ) -> ArrayTree:
        def augmented_terms(position_: ArrayTree, rows: ArrayTree) -> Array:
            transformed = self.augment_fn(draws.keys, rows)
            difference = trees.first_difference(rows, transformed)
            if difference:
                raise ValueError(
                    "augment_fn must return rows with the shapes and types of its argument: "
                    f"{difference}."
                )
            return loglikelihood_fn(position_, transformed)

        return self.estimator.estimate(augmented_terms, draws.rows, position, context, client)


def augmented(estimator: GradientEstimator, augment_fn: Augmentation) -> GradientEstimator:
    """Transform the rows of each minibatch at random, for example by flipping images.

    The expectation of an estimate is the gradient of ``sum_i E log p(g(x_i) | theta)`` over a
    client's rows, with the mean over transformations ``g``. A chain with small steps therefore
    samples ``prior * prod_i exp(E log p(g(x_i) | theta))``, in which each row counts once. It
    differs from the posterior of the original rows, unless the model is invariant.
    Transformations add noise to every step, as minibatches do.

    Parameters
    ----------
    estimator
        `minibatch` or `epochs`. `conducive` may be applied to the result; `svrg`, `fixed_point` and
        `scaffold` may not, because their full passes use the original rows.
    augment_fn
        Pure function ``(rng_key, rows) -> rows`` that keeps the shapes ``[batch_size, ...]`` and
        types. It is called once per local step, with a new key.

    Raises
    ------
    TypeError
        If `augment_fn` is not a function.
    ValueError
        If `estimator` is neither; in a trace, if shapes or types of rows change.

    References
    ----------
    Nabarro et al. (2022), Data augmentation in Bayesian neural networks and the cold posterior
    effect.

    Examples
    --------
    >>> import fedmcmc
    >>> def flip(rng_key, rows):
    ...     return rows * jax.random.rademacher(rng_key, rows.shape, rows.dtype)
    >>> estimator = augmented(fedmcmc.minibatch(2), flip)
    """
    if not isinstance(estimator, Minibatch | Epochs):
        raise ValueError(
            "augmented needs fedmcmc.minibatch or fedmcmc.epochs, whose rows are transformed once "
            f"per step; got {type(estimator).__name__}."
        )
    if not callable(augment_fn):
        raise TypeError(
            f"augment_fn must be a function (rng_key, rows) -> rows, got "
            f"{type(augment_fn).__name__}."
        )
    return Augmented(
        estimator, augment_fn if isinstance(augment_fn, Partial) else Partial(augment_fn)
    )


def has_augmented_data(tree: ArrayTree) -> bool:
    """Return whether a kernel or estimator transforms rows."""
    return contains(tree, Augmented)


def without_augmented(tree: T) -> T:
    """Return a kernel or estimator without transformations of rows."""
    original: T = jax.tree.map(
        lambda node: node.estimator if isinstance(node, Augmented) else node,
        tree,
        is_leaf=lambda node: isinstance(node, Augmented),
    )
    return original


def refuse_augmented(estimator: GradientEstimator, name: str) -> None:
    """Raise `ValueError` if a correction with full passes would use transformed rows."""
    if has_augmented_data(estimator):
        raise ValueError(
            f"{name} takes full passes over the original rows, which minibatches of transformed "
            "rows do not estimate: use minibatches without augmented."
        )
