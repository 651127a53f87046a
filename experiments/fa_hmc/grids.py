"""Many chains as one compiled program: those of every step size, or of one in stretches."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import fedmcmc
from experiments import restarts
from fedmcmc import rounds

__all__ = ["run_grid", "run_stretches"]


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
    ahead, keys = rounds.PREPARED_BYTES // num_chains, _keys(rng_key, num_chains)

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


def run_stretches(
    rng_key: Array,
    kernel: fedmcmc.FederatedKernel,
    data: fedmcmc.FederatedData,
    position: Any,
    *,
    num_chains: int,
    num_rounds: int,
) -> Iterator[Any]:
    """Yield a run's draws in stretches, leaves ``[num_chains, num_rounds, *event]``.

    They are those of `run_grid`. The next stretch is computed when it is asked for, so that a run
    can end when it has shown what it is for. Each is one part of a run that survives being killed.

    Parameters
    ----------
    rng_key, data, position, num_chains
        As of `run_grid`.
    kernel
        Of all chains.
    num_rounds
        Of each stretch.
    """
    ahead, keys = rounds.PREPARED_BYTES // num_chains, _keys(rng_key, num_chains)

    @jax.jit
    def begin(kernel_: fedmcmc.FederatedKernel, data_: fedmcmc.FederatedData, keys_: Array) -> Any:
        return jax.vmap(lambda key: kernel_.init(fedmcmc.random.init_key(key), position, data_))(
            keys_
        )

    @jax.jit
    def stretch(
        kernel_: fedmcmc.FederatedKernel, data_: fedmcmc.FederatedData, keys_: Array, state: Any
    ) -> Any:
        def chain(key: Array, own: Any) -> Any:
            end, records = rounds.run_rounds(
                kernel_, data_, key, own, num_rounds, ahead_bytes=ahead
            )
            return end, records.draws

        return jax.vmap(chain)(keys_, state)

    state = begin(kernel, data, keys)
    while True:
        state, draws = restarts.once(
            lambda state=state: jax.tree.map(np.asarray, stretch(kernel, data, keys, state))
        )
        yield draws


def _keys(rng_key: Array, num_chains: int) -> Array:
    return jax.vmap(lambda c: jax.random.fold_in(rng_key, c))(jnp.arange(num_chains))
