"""Log likelihoods of a network's outputs, one term per row, and draws of outcomes."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.nn import one_hot

__all__ = ["LIKELIHOODS", "Likelihood", "check_name"]


class Likelihood(NamedTuple):
    """How outcomes are distributed given outputs.

    `term` is ``(outputs, outcome, *numbers) -> [n, ...]`` log densities, `draw` is
    ``(rng_key, outputs, shape, *numbers) -> outcome``, `mean` is ``outputs -> outputs``, `check`
    is ``(outputs, outcome) -> None`` of shapes of the one and values of the other.
    """

    term: Callable[..., Array]
    draw: Callable[..., Array]
    mean: Callable[[Array], Array]
    check: Callable[[Any, np.ndarray], None]


def as_real(outputs: Array) -> Array:
    """Return `outputs` in float32 or better: half precision is too coarse for log densities."""
    return outputs.astype(jnp.promote_types(outputs.dtype, jnp.float32))


def _valid(holds: Array, like: Array) -> Array:
    # An outcome that cannot be turns terms and gradients into NaN, which stops a run.
    return jnp.where(holds, jnp.ones((), like.dtype), jnp.full((), jnp.nan, like.dtype))


def _categorical_term(logits: Array, outcome: Array) -> Array:
    logits, classes = as_real(logits), logits.shape[-1]
    # A sum, for the gradient of a gather is a slow scatter.
    chosen = one_hot(outcome, classes, dtype=logits.dtype)
    term = jnp.sum(jax.nn.log_softmax(logits) * chosen, axis=-1)
    return term * _valid((outcome >= 0) & (outcome < classes), term)


def _draw_categorical(rng_key: Array, logits: Array, shape: tuple[int, ...]) -> Array:
    del shape
    noise = jax.random.gumbel(rng_key, (logits.size,), as_real(logits).dtype)
    return jnp.argmax(as_real(logits) + noise.reshape(logits.shape), axis=-1)


def _softmax(logits: Array) -> Array:
    return jax.nn.softmax(as_real(logits))


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


def _aligned(outputs: Array, shape: tuple[int, ...]) -> Array:
    # A last layer with one unit leaves an axis that outcomes do not have.
    return as_real(outputs).reshape(shape)


def _bernoulli_term(logits: Array, outcome: Array) -> Array:
    logits = _aligned(logits, outcome.shape)
    outcome = outcome.astype(logits.dtype)
    term = outcome * logits - jax.nn.softplus(logits)
    return term * _valid((outcome == 0) | (outcome == 1), term)


def _draw_bernoulli(rng_key: Array, logits: Array, shape: tuple[int, ...]) -> Array:
    logits = _aligned(logits, shape)
    noise = jax.random.logistic(rng_key, (logits.size,), logits.dtype)
    return logits + noise.reshape(shape) > 0


def _sigmoid(logits: Array) -> Array:
    return jax.nn.sigmoid(as_real(logits))


def _gaussian_term(means: Array, outcome: Array, noise_scale: Array) -> Array:
    means = _aligned(means, outcome.shape)
    scale = noise_scale.astype(means.dtype)
    gap = (outcome.astype(means.dtype) - means) / scale
    return -0.5 * (gap**2 + math.log(2 * math.pi)) - jnp.log(scale)


def _draw_gaussian(
    rng_key: Array, means: Array, shape: tuple[int, ...], noise_scale: Array
) -> Array:
    means = _aligned(means, shape)
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
    "categorical": Likelihood(_categorical_term, _draw_categorical, _softmax, _check_categorical),
    "bernoulli": Likelihood(_bernoulli_term, _draw_bernoulli, _sigmoid, _check_bernoulli),
    "gaussian": Likelihood(_gaussian_term, _draw_gaussian, as_real, _check_aligned),
}


def check_name(name: Any) -> None:
    """Check that `name` is one of `LIKELIHOODS`."""
    if name not in LIKELIHOODS:
        raise ValueError(
            f"likelihood must be one of {sorted(LIKELIHOODS)}, or for from_flax a function "
            f"(outputs, batch) -> [n]; got {name!r}."
        )
