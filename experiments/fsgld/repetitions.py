"""Repetitions of an experiment, each with data of its own, in one compiled program.

`fedmcmc.sample` runs chains over the same data; here the data is vmapped too, which works because
`FederatedData` is a pytree and a kernel may be built inside ``vmap``.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import fedmcmc
from experiments import restarts
from fedmcmc import rounds

__all__ = ["Relay", "run", "stack", "visited_clients"]


class Relay(NamedTuple):
    """DSGLD, or FSGLD if `conducive`, as a `kernel_fn` of `run`.

    `shared` is the posterior and the step size. Two of equal fields are equal, so that jobs of a
    sweep compile once.
    """

    conducive: bool
    num_local_steps: int
    batch_size: int

    def __call__(
        self, shared: tuple[fedmcmc.Posterior, Array], fitted: Any
    ) -> fedmcmc.FederatedKernel:
        """Return the kernel of one repetition, whose surrogates are `fitted`."""
        posterior, step_size = shared
        settings: dict[str, Any] = dict(
            step_size=step_size, num_local_steps=self.num_local_steps, batch_size=self.batch_size
        )
        if self.conducive:
            return fedmcmc.fsgld(posterior, fitted, **settings)
        return fedmcmc.dsgld(posterior, **settings)


def stack(trees: Sequence[Any]) -> Any:
    """Stack pytrees of equal structure, leaves ``[len(trees), ...]``."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def run(
    kernel_fn: Callable[[Any, Any], fedmcmc.FederatedKernel],
    shared: Any,
    arguments: Any,
    data: fedmcmc.FederatedData,
    keys: Array,
    positions: Any,
    *,
    num_kept: int,
    keep_every: int,
    collect: Callable[[fedmcmc.FederatedState, fedmcmc.RoundInfo], Any],
) -> Any:
    """Run ``num_kept * keep_every`` rounds of every repetition.

    Parameters
    ----------
    kernel_fn
        Makes the kernel of one repetition of what is `shared` and its own `arguments`. Compiled
        anew for another `kernel_fn` or `collect`, so pass equal ones where the program is the same.
    shared
        What all repetitions have in common, such as the posterior.
    arguments, data, keys, positions
        Leaves with a leading axis of repetitions.
    num_kept, keep_every
        What `collect` returns is kept of every `keep_every`-th round.
    collect
        ``(state, RoundInfo) -> pytree``.

    Returns
    -------
    Pytree of NumPy arrays, leaves ``[num_repetitions, num_kept, ...]``.
    """
    program = partial(_all_repetitions, kernel_fn, num_kept, keep_every, collect)
    given = (shared, arguments, data, keys, positions)
    return restarts.once(lambda: jax.tree.map(np.asarray, program(*given)))


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _all_repetitions(
    kernel_fn: Callable[[Any, Any], fedmcmc.FederatedKernel],
    num_kept: int,
    keep_every: int,
    collect: Callable[..., Any],
    shared: Any,
    *mapped: Any,
) -> Any:
    ahead = rounds.PREPARED_BYTES // mapped[2].shape[0]
    one = partial(_repetition, kernel_fn, num_kept, keep_every, collect, ahead)
    return jax.vmap(one, in_axes=(None, 0, 0, 0, 0))(shared, *mapped)


def _repetition(
    kernel_fn: Callable[[Any, Any], fedmcmc.FederatedKernel],
    num_kept: int,
    keep_every: int,
    collect: Callable[..., Any],
    ahead_bytes: int,
    shared: Any,
    arguments: Any,
    data: fedmcmc.FederatedData,
    key: Array,
    position: Any,
) -> Any:
    kernel = kernel_fn(shared, arguments)
    state = fedmcmc.simulate(kernel, data).init(position, fedmcmc.random.init_key(key))
    settings = dict(thinning=keep_every, collect=collect, ahead_bytes=ahead_bytes)
    return rounds.run_rounds(kernel, data, key, state, num_kept * keep_every, **settings)[1].draws


def visited_clients(
    kernel: fedmcmc.FederatedKernel, keys: Array, rounds: np.ndarray, num_clients: int
) -> np.ndarray:
    """Return which client a relay visited, ``[num_repetitions, len(rounds)]``.

    The choice of a round is a function of the run's key and the round alone.
    """

    def one(key: Array, round_: Array) -> Array:
        cohort_key = fedmcmc.random.cohort_key(key, round_)
        return kernel.participation.prepare(cohort_key, num_clients).ids[0]

    both = jax.vmap(jax.vmap(one, in_axes=(None, 0)), in_axes=(0, None))
    return np.asarray(jax.jit(both)(keys, jnp.asarray(rounds, jnp.int32)))
