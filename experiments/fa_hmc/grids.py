"""Grids of step sizes as one compiled program: chains of every step size side by side."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import fedmcmc
from experiments import restarts
from fedmcmc import rounds

__all__ = ["run_grid"]


def run_grid(
    rng_key: Array,
    kernel_of: Callable[[Array], fedmcmc.FederatedKernel],
    data: fedmcmc.FederatedData,
    position: Any,
    step_sizes: Any,
    *,
    num_chains: int,
    num_rounds: int,
    num_burnin: int = 0,
) -> Any:
    """Return draws, leaves ``[num_step_sizes, num_chains, num_rounds - num_burnin, *event]``.

    Every step size has the same chains' keys, those of `fedmcmc.sample`, so its draws are what
    `sample` gives; differences between step sizes are not blurred by different noise.

    Parameters
    ----------
    rng_key
        Key of the run.
    kernel_of
        ``step_size -> FederatedKernel``, called once, with a traced number.
    data
        The clients' rows.
    position
        Where every chain starts.
    step_sizes
        ``[num_step_sizes]``.
    num_chains, num_rounds, num_burnin
        As in `fedmcmc.sample`.
    """
    ahead = rounds.PREPARED_BYTES // num_chains
    keys = jax.vmap(lambda c: jax.random.fold_in(rng_key, c))(jnp.arange(num_chains))

    @jax.jit
    def program(data_: fedmcmc.FederatedData, keys_: Array, steps: Array) -> Any:
        def chain(step_size: Array, key: Array) -> Any:
            kernel = kernel_of(step_size)
            state = kernel.init(fedmcmc.random.init_key(key), position, data_)
            kept = dict(keep_from=num_burnin, capacity=num_rounds - num_burnin, ahead_bytes=ahead)
            return rounds.run_rounds(kernel, data_, key, state, num_rounds, **kept)[1].draws

        return jax.vmap(jax.vmap(chain, (None, 0)), (0, None))(steps, keys_)

    steps = jnp.asarray(step_sizes, jnp.result_type(float))
    return restarts.once(lambda: jax.tree.map(np.asarray, program(data, keys, steps)))
