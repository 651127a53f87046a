"""How far visits of a relay throw a chain, and that `tune` keeps them near."""

import contextlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc.runs import as_consortium
from fedmcmc.tuning._visits import MAX_GROWTH, RADII, find_worst_visits
from tests.oracles.federations import Federation

FEDERATION = Federation()
# Counts with one rate; most are at one client, so that its visits count for twenty times as much.
SIZES = (60, *[1] * 29)
RNG = np.random.default_rng(3)
COUNTS = [RNG.poisson(2.0, size).astype(np.float32) for size in SIZES]
DATA = fedmcmc.FederatedData.from_clients(COUNTS)
PRIOR = 0.25


def loglikelihood(theta, y):
    return y * theta - jnp.exp(theta)


POSTERIOR = fedmcmc.Posterior(lambda theta: -0.5 * PRIOR * theta**2, loglikelihood)


@pytest.fixture(scope="module")
def white():
    return fedmcmc.whiten(POSTERIOR, DATA, jnp.zeros(()))


def fsgld(white, step_size, num_local_steps=10):
    return fedmcmc.fsgld(
        white.posterior, white.surrogates, step_size=step_size, num_local_steps=num_local_steps
    )


@pytest.mark.parametrize("num_local_steps", [1, 4])
def test_where_surrogates_are_exact_visits_shrink_by_the_step(num_local_steps):
    white = fedmcmc.whiten(FEDERATION.posterior, FEDERATION.data, jnp.zeros(3))
    visit = find_worst_visits(fsgld(white, 0.3, num_local_steps), FEDERATION.data, white.surrogates)
    np.testing.assert_allclose(visit.growth, 0.7**num_local_steps, rtol=2e-3)
    np.testing.assert_allclose(visit.drift, 0.7**num_local_steps, rtol=2e-3)
    assert visit.are_safe


def test_the_find_worst_visits_is_that_of_a_loop_in_numpy(white):
    """In the model's coordinates, with the curvature at the mode as the metric."""
    step, num_steps, num = 0.08, 10, len(SIZES)
    mode = float(white.posterior.position_fn(white.position))
    rate, sizes = np.exp(mode), np.array(SIZES)
    precision = sizes.sum() * rate + PRIOR
    sums = np.array([rows.sum() for rows in COUNTS])
    ratios = np.zeros((len(RADII), num, 2))
    for radius, client, side in np.ndindex(*ratios.shape):
        begin = (-1, 1)[side] * RADII[radius] / np.sqrt(precision)
        x = mode + begin
        for _ in range(num_steps):
            gap = x - mode
            slopes = sums - sizes * rate * (1 + gap)  # of the surrogates
            exact = sums[client] - sizes[client] * np.exp(x)
            x += step / precision * (-PRIOR * x + slopes.sum() + num * (exact - slopes[client]))
        ratios[radius, client, side] = abs((x - mode) / begin)
    visit = find_worst_visits(fsgld(white, step, num_steps), DATA, white.surrogates)
    np.testing.assert_allclose(visit.growth, ratios[0].max(), rtol=1e-3)
    assert visit.client == ratios[0].max(1).argmax() == 0
    assert "client 'Bern'" in str(visit._replace(labels=("Bern", *range(1, num)), growth=9.0))
    squares = np.mean(ratios**2, axis=1)  # all clients are visited alike
    np.testing.assert_allclose(visit.drift, np.sqrt(squares.max()), rtol=1e-3)
    assert visit.radius == RADII[squares.max(1).argmax()] and visit.drift_client == 0


def test_clients_are_weighed_as_they_are_visited(white):
    shares = np.where(np.arange(len(SIZES)) == 0, 0.5, 0.5 / (len(SIZES) - 1))
    kernel = fedmcmc.fsgld(
        white.posterior, white.surrogates, step_size=0.08, num_local_steps=10, probabilities=shares
    )
    visit = find_worst_visits(kernel, DATA, white.surrogates)
    # What the large client's surrogate gets wrong counts twice then, in place of thirty times.
    assert (
        visit.are_safe
        and visit.drift < 1 < find_worst_visits(fsgld(white, 0.08), DATA, white.surrogates).drift
    )


def test_kernels_that_are_no_relays_have_no_visits(white):
    kernel = fedmcmc.lsd(white.posterior, step_size=0.05)
    assert find_worst_visits(kernel, DATA, white.surrogates) is None
    dropped = fedmcmc.faults(fsgld(white, 0.05), drop=0.1)
    assert find_worst_visits(dropped, DATA, white.surrogates).growth > 0


def judged(kernel, white, num_rounds=6_000):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        samples = fedmcmc.sample(
            jax.random.key(0),
            kernel,
            DATA,
            white.position,
            num_rounds=num_rounds,
            num_burnin=100,
            num_chains=4,
            progress=False,
        )
    return samples, [str(w.message) for w in caught]


BY_LAW = 2 * (1 - 1 / 1.02**2)
"""The step whose sds are two percent too wide, by the law on Gaussian clients."""


@pytest.fixture(scope="module")
def best(white):
    return fedmcmc.tune(
        lambda step_size: fsgld(white, step_size), white.posterior, DATA, white.surrogates
    )


def test_tune_takes_no_step_whose_visits_throw_a_chain_away(best):
    grown = {e["step_size"]: e["growth"] for e in best.table if e["growth"]}
    step = best.settings["step_size"]
    assert grown[step] <= MAX_GROWTH < grown[max(grown)] and step < BY_LAW / 2
    assert (
        "Longer steps are within the limits on Gaussian clients but unsafe" in str(best)
        and "client 0" in best.note
    )


@pytest.mark.slow
def test_of_clients_elsewhere_it_is_said_that_they_were_not_asked(white):
    elsewhere = as_consortium(DATA)
    best = fedmcmc.tune(
        lambda step_size: fsgld(white, step_size, 1),
        white.posterior,
        elsewhere,
        white.surrogates,
    )
    assert best.note.startswith(
        "Visits to clients at real sites were not checked"
    ) and best.note in str(best)


@pytest.mark.slow
def test_the_step_that_tune_takes_samples_and_that_of_the_law_does_not(best, white):
    samples, told = judged(best.kernel, white, 20_000)
    assert told == []
    assert np.abs(samples.diagnosis.moments.bias).max() < 0.1
    assert np.abs(np.log(samples.diagnosis.moments.spread)).max() < np.log(1.1)
    with contextlib.suppress(fedmcmc.NonFiniteError):  # which is loud
        assert judged(fsgld(white, BY_LAW), white)[1] != []


def test_tune_says_so_where_all_steps_are_unsafe(white, monkeypatch):
    monkeypatch.setattr("fedmcmc.tuning._visits.MAX_GROWTH", 0.1)
    with pytest.raises(
        ValueError, match=r"limits on Gaussian clients are unsafe.*client 0.*all clients take part"
    ):
        fedmcmc.tune(
            lambda step_size: fsgld(white, step_size), white.posterior, DATA, white.surrogates
        )
