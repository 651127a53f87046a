"""Tests of tempering against exact evidences, masses of modes and moments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.stats import norm

import fedmcmc
from fedmcmc.exact._tempered import _choose_power, _resample
from fedmcmc.runs import SimulatedConsortium
from tests.exact.test_correct import EXACT, FEDERATION, ROOT, approximation, log_evidence
from tests.oracles.federations import LIMIT, z_scores
from tests.support.lanes import fast_and_slow

KEY = jax.random.key(3)


GAUSSIAN = FEDERATION.posterior, FEDERATION.data


def repeat(times, posterior, data, q, **settings):
    return [
        fedmcmc.tempered(jax.random.fold_in(KEY, i), posterior, data, q, **settings)
        for i in range(times)
    ]


def check_evidence(runs):
    """Check log evidences and their reported errors against the exact value."""
    errors = np.array([x.log_evidence for x in runs]) - log_evidence()
    assert abs(z_scores(errors, 0.0)) < LIMIT
    assert 0.4 < np.mean([x.log_evidence_sd for x in runs]) / errors.std(ddof=1) < 2.5


@pytest.mark.parametrize("case", fast_and_slow(["near", "far"], ["near"]))
def test_evidence_and_moments_of_a_gaussian_federation_are_exact(case):
    q, length, num = dict(near=((2.5, 1.5), 6, 8), far=((8.0, 6.0), 12, 16))[case]
    runs = repeat(num, *GAUSSIAN, approximation(*q), num_seeds=240, length=length)
    check_evidence(runs)
    z = np.stack([np.linalg.solve(ROOT, (x.draws - EXACT.mean).T).T for x in runs])
    assert np.abs(z_scores(z.mean(1), 0.0)).max() < LIMIT
    assert np.abs(z_scores((z**2).mean(1), 1.0)).max() < LIMIT
    first = runs[0]
    assert first.temperatures[0] == 0 and first.temperatures[-1] == 1
    assert (np.diff(first.temperatures) > 0).all() and len(first.temperatures) > 2
    assert first.totals["rounds"] == 1 + (length - 1) * len(first.acceptance)
    assert "temperatures" in str(first) and "log evidence" in str(first)


def test_groups_of_chains_show_the_error():
    """Chains of a group are dependent; groups share only temperatures and proposals."""
    settings = dict(num_seeds=20, length=6, num_islands=12)
    runs = repeat(8, *GAUSSIAN, approximation(2.5, 1.5), **settings)
    check_evidence(runs)
    assert runs[0].islands.shape == (12, 120, 3) and runs[0].draws.shape == (1440, 3)
    np.testing.assert_array_equal(runs[0].islands[1], runs[0].draws[120:240])
    sds = np.sqrt(np.diag(EXACT.covariance))
    means = np.stack([x.draws.mean(0) for x in runs])
    sds_of_means = np.mean(
        [x.islands.mean(1).std(0, ddof=1) / np.sqrt(12) / sds for x in runs], axis=0
    )
    error = np.sqrt(np.mean(((means - EXACT.mean) / sds) ** 2, axis=0))
    assert (sds_of_means / error > 0.5).all() and (sds_of_means / error < 2).all()


def two_modes(theta, rows):
    """Return 0.7 N(0, I) + 0.3 N((6, 0), I) for the row with a one, else zero."""
    near = jnp.log(0.7) + norm.logpdf(theta[0])
    far = jnp.log(0.3) + norm.logpdf(theta[0] - 6)
    return rows * (jnp.logaddexp(near, far) + norm.logpdf(theta[1]))


TWO_MODES = fedmcmc.Posterior(lambda theta: jnp.zeros(()), two_modes)
TWO_CLIENTS = fedmcmc.FederatedData.from_clients(
    [np.array([1.0, 0.0], np.float32), np.zeros(3, np.float32)]
)
WIDE = fedmcmc.Gaussian.from_moments(np.zeros(2), variance=np.full(2, 16.0))


@pytest.mark.slow
def test_modes_between_which_no_chain_moves_have_their_masses():
    runs = repeat(10, TWO_MODES, TWO_CLIENTS, WIDE)
    right = np.array([(x.draws[:, 0] > 3).mean() for x in runs])
    assert abs(z_scores(right, 0.3)) < LIMIT and right.std(ddof=1) < 0.1
    evidence = np.array([x.log_evidence for x in runs])
    assert abs(z_scores(evidence, 0.0)) < LIMIT and evidence.std(ddof=1) < 0.2
    spread = np.array([x.draws[:, 1].var() for x in runs])
    assert abs(z_scores(spread, 1.0)) < LIMIT


@pytest.mark.slow
def test_missing_clients_repeat_a_round_without_a_change_of_draws():
    settings = dict(num_seeds=10, length=4)
    q = approximation(scale=2.0)
    plain = fedmcmc.tempered(KEY, *GAUSSIAN, q, **settings)
    faulty = SimulatedConsortium(
        FEDERATION.data,
        transform=lambda kernel: fedmcmc.faults(kernel, drop=0.2, rescale=False),
    )
    again = fedmcmc.tempered(KEY, FEDERATION.posterior, faulty, q, **settings)
    np.testing.assert_array_equal(again.draws, plain.draws)
    assert again.totals["rounds"] > plain.totals["rounds"]
    assert again.log_evidence == plain.log_evidence


@pytest.mark.slow
def test_draws_are_in_the_coordinates_of_the_user():
    posterior = FEDERATION.posterior._replace(constrain_fn=lambda theta: {"shifted": theta + 1.0})
    white = fedmcmc.whiten(posterior, FEDERATION.data, jnp.asarray(FEDERATION.start))
    standard = fedmcmc.Gaussian.from_moments(jnp.zeros(3), variance=jnp.full(3, 1.5))
    result = fedmcmc.tempered(KEY, white.posterior, FEDERATION.data, standard, length=8)
    assert np.abs(result.draws.mean(0) - EXACT.mean).max() < 0.3 * np.sqrt(EXACT.covariance.max())
    np.testing.assert_allclose(result.constrained["shifted"], result.draws + 1, rtol=1e-6)


def test_the_next_power_leaves_half_of_the_states_effective():
    log_ratio = np.random.default_rng(0).normal(scale=20, size=1000)
    log_ratio[::4] = -np.inf
    power = _choose_power(0.1, log_ratio)
    weights = np.exp((power - 0.1) * log_ratio)
    assert abs(weights.sum() ** 2 / (weights**2).sum() / 750 - 0.5) < 1e-6
    assert _choose_power(0.1, 0.001 * log_ratio) == 1.0


def test_systematic_resampling_repeats_a_state_by_its_weight():
    rng = np.random.default_rng(0)
    weights = rng.dirichlet(np.ones(30))
    counts = np.array([np.bincount(_resample(weights, 40, rng), minlength=30) for _ in range(999)])
    assert (np.abs(counts - 40 * weights) < 1).all()
    assert np.abs(z_scores(counts, 40 * weights)).max() < LIMIT


@pytest.mark.slow
def test_wrong_arguments_raise_and_chains_that_hardly_move_warn():
    nowhere = FEDERATION.posterior._replace(
        logprior_fn=lambda theta: jnp.where(jnp.sum(theta) > 1e6, 0.0, -jnp.inf)
    )
    outside = dict(centre=jnp.full(3, 1e6))
    for error, message, posterior, q, settings in (
        (ValueError, "at least 2", FEDERATION.posterior, approximation(), dict(num_seeds=1)),
        (
            ValueError,
            "dimensions",
            FEDERATION.posterior,
            approximation(),
            dict(centre=jnp.zeros(2)),
        ),
        (TypeError, "approximation", FEDERATION.posterior, np.zeros(3), {}),
        (ValueError, "center of the approximation is not finite", nowhere, approximation(), {}),
        (ValueError, "zero or not a number at all", nowhere, approximation(), outside),
    ):
        with pytest.raises(error, match=message):
            fedmcmc.tempered(KEY, posterior, FEDERATION.data, q, **settings)
    standard = fedmcmc.Gaussian.from_moments(jnp.zeros(3), variance=jnp.ones(3))
    for message, loglikelihood, num_seeds in (
        ("NaN or infinite at", lambda theta: jnp.sqrt(jnp.sin(1e4 * theta[0]) + 0.2), 30),
        (
            "hardly moved",
            lambda theta: jnp.where(jnp.cos(300 * theta).min() > 0.9, 0.0, -jnp.inf),
            1000,
        ),
    ):
        posterior = FEDERATION.posterior._replace(
            logprior_fn=lambda theta: jnp.zeros(()),
            loglikelihood_fn=lambda theta, rows, fn=loglikelihood: fn(theta) + 0 * rows["x"][:, 0],
        )
        with pytest.warns(fedmcmc.SamplingWarning, match=message):
            fedmcmc.tempered(
                KEY, posterior, FEDERATION.data, standard, num_seeds=num_seeds, length=3
            )
