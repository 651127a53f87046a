"""Simulation-based calibration: right fits pass, wrong ones do not."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import fedmcmc
from fedmcmc import criticism
from fedmcmc.criticism._calibrate import RankCalibration, _with_outcomes
from fedmcmc.criticism._wrapped import ReplicatedConsortium
from fedmcmc.gaussian import Gaussian
from fedmcmc.kernels import LOG_ZERO_THRESHOLD, Dithered, Points, evaluations
from fedmcmc.runs import SimulatedConsortium
from tests.oracles.federations import LIMIT

KEY = jax.random.key(0)
NOISE = fedmcmc.Posterior(
    lambda theta: -0.5 * theta**2,
    lambda theta, rows: -0.5 * (rows["y"] - theta * rows["x"]) ** 2,
    lambda key, theta, rows: {
        **rows,
        "y": theta * rows["x"] + jax.random.normal(key, rows["y"].shape),
    },
)


def noise_data():
    rng = np.random.default_rng(0)
    return fedmcmc.FederatedData.from_clients(
        [{"x": rng.normal(size=n), "y": np.zeros(n)} for n in (3, 1, 4)]
    )


@jax.jit
def exact_fit(rng_key, data, spread=1.0):
    x, y = data.rows["x"], data.rows["y"]
    precision = 1 + jnp.sum(x**2)
    noise = spread * jax.random.normal(rng_key, (200,)) / jnp.sqrt(precision)
    return jnp.sum(x * y) / precision + noise


def weighted(key, data):
    """Fit by questions alone: the sum of log likelihoods of draws of the prior."""
    prior = Gaussian.from_moments(jnp.zeros(()), variance=jnp.ones(()))
    return fedmcmc.correct(key, NOISE, data, prior, num_draws=400, adapt=False, dither=0.01)


@pytest.mark.slow
def test_clients_elsewhere_draw_their_outcomes_themselves():
    consortium = SimulatedConsortium(noise_data())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fedmcmc.SamplingWarning)
        result = criticism.calibrate(
            KEY, NOISE, consortium, weighted, jax.random.normal, num_repetitions=100, num_draws=9
        )
    assert (np.abs(result.counts - 10) / np.sqrt(10)).max() < LIMIT
    assert result.p_values[0] > 1e-3
    # Outcomes are the model's at the truth that is ranked: of another truth ranks are at the ends.
    wrong = ReplicatedConsortium(consortium, NOISE, KEY, jnp.asarray(1.0))
    corrected = weighted(KEY, wrong)
    x = np.asarray(noise_data().rows["x"], float)
    precision = 1 + (x**2).sum()
    mean, sd = float(corrected.mean()), float(corrected.sd())
    assert abs(mean - (precision - 1) / precision) * np.sqrt(precision) < LIMIT
    assert abs(sd * np.sqrt(precision) - 1) < 0.3
    with pytest.raises(NotImplementedError, match="calibrate a fit that asks questions"):
        wrong.sample(KEY, fedmcmc.lsd(NOISE, step_size=0.1))
    with pytest.raises(TypeError, match="a consortium of clients, got dict"):
        criticism.calibrate(KEY, NOISE, {}, weighted, jax.random.normal)


@pytest.mark.parametrize("dithered", [False, True])
def test_questions_within_others_equal_secure_sums(dithered):
    """A density of zero stays zero."""
    posterior = NOISE._replace(
        loglikelihood_fn=lambda theta, rows: jnp.where(
            theta > 0, NOISE.loglikelihood_fn(theta, rows), -jnp.inf
        )
    )
    content = Points(jnp.array([-1.0, 0.5, 0.8]), jnp.asarray(0.3))
    if dithered:
        content = Dithered(content, jnp.zeros(2, jnp.uint32), jnp.asarray(2.0**-8))
    plain, secured = (
        np.asarray(
            ReplicatedConsortium(
                SimulatedConsortium(noise_data(), transform=transform),
                posterior,
                KEY,
                jnp.asarray(1.0),
            )
            .ask(evaluations(posterior), content)
            .value.value
        )
        for transform in (None, fedmcmc.secure_sum)
    )
    assert plain[0] < LOG_ZERO_THRESHOLD and secured[0] < LOG_ZERO_THRESHOLD
    np.testing.assert_allclose(secured[1:], plain[1:], atol=1e-5)


def calibrate(fit, **settings):
    settings = dict(num_repetitions=400) | settings
    return criticism.calibrate(KEY, NOISE, noise_data(), fit, jax.random.normal, **settings)


def test_exact_draws_pass_and_narrow_or_wide_ones_fail():
    result = calibrate(exact_fit)
    assert result.ranks.shape == (400, 1) and result.num_ranks == 100
    assert result.ranks.min() >= 0 and result.ranks.max() <= 99
    assert result.p_values[0] > 1e-3
    assert stats.kstest((result.ranks[:, 0] + 0.5) / 100, "uniform").pvalue > 1e-3
    for spread, are_at_the_ends in ((0.6, True), (1.7, False)):
        result = calibrate(lambda key, data, spread=spread: exact_fit(key, data, spread))
        assert result.p_values[0] < 1e-4
        ends, middle = result.counts[[0, 9], 0].sum(), result.counts[[4, 5], 0].sum()
        assert (ends > 1.5 * middle) == are_at_the_ends


def test_outcomes_are_redrawn_and_covariates_stay():
    data = noise_data()
    redrawn = _with_outcomes(fedmcmc.types.as_functions(NOISE), data, KEY, jnp.array(2.0))
    np.testing.assert_array_equal(redrawn.rows["x"], data.rows["x"])
    assert redrawn.rows["y"].shape == data.rows["y"].shape
    for i in range(3):  # each client by its own key, wherever its rows lie
        rows = jax.tree.map(
            lambda leaf: leaf[np.minimum(np.arange(4), len(leaf) - 1)], data.client_rows(i)
        )
        expected = NOISE.resample_fn(jax.random.fold_in(KEY, i), 2.0, rows)["y"]
        size = int(data.sizes[i])
        np.testing.assert_allclose(redrawn.client_rows(i)["y"], expected[:size], rtol=1e-6)


def test_p_values_of_uniform_ranks_are_uniform():
    rng = np.random.default_rng(0)
    p_values = [
        RankCalibration(rng.integers(0, 100, (200, 1)), 100, 10, ("a",)).p_values[0]
        for _ in range(400)
    ]
    assert stats.kstest(p_values, "uniform").pvalue > 1e-3
    uniform = RankCalibration(np.arange(100)[:, None], 100, 10, ("a",))
    np.testing.assert_array_equal(uniform.counts[:, 0], np.full(10, 10))
    assert uniform.p_values[0] == 1 and "p 1" in repr(uniform)
    assert uniform.to_dict()["a"]["counts"] == [10] * 10


# Poisson rows with a log link, twelve of them and often without event: posteriors are skewed.
SD, OFFSET = 1.5, -2.0


def poisson(theta, rows):
    log_rate = rows["x"] @ theta + OFFSET
    return rows["y"] * log_rate - jnp.exp(log_rate) - jax.lax.lgamma(rows["y"] + 1)


POISSON = fedmcmc.Posterior(
    lambda theta: -0.5 * jnp.sum((theta / SD) ** 2),
    poisson,
    lambda key, theta, rows: {
        **rows,
        "y": jax.random.poisson(key, jnp.exp(rows["x"] @ theta + OFFSET)).astype(rows["y"].dtype),
    },
)


def poisson_data():
    rng = np.random.default_rng(3)
    return fedmcmc.FederatedData.from_clients(
        [{"x": np.stack([np.ones(n), rng.normal(size=n)], 1), "y": np.zeros(n)} for n in (5, 4, 3)]
    )


def prior_fn(key):
    return SD * jax.random.normal(key, (2,))


@jax.jit
def laplace(data):
    """Return mode and precision, by Newton's method with halved steps."""

    def log_density(theta):
        return POISSON.logprior_fn(theta) + jnp.sum(poisson(theta, data.rows))

    def step(theta, _):
        move = jnp.linalg.solve(-jax.hessian(log_density)(theta), jax.grad(log_density)(theta))
        sizes = 0.5 ** jnp.arange(20.0)
        values = jnp.nan_to_num(
            jax.vmap(lambda size: log_density(theta + size * move))(sizes), nan=-jnp.inf
        )
        return theta + sizes[jnp.argmax(values)] * move, None

    theta, _ = jax.lax.scan(step, jnp.zeros(2), None, length=30)
    return theta, -jax.hessian(log_density)(theta)


@jax.jit
def laplace_fit(rng_key, data):
    mode, precision = laplace(data)
    z = jax.random.normal(rng_key, (99, 2))
    return mode + jnp.linalg.solve(jnp.linalg.cholesky(precision).T, z.T).T


def corrected_fit(rng_key, data):
    mode, precision = laplace(data)
    q = Gaussian(precision @ mode, precision, "dense")
    return fedmcmc.correct(rng_key, POISSON, data, q, num_draws=1000)


def run(fit, num):
    data = poisson_data()
    return criticism.calibrate(KEY, POISSON, data, fit, prior_fn, num_repetitions=num)


@pytest.mark.slow
def test_a_laplace_approximation_is_rejected():
    assert run(laplace_fit, 2000).p_values.min() < 1e-8


@pytest.mark.slow
def test_corrected_draws_pass():
    result = run(corrected_fit, 1000)
    assert result.p_values.min() > 1e-3 and result.coordinates == ("coordinate 0", "coordinate 1")


@pytest.mark.slow
def test_draws_of_fit_pass():
    def fit(rng_key, data):
        start = jnp.zeros(2)
        return fedmcmc.fit(POISSON, data, rng_key=rng_key, position=start, progress=False).samples

    assert run(fit, 400).p_values.min() > 1e-3


def test_fits_that_warn_of_their_draws_are_counted_and_other_warnings_remain():
    def fit(rng_key, data):
        if data.rows["y"][0] > 0:
            warnings.warn("far off", fedmcmc.SamplingWarning, stacklevel=1)
        if data.rows["y"][0] > 2.5:
            warnings.warn("something else", UserWarning, stacklevel=1)
        return exact_fit(rng_key, data)

    with pytest.warns(UserWarning, match="something else"):
        result = calibrate(fit, num_repetitions=100)
    assert 20 < result.num_warned < 80
    assert f"{result.num_warned} of 100 fits warned" in repr(result)


def test_samples_of_a_run_are_ranked():
    def fit(rng_key, data):
        kernel = fedmcmc.lsd(NOISE, step_size=0.05)
        start = jnp.array(0.0)
        return fedmcmc.sample(
            rng_key, kernel, data, start, num_rounds=300, num_burnin=100, progress=False
        )

    result = calibrate(fit, num_repetitions=3, num_draws=19, num_bins=2)
    assert result.ranks.shape == (3, 1) and result.num_ranks == 20


def test_wrong_arguments_raise():
    without_outcomes = NOISE._replace(resample_fn=None)
    white = NOISE._replace(position_fn=lambda z: 2 * z)
    data, repetitions = noise_data(), dict(num_repetitions=0)
    for error, message, posterior, rows, fit, settings in (
        (ValueError, "divide num_draws", NOISE, data, exact_fit, dict(num_bins=7)),
        (ValueError, "resample_fn", without_outcomes, data, exact_fit, {}),
        (TypeError, r"data must be a fedmcmc\.FederatedData", NOISE, [1, 2], exact_fit, {}),
        (TypeError, "fit must be a function", NOISE, data, 3, {}),
        (ValueError, "At least 99 draws", NOISE, data, lambda key, data: jnp.zeros(50), {}),
        (
            ValueError,
            r"those of prior_fn, shapes \(\), got \(2,\)",
            NOISE,
            data,
            lambda key, data: jnp.zeros((99, 2)),
            {},
        ),
        (
            ValueError,
            "num_repetitions must be a positive integer",
            NOISE,
            data,
            exact_fit,
            repetitions,
        ),
        (ValueError, "posterior that was given to whiten", white, data, exact_fit, {}),
    ):
        with pytest.raises(error, match=message):
            criticism.calibrate(KEY, posterior, rows, fit, jax.random.normal, **settings)
