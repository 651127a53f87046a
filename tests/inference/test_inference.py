"""Inference at clients: means, covariances and Fisher information of models in closed form."""

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


def path(num_epochs, decay=0.0, scale=1.0):
    """Return the ends of epochs of full-gradient SGD with momentum, in float64."""
    x, v, ends = np.asarray(START, float), np.zeros(3), []
    for _ in range(num_epochs):
        gradient = FEDERATION.precisions[K] @ (x - FEDERATION.means[K])
        gradient += CAVITY_PRECISION * (x - CAVITY_MEAN) + decay * 12 * x
        v = 0.5 * v + scale * gradient / 12
        x = x - 0.05 * v
        ends.append(x)
    return np.array(ends)


def test_samples_are_the_ends_of_epochs():
    mean = inference.sgd_mean(SGD, num_samples=6, num_burnin=2)
    block, ends = inference.mcmc(mean, shrinkage=0.2), path(8)[2:]
    diagonal = fit(block).gaussian
    np.testing.assert_allclose(diagonal.mean(), ends.mean(0), rtol=1e-4, atol=1e-5)
    variance = 0.2 + 0.8 * ends.var(0, ddof=1)
    np.testing.assert_allclose(diagonal.precision, 1 / variance, rtol=1e-4)
    precision = np.linalg.inv(0.2 * np.eye(3) + 0.8 * np.cov(ends.T, ddof=1))
    np.testing.assert_allclose(
        fit(block, DENSE).gaussian.precision, precision, rtol=1e-3, atol=1e-4
    )


@pytest.mark.parametrize("cavity", [CAVITY, DENSE], ids=["diagonal", "dense"])
def test_steps_are_scaled_by_the_curvature_of_a_row_and_the_cavity(cavity):
    mean = inference.sgd_mean(SGD, num_samples=6, row_curvature=0.5)
    gaussian = fit(inference.scaled_identity(mean, precision=1.0), cavity).gaussian
    ends = path(6, scale=1 / (1 + CAVITY_PRECISION / (12 * 0.5)))
    np.testing.assert_allclose(gaussian.mean(), ends.mean(0), rtol=1e-4, atol=1e-5)


def test_a_client_of_a_single_row_follows_a_strong_cavity():
    """Plain steps overshoot: their factor on the error is ``1 - 0.5 * 1000``."""
    strong = fedmcmc.Gaussian.from_moments(jnp.zeros(3), variance=jnp.full(3, 1e-3))
    row = jax.tree.map(lambda leaf: leaf[:1], DATA.client_rows(K))
    data = fedmcmc.FederatedData.from_clients([row])

    def fit_mean(curvature):
        mean = inference.sgd_mean(optax.sgd(0.5), num_samples=60, row_curvature=curvature)
        block = inference.scaled_identity(mean, precision=1.0)
        return np.asarray(fit(block, strong, data=data, index=0).gaussian.mean())

    assert not np.isfinite(fit_mean(None)).all()
    assert np.abs(fit_mean(1.0)).max() < 0.1


def test_weight_decay_is_a_factor_of_the_likelihood():
    mean = inference.sgd_mean(SGD, num_samples=5, weight_decay=0.1)
    gaussian = fit(inference.scaled_identity(mean, precision=1.0)).gaussian
    ends = path(5, decay=0.1)
    np.testing.assert_allclose(gaussian.mean(), ends.mean(0), rtol=1e-4, atol=1e-5)
    # The covariance includes all that the likelihood adds, with its decay.
    np.testing.assert_allclose(gaussian.precision, CAVITY_PRECISION + 1, rtol=1e-5)
    factor = mean.with_decay(CAVITY, DATA.client(K), ROUND)
    np.testing.assert_allclose(factor.precision, CAVITY_PRECISION + 1.2, rtol=1e-5)
    np.testing.assert_allclose(factor.precision_mean, CAVITY_PRECISION * CAVITY_MEAN, rtol=1e-5)


@pytest.mark.slow
def test_exact_moments_are_projected():
    mean, precision = exact_mean()
    variances = np.diag(np.linalg.inv(precision))
    for block in (inference.exact_gaussian(), inference.mcmc(inference.exact_mean())):
        diagonal, dense = fit(block).gaussian, fit(block, DENSE).gaussian
        np.testing.assert_allclose(diagonal.mean(), mean, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(1 / diagonal.precision, variances, rtol=1e-4)
        np.testing.assert_allclose(dense.precision, precision, rtol=1e-3, atol=2e-2)


def test_precisions_are_clipped_and_scaled_as_in_the_released_code():
    mean = inference.sgd_mean(SGD, num_samples=6)

    def fit_precision(**settings):
        block = inference.mcmc(mean, shrinkage=1e-3, **settings)
        return np.asarray(fit(block).gaussian.precision, float)

    plain = fit_precision()
    middle, spread = plain.mean(), 0.5 * plain.std()
    clipped = plain.clip(middle - spread, middle + spread)
    assert (clipped != plain).any()
    np.testing.assert_allclose(fit_precision(clip=0.5), clipped, rtol=1e-3)
    scaled = fit_precision(match_precision_per_row=0.7)
    norm = np.linalg.norm(CAVITY_PRECISION + 0.7 * 12)
    np.testing.assert_allclose(np.linalg.norm(scaled), norm, rtol=1e-4)
    np.testing.assert_allclose(scaled / norm, plain / np.linalg.norm(plain), rtol=1e-3)


def test_moments_of_a_langevin_chain_have_their_exact_expectation():
    step, num, burnin, thinning = 0.004, 6, 2, 3
    mean, precision = exact_mean()
    contraction = np.eye(3) - step * precision
    # Means and covariances of all iterates.
    means, variances = [np.asarray(START, float) - mean], [np.zeros((3, 3))]
    for _ in range((burnin + num) * thinning):
        means.append(contraction @ means[-1])
        variances.append(contraction @ variances[-1] @ contraction.T + 2 * step * np.eye(3))
    times = [(burnin + i + 1) * thinning for i in range(num)]
    center = np.mean([means[t] for t in times], axis=0)

    def covariance(s, t):
        early, late = min(s, t), max(s, t)
        return np.linalg.matrix_power(contraction, late - early) @ variances[early]

    of_mean = np.mean([covariance(s, t) for s in times for t in times], axis=0)
    second = np.mean([variances[t] + np.outer(means[t], means[t]) for t in times], axis=0)
    expected = (second - (of_mean + of_mean.T) / 2 - np.outer(center, center)) * num / (num - 1)
    block = inference.langevin_mean(step, num_samples=num, num_burnin=burnin, thinning=thinning)
    client = DATA.client(K)

    @jax.jit
    @jax.vmap
    def find(key):
        draws = block.prepare(key, START, client)
        moments = block.find(POSTERIOR, draws, START, CAVITY, client, ROUND, "dense")
        return moments.mean, moments.variance

    chain_means, chain_variances = find(jax.random.split(jax.random.key(0), 8192))
    gaps = chain_means - mean - center
    assert np.abs(z_scores(gaps, 0.0)).max() < LIMIT
    products = gaps[:, :, None] * gaps[:, None, :]
    assert np.abs(z_scores(products, (of_mean + of_mean.T) / 2)).max() < LIMIT
    assert np.abs(z_scores(chain_variances, expected)).max() < LIMIT


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
class FixedMean(fedmcmc.inference.Mean):
    """Mean at the client's start, so that only the covariance is tested."""

    weight_decay: jax.Array

    def find(self, posterior, draws, position, cavity, client, round_, second):
        return inference.TiltedMoments(position, (), jnp.zeros(()))

    def with_decay(self, cavity, client, round_):
        return plus_precision(cavity, client.size.astype(jnp.float32) * self.weight_decay)


def at_the_start(weight_decay=0.0):
    return FixedMean(jnp.asarray(weight_decay))


def information(theta):
    """Return minus the Hessian of the client's log likelihood by autodiff."""
    rows = jax.tree.map(jnp.asarray, LOGISTIC_DATA.client_rows(1))
    return -np.asarray(jax.hessian(lambda t: jnp.sum(logistic(t, rows)))(jnp.asarray(theta)), float)


def fit_precisions(block, cavity, num, posterior=LOGISTIC, data=LOGISTIC_DATA, seed=0):
    """Return precisions minus the cavity's of fits of the last client with independent keys."""
    client = data.client(data.num_clients - 1)

    @jax.jit
    @jax.vmap
    def fit_precision(key):
        draws = block.prepare(key, START, client)
        return block.fit(posterior, draws, START, cavity, client, ROUND).gaussian.precision

    precisions = fit_precision(jax.random.split(jax.random.key(seed), num))
    return np.asarray(precisions, float) - np.asarray(cavity.precision, float)


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
    plain = fit_precisions(inference.laplace(at_the_start(), num_passes=3), cavity, 4096)
    assert np.abs(z_scores(plain, expected)).max() < LIMIT
    scaled = fit_precisions(inference.laplace(at_the_start(0.1), scale=2.0), cavity, 4096)
    decay = 0.9 * (np.eye(3) if structure == "dense" else 1.0)
    assert np.abs(z_scores(scaled, 2 * (expected + decay))).max() < LIMIT


def gauss_hermite(theta, variances):
    """Return the expected diagonal information over independent normals, by quadrature."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(12)
    weights = weights / weights.sum()
    total = np.zeros(3)
    for indices in itertools.product(range(12), repeat=3):
        place = np.asarray(theta, float) + np.sqrt(variances) * nodes[list(indices)]
        chance = 1 / (1 + np.exp(-X @ place))
        total += np.prod(weights[list(indices)]) * (chance * (1 - chance)) @ X**2
    return total


@pytest.mark.parametrize("batch_size", fast_and_slow([None, 4], [None]))
def test_a_step_of_ngvi_averages_the_information(batch_size):
    variances = 1 / (9 * 0.6 + CAVITY_PRECISION)
    expected = 0.7 * 9 * 0.6 + 0.3 * gauss_hermite(START, variances)
    block = inference.ngvi(
        at_the_start(), num_steps=1, num_samples=2, decay=0.7, initial=0.6, batch_size=batch_size
    )
    assert np.abs(z_scores(fit_precisions(block, CAVITY, 8192), expected)).max() < LIMIT


PRECISIONS = jnp.array([1.0, 2.0, 0.5])
LOCATION = fedmcmc.Posterior(
    lambda theta: 0.0,
    lambda theta, rows: -0.5 * jnp.sum((rows - theta) ** 2 * PRECISIONS, axis=-1),
    lambda key, theta, rows: theta + jax.random.normal(key, rows.shape) / jnp.sqrt(PRECISIONS),
)
"""A model whose information does not depend on the position."""
LOCATION_DATA = fedmcmc.FederatedData.from_clients([jnp.asarray(X, jnp.float32)])


def test_steps_of_ngvi_decay_from_the_initial_information():
    """The mean of their precisions is a recursion; by default they start at the information."""
    per_row = np.asarray(PRECISIONS, float)
    block = inference.ngvi(at_the_start(), num_steps=4, decay=0.5, initial=3.0)
    precisions = fit_precisions(block, CAVITY, 4096, LOCATION, LOCATION_DATA)
    expected = 9 * (0.5**4 * 3 + (1 - 0.5**4) * per_row)
    assert np.abs(z_scores(precisions, expected)).max() < LIMIT
    block = inference.ngvi(at_the_start(), num_steps=2, decay=0.5)
    precisions = fit_precisions(block, CAVITY, 4096, LOCATION, LOCATION_DATA, seed=1)
    assert np.abs(z_scores(precisions, 9 * per_row)).max() < LIMIT


def test_information_is_clipped_after_its_average():
    block = inference.ngvi(
        at_the_start(), num_steps=1, num_samples=4096, decay=0.0, initial=1.0, clip=1.0
    )
    precision = fit(block, CAVITY, LOCATION, LOCATION_DATA, 0).gaussian.precision
    per_row = np.asarray(PRECISIONS, float)
    expected = np.clip(per_row, per_row.mean() - per_row.std(), per_row.mean() + per_row.std())
    np.testing.assert_allclose((precision - CAVITY_PRECISION) / 9, expected, rtol=0.03)


def resample_weighted(rng_key, theta, rows):
    """Return outcomes one sd from the mean: the squared gradient of a row is its weight."""
    side = jax.random.rademacher(rng_key, rows["x"].shape, rows["x"].dtype)
    return rows | {"x": theta + side / jnp.sqrt(rows["weight"])}


WEIGHTED = fedmcmc.Posterior(
    lambda theta: 0.0,
    lambda theta, rows: -0.5 * rows["weight"] * (rows["x"] - theta) ** 2,
    resample_weighted,
)
WEIGHTS = [np.array([1.0, 2.0, 4.0]), np.array([3.0, 8.0])]
WEIGHTED_DATA = fedmcmc.FederatedData.from_clients(
    [{"x": jnp.zeros(len(w)), "weight": jnp.asarray(w, jnp.float32)} for w in WEIGHTS]
)
STANDARD = fedmcmc.Gaussian.from_moments(jnp.array(0.0), variance=jnp.array(1.0))


def per_row(index, key, **settings):
    """Return the information of a row that steps of single rows estimate."""
    mean = inference.langevin_mean(1e-6, num_samples=2)
    block = inference.ngvi(mean, initial=1.0, batch_size=1, **settings)
    result = fit(block, STANDARD, WEIGHTED, WEIGHTED_DATA, index, jnp.array(0.0), key)
    return (float(result.gaussian.precision) - 1) / len(WEIGHTS[index])


@pytest.mark.slow
def test_samples_of_a_step_of_ngvi_share_its_minibatch():
    settings = dict(num_steps=1, num_samples=4, decay=0.0)
    values = {round(per_row(0, key, **settings), 4) for key in range(12)}
    assert values <= {1.0, 2.0, 4.0} and len(values) > 1


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1])
def test_epochs_of_ngvi_pass_over_the_rows_of_each_client(index):
    epochs = list(itertools.permutations(WEIGHTS[index]))
    allowed = []
    for early, late in itertools.product(epochs, epochs):
        value = 1.0
        for weight in early + late:
            value = 0.5 * value + 0.5 * weight
        allowed.append(value)
    values = [per_row(index, key, num_epochs=2, decay=0.5) for key in range(8)]
    gaps = np.abs(np.subtract.outer(values, allowed)).min(axis=1)
    assert gaps.max() < 2e-3 and np.ptp(values) > 0.1


def start_run(posterior, block, data=DATA):
    kernel = fedmcmc.fed_ep(posterior, inference=block)
    return fedmcmc.simulate(kernel, data).init(jnp.zeros(3))


MEAN = inference.sgd_mean(SGD, num_samples=1)


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (
            lambda: start_run(POSTERIOR, inference.mcmc(MEAN)),
            ValueError,
            "num_samples of at least 2",
        ),
        (
            lambda: start_run(POSTERIOR, inference.laplace(MEAN)),
            ValueError,
            r"needs a\s+resample_fn",
        ),
        (
            lambda: start_run(POSTERIOR, inference.ngvi(MEAN, num_steps=2)),
            ValueError,
            "resample_fn",
        ),
        (
            lambda: start_run(LOGISTIC, inference.exact_gaussian(), LOGISTIC_DATA),
            ValueError,
            "not quadratic",
        ),
        (lambda: inference.scaled_identity(MEAN), ValueError, "one of variance="),
        (lambda: inference.laplace(MEAN, num_passes=0), ValueError, "num_passes"),
        (lambda: inference.sgd_mean(0.1, num_samples=3), TypeError, "optax"),
    ],
)
def test_invalid_settings_raise_before_a_run(function, error, message):
    with pytest.raises(error, match=message):
        function()


def test_a_run_of_several_chains_raises_if_the_likelihood_is_not_quadratic():
    """`init` is mapped over chains, and so the position is traced."""
    posterior = fedmcmc.Posterior(
        lambda theta: jnp.zeros(()),
        lambda theta, rows: -jnp.sum(jnp.cosh(theta - rows), axis=-1),
        lambda key, theta, rows: rows,
    )
    data = fedmcmc.FederatedData.from_clients([jnp.ones((3, 2)), jnp.zeros((1, 2))])
    settings = dict(num_rounds=1, num_chains=2, progress=False)
    for block in (inference.exact_gaussian(), inference.laplace(inference.exact_mean())):
        kernel = fedmcmc.fed_ep(posterior, inference=block)
        with pytest.raises(ValueError, match="not quadratic in the position"):
            fedmcmc.sample(jax.random.key(0), kernel, data, jnp.zeros(2), **settings)


@pytest.mark.parametrize("sd", fast_and_slow([1.0, 1e-3, 1e-6], [1e-6]))
def test_a_large_curvature_does_not_hide_a_small_nonquadratic_term(sd):
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


def test_a_quadratic_likelihood_passes_for_any_domain_of_its_rows():
    """A server has shapes only: the rows that it makes up may be outside of a model's domain."""

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
