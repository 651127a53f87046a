"""Contract of every kernel: arguments, shapes, keys, messages, deployed rounds, and traces."""

import platform
import subprocess
import sys
from functools import cache, partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import fedmcmc
from fedmcmc import rounds
from fedmcmc.compression import Grid, Limbs
from fedmcmc.pytrees import trees
from fedmcmc.rounds._phases import prepare_client, prepare_server, prepare_shared
from fedmcmc.types import memory_of
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
from tests.support.deployed import hold_against_the_simulation
from tests.support.lanes import fast_and_slow
from tests.support.processes import environment

NESTED = POSITIONS["nested"]


@cache
def kernel_of(name, position="nested"):
    return KERNELS[name](POSITIONS[position], Given())


def rows_of(kernel, data=DATA):
    return data.pooled() if kernel.participation.pooled else data


@partial(jax.jit, static_argnames=("number",))
def take_part(kernel, number, data, broadcast, client_state, key, index, weight):
    """Return the message, the new state and the report of client `index`."""
    client, phase = data.client(index, weight), kernel.phases[number]
    draws = rounds.Prepared(phase.prepare(key, between_rounds(broadcast), client))
    code, new_state, info = rounds.client_step(
        kernel, number, draws, broadcast, client_state, client
    )
    like = phase.message_like(trees.shapes_of(broadcast))
    return phase.decode(code, client, memory_of(phase, client_state), like), new_state, info


@jax.jit
def first_state(kernel, position, rows):
    return kernel.init(KEY, position, rows)


def between_rounds(broadcast):
    return trees.shapes_of(broadcast._replace(shared=(), summed=()))


def visit(kernel, data, broadcast, clients, key, index, weight):
    client_state = jax.tree.map(lambda leaf: leaf[index], clients)
    number = len(kernel.phases) - 1
    return take_part(kernel, number, data, broadcast, client_state, key, index, weight)


def prepare_broadcast(kernel, data, state, key):
    """Return the broadcast of the last phase, with shared draws and with sums of earlier phases."""
    shared = kernel.prepare_shared(key, between_rounds(state.broadcast))
    broadcast = state.broadcast._replace(shared=shared)
    for number, phase in enumerate(kernel.phases[:-1]):
        messages = [
            take_part(
                kernel,
                number,
                data,
                broadcast,
                jax.tree.map(lambda leaf, i=i: leaf[i], state.clients),
                key,  # the same for all clients, so that labels do not matter
                i,
                1.0,
            )[0]
            for i in range(data.num_clients)
        ]
        total = jax.tree.map(lambda *leaves: sum(leaves), *messages)
        broadcast = phase.aggregate(key, broadcast, state.server, total)[0]
    return broadcast


def first_message(kernel, data, key=KEY, index=2, position=NESTED, summed_data=None):
    """Return a client's message; earlier phases and the set-up sum over `summed_data`."""
    rows = rows_of(kernel, data)
    index = 0 if kernel.participation.pooled else index
    state = first_state(kernel, position, rows)
    if summed_data is not None:
        start = first_state(kernel, position, rows_of(kernel, summed_data))
        state = state._replace(broadcast=start.broadcast)
    # Away from snapshot and centre, where messages are exact or zero.
    moved = jax.tree.map(lambda x: x + 0.3, position)
    state = state._replace(broadcast=state.broadcast._replace(round=jnp.int32(1), position=moved))
    all_rows = rows if summed_data is None else rows_of(kernel, summed_data)
    broadcast = prepare_broadcast(kernel, all_rows, state, key)
    return visit(kernel, rows, broadcast, state.clients, key, index, 1.5)[0]


def flat(tree):
    """Return all numbers of a tree; words of a secure sum are decoded."""

    def read(node):
        return GRID.decode(node, jnp.float32) if isinstance(node, Limbs) else node

    tree = jax.tree.map(read, tree, is_leaf=lambda node: isinstance(node, Limbs))
    return np.asarray(ravel_pytree(tree)[0])


GRID = Grid.of(2.0**-32, 2.0**20)
FIXED = (
    "fed_ep: expansions",
    "secure_sum: fed_ep: expansions",
    *(name for name in KERNELS if kernel_of(name).traits.needs_all_clients),
)
"""Rows in whose messages nothing is random."""

# One kernel of each way in which clients depend on one another.
FAMILIES = (
    "relay",
    "langevin",
    "lsd_pp",
    "lsd: latents",
    "ensemble",
    "fa_ld",
    "sequence",
    "fed_pa",
    "fed_sep",
    "hmc",
    "fed_gibbs: of rows",
    "compress: lsd, memory",
    "secure_sum: fa_hmc",
)

# Messages in the fast tests: one kernel of every family, and of every kind of compressor.
WITH_MESSAGES = (
    *FAMILIES,
    "compress: dsgld, quantize",
    "compress: relay, top_k",
    "compress: langevin, clip",
    "compress: qlsd_star, chain",
    "compress: lsd_pp, memory: per client",
    "compress: psgld, sparsify",
    "compress: fa_ld, per_client",
    "compress: sequence, quantize",
)


# Programs that take ten seconds to compile.
LONG = {"fed_ep: latents", "compress: fed_ep: latents, quantize"}

# A nested position holds scalars and vectors, so positions of one leaf are slow, except for a
# scalar in every family.
PLACED = [
    pytest.param(
        name,
        position,
        marks=pytest.mark.slow
        if name in LONG
        else pytest.mark.check
        if position == "nested"
        else ()
        if position == "scalar" and name in FAMILIES
        else pytest.mark.slow,
    )
    for name in KERNELS
    for position in POSITIONS
]


@pytest.mark.check
@pytest.mark.parametrize("name", KERNELS)
def test_functions_take_the_documented_arguments(name):
    kernel = kernel_of(name)
    phase = {
        "prepare": ["rng_key", "like", "client"],
        "step": ["draws", "broadcast", "client_state", "client"],
        "aggregate": ["rng_key", "broadcast", "server_state", "total"],
        "prepare_server": ["rng_key", "like"],
        "message_like": ["like"],
        "code_like": ["like"],
        "decode": ["code", "sender", "memory", "like"],
        "commit": ["message", "broadcast", "client_state"],
    }
    of_kernel = {
        "init": ["rng_key", "position", "data"],
        "server_init": ["rng_key", "position", "federation", "totals"],
        "client_init": ["broadcast", "client"],
        "prepare_shared": ["rng_key", "like"],
        "draw": ["rng_key", "state"],
    }
    assert kernel.phases[-1] is kernel
    for part, documented in [(kernel, of_kernel), *((p, phase) for p in kernel.phases)]:
        for field, expected in documented.items():
            assert arguments(getattr(part, field)) == expected, field
    memory = {
        "of_client": ["client_state"],
        "init": ["like"],
        "update": ["code", "sender", "memory"],
    }
    for phase_ in kernel.phases:
        if phase_.server_memory is not None:
            for field, expected in memory.items():
                assert arguments(getattr(phase_.server_memory, field)) == expected, field


@pytest.mark.parametrize(("name", "position"), PLACED)
def test_structures_shapes_and_dtypes_do_not_change(name, position):
    kernel, position = kernel_of(name, position), POSITIONS[position]
    rows = rows_of(kernel)

    def program(key):
        state = kernel.init(key, position, rows)
        broadcast = prepare_broadcast(kernel, rows, state, key)
        message, client_state, info = visit(kernel, rows, broadcast, state.clients, key, 0, 1.5)
        moved = kernel.aggregate(key, state.broadcast, state.server, message)[:2]
        return state, message, client_state, info, moved, kernel.draw(key, state)

    state, message, client_state, info, moved, draw = jax.eval_shape(program, KEY)
    per_client = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((rows.num_clients, *leaf.shape), leaf.dtype), client_state
    )
    assert shapes(per_client) == shapes(state.clients)
    assert shapes(moved) == shapes((state.broadcast, state.server))
    assert shapes(message) == shapes(kernel.message_like(state.broadcast))
    assert isinstance(info, fedmcmc.types.StepInfo)
    for bits in (info.bits, *jax.tree.leaves(info.bits_down)):
        assert (bits.shape, bits.dtype) == ((), jnp.int32)
    assert shapes(draw) == shapes(position)


@pytest.mark.parametrize("name", fast_and_slow(KERNELS, WITH_MESSAGES))
def test_messages_are_finite_and_move_with_the_key(name):
    kernel = kernel_of(name)
    messages = [flat(first_message(kernel, DATA, key)) for key in jax.random.split(KEY, 4)]
    assert np.isfinite(messages).all()
    assert (len(np.unique(messages, axis=0)) > 1) == (name not in FIXED)


@pytest.mark.parametrize("name", fast_and_slow(KERNELS, WITH_MESSAGES))
def test_a_message_depends_on_rows_of_its_client_only(name):
    kernel = kernel_of(name)
    if kernel.participation.pooled:
        pytest.skip("all rows are one client's")
    message = flat(first_message(kernel, DATA))
    for data in (make_data(spoilt=(0, 1)), make_data(sizes=(1, 5, 4))):
        again = flat(first_message(kernel, data, summed_data=DATA))
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
    # A sum before the first round is rounded in the clients' order, so both get the same sum.
    summed_data = DATA if kernel.setup else None
    for new, old in enumerate(order):
        messages = [
            flat(first_message(k, rows, jax.random.fold_in(KEY, old), i, summed_data=summed_data))
            for k, rows, i in ((relabelled, data, new), (kernel, DATA, old))
        ]
        np.testing.assert_allclose(messages[0], messages[1], rtol=1e-5, atol=1e-6)


# A run


def fold(key, *ids):
    for i in ids:
        key = jax.random.fold_in(key, jnp.uint32(i))
    return key


def close(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=2e-5), a, b)


OF_CLIENTS = [name for name in KERNELS if not kernel_of(name).participation.pooled]


@pytest.mark.parametrize("name", fast_and_slow(OF_CLIENTS, ["fa_hmc"]))
def test_a_simulated_round_is_a_deployed_one(name):
    """Sites have only their own rows and send bytes; snapshots are refreshed in some rounds."""
    hold_against_the_simulation(kernel_of(name), DATA, KEY, NESTED, close)


@pytest.mark.slow
@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"),
    reason="the flag that leaves out fused arithmetic is for x86",
)
@pytest.mark.parametrize("part", range(4))
def test_every_simulated_round_is_a_deployed_one_to_the_last_bit(part):
    # Instructions up to AVX have no fused multiply-add, which a compiler uses where a weight and a
    # sum end up in one loop, and not where a message is received by itself.
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.deployed", *OF_CLIENTS[part::4]],
        env=environment(devices=1, flags="--xla_cpu_max_isa=AVX"),
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
    )
    assert done.returncode == 0 and "same" in done.stdout, done.stdout + done.stderr[-3000:]


def test_draws_of_a_phase_come_from_documented_keys():
    """The key of a client's round, of the server's, of a phase before the kernel's own."""
    for name in ("qlsd_pp", "compress: sequence, quantize"):
        kernel = kernel_of(name)
        state = kernel.init(KEY, NESTED, DATA)
        for number, phase in enumerate(kernel.phases):
            ids = () if number == len(kernel.phases) - 1 else (2**32 - 256 - number,)
            client, between = DATA.client(2), between_rounds(state.broadcast)
            expected = phase.prepare(fold(KEY, 3, 2, *ids), between, client)
            inputs = (kernel, number, KEY, jnp.int32(3), between)
            chex.assert_trees_all_equal(prepare_client(*inputs, client), expected)
            expected = phase.prepare_server(fold(KEY, 3, 2**32 - 1, *ids), between)
            chex.assert_trees_all_equal(prepare_server(*inputs), expected)
        expected = kernel.prepare_shared(fold(KEY, 3, 2**32 - 4), between)
        draws = prepare_shared(kernel, KEY, jnp.int32(3), between)
        chex.assert_trees_all_equal(draws, expected)


def test_a_phase_of_another_kernel_is_refused():
    kernel, another = kernel_of("lsd"), kernel_of("fa_hmc")
    state = kernel.init(KEY, NESTED, DATA)
    for phase in (another.phases[0], 1, -1):
        with pytest.raises(ValueError, match="phase"):
            rounds.client_step(kernel, phase, KEY, state.broadcast, (), DATA.client(0))
    with pytest.raises(ValueError, match="late= needs a sum of late messages"):
        received = rounds.initialize_received(kernel, 0, state.broadcast)
        rounds.receive(kernel, 0, received, NESTED, 0, 1.0, late=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_a_run_continues_to_the_last_bit_and_chains_equal_runs_of_one_chain(name):
    kernel = kernel_of(name)

    def run(num_rounds, **settings):
        return fedmcmc.sample(
            KEY, kernel, DATA, NESTED, num_rounds=num_rounds, progress=False, **settings
        )

    # With the burn-in all three record the same number of draws, so that they share a compilation.
    full = run(12, num_burnin=4, num_chains=2)
    first = run(6, num_chains=2)
    second = run(6, state=jax.tree.map(np.array, first.state))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b[:, 2:]), second.draws, full.draws)
    chex.assert_trees_all_equal(second.state, full.state)

    if kernel.traits.needs_all_clients:  # its chains stay where they are while nothing is accepted
        distinct = np.unique(np.concatenate([flat(full.draws), flat(first.draws)]))
        assert len(distinct) > 6
        return
    moves = np.diff(jax.vmap(jax.vmap(lambda x: ravel_pytree(x)[0]))(full.draws), axis=1)
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


@pytest.mark.parametrize("name", fast_and_slow(KERNELS, FAMILIES))
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
