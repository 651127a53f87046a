"""A run whose clients' states stay on the host: only those of coming cohorts are on the device."""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._types import ArrayTree, FederatedKernel, FederatedState, Participation
from fedmcmc.data import FederatedData
from fedmcmc.diagnostics import StoppingRule
from fedmcmc.placement import HostStore, Placement, read, write
from fedmcmc.random import streams
from fedmcmc.rounds import Arrangement, Plan, Segment
from fedmcmc.runs._run import Keeping, Run

__all__ = ["StoredRun"]


class StoredRun(Run):
    """A run in segments so short that the states of their cohorts fit on the device.

    The program is that of a run with all states on the device; only the table in which it looks up
    states is shorter, and `Arrangement.slots` says where a client's state lies in it.
    """

    def __init__(
        self,
        kernel: FederatedKernel,
        data: FederatedData,
        keys: Array,
        keeping: Keeping,
        state: FederatedState,
        until: StoppingRule | None,
        store: HostStore,
        arrangement: Arrangement,
        placement: Placement,
    ) -> None:
        cohort_size = kernel.participation.cohort_size
        assert cohort_size is not None  # `sample` checks
        self.store, self.all_states = store, state.clients
        total = sum(leaf.nbytes for leaf in jax.tree.leaves(state.clients))
        a_slot = max(total // data.num_clients, 1)  # all chains'
        a_round = cohort_size * len(keys)
        affordable = store.device_bytes // (a_slot * a_round)
        self.rounds = int(max(1, min(affordable, -(-data.num_clients // a_round))))
        self.num_slots = min(a_round * self.rounds, data.num_clients)
        self.reader = ThreadPoolExecutor(1)
        self.coming: _Coming | None = None
        self.ids = np.zeros(0, np.int64)
        arrangement = replace(arrangement, slots=jnp.zeros(data.num_clients, jnp.int32))
        short = jax.tree.map(
            lambda leaf: jnp.zeros((leaf.shape[0], self.num_slots, *leaf.shape[2:]), leaf.dtype),
            state.clients,
        )
        given = (kernel, data, keys, keeping, state._replace(clients=short), until)
        super().__init__(*given, arrangement=arrangement, placement=placement)
        self.pace = self.pace._replace(longest=min(self.pace.longest, self.rounds))
        self.state = state

    def _compute(self, at: int, stop: int, plan: Plan, capacity: int) -> Segment:
        ids, table = self._states_for(at)
        slots = np.zeros(self.data.num_clients, np.int32)
        slots[ids] = np.arange(len(ids))
        arrangement = replace(self.arrangement, slots=jnp.asarray(slots))
        state = self.state._replace(clients=jax.tree.map(jnp.asarray, table))
        segment = self._call(arrangement, state, at, stop, plan, capacity)
        self.ids = ids
        # Read while the device computes, and renewed in `_take` where this segment changes it.
        self.coming = self._ahead(stop)
        return segment

    def _ahead(self, at: int) -> "_Coming":
        ids = self._cohorts(at)
        return _Coming(at, ids, self.reader.submit(read, self.all_states, ids, self.num_slots))

    def _states_for(self, at: int) -> tuple[np.ndarray, ArrayTree]:
        """Return the clients of the rounds from `at` on, and their states."""
        coming, self.coming = self.coming, None
        if coming is not None:
            table = coming.table.result()
            if coming.at == at:
                return coming.ids, table
        ids = self._cohorts(at)
        return ids, read(self.all_states, ids, self.num_slots)

    def _cohorts(self, at: int) -> np.ndarray:
        cohorts = _cohorts_of(
            self.kernel.participation,
            self.keys,
            jnp.asarray(at, jnp.int32),
            num_rounds=self.rounds,
            num_clients=self.data.num_clients,
        )
        return np.unique(np.asarray(cohorts))

    def _take(self, segment: Segment, at: int, stop: int) -> None:
        coming = self.coming
        table = None if coming is None else coming.table.result()  # nothing is read while we write
        write(self.all_states, self.ids, segment.state.clients)
        if coming is not None and table is not None:
            places = np.flatnonzero(np.isin(coming.ids, self.ids))
            changed = coming.ids[places]
            for leaf, old in zip(
                jax.tree.leaves(self.all_states), jax.tree.leaves(table), strict=True
            ):
                old[:, places] = leaf[:, changed]
        state = segment.state._replace(clients=self.all_states)
        super()._take(segment._replace(state=state), at, stop)

    def _restore(self, state: FederatedState) -> None:
        for leaf, saved in zip(
            jax.tree.leaves(self.all_states), jax.tree.leaves(state.clients), strict=True
        ):
            leaf[...] = saved
        rest = jax.tree.map(jnp.asarray, state._replace(clients=()))
        self.state = rest._replace(clients=self.all_states)

    def _save(self, *, wait: bool) -> None:
        # States on the host change in place, and are too large for a copy.
        super()._save(wait=True)


class _Coming(NamedTuple):
    """States that are being read for the rounds from `at` on."""

    at: int
    ids: np.ndarray
    table: Future[ArrayTree]


@partial(jax.jit, static_argnames=("num_rounds", "num_clients"))
def _cohorts_of(
    participation: Participation, keys: Array, at: Array, *, num_rounds: int, num_clients: int
) -> Array:
    """Return the clients of the rounds from `at` on, all chains together, ``[...]``."""

    def cohort(key: Array, round_: Array) -> Array:
        return participation.prepare(streams.cohort_key(key, round_), num_clients).ids

    rounds = at + jnp.arange(num_rounds, dtype=jnp.int32)
    return jax.vmap(lambda key: jax.vmap(lambda r: cohort(key, r))(rounds))(keys)
