"""FedAvg and FedPA on quadratics: every round, the solve, the samplers' law, who is averaged."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

import fedmcmc
from fedmcmc.dynamics import Length, train, training
from fedmcmc.kernels import posterior_delta
from tests.oracles.federations import LIMIT, Federation, z_scores
from tests.support.lanes import fast_and_slow

FEDERATION = Federation()
DATA = FEDERATION.data
SIZES = np.array(FEDERATION.sizes)
SHARES = SIZES / SIZES.sum()
LR = 0.2
# A client's objective: the mean over its rows, and the prior over the number of all rows.
HESSIANS = FEDERATION.precisions / SIZES[:, None, None] + FEDERATION.prior_precision / SIZES.sum()
GRADIENTS = (
    np.einsum("kij,kj->ki", FEDERATION.precisions, FEDERATION.means) / SIZES[:, None]
    + FEDERATION.prior_precision @ FEDERATION.prior_mean / SIZES.sum()
)
MINIMA = np.linalg.solve(HESSIANS, GRADIENTS[..., None])[..., 0]


def positions(kernel, num_rounds, data=DATA, start=None):
    init, step = fedmcmc.simulate(kernel, data)
    step, state = jax.jit(step), init(jnp.asarray(FEDERATION.start if start is None else start))
    actual = [np.asarray(state.broadcast.position)]
    for _ in range(num_rounds):
        state, _ = step(jax.random.key(0), state)
        actual.append(np.asarray(state.broadcast.position))
    return np.array(actual)


def shrink(k, steps, lr=LR):
    return np.eye(3) - np.linalg.matrix_power(np.eye(3) - lr * HESSIANS[k], steps)


@pytest.mark.parametrize("epochs", [True, False])
def test_every_round_of_averaging(epochs):
    length = dict(num_local_epochs=5) if epochs else dict(num_local_steps=5)
    kernel = fedmcmc.fed_avg(FEDERATION.posterior, client_optimizer=optax.sgd(LR), **length)
    theta = FEDERATION.start
    for actual in positions(kernel, 8):
        np.testing.assert_allclose(actual, theta, rtol=1e-4, atol=1e-4)
        theta = theta - sum(SHARES[k] * shrink(k, 5) @ (theta - MINIMA[k]) for k in range(4))


def test_the_fixed_point_of_averaging_is_not_the_posterior_mean():
    matrices = [SHARES[k] * shrink(k, 20) for k in range(4)]
    fixed = np.linalg.solve(
        sum(matrices), sum(m @ x for m, x in zip(matrices, MINIMA, strict=True))
    )
    kernel = fedmcmc.fed_avg(
        FEDERATION.posterior, client_optimizer=optax.sgd(LR), num_local_steps=20
    )
    np.testing.assert_allclose(positions(kernel, 100)[-1], fixed, rtol=1e-4, atol=1e-4)
    total = sum(SHARES[k] * HESSIANS[k] for k in range(4))
    mode = np.linalg.solve(total, sum(SHARES[k] * GRADIENTS[k] for k in range(4)))
    assert np.abs(fixed - mode).max() > 0.02
    # With one local step it is.
    kernel = fedmcmc.fed_avg(
        FEDERATION.posterior, client_optimizer=optax.sgd(LR), num_local_steps=1
    )
    np.testing.assert_allclose(positions(kernel, 400)[-1], mode, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "optimizer",
    [optax.sgd(0.5, momentum=0.9), optax.adagrad(0.3), optax.adam(0.1), optax.yogi(0.1)],
)
def test_the_servers_optimizer_descends_the_mean(optimizer):
    kernel = fedmcmc.fed_avg(
        FEDERATION.posterior,
        client_optimizer=optax.sgd(LR, momentum=0.5),
        num_local_steps=3,
        server_optimizer=optimizer,
        server_learning_rate=lambda r: 1 / (1 + r),
    )
    theta = jnp.asarray(FEDERATION.start, jnp.float32)
    state = optimizer.init(theta)
    for r, actual in enumerate(positions(kernel, 5)):
        np.testing.assert_allclose(actual, theta, rtol=1e-4, atol=1e-4)
        delta = np.zeros(3)
        for k in range(4):
            x, v = np.asarray(theta, float), np.zeros(3)
            for _ in range(3):
                v = 0.5 * v + HESSIANS[k] @ (x - MINIMA[k])
                x = x - LR * v
            delta += SHARES[k] * (np.asarray(theta, float) - x)
        updates, state = optimizer.update(jnp.asarray(delta, jnp.float32), state, theta)
        theta = theta + updates / (1 + r)


def test_means_are_over_the_cohort_weighted_by_rows():
    kernel = fedmcmc.fed_avg(
        FEDERATION.posterior, client_optimizer=optax.sgd(LR), num_local_steps=5, cohort_size=2
    )
    init, step = fedmcmc.simulate(kernel, DATA)
    state, step = init(jnp.asarray(FEDERATION.start)), jax.jit(step)
    cohorts = set()
    for r in range(6):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), r), jnp.uint32(2**32 - 2))
        members = [int(i) for i in kernel.participation.prepare(key, 4).ids]
        cohorts.add(tuple(sorted(members)))
        theta = np.asarray(state.broadcast.position, float)
        total = sum(SHARES[k] for k in members)
        delta = sum(SHARES[k] * shrink(k, 5) @ (theta - MINIMA[k]) for k in members) / total
        state, _ = step(jax.random.key(0), state)
        np.testing.assert_allclose(state.broadcast.position, theta - delta, rtol=1e-4, atol=1e-4)
    assert len(cohorts) > 2


def test_a_client_whose_training_diverges_is_left_out_and_reported():
    def loglikelihood(position, rows):
        return -0.5 * (rows - position) ** 2 * jnp.where(rows > 5, jnp.nan, 1.0)

    posterior = fedmcmc.Posterior(lambda position: 0.0 * position, loglikelihood)
    data = fedmcmc.FederatedData.from_clients([jnp.ones(2), jnp.full(3, 9.0), jnp.full(2, 2.0)])
    kernel = fedmcmc.fed_avg(posterior, client_optimizer=optax.sgd(0.5), num_local_steps=30)
    init, step = fedmcmc.simulate(kernel, data)
    state, info = step(jax.random.key(0), init(jnp.array(0.0)))
    np.testing.assert_allclose(state.broadcast.position, 1.5, rtol=1e-5)
    assert info.clients.usable.tolist() == [True, False, True]


# FedPA


def direct(theta, samples, rho):
    """Solve ``C delta = theta - mean`` with the shrunken sample covariance."""
    num, dim = samples.shape
    shrinkage = 1 / (1 + (num - 1) * rho)
    sample = np.cov(samples.T, ddof=1).reshape(dim, dim) if num > 1 else np.zeros((dim, dim))
    matrix = shrinkage * np.eye(dim) + (1 - shrinkage) * sample
    return np.linalg.solve(matrix, theta - samples.mean(0))


@pytest.mark.parametrize("num", [1, 2, 7])
@pytest.mark.parametrize("rho", [0.0, 0.01, 0.7])
def test_i21_i22_i23_the_solve_without_a_matrix(rho, num):
    rng = np.random.default_rng(num)
    theta, samples = rng.normal(size=5), rng.normal(size=(num, 5))
    delta = posterior_delta(rho)
    tree = {"a": jnp.asarray(theta[:2]), "b": jnp.asarray(theta[2:]).reshape(3, 1)}
    unravel = ravel_pytree(tree)[1]
    visitor = delta.visitor(num, tree, jnp.int32(0))
    assert visitor.averages
    kept = visitor.init(tree)
    for i, sample in enumerate(samples):
        kept = visitor.visit(kept, jnp.int32(i), None, unravel(jnp.asarray(sample, jnp.float32)))
    actual = np.asarray(ravel_pytree(delta.finish(kept, tree, None))[0])
    np.testing.assert_allclose(actual, direct(theta, samples, rho), rtol=2e-4, atol=2e-5)
    if rho == 0 or num == 1:
        np.testing.assert_allclose(actual, theta - samples.mean(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("discarded", [0, 2])
@pytest.mark.parametrize("epochs", fast_and_slow([True, False], [True, False], [True]))
def test_every_round_of_posterior_averaging(epochs, discarded):
    num, burnin, rho, window = 4, 2, 0.3, 1 if epochs else 3
    kept = num + (num - 1) * discarded
    # One epoch more than it takes is one more of burn-in.
    length = dict(num_local_epochs=7 + 3 * discarded) if epochs else dict(num_local_steps=3)
    first = burnin + int(epochs)
    kernel = fedmcmc.fed_pa(
        FEDERATION.posterior,
        client_optimizer=optax.sgd(LR, momentum=0.6),
        shrinkage=rho,
        num_samples=num,
        num_burnin=burnin,
        num_discarded=discarded,
        server_optimizer=optax.sgd(0.4),
        **length,
    )
    theta = FEDERATION.start
    for actual in positions(kernel, 5):
        np.testing.assert_allclose(actual, theta, rtol=2e-4, atol=2e-4)
        total = np.zeros(3)
        for k in range(4):
            x, v, path = theta, np.zeros(3), []
            for _ in range((first + kept) * window):
                v = 0.6 * v + HESSIANS[k] @ (x - MINIMA[k])
                x = x - LR * v
                path.append(x)
            windows = np.array(path[first * window :]).reshape(kept, window, 3).mean(1)
            samples = windows[:: discarded + 1]
            assert len(samples) == num
            total += SHARES[k] * direct(theta, samples, rho)
        theta = theta - 0.4 * total


@pytest.mark.parametrize(("dim", "discarded"), [(1, 0), (2, 0), (1, 2)])
def test_averaged_iterates_have_their_exact_law(dim, discarded):
    """Averages of ``K`` iterates of SGD on a quadratic with state-independent noise (13.8)."""
    hessian = np.array([[2.0]]) if dim == 1 else np.array([[2.0, 0.5], [0.5, 1.0]])
    lr, steps, sd = 0.2, 5, 1.0
    contraction = np.eye(dim) - lr * hessian
    stationary = np.eye(dim)
    for _ in range(500):
        stationary = contraction @ stationary @ contraction.T + (lr * sd) ** 2 * np.eye(dim)
    expected = steps * stationary
    for j in range(1, steps):
        power = np.linalg.matrix_power(contraction, j)
        expected = expected + (steps - j) * (power @ stationary + stationary @ power.T)
    expected = expected / steps**2
    if dim == 1:
        np.testing.assert_allclose(expected, 0.032708, rtol=1e-4)
    # Of two samples: iterates ``s`` steps apart have the covariance A^s times the stationary one.
    apart = (1 + discarded) * steps
    between = np.zeros((dim, dim))
    for later in range(steps):
        for earlier in range(steps):
            between += np.linalg.matrix_power(contraction, apart + later - earlier) @ stationary
    length = Length(10 + discarded, 8, num_steps=steps, num_discarded=discarded)
    assert length.num_samples == 2
    settings = training(optax.sgd(lr), length)
    client = DATA.client(0)
    noise = jax.random.normal(jax.random.key(1), (8192, (10 + discarded) * steps, dim))

    class Keep:
        averages = True

        @staticmethod
        def init(position):
            return jnp.zeros((2, *position.shape))

        @staticmethod
        def visit(kept, index, last, average):
            return kept.at[index].set(average)

    def run(draws):
        def gradient_fn(drawn, position):
            return jnp.asarray(hessian, jnp.float32) @ position + sd * drawn

        start = jnp.zeros(dim)
        return train(settings, gradient_fn, draws, start, client, jnp.int32(0), Keep).summary

    averages = np.asarray(jax.jit(jax.vmap(run))(noise), float)
    for window in range(2):
        products = averages[:, window, :, None] * averages[:, window, None, :]
        assert np.abs(z_scores(products, expected)).max() < LIMIT
        assert np.abs(z_scores(averages[:, window], 0)).max() < LIMIT
    products = averages[:, 1, :, None] * averages[:, 0, None, :]
    assert np.abs(z_scores(products, between / steps**2)).max() < LIMIT


def test_a_run_goes_on_with_posterior_averaging_after_averaging():
    settings = dict(
        client_optimizer=optax.sgd(LR), num_local_epochs=4, server_optimizer=optax.sgd(0.5, 0.9)
    )
    first = fedmcmc.fed_avg(FEDERATION.posterior, **settings)
    then = fedmcmc.fed_pa(FEDERATION.posterior, shrinkage=0.1, num_samples=3, **settings)
    key = jax.random.key(0)
    start = jnp.asarray(FEDERATION.start)
    burnt_in = fedmcmc.sample(key, first, DATA, start, num_rounds=5, progress=False)
    samples = fedmcmc.sample(key, then, DATA, state=burnt_in.state, num_rounds=5, progress=False)
    assert samples.state.broadcast.round.tolist() == [10]
    momentum = burnt_in.state.server[0].trace
    assert np.abs(np.asarray(momentum)).max() > 0.01


@pytest.mark.parametrize(
    "compressor",
    [
        pytest.param(fedmcmc.sparsify(0.5), marks=pytest.mark.slow),
        fedmcmc.memory(fedmcmc.sparsify(0.5), 0.3),
    ],
)
def test_a_compressed_mean_is_unbiased_since_its_weights_cross_exactly(compressor):
    plain = fedmcmc.fed_avg(
        FEDERATION.posterior, client_optimizer=optax.sgd(LR), num_local_steps=5, cohort_size=2
    )
    kernel = fedmcmc.compress(plain, compressor)
    init, step = fedmcmc.simulate(kernel, DATA)
    state = init(jnp.asarray(FEDERATION.start))
    moved, info = jax.jit(jax.vmap(step, in_axes=(0, None)))(
        jax.random.split(jax.random.key(0), 8192), state
    )
    # Given the cohort, the mean over codes; over cohorts, each pair equally often.
    expected = np.zeros(3)
    for i in range(4):
        for j in range(i):
            delta = sum(SHARES[k] * shrink(k, 5) @ (FEDERATION.start - MINIMA[k]) for k in (i, j))
            expected += (FEDERATION.start - delta / (SHARES[i] + SHARES[j])) / 6
    assert np.abs(z_scores(moved.broadcast.position, expected)).max() < LIMIT
    assert int(np.asarray(info.bits_up).min()) > 2 * 32
