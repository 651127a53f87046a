"""Transfer of a run's state to another kernel."""

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc._checks import expect
from fedmcmc.data import FederatedData
from fedmcmc.random import as_key
from fedmcmc.types import ArrayTree, FederatedKernel, FederatedState, as_functions, initial_state


def switch(
    kernel: FederatedKernel,
    data: FederatedData,
    state: FederatedState,
    rng_key: Array | None = None,
    *,
    clients: Array | None = None,
) -> FederatedState:
    """Return the state with which `kernel` continues where a run of another kernel ended.

    Use it as ``sample(..., state=switch(kernel, data, samples.state))``. Positions and the round's
    number are kept; all other states start as in a new run of `kernel`. Latents of clients' groups
    start at their modes given the position, or at zero with `hierarchy.hmc`, so the continued run
    needs a burn-in. Kernels of the same structure need no `switch`: pass the state itself.

    Parameters
    ----------
    kernel, data
        Kernel and data of the continued run, with the same ``centered=`` in both posteriors.
    state
        ``samples.state``, with a leading chain axis, or the state of one chain.
    rng_key
        Key for kernels whose start is random.
    clients
        Ids ``[n]`` of the clients whose states are computed, all by default.

    Raises
    ------
    TypeError, ValueError
        If an argument is of the wrong kind.

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

    def start(key: Array, position: ArrayTree) -> FederatedState:
        return initial_state(kernel, key, position, rows, clients)

    round_, position = state.broadcast.round, state.broadcast.position
    if jnp.ndim(round_) == 0:
        new_state = start(key, position)
    else:
        new_state = jax.vmap(start)(jax.random.split(key, jnp.size(round_)), position)
    return new_state._replace(broadcast=new_state.broadcast._replace(round=round_))
