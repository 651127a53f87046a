"""Priors on a network's parameters, likelihoods of its outputs, and checks of these."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.nn import one_hot

from fedmcmc._types import ArrayTree, Posterior
from fedmcmc.interop._rows import ROW_TOLERANCE

CHECKED_ROWS = 3


def logprior(scales: ArrayTree, position: ArrayTree) -> Array:
    """Return the normalized log density; `scales` is a tree prefix of the position."""
    leaves = jax.tree.leaves(position)
    each = jax.tree.leaves(jax.tree.broadcast(scales, position))
    terms = [_normal(x, scale.astype(x.dtype)) for x, scale in zip(leaves, each, strict=True)]
    return sum(terms[1:], terms[0])


def _normal(x: Array, scale: Array) -> Array:
    # Every entry of a scale that broadcasts counts equally often.
    constant = x.size * (0.5 * math.log(2 * math.pi) + jnp.mean(jnp.log(scale)))
    return -0.5 * jnp.sum((x / scale) ** 2) - constant.astype(x.dtype)


def prior_scales(scales: Any, like: ArrayTree) -> ArrayTree:
    """Check the argument `prior_scale` of `from_flax`, and return it as a tree of arrays."""
    if callable(scales):
        scales = jax.tree_util.tree_map_with_path(
            lambda path, leaf: scales(jax.tree_util.keystr(path, simple=True, separator="."), leaf),
            like,
        )
    try:
        jax.tree.broadcast(scales, like)
    except ValueError as error:
        raise ValueError(
            f"prior_scale must be a number, a tree prefix of the position, or a function "
            f"(path, leaf) -> number; got {jax.tree.structure(scales)} for a position "
            f"{jax.tree.structure(like)}."
        ) from error

    def check(scale: Any, leaves: ArrayTree) -> Array:
        for leaf in jax.tree.leaves(leaves):
            positive(scale, leaf.shape, "prior_scale")
        return positive(scale, jnp.shape(scale), "prior_scale")

    return jax.tree.map(check, scales, like)


def positive(number: Any, shape: tuple[int, ...], name: str) -> Array:
    """Return `number` as an array that broadcasts to `shape`; positive, where it is concrete."""
    array = jnp.asarray(number)
    try:
        fits = np.broadcast_shapes(array.shape, shape) == shape
    except ValueError:
        fits = False
    if not fits or not jnp.isrealobj(array) or array.dtype == bool:
        raise ValueError(
            f"{name} must be a number or broadcast to the shape {shape}, got shape {array.shape} "
            f"and dtype {array.dtype}."
        )
    if not isinstance(array, jax.core.Tracer) and not (
        np.isfinite(array).all() and np.all(array > 0)
    ):
        raise ValueError(f"{name} must be positive and finite, got {number}.")
    return array.astype(jnp.result_type(float))


class Likelihood(NamedTuple):
    """How outcomes are distributed given outputs, which are in float32 or better.

    `term` is ``(outputs, outcome, *numbers) -> [n, ...]`` log densities, `draw` is
    ``(rng_key, outputs, shape, *numbers) -> outcome``, `mean` is ``outputs -> outputs``, `check`
    is ``(outputs, outcome) -> None`` of shapes of the one and values of the other. Where an outcome
    is one number, outputs may have one more axis of length one: a last layer with one unit.
    """

    term: Callable[..., Array]
    draw: Callable[..., Array]
    mean: Callable[[Array], Array]
    check: Callable[[Any, np.ndarray], None]


def _valid(holds: Array, like: Array) -> Array:
    # An outcome that cannot be turns terms and gradients into NaN, which stops a run.
    return jnp.where(holds, jnp.ones((), like.dtype), jnp.full((), jnp.nan, like.dtype))


def _categorical_term(logits: Array, outcome: Array) -> Array:
    classes = logits.shape[-1]
    # A sum, for the gradient of a gather is a slow scatter.
    chosen = one_hot(outcome, classes, dtype=logits.dtype)
    term = jnp.sum(jax.nn.log_softmax(logits) * chosen, axis=-1)
    return term * _valid((outcome >= 0) & (outcome < classes), term)


def _draw_categorical(rng_key: Array, logits: Array, shape: tuple[int, ...]) -> Array:
    del shape
    noise = jax.random.gumbel(rng_key, (logits.size,), logits.dtype)
    return jnp.argmax(logits + noise.reshape(logits.shape), axis=-1)


def _check_categorical(logits: Any, outcome: np.ndarray) -> None:
    if logits.shape[:-1] != outcome.shape or not logits.ndim:
        raise ValueError(
            f"The categorical likelihood needs a module that returns logits, one per class on a "
            f"last axis, shape {(*outcome.shape, 'num_classes')} for outcomes of shape "
            f"{outcome.shape}; "
            f"got {logits.shape}."
        )
    classes = logits.shape[-1]
    whole = np.issubdtype(outcome.dtype, np.integer)
    if not whole or outcome.min() < 0 or outcome.max() >= classes:
        raise ValueError(
            f"Outcomes must be integers from 0 to {classes - 1}, one below the module's number of "
            f"outputs; got {outcome.dtype} from {outcome.min()} to {outcome.max()}."
        )


def _bernoulli_term(logits: Array, outcome: Array) -> Array:
    logits = logits.reshape(outcome.shape)
    outcome = outcome.astype(logits.dtype)
    term = outcome * logits - jax.nn.softplus(logits)
    return term * _valid((outcome == 0) | (outcome == 1), term)


def _draw_bernoulli(rng_key: Array, logits: Array, shape: tuple[int, ...]) -> Array:
    logits = logits.reshape(shape)
    noise = jax.random.logistic(rng_key, (logits.size,), logits.dtype)
    return logits + noise.reshape(shape) > 0


def _gaussian_term(means: Array, outcome: Array, noise_scale: Array) -> Array:
    means = means.reshape(outcome.shape)
    scale = noise_scale.astype(means.dtype)
    gap = (outcome.astype(means.dtype) - means) / scale
    return -0.5 * (gap**2 + math.log(2 * math.pi)) - jnp.log(scale)


def _draw_gaussian(
    rng_key: Array, means: Array, shape: tuple[int, ...], noise_scale: Array
) -> Array:
    means = means.reshape(shape)
    noise = jax.random.normal(rng_key, (means.size,), means.dtype).reshape(shape)
    return means + noise_scale.astype(means.dtype) * noise


def _check_aligned(outputs: Any, outcome: np.ndarray) -> None:
    if outputs.shape not in (outcome.shape, (*outcome.shape, 1)):
        raise ValueError(
            f"The module must return one number for each outcome, shape {outcome.shape} or "
            f"{(*outcome.shape, 1)}; got {outputs.shape}."
        )


def _check_bernoulli(logits: Any, outcome: np.ndarray) -> None:
    _check_aligned(logits, outcome)
    if not np.isin(outcome, (0, 1)).all():
        raise ValueError(f"Outcomes must be 0 or 1, got {np.unique(outcome)[:5]}.")


LIKELIHOODS = {
    "categorical": Likelihood(
        _categorical_term, _draw_categorical, jax.nn.softmax, _check_categorical
    ),
    "bernoulli": Likelihood(_bernoulli_term, _draw_bernoulli, jax.nn.sigmoid, _check_bernoulli),
    "gaussian": Likelihood(_gaussian_term, _draw_gaussian, jnp.asarray, _check_aligned),
}


def check_name(name: Any) -> None:
    if name not in LIKELIHOODS:
        raise ValueError(
            f"likelihood must be one of {sorted(LIKELIHOODS)}, or for from_flax a function "
            f"(outputs, batch) -> [n]; got {name!r}."
        )


def check_terms(posterior: Posterior, position: ArrayTree, rows: ArrayTree) -> None:
    """Check without compiling that the log likelihood has one real term per row."""
    num = jax.tree.leaves(rows)[0].shape[0]
    terms = jax.eval_shape(posterior.loglikelihood_fn, position, rows)
    shape = getattr(terms, "shape", None)
    if shape != (num,) or not jnp.issubdtype(terms.dtype, jnp.floating):
        raise ValueError(
            f"The likelihood must return one real term per row, shape ({num},), got {terms}."
        )


def check_rows(posterior: Posterior, rows: ArrayTree) -> None:
    """Check that a row's log likelihood does not depend on the rows beside it or their number."""
    few = jax.tree.map(_vary, rows)

    @jax.jit
    def compare(batch: ArrayTree) -> tuple[Array, Array]:
        position = posterior.init_fn(jax.random.key(0))  # type: ignore[misc]
        # Layers that start at zero would hide what is behind them.
        position = jax.tree.map(
            lambda x: x + 0.1 * jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape),
            position,
        )
        first = jax.tree.map(lambda leaf: leaf[:1], batch)
        fn = posterior.loglikelihood_fn
        return fn(position, batch)[0], fn(position, first)[0]

    together, alone = (float(x) for x in compare(few))
    if not np.isclose(together, alone, ROW_TOLERANCE, ROW_TOLERANCE, equal_nan=True):
        raise ValueError(
            f"A row's log likelihood depends on the other rows of its batch: the first row of the "
            f"example has {alone:.6g} alone and {together:.6g} among {CHECKED_ROWS}. Minibatches "
            f"and clients would then disagree about it: normalize over features, not over rows, "
            f"and do not divide by their number (check=False turns this off)."
        )


def _vary(leaf: np.ndarray) -> np.ndarray:
    # The first row as it is, and others that are sure to differ from it.
    few = np.resize(leaf, (CHECKED_ROWS, *leaf.shape[1:]))
    if not np.issubdtype(leaf.dtype, np.floating):
        return few
    return few + np.arange(CHECKED_ROWS, dtype=leaf.dtype).reshape(-1, *[1] * (leaf.ndim - 1))
