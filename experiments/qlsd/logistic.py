"""Logistic regression as a federated posterior, with what its samplers need to know.

Rows are `experiments.qlsd.federations.Rows`: features ``[num, d]`` and label ``[num]``. There is no
intercept but a column of ones among the features. The potential is minus the log likelihood plus
``prior_precision |theta|^2 / 2``, without the prior's normalisation, so that a precision of zero
is the flat prior. The centre of QLSD* is found by `fedmcmc.surrogates.mode`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import Partial

import fedmcmc
from experiments.qlsd.federations import Rows

__all__ = ["binary", "log_probabilities", "multinomial", "potential_fn", "smoothness"]


def binary(num_features: int, prior_precision: float) -> fedmcmc.Posterior:
    """Return the model of labels 0 and 1 over positions ``theta [d]``."""
    return _posterior(_binary_terms, (num_features,), prior_precision)


def multinomial(num_features: int, num_classes: int, prior_precision: float) -> fedmcmc.Posterior:
    """Return the model of labels 0 to ``num_classes - 1`` over positions ``theta [d, classes]``.

    No class is the reference: a vector added to all columns changes the prior alone, so that the
    flat prior gives an improper posterior.
    """
    return _posterior(_multinomial_terms, (num_features, num_classes), prior_precision)


def _posterior(
    terms: Callable[[Array, Rows], Array], shape: tuple[int, ...], prior_precision: float
) -> fedmcmc.Posterior:
    if not prior_precision >= 0:
        raise ValueError(f"prior_precision must not be negative, got {prior_precision!r}.")
    return fedmcmc.Posterior(
        logprior_fn=Partial(_logprior, jnp.float32(prior_precision)),
        loglikelihood_fn=Partial(terms),
        init_fn=lambda rng_key: jax.random.normal(rng_key, shape),
    )


def _logprior(precision: Array, theta: Array) -> Array:
    return -0.5 * precision * jnp.sum(theta**2)


def _binary_terms(theta: Array, rows: Rows) -> Array:
    score = rows.features @ theta
    return jnp.where(rows.label == 1, score, 0) - jax.nn.softplus(score)


def _multinomial_terms(theta: Array, rows: Rows) -> Array:
    scores = rows.features @ theta
    chosen = jnp.take_along_axis(scores, rows.label[:, None], axis=1)[:, 0]
    return chosen - jax.nn.logsumexp(scores, axis=1)


def log_probabilities(theta: Array, features: Array) -> Array:
    """Return ``log p(class | features)``, ``[num, classes]``, for either model."""
    scores = features @ theta
    if scores.ndim == 1:
        scores = jnp.stack([jnp.zeros_like(scores), scores], axis=1)
    return jax.nn.log_softmax(scores, axis=1)


def potential_fn(
    posterior: fedmcmc.Posterior, data: fedmcmc.FederatedData
) -> Callable[[Array], Array]:
    """Return ``U(theta) = -log p(theta) - log p(all rows | theta)``, up to a constant.

    It is the one function of which quantiles are compared between samplers (HPD error).
    """
    return Partial(_potential, posterior, data.rows)


def _potential(posterior: fedmcmc.Posterior, rows: Rows, theta: Array) -> Array:
    return -posterior.logprior_fn(theta) - jnp.sum(posterior.loglikelihood_fn(theta, rows))


def smoothness(features: np.ndarray, prior_precision: float, factor: float = 0.25) -> float:
    """Return ``factor * lambda_max(X'X) + prior_precision``, a bound on the potential's curvature.

    Parameters
    ----------
    features
        All rows, ``[num_rows, d]``.
    prior_precision
        Of the Gaussian prior.
    factor
        What the curvature of a row is at most, over ``x x'``: 1/4 for the binary model and 1/2 for
        the multinomial one (Bohning 1992). The released notebooks take 1/4 for both, with which a
        step of ``1 / M`` may be twice too long for ten classes.
    """
    x = np.asarray(features, np.float64)
    gram = x.T @ x if x.shape[1] <= x.shape[0] else x @ x.T
    return float(factor * np.linalg.eigvalsh(gram)[-1] + prior_precision)
