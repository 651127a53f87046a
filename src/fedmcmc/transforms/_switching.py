"""Transfer of a run's state to another kernel."""

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc._checks import expect
from fedmcmc._types import ArrayTree, FederatedKernel, FederatedState, as_functions, initial_state
from fedmcmc.data import FederatedData
from fedmcmc.random import as_key


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
    number are kept, so schedules of `kernel` continue from that round. All other states of server
    and clients start as in a new run of `kernel`. Kernels of the same structure, such as
    `fedmcmc.fed_avg` and `fedmcmc.fed_pa` with the same server optimizer, need no `switch`: pass
    the state itself.

    Clients' latents (`fedmcmc.lsd` with ``refresh=``, `fedmcmc.fed_gibbs`, `fedmcmc.fed_ep`) start
    as in a new run: at their modes given the position, or at zero with `hierarchy.hmc`. The
    continued run therefore needs a burn-in.

    Parameters
    ----------
    kernel, data
        Kernel and data of the continued run.
    state
        ``samples.state``, with a leading chain axis, or the state of one chain.
    rng_key
        Key for kernels whose start is random.
    clients
        Ids ``[n]`` of the clients whose states are computed, all by default; a `fedmcmc.HostStore`
        starts clients in groups.

    Raises
    ------
    TypeError, ValueError
        If an argument is of the wrong kind.

    Examples
    --------
    Burn-in by federated averaging, then expectation propagation from there, with initial sites of
    precision one per row around the last position:

    >>> import jax, jax.numpy as jnp, optax
    >>> import fedmcmc
    >>> from fedmcmc import inference
    >>> posterior = fedmcmc.Posterior(
    ...     lambda theta: 0.0, lambda theta, x: -0.5 * (x - theta) ** 2
    ... )
    >>> data = fedmcmc.FederatedData.from_clients([jnp.ones(3), jnp.zeros(1)])
    >>> run = dict(data=data, num_rounds=5, progress=False)
    >>> averaging = fedmcmc.fed_avg(posterior, client_optimizer=optax.sgd(0.5), num_local_steps=3)
    >>> burnt_in = fedmcmc.sample(jax.random.key(0), averaging, position=0.0, **run)
    >>> fed_ep = fedmcmc.fed_ep(
    ...     posterior, inference=inference.exact_gaussian(), initial_precision=1.0
    ... )
    >>> start = switch(fed_ep, data, burnt_in.state)
    >>> samples = fedmcmc.sample(jax.random.key(0), fed_ep, state=start, **run)
    >>> samples.state.broadcast.round.tolist(), samples.state.broadcast.position.tolist()
    ([10], [0.75])
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
