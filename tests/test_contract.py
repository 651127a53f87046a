"""What every kernel, gradient estimator and participation promises; each must be in the table."""

import inspect
import itertools
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from federations import LIMIT, z_scores
from jax.flatten_util import ravel_pytree

import fedmcmc

NUM_CLIENTS = 3
SIZES = (5, 1, 4)
P = jnp.array([0.5, 0.2, 0.3])
KEY = jax.random.key(3)
POSITIONS = {
    "scalar": jnp.array(0.3),
    "vector": jnp.array([0.3, -0.2, 0.5]),
    "nested": {"a": jnp.array(0.3), "b": {"c": jnp.array([-0.2, 0.5])}},
}


def logprior(position):
    return -0.5 * jnp.sum(ravel_pytree(position)[0] ** 2)


def loglikelihood(position, rows):
    flat = ravel_pytree(position)[0]
    return -0.5 * jnp.sum((rows["x"][:, : flat.size] - flat) ** 2, axis=-1)


POSTERIOR = fedmcmc.Posterior(logprior, loglikelihood)


def make_data(sizes=SIZES, changed=()):
    trees = []
    for i, n in enumerate(sizes):
        x = np.random.default_rng(i).normal(i, 1.0, size=(n, 3)).astype(np.float32)
        trees.append({"x": x + 10.0 if i in changed else x})
    return fedmcmc.FederatedData.from_clients(trees)


DATA = make_data()


def surrogates(position):
    mean = jax.tree.map(lambda x: jnp.stack([x, x + 1, x - 1]), position)
    return fedmcmc.Gaussian.from_moments(
        mean, variance=jax.tree.map(lambda x: jnp.full_like(x, 0.4), mean)
    )


def build_relay(position, step_size=0.01, posterior=POSTERIOR):
    del position
    estimator = fedmcmc.noisy(fedmcmc.full_gradient(), 0.5)
    return fedmcmc.relay(
        posterior, estimator, participation=fedmcmc.categorical(P), step_size=step_size
    )


def build_sgld(position, step_size=0.01, posterior=POSTERIOR):
    del position
    return fedmcmc.sgld(posterior, step_size=step_size, batch_size=2)


def build_dsgld(position, step_size=0.01, posterior=POSTERIOR):
    del position
    return fedmcmc.dsgld(posterior, step_size=step_size, num_local_steps=2, batch_size=2)


def build_fsgld(position, step_size=0.01, posterior=POSTERIOR):
    return fedmcmc.fsgld(
        posterior, surrogates(position), step_size=step_size, num_local_steps=2, probabilities=P
    )


KERNELS = {"sgld": build_sgld, "dsgld": build_dsgld, "fsgld": build_fsgld, "relay": build_relay}
ESTIMATORS = {
    "full_gradient": (lambda: fedmcmc.full_gradient(), True),
    "conducive": (
        lambda: fedmcmc.conducive(fedmcmc.full_gradient(), surrogates(POSITIONS["vector"]), 0.7),
        True,
    ),
    "minibatch": (lambda: fedmcmc.minibatch(2), False),
    "noisy": (lambda: fedmcmc.noisy(fedmcmc.minibatch(2, replace=False), 0.5), False),
}
PARTICIPATIONS = {
    "full": lambda: fedmcmc.full(),
    "bernoulli": lambda: fedmcmc.bernoulli(P),
    "uniform": lambda: fedmcmc.uniform(2),
    "categorical": lambda: fedmcmc.categorical(P),
}
TABLES = {
    fedmcmc.FederatedKernel: KERNELS,
    fedmcmc.GradientEstimator: ESTIMATORS,
    fedmcmc.Participation: PARTICIPATIONS,
}


def constructors(kind, module=fedmcmc):
    """Return names of public functions of `module` that are annotated to return `kind`."""
    functions = {n: f for n, f in vars(module).items() if inspect.isfunction(f) and n[0] != "_"}
    return {n for n, f in functions.items() if typing.get_type_hints(f).get("return") is kind}


@pytest.mark.parametrize("kind", TABLES, ids=lambda kind: kind.__name__)
def test_every_public_constructor_is_in_the_table(kind):
    assert constructors(kind) == set(TABLES[kind])


# Kernels


def one_round(kernel, data, key, position, round_=0, index=1):
    """Return one client's message and whatever else a step returns, and the moved broadcast."""
    rows = data.pooled() if kernel.participation.pooled else data
    state = kernel.init(key, position, rows)
    broadcast = state.broadcast._replace(round=jnp.int32(round_))
    client = rows.client(0 if kernel.participation.pooled else index, 1.5)
    own = jax.tree.map(lambda leaf: leaf[0], state.clients)
    draws = kernel.prepare(key, broadcast, client)
    message, own_after, info = kernel.step(draws, broadcast, own, client)
    moved = kernel.aggregate(key, broadcast, state.server, message)[0]
    return message, (own, own_after), info, (broadcast, moved)


def shapes(tree):
    return jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x)), tree)


@pytest.mark.parametrize("name", KERNELS)
def test_kernel_functions_take_the_documented_arguments(name):
    kernel = KERNELS[name](POSITIONS["vector"])
    documented = {
        "init": ["rng_key", "position", "data"],
        "prepare": ["rng_key", "like", "client"],
        "step": ["draws", "broadcast", "client_state", "client"],
        "aggregate": ["rng_key", "broadcast", "server_state", "total"],
        "draw": ["rng_key", "state"],
    }
    for field, names in documented.items():
        assert list(inspect.signature(getattr(kernel, field)).parameters) == names, field


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("name", KERNELS)
def test_kernel_keeps_structure_shapes_and_dtypes(name, position):
    position = POSITIONS[position]
    kernel = KERNELS[name](position)
    message, (own, own_after), info, (broadcast, moved) = jax.eval_shape(
        lambda key: one_round(kernel, DATA, key, position), KEY
    )
    assert shapes(own) == shapes(own_after)
    assert shapes(broadcast) == shapes(moved)
    assert jax.tree.structure(message) == jax.tree.structure(position)
    assert isinstance(info, fedmcmc.StepInfo) and info.bits.dtype == jnp.int32
    state = jax.eval_shape(lambda key: fedmcmc.simulate(kernel, DATA).init(position, key), KEY)
    assert shapes(jax.eval_shape(kernel.draw, KEY, state)) == shapes(position)


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("name", KERNELS)
def test_kernel_under_jit_and_vmap_moves_with_the_key(name, position):
    position = POSITIONS[position]
    kernel = KERNELS[name](position)
    keys = jax.random.split(KEY, 4)
    messages = jax.jit(jax.vmap(lambda key: one_round(kernel, DATA, key, position)[0]))(keys)
    flat = np.asarray(jax.vmap(lambda m: ravel_pytree(m)[0])(messages))
    assert np.isfinite(flat).all()
    assert (np.abs(flat[1:] - flat[0]) > 1e-6).all()
    # Without jit, one key at a time.
    alone = ravel_pytree(one_round(kernel, DATA, keys[2], position)[0])[0]
    np.testing.assert_allclose(flat[2], alone, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", KERNELS)
def test_a_message_depends_on_the_client_round_key_and_own_rows_alone(name):
    position = POSITIONS["vector"]
    kernel = KERNELS[name](position)
    if kernel.participation.pooled:
        pytest.skip("all rows are one client's")
    message = one_round(kernel, DATA, KEY, position)[0]
    for other in (make_data(changed=(0, 2)), make_data(sizes=(5, 1, 2))):
        np.testing.assert_array_equal(one_round(kernel, other, KEY, position)[0], message)
    changed = one_round(kernel, make_data(changed=(1,)), KEY, position)[0]
    assert np.abs(changed - message).max() > 1e-3


@pytest.mark.parametrize("name", KERNELS)
def test_rounds_clients_and_chains_have_their_own_randomness(name):
    position = POSITIONS["vector"]
    kernel = KERNELS[name](position)
    samples = fedmcmc.sample(
        KEY, kernel, DATA, position, num_rounds=5, num_chains=4, progress=False
    )
    moves = np.diff(samples.draws, axis=1).reshape(-1, 3)
    gaps = np.abs(moves[:, None] - moves[None]).min(-1)
    assert gaps[~np.eye(len(moves), dtype=bool)].min() > 0
    noise = [
        ravel_pytree(kernel.prepare(client_key(r, i), broadcast_at(r, position), DATA.client(0)))[0]
        for r, i in itertools.product(range(2), range(2))
    ]
    for a, b in itertools.combinations(noise, 2):
        assert np.abs(a - b).max() > 1e-3


def broadcast_at(round_, position):
    return fedmcmc.Broadcast(jnp.int32(round_), position)


def client_key(round_, index):
    return jax.random.fold_in(jax.random.fold_in(KEY, round_), index)


@pytest.mark.parametrize("name", KERNELS)
def test_the_runner_uses_the_documented_keys(name):
    """What `simulate` sends on is what the chosen client computes by itself."""
    position = POSITIONS["vector"]
    kernel = KERNELS[name](position)
    init, step = fedmcmc.simulate(kernel, DATA)
    after, _ = jax.jit(step)(KEY, init(position))
    moved = np.asarray(after.broadcast.position - position)
    rows = DATA.pooled() if kernel.participation.pooled else DATA
    weights = np.ones(1) if kernel.participation.pooled else 1 / np.asarray(P)
    if name == "dsgld":
        weights = np.full(3, 3.0)
    found = []
    for i in range(rows.num_clients):
        client, broadcast = rows.client(i, weights[i]), broadcast_at(0, position)
        draws = kernel.prepare(client_key(0, i), broadcast, client)
        found.append(np.asarray(kernel.step(draws, broadcast, (), client)[0]))
    assert min(np.abs(message - moved).max() for message in found) < 1e-5


@pytest.mark.parametrize("name", KERNELS)
def test_one_trace_serves_all_numbers(name):
    position, traces = POSITIONS["vector"], []

    def counted(position_, rows):
        traces.append(None)
        return loglikelihood(position_, rows)

    posterior = fedmcmc.Posterior(logprior, counted)

    @jax.jit
    def program(kernel, key):
        init, step = fedmcmc.simulate(kernel, DATA)
        return step(key, init(position))[0].broadcast.position

    first = program(KERNELS[name](position, 0.01, posterior), KEY)
    num = len(traces)
    second = program(KERNELS[name](position, 0.02, posterior), KEY)
    assert len(traces) == num > 0
    assert np.abs(first - second).max() > 1e-3


# Gradient estimators


def global_gradient(position):
    return np.asarray(jax.grad(lambda t: jnp.sum(loglikelihood(t, DATA.rows)))(position), float)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimates_summed_over_clients_are_the_global_gradient(name):
    build, exact = ESTIMATORS[name]
    estimator, position = build(), POSITIONS["vector"]
    estimator.check(position, DATA)

    def estimate(key, i):
        client = DATA.client(i)
        state = estimator.init(loglikelihood, position, client)
        draws = estimator.prepare(key, position, client, 2)
        broadcast = broadcast_at(0, position)
        context, after = estimator.start(loglikelihood, broadcast, state, client)
        assert shapes(state) == shapes(after)
        second = jax.tree.map(lambda leaf: leaf[1], draws)
        return estimator.estimate(loglikelihood, second, position, context, client)

    def total(key):
        return sum(estimate(jax.random.fold_in(key, i), i) for i in range(NUM_CLIENTS))

    if exact:
        np.testing.assert_allclose(jax.jit(total)(KEY), global_gradient(position), rtol=1e-5)
        return
    totals = jax.jit(jax.vmap(total))(jax.random.split(KEY, 20000))
    assert np.abs(z_scores(totals, global_gradient(position))).max() < LIMIT
    assert np.asarray(totals).std(0).min() > 0.1


# Participations


@pytest.mark.parametrize("name", PARTICIPATIONS)
def test_weighted_sums_over_a_cohort_are_unbiased(name):
    participation = PARTICIPATIONS[name]()
    participation.check(NUM_CLIENTS)
    x = jnp.array([1.0, -2.0, 4.0])
    cohorts = jax.jit(jax.vmap(lambda key: participation.prepare(key, NUM_CLIENTS)))(
        jax.random.split(KEY, 20000)
    )
    size = participation.cohort_size or NUM_CLIENTS
    assert shapes(cohorts) == fedmcmc.Cohort(
        ((20000, size), jnp.int32), ((20000, size), jnp.float32), ((20000, size), jnp.bool_)
    )
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
