"""Minibatches whose rows are transformed at random."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
from jax import Array
from jax.tree_util import Partial

from fedmcmc._types import (
    ArrayTree,
    Client,
    Disclosure,
    GradientEstimator,
    LogDensity,
    register_dataclass,
)
from fedmcmc.gradients._estimators import Derived
from fedmcmc.gradients._minibatches import SIZE_WARNING, Epochs, Minibatch
from fedmcmc.pytrees import trees
from fedmcmc.random import augmentation_key

T = TypeVar("T")

Augmentation = Callable[[Array, ArrayTree], ArrayTree]
"""``(rng_key, rows) -> rows``, of the same shapes and types."""


class _Randomness(NamedTuple):
    rows: ArrayTree  # of the minibatches
    keys: Array  # [num_calls], of their transformations


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Augmented(Derived):
    """An estimate from transformed rows; see `augmented`."""

    disclosure = Disclosure(
        "no separate question: allows minibatches whose rows are transformed at random",
        warning=SIZE_WARNING,
    )

    estimator: GradientEstimator
    augment_fn: Any

    def prepare(
        self, rng_key: Array, like: ArrayTree, client: Client, num_calls: int
    ) -> _Randomness:
        # The minibatches have the key that they have without transformations: the same rows.
        rows = self.estimator.prepare(rng_key, like, client, num_calls)
        return _Randomness(rows, jax.random.split(augmentation_key(rng_key), num_calls))

    def estimate(
        self,
        loglikelihood_fn: LogDensity,
        draws: _Randomness,
        position: ArrayTree,
        context: ArrayTree,
        client: Client,
    ) -> ArrayTree:
        def of_transformed(place: ArrayTree, rows: ArrayTree) -> Array:
            transformed = self.augment_fn(draws.keys, rows)
            difference = trees.first_difference(rows, transformed)
            if difference:
                raise ValueError(
                    "augment_fn must return rows of the shapes and types that it is given: "
                    f"{difference}."
                )
            terms: Array = loglikelihood_fn(place, transformed)
            return terms

        return self.estimator.estimate(of_transformed, draws.rows, position, context, client)


def augmented(estimator: GradientEstimator, augment_fn: Augmentation) -> GradientEstimator:
    """Transform the rows of each minibatch at random, as images are flipped and shifted.

    Parameters
    ----------
    estimator
        `minibatch` or `epochs`.
    augment_fn
        ``(rng_key, rows) -> rows``: rows have leaves ``[batch_size, ...]``, and come back in the
        same shapes and types. It is called once per call of the estimator, which is once per local
        step, with a key of its own; a pure function of `jax`.

    Raises
    ------
    TypeError
        If `augment_fn` is not a function.
    ValueError
        If `estimator` is another one; in a trace, where rows come back in other shapes.

    Notes
    -----
    The expectation of an estimate is the gradient of ``sum_i E log p(g(x_i) | theta)`` over a
    client's rows, with the mean over transformations ``g``. So chains with small steps sample
    ``prior * prod_i exp(E log p(g(x_i) | theta))``: each row counts once, by the geometric mean of
    the likelihoods of all its transformed copies. That is not the posterior of the rows as they
    are, unless the model does not see the transformations, nor one of more rows. Random
    transformations add noise to every step as minibatches do, and so widen the chain.

    Corrections whose full passes see rows as they are (`svrg`, `fixed_point`, `scaffold`) refuse
    it; `conducive` takes it.

    References
    ----------
    Nabarro et al. (2022), Data augmentation in Bayesian neural networks and the cold posterior
    effect.

    Examples
    --------
    Rows ``x`` with a flipped sign, each with probability one half. A run judges draws by the rows
    as they are, and warns where the other posterior is far from theirs:

    >>> import warnings
    >>> import jax, jax.numpy as jnp
    >>> import fedmcmc
    >>> def flip(rng_key, rows):
    ...     return rows * jax.random.rademacher(rng_key, rows.shape, rows.dtype)
    >>> estimator = augmented(fedmcmc.minibatch(2), flip)
    >>> data = fedmcmc.FederatedData.from_clients([jnp.ones(8)])
    >>> posterior = fedmcmc.Posterior(lambda t: 0.0, lambda t, x: -0.5 * (x - t) ** 2)
    >>> kernel = fedmcmc.langevin(posterior, estimator, step_size=0.05)
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore", fedmcmc.SamplingWarning)
    ...     samples = fedmcmc.sample(
    ...         jax.random.key(0), kernel, data, 0.0, num_rounds=4_000, progress=False
    ...     )
    >>> bool(abs(samples.draws.mean()) < 0.1)  # and 1 without flips
    True
    """
    if not isinstance(estimator, Minibatch | Epochs):
        raise ValueError(
            "augmented goes around fedmcmc.minibatch or fedmcmc.epochs, whose rows are transformed "
            f"once per step; got {type(estimator).__name__}."
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
    """Return whether a kernel or estimator holds one whose rows are transformed."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, Augmented))
    return any(isinstance(node, Augmented) for node in nodes)


def without_augmented(tree: T) -> T:
    """Return a kernel or estimator whose rows are as they are."""
    changed: T = jax.tree.map(
        lambda node: node.estimator if isinstance(node, Augmented) else node,
        tree,
        is_leaf=lambda node: isinstance(node, Augmented),
    )
    return changed


def refuse_augmented(estimator: GradientEstimator, name: str) -> None:
    """Raise `ValueError` where a correction's full passes would see rows as they are."""
    if has_augmented_data(estimator):
        raise ValueError(
            f"{name} takes full passes over rows as they are, which minibatches of transformed "
            "rows do not estimate: use the minibatches without it."
        )
