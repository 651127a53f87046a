"""What every kernel promises."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import fedmcmc
from fedmcmc._types import Arrivals
from fedmcmc.pytrees import trees
from tests.contracts.kernels import PLAIN
from tests.contracts.model import (
    DATA,
    KEY,
    POSITIONS,
    Given,
    arguments,
    loglikelihood,
    logprior,
    make_data,
    shapes,
)
from tests.contracts.tables import KERNELS
from tests.support.lanes import fast_and_slow

NESTED = POSITIONS["nested"]


@cache
def kernel_of(name, position="nested"):
    return KERNELS[name](POSITIONS[position], Given())


def rows_of(kernel, data=DATA):
    return data.pooled() if kernel.participation.pooled else data


@jax.jit
def take_part(exchange, data, broadcast, own, key, index, weight):
    """Return what client `index` computes by itself: its message, its state and its report."""
    client = data.client(index, weight)
    draws = exchange.prepare(key, between_rounds(broadcast), client)
    return exchange.take_part(draws, broadcast, own, client)


def between_rounds(broadcast):
    return trees.shapes_of(broadcast._replace(shared=(), summed=()))


def visit(kernel, data, broadcast, clients, key, index, weight):
    own = jax.tree.map(lambda leaf: leaf[index], clients)
    return take_part(kernel.exchanges[-1], data, broadcast, own, key, index, weight)


def ready(kernel, data, state, key):
    """Return the broadcast as a step sees it, with what is shared and what was summed before."""
    broadcast = state.broadcast
    if kernel.prepare_shared is not None:
        shared = kernel.prepare_shared(key, between_rounds(broadcast))
        broadcast = broadcast._replace(shared=shared)
    for exchange in kernel.before:
        messages = [
            take_part(
                exchange,
                data,
                broadcast,
                jax.tree.map(lambda leaf, i=i: leaf[i], state.clients),
                key,  # of no client in particular, so that labels do not matter
                i,
                1.0,
            )[0]
            for i in range(data.num_clients)
        ]
        total = jax.tree.map(lambda *leaves: sum(leaves), *messages)
        broadcast = exchange.aggregate(key, broadcast, state.server, total)[0]
    return broadcast


def first_message(kernel, data, key=KEY, index=2, position=NESTED, others=None):
    """Return a client's message; `others` is whose data what was summed before comes from."""
    rows = rows_of(kernel, data)
    index = 0 if kernel.participation.pooled else index
    state = kernel.init(KEY, position, rows)
    # Away from snapshot and centre, where messages are exact or zero.
    moved = jax.tree.map(lambda x: x + 0.3, position)
    state = state._replace(broadcast=state.broadcast._replace(round=jnp.int32(1), position=moved))
    whole = rows if others is None else rows_of(kernel, others)
    broadcast = ready(kernel, whole, state, key)
    return visit(kernel, rows, broadcast, state.clients, key, index, 1.5)[0]


def flat(tree):
    return np.asarray(ravel_pytree(tree)[0])


# Messages in the fast lane: those of every kernel by itself, and of every kind of compressor.
SPOKEN = (
    *PLAIN,
    "compress: dsgld, quantize",
    "compress: relay, top_k",
    "compress: langevin, clip",
    "compress: lsd, memory",
    "compress: qlsd_star, chain",
    "compress: lsd_pp, memory: per client",
    "compress: psgld, sparsify",
    "compress: sequence, quantize",
)


# One kernel of each way in which clients depend on one another.
FAMILIES = (
    "relay",
    "langevin",
    "lsd_pp",
    "ensemble",
    "fa_ld",
    "sequence",
    "fed_pa",
    "fed_sep",
    "compress: lsd, memory",
)

# A nested position holds scalars and vectors; these positions are for each family's own shapes.
PLACED = [
    pytest.param(
        name,
        position,
        marks=() if position == "nested" or name in FAMILIES else pytest.mark.slow,
    )
    for name in KERNELS
    for position in POSITIONS
]


@pytest.mark.parametrize("name", KERNELS)
def test_functions_take_the_documented_arguments(name):
    kernel = kernel_of(name)
    documented = {
        "init": ["rng_key", "position", "data"],
        "prepare": ["rng_key", "like", "client"],
        "step": ["draws", "broadcast", "client_state", "client"],
        "aggregate": ["rng_key", "broadcast", "server_state", "total"],
        "draw": ["rng_key", "state"],
        "prepare_server": ["rng_key", "like"],
        "message_fn": ["like"],
        "prepare_shared": ["rng_key", "like"],
        "commit": ["message", "broadcast", "client_state"],
    }
    for field, expected in documented.items():
        function = getattr(kernel, field)
        if function is not None:
            assert arguments(function) == expected, field
    for exchange in kernel.exchanges:
        for field in ("prepare", "step", "aggregate"):
            assert arguments(getattr(exchange, field)) == documented[field], field


@pytest.mark.parametrize(("name", "position"), PLACED)
def test_structure_shapes_and_dtypes_are_kept(name, position):
    kernel, position = kernel_of(name, position), POSITIONS[position]
    rows = rows_of(kernel)

    def program(key):
        state = kernel.init(key, position, rows)
        broadcast = ready(kernel, rows, state, key)
        message, own, info = visit(kernel, rows, broadcast, state.clients, key, 0, 1.5)
        moved = kernel.aggregate(key, state.broadcast, state.server, message)[:2]
        return state, message, own, info, moved, kernel.draw(key, state)

    state, message, own, info, moved, drawn = jax.eval_shape(program, KEY)
    for leaf, before in zip(jax.tree.leaves(own), jax.tree.leaves(state.clients), strict=True):
        assert (rows.num_clients, *leaf.shape) == before.shape and leaf.dtype == before.dtype
    assert jax.tree.structure(own) == jax.tree.structure(state.clients)
    assert shapes(moved) == shapes((state.broadcast, state.server))
    declared = position if kernel.message_fn is None else kernel.message_fn(state.broadcast)
    assert shapes(message) == shapes(declared)
    assert isinstance(info, fedmcmc.StepInfo)
    for bits in (info.bits, *jax.tree.leaves(info.bits_down)):
        assert (bits.shape, bits.dtype) == ((), jnp.int32)
    assert shapes(drawn) == shapes(position)


@pytest.mark.parametrize("name", fast_and_slow(KERNELS, SPOKEN))
def test_messages_are_finite_and_move_with_the_key(name):
    kernel = kernel_of(name)
    messages = [flat(first_message(kernel, DATA, key)) for key in jax.random.split(KEY, 4)]
    assert np.isfinite(messages).all()
    assert len(np.unique(messages, axis=0)) > 1


@pytest.mark.parametrize("name", fast_and_slow(KERNELS, SPOKEN))
def test_a_message_depends_on_the_clients_own_rows_alone(name):
    kernel = kernel_of(name)
    if kernel.participation.pooled:
        pytest.skip("all rows are one client's")
    message = flat(first_message(kernel, DATA))
    for data in (make_data(spoilt=(0, 1)), make_data(sizes=(1, 5, 4))):
        again = flat(first_message(kernel, data, others=DATA))
        np.testing.assert_array_equal(again, message)
    changed = flat(first_message(kernel, make_data(shifted=(2,))))
    assert np.abs(changed - message).max() > 1e-3


@pytest.mark.parametrize("name", fast_and_slow(KERNELS, FAMILIES))
def test_relabelled_clients_send_the_same_messages(name):
    kernel, order = kernel_of(name), (2, 0, 1)
    if kernel.participation.pooled:
        pytest.skip("all rows are one client's")
    data = make_data(order=order)
    relabelled = KERNELS[name](NESTED, Given(order=order))
    for new, old in enumerate(order):
        messages = [
            flat(first_message(k, rows, jax.random.fold_in(KEY, old), i))
            for k, rows, i in ((relabelled, data, new), (kernel, DATA, old))
        ]
        np.testing.assert_allclose(messages[0], messages[1], rtol=1e-5, atol=1e-6)


# A run


def fold(key, *ids):
    for i in ids:
        key = jax.random.fold_in(key, jnp.uint32(i))
    return key


def deploy(kernel, rows, rng_key, state):
    """One round, client by client, each with its documented key; what `simulate` must compute."""
    broadcast, server, clients = state
    round_ = int(broadcast.round)
    cohort = kernel.participation.prepare(fold(rng_key, round_, 2**32 - 2), rows.num_clients)
    between = between_rounds(broadcast)
    if kernel.prepare_shared is not None:
        shared = kernel.prepare_shared(fold(rng_key, round_, 2**32 - 4), between)
        broadcast = broadcast._replace(shared=shared)
    bits = np.zeros(2, int)
    active, late, garbage = (np.array(x) for x in (cohort.active, cohort.late, cohort.garbage))
    for number, exchange in enumerate(kernel.exchanges):
        ids = () if number == len(kernel.before) else (2**32 - 256 - number,)
        like = broadcast.position if exchange.message_fn is None else exchange.message_fn(between)
        total = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)
        states, waiting = clients, total
        for slot, (i, weight) in enumerate(zip(cohort.ids, cohort.weight, strict=True)):
            if not active[slot]:
                continue
            own = jax.tree.map(lambda leaf, i=i: leaf[i], states)
            key = fold(rng_key, round_, i, *ids)
            message, own, info = take_part(exchange, rows, broadcast, own, key, i, weight)
            factor = weight if kernel.participation.weighted else 1.0
            add = lambda a, b, factor=factor: a + factor * b  # noqa: E731
            if garbage.size and garbage[slot] != 0:
                active[slot] = False  # sent, but left out
            else:
                set_own = lambda every, new, i=i: every.at[i].set(new)  # noqa: E731
                clients = jax.tree.map(set_own, clients, own)
                if late.size and late[slot] and number == len(kernel.before):
                    waiting = jax.tree.map(add, waiting, message)
                else:
                    total = jax.tree.map(add, total, message)
            whole = trees.num_bits(broadcast._replace(shared=()))
            down = info.bits_down if jax.tree.leaves(info.bits_down) else whole
            bits += np.array([info.bits, down])
        if late.size and number == len(kernel.before):
            total = Arrivals(total, waiting)
        key = fold(rng_key, round_, 2**32 - 1, *ids)
        moved, new_server, _ = exchange.aggregate(key, broadcast, server, total)
        if exchange.prepare_server is not None and round_ == 0:
            draws = exchange.prepare_server(key, between)
            again = exchange.aggregate(draws, broadcast, server, total)[:2]
            jax.tree.map(np.testing.assert_array_equal, again, (moved, new_server))
        broadcast, server = moved, new_server
    if kernel.participation.silent:
        bits = np.zeros(2, int)
    broadcast = broadcast._replace(shared=(), summed=())
    return fedmcmc.FederatedState(broadcast, server, clients), bits


def without_caches(tree):
    """Drop what follows from broadcasts: a simulation computes it for silent clients too."""
    is_cached = lambda leaf: isinstance(leaf, fedmcmc.Cached)  # noqa: E731
    return jax.tree.map(lambda leaf: () if is_cached(leaf) else leaf, tree, is_leaf=is_cached)


def close(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=2e-5), a, b)


DEPLOYED = (
    "relay",
    "qlsd_pp",
    "psgld",
    "fa_hmc",
    "compress: lsd, memory",
    "faults: compress: lsd, memory",
)


@pytest.mark.parametrize("name", fast_and_slow(KERNELS, DEPLOYED))
def test_a_simulated_round_is_a_deployed_one(name):
    """Clients alone or vectorised, with documented keys, over rounds that refresh and do not."""
    kernel = kernel_of(name)
    rows = rows_of(kernel)
    init, step = fedmcmc.simulate(kernel, DATA)
    step, state = jax.jit(step), init(NESTED)
    for round_ in range(4):
        moved, info = step(KEY, state)
        state, bits = deploy(kernel, rows, KEY, state)
        close(without_caches(moved), without_caches(state))
        assert int(state.broadcast.round) == round_ + 1
        np.testing.assert_array_equal([info.bits_up, info.bits_down], bits)


@pytest.mark.parametrize("name", fast_and_slow(KERNELS, ["qlsd_pp"]))
def test_a_run_goes_on_to_the_last_bit_and_chains_are_those_run_alone(name):
    kernel = kernel_of(name)

    def run(num_rounds, **settings):
        return fedmcmc.sample(
            KEY, kernel, DATA, NESTED, num_rounds=num_rounds, progress=False, **settings
        )

    # With the burn-in all three keep as many draws, so that they share a compilation.
    whole = run(12, num_burnin=4, num_chains=2)
    first = run(6, num_chains=2)
    second = run(6, state=jax.tree.map(np.array, first.state))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b[:, 2:]), second.draws, whole.draws)
    jax.tree.map(np.testing.assert_array_equal, second.state, whole.state)

    moves = np.diff(jax.vmap(jax.vmap(lambda x: ravel_pytree(x)[0]))(whole.draws), axis=1)
    moves = moves.reshape(-1, 3)
    gaps = np.abs(moves[:, None] - moves[None]).max(-1)
    assert gaps[~np.eye(len(moves), dtype=bool)].min() > 0

    init, step = fedmcmc.simulate(kernel, DATA)
    step, state = jax.jit(step), init(NESTED)
    for round_ in range(6):
        state, _ = step(fold(KEY, 1), state)
        drawn = kernel.draw(fold(KEY, 1, round_, 2**32 - 3), state)
        close(jax.tree.map(lambda x, r=round_: x[1, r], first.draws), drawn)
    close(state, jax.tree.map(lambda leaf: leaf[1], first.state))


@pytest.mark.parametrize("name", fast_and_slow(KERNELS, SPOKEN))
def test_one_trace_serves_all_numbers(name):
    traces = []

    def counted(position, rows):
        traces.append(None)
        return loglikelihood(position, rows)

    given = Given(fedmcmc.Posterior(logprior, counted))

    @jax.jit
    def program(kernel, key):
        init, step = fedmcmc.simulate(kernel, DATA)
        return step(key, init(NESTED))[0].broadcast.position

    first, second = (KERNELS[name](NESTED, given._replace(scale=s)) for s in (1, 2))
    program.trace(first, KEY)
    num = len(traces)
    program.trace(second, KEY)
    assert len(traces) == num > 0
    leaves = [jax.tree.leaves(kernel) for kernel in (first, second)]
    assert any((np.asarray(a) != np.asarray(b)).any() for a, b in zip(*leaves, strict=True))
