"""Runs of many chains that start in exact draws of their target, and then must stay there."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fedmcmc
from tests.oracles.federations import Federation

NUM_CHAINS = 8192
FEDERATION = Federation()
POSTERIOR = FEDERATION.target


class Run(NamedTuple):
    """Of every chain and round: where it was, and what the kernel reported."""

    draws: np.ndarray  # [num_chains, num_rounds, d]
    info: fedmcmc.rounds.RoundInfo  # leaves [num_chains, num_rounds]
    servers: list  # the server's states before every round, leaves [num_chains, ...]


def exact_draws(seed=0, num=NUM_CHAINS, moments=POSTERIOR):
    """Return independent draws of a Gaussian, ``[num, d]``."""
    z = np.random.default_rng(seed).normal(size=(num, len(moments.mean)))
    return moments.mean + z @ np.linalg.cholesky(moments.covariance).T


@partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
def _start(kernel, data, positions):
    return jax.vmap(fedmcmc.simulate(kernel, data).init)(positions)


@partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
def _round(kernel, data, keys, states):
    step = fedmcmc.simulate(kernel, data).step
    return jax.vmap(step)(keys, states)


def run(kernel, starts, num_rounds, *, data=None, seed=1):
    """Run a chain from each start, ``[num_chains, d]``, for some rounds."""
    data = FEDERATION.data if data is None else data
    keys = jax.random.split(jax.random.key(seed), len(starts))
    states = _start(kernel, data, jnp.asarray(starts, jnp.result_type(float)))
    draws, infos, servers = [], [], []
    for _ in range(num_rounds):
        servers.append(jax.tree.map(np.asarray, states.server))
        states, info = _round(kernel, data, keys, states)
        draws.append(np.asarray(states.broadcast.position))
        infos.append(jax.tree.map(np.asarray, info))
    info = jax.tree.map(lambda *leaves: np.stack(leaves, axis=1), *infos)
    return Run(np.stack(draws, axis=1), info, servers)
