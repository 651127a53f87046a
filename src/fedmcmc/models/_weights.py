"""Sampling weights: pseudo-likelihoods, and draws with the spread of the sandwich estimator."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree

from fedmcmc.data import FederatedData, fold
from fedmcmc.gradients import ClientDensity, minus_hessian
from fedmcmc.models._columns import read_rows, row_weights
from fedmcmc.models._formula import Formula
from fedmcmc.models._schema import find_factors
from fedmcmc.records import Samples
from fedmcmc.types import ArrayTree, Client, Posterior


def scale_weights(
    formula: Formula, column: str, tables: Mapping[Any, Any], dictionary: Any, client: str | None
) -> Formula:
    """Return the formula with sampling weights, scaled to a sum of the number of rows.

    The clients' parts are their sum of weights and their number of rows. Raise `ValueError` if
    there are frequency weights or random effects, too, or a weight is negative.
    """
    if formula.weights is not None or formula.random:
        conflict = "random effects" if formula.random else f"weights {formula.weights!r}"
        raise ValueError(
            f"sampling_weights={column!r} cannot be combined with {conflict} in {formula.text!r}."
        )
    raw = replace(formula, weights=column)
    factors = [*find_factors(raw, dictionary)]
    sites = [read_rows(raw, table, label, factors, client) for label, table in tables.items()]
    total = float(sum(row_weights(raw, site).sum() for site in sites))
    num_rows = sum(len(site.numbers) for site in sites)
    if not total > 0:
        raise ValueError(f"The sampling weights {column!r} of all rows are zero.")
    return replace(raw, weights=f"({column}) * {num_rows / total!r}", sampling_weights=column)


def sandwich(
    posterior: Posterior, data: FederatedData, position: ArrayTree, *, is_frequency: bool = False
) -> np.ndarray:
    """Return the sandwich covariance ``H^-1 J H^-1`` of a position's coordinates, ``[d, d]``.

    H is minus the Hessian of the log posterior, and J the sum of outer products of the scores of
    rows (HC0), which have frequency weights or sampling weights. A client sends its sums of both.
    """
    flat, unravel = ravel_pytree(position)
    density = ClientDensity(posterior, jnp.ones(()), unravel)

    def of_rows(rows: Mapping[str, Array], mask: Array) -> Array:
        scores = jax.jacfwd(lambda x: density.terms(x, rows))(flat)
        scores = jnp.where(mask[:, None], scores, 0)
        if not is_frequency:
            return scores.T @ scores
        weights = jnp.where(mask, rows["weights"], 1)
        return scores.T @ (scores / weights[:, None])

    def of_client(client: Client) -> tuple[Array, Array]:
        curvature = density.fold(lambda total_fn: minus_hessian(total_fn, flat), client)
        return fold(of_rows, client), curvature

    with jax.default_matmul_precision("highest"):
        products, curvature = jax.jit(data.sum_over_clients, static_argnums=0)(of_client)
        curvature = curvature + minus_hessian(density.prior, flat)
    inverse = np.linalg.inv(np.asarray(curvature, np.float64))
    return np.asarray(inverse @ np.asarray(products, np.float64) @ inverse)


def robust_samples(
    samples: Samples, posterior: Posterior, data: FederatedData, formula: Formula
) -> Samples:
    """Return samples whose draws are stretched around their mean to the sandwich covariance.

    The draws then have the spread of estimates from repeated samples of rows (Williams and Savitsky
    2021, doi:10.1111/insr.12376). Raise `ValueError` if the model has random effects.
    """
    if formula.random:
        raise ValueError(
            f"Robust intervals need independent rows, and {formula.text!r} has random effects."
        )
    _, unravel = ravel_pytree(jax.tree.map(lambda leaf: leaf[0, 0], samples.draws))
    flatten = jax.vmap(jax.vmap(lambda x: ravel_pytree(x)[0]))
    draws = np.asarray(flatten(samples.draws), np.float64)
    mean, size = draws.mean((0, 1)), draws.shape[-1]
    is_frequency = formula.weights is not None and formula.sampling_weights is None
    position = unravel(jnp.asarray(mean, jnp.result_type(float)))
    target = sandwich(posterior, data, position, is_frequency=is_frequency)
    spread = np.cov(draws.reshape(-1, size).T).reshape(size, size)
    stretch = np.linalg.cholesky(target) @ np.linalg.inv(np.linalg.cholesky(spread))
    stretched = jnp.asarray(mean + (draws - mean) @ stretch.T, jnp.result_type(float))
    return replace(samples, draws=jax.tree.map(np.asarray, jax.vmap(jax.vmap(unravel))(stretched)))
