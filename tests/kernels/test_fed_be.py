"""FedBE: the clients' models, what is fitted to them, its draws, and distillation."""

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


def losses():
    """Return curvatures and minima of the clients' mean losses, each with its part of the prior."""
    prior, num_rows = FEDERATION.prior_precision, SIZES.sum()
    curvatures = FEDERATION.precisions / SIZES[:, None, None] + prior / num_rows
    slopes = np.einsum("sij,sj->si", FEDERATION.precisions, FEDERATION.means) / SIZES[:, None]
    slopes = slopes + prior @ FEDERATION.prior_mean / num_rows
    return curvatures, np.stack(
        [np.linalg.solve(a, k) for a, k in zip(curvatures, slopes, strict=True)]
    )


def trained(theta, learning_rate=0.1, num_steps=4):
    """Return every client's model after plain gradient descent, ``[num_clients, 3]``."""
    models = []
    for curvature, minimum in zip(*losses(), strict=True):
        shrink = np.linalg.matrix_power(np.eye(3) - learning_rate * curvature, num_steps)
        models.append(minimum + shrink @ (np.asarray(theta, float) - minimum))
    return np.stack(models)


def fitted(models, weights=SHARES):
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


def one(kernel, num_rounds=1):
    return jax.tree.map(lambda leaf: leaf[0], run(kernel, KEY[None], num_rounds))


def members(concentration=0.5, num_rounds=1, **settings):
    """Return the kernel of a Dirichlet ensemble and many states; all calls share a program."""
    settings = dict(num_models=3, concentration=concentration) | settings
    kernel = fed_be(ensemble="dirichlet", **settings)
    return kernel, run(kernel, jax.random.split(KEY, 8192), num_rounds)


# The Gaussian ensemble


@pytest.mark.check
def test_mean_and_spread_are_those_of_the_clients_models_round_after_round():
    kernel, theta = fed_be(learning_rate=decreasing), START
    for round_ in range(3):
        mean, scale = fitted(trained(theta, 0.1 / (1 + round_)))
        state = one(kernel, round_ + 1)
        np.testing.assert_allclose(state.server.mean, mean, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(state.server.scale, scale, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(state.broadcast.position, state.server.mean)
        theta = mean
    assert scale.min() > 0.01


def test_the_optimisers_state_starts_anew_in_every_round():
    theta = np.asarray(START, float)
    for _ in range(2):
        models = []
        for curvature, minimum in zip(*losses(), strict=True):
            w, velocity = theta, np.zeros(3)
            for _ in range(4):
                velocity = 0.9 * velocity + curvature @ (w - minimum)
                w = w - 0.1 * velocity
            models.append(w)
        theta, scale = fitted(np.stack(models))
    state = one(fed_be(client_optimizer=MOMENTUM), 2)
    np.testing.assert_allclose(state.server.mean, theta, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(state.server.scale, scale, rtol=1e-4, atol=1e-4)


def test_draws_of_the_gaussian_have_its_moments():
    kernel = fed_be(learning_rate=decreasing)
    state = one(kernel)
    draws = jax.vmap(lambda key: kernel.draw(key, state))(jax.random.split(KEY, 20000))
    mean, scale = fitted(trained(START))
    assert worst_z(draws, Moments(mean, np.diag(scale**2))) < LIMIT


def test_before_the_first_round_every_draw_is_the_start():
    for name in ("gaussian", "dirichlet"):
        kernel = fed_be(ensemble=name)
        state = kernel.init(KEY, START, DATA)
        np.testing.assert_array_equal(kernel.draw(KEY, state), START)


# The Dirichlet ensemble


def barycentric(points, models):
    """Return the weights, summing to one, with which `points` are means of `models`."""
    system = np.concatenate([models.T, np.ones((1, len(models)))])
    points = np.asarray(points, float)
    right = np.concatenate([points, np.ones((*points.shape[:-1], 1))], axis=-1)
    return np.linalg.solve(system, right[..., None])[..., 0]


@pytest.mark.parametrize("concentration", [0.5, 3.0])
def test_weights_of_the_members_are_dirichlet(concentration):
    _, state = members(concentration)
    models = trained(START)
    np.testing.assert_allclose(state.server.mean[7], SHARES @ models, rtol=1e-5, atol=1e-5)
    # [chains, members, clients]: proportional to gamma_i p_i.
    weights = barycentric(state.server.models, models)
    assert weights.min() > -1e-3
    dirichlet = weights / SHARES
    dirichlet /= dirichlet.sum(-1, keepdims=True)
    total = 4 * concentration
    gap = dirichlet - 1 / 4
    expected = (np.eye(4) / 4 - 1 / 16) / (total + 1)
    products = np.einsum("cmi,cmj->cij", gap, gap) / 3
    assert np.abs(z_scores(gap.mean(1), 0.0)).max() < LIMIT
    assert np.abs(z_scores(products, expected)).max() < LIMIT
    # Members of one round are independent of one another, and so are chains.
    assert np.abs(z_scores(gap[:, 0, :, None] * gap[:, 1, None, :], 0.0)).max() < LIMIT
    assert np.abs(z_scores(gap[::2, 0, :, None] * gap[1::2, 0, None, :], 0.0)).max() < LIMIT


def test_a_draw_is_a_member_each_equally_often():
    kernel, states = members()
    state = jax.tree.map(lambda leaf: leaf[0], states)
    draws = jax.vmap(lambda key: kernel.draw(key, state))(jax.random.split(KEY, 3000))
    same = (np.asarray(draws)[:, None] == np.asarray(state.server.models)).all(-1)
    assert (same.sum(1) == 1).all()
    assert np.abs(z_scores(same, 1 / 3)).max() < LIMIT


def test_members_change_from_round_to_round():
    # The models hardly move, so that the weights alone differ.
    first, second = (members(num_rounds=n, learning_rate=1e-4)[1].server.models for n in (1, 2))
    scale = np.abs(first - START).max(axis=(1, 2))
    assert (np.abs(first - second).max(axis=(1, 2)) > 0.01 * scale).mean() > 0.9


# Who takes part


@pytest.mark.parametrize("name", EITHER)
def test_means_are_over_those_who_take_part(name):
    kernel = fed_be(ensemble=name, participation=fedmcmc.uniform(2), num_models=2)
    keys = jax.random.split(KEY, 60)
    state = run(kernel, keys)
    models, seen = trained(START), set()

    @jax.jit
    @jax.vmap
    def cohorts(key):
        cohort_key = jax.random.fold_in(jax.random.fold_in(key, 0), np.uint32(2**32 - 2))
        return kernel.participation.prepare(cohort_key, 4).ids

    for i, ids in enumerate(np.asarray(cohorts(keys))):
        mean, scale = fitted(models[ids], SHARES[ids])
        np.testing.assert_allclose(state.server.mean[i], mean, rtol=1e-4, atol=1e-4)
        seen.add(tuple(sorted(ids.tolist())))
        if name == "gaussian":
            np.testing.assert_allclose(state.server.scale[i], scale, rtol=1e-3, atol=1e-4)
        else:
            others = np.setdiff1d(np.arange(4), ids)
            weights = barycentric(state.server.models[i], models)
            np.testing.assert_allclose(weights[:, others], 0, atol=1e-3)
    assert len(seen) == 6


@pytest.mark.parametrize("name", EITHER)
def test_nothing_changes_where_nobody_takes_part(name):
    kernel = fed_be(ensemble=name, participation=fedmcmc.bernoulli(1e-6), num_models=2)
    state = kernel.init(KEY, START, DATA)
    after = one(kernel, 2)
    np.testing.assert_array_equal(after.broadcast.position, START)
    chex.assert_trees_all_equal(after.server, state.server)


def test_a_member_without_weight_stays():
    family = fedmcmc.kernels.dirichlet_ensemble(num_models=2)
    total = family.message(jnp.array([2.0, 0.0]), 0.5, jnp.array([3.0]))
    fitted_ = family.fit(jnp.array([1.0]), total, family.init(jnp.array([-7.0])))
    np.testing.assert_allclose(fitted_.mean, [4.0])
    np.testing.assert_allclose(fitted_.models, [[4.0], [-7.0]])


# Messages


@pytest.mark.parametrize("name", ["gaussian", "dirichlet"])
def test_a_message_has_the_declared_shapes_and_bits(name):
    kernel = fed_be(ensemble=name, num_models=5, batch_size=2)
    position = {"a": jnp.zeros(()), "b": jnp.zeros((2, 3))}
    posterior = fedmcmc.Posterior(
        lambda p: -(p["a"] ** 2), lambda p, rows: -jnp.sum((rows["x"] - p["b"][0]) ** 2, axis=-1)
    )
    kernel = fedmcmc.fed_be(
        posterior, client_optimizer=SGD, num_local_steps=2, ensemble=name, num_models=5
    )
    state = kernel.init(KEY, position, DATA)
    client = DATA.client(2)
    draws = kernel.prepare(KEY, state.broadcast, client)
    message, _, info = kernel.step(draws, state.broadcast, state.clients, client)
    declared = kernel.message_like(state.broadcast)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), message) == jax.tree.map(
        lambda x: (x.shape, x.dtype), declared
    )
    assert int(info.bits) == 32 * {"gaussian": 1 + 2 * 7, "dirichlet": 6 * (1 + 7)}[name]
    assert int(info.bits_down) == 32 * 7


def compressed(name, per_leaf, num=4096):
    """Return the kernel compressed and the states after a round."""
    kernel = fed_be(ensemble=name, num_models=2)
    kernel = fedmcmc.compress(kernel, fedmcmc.quantize(16, per_leaf=per_leaf))
    return kernel, run(kernel, jax.random.split(KEY, num))


def test_a_weight_with_a_norm_of_its_own_is_sent_exactly_and_the_mean_unbiased():
    _, state = compressed("gaussian", per_leaf=True)
    fit = state.server.kernel
    mean, _ = fitted(trained(START))
    assert np.std(fit.mean, axis=0).min() > 1e-3
    assert np.abs(z_scores(fit.mean, mean)).max() < LIMIT
    assert np.isfinite(fit.scale).all()


@pytest.mark.slow
def test_compressed_as_one_vector_the_sums_are_unbiased_and_the_mean_nearly():
    kernel = fed_be()
    compressor = fedmcmc.quantize(16)
    state = kernel.init(KEY, START, DATA)

    def messages(client):
        return kernel.step(
            kernel.prepare(KEY, state.broadcast, client), state.broadcast, (), client
        )[0]

    exact = [messages(DATA.client(i)) for i in range(4)]

    def decoded(key):
        heard = []
        for i, message in enumerate(exact):
            client = DATA.client(i)
            draws = compressor.prepare(jax.random.fold_in(key, i), message, client)
            heard.append(
                compressor.decode(compressor.encode(draws, message, (), client)[0], client)
            )
        return jax.tree.map(lambda *leaves: sum(leaves), *heard)

    totals = jax.jit(jax.vmap(decoded))(jax.random.split(KEY, 4096))
    weight = np.asarray(totals.weight, float)
    first = np.asarray(totals.moved, float)
    assert abs(z_scores(weight, 1.0)) < LIMIT and weight.std() > 1e-3
    mean, _ = fitted(trained(START))
    moved = mean - np.asarray(START)
    assert np.abs(z_scores(first, moved)).max() < LIMIT
    # The quotient is off by its second-order term, which is known, and small.
    bias = moved * weight.var()
    _, state = compressed("gaussian", per_leaf=False)
    means = np.asarray(state.server.kernel.mean, float)
    assert np.abs(z_scores(means, mean + bias)).max() < LIMIT
    assert np.abs(bias).max() < 0.01 * np.abs(moved).max()


@pytest.mark.parametrize("name", EITHER)
def test_compressed_kernels_run_and_send_fewer_bits(name):
    wide = fedmcmc.FederatedData.from_clients(
        [np.random.default_rng(i).normal(i, 1, size=(n, 200)) for i, n in enumerate((3, 5))]
    )
    posterior = fedmcmc.Posterior(
        lambda theta: 0.0, lambda theta, rows: -0.5 * jnp.sum((rows - theta) ** 2, axis=-1)
    )
    kernel = fedmcmc.fed_be(
        posterior, client_optimizer=SGD, num_local_steps=2, ensemble=name, num_models=2
    )
    bits = {}
    for key, k in (("all", kernel), ("few", fedmcmc.compress(kernel, fedmcmc.quantize(16)))):
        init, step = fedmcmc.simulate(k, wide)
        state, info = jax.jit(step)(KEY, init(jnp.zeros(200)))
        assert np.isfinite(state.broadcast.position).all()
        assert np.isfinite(k.draw(KEY, state)).all()
        bits[key] = int(info.bits_up)
    assert bits["all"] == 2 * 32 * {"gaussian": 401, "dirichlet": 3 * 201}[name]
    assert 0 < bits["few"] < bits["all"] / 4


# What is broadcast


def test_the_next_round_starts_where_the_distiller_says():
    def distill(rng_key, mean, members):
        assert members.shape == (7, 3)
        return members.mean(0) + 10 * jax.random.uniform(rng_key)

    kernel = fed_be(distill=distill, num_models=7)
    state = one(kernel)
    mean, scale = fitted(trained(START))
    np.testing.assert_allclose(state.server.mean, mean, rtol=1e-5, atol=1e-5)
    shift = np.asarray(state.broadcast.position) - mean
    assert (shift > -3 * scale).all() and (shift < 10 + 3 * scale).all() and shift.max() > 0.01
    second = one(kernel, 2)
    wanted, _ = fitted(trained(state.broadcast.position))
    np.testing.assert_allclose(second.server.mean, wanted, rtol=1e-4, atol=1e-4)
    # Every key has members of its own.
    ends = run(kernel, jax.random.split(KEY, 3)).broadcast.position
    assert len(np.unique(np.asarray(ends)[:, 0])) == 3


# Numbers and errors


def test_one_trace_serves_all_numbers():
    traces = []

    def counted(theta, rows):
        traces.append(None)
        return FEDERATION.posterior.loglikelihood_fn(theta, rows)

    posterior = FEDERATION.posterior._replace(loglikelihood_fn=counted)
    settings = dict(client_optimizer=SGD, num_local_steps=2, ensemble="dirichlet", num_models=2)

    @jax.jit
    def program(kernel, key):
        init, step = fedmcmc.simulate(kernel, DATA)
        return step(key, init(START))[0].server.models

    first = program(fedmcmc.fed_be(posterior, learning_rate=0.5, **settings), KEY)
    num = len(traces)
    for change in (dict(learning_rate=0.4), dict(learning_rate=0.5, concentration=0.2)):
        other = program(fedmcmc.fed_be(posterior, **(settings | change)), KEY)
        assert np.abs(first - other).max() > 1e-3
    assert len(traces) == num > 0


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(ensemble="student"), ValueError, 'must be "gaussian" or "dirichlet", got'),
        (dict(num_local_steps=0), ValueError, "num_local_steps must be a positive integer"),
        (dict(num_models=0), ValueError, "num_models must be a positive integer, got 0"),
        (dict(learning_rate=0.0), ValueError, "learning_rate must be a finite number above 0"),
        (dict(client_optimizer=0.1), TypeError, "client_optimizer must be an optax"),
        (dict(distill=3), TypeError, "distill must be a function or None, got int"),
        (dict(ensemble="dirichlet", concentration=0.0), ValueError, "concentration must be"),
        (
            dict(ensemble="dirichlet", concentration=lambda r: 1.0),
            TypeError,
            "concentration must be a number",
        ),
    ],
)
def test_bad_settings(change, error, message):
    with pytest.raises(error, match=message):
        fed_be(**change)


def test_a_family_must_be_one():
    with pytest.raises(TypeError, match="family must be an Ensemble"):
        fedmcmc.ensemble(
            FEDERATION.posterior,
            fedmcmc.full_gradient(),
            "gaussian",
            client_optimizer=SGD,
            num_local_steps=1,
        )
