"""Identities between SGLD, DSGLD and FSGLD, and between ways to run them."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc.types import PerClient
from tests.oracles.federations import Federation, loglikelihood
from tests.support.lanes import fast_and_slow

FEDERATION = Federation()
DATA = FEDERATION.data
F = jnp.asarray(Federation.probabilities)
START = jnp.asarray(Federation.start)
KEY = jax.random.key(11)
STEP_SIZE = 0.006
ROUNDING = dict(rtol=2e-5, atol=2e-5)


SETTINGS = dict(num_local_steps=3, batch_size=3, probabilities=F)


def run(kernel, data=DATA, *, key=KEY, **settings):
    settings = dict(num_rounds=12, num_chains=3, progress=False) | settings
    if "state" not in settings:
        settings["position"] = START
    return fedmcmc.sample(key, kernel, data, **settings)


def dsgld(step_size=STEP_SIZE, **settings):
    return fedmcmc.dsgld(FEDERATION.posterior, step_size=step_size, **(SETTINGS | settings))


def fsgld(q, step_size=STEP_SIZE, **settings):
    return fedmcmc.fsgld(FEDERATION.posterior, q, step_size=step_size, **(SETTINGS | settings))


@functools.cache
def reference_run():
    return run(dsgld())


BROADCAST = fedmcmc.types.Broadcast(jnp.int32(0), START)


def noise_of(kernel, client, round_, index):
    """Return the normals of a client in a round of the first chain, from the documented key."""
    key = jax.random.fold_in(jax.random.fold_in(KEY, 0), round_)
    draws = kernel.prepare(jax.random.fold_in(key, index), BROADCAST, client)
    return np.asarray(draws.noise)


def posterior_gradient(position):
    total = FEDERATION.prior_precision @ (FEDERATION.prior_mean - position)
    for precision, mean in zip(FEDERATION.precisions, FEDERATION.means, strict=True):
        total = total + precision @ (mean - position)
    return total


def test_i1_sgld_is_plain_langevin_with_the_same_noise():
    kernel = fedmcmc.sgld(FEDERATION.posterior, step_size=STEP_SIZE)
    draws = run(kernel, num_chains=1).draws[0]
    position, client = np.asarray(START, float), DATA.pooled().client(0)
    for round_, draw in enumerate(draws):
        noise = noise_of(kernel, client, round_, 0)[0]
        drift = STEP_SIZE * posterior_gradient(position)
        position = position + drift + np.sqrt(2 * STEP_SIZE) * noise
        np.testing.assert_allclose(draw, position, **ROUNDING)


@pytest.mark.slow
def test_i13_i15_a_single_client_is_the_centralized_kernel():
    pooled = fedmcmc.FederatedData.from_clients(
        [jax.tree.map(lambda *x: np.concatenate(x), *FEDERATION.client_trees())]
    )
    q = fedmcmc.Gaussian.from_moments(jnp.ones((1, 3)), variance=jnp.ones((1, 3)))
    settings = dict(num_local_steps=1, batch_size=3, probabilities=jnp.ones(1))
    draws = [
        run(fedmcmc.sgld(FEDERATION.posterior, step_size=STEP_SIZE, batch_size=3)).draws,
        run(dsgld(**settings), pooled).draws,
        run(fsgld(q, **settings), pooled).draws,
    ]
    np.testing.assert_allclose(draws[1], draws[0], **ROUNDING)
    np.testing.assert_allclose(draws[2], draws[0], **ROUNDING)


def test_i14_flat_surrogates_or_no_strength_are_dsgld():
    q, _ = FEDERATION.surrogates("diagonal")
    flat = fedmcmc.Gaussian.uniform(q.precision_mean, "diagonal")
    plain = reference_run().draws
    np.testing.assert_allclose(run(fsgld(flat)).draws, plain, **ROUNDING)
    np.testing.assert_allclose(run(fsgld(q, alpha=0.0)).draws, plain, **ROUNDING)
    assert np.abs(run(fsgld(q)).draws - plain).max() > 1e-2


@pytest.mark.parametrize("structure", ["scaled_identity", "diagonal", "dense"])
def test_i16_conducive_gradients_cancel_over_clients(structure):
    q, _ = FEDERATION.surrogates(structure)
    estimator = fedmcmc.conducive(fedmcmc.full_gradient(), q, 0.7, shares=F)
    plain = fedmcmc.full_gradient()
    for position in (START, -3 * START):
        broadcast = fedmcmc.types.Broadcast(jnp.int32(0), position)
        terms = [
            gradient_of(estimator, broadcast, DATA.client(i))
            - gradient_of(plain, broadcast, DATA.client(i))
            for i in range(DATA.num_clients)
        ]
        scale = np.abs(terms).max()
        assert scale > 1
        np.testing.assert_allclose(np.sum(terms, 0), 0, atol=1e-5 * scale)


def gradient_of(estimator, broadcast, client, draws=()):
    context, _ = estimator.start(loglikelihood, broadcast, (), client)
    return np.asarray(estimator.estimate(loglikelihood, draws, broadcast.position, context, client))


@pytest.mark.parametrize("replace", [True, False])
def test_i17_the_drift_is_unbiased_by_enumeration(replace):
    """All clients and all minibatches of two rows pass through the kernel's `step`."""
    rows = [tree["x"][:3] for tree in FEDERATION.client_trees()]
    small = fedmcmc.FederatedData.from_clients(
        [
            {"x": x, "factor": np.broadcast_to(factor, (len(x), 3, 3))}
            for x, factor in zip(rows, FEDERATION.factors, strict=True)
        ]
    )
    q, _ = FEDERATION.surrogates("dense")
    kernel = fsgld(q, num_local_steps=1, batch_size=2, replace=replace, alpha=0.6)
    expected = FEDERATION.prior_precision @ (FEDERATION.prior_mean - np.asarray(START))
    drift = np.zeros(3)
    step = jax.jit(lambda draws, client: kernel.step(draws, BROADCAST, (), client)[0])
    for s, x in enumerate(rows):
        client = small.client(s, 1 / F[s])
        draws = kernel.prepare(KEY, BROADCAST, small.client(s))
        pairs = itertools.product(range(len(x)), repeat=2)
        if not replace:
            pairs = itertools.combinations(range(len(x)), 2) if len(x) > 1 else [(0, 0)]
        messages = []
        for pair in pairs:
            batch = jax.tree.map(
                lambda leaf, p=pair, c=client: leaf[c.start + jnp.array(p)][None], small.rows
            )
            fixed = draws._replace(
                noise=jnp.zeros_like(draws.noise), gradient=draws.gradient._replace(rows=batch)
            )
            messages.append(step(fixed, client))
        drift += float(F[s]) * np.mean(messages, axis=0) / STEP_SIZE
        expected = expected + FEDERATION.row_precisions[s] @ (x - np.asarray(START)).sum(0)
    np.testing.assert_allclose(drift, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("num_local_steps", fast_and_slow([1, 4], [4]))
def test_i18_exact_surrogates_follow_the_posterior_for_every_client_sequence(num_local_steps):
    q = fedmcmc.Gaussian.from_moments(FEDERATION.means, np.linalg.inv(FEDERATION.precisions))
    kernel = fsgld(q, num_local_steps=num_local_steps, batch_size=None)
    draws = run(kernel, num_rounds=6, num_chains=1).draws[0]
    key, position, visited = jax.random.fold_in(KEY, 0), np.asarray(START, float), set()
    cohort = jax.jit(lambda r: kernel.participation.prepare(cohort_key(key, r), DATA.num_clients))
    for round_, draw in enumerate(draws):
        s = int(cohort(round_).ids[0])
        visited.add(s)
        for noise in noise_of(kernel, DATA.client(s), round_, s):
            drift = STEP_SIZE * posterior_gradient(position)
            position = position + drift + np.sqrt(2 * STEP_SIZE) * noise
        np.testing.assert_allclose(draw, position, rtol=2e-4, atol=2e-4)
    assert len(visited) > 1


def cohort_key(key, round_):
    return jax.random.fold_in(jax.random.fold_in(key, round_), jnp.uint32(2**32 - 2))


def test_i37_splitting_a_client_with_its_probability_keeps_the_mean_drift():
    trees = FEDERATION.client_trees()
    halves = [
        jax.tree.map(lambda x, part=part: x[part], trees[2]) for part in (slice(5), slice(5, 12))
    ]
    split = fedmcmc.FederatedData.from_clients([*trees[:2], *halves, trees[3]])
    f = jnp.array([F[0], F[1], 0.4 * F[2], 0.6 * F[2], F[3]])
    drifts = []
    for data, p in ((DATA, F), (split, f)):
        kernel = dsgld(num_local_steps=1, batch_size=None, probabilities=p)
        total = 0
        for s in range(data.num_clients):
            client = data.client(s, 1 / p[s])
            draws = kernel.prepare(KEY, BROADCAST, client)
            draws = draws._replace(noise=jnp.zeros_like(draws.noise))
            total = total + p[s] * kernel.step(draws, BROADCAST, (), client)[0] / STEP_SIZE
        drifts.append(np.asarray(total))
    np.testing.assert_allclose(drifts[1], drifts[0], rtol=1e-4)
    np.testing.assert_allclose(drifts[0], posterior_gradient(np.asarray(START)), rtol=1e-3)


def test_a_chain_of_sample_is_a_loop_over_simulate():
    """A chain must not depend on the number of chains."""
    init, step = fedmcmc.simulate(dsgld(), DATA)
    step, draws = jax.jit(step), reference_run().draws
    for chain in (0, 2):
        key, state = jax.random.fold_in(KEY, chain), init(START)
        for round_ in range(12):
            state, info = step(key, state)
            assert int(info.round) == round_
            np.testing.assert_allclose(draws[chain, round_], state.broadcast.position, **ROUNDING)
    assert np.abs(draws[0] - draws[1]).max() > 1e-2


@pytest.mark.slow
def test_a_constant_schedule_is_the_number():
    q, _ = FEDERATION.surrogates("diagonal")
    plain = run(fsgld(q, alpha=0.7, temperature=1.3)).draws
    scheduled = fsgld(
        q, lambda round_: STEP_SIZE, alpha=lambda round_: 0.7, temperature=lambda round_: 1.3
    )
    np.testing.assert_allclose(run(scheduled).draws, plain, **ROUNDING)


def test_a_schedule_is_read_at_the_round():
    kernel = dsgld(lambda round_: jnp.where(round_ < 6, STEP_SIZE, STEP_SIZE / 2))
    draws = run(kernel).draws
    half = run(dsgld(STEP_SIZE), num_rounds=6)
    np.testing.assert_allclose(draws[:, :6], half.draws, **ROUNDING)
    second = run(dsgld(STEP_SIZE / 2), num_rounds=6, state=half.state)
    np.testing.assert_allclose(draws[:, 6:], second.draws, **ROUNDING)


@pytest.mark.slow
def test_new_numbers_and_schedules_need_no_new_trace():
    traces = []

    def counted(position, rows):
        traces.append(None)
        return loglikelihood(position, rows)

    posterior = FEDERATION.posterior._replace(loglikelihood_fn=counted)

    def kernel(step_size, alpha, seed):
        q, _ = FEDERATION.surrogates("diagonal", seed=seed)
        return fedmcmc.fsgld(
            posterior, q, step_size=step_size, num_local_steps=2, probabilities=F, alpha=alpha
        )

    run(kernel(0.001, 1.0, 0))
    after_first = len(traces)
    run(kernel(0.002, 0.5, 1))
    run(kernel(0.002, 0.5, 1), key=jax.random.key(5))
    assert len(traces) == after_first
    run(kernel(lambda r: 0.001 / (1 + r), 1.0, 0))
    after_schedule = len(traces)
    run(kernel(lambda r: 0.002, 0.5, 1))
    assert len(traces) == after_schedule


@pytest.mark.slow
def test_a_kernel_can_be_built_inside_vmap():
    step_sizes = jnp.array([0.001, 0.003, 0.006])

    def three_rounds(step_size):
        init, step = fedmcmc.simulate(dsgld(step_size), DATA)
        state = init(START)
        for _ in range(3):
            state, _ = step(KEY, state)
        return state.broadcast.position

    together = jax.jit(jax.vmap(three_rounds))(step_sizes)
    for position, step_size in zip(together, step_sizes, strict=True):
        np.testing.assert_allclose(position, jax.jit(three_rounds)(step_size), **ROUNDING)


@pytest.mark.parametrize("batch_size", fast_and_slow([None, 3], [3]))
def test_the_rows_of_other_clients_never_matter(batch_size):
    """Only client 2 is visited, so NaN in all other rows must change nothing."""
    always_two = jnp.array([1e-30, 1e-30, 1.0, 1e-30])
    kernel = dsgld(probabilities=always_two, batch_size=batch_size)
    trees = FEDERATION.client_trees()
    spoiled = [
        tree if i == 2 else jax.tree.map(lambda x: x * np.nan, tree) for i, tree in enumerate(trees)
    ]
    poisoned = fedmcmc.FederatedData.from_clients(spoiled, allow_nonfinite=True)
    init, step = fedmcmc.simulate(kernel, DATA)
    clean = jax.jit(step)(KEY, init(START))[0].broadcast.position
    init, step = fedmcmc.simulate(kernel, poisoned)
    np.testing.assert_array_equal(jax.jit(step)(KEY, init(START))[0].broadcast.position, clean)


@pytest.mark.parametrize(
    ("num_rounds", "num_burnin", "thinning"),
    [
        pytest.param(12, 0, 5, marks=pytest.mark.slow),
        (11, 2, 3),
        pytest.param(7, 6, 1, marks=pytest.mark.slow),
    ],
)
def test_thinning_keeps_the_last_of_each_group_after_burnin(num_rounds, num_burnin, thinning):
    kernel = dsgld()
    samples = run(kernel, num_rounds=num_rounds, num_burnin=num_burnin, thinning=thinning)
    chosen = [r for r in range(num_burnin, num_rounds) if (r - num_burnin + 1) % thinning == 0]
    assert samples.num_draws == (num_rounds - num_burnin) // thinning == len(chosen)
    np.testing.assert_array_equal(samples.draws, reference_run().draws[:, chosen])
    np.testing.assert_array_equal(samples.info["round"], [chosen] * 3)


def test_per_client_tables_are_read_by_id():
    table = PerClient(jnp.arange(4.0))
    assert [float(table.of(DATA.client(i))) for i in range(4)] == [0.0, 1.0, 2.0, 3.0]
