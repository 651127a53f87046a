"""`sample`: run a kernel on data and keep draws."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from tqdm import tqdm

from fedmcmc import streams, trees
from fedmcmc._run import Run
from fedmcmc._segments import Collect
from fedmcmc._types import ArrayTree, FederatedKernel, FederatedState, as_functions
from fedmcmc.data import FederatedData
from fedmcmc.samples import Samples
from fedmcmc.simulate import RoundInfo, as_key

__all__ = ["local_positions", "sample"]


def local_positions(state: FederatedState, info: RoundInfo) -> ArrayTree:
    """Collect all local iterates of the round, leaves ``[num_local_steps, *event]``.

    For `collect` of `sample`, with kernels that hand one chain from client to client: FSGLD's
    chain is all its local states.
    """
    del state
    return jax.tree.map(lambda leaf: leaf[0], info.clients.local_positions)


def sample(
    rng_key: Array,
    kernel: FederatedKernel,
    data: FederatedData,
    position: ArrayTree | Callable[[Array], ArrayTree] | None = None,
    *,
    num_rounds: int,
    num_burnin: int = 0,
    thinning: int = 1,
    num_chains: int = 1,
    collect: Collect | None = None,
    progress: bool = True,
    state: FederatedState | None = None,
) -> Samples:
    """Run `kernel` on `data` and keep draws.

    Parameters
    ----------
    rng_key
        Key of the run. Chain ``c`` uses ``fold_in(rng_key, c)``, so its draws do not depend on
        the number of chains.
    kernel
        A federated kernel.
    data
        Every client's rows.
    position
        Where each chain starts: a pytree, or ``rng_key -> pytree`` for a start a chain. Not
        needed where `state` is given.
    num_rounds
        Rounds to run, burn-in included.
    num_burnin
        The first rounds, not kept.
    thinning
        Of the rest every `thinning`-th round is kept (the last of each group):
        ``num_draws = (num_rounds - num_burnin) // thinning``.
    num_chains
        Chains, vmapped.
    collect
        ``(state, RoundInfo) -> pytree``, what is kept of a round; by default the kernel's draw.
        `fedmcmc.local_positions` keeps all local iterates.
    progress
        Whether to show a progress bar.
    state
        ``samples.state`` of an earlier run to go on from. With the same key the two runs give
        the very draws of an uninterrupted one.

    Returns
    -------
    Samples

    Raises
    ------
    ValueError
        On settings or data that do not fit, before anything is compiled.
    NonFiniteError
        If a chain turns non-finite; the draws before are in its `samples`.
    """
    _check_counts(num_rounds, num_burnin, thinning, num_chains)
    kernel = as_functions(kernel)
    rows = data.pooled() if kernel.participation.pooled else data
    keys = jax.vmap(lambda c: jax.random.fold_in(as_key(rng_key), c))(jnp.arange(num_chains))
    if state is None:
        state = _start(kernel, rows, keys, position)
    else:
        _check_state(state, num_chains)
    first = int(state.broadcast.round[0])
    run = Run(kernel, rows, keys, collect, state)
    with tqdm(total=num_rounds, unit="round", disable=not progress) as bar:
        return run.go(first, first + num_burnin, first + num_rounds, thinning, bar)


def _check_counts(num_rounds: int, num_burnin: int, thinning: int, num_chains: int) -> None:
    given = dict(
        num_rounds=num_rounds, num_burnin=num_burnin, thinning=thinning, num_chains=num_chains
    )
    for name, count in given.items():
        least = 0 if name == "num_burnin" else 1
        if int(count) != count or count < least:
            raise ValueError(f"{name} must be an integer of at least {least}, got {count!r}.")
    if num_burnin > num_rounds:
        raise ValueError(
            f"num_rounds counts burn-in too: got num_rounds={num_rounds}, num_burnin={num_burnin}."
        )


def _check_state(state: FederatedState, num_chains: int) -> None:
    shape = jnp.shape(state.broadcast.round)
    if shape != (num_chains,):
        raise ValueError(
            f"state must hold {num_chains} chains on the first axis of every leaf, as in "
            f"Samples.state; its round has shape {shape}."
        )


def _start(
    kernel: FederatedKernel, data: FederatedData, keys: Array, position: ArrayTree
) -> FederatedState:
    if position is None:
        raise ValueError("Give a position to start from, or the state of an earlier run.")
    place_keys, init_keys = (
        jax.vmap(lambda key, i=i: streams.draw_key(key, jnp.uint32(2**32 - 1 - i)))(keys)
        for i in range(2)
    )
    if callable(position):
        places = jax.vmap(position)(place_keys)
    else:
        places = jax.tree.map(
            lambda x: jnp.broadcast_to(jnp.asarray(x), (len(keys), *jnp.shape(x))), position
        )
    places = jax.tree.map(_as_float, places)
    if not bool(trees.all_finite(places)):
        raise ValueError("The start position holds NaN or infinite values.")
    return jax.vmap(kernel.init, in_axes=(0, 0, None))(init_keys, places, data)


def _as_float(leaf: Any) -> Array:
    array = jnp.asarray(leaf)
    if jnp.issubdtype(array.dtype, jnp.floating):
        return array
    return array.astype(jnp.result_type(float))
