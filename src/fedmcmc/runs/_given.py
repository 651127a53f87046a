"""What `sample` was given, made into a run on one device or over those of a mesh."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from jax import Array

from fedmcmc._types import ArrayTree, FederatedKernel, FederatedState
from fedmcmc.data import ClientLoader, FederatedData
from fedmcmc.diagnostics import StoppingRule
from fedmcmc.gaussian import Gaussian
from fedmcmc.placement import Placement, is_first, place
from fedmcmc.pytrees import trees
from fedmcmc.rounds import TOGETHER
from fedmcmc.runs._mesh_run import MeshRun
from fedmcmc.runs._run import Keeping, Run
from fedmcmc.runs._starts import check_state, chosen, start
from fedmcmc.runs._stored_run import StoredRun
from fedmcmc.tuning import predict_bias

__all__ = ["Given", "on_mesh", "on_one_device"]


class Given(NamedTuple):
    """What a run is given besides its rows; see `fedmcmc.sample`."""

    kernel: FederatedKernel
    keys: Array  # [num_chains]
    keeping: Keeping
    position: ArrayTree | Callable[[Array], ArrayTree] | None
    state: FederatedState | None
    until: StoppingRule | None
    surrogates: Gaussian | None

    def print_prediction(self, data: FederatedData, state: FederatedState) -> None:
        """Print what the surrogates predict, if there are any."""
        if self.surrogates is not None and is_first():
            first = int(np.asarray(state.broadcast.round)[0])
            print(predict_bias(self.kernel, data, self.surrogates, round_=first))


def on_one_device(given: Given, data: FederatedData, placement: Placement) -> Run:
    """Return the run on the device that JAX takes by itself."""
    kernel, keys, keeping, position, state, until, _ = given
    pooled, client_store = kernel.participation.pooled, placement.client_store
    rows = data.pooled() if pooled else data
    arrangement = TOGETHER if pooled else placement.arrangement(data)
    if state is not None:
        check_state(kernel, rows, keys, state, arrangement)
        if client_store is not None:
            state = client_store.adopt(state, replace_files=keeping.replaces_files)
    elif client_store is None:
        state = start(kernel, rows, keys, position, arrangement)
    else:
        state = client_store.start(
            lambda ids: start(kernel, rows, keys, position, replace(arrangement, members=ids)),
            rows.num_clients,
            replace_files=keeping.replaces_files,
        )
    given.print_prediction(data, state)
    arrangement = chosen(kernel, rows.num_clients, arrangement, keys, state.broadcast.position)
    if client_store is None or trees.is_empty(state.clients):
        return Run(
            kernel,
            rows,
            keys,
            keeping,
            state,
            until,
            arrangement=arrangement,
            placement=placement,
        )
    where = (client_store, arrangement, placement)
    return StoredRun(kernel, rows, keys, keeping, state, until, *where)


def on_mesh(given: Given, data: FederatedData | ClientLoader, placement: Placement) -> Run:
    """Return the run over the devices of a mesh, on which clients and chains lie.

    Raises
    ------
    ValueError
        If surrogates are to predict from rows that no process has whole.
    """
    kernel, keys, keeping, position, state, until, surrogates = given
    assert placement.mesh is not None
    if surrogates is not None and isinstance(data, ClientLoader):
        raise ValueError(
            "surrogates= predicts from all rows, which a ClientLoader has in no one place."
        )
    plain = placement.arrangement(data)
    placed = place(data, plain, placement.mesh, placement.totals)
    if state is None:
        ids, state = placed.ids, start(kernel, placed.own, keys, position, placed.start)
    else:
        ids = np.arange(data.num_clients)
        check_state(kernel, placed.own, keys, state, plain)
    if isinstance(data, FederatedData):
        given.print_prediction(data, state)
    plain = chosen(kernel, data.num_clients, plain, keys, state.broadcast.position)
    on_devices = replace(placed.arrangement, clients_at_a_time=plain.clients_at_a_time)
    placed = placed._replace(arrangement=on_devices)
    return MeshRun(kernel, placed, plain, placement, keys, keeping, state, until, ids)
