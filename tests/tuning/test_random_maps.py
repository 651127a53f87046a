"""Laws of rounds in which not all take part, and of minibatches, against the oracles."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from tests.oracles import laws, laws_averaging, laws_qlsd
from tests.oracles.federations import LIMIT, Federation
from tests.oracles.federations_averaging import FEDERATION as AVERAGED
from tests.oracles.federations_averaging import law as law_of_averaging
from tests.oracles.federations_qlsd import Curved

FEDERATION = Curved()
EQUAL = Federation()
P = np.array([0.5, 0.9, 0.6, 0.3])
W = np.array([0.2, 0.35, 0.15, 0.3])
Q = np.array([0.2, 0.6, 0.1, 0.4])
STEP_SIZE = 0.006
NOISE = 3.0


def with_replacement(probabilities, size):
    """Draws with replacement: messages are weighted by the count over ``size * probability``."""
    return list(laws_averaging.scheme_one(probabilities, size))


RULES = {
    "bernoulli": (fedmcmc.bernoulli(P), laws_qlsd.bernoulli(P)),
    "uniform": (fedmcmc.uniform(3), laws_qlsd.cohorts(3, 4)),
    "one": (fedmcmc.categorical(), laws_qlsd.cohorts(1, 4)),
    "replacement": (fedmcmc.categorical(W, cohort_size=2), with_replacement(W, 2)),
    "realised": (fedmcmc.bernoulli(0.4, rescale="realised"), laws_qlsd.realised(0.4, 4)),
}
FAULTS = {
    "dropped": (dict(drop=Q), laws_qlsd.bernoulli(1 - Q), None),
    "garbled-cohort": (dict(nan=0.3, drop=0.2), None, 2),
}


def exact(federation):
    return fedmcmc.Gaussian.from_moments(federation.means, np.linalg.inv(federation.precisions))


def assert_law(told, expected, tolerance=1e-4):
    sd = np.sqrt(np.diag(expected.covariance))
    assert told.simulated == ""
    np.testing.assert_allclose((told.mean - expected.mean) / sd, 0, atol=tolerance)
    gap = (told.covariance - expected.covariance) / np.outer(sd, sd)
    np.testing.assert_allclose(gap, 0, atol=tolerance)


def first(law):
    return laws.Moments(law.mean[:3], law.covariance[:3, :3])


def noisy_lsd(**settings):
    estimator = fedmcmc.noisy(fedmcmc.full_gradient(), NOISE)
    return fedmcmc.langevin(FEDERATION.posterior, estimator, step_size=STEP_SIZE, **settings)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("prior", ["server", "split"])
def test_langevin_on_sums_of_cohorts(rule, prior):
    participation, cohorts = RULES[rule]
    told = fedmcmc.predict_bias(
        noisy_lsd(participation=participation, prior=prior), FEDERATION.data, exact(FEDERATION)
    )
    law = FEDERATION.langevin(
        step_size=STEP_SIZE,
        participation=cohorts,
        split=prior == "split",
        noises=np.stack([NOISE**2 * np.eye(3)] * 4),
    )
    assert_law(told, first(law.stationary()))
    sent = sum(p * (weights > 0).sum() for p, weights in cohorts)
    if rule == "replacement":
        sent = 2  # who is drawn twice counts twice
    np.testing.assert_allclose(told.bits, 2 * 32 * 3 * sent, rtol=1e-5)


@pytest.mark.parametrize("case", FAULTS)
def test_faults_thin_who_takes_part(case):
    settings, cohorts, size = FAULTS[case]
    participation = None if size is None else fedmcmc.uniform(size)
    kernel = fedmcmc.faults(noisy_lsd(participation=participation), **settings)
    told = fedmcmc.predict_bias(kernel, FEDERATION.data, exact(FEDERATION))
    if cohorts is None:
        arrives = 0.7 * 0.8
        cohorts = [
            (p * q, weights * mask / arrives)
            for p, weights in laws_qlsd.cohorts(size, 4)
            for q, mask in (
                (np.prod(np.where(m, arrives, 1 - arrives)), np.array(m))
                for m in itertools.product((0, 1), repeat=4)
            )
        ]
    law = FEDERATION.langevin(
        step_size=STEP_SIZE,
        participation=cohorts,
        noises=np.stack([NOISE**2 * np.eye(3)] * 4),
    )
    assert_law(told, first(law.stationary()))


@pytest.mark.parametrize("rule", ["bernoulli", "uniform", "replacement"])
def test_averages_of_cohorts(rule):
    """Momenta are shared in part, so that noise of one client is not another's."""
    participation, cohorts = {
        "bernoulli": (fedmcmc.bernoulli(P), laws_averaging.bernoulli(P)),
        "uniform": (fedmcmc.uniform(2), laws_averaging.scheme_two(4, 2)),
        "replacement": (
            fedmcmc.categorical(W, cohort_size=2),
            laws_averaging.scheme_one(W, 2),
        ),
    }[rule]
    settings = dict(num_local_steps=3, rho=0.4, gradient_noise=20.0)
    kernel = fedmcmc.fa_hmc(
        AVERAGED.posterior,
        step_size=0.04,
        num_integration_steps=2,
        participation=participation,
        **settings,
    )
    told = fedmcmc.predict_bias(kernel, AVERAGED.data, exact(AVERAGED))
    law = law_of_averaging(step_size=0.04, num_steps=2, cohorts=cohorts, **settings)
    assert_law(told, law.stationary())


def test_at_the_center_nobody_says_anything():
    """With `lsd_star` at the mode, silence costs noise only away from it."""
    center = laws.posterior(FEDERATION.precisions, FEDERATION.means, *FEDERATION.prior.values())
    kernel = fedmcmc.lsd_star(
        FEDERATION.posterior,
        jnp.asarray(center.mean, jnp.float32),
        step_size=STEP_SIZE,
        participation=fedmcmc.bernoulli(P),
    )
    told = fedmcmc.predict_bias(kernel, FEDERATION.data, exact(FEDERATION))
    law = FEDERATION.langevin(
        step_size=STEP_SIZE, participation=laws_qlsd.bernoulli(P), centre=center.mean
    )
    assert_law(told, first(law.stationary()))


def test_bits_are_those_that_a_run_counts():
    kernel = fedmcmc.faults(noisy_lsd(participation=fedmcmc.uniform(3)), drop=0.2)
    told = fedmcmc.predict_bias(kernel, FEDERATION.data, exact(FEDERATION))
    samples = fedmcmc.sample(
        jax.random.key(0), kernel, FEDERATION.data, jnp.zeros(3), num_rounds=4000, progress=False
    )
    sent = samples.info["bits_up"] + samples.info["bits_down"]
    error = sent.std() / np.sqrt(sent.size)
    assert 0 < error < 0.01 * told.bits
    assert abs(sent.mean() - told.bits) < LIMIT * error


@pytest.mark.parametrize("rule", RULES)
def test_counts_are_the_moments_of_all_cohorts(rule):
    participation, cohorts = RULES[rule]
    counts = participation.counts(4)
    p, weights = np.array([p for p, _ in cohorts]), np.stack([w for _, w in cohorts])
    mean = p @ weights
    covariance = np.einsum("k,ki,kj->ij", p, weights - mean, weights - mean)
    np.testing.assert_allclose(counts.weight * counts.mean, mean, rtol=1e-6)
    told = np.diag(counts.own) + counts.sign * np.outer(counts.common, counts.common)
    told = told * np.outer(counts.weight, counts.weight)
    np.testing.assert_allclose(told, covariance, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_thousand_clients_are_not_enumerated():
    """Of 2**1000 cohorts the law is known by hand, of equal clients in one dimension.

    With ``a`` the sum of curvatures, ``B = 1 - g (a + 1)`` and ``r_i`` the clients' gradients at
    the mean: ``V = B^2 V + g^2 (1 - p) / p (sum r_i^2 + V sum a_i^2) + 2 g``.
    """
    num, p, g = 1000, 0.3, 3e-4
    rng = np.random.default_rng(0)
    means = rng.normal(size=(num, 1))
    q = fedmcmc.Gaussian.from_moments(means, variance=np.ones((num, 1)))
    posterior = fedmcmc.Posterior(
        lambda t: -0.5 * jnp.sum(t**2), lambda t, x: -0.5 * jnp.sum((x - t) ** 2, -1)
    )
    data = fedmcmc.FederatedData.from_clients(list(means[:, None]))
    kernel = fedmcmc.lsd(posterior, step_size=g, participation=fedmcmc.bernoulli(p))
    told = fedmcmc.predict_bias(kernel, data, q)
    residuals = np.sum((means - means.sum() / (num + 1)) ** 2)
    extra = g**2 * (1 - p) / p
    expected = (2 * g + extra * residuals) / (1 - (1 - g * (num + 1)) ** 2 - extra * num)
    np.testing.assert_allclose(told.covariance[0, 0], expected, rtol=1e-4)


# Minibatches


def scores_of(federation):
    target = laws.posterior(
        federation.precisions, federation.means, federation.prior_precision, federation.prior_mean
    )
    position = jnp.asarray(target.mean, jnp.float32)
    return fedmcmc.surrogates.score_covariance(federation.posterior, federation.data, position)


def test_score_covariances_are_those_of_rows():
    """Of rows that share a curvature and of rows that do not, at a place that is no mode."""
    place = np.array([0.3, -0.2, 0.9])
    for federation in (EQUAL, FEDERATION):
        found = fedmcmc.surrogates.score_covariance(
            federation.posterior, federation.data, jnp.asarray(place, jnp.float32)
        )
        for one, rows, covariance in zip(
            federation.client_trees(), federation.rows, found, strict=True
        ):
            factors = np.asarray(one["factor"], float)
            scores = np.einsum("nji,njk,nk->ni", factors, factors, rows - place)
            centered = scores - scores.mean(0)
            wanted = centered.T @ centered / len(rows)
            np.testing.assert_allclose(covariance, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("replace", [True, False])
@pytest.mark.parametrize("kernel", ["lsd", "fsgld", "fa_ld"])
def test_minibatches_of_rows_that_share_a_curvature(kernel, replace):
    """Batches of five rows: more than two of the four clients have."""
    scores, q = scores_of(EQUAL), exact(EQUAL)
    settings = dict(batch_size=5, replace=replace)
    if kernel == "lsd":
        built = fedmcmc.lsd(
            EQUAL.posterior, step_size=STEP_SIZE, participation=fedmcmc.bernoulli(P), **settings
        )
        noises = np.stack(
            [
                laws.location_noise(*pair, 5, replace=replace)
                for pair in zip(EQUAL.rows, EQUAL.row_precisions, strict=True)
            ]
        )
        law = laws_qlsd.langevin(
            EQUAL.precisions,
            EQUAL.means,
            prior_precision=EQUAL.prior_precision,
            prior_mean=EQUAL.prior_mean,
            step_size=STEP_SIZE,
            participation=laws_qlsd.bernoulli(P),
            noises=noises,
        )
    elif kernel == "fsgld":
        built = fedmcmc.fsgld(EQUAL.posterior, q, step_size=0.002, num_local_steps=3, **settings)
        law = EQUAL.law(
            step_size=0.002,
            num_local_steps=3,
            batch=5,
            replace=replace,
            surrogates=(EQUAL.precisions, EQUAL.means),
        )
    else:
        built = fedmcmc.fa_ld(EQUAL.posterior, step_size=0.002, num_local_steps=3, **settings)
        law = law_of_averaging(
            step_size=0.002, num_local_steps=3, num_steps=0, batch=5, replace=replace
        )
    told = fedmcmc.predict_bias(built, EQUAL.data, q, scores=scores)
    assert_law(told, first(law.stationary()))
    assert "minibatch noise as at the mode" in str(told)
    without = fedmcmc.predict_bias(built, EQUAL.data, q)
    assert "without the noise of minibatches (give scores=)" in str(without)
    assert (np.diag(without.covariance) < 0.999 * np.diag(told.covariance)).all()


def test_fractions_of_rows_are_rounded_down_to_one_row_at_least():
    """A fifth of 7, 1, 12 and 4 rows are 1, 1, 2 and 1."""
    node = fedmcmc.minibatch(0.2)
    np.testing.assert_allclose(
        node.variance_factor(np.array([7, 1, 12, 4])), [49, 1, 72, 16], rtol=1e-6
    )
    node = fedmcmc.minibatch(0.2, replace=False)
    wanted = [49, 0, 72 * 10 / 11, 16]
    np.testing.assert_allclose(node.variance_factor(np.array([7, 1, 12, 4])), wanted, rtol=1e-6)


def test_differences_of_gradients_have_no_noise_where_rows_share_a_curvature():
    kernel = fedmcmc.fa_hmc(
        EQUAL.posterior,
        step_size=0.04,
        num_integration_steps=2,
        num_local_steps=2,
        batch_size=3,
        control_variate=True,
    )
    told = fedmcmc.predict_bias(kernel, EQUAL.data, exact(EQUAL), scores=scores_of(EQUAL))
    law = law_of_averaging(step_size=0.04, num_steps=2, num_local_steps=2, control_variate=True)
    assert_law(told, law.stationary())
    assert "none in differences of gradients" in str(told)


@pytest.mark.parametrize("shape", [(4, 3), (3, 3, 3), (4, 2, 2)])
def test_scores_that_do_not_fit_say_so(shape):
    kernel = fedmcmc.lsd(EQUAL.posterior, step_size=STEP_SIZE, batch_size=2)
    with pytest.raises(ValueError, match=r"scores must be the result of .* of shape \(4, 3, 3\)"):
        fedmcmc.predict_bias(kernel, EQUAL.data, exact(EQUAL), scores=jnp.zeros(shape))


def test_scores_that_are_not_finite_say_so():
    posterior = fedmcmc.Posterior(lambda t: 0.0, lambda t, x: jnp.sqrt(t[0]) * x[:, 0])
    data = fedmcmc.FederatedData.from_clients([np.ones((2, 1))])
    with pytest.raises(ValueError, match="gradient of a row's log likelihood is not finite"):
        fedmcmc.surrogates.score_covariance(posterior, data, jnp.zeros(1))
