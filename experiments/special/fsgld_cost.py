"""Sections 3.1 and 5 of El Mekkaoui et al. (2021): what a conducive gradient costs, counted."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedmcmc
from experiments.tidy import Row, from_numbers

__all__ = ["rows"]


def rows(
    dims: Sequence[int],
    num_clients: Sequence[int],
    rows_per_client: int,
    batch_sizes: Sequence[int],
    seed: int,
) -> list[Row]:
    """Return operations for every kind of surrogates, dimension and number of clients."""
    result: list[Row] = []
    for kind in ("diagonal", "dense"):
        for dim in dims:
            settings = {"surrogates": kind, "dim": dim}
            operations = []
            for num in num_clients:
                numbers, minibatches = _counts(seed, kind, dim, num, rows_per_client, batch_sizes)
                operations.append(numbers["conducive_gradient_operations"])
                place = settings | {"num_clients": num}
                result += from_numbers("FSGLD", place, numbers)
                for size, count in minibatches.items():
                    place = settings | {"num_clients": num, "batch_size": size}
                    result += from_numbers("FSGLD", place, {"minibatch_operations": count})
            prior = numbers["prior_operations"]
            summary = {
                "operations_over_clients_range": max(operations) - min(operations),
                "cost_over_prior": operations[0] / prior,
            }
            result += from_numbers("FSGLD", settings, summary)
            for size, count in minibatches.items():
                share = {"cost_over_local_step": operations[0] / (prior + count)}
                result += from_numbers("FSGLD", settings | {"batch_size": size}, share)
    return result


def _counts(
    seed: int, kind: str, dim: int, num_clients: int, num_rows: int, batch_sizes: Sequence[int]
) -> tuple[dict[str, int], dict[int, int]]:
    """Return operations of a conducive gradient, the prior and a visit, and of minibatches."""
    rng = np.random.default_rng(seed)
    data = fedmcmc.FederatedData.from_clients(
        [
            {"x": x, "y": np.zeros(len(x), np.float32)}
            for x in rng.standard_normal((num_clients, num_rows, dim), np.float32)
        ]
    )
    surrogates, zero = _gaussians(kind, dim, num_clients), jnp.zeros(dim)
    plain = {num: fedmcmc.minibatch(num) for num in batch_sizes}
    of_batches = {num: _of(estimator, data) for num, estimator in plain.items()}
    size = batch_sizes[0]
    with_surrogates = _of(fedmcmc.conducive(plain[size], surrogates), data)
    once, each = (a - b for a, b in zip(with_surrogates, of_batches[size], strict=True))
    prior = jax.tree.map(lambda leaf: leaf[0], _gaussians("diagonal", dim, 1))
    numbers = {
        "conducive_gradient_operations": each,
        "prior_operations": _operations(_plus_prior, prior, zero, zero),
        "visit_operations": once,
    }
    return numbers, {num: count for num, (_, count) in of_batches.items()}


def _of(estimator: fedmcmc.GradientEstimator, data: fedmcmc.FederatedData) -> tuple[int, int]:
    """Count the operations of an estimator: once a visit, and in each local step."""
    client, start = data.client(0), jnp.zeros(data.client_rows(0)["x"].shape[1])
    broadcast = fedmcmc.Broadcast(jnp.int32(0), start)
    draws = estimator.prepare(jax.random.key(0), start, client, 1)
    draw = jax.tree.map(lambda leaf: leaf[0], draws)

    # The estimator is an argument: else its surrogates are constants of the program.
    def visit(estimator: Any, broadcast: Any, client: Any) -> Any:
        return estimator.start(_loglikelihood_fn, broadcast, (), client)[0]

    def step(estimator: Any, draws: Any, theta: Any, context: Any, client: Any) -> Any:
        return estimator.estimate(_loglikelihood_fn, draws, theta, context, client)

    context = visit(estimator, broadcast, client)
    return (
        _operations(visit, estimator, broadcast, client),
        _operations(step, estimator, draw, start, context, client),
    )


def _plus_prior(prior: fedmcmc.Gaussian, theta: jax.Array, gradient: jax.Array) -> jax.Array:
    return gradient + prior.grad_log(theta)


def _operations(function: Callable[..., Any], *arguments: Any) -> int:
    """Return what XLA counts in a program before it is optimized."""
    counted = jax.jit(function).lower(*arguments).cost_analysis()
    return int(counted.get("flops", 0))


def _loglikelihood_fn(theta: jax.Array, rows: dict[str, jax.Array]) -> jax.Array:
    logits = rows["x"] @ theta
    return rows["y"] * logits - jax.nn.softplus(logits)


def _gaussians(kind: str, dim: int, num_clients: int) -> fedmcmc.Gaussian:
    """Return one per client: their numbers do not change the count."""
    means = jnp.ones((num_clients, dim))
    if kind == "diagonal":
        return fedmcmc.Gaussian.from_moments(means, variance=jnp.full((num_clients, dim), 2.0))
    covariance = jnp.broadcast_to(2.0 * jnp.eye(dim), (num_clients, dim, dim))
    return fedmcmc.Gaussian.from_moments(means, covariance=covariance)
