"""Going on with another kernel where a run has come to."""

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


def switch(
    kernel: FederatedKernel,
    data: FederatedData,
    state: FederatedState,
    rng_key: Array | None = None,
    *,
    clients: Array | None = None,
    carry_latents: bool = True,
) -> FederatedState:
    """Return the state with which `kernel` goes on from where another kernel's run ended.

    Pass it on: ``sample(..., state=switch(kernel, data, samples.state))``. Positions and the number
    of the round are carried over, so schedules of `kernel` go on from that round; what else a
    kernel keeps at the server and at the clients is its own, as at the start of a run. Between
    kernels of one structure (`fedmcmc.fed_avg` and `fedmcmc.fed_pa` with the same optimizer of the
    server, say) a state can be passed on as it is, with all that it holds.

    Clients' latents (`fedmcmc.lsd` with ``refresh=``, `fedmcmc.fed_gibbs`, `fedmcmc.fed_ep`) go on
    from where they were, and the server of `fed_gibbs` begins with their sums. Of `hierarchy.hmc`
    and `hierarchy.mala` the learned step sizes go along, if both kernels have the same one; its
    ``num_adapt`` counts rounds from the first kernel's start. Where the state holds no latents, as
    of a kernel on `fedmcmc.marginal`, each client draws its own given the position; those of two
    levels begin at their modes. Make both posteriors with the same ``centered=``: it shows in the
    names of latents whether that is one, and not which number below one it is.

    Parameters
    ----------
    kernel, data
        What the run goes on with.
    state
        ``samples.state``, with a leading chain axis, or the state of one chain.
    rng_key
        For kernels whose start is random, and for latents that are drawn.
    clients
        Ids ``[n]`` of those whose states are made, all by default: a `fedmcmc.HostStore` starts
        some at a time.
    carry_latents
        Whether latents go on. Else they begin anew where a run would begin, at their modes given
        the position (`hierarchy.hmc` and `hierarchy.mala`: at zero).

    Raises
    ------
    TypeError, ValueError
        If an argument is of the wrong kind, or latents in the state are not those that the kernel
        moves: by name, where one posterior has them centered and the other does not.

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

    carries = carry_latents and begins_latents(kernel)

    def start(key_: Array, place: ArrayTree, old: Locals | None) -> FederatedState:
        if not carries:
            return initial_state(kernel, key_, place, rows, clients)
        if old is None:
            begun = with_drawn_latents(kernel, latents_key(key_))
            return initial_state(begun, key_, place, rows, clients)
        wanted = jax.eval_shape(lambda: locals_in(initial_state(kernel, key_, place, rows).clients))
        assert wanted is not None
        expect_same_latents(wanted.latents, old.latents)
        begun = with_latents(kernel, trees.cast_like(old.latents, wanted.latents))
        fresh = initial_state(begun, key_, place, rows, clients)
        learned = old.refresh
        if clients is not None:
            learned = jax.tree.map(lambda leaf: leaf[clients], learned)

        def known(node: ArrayTree) -> ArrayTree:
            if not isinstance(node, Locals):
                return node
            return node._replace(refresh=with_learned_steps(node.refresh, learned))

        return fresh._replace(
            clients=jax.tree.map(
                known, fresh.clients, is_leaf=lambda node: isinstance(node, Locals)
            )
        )

    old = locals_in(state.clients)
    if old is not None:
        old = jax.tree.map(jnp.asarray, old)
    if jnp.ndim(round_) == 0:
        fresh = start(key, position, old)
    else:
        fresh = jax.vmap(start)(jax.random.split(key, jnp.size(round_)), position, old)
    return fresh._replace(broadcast=fresh.broadcast._replace(round=round_))
