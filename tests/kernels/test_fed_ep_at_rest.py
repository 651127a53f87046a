"""FedEP by default: moments of tilted distributions, first expansions, and rest."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc import inference
from fedmcmc.inference._importance import standard_points
from fedmcmc.kernels._prior_site import is_constant
from tests.oracles.federations import LIMIT, Federation, loglikelihood, worst_z
from tests.oracles.laws import Moments
from tests.support.lanes import fast_and_slow

KEY = jax.random.key(0)


FEDERATION = Federation()
GAUSSIAN = fedmcmc.Posterior(lambda t: -0.5 * jnp.sum(t**2), loglikelihood)

# 60 clients of 2 to 200 rows, two coefficients: a grid gives the posterior.
SIZES = np.geomspace(2, 200, 60).astype(int)
SCALES = np.array([2.0, 1.0])


def logprior(theta):
    return -0.5 * jnp.sum((theta / jnp.asarray(SCALES, jnp.float32)) ** 2)


def logistic(theta, rows):
    return jax.nn.log_sigmoid((2.0 * rows["y"] - 1) * (rows["x"] @ theta))


def ragged(seed=0, sizes=SIZES):
    rng = np.random.default_rng(seed)
    clients = []
    for size in sizes:
        x = np.stack([np.ones(size), rng.normal(rng.normal(), 1, size)], 1)
        y = rng.random(size) < 1 / (1 + np.exp(1.5 - x[:, 1]))
        clients.append({"x": x.astype(np.float32), "y": y.astype(np.int32)})
    return fedmcmc.FederatedData.from_clients(clients)


LOGISTIC = fedmcmc.Posterior(logprior, logistic)


def grid_moments(log_density, center, sd, num=161):
    """Return mean and covariance of a density over the plane, by a grid of +- 7 sds."""
    axes = [np.linspace(c - 7 * s, c + 7 * s, num) for c, s in zip(center, sd, strict=True)]
    points = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 2)
    logs = log_density(points)
    weights = np.exp(logs - logs.max())
    weights /= weights.sum()
    mean = weights @ points
    return mean, (weights[:, None] * (points - mean)).T @ (points - mean)


def sum_of_rows(rows, points):
    """Return the log likelihood of all rows at points ``[n, 2]``, in float64."""
    signs = 2.0 * np.asarray(rows["y"]) - 1
    logits = points @ (np.asarray(rows["x"], float) * signs[:, None]).T
    return -np.logaddexp(0, -logits).sum(1)


def sample(kernel, data, position, **settings):
    return fedmcmc.sample(KEY, kernel, data, position, progress=False, **settings)


def assert_moments(mean, covariance, expected, atol):
    """Compare means and standard deviations in units of the expected standard deviations."""
    sd = np.sqrt(np.diag(expected[1]))
    np.testing.assert_allclose((mean - expected[0]) / sd, 0, atol=atol)
    np.testing.assert_allclose(np.sqrt(np.diag(covariance)) / sd, 1, atol=atol)


def moments_of(q):
    return np.asarray(q.mean()), np.asarray(q.covariance())


# The inference


@pytest.mark.slow
@pytest.mark.parametrize("structure", ["dense", "diagonal"])
def test_importance_is_exact_for_gaussian_likelihoods(structure):
    settings = dict(structure=structure, damping=0.5, initial_precision=0.3)
    importance, exact = (
        sample(
            fedmcmc.fed_ep(GAUSSIAN, inference=fit, **settings),
            FEDERATION.data,
            jnp.zeros(3),
            num_rounds=6,
        ).state.server.approximation.gaussian
        for fit in (inference.importance(64), inference.exact_gaussian())
    )
    chex.assert_trees_all_close(importance, exact, rtol=2e-4, atol=2e-4)


def test_points_have_the_moments_of_standard_normals():
    points = standard_points(64, 7)
    np.testing.assert_allclose(points.mean(0), 0, atol=1e-12)
    np.testing.assert_allclose(points.T @ points / 64, np.eye(7), atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 4, 60])
def test_tilted_moments_agree_with_a_grid(size):
    data = ragged(3, [size])
    q = fedmcmc.Gaussian.from_moments(jnp.array([-1.0, 0.5]), jnp.array([[1.0, 0.6], [0.6, 1.5]]))
    fitted, _ = inference.importance(2**14).fit(
        LOGISTIC, (), jnp.zeros(2), q, data.client(0), jnp.int32(0)
    )

    def tilted(points):
        gap = points - np.array([-1.0, 0.5])
        quadratic = np.einsum("ni,ij,nj->n", gap, np.linalg.inv([[1.0, 0.6], [0.6, 1.5]]), gap)
        return sum_of_rows(data.client_rows(0), points) - quadratic / 2

    expected = grid_moments(tilted, [-1.0, 0.5], [1.0, 1.3])
    assert_moments(*moments_of(fitted), expected, atol=0.01)


# The run


@pytest.fixture(scope="module")
def data():
    return ragged()


@pytest.fixture(scope="module")
def mode(data):
    return fedmcmc.surrogates.mode(LOGISTIC, data, jnp.zeros(2)).position


@pytest.fixture(scope="module")
def posterior_moments(data, mode):
    def log_density(points):
        return sum_of_rows(data.rows, points) - 0.5 * ((points / SCALES) ** 2).sum(1)

    return grid_moments(log_density, np.asarray(mode), [0.1, 0.1])


def test_the_first_approximation_is_the_laplace_approximation(data, mode):
    state = fedmcmc.fed_ep(LOGISTIC).init(KEY, mode, data)
    expansions = fedmcmc.surrogates.taylor(LOGISTIC, data, mode)
    chex.assert_trees_all_close(state.clients.site, expansions, rtol=1e-4, atol=1e-4)
    gaussian = state.server.approximation.gaussian
    np.testing.assert_allclose(gaussian.mean(), mode, atol=1e-3)
    expected = expansions.sum().precision + np.diag(SCALES**-2.0)
    np.testing.assert_allclose(gaussian.precision, expected, rtol=1e-4)


@pytest.mark.slow
def test_a_run_comes_to_rest_at_the_posterior(data, mode, posterior_moments):
    until = dict(until=fedmcmc.at_rest(), max_rounds=30)
    samples = sample(fedmcmc.fed_ep(LOGISTIC), data, mode, **until)
    assert samples.stopped["reached"] and samples.stopped["rounds"] <= 8
    assert samples.info["shift"][0, -1] <= 0.01 < samples.info["shift"][0, 0]
    gaussian = jax.tree.map(lambda x: x[0], samples.state.server.approximation.gaussian)
    actual, spread = moments_of(gaussian)
    assert_moments(actual, spread, posterior_moments, atol=0.02)
    assert samples.final_draws.shape == (1, 1000, 2)
    assert np.array_equal(samples.constrained, samples.final_draws)
    assert worst_z(samples.final_draws[0], Moments(actual, spread)) < LIMIT
    assert repr(samples).startswith(
        f"Samples: 1 x 1,000 draws of theta (2,) from the last approximation; {samples.num_draws} "
        f"rounds were kept\n"
    )
    tree = samples.to_datatree()
    assert tree["posterior"]["theta"].shape == (1, 1000, 2)
    assert tree["rounds"]["shift"].shape == samples.info["shift"].shape


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.filterwarnings("error::fedmcmc.DiagnosisWarning")
def test_a_run_at_rest_passes_its_diagnosis(seed):
    data = ragged(seed)
    white = fedmcmc.whiten(LOGISTIC, data, jnp.zeros(2))
    samples = sample(fedmcmc.fed_ep(white.posterior), data, white.position, num_rounds=8)
    moments = samples.diagnosis.moments
    assert moments.k_hat is not None and np.abs(moments.bias).max() < 0.05
    np.testing.assert_allclose(moments.spread, 1, rtol=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("damping", fast_and_slow([1.0, 0.5], [0.5]))
def test_a_run_stays_at_rest(damping, data, mode):
    """Asymmetric rounding must not grow by the number of clients in each round."""
    # A few units in the last place of the whole precision, whose entries are about 300.
    rounding = np.array([[0.0, 1e-3], [-1e-3, 0.0]])
    precision = jnp.asarray(np.diag(SCALES**-2.0) + rounding, jnp.float32)
    prior = fedmcmc.Gaussian(jnp.zeros(2), precision, "dense")
    kernel = fedmcmc.fed_ep(LOGISTIC, damping=damping, prior=prior)
    samples = sample(kernel, data, mode, num_rounds=60)
    assert samples.info["shift"][0, 20:].max() < 1e-4
    assert samples.info["num_lost"].sum() == 0


@pytest.mark.slow
def test_final_draws_are_in_the_coordinates_of_the_model(data, mode, posterior_moments):
    white = fedmcmc.whiten(LOGISTIC, data, mode)
    samples = sample(fedmcmc.fed_ep(white.posterior), data, white.position, num_rounds=8)
    mean, covariance = posterior_moments
    sd = np.sqrt(np.diag(covariance))
    draws = (samples.final_draws[0] - mean) / sd
    np.testing.assert_allclose(draws.mean(0), 0, atol=0.02 + 4 / np.sqrt(1000))
    np.testing.assert_allclose(draws.std(0), 1, atol=0.02 + 4 / np.sqrt(2000))


@pytest.mark.slow
def test_a_run_that_is_not_at_rest_warns(data, mode):
    slow = fedmcmc.fed_ep(LOGISTIC, damping=0.1, first_sites="constant", initial_precision=0.01)
    with pytest.warns(fedmcmc.DiagnosisWarning, match="still moves by") as caught:
        fedmcmc.sample(KEY, slow, data, mode, num_rounds=4, progress=False)
    assert caught[0].filename == __file__


@pytest.mark.slow
def test_an_approximation_that_is_not_proper_warns():
    """Likelihood and prior are flat in the second direction."""
    posterior = fedmcmc.Posterior(lambda t: 0.0, lambda t, x: -0.5 * (x - t[0]) ** 2)
    data = fedmcmc.FederatedData.from_clients([np.ones(3), np.zeros(2)])
    with pytest.warns(fedmcmc.SamplingWarning) as caught:
        sample(fedmcmc.fed_ep(posterior), data, jnp.zeros(2), num_rounds=3)
    assert any("not proper at the end" in str(w.message) for w in caught)


# A constant prior


def test_a_trace_shows_whether_a_density_is_constant():
    def constant(density):
        return is_constant(density, jnp.ones(3))

    assert constant(lambda t: 0.0)
    assert constant(lambda t: jnp.zeros(()) + jnp.log(2.0))
    assert constant(lambda t: jnp.sum(jnp.zeros_like(t)))
    assert not constant(lambda t: -jnp.sum(t**2))
    assert not constant(lambda t: jax.jit(lambda x: -jnp.sum(x))(t))


@pytest.mark.slow
def test_a_constant_prior_costs_nothing():
    """The server's step has a loop over draws only for a prior that is not constant."""

    def server_step(prior):
        posterior = fedmcmc.Posterior(prior, loglikelihood)
        kernel = fedmcmc.fed_ep(posterior, inference=inference.exact_gaussian())
        state = kernel.init(KEY, jnp.zeros(3), FEDERATION.data)
        total = kernel.message_like(state.broadcast)
        return str(jax.make_jaxpr(kernel.aggregate)(KEY, state.broadcast, state.server, total))

    assert "scan[" not in server_step(lambda t: 0.0)
    assert "scan[" in server_step(lambda t: -jnp.sum(t**4))
