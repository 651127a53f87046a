"""Posterior over shared parameters and effects of all groups, with one term per row.

It exists only in a simulation, for leave-one-out of rows and predictive checks: effects of real
groups stay with their owners.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro import handlers

from fedmcmc.data import FederatedData, Grouped, row_values
from fedmcmc.models._draws import EffectDraws
from fedmcmc.types import ArrayTree, Posterior

CLIENT, GROUP = "client index", "group index"
"""Names of additional columns."""


@dataclass(frozen=True)
class RowModel:
    """Model of the rows of all clients, at values of all sites in the user's space."""

    model: Any

    def observed(self, position: ArrayTree, rows: Mapping[str, Array]) -> dict[str, Any]:
        """Return the observed sites at a position ``{"shared": ..., "local": ...}``."""
        columns = {name: x for name, x in rows.items() if name not in (CLIENT, GROUP)}
        local = {name: x[rows[CLIENT], rows[GROUP]] for name, x in position["local"].items()}
        model = handlers.substitute(self.model, data={**position["shared"], **local})
        with handlers.block(), handlers.trace() as trace:
            handlers.seed(model, jax.random.key(0))(**columns)
        return {name: x for name, x in trace.items() if x.get("is_observed")}

    def log_likelihood(self, position: ArrayTree, rows: Mapping[str, Array]) -> Array:
        """Return the log density of each row, ``[num_rows]``, without weights."""
        sites = self.observed(position, rows).values()
        terms = [site["fn"].log_prob(site["value"]) for site in sites]
        return jnp.sum(jnp.stack(terms), axis=0)

    def resample(self, key: Array, position: ArrayTree, rows: Mapping[str, Array]) -> ArrayTree:
        """Return rows with outcomes drawn from the model."""
        sites = self.observed(position, rows)
        drawn = {name: site["fn"].sample(key) for name, site in sites.items()}
        return {**rows, **{name: x.astype(rows[name].dtype) for name, x in drawn.items()}}

    def logprior(self, position: ArrayTree) -> Array:
        """Return zero: criticism does not use the prior."""
        return jnp.zeros(())


def joint_posterior(
    model: Any, data: FederatedData, effects: EffectDraws
) -> tuple[Posterior, FederatedData, ArrayTree]:
    """Return the posterior, the data with the place of each row, and draws ``[num, *event]``."""
    row_model = RowModel(model)
    sizes = np.asarray(data.size)
    columns = {name: np.asarray(x) for name, x in row_values(data.rows).items()}
    columns[CLIENT] = np.repeat(np.arange(data.num_clients, dtype=np.int32), sizes)
    columns[GROUP] = row_groups(data)
    labeled = replace(data, rows=jax.tree.map(jnp.asarray, columns))
    shared = {name: jnp.asarray(x, jnp.result_type(float)) for name, x in effects.values.items()}
    local = {} if effects.latents is None else effects.latents.draws
    local = {name: jnp.nan_to_num(jnp.asarray(x)[0]) for name, x in local.items()}
    posterior = Posterior(row_model.logprior, row_model.log_likelihood, row_model.resample)
    return posterior, labeled, {"shared": shared, "local": local}


def row_groups(data: FederatedData) -> np.ndarray:
    """Return the number of each row's group within its client, ``[num_rows]`` int32."""
    if not isinstance(data.rows, Grouped):
        return np.zeros(data.num_rows, np.int32)
    return np.asarray(data.rows.group, np.int32)
