"""Going on with another kernel where a run has come to."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc._checks import expect
from fedmcmc._types import FederatedKernel, FederatedState, as_functions
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
    """Return the state with which `kernel` goes on from where another kernel's run ended.

    Pass it on: ``sample(..., state=switch(kernel, data, samples.state))``. Positions and the number
    of the round are carried over, so schedules of `kernel` go on from that round; what else a
    kernel keeps at the server and at the clients is its own, as at the start of a run. Between
    kernels of one structure (`fedmcmc.fed_avg` and `fedmcmc.fed_pa` with the same optimizer of the
    server, say) a state can be passed on as it is, with all that it holds.

    Parameters
    ----------
    kernel, data
        What the run goes on with.
    state
        ``samples.state``, with a leading chain axis, or the state of one chain.
    rng_key
        For kernels whose start is random.
    clients
        Ids ``[n]`` of those whose states are made, all by default: a `fedmcmc.HostStore` starts
        some at a time.

    Examples
    --------
    Burn-in by federated averaging, then expectation propagation from there, with sites of precision
    one per row about the point that was reached:

    >>> import jax, jax.numpy as jnp, optax
    >>> import fedmcmc
    >>> from fedmcmc import inference
    >>> posterior = fedmcmc.Posterior(
    ...     lambda theta: 0.0, lambda theta, x: -0.5 * (x - theta) ** 2
    ... )
    >>> data = fedmcmc.FederatedData.from_clients([jnp.ones(3), jnp.zeros(1)])
    >>> run = dict(data=data, num_rounds=5, progress=False)
    >>> first = fedmcmc.fed_avg(posterior, client_optimizer=optax.sgd(0.5), num_local_steps=3)
    >>> burnt_in = fedmcmc.sample(jax.random.key(0), first, position=0.0, **run)
    >>> then = fedmcmc.fed_ep(
    ...     posterior, inference=inference.exact_gaussian(), initial_precision=1.0
    ... )
    >>> start = switch(then, data, burnt_in.state)
    >>> samples = fedmcmc.sample(jax.random.key(0), then, state=start, **run)
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
    round_, position = state.broadcast.round, state.broadcast.position

    def start(key_: Array, place: Any) -> FederatedState:
        return kernel.init_some(key_, place, rows, clients)

    if jnp.ndim(round_) == 0:
        fresh = start(key, position)
    else:
        fresh = jax.vmap(start)(jax.random.split(key, jnp.size(round_)), position)
    return fresh._replace(broadcast=fresh.broadcast._replace(round=round_))
