"""Number of rows that a client evaluates per round, counted by a log likelihood with a callback.

Local steps, leapfrog steps, snapshots and control variates all evaluate gradients, and no list of
them exists. So a kernel is run with a log likelihood that counts its rows whenever it is evaluated.
"""

import threading
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc.data import FederatedData
from fedmcmc.gaussian import Gaussian
from fedmcmc.gradients import as_surrogates
from fedmcmc.pytrees import trees
from fedmcmc.rounds import SINGLE_DEVICE, prepare_round, run_round
from fedmcmc.tuning._gaussian_clients import nodes_of, replace_nodes
from fedmcmc.types import (
    ArrayTree,
    ClientTerms,
    FederatedKernel,
    FederatedState,
    Federation,
    Posterior,
    as_functions,
    compiled,
)

MIN_ROUNDS, MAX_ROUNDS = 3, 60
"""Numbers of rounds that are counted: `MIN_ROUNDS` if their counts are equal, else `MAX_ROUNDS`."""

_ROW_COUNTS: Counter[int] = Counter()
"""Number of rows that each client evaluated in the current round."""
_LOCK = threading.Lock()
"""Lock of `_ROW_COUNTS`, which belongs to the process so that programs can be shared."""


def count_rows_per_round(
    kernel: FederatedKernel, federation: Federation, surrogates: Gaussian
) -> float:
    """Return the mean over rounds of the largest number of rows that a client evaluates.

    An evaluation is a log likelihood or its gradient. All participants wait for the slowest client.
    """
    passes = max(
        node.loglikelihood_fn.passes if isinstance(node.loglikelihood_fn, ClientTerms) else 1
        for node in nodes_of(as_functions(kernel), Posterior)
    )
    counting = as_functions(Posterior(_minus_square, _count_rows))
    counted = replace_nodes(as_functions(kernel), Posterior, lambda _: counting)
    ids = np.repeat(np.arange(federation.num_clients, dtype=np.int32), np.asarray(federation.sizes))
    data = FederatedData.from_arrays(ids, ids)
    key = jax.random.key(0)
    means = as_surrogates(surrogates).precision_mean
    state = counted.init(key, jax.tree.map(lambda leaf: leaf[0], means), data)

    counts: list[int] = []
    with _LOCK:
        while len(counts) < MIN_ROUNDS or (len(set(counts)) > 1 and len(counts) < MAX_ROUNDS):
            jax.effects_barrier()
            _ROW_COUNTS.clear()
            round_ = jnp.int32(len(counts))
            state = jax.block_until_ready(_advance(counted, data, key, state, round_))
            jax.effects_barrier()
            counts.append(max(_ROW_COUNTS.values(), default=0))
    return passes * float(np.mean(counts))


@compiled
def _advance(
    kernel: FederatedKernel, data: FederatedData, key: Array, state: FederatedState, round_: Array
) -> FederatedState:
    cohort, draws = prepare_round(kernel, data, SINGLE_DEVICE, key, state.broadcast, round_)
    return run_round(kernel, data, SINGLE_DEVICE, state, cohort, draws)[0]


def _count_rows(position: ArrayTree, rows: Array) -> Array:
    """Return a log likelihood of `rows`, which are numbers of clients, and count them."""
    value = _minus_square(position)
    # `value` depends on the position: under vmap, JAX then calls once for each position.
    jax.debug.callback(_add_rows, rows[0], rows.shape[0], value)
    return jnp.full(rows.shape, value)


def _add_rows(client: Array, num: Array, value: Array) -> None:
    del value
    _ROW_COUNTS[int(client)] += int(num)


def _minus_square(position: ArrayTree) -> Array:
    return -trees.squared_norm(position) / 2
