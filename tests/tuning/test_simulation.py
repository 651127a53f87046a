"""Kernels whose law is simulated on Gaussian clients, against exact laws of second moments."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedmcmc
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
CASES = {
    "sparse": dict(keep=0.3),
    "memory-of-all": dict(keep=0.5, rates=RATES, rule="bernoulli"),
    "memory-of-the-active": dict(keep=0.5, rates=0.4, memory_of="active", rule="cohort"),
    "star": dict(keep=0.4, centre=True, rule="bernoulli"),
}
RULES = {
    "full": (fedmcmc.full, laws_qlsd.everyone),
    "bernoulli": (lambda: fedmcmc.bernoulli(P), lambda num: laws_qlsd.bernoulli(P)),
    "cohort": (lambda: fedmcmc.uniform(2), lambda num: laws_qlsd.cohorts(2, num)),
}


def exact(federation):
    return fedmcmc.Gaussian.from_moments(federation.means, np.linalg.inv(federation.precisions))


def build(keep, rule="full", rates=None, memory_of="all", centre=False):
    """Return a compressed kernel and its law."""
    participation, cohorts = RULES[rule]
    settings = dict(
        step_size=STEP_SIZE, participation=participation(), compressor=fedmcmc.sparsify(keep)
    )
    given = dict(step_size=STEP_SIZE, participation=cohorts(4), keep=keep)
    if rates is not None:
        memory = dict(memory_rate=rates, memory_of=memory_of, refresh_every=1, batch_size=None)
        kernel = fedmcmc.qlsd_pp(FEDERATION.posterior, **memory, **settings)
        given |= dict(rates=rates, memory_of=memory_of, refresh_every=1)
    elif centre:
        kernel = fedmcmc.qlsd_star(FEDERATION.posterior, FEDERATION.centre, **settings)
        given |= dict(centre=FEDERATION.centre)
    else:
        kernel = fedmcmc.qlsd(FEDERATION.posterior, **settings)
    return kernel, FEDERATION.langevin(**given)


def worst(told, expected):
    """Return the largest |z| of means and sds."""
    sds = np.sqrt(np.diag(told.covariance)), np.sqrt(np.diag(expected.covariance))
    of_mean = (told.mean - expected.mean) / told.mean_error
    of_sd = (sds[0] - sds[1]) / told.sd_error
    return max(np.abs(of_mean).max(), np.abs(of_sd).max())


def first(law):
    return laws.Moments(law.mean[:3], law.covariance[:3, :3])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_law_of_sparsified_messages(case):
    kernel, law = build(**CASES[case])
    told = fedmcmc.predict_bias(kernel, FEDERATION.data, exact(FEDERATION))
    assert told.simulated == "it compresses messages"
    assert "Simulated over" in str(told) and "standard errors are" in str(told)
    expected = first(law.stationary())
    assert worst(told, expected) < LIMIT
    # Accurate enough to be of use, and to notice a tenth.
    sds = np.sqrt(np.diag(expected.covariance))
    assert (told.mean_error / sds).max() < 0.011 and (told.sd_error / sds).max() < 0.01
    wrong = laws.Moments(expected.mean + 0.1 * sds, expected.covariance)
    assert worst(told, wrong) > LIMIT
    assert worst(told, laws.Moments(expected.mean, 1.1**2 * expected.covariance)) > LIMIT


def test_what_is_simulated_has_the_times_and_moments_of_an_exact_law():
    """A kernel that compresses nothing is simulated all the same."""
    bare = fedmcmc.fa_ld(FEDERATION.posterior, step_size=0.003, num_local_steps=2)
    kernel = fedmcmc.compress(bare, fedmcmc.compression.identity())
    law = fedmcmc.predict_bias(bare, FEDERATION.data, exact(FEDERATION))
    told = fedmcmc.predict_bias(kernel, FEDERATION.data, exact(FEDERATION))
    assert law.simulated == "" and told.simulated and not law.mean_error.any()
    assert worst(told, law) < LIMIT
    np.testing.assert_allclose(told.rounds_per_draw, law.rounds_per_draw, rtol=0.15)
    np.testing.assert_allclose(told.slowest, law.slowest, rtol=0.15)
    np.testing.assert_allclose(told.on_position, law.on_position, atol=0.02)
    np.testing.assert_allclose(told.bits, law.bits)


@pytest.mark.slow
def test_snapshots_and_minibatches_of_rows_that_share_a_curvature():
    """Differences of gradients have no noise then, and the law is that of full gradients."""
    kernel = fedmcmc.lsd_pp(EQUAL.posterior, step_size=STEP_SIZE, batch_size=2, refresh_every=7)
    told = fedmcmc.predict_bias(kernel, EQUAL.data, exact(EQUAL), scores=jnp.ones((4, 3, 3)))
    assert told.simulated == "it keeps more than the position between rounds"
    target = laws.posterior(EQUAL.precisions, EQUAL.means, EQUAL.prior_precision, EQUAL.prior_mean)
    law = laws.single(np.linalg.inv(target.covariance), target.mean, step_size=STEP_SIZE)
    assert worst(told, law.stationary()) < LIMIT


@pytest.mark.slow
def test_minibatch_noise_is_part_of_what_is_simulated():
    target = laws.posterior(EQUAL.precisions, EQUAL.means, EQUAL.prior_precision, EQUAL.prior_mean)
    scores = fedmcmc.surrogates.score_covariance(
        EQUAL.posterior, EQUAL.data, jnp.asarray(target.mean, jnp.float32)
    )
    kernel = fedmcmc.qlsd(
        EQUAL.posterior, step_size=0.003, batch_size=2, compressor=fedmcmc.sparsify(0.6)
    )
    told = fedmcmc.predict_bias(kernel, EQUAL.data, exact(EQUAL), scores=scores)
    law = laws_qlsd.langevin(
        EQUAL.precisions,
        EQUAL.means,
        prior_precision=EQUAL.prior_precision,
        prior_mean=EQUAL.prior_mean,
        step_size=0.003,
        keep=0.6,
        noises=[
            laws.location_noise(*pair, 2, replace=True)
            for pair in zip(EQUAL.rows, EQUAL.row_precisions, strict=True)
        ],
    )
    assert worst(told, first(law.stationary())) < LIMIT


@pytest.mark.slow
def test_messages_that_come_late():
    kernel = fedmcmc.faults(fedmcmc.lsd(FEDERATION.posterior, step_size=STEP_SIZE), late=0.5)
    told = fedmcmc.predict_bias(kernel, FEDERATION.data, exact(FEDERATION))
    assert told.simulated == "the distribution of its cohorts is unknown"
    law = laws_faults.rounds(
        FEDERATION.precisions,
        FEDERATION.means,
        **FEDERATION.prior,
        cases=laws_faults.cases(np.ones(4), np.full(4, 0.5), np.ones(4)),
        step_size=STEP_SIZE,
        position=FEDERATION.start,
        num_rounds=400,
    )[-1]
    assert worst(told, first(law)) < LIMIT


@pytest.mark.parametrize("rates", [np.zeros(4), RATES], ids=["forgetful", "memory"])
def test_gaussian_clients_have_the_law_of_two_quantised_rounds(rates):
    """The simulated kernel is the kernel itself: rounding to levels of the norm, with a memory."""
    kernel = fedmcmc.qlsd_pp(
        FEDERATION.posterior,
        compressor=fedmcmc.quantize(2),
        memory_rate=jnp.asarray(rates),
        refresh_every=1,
        batch_size=None,
        step_size=STEP_SIZE,
        temperature=lambda round_: jnp.where(round_ == 0, 0.0, 0.5),
        participation=fedmcmc.bernoulli(P),
    )
    clients = build_gaussian_clients(kernel, FEDERATION.data, exact(FEDERATION), None)
    init, step = fedmcmc.simulate(clients.kernel, clients.data)
    keys = jax.random.split(jax.random.key(1), 16384)
    start = init(jnp.asarray(FEDERATION.start))
    states = jax.tree.map(lambda x: jnp.broadcast_to(x, (len(keys), *x.shape)), start)
    advance = jax.jit(jax.vmap(lambda key, state: step(key, state)[0]))
    expected = FEDERATION.quantised(
        num_levels=2,
        step_sizes=(STEP_SIZE, STEP_SIZE),
        temperature=0.5,
        participation=laws_qlsd.bernoulli(P),
        rates=rates,
    )
    for law in expected:
        states = advance(keys, states)
        assert worst_z(states.broadcast.position, law) < LIMIT


@pytest.mark.slow
def test_a_step_size_of_the_round_that_is_asked_for():
    def step_size(round_):
        return STEP_SIZE / (1 + round_)

    settings = dict(compressor=fedmcmc.sparsify(0.5))
    told = fedmcmc.predict_bias(
        fedmcmc.qlsd(FEDERATION.posterior, step_size=step_size, **settings),
        FEDERATION.data,
        exact(FEDERATION),
        round_=1,
    )
    law = FEDERATION.langevin(step_size=STEP_SIZE / 2, keep=0.5)
    assert worst(told, first(law.stationary())) < LIMIT


def test_chains_that_run_away_are_told():
    kernel = fedmcmc.qlsd(FEDERATION.posterior, step_size=1.0, compressor=fedmcmc.quantize(2))
    told = fedmcmc.predict_bias(kernel, FEDERATION.data, exact(FEDERATION))
    assert told.spectral_radius == np.inf and told.is_biased and np.isnan(told.mean).all()
    assert "the kernel diverges (its simulated chains run away)" in str(told)


@pytest.mark.parametrize("compressed", fast_and_slow([False, True], [False]))
def test_a_chain_without_noise_stands_still_and_is_off(compressed):
    kernel = fedmcmc.lsd(FEDERATION.posterior, step_size=STEP_SIZE, temperature=0.0)
    if compressed:
        kernel = fedmcmc.compress(kernel, fedmcmc.compression.identity())
    told = fedmcmc.predict_bias(kernel, FEDERATION.data, exact(FEDERATION))
    assert told.is_biased and not told.spread.max() > 1e-3
    np.testing.assert_allclose(told.mean, told.target_mean, atol=1e-4)


@pytest.mark.slow
def test_chains_that_are_too_slow_to_be_simulated_say_so():
    kernel = fedmcmc.qlsd(FEDERATION.posterior, step_size=1e-6, compressor=fedmcmc.quantize(2))
    told = fedmcmc.predict_bias(kernel, FEDERATION.data, exact(FEDERATION))
    assert np.isinf(told.mean_error).all() and not told.is_biased
    assert "too slowly for a prediction" in str(told)


def test_errors_that_may_be_chance_are_no_errors():
    kernel = fedmcmc.fa_hmc(
        FEDERATION.posterior, step_size=0.05, num_integration_steps=5, num_local_steps=5
    )
    told = fedmcmc.predict_bias(kernel, FEDERATION.data, exact(FEDERATION))
    assert told.is_biased
    sd = np.sqrt(np.diag(told.target_covariance))
    told = told._replace(covariance=told.target_covariance)
    unsure = np.abs(told.bias).max() - 0.1  # exactly so far above what counts
    assert unsure > 0
    assert told._replace(mean_error=0.49 * unsure * sd).is_biased
    assert not told._replace(mean_error=0.51 * unsure * sd).is_biased


@pytest.mark.parametrize(
    "build_kernel",
    [
        lambda p: fedmcmc.fed_ep(p),
        lambda p: fedmcmc.fed_avg(p, client_optimizer=optax.sgd(0.1), num_local_steps=2),
    ],
)
def test_kernels_that_are_no_chains_say_so(build_kernel):
    with pytest.raises(ValueError, match="predict_bias is for chains"):
        fedmcmc.predict_bias(build_kernel(FEDERATION.posterior), FEDERATION.data, exact(FEDERATION))
