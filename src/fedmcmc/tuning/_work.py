"""How many rows a client passes over in a round: counted, by a model that counts.

A kernel's gradients are not listed anywhere: local steps, leapfrog steps, snapshots and control
variates each ask for some. So rounds are run with a log likelihood that notes of how many rows it
was asked, as often as it is asked.
"""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._types import (
    ArrayTree,
    ClientTerms,
    FederatedKernel,
    Federation,
    Posterior,
    as_functions,
)
from fedmcmc.data import FederatedData
from fedmcmc.gaussian import Gaussian
from fedmcmc.gradients import as_surrogates
from fedmcmc.pytrees import trees
from fedmcmc.rounds import SINGLE_DEVICE, prepare_round, run_round
from fedmcmc.tuning._gaussian_clients import nodes_of, with_nodes

FEW_ROUNDS, MANY_ROUNDS = 3, 60
"""Counts of the former many that are equal are those of all rounds; else the mean of the latter."""


def rows_per_round(kernel: FederatedKernel, federation: Federation, surrogates: Gaussian) -> float:
    """Return over how many rows the client with most of them passes in a round, on average.

    A pass is a log likelihood or its gradient. All clients that take part wait for that client.
    """
    passes = max(
        node.loglikelihood_fn.passes if isinstance(node.loglikelihood_fn, ClientTerms) else 1
        for node in nodes_of(as_functions(kernel), Posterior)
    )
    seen: Counter[int] = Counter()

    def note(client: Any, num: Any, place: Any) -> None:
        del place
        seen[int(client)] += int(num)

    def loglikelihood_fn(position: ArrayTree, rows: Array) -> Array:
        value = _minus_square(position)
        # With a number of the position, since positions may be many where rows are the same.
        jax.debug.callback(note, rows[0], rows.shape[0], value)
        return jnp.full(rows.shape, value)

    counting = as_functions(Posterior(_minus_square, loglikelihood_fn))
    counted = with_nodes(as_functions(kernel), Posterior, lambda _: counting)
    ids = np.repeat(np.arange(federation.num_clients, dtype=np.int32), np.asarray(federation.sizes))
    data = FederatedData.from_arrays(ids, ids)
    key = jax.random.key(0)
    means = as_surrogates(surrogates).precision_mean
    state = counted.init(key, jax.tree.map(lambda leaf: leaf[0], means), data)

    @jax.jit
    def after(state: Any, round_: Array) -> Any:
        cohort, draws = prepare_round(counted, data, SINGLE_DEVICE, key, state.broadcast, round_)
        return run_round(counted, data, SINGLE_DEVICE, state, cohort, draws)[0]

    counts: list[int] = []
    while len(counts) < FEW_ROUNDS or (len(set(counts)) > 1 and len(counts) < MANY_ROUNDS):
        jax.effects_barrier()
        seen.clear()
        state = jax.block_until_ready(after(state, jnp.int32(len(counts))))
        jax.effects_barrier()
        counts.append(max(seen.values(), default=0))
    return passes * float(np.mean(counts))


def _minus_square(position: ArrayTree) -> Array:
    return -trees.squared_norm(position) / 2
