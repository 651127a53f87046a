"""Predictions for rounds of cohorts and for minibatches, compared with the oracles."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc import predict_bias
from tests.oracles import laws, laws_averaging, laws_qlsd
from tests.oracles.federations import LIMIT, Federation
from tests.oracles.federations_averaging import FEDERATION as AVERAGED
from tests.oracles.federations_averaging import law as law_of_averaging
from tests.oracles.federations_qlsd import Curved
from tests.support.lanes import fast_and_slow

FEDERATION = Curved()
EQUAL = Federation()
"""All rows of a client share its curvature."""
P = np.array([0.5, 0.9, 0.6, 0.3])
W = np.array([0.2, 0.35, 0.15, 0.3])
Q = np.array([0.2, 0.6, 0.1, 0.4])
STEP_SIZE = 0.006
NOISE = 3.0
NOISES = np.stack([NOISE**2 * np.eye(3)] * 4)
# Draws with replacement: messages are weighted by the count over ``size * probability``.
RULES = {
    "bernoulli": (fedmcmc.bernoulli(P), laws_qlsd.bernoulli(P)),
    "uniform": (fedmcmc.uniform(3), laws_qlsd.cohorts(3, 4)),
    "one": (fedmcmc.categorical(), laws_qlsd.cohorts(1, 4)),
    "replacement": (
        fedmcmc.categorical(W, cohort_size=2),
        list(laws_averaging.scheme_one(W, 2)),
    ),
    "realised": (fedmcmc.bernoulli(0.4, rescale="realised"), laws_qlsd.realised(0.4, 4)),
}


def exact(federation):
    return fedmcmc.Gaussian.from_moments(federation.means, np.linalg.inv(federation.precisions))


def predict(kernel, federation=FEDERATION, **settings):
    return predict_bias(kernel, federation.data, exact(federation), **settings)


def assert_moments(prediction, law, tolerance=1e-4):
    """Compare the first three numbers, which are the position."""
    mean, covariance = law.mean[:3], law.covariance[:3, :3]
    sd = np.sqrt(np.diag(covariance))
    assert prediction.simulated == ""
    np.testing.assert_allclose((prediction.mean - mean) / sd, 0, atol=tolerance)
    gap = (prediction.covariance - covariance) / np.outer(sd, sd)
    np.testing.assert_allclose(gap, 0, atol=tolerance)


def noisy_lsd(**settings):
    estimator = fedmcmc.noisy(fedmcmc.full_gradient(), NOISE)
    return fedmcmc.langevin(FEDERATION.posterior, estimator, step_size=STEP_SIZE, **settings)


def law_of_langevin(cohorts, **settings):
    return FEDERATION.langevin(step_size=STEP_SIZE, participation=cohorts, **settings).stationary()


@pytest.mark.parametrize(
    ("prior", "rule"), [*(("server", rule) for rule in RULES), ("split", "uniform")]
)
def test_langevin_kernels_of_cohorts_have_the_predicted_moments_and_bits(prior, rule):
    participation, cohorts = RULES[rule]
    prediction = predict(noisy_lsd(participation=participation, prior=prior))
    assert_moments(prediction, law_of_langevin(cohorts, split=prior == "split", noises=NOISES))
    num_sent = sum(p * (weights > 0).sum() for p, weights in cohorts)
    if rule == "replacement":
        num_sent = 2  # a client that is drawn twice counts twice
    np.testing.assert_allclose(prediction.bits, 2 * 32 * 3 * num_sent, rtol=1e-5)


@pytest.mark.parametrize("rule", RULES)
def test_counts_are_the_moments_of_all_cohorts(rule):
    participation, cohorts = RULES[rule]
    counts = participation.counts(4)
    p, weights = np.array([p for p, _ in cohorts]), np.stack([w for _, w in cohorts])
    mean = p @ weights
    covariance = np.einsum("k,ki,kj->ij", p, weights - mean, weights - mean)
    np.testing.assert_allclose(counts.weight * counts.mean, mean, rtol=1e-6)
    by_counts = np.diag(counts.own) + counts.sign * np.outer(counts.common, counts.common)
    by_counts = by_counts * np.outer(counts.weight, counts.weight)
    np.testing.assert_allclose(by_counts, covariance, rtol=1e-5, atol=1e-6)


def garbled_cohorts(size, arrives):
    """Return cohorts of a size whose messages each arrive with a probability."""
    return [
        (p * np.prod(np.where(mask, arrives, 1 - arrives)), weights * mask / arrives)
        for p, weights in laws_qlsd.cohorts(size, 4)
        for mask in map(np.array, itertools.product((0, 1), repeat=4))
    ]


FAULTS = {
    "dropped": (dict(drop=Q), None, laws_qlsd.bernoulli(1 - Q)),
    "garbled-cohort": (
        dict(nan=0.3, drop=0.2),
        fedmcmc.uniform(2),
        garbled_cohorts(2, 0.7 * 0.8),
    ),
}


@pytest.mark.parametrize("case", FAULTS)
def test_faults_make_cohorts_smaller(case):
    settings, participation, cohorts = FAULTS[case]
    kernel = fedmcmc.faults(noisy_lsd(participation=participation), **settings)
    assert_moments(predict(kernel), law_of_langevin(cohorts, noises=NOISES))


AVERAGES = {
    "bernoulli": (fedmcmc.bernoulli(P), laws_averaging.bernoulli(P)),
    "uniform": (fedmcmc.uniform(2), laws_averaging.scheme_two(4, 2)),
    "replacement": (fedmcmc.categorical(W, cohort_size=2), laws_averaging.scheme_one(W, 2)),
}


@pytest.mark.parametrize("rule", fast_and_slow(AVERAGES, ["uniform", "replacement"]))
def test_averages_of_cohorts_have_the_predicted_moments(rule):
    """Momenta are shared in part, so that clients have different noise."""
    participation, cohorts = AVERAGES[rule]
    settings = dict(step_size=0.04, num_local_steps=3, rho=0.4)
    kernel = fedmcmc.fa_hmc(
        AVERAGED.posterior,
        num_integration_steps=2,
        participation=participation,
        gradient_noise=20.0,
        **settings,
    )
    law = law_of_averaging(num_steps=2, cohorts=cohorts, gradient_noise=20.0, **settings)
    assert_moments(predict(kernel, AVERAGED), law.stationary())


def test_absent_clients_add_no_noise_at_the_center():
    """The noise of `lsd_star` at the mode depends on the distance from the mode."""
    center = laws.posterior(FEDERATION.precisions, FEDERATION.means, *FEDERATION.prior.values())
    kernel = fedmcmc.lsd_star(
        FEDERATION.posterior,
        jnp.asarray(center.mean, jnp.float32),
        step_size=STEP_SIZE,
        participation=fedmcmc.bernoulli(P),
    )
    assert_moments(predict(kernel), law_of_langevin(laws_qlsd.bernoulli(P), centre=center.mean))


def test_predicted_bits_are_the_bits_of_a_run():
    kernel = fedmcmc.faults(noisy_lsd(participation=fedmcmc.uniform(3)), drop=0.2)
    prediction = predict(kernel)
    samples = fedmcmc.sample(
        jax.random.key(0), kernel, FEDERATION.data, jnp.zeros(3), num_rounds=4000, progress=False
    )
    bits = samples.info["bits_up"] + samples.info["bits_down"]
    error = bits.std() / np.sqrt(bits.size)
    assert 0 < error < 0.01 * prediction.bits
    assert abs(bits.mean() - prediction.bits) < LIMIT * error


@pytest.mark.slow
def test_a_thousand_clients_have_the_predicted_variance():
    """There are 2**1000 cohorts, but for equal clients in one dimension the law is known.

    With ``a`` the sum of curvatures, ``B = 1 - g (a + 1)`` and ``r_i`` the clients' gradients at
    the mean: ``V = B^2 V + g^2 (1 - p) / p (sum r_i^2 + V sum a_i^2) + 2 g``.
    """
    num, p, g = 1000, 0.3, 3e-4
    means = np.random.default_rng(0).normal(size=(num, 1))
    q = fedmcmc.Gaussian.from_moments(means, variance=np.ones((num, 1)))
    posterior = fedmcmc.Posterior(
        lambda t: -0.5 * jnp.sum(t**2), lambda t, x: -0.5 * jnp.sum((x - t) ** 2, -1)
    )
    data = fedmcmc.FederatedData.from_clients(list(means[:, None]))
    kernel = fedmcmc.lsd(posterior, step_size=g, participation=fedmcmc.bernoulli(p))
    prediction = predict_bias(kernel, data, q)
    residuals = np.sum((means - means.sum() / (num + 1)) ** 2)
    extra = g**2 * (1 - p) / p
    variance = (2 * g + extra * residuals) / (1 - (1 - g * (num + 1)) ** 2 - extra * num)
    np.testing.assert_allclose(prediction.covariance[0, 0], variance, rtol=1e-4)


# Minibatches


def estimate_scores(federation):
    target = laws.posterior(
        federation.precisions, federation.means, federation.prior_precision, federation.prior_mean
    )
    position = jnp.asarray(target.mean, jnp.float32)
    return fedmcmc.surrogates.score_covariance(federation.posterior, federation.data, position)


def test_score_covariances_are_the_covariances_over_rows():
    """At a place that is not a mode, with and without a curvature that the rows share."""
    place = np.array([0.3, -0.2, 0.9])
    for federation in (EQUAL, FEDERATION):
        covariances = fedmcmc.surrogates.score_covariance(
            federation.posterior, federation.data, jnp.asarray(place, jnp.float32)
        )
        clients = zip(federation.client_trees(), federation.rows, covariances, strict=True)
        for tree, rows, covariance in clients:
            factors = np.asarray(tree["factor"], float)
            scores = np.einsum("nji,njk,nk->ni", factors, factors, rows - place)
            expected = np.cov(scores.T, bias=True)
            np.testing.assert_allclose(covariance, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("replace", [True, False])
@pytest.mark.parametrize("kernel", ["lsd", "fsgld", "fa_ld"])
def test_minibatches_have_the_predicted_moments(kernel, replace):
    """Batches have five rows, more than two of the four clients."""
    scores, q = estimate_scores(EQUAL), exact(EQUAL)
    settings = dict(batch_size=5, replace=replace)
    local = dict(step_size=0.002, num_local_steps=3)
    if kernel == "lsd":
        built = fedmcmc.lsd(
            EQUAL.posterior, step_size=STEP_SIZE, participation=fedmcmc.bernoulli(P), **settings
        )
        rows = zip(EQUAL.rows, EQUAL.row_precisions, strict=True)
        law = laws_qlsd.langevin(
            EQUAL.precisions,
            EQUAL.means,
            prior_precision=EQUAL.prior_precision,
            prior_mean=EQUAL.prior_mean,
            step_size=STEP_SIZE,
            participation=laws_qlsd.bernoulli(P),
            noises=np.stack([laws.location_noise(*pair, 5, replace=replace) for pair in rows]),
        )
    elif kernel == "fsgld":
        built = fedmcmc.fsgld(EQUAL.posterior, q, **local, **settings)
        surrogates = (EQUAL.precisions, EQUAL.means)
        law = EQUAL.law(batch=5, replace=replace, surrogates=surrogates, **local)
    else:
        built = fedmcmc.fa_ld(EQUAL.posterior, **local, **settings)
        law = law_of_averaging(num_steps=0, batch=5, replace=replace, **local)
    prediction = predict(built, EQUAL, scores=scores)
    assert_moments(prediction, law.stationary())
    assert "minibatch noise as at the mode" in str(prediction)
    without = predict(built, EQUAL)
    assert "without the noise of minibatches (give scores=)" in str(without)
    assert (np.diag(without.covariance) < 0.999 * np.diag(prediction.covariance)).all()


def test_fractions_of_rows_are_rounded_down_and_positive():
    """A fifth of 7, 1, 12 and 4 rows are 1, 1, 2 and 1."""
    sizes = np.array([7, 1, 12, 4])
    for replace, expected in ((True, [49, 1, 72, 16]), (False, [49, 0, 72 * 10 / 11, 16])):
        factor = fedmcmc.minibatch(0.2, replace=replace).variance_factor(sizes)
        np.testing.assert_allclose(factor, expected, rtol=1e-6)


def test_differences_of_gradients_have_no_noise_if_rows_share_a_curvature():
    settings = dict(step_size=0.04, num_local_steps=2, control_variate=True)
    kernel = fedmcmc.fa_hmc(EQUAL.posterior, num_integration_steps=2, batch_size=3, **settings)
    prediction = predict(kernel, EQUAL, scores=estimate_scores(EQUAL))
    assert_moments(prediction, law_of_averaging(num_steps=2, **settings).stationary())
    assert "none in differences of gradients" in str(prediction)


def test_invalid_scores_raise():
    kernel = fedmcmc.lsd(EQUAL.posterior, step_size=STEP_SIZE, batch_size=2)
    for shape in ((4, 3), (3, 3, 3), (4, 2, 2)):
        with pytest.raises(ValueError, match=r"scores must be the result of .* \(4, 3, 3\)"):
            predict(kernel, EQUAL, scores=jnp.zeros(shape))
    posterior = fedmcmc.Posterior(lambda t: 0.0, lambda t, x: jnp.sqrt(t[0]) * x[:, 0])
    data = fedmcmc.FederatedData.from_clients([np.ones((2, 1))])
    with pytest.raises(ValueError, match="gradient of a row's log likelihood is not finite"):
        fedmcmc.surrogates.score_covariance(posterior, data, jnp.zeros(1))
