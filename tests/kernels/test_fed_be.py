"""FedBE: the clients' models, the ensembles fitted to them, their draws and messages."""

from functools import cache

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedmcmc
from tests.oracles.federations import LIMIT, Federation, worst_z, z_scores
from tests.oracles.laws import Moments

FEDERATION = Federation()
DATA = FEDERATION.data
SIZES = np.array(Federation.sizes)
SHARES = SIZES / SIZES.sum()
START = jnp.asarray(Federation.start)
KEY = jax.random.key(5)
SGD = optax.sgd(0.1)
MOMENTUM = optax.sgd(0.1, momentum=0.9)
EITHER = ["gaussian", pytest.param("dirichlet", marks=pytest.mark.slow)]


def decreasing(round_):
    return 1 / (1 + round_)


def fed_be(**settings):
    defaults = dict(client_optimizer=SGD, num_local_steps=4)
    return fedmcmc.fed_be(FEDERATION.posterior, **(defaults | settings))


def train(theta, learning_rate=0.1, num_steps=4, decay=0.0):
    """Return the clients' models after descent of their mean losses, ``[num_clients, 3]``."""
    prior, models = FEDERATION.prior_precision, []
    for precision, mean, size in zip(FEDERATION.precisions, FEDERATION.means, SIZES, strict=True):
        model, velocity = np.asarray(theta, float), np.zeros(3)
        for _ in range(num_steps):
            gradient = precision @ (model - mean) / size
            gradient += prior @ (model - FEDERATION.prior_mean) / SIZES.sum()
            velocity = decay * velocity + gradient
            model = model - learning_rate * velocity
        models.append(model)
    return np.stack(models)


def mean_and_scale(models, weights=SHARES):
    weights = weights / weights.sum()
    mean = weights @ models
    return mean, np.sqrt(weights @ (models - mean) ** 2)


@jax.jit
def run(kernel, keys, num_rounds=1):
    """Return the states after some rounds, leaves ``[len(keys), ...]``."""
    init, step = fedmcmc.simulate(kernel, DATA)

    def chain(key):
        return jax.lax.fori_loop(0, num_rounds, lambda _, s: step(key, s)[0], init(START))

    return jax.vmap(chain)(keys)


def single_chain(kernel, num_rounds=1):
    return jax.tree.map(lambda leaf: leaf[0], run(kernel, KEY[None], num_rounds))


def dirichlet(concentration=0.5, num_rounds=1, **settings):
    """Return the kernel of a Dirichlet ensemble and many states; all calls share a program."""
    settings = dict(num_models=3, concentration=concentration) | settings
    kernel = fed_be(ensemble="dirichlet", **settings)
    return kernel, run(kernel, jax.random.split(KEY, 8192), num_rounds)


def barycentric(points, models):
    """Return weights that sum to one such that `points` are weighted means of `models`."""
    system = np.concatenate([models.T, np.ones((1, len(models)))])
    points = np.asarray(points, float)
    right = np.concatenate([points, np.ones((*points.shape[:-1], 1))], axis=-1)
    return np.linalg.solve(system, right[..., None])[..., 0]


# The Gaussian ensemble


@pytest.mark.check
def test_a_gaussian_has_the_moments_of_the_models_in_each_round():
    kernel, theta = fed_be(learning_rate=decreasing), START
    for round_ in range(3):
        mean, scale = mean_and_scale(train(theta, 0.1 / (1 + round_)))
        state = single_chain(kernel, round_ + 1)
        np.testing.assert_allclose(state.server.mean, mean, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(state.server.scale, scale, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(state.broadcast.position, state.server.mean)
        if round_ == 0:
            keys = jax.random.split(jax.random.split(KEY)[0], 20000)
            draws = jax.vmap(lambda key, state=state: kernel.draw(key, state))(keys)
            assert worst_z(draws, Moments(mean, np.diag(scale**2))) < LIMIT
        theta = mean
    assert scale.min() > 0.01


def test_a_client_resets_its_optimizer_in_each_round():
    theta = START
    for _ in range(2):
        theta, scale = mean_and_scale(train(theta, decay=0.9))
    state = single_chain(fed_be(client_optimizer=MOMENTUM), 2)
    np.testing.assert_allclose(state.server.mean, theta, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(state.server.scale, scale, rtol=1e-4, atol=1e-4)


# The Dirichlet ensemble


@cache
def default_dirichlet():
    return dirichlet()


@pytest.mark.parametrize("concentration", [0.5, 3.0])
def test_weights_of_the_members_have_a_dirichlet_distribution(concentration):
    _, state = default_dirichlet() if concentration == 0.5 else dirichlet(concentration)
    models = train(START)
    np.testing.assert_allclose(state.server.mean[7], SHARES @ models, rtol=1e-5, atol=1e-5)
    # Weights [chains, members, clients] are proportional to gamma_i p_i.
    weights = barycentric(state.server.models, models)
    assert weights.min() > -1e-3
    gamma = weights / SHARES
    gap = gamma / gamma.sum(-1, keepdims=True) - 1 / 4
    expected = (np.eye(4) / 4 - 1 / 16) / (4 * concentration + 1)
    products = np.einsum("cmi,cmj->cij", gap, gap) / 3
    assert np.abs(z_scores(gap.mean(1), 0.0)).max() < LIMIT
    assert np.abs(z_scores(products, expected)).max() < LIMIT
    # Members of one round are independent, and so are chains.
    assert np.abs(z_scores(gap[:, 0, :, None] * gap[:, 1, None, :], 0.0)).max() < LIMIT
    assert np.abs(z_scores(gap[::2, 0, :, None] * gap[1::2, 0, None, :], 0.0)).max() < LIMIT


def test_each_member_is_drawn_equally_often():
    kernel, states = default_dirichlet()
    state = jax.tree.map(lambda leaf: leaf[0], states)
    draws = jax.vmap(lambda key: kernel.draw(key, state))(jax.random.split(KEY, 3000))
    same = (np.asarray(draws)[:, None] == np.asarray(state.server.models)).all(-1)
    assert (same.sum(1) == 1).all()
    assert np.abs(z_scores(same, 1 / 3)).max() < LIMIT


def test_members_change_from_round_to_round():
    # The models hardly move, so that only the weights differ.
    before, after = (dirichlet(num_rounds=n, learning_rate=1e-4)[1].server.models for n in (1, 2))
    scale = np.abs(before - START).max(axis=(1, 2))
    assert (np.abs(before - after).max(axis=(1, 2)) > 0.01 * scale).mean() > 0.9


def test_a_member_without_weight_stays():
    family = fedmcmc.kernels.dirichlet_ensemble(num_models=2)
    total = family.message(jnp.array([2.0, 0.0]), 0.5, jnp.array([3.0]))
    ensemble = family.fit(jnp.array([1.0]), total, family.init(jnp.array([-7.0])))
    np.testing.assert_allclose(ensemble.mean, [4.0])
    np.testing.assert_allclose(ensemble.models, [[4.0], [-7.0]])


# Participation


@pytest.mark.parametrize("name", EITHER)
def test_means_are_over_the_cohort(name):
    kernel = fed_be(ensemble=name, participation=fedmcmc.uniform(2), num_models=2)
    keys = jax.random.split(KEY, 60)
    state, models = run(kernel, keys), train(START)

    @jax.jit
    @jax.vmap
    def cohorts(key):
        cohort_key = jax.random.fold_in(jax.random.fold_in(key, 0), np.uint32(2**32 - 2))
        return kernel.participation.prepare(cohort_key, 4).ids

    ids = np.asarray(cohorts(keys))
    assert len(np.unique(np.sort(ids, axis=1), axis=0)) == 6
    for i, cohort in enumerate(ids):
        mean, scale = mean_and_scale(models[cohort], SHARES[cohort])
        np.testing.assert_allclose(state.server.mean[i], mean, rtol=1e-4, atol=1e-4)
        if name == "gaussian":
            np.testing.assert_allclose(state.server.scale[i], scale, rtol=1e-3, atol=1e-4)
        else:
            weights = barycentric(state.server.models[i], models)
            absent = np.setdiff1d(np.arange(4), cohort)
            np.testing.assert_allclose(weights[:, absent], 0, atol=1e-3)


@pytest.mark.parametrize("name", EITHER)
def test_nothing_changes_if_nobody_takes_part(name):
    kernel = fed_be(ensemble=name, participation=fedmcmc.bernoulli(1e-6), num_models=2)
    state = kernel.init(KEY, START, DATA)
    np.testing.assert_array_equal(kernel.draw(KEY, state), START)
    after = single_chain(kernel, 2)
    np.testing.assert_array_equal(after.broadcast.position, START)
    chex.assert_trees_all_equal(after.server, state.server)


# Messages


@pytest.mark.parametrize("name", ["gaussian", "dirichlet"])
def test_a_compressed_message_has_fewer_bits(name):
    wide = fedmcmc.FederatedData.from_clients(
        [np.random.default_rng(i).normal(i, 1, size=(n, 200)) for i, n in enumerate((3, 5))]
    )
    posterior = fedmcmc.Posterior(
        lambda theta: 0.0, lambda theta, rows: -0.5 * jnp.sum((rows - theta) ** 2, axis=-1)
    )
    settings = dict(client_optimizer=SGD, num_local_steps=2, ensemble=name, num_models=2)
    plain = fedmcmc.fed_be(posterior, **settings)
    bits = []
    for kernel in (plain, fedmcmc.compress(plain, fedmcmc.quantize(16))):
        init, step = fedmcmc.simulate(kernel, wide)
        state, info = jax.jit(step)(KEY, init(jnp.zeros(200)))
        assert np.isfinite(state.broadcast.position).all()
        assert np.isfinite(kernel.draw(KEY, state)).all()
        assert int(info.bits_down) == 2 * 32 * 200
        bits.append(int(info.bits_up))
    assert bits[0] == 2 * 32 * {"gaussian": 401, "dirichlet": 3 * 201}[name]
    assert 0 < bits[1] < bits[0] / 4


def test_a_weight_with_its_own_norm_is_exact_and_the_mean_unbiased():
    compressor = fedmcmc.quantize(16, per_leaf=True)
    kernel = fedmcmc.compress(fed_be(), compressor)
    ensemble = run(kernel, jax.random.split(KEY, 4096)).server.kernel
    mean, _ = mean_and_scale(train(START))
    assert np.std(ensemble.mean, axis=0).min() > 1e-3
    assert np.abs(z_scores(ensemble.mean, mean)).max() < LIMIT
    assert np.isfinite(ensemble.scale).all()


@pytest.mark.slow
def test_sums_compressed_as_one_vector_are_unbiased_and_their_quotient_nearly():
    kernel, compressor = fed_be(), fedmcmc.quantize(16)
    state = kernel.init(KEY, START, DATA)
    clients = [DATA.client(i) for i in range(4)]
    messages = [
        kernel.step(kernel.prepare(KEY, state.broadcast, c), state.broadcast, (), c)[0]
        for c in clients
    ]

    def decoded_sum(key):
        decoded = []
        for i, (message, client) in enumerate(zip(messages, clients, strict=True)):
            draws = compressor.prepare(jax.random.fold_in(key, i), message, client)
            code, _ = compressor.encode(draws, message, (), client)
            decoded.append(compressor.decode(code, client))
        return jax.tree.map(lambda *leaves: sum(leaves), *decoded)

    keys = jax.random.split(KEY, 4096)
    totals = jax.jit(jax.vmap(decoded_sum))(keys)
    weight = np.asarray(totals.weight, float)
    assert abs(z_scores(weight, 1.0)) < LIMIT and weight.std() > 1e-3
    mean, _ = mean_and_scale(train(START))
    moved = mean - np.asarray(START)
    assert np.abs(z_scores(totals.moved, moved)).max() < LIMIT
    # The quotient is off by its second-order term, which is small.
    bias = moved * weight.var()
    means = run(fedmcmc.compress(kernel, compressor), keys).server.kernel.mean
    assert np.abs(z_scores(means, mean + bias)).max() < LIMIT
    assert np.abs(bias).max() < 0.01 * np.abs(moved).max()


def test_the_next_round_starts_from_the_distilled_model():
    def distill(rng_key, mean, members):
        assert members.shape == (7, 3)
        return members.mean(0) + 10 * jax.random.uniform(rng_key)

    kernel = fed_be(distill=distill, num_models=7)
    state = single_chain(kernel)
    mean, scale = mean_and_scale(train(START))
    np.testing.assert_allclose(state.server.mean, mean, rtol=1e-5, atol=1e-5)
    shift = np.asarray(state.broadcast.position) - mean
    assert (shift > -3 * scale).all() and (shift < 10 + 3 * scale).all() and shift.max() > 0.01
    second, _ = mean_and_scale(train(state.broadcast.position))
    np.testing.assert_allclose(single_chain(kernel, 2).server.mean, second, rtol=1e-4, atol=1e-4)
    # Each key has its own members.
    ends = run(kernel, jax.random.split(KEY, 3)).broadcast.position
    assert len(np.unique(np.asarray(ends)[:, 0])) == 3
