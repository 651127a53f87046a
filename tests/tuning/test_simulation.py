"""Predictions that are simulated on Gaussian clients, compared with exact second moments."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedmcmc
from fedmcmc import predict_bias
from fedmcmc.tuning._gaussian_clients import build_gaussian_clients
from tests.oracles import laws, laws_faults, laws_qlsd
from tests.oracles.federations import LIMIT, Federation, worst_z
from tests.oracles.federations_qlsd import Curved
from tests.support.lanes import fast_and_slow

FEDERATION = Curved()
EQUAL = Federation()
P = np.array([0.5, 0.9, 0.6, 0.3])
RATES = np.array([0.3, 0.5, 0.2, 0.4])
STEP_SIZE = 0.006
EVERYONE = (fedmcmc.full(), laws_qlsd.everyone(4))
BERNOULLI = (fedmcmc.bernoulli(P), laws_qlsd.bernoulli(P))
COHORT = (fedmcmc.uniform(2), laws_qlsd.cohorts(2, 4))


def predict(kernel, federation=FEDERATION, **settings):
    q = fedmcmc.Gaussian.from_moments(federation.means, np.linalg.inv(federation.precisions))
    return predict_bias(kernel, federation.data, q, **settings)


def worst_error(prediction, law):
    """Return the largest |z| of means and sds of the position."""
    mean, covariance = law.mean[:3], law.covariance[:3, :3]
    sds = np.sqrt(np.diag(prediction.covariance)), np.sqrt(np.diag(covariance))
    of_mean = (prediction.mean - mean) / prediction.mean_error
    of_sd = (sds[0] - sds[1]) / prediction.sd_error
    return max(np.abs(of_mean).max(), np.abs(of_sd).max())


def sparse(rule, keep):
    """Return settings of a kernel that compresses messages, and settings of its law."""
    participation, cohorts = rule
    settings = dict(participation=participation, compressor=fedmcmc.sparsify(keep))
    return dict(step_size=STEP_SIZE, **settings), dict(participation=cohorts, keep=keep)


def qlsd_case():
    settings, law = sparse(EVERYONE, 0.3)
    return fedmcmc.qlsd(FEDERATION.posterior, **settings), law


def star_case():
    settings, law = sparse(BERNOULLI, 0.4)
    center = FEDERATION.centre
    return fedmcmc.qlsd_star(FEDERATION.posterior, center, **settings), law | dict(centre=center)


def memory_case(rule, rates, of):
    settings, law = sparse(rule, 0.5)
    memory = dict(memory_of=of, refresh_every=1)
    kernel = fedmcmc.qlsd_pp(
        FEDERATION.posterior, memory_rate=rates, batch_size=None, **memory, **settings
    )
    return kernel, law | memory | dict(rates=rates)


CASES = {
    "sparse": qlsd_case,
    "memory-of-all": lambda: memory_case(BERNOULLI, RATES, "all"),
    "memory-of-the-active": lambda: memory_case(COHORT, 0.4, "active"),
    "star": star_case,
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_sparsified_messages_have_the_predicted_moments(case):
    """The standard errors are small enough to be of use, and to exclude an error of a tenth."""
    kernel, settings = CASES[case]()
    prediction = predict(kernel)
    assert prediction.simulated == "it compresses messages"
    assert "Simulated over" in str(prediction) and "standard errors are" in str(prediction)
    law = FEDERATION.langevin(step_size=STEP_SIZE, **settings).stationary()
    mean, covariance = law.mean[:3], law.covariance[:3, :3]
    sds = np.sqrt(np.diag(covariance))
    assert worst_error(prediction, law) < LIMIT
    assert (prediction.mean_error / sds).max() < 0.011
    assert (prediction.sd_error / sds).max() < 0.01
    assert worst_error(prediction, laws.Moments(mean + 0.1 * sds, covariance)) > LIMIT
    assert worst_error(prediction, laws.Moments(mean, 1.1**2 * covariance)) > LIMIT


def test_a_simulated_prediction_has_the_times_and_moments_of_an_exact_prediction():
    """A kernel with a compressor that changes nothing is simulated."""
    bare = fedmcmc.fa_ld(FEDERATION.posterior, step_size=0.003, num_local_steps=2)
    exact = predict(bare)
    simulated = predict(fedmcmc.compress(bare, fedmcmc.compression.identity()))
    assert exact.simulated == "" and simulated.simulated and not exact.mean_error.any()
    assert worst_error(simulated, exact) < LIMIT
    np.testing.assert_allclose(simulated.rounds_per_draw, exact.rounds_per_draw, rtol=0.15)
    np.testing.assert_allclose(simulated.slowest, exact.slowest, rtol=0.15)
    np.testing.assert_allclose(simulated.on_position, exact.on_position, atol=0.02)
    np.testing.assert_allclose(simulated.bits, exact.bits)


def equal_target():
    return laws.posterior(EQUAL.precisions, EQUAL.means, EQUAL.prior_precision, EQUAL.prior_mean)


@pytest.mark.slow
def test_snapshots_of_rows_that_share_a_curvature_have_no_minibatch_noise():
    kernel = fedmcmc.lsd_pp(EQUAL.posterior, step_size=STEP_SIZE, batch_size=2, refresh_every=7)
    prediction = predict(kernel, EQUAL, scores=jnp.ones((4, 3, 3)))
    assert prediction.simulated == "it keeps more than the position between rounds"
    precision = np.linalg.inv(equal_target().covariance)
    law = laws.single(precision, equal_target().mean, step_size=STEP_SIZE)
    assert worst_error(prediction, law.stationary()) < LIMIT


@pytest.mark.slow
def test_minibatch_noise_is_simulated():
    position = jnp.asarray(equal_target().mean, jnp.float32)
    scores = fedmcmc.surrogates.score_covariance(EQUAL.posterior, EQUAL.data, position)
    kernel = fedmcmc.qlsd(
        EQUAL.posterior, step_size=0.003, batch_size=2, compressor=fedmcmc.sparsify(0.6)
    )
    rows = zip(EQUAL.rows, EQUAL.row_precisions, strict=True)
    law = laws_qlsd.langevin(
        EQUAL.precisions,
        EQUAL.means,
        prior_precision=EQUAL.prior_precision,
        prior_mean=EQUAL.prior_mean,
        step_size=0.003,
        keep=0.6,
        noises=[laws.location_noise(*pair, 2, replace=True) for pair in rows],
    )
    assert worst_error(predict(kernel, EQUAL, scores=scores), law.stationary()) < LIMIT


@pytest.mark.slow
def test_late_messages_are_simulated():
    kernel = fedmcmc.faults(fedmcmc.lsd(FEDERATION.posterior, step_size=STEP_SIZE), late=0.5)
    prediction = predict(kernel)
    assert prediction.simulated == "the distribution of its cohorts is unknown"
    law = laws_faults.rounds(
        FEDERATION.precisions,
        FEDERATION.means,
        **FEDERATION.prior,
        cases=laws_faults.cases(np.ones(4), np.full(4, 0.5), np.ones(4)),
        step_size=STEP_SIZE,
        position=FEDERATION.start,
        num_rounds=400,
    )[-1]
    assert worst_error(prediction, law) < LIMIT


@jax.jit
def advance(kernel, data, keys, states):
    step = fedmcmc.simulate(kernel, data).step
    return jax.vmap(lambda key, state: step(key, state)[0])(keys, states)


def cool_then_warm(round_):
    return jnp.where(round_ == 0, 0.0, 0.5)


@pytest.mark.parametrize("rates", [np.zeros(4), RATES], ids=["forgetful", "memory"])
def test_gaussian_clients_have_the_moments_of_two_quantized_rounds(rates):
    """The simulated kernel rounds to levels of the norm, with a memory, as the kernel does."""
    kernel = fedmcmc.qlsd_pp(
        FEDERATION.posterior,
        compressor=fedmcmc.quantize(2),
        memory_rate=jnp.asarray(rates),
        refresh_every=1,
        batch_size=None,
        step_size=STEP_SIZE,
        temperature=cool_then_warm,
        participation=BERNOULLI[0],
    )
    q = fedmcmc.Gaussian.from_moments(FEDERATION.means, np.linalg.inv(FEDERATION.precisions))
    clients = build_gaussian_clients(kernel, FEDERATION.data, q, None)
    keys = jax.random.split(jax.random.key(1), 16384)
    start = fedmcmc.simulate(clients.kernel, clients.data).init(jnp.asarray(FEDERATION.start))
    states = jax.tree.map(lambda x: jnp.broadcast_to(x, (len(keys), *x.shape)), start)
    expected = FEDERATION.quantised(
        num_levels=2,
        step_sizes=(STEP_SIZE, STEP_SIZE),
        temperature=0.5,
        participation=BERNOULLI[1],
        rates=rates,
    )
    for law in expected:
        states = advance(clients.kernel, clients.data, keys, states)
        assert worst_z(states.broadcast.position, law) < LIMIT


@pytest.mark.slow
def test_a_schedule_has_its_value_in_the_predicted_round():
    kernel = fedmcmc.qlsd(
        FEDERATION.posterior,
        step_size=lambda round_: STEP_SIZE / (1 + round_),
        compressor=fedmcmc.sparsify(0.5),
    )
    law = FEDERATION.langevin(step_size=STEP_SIZE / 2, keep=0.5)
    assert worst_error(predict(kernel, round_=1), law.stationary()) < LIMIT


def test_divergent_simulated_chains_are_reported():
    kernel = fedmcmc.qlsd(FEDERATION.posterior, step_size=1.0, compressor=fedmcmc.quantize(2))
    prediction = predict(kernel)
    assert prediction.spectral_radius == np.inf and prediction.is_biased
    assert np.isnan(prediction.mean).all()
    assert "the kernel diverges (its simulated chains run away)" in str(prediction)


@pytest.mark.slow
def test_simulated_chains_that_are_too_slow_are_reported():
    kernel = fedmcmc.qlsd(FEDERATION.posterior, step_size=1e-6, compressor=fedmcmc.quantize(2))
    prediction = predict(kernel)
    assert np.isinf(prediction.mean_error).all() and not prediction.is_biased
    assert "too slowly for a prediction" in str(prediction)


@pytest.mark.parametrize("compressed", fast_and_slow([False, True], [False]))
def test_a_chain_without_noise_is_biased(compressed):
    kernel = fedmcmc.lsd(FEDERATION.posterior, step_size=STEP_SIZE, temperature=0.0)
    if compressed:
        kernel = fedmcmc.compress(kernel, fedmcmc.compression.identity())
    prediction = predict(kernel)
    assert prediction.is_biased and not prediction.spread.max() > 1e-3
    np.testing.assert_allclose(prediction.mean, prediction.target_mean, atol=1e-4)


def test_errors_that_may_be_chance_are_not_reported():
    kernel = fedmcmc.fa_hmc(
        FEDERATION.posterior, step_size=0.05, num_integration_steps=5, num_local_steps=5
    )
    prediction = predict(kernel)
    assert prediction.is_biased
    sd = np.sqrt(np.diag(prediction.target_covariance))
    prediction = prediction._replace(covariance=prediction.target_covariance)
    excess = np.abs(prediction.bias).max() - 0.1  # above the smallest bias that counts
    assert excess > 0
    assert prediction._replace(mean_error=0.49 * excess * sd).is_biased
    assert not prediction._replace(mean_error=0.51 * excess * sd).is_biased


@pytest.mark.parametrize(
    "build_kernel",
    [
        lambda p: fedmcmc.fed_ep(p),
        lambda p: fedmcmc.fed_avg(p, client_optimizer=optax.sgd(0.1), num_local_steps=2),
    ],
)
def test_kernels_that_are_not_chains_raise(build_kernel):
    with pytest.raises(ValueError, match="predict_bias is for chains"):
        predict(build_kernel(FEDERATION.posterior))
