"""Priors of a network's parameters, likelihoods of its outputs, and their checks."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.nn import one_hot
from jax.typing import ArrayLike

from fedmcmc.interop._rows import ROW_TOLERANCE
from fedmcmc.types import ArrayTree, Posterior, as_functions, compiled

NUM_CHECKED_ROWS = 3


def logprior(scales: ArrayTree, position: ArrayTree) -> Array:
    """Return the normalized log density; `scales` is a tree prefix of the position."""
    leaves = jax.tree.leaves(position)
    leaf_scales = jax.tree.leaves(jax.tree.broadcast(scales, position))
    terms = [_normal(x, y.astype(x.dtype)) for x, y in zip(leaves, leaf_scales, strict=True)]
    return sum(terms[1:], terms[0])


def _normal(x: Array, scale: Array) -> Array:
    # All entries of a scale that broadcasts count equally often, so a mean replaces their sum.
    constant = x.size * (0.5 * math.log(2 * math.pi) + jnp.mean(jnp.log(scale)))
    return -0.5 * jnp.sum((x / scale) ** 2) - constant.astype(x.dtype)


def prior_scales(scales: ArrayTree, like: ArrayTree) -> ArrayTree:
    """Return the argument `prior_scale` of `from_flax` as a tree of arrays, or raise."""
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

    def check(scale: ArrayTree, leaves: ArrayTree) -> Array:
        for leaf in jax.tree.leaves(leaves):
            positive(scale, leaf.shape, "prior_scale")
        return positive(scale, jnp.shape(scale), "prior_scale")

    return jax.tree.map(check, scales, like)


def positive(number: ArrayLike, shape: tuple[int, ...], name: str) -> Array:
    """Return `number` as an array that broadcasts to `shape`; raise if it is not positive."""
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
    """Distribution of outcomes given outputs, which are in float32 or better.

    If an outcome is one number, outputs may have an additional axis of length one.

    Attributes
    ----------
    term
        ``(outputs, outcome, *scales) -> [n, ...]``, log densities.
    draw
        ``(rng_key, outputs, shape, *scales) -> outcome``.
    mean
        ``outputs -> outputs``.
    check
        ``(outputs, outcome) -> None``, checks of the shapes of outputs and the values of outcomes.
    """

    term: Callable[..., Array]
    draw: Callable[..., Array]
    mean: Callable[[Array], Array]
    check: Callable[[Any, np.ndarray], None]


def _nan_unless(is_valid: Array, like: Array) -> Array:
    # An invalid outcome turns terms and gradients into NaN, which stops a run.
    return jnp.where(is_valid, jnp.ones((), like.dtype), jnp.full((), jnp.nan, like.dtype))


def _categorical_term(logits: Array, outcome: Array) -> Array:
    classes = logits.shape[-1]
    # A sum, because the gradient of a gather is a slow scatter.
    chosen = one_hot(outcome, classes, dtype=logits.dtype)
    term = jnp.sum(jax.nn.log_softmax(logits) * chosen, axis=-1)
    return term * _nan_unless((outcome >= 0) & (outcome < classes), term)


def _draw_categorical(rng_key: Array, logits: Array, shape: tuple[int, ...]) -> Array:
    del shape
    noise = jax.random.gumbel(rng_key, (logits.size,), logits.dtype)
    return jnp.argmax(logits + noise.reshape(logits.shape), axis=-1)


def _check_categorical(logits: Array, outcome: np.ndarray) -> None:
    if logits.shape[:-1] != outcome.shape or not logits.ndim:
        raise ValueError(
            f"The categorical likelihood needs a module that returns logits, one per class on a "
            f"last axis, shape {(*outcome.shape, 'num_classes')} for outcomes of shape "
            f"{outcome.shape}; got {logits.shape}."
        )
    classes = logits.shape[-1]
    is_integer = np.issubdtype(outcome.dtype, np.integer)
    if not is_integer or outcome.min() < 0 or outcome.max() >= classes:
        raise ValueError(
            f"Outcomes must be integers from 0 to {classes - 1}, one less than the module's number "
            f"of outputs; got {outcome.dtype} from {outcome.min()} to {outcome.max()}."
        )


def _bernoulli_term(logits: Array, outcome: Array) -> Array:
    logits = logits.reshape(outcome.shape)
    outcome = outcome.astype(logits.dtype)
    term = outcome * logits - jax.nn.softplus(logits)
    return term * _nan_unless((outcome == 0) | (outcome == 1), term)


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


def _check_aligned(outputs: Array, outcome: np.ndarray) -> None:
    if outputs.shape not in (outcome.shape, (*outcome.shape, 1)):
        raise ValueError(
            f"The module must return one number for each outcome, shape {outcome.shape} or "
            f"{(*outcome.shape, 1)}; got {outputs.shape}."
        )


def _check_bernoulli(logits: Array, outcome: np.ndarray) -> None:
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


def check_name(name: object) -> None:
    if name not in LIKELIHOODS:
        raise ValueError(
            f"likelihood must be one of {sorted(LIKELIHOODS)}, or for from_flax a function "
            f"(outputs, batch) -> [n]; got {name!r}."
        )


def check_terms(posterior: Posterior, position: ArrayTree, rows: ArrayTree) -> None:
    """Raise if the log likelihood does not have one real term per row, without compiling."""
    num = jax.tree.leaves(rows)[0].shape[0]
    terms = jax.eval_shape(posterior.loglikelihood_fn, position, rows)
    shape = getattr(terms, "shape", None)
    if shape != (num,) or not jnp.issubdtype(terms.dtype, jnp.floating):
        raise ValueError(
            f"The likelihood must return one real term per row, shape ({num},), got {terms}."
        )


@compiled
def _first_terms(posterior: Posterior, batch: ArrayTree) -> tuple[Array, Array]:
    """Return the first row's log likelihood in its batch, and alone."""
    position = posterior.init_fn(jax.random.key(0))  # type: ignore[misc]
    # Layers that start at zero would hide the layers before them.
    position = jax.tree.map(
        lambda x: x + 0.1 * jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), position
    )
    single = jax.tree.map(lambda leaf: leaf[:1], batch)
    fn = posterior.loglikelihood_fn
    return fn(position, batch)[0], fn(position, single)[0]


def check_rows(posterior: Posterior, rows: ArrayTree) -> None:
    """Raise if a row's log likelihood depends on the other rows of its batch."""
    terms = _first_terms(as_functions(posterior), jax.tree.map(_vary, rows))
    together, alone = (float(x) for x in terms)
    if not np.isclose(together, alone, ROW_TOLERANCE, ROW_TOLERANCE, equal_nan=True):
        raise ValueError(
            f"A row's log likelihood depends on the other rows of its batch: the first row of the "
            f"example has {alone:.6g} alone and {together:.6g} among {NUM_CHECKED_ROWS} rows. "
            f"Minibatches and clients would then disagree about it: normalize over features, not "
            f"over rows, and do not divide by the number of rows (check=False turns this check "
            f"off)."
        )


def _vary(leaf: np.ndarray) -> np.ndarray:
    """Return the first row, and rows that differ from it if the leaf has floats."""
    rows = np.resize(leaf, (NUM_CHECKED_ROWS, *leaf.shape[1:]))
    if not np.issubdtype(leaf.dtype, np.floating):
        return rows
    shifts = np.arange(NUM_CHECKED_ROWS, dtype=leaf.dtype)
    return rows + shifts.reshape(-1, *[1] * (leaf.ndim - 1))
