"""What every gradient estimator, participation and preconditioner promises."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc.gradients import first_reference
from tests.contracts.model import (
    DATA,
    KEY,
    NUM_CLIENTS,
    POSITIONS,
    arguments,
    loglikelihood,
    shapes,
)
from tests.contracts.tables import ESTIMATORS, PARTICIPATIONS, PRECONDITIONERS
from tests.oracles.federations import LIMIT, z_scores
from tests.support.lanes import fast_and_slow

VECTOR = POSITIONS["vector"]


def global_gradient(position, data):
    return np.asarray(jax.grad(lambda t: jnp.sum(loglikelihood(t, data.rows)))(position), float)


# Those of the fast lane stand for these.
LIKE_OTHERS = {"noisy", "minibatch: fraction", "fixed_point"}


@pytest.mark.parametrize("name", fast_and_slow(ESTIMATORS, set(ESTIMATORS) - LIKE_OTHERS))
def test_estimates_summed_over_clients_are_the_global_gradient(name):
    build, exact = ESTIMATORS[name]
    # Terms of the clients cancel, so 32 bits would blur what has to be equal; those of the table's
    # own shares and surrogates are left.
    with jax.enable_x64(exact):
        data, vector = DATA, VECTOR
        if exact:
            rows = {"x": jnp.asarray(DATA.rows["x"], jnp.float64)}
            share = jnp.asarray(DATA.size, jnp.float64) / jnp.sum(DATA.size)
            data = dataclasses.replace(DATA, rows=rows, share=share)
            vector = jnp.asarray(VECTOR, jnp.float64)
        check_sum_over_clients(build(), exact, data, vector)


def check_sum_over_clients(estimator, exact, data, vector):
    estimator.check(vector, data.federation)
    # In a round of its own, away from the reference of the first.
    broadcast = fedmcmc.types.Broadcast(
        jnp.int32(1), vector, first_reference(estimator, vector - 1.0)
    )
    if estimator.needs_sum:
        parts = [
            estimator.summed(loglikelihood, broadcast, data.client(i)) for i in range(NUM_CLIENTS)
        ]
        broadcast = broadcast._replace(summed=sum(parts))
    moved = vector + 0.3  # as within a client's local steps

    def estimate(key, i):
        client = data.client(i)
        state = estimator.init(loglikelihood, vector, client)
        draws = estimator.prepare(key, vector, client, 2)
        context, after = estimator.start(loglikelihood, broadcast, state, client)
        assert shapes(state) == shapes(after)
        second = jax.tree.map(lambda leaf: leaf[1], draws)
        return estimator.estimate(loglikelihood, second, moved, context, client)

    def total(key):
        return sum(estimate(jax.random.fold_in(key, i), i) for i in range(NUM_CLIENTS))

    if exact:
        np.testing.assert_allclose(jax.jit(total)(KEY), global_gradient(moved, data), rtol=1e-6)
        return
    totals = jax.jit(jax.vmap(total))(jax.random.split(KEY, 20000))
    assert np.abs(z_scores(totals, global_gradient(moved, data))).max() < LIMIT
    assert np.asarray(totals).std(0).min() > 0.05


@pytest.mark.check
@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimator_functions_take_the_documented_arguments(name):
    estimator = ESTIMATORS[name][0]()
    documented = {
        "init": ["loglikelihood_fn", "position", "client"],
        "prepare": ["rng_key", "like", "client", "num_calls"],
        "start": ["loglikelihood_fn", "broadcast", "state", "client"],
        "summed": ["loglikelihood_fn", "broadcast", "client"],
        "estimate": ["loglikelihood_fn", "draws", "position", "context", "client"],
        "check": ["position", "federation"],
    }
    for field, expected in documented.items():
        assert arguments(getattr(estimator, field)) == expected, field


@pytest.mark.parametrize("name", PARTICIPATIONS)
def test_weighted_sums_over_a_cohort_are_unbiased(name):
    participation = PARTICIPATIONS[name]()
    participation.check(NUM_CLIENTS)
    x = jnp.array([1.0, -2.0, 4.0])
    cohorts = jax.jit(jax.vmap(lambda key: participation.prepare(key, NUM_CLIENTS)))(
        jax.random.split(KEY, 20000)
    )
    size = participation.cohort_size or NUM_CLIENTS
    assert shapes(cohorts) == fedmcmc.types.Cohort(
        ((20000, size), jnp.int32), ((20000, size), jnp.float32), ((20000, size), jnp.bool_)
    )
    assert participation.may_drop or cohorts.active.all()
    totals = np.asarray(jnp.sum(cohorts.active * cohorts.weight * x[cohorts[0]], axis=1))
    if name == "full":
        np.testing.assert_allclose(totals, 3.0)
        return
    assert abs(z_scores(totals, 3.0)) < LIMIT
    assert totals.std() > 0.1


def test_a_uniform_cohort_is_every_subset_equally_often():
    participation = fedmcmc.uniform(2)
    keys = jax.random.split(KEY, 20000)
    cohorts = jax.vmap(lambda key: participation.prepare(key, 4))(keys)
    members = np.sort(np.asarray(cohorts[0]), axis=1)
    assert (members[:, 0] != members[:, 1]).all()
    for subset in itertools.combinations(range(4), 2):
        assert abs(z_scores((members == subset).all(1), 1 / 6)) < LIMIT


@pytest.mark.parametrize("probability", [0.05, 0.5, 1.0])
def test_a_realised_cohort_is_a_bernoulli_one_given_that_anyone_takes_part(probability):
    participation = fedmcmc.bernoulli(probability, rescale="realised")
    keys = jax.random.split(KEY, 20000)
    active = np.asarray(jax.vmap(lambda key: participation.prepare(key, 3))(keys).active)
    assert active.any(1).all()
    anyone = 1 - (1 - probability) ** 3
    for subset in itertools.product([False, True], repeat=3):
        if any(subset):
            num = sum(subset)
            expected = probability**num * (1 - probability) ** (3 - num) / anyone
            found = (active == subset).all(1)
            assert abs(found.mean() - expected) <= LIMIT * np.sqrt(expected * (1 - expected) / 2e4)


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("name", PRECONDITIONERS)
def test_a_preconditioner_is_positive_and_keeps_its_state(name, position):
    preconditioner, position = PRECONDITIONERS[name](), POSITIONS[position]
    state = preconditioner.init(position, DATA.federation)
    for gradient in (position, jax.tree.map(jnp.zeros_like, position)):
        metric, after = preconditioner.update(gradient, state)
        assert shapes(metric) == shapes(position)
        assert shapes(after) == shapes(state)
        assert all((leaf > 0).all() for leaf in jax.tree.leaves(metric))
    assert arguments(preconditioner.update) == ["gradient", "state"]
    temperatures = [preconditioner.temperature(jnp.float32(0.5), r) for r in range(4)]
    assert temperatures == [0.0, 0.0, 0.5, 0.5]
