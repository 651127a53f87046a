"""`run_rounds`: the rounds of `sample` as a function that users compile and map."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc import random, rounds
from fedmcmc.pytrees import trees
from tests.contracts.kernels import PLAIN
from tests.contracts.model import DATA, KEY, POSITIONS, POSTERIOR, Given

NESTED = POSITIONS["nested"]


def start_kernel(name, key=KEY):
    kernel = PLAIN[name](NESTED, Given())
    rows = DATA.pooled() if kernel.participation.pooled else DATA
    return kernel, kernel.init(random.init_key(key), NESTED, rows)


def assert_close_to_first_chain(actual, expected):
    first_chain = jax.tree.map(lambda leaf: leaf[0], expected)
    chex.assert_trees_all_close(actual, first_chain, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", [pytest.param("qlsd_pp", marks=pytest.mark.slow), "sgld"])
def test_rounds_equal_those_of_sample(name):
    chain_key = jax.random.fold_in(KEY, 0)
    kernel, state = start_kernel(name, chain_key)
    samples = fedmcmc.sample(KEY, kernel, DATA, NESTED, num_rounds=12, thinning=3, progress=False)
    run = jax.jit(rounds.run_rounds, static_argnames=("num_rounds", "thinning"))
    final, records = run(kernel, DATA, chain_key, state, num_rounds=12, thinning=3)
    assert_close_to_first_chain(
        (records.draws, dict(records.info), final), (samples.draws, samples.info, samples.state)
    )


@pytest.mark.slow
def test_rounds_take_a_placement():
    kernel, _ = start_kernel("lsd_pp")
    placement = fedmcmc.Placement(clients_at_a_time=1, num_buckets=2)
    settings = dict(num_rounds=4, progress=False, placement=placement)
    samples = fedmcmc.sample(KEY, kernel, DATA, NESTED, **settings)
    key, layout = jax.random.fold_in(KEY, 0), placement.layout(DATA)
    state = rounds.initialize(kernel, random.init_key(key), NESTED, DATA, layout)
    run = jax.jit(
        lambda key, state: rounds.run_rounds(kernel, DATA, key, state, 4, placement=placement)
    )
    final, records = run(key, state)
    assert_close_to_first_chain((records.draws, final), (samples.draws, samples.state))


@pytest.mark.parametrize("name", ["lsd_pp", "qlsd_star"])
def test_first_states_of_a_subset_equal_those_among_all_clients(name):
    kernel, state = start_kernel(name)
    members = jnp.array([2, 0])
    expected = (
        jax.tree.map(lambda leaf: leaf[members], state.clients),
        state.broadcast,
        state.server,
    )
    for clients_at_a_time in (None, 1, 2):
        layout = rounds.Layout(clients_at_a_time, members=members)
        subset = rounds.initialize(kernel, random.init_key(KEY), NESTED, DATA, layout)
        actual = (subset.clients, subset.broadcast, subset.server)
        chex.assert_trees_all_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_step_sizes_keys_and_states_are_mapped():
    @jax.jit
    def run(step_size, key, state):
        kernel = fedmcmc.lsd(POSTERIOR, step_size=step_size, batch_size=2)
        return rounds.run_rounds(kernel, DATA, key, state, 4)[1].draws["a"]

    keys, step_sizes = jax.random.split(KEY, 3), jnp.array([0.01, 0.02])
    init = fedmcmc.lsd(POSTERIOR, step_size=0.1).init
    states = jax.vmap(lambda key: init(key, NESTED, DATA))(keys)
    over_keys = jax.vmap(run, in_axes=(None, 0, 0))
    draws = jax.vmap(over_keys, in_axes=(0, None, None))(step_sizes, keys, states)
    expected = [
        [run(step_sizes[i], keys[j], jax.tree.map(lambda leaf, j=j: leaf[j], states))
         for j in range(3)]
        for i in range(2)
    ]  # fmt: skip
    np.testing.assert_allclose(draws, expected, rtol=1e-5, atol=1e-6)


def test_a_loop_over_rounds_has_a_scalar_bound_where_states_are_mapped():
    """Under a batched bound, a loop computes each round for all states and selects."""
    kernel, state = start_kernel("lsd")
    states = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), state)
    keys = jax.random.split(KEY, 2)
    mapped = jax.vmap(lambda key, start: rounds.run_rounds(kernel, DATA, key, start, 3))
    copies = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf, leaf]), states)
    for fn, starts in ((mapped, states), (jax.vmap(mapped, in_axes=(None, 0)), copies)):
        conditions = [
            eqn.params["cond_jaxpr"].out_avals[0].shape
            for eqn in jax.make_jaxpr(fn)(keys, starts).eqns
            if eqn.primitive.name == "while"
        ]
        assert conditions and set(conditions) == {()}


def test_collect_receives_state_and_info_and_schedules_are_followed():
    kernel = fedmcmc.lsd(POSTERIOR, step_size=lambda r: jnp.where(r < 2, 0.1, 1e-9))

    def collect(state, info):
        return state.broadcast.position["a"], info.round

    state = kernel.init(KEY, NESTED, DATA)
    _, records = rounds.run_rounds(kernel, DATA, KEY, state, 4, collect=collect)
    positions, numbers = records.draws
    assert numbers.tolist() == [0, 1, 2, 3]
    moves = np.abs(np.diff(np.asarray(positions)))
    assert moves[0] > 1e-3 > 10 * moves[1:].max()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(num_rounds=0), "must be a positive integer, got 0"),
        (dict(num_rounds=2, thinning=0), "must be a positive integer, got 0"),
        (dict(num_rounds=3, keep_from=1), "keep_from needs capacity="),
    ],
)
def test_invalid_settings_raise(settings, message):
    kernel, state = start_kernel("lsd")
    with pytest.raises(ValueError, match=message):
        rounds.run_rounds(kernel, DATA, KEY, state, **settings)


def test_one_program_serves_all_numbers_of_rounds():
    """A run in pieces equals a run in one piece: draws, infos, bits and the final state.

    After a burn-in of 2, the last of each 3 rounds is kept: of 12, those with numbers 4, 7, 10.
    """
    kernel, state = start_kernel("lsd_pp")
    state = jax.tree.map(trees.strip_weak_type, state)

    @jax.jit
    @chex.assert_max_traces(1)
    def run(state, num_rounds, keep_from, thinning):
        settings = dict(thinning=thinning, keep_from=keep_from)
        return rounds.run_rounds(kernel, DATA, KEY, state, num_rounds, capacity=4, **settings)

    second, first_records = run(state, 1, 2, 3)
    final, plain = jax.jit(lambda state: rounds.run_rounds(kernel, DATA, KEY, state, 11))(second)
    assert plain.info["round"].tolist() == list(range(1, 12))
    expected = jax.tree.map(lambda leaf: leaf[jnp.array([3, 6, 9])], plain[:2])
    expected_bits = first_records.bits + plain.bits
    _, records = run(state, 12, 2, 3)
    assert records.info["round"].tolist() == [4, 7, 10, 0]
    chex.assert_trees_all_equal(jax.tree.map(lambda leaf: leaf[:3], records[:2]), expected)
    np.testing.assert_array_equal(records.bits, expected_bits)
    pieces, bits = [], 0
    for num_rounds in (1, 4, 5, 2):
        before = int(state.broadcast.round)
        state, records = run(state, num_rounds, 2, 3)
        num = (max(before + num_rounds - 2, 0) // 3) - (max(before - 2, 0) // 3)
        pieces.append(jax.tree.map(lambda leaf, num=num: leaf[:num], records[:2]))
        bits = bits + records.bits
    joined = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *pieces)
    chex.assert_trees_all_equal(joined, expected)
    chex.assert_trees_all_equal(state, final)
    np.testing.assert_array_equal(bits, expected_bits)


@pytest.mark.parametrize("thinning", [1, 4])
def test_records_hold_the_first_round_that_is_not_finite(thinning):
    @jax.jit
    def first_bad(last_good):
        def step_size(round_):
            return jnp.where(round_ < last_good, 1e-3, jnp.inf)

        kernel = fedmcmc.lsd(POSTERIOR, step_size=step_size)
        state = kernel.init(KEY, NESTED, DATA)
        return rounds.run_rounds(kernel, DATA, KEY, state, 4, thinning=thinning)[1].first_bad

    assert first_bad(2) == 2 and first_bad(4) == -1
