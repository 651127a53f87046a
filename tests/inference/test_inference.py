"""Client inference: means, covariances, Fisher information, on models where all is known."""

import itertools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedmcmc
from fedmcmc import inference
from fedmcmc.gaussian import plus_precision
from fedmcmc.types import register_dataclass
from tests.oracles.federations import LIMIT, Federation, loglikelihood, z_scores
from tests.support.lanes import fast_and_slow

FEDERATION = Federation()
DATA = FEDERATION.data
POSTERIOR = fedmcmc.Posterior(lambda theta: jnp.zeros(()), loglikelihood)
ROUND = jnp.int32(0)
K = 2  # the client with 12 rows
START = jnp.array([0.3, -0.2, 0.5])
CAVITY_PRECISION = np.array([3.0, 1.0, 2.0])
CAVITY_MEAN = np.array([0.5, -0.5, 1.0])
CAVITY = fedmcmc.Gaussian.from_moments(
    jnp.asarray(CAVITY_MEAN), variance=1 / jnp.array([3.0, 1, 2])
)
DENSE = fedmcmc.Gaussian.from_moments(jnp.asarray(CAVITY_MEAN), np.diag(1 / CAVITY_PRECISION))
SGD = optax.sgd(0.05, momentum=0.5)


def fit(block, cavity=CAVITY, posterior=POSTERIOR, data=DATA, index=K, start=START, key=0):
    client = data.client(index)
    like = jax.eval_shape(lambda: start)
    draws = block.prepare(jax.random.key(key), like, client)
    return block.fit(posterior, draws, start, cavity, client, ROUND)


def exact_mean():
    precision = FEDERATION.precisions[K] + np.diag(CAVITY_PRECISION)
    eta = FEDERATION.precisions[K] @ FEDERATION.means[K] + CAVITY_PRECISION * CAVITY_MEAN
    return np.linalg.solve(precision, eta), precision


def path(num_epochs, decay=0.0):
    """Return the ends of epochs of full-gradient SGD with momentum, in float64."""
    x, v, ends = np.asarray(START, float), np.zeros(3), []
    for _ in range(num_epochs):
        gradient = FEDERATION.precisions[K] @ (x - FEDERATION.means[K])
        gradient += CAVITY_PRECISION * (x - CAVITY_MEAN) + decay * 12 * x
        v = 0.5 * v + gradient / 12
        x = x - 0.05 * v
        ends.append(x)
    return np.array(ends)


def test_samples_are_the_ends_of_epochs_and_the_mean_theirs():
    mean = inference.sgd_mean(SGD, num_samples=6, num_burnin=2)
    found = fit(inference.mcmc(mean, shrinkage=0.2)).gaussian
    ends = path(8)[2:]
    np.testing.assert_allclose(found.mean(), ends.mean(0), rtol=1e-4, atol=1e-5)
    variance = 0.2 + 0.8 * ends.var(0, ddof=1)
    np.testing.assert_allclose(found.precision, 1 / variance, rtol=1e-4)
    dense = fit(inference.mcmc(mean, shrinkage=0.2), DENSE).gaussian
    covariance = 0.2 * np.eye(3) + 0.8 * np.cov(ends.T, ddof=1)
    np.testing.assert_allclose(dense.precision, np.linalg.inv(covariance), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("cavity", [CAVITY, DENSE], ids=["diagonal", "dense"])
def test_steps_are_made_for_rows_whatever_the_cavity(cavity):
    mean = inference.sgd_mean(SGD, num_samples=6, row_curvature=0.5)
    found = fit(inference.scaled_identity(mean, precision=1.0), cavity).gaussian
    x, v, ends = np.asarray(START, float), np.zeros(3), []
    for _ in range(6):
        gradient = FEDERATION.precisions[K] @ (x - FEDERATION.means[K])
        gradient += CAVITY_PRECISION * (x - CAVITY_MEAN)
        v = 0.5 * v + gradient / 12 / (1 + CAVITY_PRECISION / (12 * 0.5))
        x = x - 0.05 * v
        ends.append(x)
    np.testing.assert_allclose(found.mean(), np.mean(ends, axis=0), rtol=1e-4, atol=1e-5)


def test_a_client_of_one_row_follows_a_strong_cavity():
    """Which plain steps overshoot: their factor on the error is ``1 - 0.5 * 1000``."""
    strong = fedmcmc.Gaussian.from_moments(jnp.zeros(3), variance=jnp.full(3, 1e-3))
    row = jax.tree.map(lambda leaf: leaf[:1], DATA.client_rows(K))
    data = fedmcmc.FederatedData.from_clients([row])
    for curvature, lost in ((None, True), (1.0, False)):
        mean = inference.sgd_mean(optax.sgd(0.5), num_samples=60, row_curvature=curvature)
        block = inference.scaled_identity(mean, precision=1.0)
        found = np.asarray(fit(block, strong, data=data, index=0).gaussian.mean())
        assert (not np.isfinite(found).all()) == lost
    assert np.abs(found).max() < 0.1


def test_weight_decay_is_a_factor_of_the_likelihood():
    mean = inference.sgd_mean(SGD, num_samples=5, weight_decay=0.1)
    found = fit(inference.scaled_identity(mean, precision=1.0)).gaussian
    np.testing.assert_allclose(found.mean(), path(5, decay=0.1).mean(0), rtol=1e-4, atol=1e-5)
    # The covariance that is stated is all that the likelihood brings, its decay included.
    np.testing.assert_allclose(found.precision, CAVITY_PRECISION + 1, rtol=1e-5)
    factor = mean.with_decay(CAVITY, DATA.client(K), ROUND)
    np.testing.assert_allclose(factor.precision, CAVITY_PRECISION + 1.2, rtol=1e-5)
    np.testing.assert_allclose(factor.precision_mean, CAVITY_PRECISION * CAVITY_MEAN, rtol=1e-5)


@pytest.mark.slow
def test_exact_moments_project():
    mean, precision = exact_mean()
    variances = np.diag(np.linalg.inv(precision))
    for block in (inference.exact_gaussian(), inference.mcmc(inference.exact_mean())):
        found = fit(block).gaussian
        np.testing.assert_allclose(found.mean(), mean, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(1 / found.precision, variances, rtol=1e-4)
        found = fit(block, DENSE).gaussian
        np.testing.assert_allclose(found.precision, precision, rtol=1e-3, atol=2e-2)


def test_the_released_codes_clipping_and_norm():
    mean = inference.sgd_mean(SGD, num_samples=6)
    plain = np.asarray(fit(inference.mcmc(mean, shrinkage=1e-3)).gaussian.precision, float)
    clipped = fit(inference.mcmc(mean, shrinkage=1e-3, clip=0.5)).gaussian.precision
    centre, spread = plain.mean(), 0.5 * plain.std()
    expected = plain.clip(centre - spread, centre + spread)
    assert (expected != plain).any()
    np.testing.assert_allclose(clipped, expected, rtol=1e-3)
    matched = fit(inference.mcmc(mean, shrinkage=1e-3, match_precision_per_row=0.7)).gaussian
    wanted = np.linalg.norm(CAVITY_PRECISION + 0.7 * 12)
    np.testing.assert_allclose(np.linalg.norm(matched.precision), wanted, rtol=1e-4)
    np.testing.assert_allclose(matched.precision / wanted, plain / np.linalg.norm(plain), rtol=1e-3)


def test_the_moments_of_a_langevin_chain_have_their_exact_expectation():
    step, num, burnin, thinning = 0.004, 6, 2, 3
    mean, precision = exact_mean()
    contraction = np.eye(3) - step * precision
    # Means and covariances of the kept iterates, from the start on.
    total = (burnin + num) * thinning
    means, variances = [np.asarray(START, float) - mean], [np.zeros((3, 3))]
    for _ in range(total):
        means.append(contraction @ means[-1])
        variances.append(contraction @ variances[-1] @ contraction.T + 2 * step * np.eye(3))
    kept = [(burnin + i + 1) * thinning for i in range(num)]
    centre = np.mean([means[t] for t in kept], axis=0)

    def covariance(s, t):
        first, last = min(s, t), max(s, t)
        return np.linalg.matrix_power(contraction, last - first) @ variances[first]

    of_mean = np.mean([covariance(s, t) for s in kept for t in kept], axis=0)
    second = np.mean([variances[t] + np.outer(means[t], means[t]) for t in kept], axis=0)
    expected = (second - (of_mean + of_mean.T) / 2 - np.outer(centre, centre)) * num / (num - 1)
    block = inference.langevin_mean(step, num_samples=num, num_burnin=burnin, thinning=thinning)
    client = DATA.client(K)

    def one(key):
        draws = block.prepare(key, START, client)
        found = block.find(POSTERIOR, draws, START, CAVITY, client, ROUND, "dense")
        return found.mean, found.variance

    found = jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(0), 8192))
    assert np.abs(z_scores(found[0], mean + centre)).max() < LIMIT
    products = (found[0] - mean - centre)[:, :, None] * (found[0] - mean - centre)[:, None, :]
    assert np.abs(z_scores(products, (of_mean + of_mean.T) / 2)).max() < LIMIT
    assert np.abs(z_scores(found[1], expected)).max() < LIMIT


# Fisher information

RNG = np.random.default_rng(5)
X = RNG.normal(size=(9, 3)).round(2)
LOGISTIC_DATA = fedmcmc.FederatedData.from_clients(
    [{"x": np.ones((4, 3)), "y": np.ones(4)}, {"x": X, "y": (RNG.uniform(size=9) < 0.5) * 1.0}]
)


def logistic(theta, rows):
    logits = rows["x"] @ theta
    return rows["y"] * logits - jax.nn.softplus(logits)


def resample(rng_key, theta, rows):
    chance = jax.nn.sigmoid(rows["x"] @ theta)
    return rows | {"y": (jax.random.uniform(rng_key, chance.shape) < chance) * 1.0}


LOGISTIC = fedmcmc.Posterior(lambda theta: -0.5 * jnp.sum(theta**2), logistic, resample)


@register_dataclass
@dataclass(frozen=True, eq=False)
class Fixed(fedmcmc.inference.Mean):
    """A mean that is where the client starts, so that only the covariance is under test."""

    weight_decay: jax.Array

    def find(self, posterior, draws, position, cavity, client, round_, second):
        return inference.TiltedMoments(position, (), jnp.zeros(()))

    def with_decay(self, cavity, client, round_):
        return plus_precision(cavity, client.size.astype(jnp.float32) * self.weight_decay)


def at_the_start(weight_decay=0.0):
    return Fixed(jnp.asarray(weight_decay))


def information(theta):
    """Return minus the Hessian of the client's log likelihood by autodiff."""
    rows = jax.tree.map(jnp.asarray, LOGISTIC_DATA.client_rows(1))
    return -np.asarray(jax.hessian(lambda t: jnp.sum(logistic(t, rows)))(jnp.asarray(theta)), float)


def many(block, cavity, num=512, start=START):
    """Return fits of independent keys, precision minus cavity."""
    keys = jax.random.split(jax.random.key(0), num)
    client = LOGISTIC_DATA.client(1)

    def one(key):
        draws = block.prepare(key, start, client)
        return block.fit(LOGISTIC, draws, start, cavity, client, ROUND).gaussian.precision

    return np.asarray(jax.jit(jax.vmap(one))(keys), float) - np.asarray(cavity.precision, float)


@pytest.mark.parametrize(
    "structure", fast_and_slow(["diagonal", "dense", "scaled_identity"], ["diagonal"])
)
def test_laplace_estimates_minus_the_hessian(structure):
    hessian = information(START)
    cavity, expected = {
        "diagonal": (CAVITY, np.diag(hessian)),
        "dense": (DENSE, hessian),
        "scaled_identity": (
            fedmcmc.Gaussian.from_moments(START, variance=jnp.array(0.5)),
            np.trace(hessian) / 3,
        ),
    }[structure]
    found = many(inference.laplace(at_the_start(), num_passes=3), cavity, num=4096)
    assert np.abs(z_scores(found, expected)).max() < LIMIT
    scaled = many(inference.laplace(at_the_start(0.1), scale=2.0), cavity, num=4096)
    decay = 0.9 * (np.eye(3) if structure == "dense" else 1.0)
    assert np.abs(z_scores(scaled, 2 * (expected + decay))).max() < LIMIT


def gauss_hermite(theta, variances):
    """Return the expected diagonal information over independent normals, by quadrature."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(12)
    weights = weights / weights.sum()
    total = np.zeros(3)
    for i, a in enumerate(nodes):
        for j, b in enumerate(nodes):
            for k, c in enumerate(nodes):
                at = np.asarray(theta, float) + np.sqrt(variances) * np.array([a, b, c])
                chance = 1 / (1 + np.exp(-X @ at))
                total += weights[i] * weights[j] * weights[k] * (chance * (1 - chance)) @ X**2
    return total


@pytest.mark.parametrize("batch_size", fast_and_slow([None, 4], [None]))
def test_one_step_of_ngvi_averages_the_information(batch_size):
    variances = 1 / (9 * 0.6 + CAVITY_PRECISION)
    expected = 0.7 * 9 * 0.6 + 0.3 * gauss_hermite(START, variances)
    block = inference.ngvi(
        at_the_start(), num_steps=1, num_samples=2, decay=0.7, initial=0.6, batch_size=batch_size
    )
    assert np.abs(z_scores(many(block, CAVITY, num=8192), expected)).max() < LIMIT


def test_steps_of_ngvi_forget_where_they_began():
    """A location model: its information is the same everywhere, so the mean is a recursion."""

    def locations(theta, rows):
        return -0.5 * jnp.sum((rows - theta) ** 2 * jnp.array([1.0, 2.0, 0.5]), axis=-1)

    def again(rng_key, theta, rows):
        scale = jnp.array([1.0, 2.0, 0.5]) ** -0.5
        return theta + scale * jax.random.normal(rng_key, rows.shape)

    posterior = fedmcmc.Posterior(lambda theta: 0.0, locations, again)
    data = fedmcmc.FederatedData.from_clients([jnp.asarray(X, jnp.float32)])
    block = inference.ngvi(at_the_start(), num_steps=4, decay=0.5, initial=3.0)
    client = data.client(0)

    def one(key):
        draws = block.prepare(key, START, client)
        return block.fit(posterior, draws, START, CAVITY, client, ROUND).gaussian.precision

    found = jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(0), 4096))
    expected = CAVITY_PRECISION + 9 * (0.5**4 * 3 + (1 - 0.5**4) * np.array([1.0, 2.0, 0.5]))
    assert np.abs(z_scores(found, expected)).max() < LIMIT
    # By default they begin at the information itself.
    block = inference.ngvi(at_the_start(), num_steps=2, decay=0.5)
    found = jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(1), 4096))
    expected = CAVITY_PRECISION + 9 * np.array([1.0, 2.0, 0.5])
    assert np.abs(z_scores(found, expected)).max() < LIMIT


def weighted(rng_key, theta, rows):
    """Outcomes one standard deviation off, so that a row's squared gradient is its weight."""
    side = jax.random.rademacher(rng_key, rows["x"].shape, rows["x"].dtype)
    return rows | {"x": theta + side / jnp.sqrt(rows["weight"])}


WEIGHTED = fedmcmc.Posterior(
    lambda theta: 0.0,
    lambda theta, rows: -0.5 * rows["weight"] * (rows["x"] - theta) ** 2,
    weighted,
)
WEIGHTS = [np.array([1.0, 2.0, 4.0]), np.array([3.0, 8.0])]
WEIGHTED_DATA = fedmcmc.FederatedData.from_clients(
    [{"x": jnp.zeros(len(w)), "weight": jnp.asarray(w, jnp.float32)} for w in WEIGHTS]
)
ONE = fedmcmc.Gaussian.from_moments(jnp.array(0.0), variance=jnp.array(1.0))


def per_row(block, index, key):
    mean = inference.langevin_mean(1e-6, num_samples=2)
    found = fit(block(mean), ONE, WEIGHTED, WEIGHTED_DATA, index, jnp.array(0.0), key)
    return (float(found.gaussian.precision) - 1) / len(WEIGHTS[index])


@pytest.mark.slow
def test_samples_of_a_step_of_ngvi_share_its_minibatch():
    def block(mean):
        return inference.ngvi(
            mean, num_steps=1, num_samples=4, decay=0.0, initial=1.0, batch_size=1
        )

    found = {round(per_row(block, 0, key), 4) for key in range(12)}
    assert found <= {1.0, 2.0, 4.0} and len(found) > 1


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1])
def test_epochs_of_ngvi_pass_over_the_rows_of_each_client(index):
    def block(mean):
        return inference.ngvi(mean, num_epochs=2, decay=0.5, initial=1.0, batch_size=1)

    def paths(orders):
        values = set()
        for order in orders:
            s = 1.0
            for weight in order:
                s = 0.5 * s + 0.5 * weight
            values.add(round(s, 3))
        return values

    once = list(itertools.permutations(WEIGHTS[index]))
    allowed = paths(first + second for first, second in itertools.product(once, once))
    found = [per_row(block, index, key) for key in range(8)]
    gaps = np.abs(np.subtract.outer(found, list(allowed))).min(axis=1)
    assert gaps.max() < 2e-3 and np.ptp(found) > 0.1


def test_information_is_clipped_after_its_average():
    precisions = jnp.array([1.0, 2.0, 0.5])
    posterior = fedmcmc.Posterior(
        lambda theta: 0.0,
        lambda theta, rows: -0.5 * jnp.sum((rows - theta) ** 2 * precisions, axis=-1),
        lambda key, theta, rows: theta + jax.random.normal(key, rows.shape) / jnp.sqrt(precisions),
    )
    data = fedmcmc.FederatedData.from_clients([jnp.asarray(X, jnp.float32)])
    block = inference.ngvi(
        at_the_start(), num_steps=1, num_samples=4096, decay=0.0, initial=1.0, clip=1.0
    )
    found = fit(block, CAVITY, posterior, data, 0).gaussian.precision
    information = np.asarray(precisions, float)
    centre, spread = information.mean(), information.std()
    expected = np.clip(information, centre - spread, centre + spread)
    np.testing.assert_allclose((found - CAVITY_PRECISION) / 9, expected, rtol=0.03)


def test_what_is_wrong_is_said_before_a_run():
    mean = inference.sgd_mean(SGD, num_samples=1)
    start = jnp.zeros(3)
    cases = [
        (inference.mcmc(mean), POSTERIOR, "num_samples of at least 2"),
        (inference.laplace(mean), POSTERIOR, "needs a\\s+resample_fn"),
        (inference.ngvi(mean, num_steps=2), POSTERIOR, "resample_fn"),
    ]
    for block, posterior, match in cases:
        kernel = fedmcmc.fed_ep(posterior, inference=block)
        with pytest.raises(ValueError, match=match):
            fedmcmc.simulate(kernel, DATA).init(start)
    kernel = fedmcmc.fed_ep(LOGISTIC, inference=inference.exact_gaussian())
    with pytest.raises(ValueError, match="not quadratic"):
        fedmcmc.simulate(kernel, LOGISTIC_DATA).init(start)
    with pytest.raises(ValueError, match="one of variance="):
        inference.scaled_identity(mean)
    with pytest.raises(ValueError, match="num_passes"):
        inference.laplace(mean, num_passes=0)
    with pytest.raises(TypeError, match="optax"):
        inference.sgd_mean(0.1, num_samples=3)


@pytest.mark.parametrize("num_chains", [1, 2])
def test_a_run_refuses_what_is_not_quadratic(num_chains):
    """Where `init` is mapped over chains, and so the position is traced."""
    posterior = fedmcmc.Posterior(
        lambda theta: jnp.zeros(()), lambda theta, rows: -jnp.sum(jnp.cosh(theta - rows), axis=-1)
    )
    data = fedmcmc.FederatedData.from_clients([jnp.ones((3, 2)), jnp.zeros((1, 2))])
    for block in (inference.exact_gaussian(), inference.laplace(inference.exact_mean())):
        kernel = fedmcmc.fed_ep(posterior._replace(resample_fn=lambda k, t, r: r), inference=block)
        with pytest.raises(ValueError, match="not quadratic in the position"):
            fedmcmc.sample(
                jax.random.key(0),
                kernel,
                data,
                jnp.zeros(2),
                num_rounds=1,
                num_chains=num_chains,
                progress=False,
            )


@pytest.mark.parametrize("sd", fast_and_slow([1.0, 1e-3, 1e-6], [1e-6]))
def test_a_large_curvature_hides_no_other(sd):
    def model(curve):
        return fedmcmc.Posterior(
            lambda t: -0.5 * (t["a"] ** 2 + t["b"] ** 2),
            lambda t, rows: -0.5 * ((rows[:, 0] - t["a"]) / sd) ** 2 + curve(t["b"]),
        )

    data = fedmcmc.FederatedData.from_clients([np.ones((4, 1))] * 2)
    start = {"a": jnp.zeros(()), "b": jnp.zeros(())}

    def init(curve):
        kernel = fedmcmc.fed_ep(
            model(curve), inference=inference.exact_gaussian(), structure="dense"
        )
        return kernel.init(jax.random.key(0), start, data)

    init(lambda b: -0.5 * b**2)
    with pytest.raises(ValueError, match="not quadratic"):
        init(lambda b: jnp.log1p(b**2))


def test_what_is_quadratic_is_taken_wherever_its_rows_lie():
    """A server knows shapes alone: the rows that it makes up may be outside of a model's domain."""

    def model(transform):
        return fedmcmc.Posterior(
            lambda theta: jnp.zeros(()),
            lambda theta, rows: (
                -0.5 * jnp.sum((theta - transform(rows["x"])) ** 2, axis=-1) * rows["n"]
            ),
        )

    rows = {"x": jnp.full((2, 3), 12.0), "n": jnp.array([1, 2], jnp.int32)}
    federation = fedmcmc.FederatedData.from_clients([rows]).federation
    block, start = inference.exact_gaussian(), jnp.zeros(3)
    for transform in (lambda x: x, lambda x: jnp.log(x - 10), jnp.sqrt):
        block.check(model(transform), start, federation, "dense")
    with pytest.raises(ValueError, match="not quadratic"):
        posterior = fedmcmc.Posterior(
            lambda theta: jnp.zeros(()),
            lambda theta, rows: -jnp.sum(jnp.exp(theta * rows["x"]), axis=-1) * rows["n"],
        )
        block.check(posterior, start, federation, "dense")


@pytest.mark.parametrize("structure", ["diagonal", "dense", "scaled_identity"])
@pytest.mark.slow
def test_leaves_without_numbers_change_nothing(structure):
    posterior = fedmcmc.Posterior(
        lambda theta: -0.5 * jnp.sum(theta["x"] ** 2),
        lambda theta, rows: loglikelihood(theta["x"], rows),
    )

    def draws(position):
        block = inference.mcmc(inference.sgd_mean(SGD, num_samples=3), shrinkage=0.2)
        kernel = fedmcmc.fed_ep(
            posterior, inference=block, structure=structure, damping=0.3, max_norm=5.0
        )
        return fedmcmc.sample(
            jax.random.key(0), kernel, DATA, position, num_rounds=3, progress=False
        ).draws["x"]

    plain = draws({"x": START})
    padded = draws({"a": jnp.zeros((0,)), "x": START, "z": jnp.zeros((2, 0))})
    np.testing.assert_allclose(padded, plain, rtol=1e-5, atol=1e-6)
