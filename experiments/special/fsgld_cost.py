"""Sections 3.1 and 5 of El Mekkaoui et al. (2021): what a conducive gradient costs, counted."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedmcmc
from experiments.tidy import Row, from_numbers


def rows(
    dims: Sequence[int],
    num_clients: Sequence[int],
    rows_per_client: int,
    batch_sizes: Sequence[int],
    seed: int,
) -> list[Row]:
    """Return ratios of operations for every kind of surrogates and dimension."""
    result: list[Row] = []
    for kind, dim in itertools.product(("diagonal", "dense"), dims):
        prior = fedmcmc.Gaussian.from_moments(jnp.ones(dim), variance=jnp.ones(dim))
        of_prior = _operations(lambda p, x, y: y + p.grad_log(x), prior, *jnp.zeros((2, dim)))
        extra = []
        for num in num_clients:
            rng = np.random.default_rng(seed)
            features = rng.standard_normal((num, rows_per_client, dim), np.float32)
            label = np.zeros(rows_per_client, np.float32)
            data = fedmcmc.FederatedData.from_clients([{"x": x, "y": label} for x in features])
            spread = {"variance": jnp.ones((num, dim))}
            if kind == "dense":
                spread = {"covariance": jnp.broadcast_to(jnp.eye(dim), (num, dim, dim))}
            surrogates = fedmcmc.Gaussian.from_moments(jnp.ones((num, dim)), **spread)
            of_step = {size: _of_step(fedmcmc.minibatch(size), data) for size in batch_sizes}
            conducive = fedmcmc.conducive(fedmcmc.minibatch(batch_sizes[0]), surrogates)
            extra.append(_of_step(conducive, data) - of_step[batch_sizes[0]])
        settings = {"surrogates": kind, "dim": dim}
        numbers = {
            "operations_over_clients_range": max(extra) - min(extra),
            "cost_over_prior": extra[0] / of_prior,
        }
        result += from_numbers("FSGLD", settings, numbers)
        for size, count in of_step.items():
            share = {"cost_over_local_step": extra[0] / (of_prior + count)}
            result += from_numbers("FSGLD", settings | {"batch_size": size}, share)
    return result


def _of_step(estimator: fedmcmc.types.GradientEstimator, data: fedmcmc.FederatedData) -> int:
    """Count the operations of a gradient estimate."""
    client, theta = data.client(0), jnp.zeros(data.rows["x"].shape[-1])
    draws = estimator.prepare(jax.random.key(0), theta, client, 1)
    broadcast = fedmcmc.types.Broadcast(jnp.int32(0), theta)
    context, _ = estimator.start(_loglikelihood_fn, broadcast, (), client)

    # The estimator is an argument: else its surrogates are constants of the program.
    def step(estimator: Any, *arguments: Any) -> Any:
        return estimator.estimate(_loglikelihood_fn, *arguments)

    draw = jax.tree.map(lambda leaf: leaf[0], draws)
    return _operations(step, estimator, draw, theta, context, client)


def _operations(function: Callable[..., Any], *arguments: Any) -> int:
    """Return what XLA counts in a program before it is optimized."""
    counted = jax.jit(function).lower(*arguments).cost_analysis()
    return int(counted.get("flops", 0))


def _loglikelihood_fn(theta: jax.Array, rows: dict[str, jax.Array]) -> jax.Array:
    logits = rows["x"] @ theta
    return rows["y"] * logits - jax.nn.softplus(logits)
