"""Sections 3.1 and 5 of El Mekkaoui et al. (2021): what a conducive gradient costs, counted."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedmcmc
from experiments import checks
from experiments.checks import require

__all__ = [
    "OWN",
    "PRIOR",
    "TITLE",
    "Config",
    "batch_of",
    "run",
]

TITLE = "Sections 3.1 and 5: what a conducive gradient costs, counted"
KINDS = ("diagonal", "dense")
OWN, PRIOR = "a conducive gradient", "the prior"


@dataclass(frozen=True)
class Config:
    """Settings; the paper gives none for this claim.

    Attributes
    ----------
    dims
        Numbers of parameters.
    num_clients
        Numbers of clients.
    """

    seed: int = 0
    dims: tuple[int, ...] = (10, 100)
    num_clients: tuple[int, ...] = (10, 100, 1000)
    rows_per_client: int = 20
    batch_sizes: tuple[int, ...] = (10, 256)

    def __post_init__(self) -> None:
        checks.positive(self, "rows_per_client")
        require(
            len(self.batch_sizes) > 0 and min(self.batch_sizes) > 0,
            "batch_sizes must be positive",
            self.batch_sizes,
        )
        for name in ("dims", "num_clients"):
            values = getattr(self, name)
            require(
                len(values) > 1 and min(values) > 1, f"{name} must be two or more above 1", values
            )


def run(config: Config, out: Path) -> dict[str, Any]:
    """Count the operations for every kind of surrogates, dimension and number of clients."""
    del out
    table = [
        {"surrogates": kind, "parameters": dim, "clients": num} | _counts(config, kind, dim, num)
        for kind in KINDS
        for dim in config.dims
        for num in config.num_clients
    ]
    return {"table": table}


def _counts(config: Config, kind: str, dim: int, num_clients: int) -> dict[str, int]:
    rng = np.random.default_rng(config.seed)
    data = fedmcmc.FederatedData.from_clients(
        [
            {"x": x, "y": np.zeros(len(x), np.float32)}
            for x in rng.standard_normal((num_clients, config.rows_per_client, dim), np.float32)
        ]
    )
    surrogates, zero = _gaussians(kind, dim, num_clients), jnp.zeros(dim)
    plain = {num: fedmcmc.minibatch(num) for num in config.batch_sizes}
    counts = {num: _of(estimator, data) for num, estimator in plain.items()}
    first = config.batch_sizes[0]
    with_it = _of(fedmcmc.conducive(plain[first], surrogates), data)
    once, each = (a - b for a, b in zip(with_it, counts[first], strict=True))
    prior = jax.tree.map(lambda leaf: leaf[0], _gaussians("diagonal", dim, 1))
    return {
        OWN: each,
        PRIOR: _operations(_plus_prior, prior, zero, zero),
        **{batch_of(num): own for num, (_, own) in counts.items()},
        "once a visit": once,
    }


def batch_of(num_rows: int) -> str:
    """Return the column of a minibatch."""
    return f"{num_rows} rows"


def _of(estimator: fedmcmc.GradientEstimator, data: fedmcmc.FederatedData) -> tuple[int, int]:
    """Count the operations of an estimator: once a visit, and in each local step."""
    client, start = data.client(0), jnp.zeros(data.client_rows(0)["x"].shape[1])
    broadcast = fedmcmc.Broadcast(jnp.int32(0), start)
    draws = estimator.prepare(jax.random.key(0), start, client, 1)
    first = jax.tree.map(lambda leaf: leaf[0], draws)

    # The estimator is an argument: else its surrogates are constants of the program.
    def visit(estimator: Any, broadcast: Any, client: Any) -> Any:
        return estimator.start(_loglikelihood_fn, broadcast, (), client)[0]

    def step(estimator: Any, draws: Any, theta: Any, context: Any, client: Any) -> Any:
        return estimator.estimate(_loglikelihood_fn, draws, theta, context, client)

    context = visit(estimator, broadcast, client)
    return (
        _operations(visit, estimator, broadcast, client),
        _operations(step, estimator, first, start, context, client),
    )


def _plus_prior(prior: fedmcmc.Gaussian, theta: jax.Array, gradient: jax.Array) -> jax.Array:
    return gradient + prior.grad_log(theta)


def _operations(function: Callable[..., Any], *given: Any) -> int:
    """Return what XLA counts in a program as it is written, before it is optimised."""
    counted = jax.jit(function).lower(*given).cost_analysis()
    return int(counted.get("flops", 0))


def _loglikelihood_fn(theta: jax.Array, rows: dict[str, jax.Array]) -> jax.Array:
    logits = rows["x"] @ theta
    return rows["y"] * logits - jax.nn.softplus(logits)


def _gaussians(kind: str, dim: int, num_clients: int) -> fedmcmc.Gaussian:
    """Return one per client: in what is counted their numbers play no part."""
    means = jnp.ones((num_clients, dim))
    if kind == "diagonal":
        return fedmcmc.Gaussian.from_moments(means, variance=jnp.full((num_clients, dim), 2.0))
    covariance = jnp.broadcast_to(2.0 * jnp.eye(dim), (num_clients, dim, dim))
    return fedmcmc.Gaussian.from_moments(means, covariance=covariance)
