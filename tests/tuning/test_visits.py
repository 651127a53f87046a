"""Visits of a relay that move a chain far away, and steps of `tune` that avoid them."""

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
# Counts with a common rate; two thirds are at one client, whose visits matter more.
SIZES = (60, *[1] * 29)
RNG = np.random.default_rng(3)
COUNTS = [RNG.poisson(2.0, size).astype(np.float32) for size in SIZES]
DATA = fedmcmc.FederatedData.from_clients(COUNTS)
PRIOR = 0.25
POSTERIOR = fedmcmc.Posterior(
    lambda theta: -0.5 * PRIOR * theta**2, lambda theta, y: y * theta - jnp.exp(theta)
)
LONGEST = 2 * (1 - 1 / 1.02**2)
"""Step whose sds are two percent too wide on Gaussian clients."""


@pytest.fixture(scope="module")
def white():
    return fedmcmc.whiten(POSTERIOR, DATA, jnp.zeros(()))


def relay(white, step_size, num_local_steps=10, **settings):
    return fedmcmc.fsgld(
        white.posterior,
        white.surrogates,
        step_size=step_size,
        num_local_steps=num_local_steps,
        **settings,
    )


def tune(white, data=DATA, num_local_steps=10, **settings):
    return fedmcmc.tune(
        lambda step_size: relay(white, step_size, num_local_steps),
        white.posterior,
        data,
        white.surrogates,
        **settings,
    )


@pytest.mark.parametrize("num_local_steps", [1, 4])
def test_visits_with_exact_surrogates_shrink_by_the_step(num_local_steps):
    white = fedmcmc.whiten(FEDERATION.posterior, FEDERATION.data, jnp.zeros(3))
    kernel = relay(white, 0.3, num_local_steps)
    visit = find_worst_visits(kernel, FEDERATION.data, white.surrogates)
    np.testing.assert_allclose(visit.growth, 0.7**num_local_steps, rtol=2e-3)
    np.testing.assert_allclose(visit.drift, 0.7**num_local_steps, rtol=2e-3)
    assert visit.are_safe


def test_the_worst_visit_is_that_of_a_loop_in_numpy(white):
    """The loop uses the model's coordinates and the curvature at the mode as the metric.

    If the large client is visited half of the time, errors of its surrogate count less.
    """
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
    visit = find_worst_visits(relay(white, step, num_steps), DATA, white.surrogates)
    np.testing.assert_allclose(visit.growth, ratios[0].max(), rtol=1e-3)
    assert visit.client == ratios[0].max(1).argmax() == 0
    assert "client 'Bern'" in str(visit._replace(labels=("Bern", *range(1, num)), growth=9.0))
    squares = np.mean(ratios**2, axis=1)  # all clients are visited equally often
    np.testing.assert_allclose(visit.drift, np.sqrt(squares.max()), rtol=1e-3)
    assert visit.radius == RADII[squares.max(1).argmax()] and visit.drift_client == 0
    shares = np.where(np.arange(num) == 0, 0.5, 0.5 / (num - 1))
    kernel = relay(white, step, num_steps, probabilities=shares)
    frequent = find_worst_visits(kernel, DATA, white.surrogates)
    assert frequent.are_safe and frequent.drift < 1 < visit.drift


def test_only_relays_have_visits(white):
    kernel = fedmcmc.lsd(white.posterior, step_size=0.05)
    assert find_worst_visits(kernel, DATA, white.surrogates) is None
    faulty = fedmcmc.faults(relay(white, 0.05), drop=0.1)
    assert find_worst_visits(faulty, DATA, white.surrogates).growth > 0


@pytest.fixture(scope="module")
def best(white):
    return tune(white)


def test_tune_takes_no_step_with_unsafe_visits(best):
    growths = {e["step_size"]: e["growth"] for e in best.table if e["growth"]}
    step = best.settings["step_size"]
    assert growths[step] <= MAX_GROWTH < growths[max(growths)] and step < LONGEST / 2
    report = "Longer steps are within the limits on Gaussian clients but unsafe"
    assert report in str(best) and "client 0" in best.note


def test_tune_raises_if_all_steps_are_unsafe(white):
    message = r"limits on Gaussian clients are unsafe.*client 0.*all clients take part"
    with pytest.raises(ValueError, match=message):
        tune(white, step_size=(LONGEST, LONGEST))


@pytest.mark.slow
def test_visits_to_remote_clients_are_not_checked(white):
    best = tune(white, as_consortium(DATA), 1)
    assert best.note.startswith("Visits to clients at real sites were not checked")
    assert best.note in str(best)


def judge(kernel, white, num_rounds=6_000):
    """Return samples and the messages of all warnings."""
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
    return samples, [str(warning.message) for warning in caught]


@pytest.mark.slow
def test_the_tuned_step_samples_and_the_step_for_gaussian_clients_does_not(best, white):
    samples, messages = judge(best.kernel, white, 20_000)
    assert messages == []
    assert np.abs(samples.diagnosis.moments.bias).max() < 0.1
    assert np.abs(np.log(samples.diagnosis.moments.spread)).max() < np.log(1.1)
    with contextlib.suppress(fedmcmc.NonFiniteError):  # or the run warns
        assert judge(relay(white, LONGEST), white)[1] != []
