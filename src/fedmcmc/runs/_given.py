"""What `sample` was given, made into a run on one device or over those of a mesh."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from jax import Array

from fedmcmc._types import ArrayTree, FederatedKernel, FederatedState
from fedmcmc.data import ClientLoader, FederatedData, is_first
from fedmcmc.diagnostics import StoppingRule
from fedmcmc.gaussian import Gaussian
from fedmcmc.placement import HostStore, Spread, place
from fedmcmc.pytrees import trees
from fedmcmc.runs._mesh_run import MeshRun
from fedmcmc.runs._run import Keeping, Run
from fedmcmc.runs._starts import check_state, laid_out, start
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


def on_one_device(given: Given, data: FederatedData, client_store: HostStore | None) -> Run:
    """Return the run on the device that JAX takes by itself."""
    kernel, keys, keeping, position, state, until, _ = given
    rows = data.pooled() if kernel.participation.pooled else data
    if state is not None:
        check_state(kernel, rows, keys, state)
        if client_store is not None:
            state = client_store.adopt(state, replace_files=keeping.replaces_files)
    elif client_store is None:
        state = start(kernel, rows, keys, position)
    else:
        state = client_store.start(
            lambda some: start(kernel, some, keys, position),
            rows,
            replace_files=keeping.replaces_files,
        )
    given.print_prediction(data, state)
    rows = laid_out(kernel, rows, keys, state.broadcast.position)
    if client_store is None or trees.is_empty(state.clients):
        return Run(kernel, rows, keys, keeping, state, until)
    return StoredRun(kernel, rows, keys, keeping, state, until, client_store)


def on_mesh(given: Given, data: FederatedData | ClientLoader, spread: Spread) -> Run:
    """Return the run over the devices of a mesh, on which clients and chains lie as `spread` says.

    Raises
    ------
    ValueError
        If surrogates are to predict from rows that no process has whole.
    """
    kernel, keys, keeping, position, state, until, surrogates = given
    if surrogates is not None and isinstance(data, ClientLoader):
        raise ValueError(
            "surrogates= predicts from all rows, which a ClientLoader has in no one place."
        )
    placed = place(data, spread.mesh, spread.totals)
    if state is None:
        ids, state = placed.ids, start(kernel, placed.own, keys, position)
    else:
        ids = np.arange(data.num_clients)
        check_state(kernel, replace(placed.own, members=None, partial=False), keys, state)
    if isinstance(data, FederatedData):
        given.print_prediction(data, state)
    plain = laid_out(kernel, placed.plain, keys, state.broadcast.position)
    on_devices = replace(placed.data, at_a_time=plain.at_a_time)
    placed = placed._replace(data=on_devices, plain=plain)
    return MeshRun(kernel, placed, keys, keeping, state, until, ids)
