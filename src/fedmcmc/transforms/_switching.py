"""Transfer of a run's state to another kernel."""

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc._checks import expect
from fedmcmc._types import ArrayTree, FederatedKernel, FederatedState, as_functions, initial_state
from fedmcmc.data import FederatedData
from fedmcmc.hierarchy import (
    Locals,
    begins_latents,
    expect_same_latents,
    locals_in,
    with_drawn_latents,
    with_latents,
    with_learned_steps,
)
from fedmcmc.pytrees import trees
from fedmcmc.random import as_key, latents_key
from fedmcmc.transforms._wrapping import replace_nodes


def switch(
    kernel: FederatedKernel,
    data: FederatedData,
    state: FederatedState,
    rng_key: Array | None = None,
    *,
    clients: Array | None = None,
    carry_latents: bool = True,
) -> FederatedState:
    """Return the state with which `kernel` continues where a run of another kernel ended.

    Use it as ``sample(..., state=switch(kernel, data, samples.state))``. Positions and the round's
    number are kept; all other states start as in a new run of `kernel`. Latents of clients' groups
    keep their values if both kernels move them, and so do the step sizes of `hierarchy.hmc` and
    `hierarchy.mala`. Kernels of the same structure need no `switch`: pass the state itself.

    Parameters
    ----------
    kernel, data
        Kernel and data of the continued run, with the same ``centered=`` in both posteriors.
    state
        ``samples.state``, with a leading chain axis, or the state of one chain.
    rng_key
        Key for kernels whose start is random, and for latents that are drawn.
    clients
        Ids ``[n]`` of the clients whose states are computed, all by default.
    carry_latents
        If true, latents keep their values; if false, they start as in a new run.

    Raises
    ------
    TypeError, ValueError
        If an argument is of the wrong kind, or the kernel moves other latents than the state has.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, fedmcmc
    >>> posterior = fedmcmc.Posterior(lambda t: -0.5 * t**2, lambda t, x: -0.5 * (x - t) ** 2)
    >>> data = fedmcmc.FederatedData.from_clients([jnp.ones(3), jnp.zeros(1)])
    >>> lsd, hmc = fedmcmc.lsd(posterior, step_size=0.01), fedmcmc.hmc(posterior, 0.6)
    >>> burnt_in = fedmcmc.sample(jax.random.key(0), lsd, data, 0.0, num_rounds=9, progress=False)
    >>> switch(hmc, data, burnt_in.state).broadcast.round.tolist()
    [9]
    """
    for argument, kind, name in (
        (kernel, FederatedKernel, "kernel"),
        (data, FederatedData, "data"),
        (state, FederatedState, "state (samples.state)"),
    ):
        expect(argument, kind, name)
    kernel = as_functions(kernel)
    rows = data.pooled() if kernel.participation.pooled else data
    key = jax.random.key(0) if rng_key is None else as_key(rng_key)
    carries_latents = carry_latents and begins_latents(kernel)

    def start(key: Array, position: ArrayTree, previous: Locals | None) -> FederatedState:
        if not carries_latents:
            return initial_state(kernel, key, position, rows, clients)
        if previous is None:
            starting_kernel = with_drawn_latents(kernel, latents_key(key))
            return initial_state(starting_kernel, key, position, rows, clients)
        shapes = jax.eval_shape(
            lambda: locals_in(initial_state(kernel, key, position, rows).clients)
        )
        assert shapes is not None
        expect_same_latents(shapes.latents, previous.latents)
        latents = trees.cast_like(previous.latents, shapes.latents)
        start_state = initial_state(with_latents(kernel, latents), key, position, rows, clients)
        learned = previous.refresh
        if clients is not None:
            learned = jax.tree.map(lambda leaf: leaf[clients], learned)
        client_states = replace_nodes(
            start_state.clients,
            Locals,
            lambda x: x._replace(refresh=with_learned_steps(x.refresh, learned)),
        )
        return start_state._replace(clients=client_states)

    round_, position = state.broadcast.round, state.broadcast.position
    previous = locals_in(state.clients)
    if previous is not None:
        previous = jax.tree.map(jnp.asarray, previous)
    if jnp.ndim(round_) == 0:
        new_state = start(key, position, previous)
    else:
        new_state = jax.vmap(start)(jax.random.split(key, jnp.size(round_)), position, previous)
    return new_state._replace(broadcast=new_state.broadcast._replace(round=round_))
