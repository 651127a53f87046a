"""Tests of importance corrections against exact values on Gaussian federations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import fedmcmc
from fedmcmc.exact import khat_threshold, psis
from fedmcmc.gaussian import defensive
from fedmcmc.runs import SimulatedConsortium
from tests.oracles import laws
from tests.oracles.federations import LIMIT, Federation

FEDERATION = Federation()
EXACT = laws.posterior(
    FEDERATION.precisions, FEDERATION.means, FEDERATION.prior_precision, FEDERATION.prior_mean
)
ROOT = np.linalg.cholesky(EXACT.covariance)
KEY = jax.random.key(5)


def approximation(shift=0.0, scale=1.0):
    """Return the posterior moved by `shift` sds along a direction, its covariance times `scale`."""
    mean = EXACT.mean + shift * ROOT[:, 0]
    return fedmcmc.Gaussian.from_moments(jnp.asarray(mean), scale * EXACT.covariance)


def log_evidence():
    """Return the log of the integral of exp(log prior + log likelihood), in float64."""
    x, total = EXACT.mean, 0.0
    for rows, factor in zip(FEDERATION.rows, FEDERATION.factors, strict=True):
        total += -0.5 * (((rows - x) @ factor.T) ** 2).sum()
    gap = x - FEDERATION.prior_mean
    total += -0.5 * gap @ FEDERATION.prior_precision @ gap
    return total + 0.5 * np.linalg.slogdet(2 * np.pi * EXACT.covariance)[1]


def correct(key, approximation, **settings):
    return fedmcmc.correct(key, FEDERATION.posterior, FEDERATION.data, approximation, **settings)


def z_of(corrected):
    """Return the largest |z| of weighted mean and covariance, whitened, by the weights' own se."""
    z = np.linalg.solve(ROOT, (corrected.draws - EXACT.mean).T).T
    w = corrected.weights
    numbers = np.concatenate([z, (z[:, :, None] * z[:, None] - np.eye(3)).reshape(len(z), -1)], 1)
    mean = w @ numbers
    se = np.sqrt((w**2) @ (numbers - mean) ** 2)
    return np.abs(mean / se).max()


@pytest.mark.check
def test_weighted_draws_have_the_moments_of_the_posterior():
    for settings in (dict(shift=0.7), dict(scale=1.5), dict(shift=0.4, scale=0.9)):
        corrected = correct(KEY, approximation(**settings))
        assert corrected.verdict.kind == "passed"
        assert z_of(corrected) < LIMIT
    # Without weights the test fails.
    wrong = correct(KEY, approximation(shift=0.7))
    object.__setattr__(wrong, "log_weights", np.full(4000, -np.log(4000)))
    assert z_of(wrong) > 3 * LIMIT


def test_evidence_and_its_error_are_exact():
    exact = log_evidence()
    runs = [correct(jax.random.key(i), approximation(shift=0.5), tail=0.0) for i in range(40)]
    errors = np.array([x.log_evidence for x in runs]) - exact
    sds = np.array([x.log_evidence_sd for x in runs])
    assert abs(errors.mean()) < LIMIT * sds.mean() / np.sqrt(40) + 2e-4
    assert abs(errors.std(ddof=1) / sds.mean() - 1) < LIMIT / np.sqrt(2 * 40)
    corrected = correct(KEY, approximation(), tail=0.0)
    assert corrected.k_hat < 0 and abs(corrected.log_evidence - exact) < 1e-3


def test_the_effective_share_has_its_exact_value():
    """exp(-delta^2) of a shift, prod sqrt(2 lam - 1) / lam of a scale (three dimensions)."""
    for shift, scale, share in (
        (0.7, 1.0, np.exp(-(0.7**2))),
        (0.0, 1.5, (np.sqrt(2) / 1.5) ** 3),
        (0.0, 0.8, (np.sqrt(0.6) / 0.8) ** 3),
    ):
        q = approximation(shift, scale)
        runs = [correct(jax.random.key(i), q, tail=0.0, num_draws=20_000) for i in range(5)]
        shares = np.array([np.exp(-np.logaddexp.reduce(2 * x.log_weights)) / 20_000 for x in runs])
        # Monte Carlo error of a second moment with a fourth one: a few percent at most.
        assert np.abs(shares / share - 1).mean() < 0.03


def test_khat_estimates_one_minus_the_smallest_eigenvalue():
    for scale in (0.8, 0.6, 0.4):
        log_ratios = []
        for seed in range(30):
            z = np.random.default_rng(seed).normal(size=4000) * np.sqrt(scale)
            log_ratios.append(-0.5 * z**2 + 0.5 * z**2 / scale)
        k_hat = np.array([psis(x)[1] for x in log_ratios])
        # Biased towards the prior of Zhang and Stephens by a few hundredths for 4,000 draws.
        assert abs(k_hat.mean() - (1 - scale)) < 0.05 + LIMIT * k_hat.std() / np.sqrt(30)
        assert k_hat.mean() > 0.1


def test_a_narrow_approximation_fails_and_adapts():
    narrow = approximation(shift=1.0, scale=0.15)
    with pytest.warns(
        fedmcmc.SamplingWarning, match=r"correct: failed: .* is too far .* k-hat 0\.\d\d, "
    ):
        once = correct(KEY, narrow, tail=0.0, adapt=False)
    assert once.verdict.kind == "failed" and once.k_hat > khat_threshold(4000)
    with pytest.warns(fedmcmc.SamplingWarning, match=r"doubtful: .* adapted \d time"):
        adapted = correct(KEY, narrow, tail=0.0)
    assert adapted.verdict.kind == "doubtful" and len(adapted.rounds) > 1
    assert z_of(adapted) < LIMIT
    assert adapted.totals["rounds"] == len(adapted.rounds)
    assert abs(adapted.log_evidence - log_evidence()) < LIMIT * adapted.log_evidence_sd


def test_a_proposal_adapts_only_if_the_weighted_mean_is_near_the_posterior():
    """With one effective draw, the squared error of the mean is the number of dimensions."""
    posterior = fedmcmc.Posterior(
        lambda theta: -0.5 * jnp.sum(theta**2), lambda theta, rows: jnp.zeros(len(rows))
    )
    data = fedmcmc.FederatedData.from_clients([np.zeros(2)])
    for size, num_rounds in ((4, 2), (100, 1)):
        rough = fedmcmc.Gaussian.from_moments(jnp.full(size, 3.0), variance=jnp.ones(size))
        with pytest.warns(fedmcmc.SamplingWarning):
            corrected = fedmcmc.correct(KEY, posterior, data, rough, max_rounds=2)
        assert corrected.rounds[0].ess < 4 and len(corrected.rounds) == num_rounds


@pytest.mark.slow
def test_faults_and_many_points_change_nothing(monkeypatch):
    plain = correct(KEY, approximation(shift=0.5), num_draws=200)
    faulty = SimulatedConsortium(
        FEDERATION.data,
        transform=lambda kernel: fedmcmc.faults(kernel, drop=0.2, nan=0.1, rescale=False),
    )
    again = fedmcmc.correct(
        KEY, FEDERATION.posterior, faulty, approximation(shift=0.5), num_draws=200
    )
    np.testing.assert_allclose(again.log_weights, plain.log_weights, atol=1e-4)
    monkeypatch.setattr("fedmcmc.exact._correct.RECIPE_BYTES", 0)
    recipe = correct(KEY, approximation(shift=0.5), num_draws=200)
    np.testing.assert_allclose(recipe.log_weights, plain.log_weights, atol=1e-3)
    assert recipe.totals["bits_down"] < plain.totals["bits_down"]
    monkeypatch.setattr("fedmcmc.exact._correct.MAX_POINTS", 1000)
    parts = correct(KEY, approximation(shift=0.5), num_draws=2500)
    assert parts.totals["rounds"] == 3 and z_of(parts) < LIMIT


@pytest.mark.slow
def test_other_kinds_of_approximations_have_exact_weights():
    diagonal = fedmcmc.Gaussian.from_moments(
        jnp.asarray(EXACT.mean), variance=jnp.asarray(1.3 * np.diag(EXACT.covariance))
    )
    assert z_of(correct(KEY, diagonal)) < LIMIT
    mixture = defensive(EXACT.mean, 1.2 * EXACT.covariance)
    assert z_of(correct(KEY, mixture)) < LIMIT
    step = 0.3 / np.linalg.eigvalsh(np.linalg.inv(EXACT.covariance))[-1]
    kernel = fedmcmc.lsd(FEDERATION.posterior, step_size=step)
    run = KEY, kernel, FEDERATION.data, jnp.asarray(EXACT.mean, jnp.float32)
    samples = fedmcmc.sample(*run, num_rounds=4000, num_chains=4, progress=False)
    assert z_of(correct(KEY, samples)) < LIMIT
    short = fedmcmc.sample(*run, num_rounds=40, progress=False)
    with pytest.raises(ValueError, match="effective draws, too few for the covariance"):
        correct(KEY, short)


def test_a_whitened_posterior_gives_draws_in_the_users_coordinates():
    white = fedmcmc.whiten(FEDERATION.posterior, FEDERATION.data, jnp.zeros(3))
    corrected = fedmcmc.correct(
        KEY,
        white.posterior,
        FEDERATION.data,
        fedmcmc.Gaussian.from_moments(jnp.zeros(3), variance=jnp.full(3, 1.2)),
    )
    assert corrected.verdict.kind == "passed" and z_of(corrected) < LIMIT


def test_weighted_moments_quantiles_and_resampled_draws_agree_with_the_posterior():
    corrected = correct(KEY, approximation(shift=0.6))
    np.testing.assert_allclose(corrected.mean(), EXACT.mean, atol=0.1)
    sds = np.sqrt(np.diag(EXACT.covariance))
    np.testing.assert_allclose(corrected.sd(), sds, rtol=0.1)
    expected = stats.norm.ppf([0.05, 0.5, 0.95])[:, None] * sds + EXACT.mean
    np.testing.assert_allclose(corrected.quantile([0.05, 0.5, 0.95]), expected, atol=0.2)
    np.testing.assert_allclose(corrected.quantile(0.5), expected[1], atol=0.1)
    assert corrected.mean(lambda x: x[0] ** 2).shape == ()
    np.testing.assert_allclose(corrected.resample(KEY, 20_000).mean(0), corrected.mean(), atol=1e-2)
    few = corrected.resample(KEY, 100, replace=False)
    assert len(np.unique(few[:, 0])) == 100
    with pytest.raises(ValueError, match="num must be at most 4000 without replacement"):
        corrected.resample(KEY, 5000, replace=False)
    assert corrected.to_datatree()["posterior"]["theta"].shape == (1, 4000, 3)
    assert "passed (importance): Monte Carlo errors" in repr(corrected)


def with_likelihood(loglikelihood_fn):
    """Return the posterior with a log likelihood of the first coordinate's distance to the mean."""
    return FEDERATION.posterior._replace(
        loglikelihood_fn=lambda x, rows: (
            loglikelihood_fn(x[0] - EXACT.mean[0]) + 0 * rows["x"][:, 0]
        )
    )


NOWHERE = with_likelihood(lambda gap: jnp.where(jnp.abs(gap) < 1e-5, 0.0, -jnp.inf))
BROKEN = with_likelihood(lambda gap: jnp.log(gap + 0.3))
IMPROPER = fedmcmc.Gaussian(jnp.zeros(3), -jnp.eye(3), "dense")
PER_CLIENT = FEDERATION.surrogates("exact")[0]


@pytest.mark.parametrize(
    ("error", "message", "q", "posterior", "settings"),
    [
        (ValueError, "not proper: the smallest eigenvalue", IMPROPER, None, {}),
        (ValueError, r"surrogates.sum\(\) times the prior", PER_CLIENT, None, {}),
        (
            ValueError,
            "num_draws must be at least 100, got 50",
            approximation(),
            None,
            {"num_draws": 50},
        ),
        (TypeError, r"must be a fedmcmc\.Gaussian, a Mixture or Samples", 3, None, {}),
        (
            ValueError,
            "has 3 dimensions, but centre has 2",
            approximation(),
            None,
            {"centre": jnp.zeros(2)},
        ),
        (ValueError, "zero or not a number at all 4000 draws", approximation(), NOWHERE, {}),
        (ValueError, "NaN or infinite at", approximation(), BROKEN, {}),
        (
            ValueError,
            r"density at the center .* is not finite",
            approximation(),
            BROKEN,
            {"centre": jnp.asarray(EXACT.mean - 1)},
        ),
    ],
)
def test_wrong_arguments_raise(error, message, q, posterior, settings):
    with pytest.raises(error, match=message):
        fedmcmc.correct(KEY, posterior or FEDERATION.posterior, FEDERATION.data, q, **settings)


def test_importance_ratios_must_be_numbers():
    for ratios in ([np.nan, 1.0], [np.inf, 1.0], [-np.inf, -np.inf]):
        with pytest.raises(ValueError, match="Importance ratios must be numbers"):
            psis(ratios)


def test_mixtures_have_their_density_and_their_draws():
    mean, scale = np.array([0.5, -1.0]), np.array([[2.0, 0.6], [0.6, 1.0]])
    mixture = fedmcmc.Mixture.of([(3.0, np.inf, mean, scale), (1.0, 5.0, mean, 1.2 * scale)])
    points = np.random.default_rng(0).normal(size=(50, 2))
    expected = np.log(
        0.75 * stats.multivariate_normal(mean, scale).pdf(points)
        + 0.25 * stats.multivariate_t(mean, 1.2 * scale, df=5).pdf(points)
    )
    np.testing.assert_allclose(mixture.log_density(points), expected, rtol=1e-5)
    draws = np.asarray(mixture.draw(KEY, 40_000), np.float64)
    assert mixture.counts(40_000) == (30_000, 10_000)
    for part, factor, law in (
        (draws[:30_000], scale, stats.norm),
        (draws[30_000:], 1.2 * scale, stats.t(df=5)),
    ):
        np.testing.assert_allclose(np.cov(part.T), factor * law.var(), rtol=0.1, atol=0.05)
        z = np.linalg.solve(np.linalg.cholesky(factor), (part - mean).T)[1]
        assert stats.kstest(z, law.cdf).pvalue > 1e-6
    with pytest.raises(ValueError, match="must be positive definite"):
        fedmcmc.Mixture.of([(1.0, np.inf, mean, -scale)])


def test_double_precision_gives_exact_weights():
    with jax.enable_x64(True):
        federation = Federation()
        mean = EXACT.mean + 0.5 * ROOT[:, 0]
        approximation = fedmcmc.Gaussian.from_moments(jnp.asarray(mean), EXACT.covariance)
        corrected = fedmcmc.correct(KEY, federation.posterior, federation.data, approximation)
        assert corrected.draws.dtype == np.float64 and corrected.verdict.kind == "passed"
        assert z_of(corrected) < LIMIT
        assert abs(corrected.log_evidence - log_evidence()) < 5 * corrected.log_evidence_sd
