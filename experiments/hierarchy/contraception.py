"""Binary outcomes with effects of districts or communities, and the error of their quadrature."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import fedmcmc
from experiments.hierarchy import methods, radon, studies
from experiments.tidy import Row
from fedmcmc.gradients import fold_terms
from fedmcmc.pytrees import trees

__all__ = ["Config", "rows", "run"]


@dataclass(frozen=True)
class Config:
    """Settings; see `experiments.hierarchy.radon.Config`.

    Attributes
    ----------
    data
        ``contraception`` or ``immunization``.
    nodes
        Numbers of quadrature nodes whose errors are computed.
    most_nodes
        Number of nodes of the quadrature for comparison.
    """

    seed: int = 0
    data: str = "contraception"
    methods: tuple[str, ...] = ("fit", "gaussian", "mala", "gibbs", "recentered", "joint")
    nodes: tuple[int, ...] = (1, 3, 5, 9)
    most_nodes: int = 25
    num_reference: int = 3000
    num_draws: int = 4000
    num_chains: int = 4
    num_rounds: int = 3000
    num_burnin: int = 300

    def __post_init__(self) -> None:
        radon.check(self, studies.BINARY)
        for num in (*self.nodes, self.most_nodes):
            if num < 1 or num % 2 == 0:
                raise ValueError(f"nodes must be odd: {num}")


def run(config: Config, out: Path) -> dict[str, Any]:
    """Run pooled NUTS and all methods on one set of data, and compute errors of quadrature."""
    study = studies.load(config.data)
    metrics = radon.compared(study, config)
    if config.nodes:
        metrics["quadrature"] = quadrature(study, config, metrics["truth"]["mean"])
    return metrics


def rows(metrics: Mapping[str, Any]) -> list[Row]:
    """Return the tidy rows of a run."""
    errors = [
        Row("quadrature", name, line[name], {"nodes": line["nodes"]})
        for line in metrics.get("quadrature", ())
        for name in ("error_of_log_likelihood", "error_of_gradient")
    ]
    return methods.rows(metrics) + errors


def quadrature(
    study: studies.Study, config: Config, place: dict[str, float]
) -> list[dict[str, Any]]:
    """Return errors of the log likelihood and of its gradient near the posterior mean, float64."""
    with jax.enable_x64(True):
        rows = {
            name: np.asarray(leaf, np.float64 if leaf.dtype.kind == "f" else None)
            for name, leaf in study.data.rows.items()
        }
        groups = np.repeat(np.arange(study.data.num_clients), np.asarray(study.data.sizes))
        data = fedmcmc.FederatedData.from_arrays(rows, groups)
        posterior = fedmcmc.from_numpyro(study.model, example=data)
        position = {
            name: jnp.asarray([place[f"{name}[0]"]] if name in ("mu", "tau") else place[name])
            for name in study.shared
        }
        at_most = _value_and_slope(posterior, data, config.most_nodes, position)
        errors = []
        for num in config.nodes:
            value, slope = _value_and_slope(posterior, data, num, position)
            errors.append(
                {
                    "nodes": num,
                    "error_of_log_likelihood": float(value - at_most[0]),
                    "error_of_gradient": float(np.abs(slope - at_most[1]).max()),
                }
            )
    return errors


def _value_and_slope(
    posterior: fedmcmc.Posterior, data: fedmcmc.FederatedData, nodes: int, position: Any
) -> tuple[Array, Array]:
    """Return the log likelihood of all clients, effects integrated out, and its gradient."""
    shared = fedmcmc.marginal(posterior, nodes=nodes)

    @jax.jit
    @jax.value_and_grad
    def total(at: Any) -> Array:
        def of_client(client: Any) -> Array:
            return fold_terms(
                shared.loglikelihood_fn,
                lambda terms, mask: jnp.sum(jnp.where(mask, terms(at), 0)),
                client,
            )

        return jnp.sum(jax.vmap(of_client, in_axes=(data.client_axes(),))(data.everyone()))

    value, slope = total(position)
    return value, trees.ravel(slope)
