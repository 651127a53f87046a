"""`run_rounds`: the rounds of `sample`, as a function that is compiled and mapped."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc import random, rounds
from fedmcmc.pytrees import trees
from tests.contracts.kernels import PLAIN
from tests.contracts.model import DATA, KEY, POSITIONS, Given, loglikelihood, logprior

NESTED = POSITIONS["nested"]


def started(name, key=KEY, given=None):
    kernel = PLAIN[name](NESTED, Given() if given is None else given)
    rows = DATA.pooled() if kernel.participation.pooled else DATA
    return kernel, kernel.init(random.init_key(key), NESTED, rows)


@pytest.mark.parametrize("name", [pytest.param("qlsd_pp", marks=pytest.mark.slow), "sgld"])
def test_rounds_are_those_of_sample(name):
    kernel, state = started(name, jax.random.fold_in(KEY, 0))
    samples = fedmcmc.sample(KEY, kernel, DATA, NESTED, num_rounds=12, thinning=3, progress=False)
    run = jax.jit(rounds.run_rounds, static_argnames=("num_rounds", "thinning"))
    chain_key = jax.random.fold_in(KEY, 0)
    final, records = run(kernel, DATA, chain_key, state, num_rounds=12, thinning=3)
    close = lambda a, b: np.testing.assert_allclose(a, b[0], rtol=1e-6, atol=1e-7)  # noqa: E731
    jax.tree.map(close, records.draws, samples.draws)
    jax.tree.map(close, records.info, samples.info)
    jax.tree.map(close, final, samples.state)


@pytest.mark.slow
def test_rounds_take_a_placement():
    kernel, _ = started("lsd_pp")
    placement = fedmcmc.Placement(clients_at_a_time=1, num_buckets=2)
    given = dict(num_rounds=4, progress=False, placement=placement)
    samples = fedmcmc.sample(KEY, kernel, DATA, NESTED, **given)
    key, layout = jax.random.fold_in(KEY, 0), placement.layout(DATA)
    state = rounds.initialize(kernel, random.init_key(key), NESTED, DATA, layout)
    run = jax.jit(
        lambda key, state: rounds.run_rounds(kernel, DATA, key, state, 4, placement=placement)
    )
    final, records = run(key, state)
    close = lambda a, b: np.testing.assert_allclose(a, b[0], rtol=1e-6, atol=1e-7)  # noqa: E731
    jax.tree.map(close, (records.draws, final), (samples.draws, samples.state))


@pytest.mark.parametrize("name", ["lsd_pp", "qlsd_star"])
def test_first_states_of_some_clients_are_theirs_among_all(name):
    kernel, whole = started(name)
    key = random.init_key(KEY)
    for at_a_time in (None, 1, 2):
        layout = rounds.Layout(at_a_time, members=jnp.array([2, 0]))
        some = rounds.initialize(kernel, key, NESTED, DATA, layout)
        close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
        own = jax.tree.map(lambda leaf: leaf[np.array([2, 0])], whole.clients)
        jax.tree.map(close, some.clients, own)
        jax.tree.map(close, (some.broadcast, some.server), (whole.broadcast, whole.server))


def test_a_run_in_two_pieces_is_one_run():
    kernel, state = started("lsd_pp")
    run = jax.jit(rounds.run_rounds, static_argnames=("num_rounds",))
    final, records = run(kernel, DATA, KEY, state, num_rounds=5)
    half, first = run(kernel, DATA, KEY, state, num_rounds=3)
    end, second = run(kernel, DATA, KEY, half, num_rounds=2)
    joined = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), first[:2], second[:2])
    chex.assert_trees_all_equal(joined, records[:2])
    np.testing.assert_array_equal(first.bits + second.bits, records.bits)
    chex.assert_trees_all_equal(end, final)
    assert records.info["round"].tolist() == [0, 1, 2, 3, 4]


def test_keys_kernels_and_states_are_mapped_and_traced_once():
    traces = []

    def counted(position, rows):
        traces.append(None)
        return loglikelihood(position, rows)

    posterior = fedmcmc.Posterior(logprior, counted)

    @jax.jit
    def run(step_size, key, state):
        kernel = fedmcmc.lsd(posterior, step_size=step_size, batch_size=2)
        return rounds.run_rounds(kernel, DATA, key, state, 4)[1].draws["a"]

    keys, steps = jax.random.split(KEY, 3), jnp.array([0.01, 0.02])
    states = jax.vmap(lambda key: fedmcmc.lsd(posterior, step_size=0.1).init(key, NESTED, DATA))(
        keys
    )
    over_keys = jax.vmap(run, in_axes=(None, 0, 0))
    draws = jax.vmap(over_keys, in_axes=(0, None, None))(steps, keys, states)
    assert draws.shape == (2, 3, 4)
    num = len(traces)
    for i in range(2):
        for j in range(3):
            alone = run(steps[i], keys[j], jax.tree.map(lambda leaf, j=j: leaf[j], states))
            np.testing.assert_allclose(draws[i, j], alone, rtol=1e-5, atol=1e-6)
    assert num > 0


def test_a_loop_over_rounds_stays_one_where_states_are_mapped():
    """Under a batched bound a loop would compute every round for all, and select."""
    kernel, state = started("lsd")
    states = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), state)
    keys = jax.random.split(KEY, 2)
    mapped = jax.vmap(lambda key, start: rounds.run_rounds(kernel, DATA, key, start, 3))
    twice = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf, leaf]), states)
    for fn, starts in ((mapped, states), (jax.vmap(mapped, in_axes=(None, 0)), twice)):
        conditions = [
            eqn.params["cond_jaxpr"].out_avals[0].shape
            for eqn in jax.make_jaxpr(fn)(keys, starts).eqns
            if eqn.primitive.name == "while"
        ]
        assert conditions and set(conditions) == {()}


def test_collect_sees_state_and_info_and_schedules_are_followed():
    kernel = fedmcmc.lsd(
        fedmcmc.Posterior(logprior, loglikelihood), step_size=lambda r: jnp.where(r < 2, 0.1, 1e-9)
    )
    state = kernel.init(KEY, NESTED, DATA)

    def collect(state, info):
        return state.broadcast.position["a"], info.round

    _, records = rounds.run_rounds(kernel, DATA, KEY, state, 4, collect=collect)
    place, number = records.draws
    assert number.tolist() == [0, 1, 2, 3]
    moves = np.abs(np.diff(np.asarray(place)))
    assert moves[0] > 1e-3 > 10 * moves[1:].max()


@pytest.mark.parametrize("counts", [dict(num_rounds=0), dict(num_rounds=2, thinning=0)])
def test_counts_are_positive(counts):
    kernel, state = started("lsd")
    with pytest.raises(ValueError, match="must be a positive integer, got 0"):
        rounds.run_rounds(kernel, DATA, KEY, state, **counts)


def test_keep_from_needs_a_capacity():
    kernel, state = started("lsd")
    with pytest.raises(ValueError, match="keep_from needs capacity="):
        rounds.run_rounds(kernel, DATA, KEY, state, 3, keep_from=1)


def test_one_program_for_any_number_of_rounds_and_any_cut():
    """Burn-in of 2, then the last of every 3 rounds: of 12 those with numbers 4, 7 and 10."""
    kernel, state = started("lsd")
    state = jax.tree.map(trees.strip_weak_type, state)
    traces = []

    @jax.jit
    def run(state, num_rounds, keep_from, thinning):
        traces.append(None)
        counts = dict(thinning=thinning, keep_from=keep_from)
        return rounds.run_rounds(kernel, DATA, KEY, state, num_rounds, capacity=4, **counts)

    _, plain = jax.jit(lambda state: rounds.run_rounds(kernel, DATA, KEY, state, 12))(state)
    _, whole = run(state, 12, 2, 3)
    assert whole.info["round"].tolist() == [4, 7, 10, 0]
    kept = jax.tree.map(lambda leaf: leaf[jnp.array([4, 7, 10])], plain[:2])
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[:3], b), whole[:2], kept)
    np.testing.assert_array_equal(whole.bits, plain.bits)
    found, bits = [], 0
    for num_rounds in (1, 4, 5, 2):
        before = int(state.broadcast.round)
        state, records = run(state, num_rounds, 2, 3)
        num = (max(before + num_rounds - 2, 0) // 3) - (max(before - 2, 0) // 3)
        found.append(jax.tree.map(lambda leaf, num=num: leaf[:num], records[:2]))
        bits = bits + records.bits
    joined = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *found)
    chex.assert_trees_all_equal(joined, kept)
    np.testing.assert_array_equal(bits, whole.bits)
    assert len(traces) == 1


def test_records_tell_since_when_a_chain_is_not_finite():
    posterior = fedmcmc.Posterior(logprior, loglikelihood)
    kernel = fedmcmc.lsd(posterior, step_size=lambda r: jnp.where(r < 2, 1e-3, jnp.inf))
    state = kernel.init(KEY, NESTED, DATA)
    steady = fedmcmc.lsd(posterior, step_size=1e-3)
    run = jax.jit(rounds.run_rounds, static_argnames=("num_rounds", "thinning"))
    for thinning in (1, 4):
        assert run(kernel, DATA, KEY, state, 4, thinning=thinning)[1].first_bad == 2
        assert run(steady, DATA, KEY, state, 4, thinning=thinning)[1].first_bad == -1
