"""Warnings about an approximation at the end of a run: moving, drifting, or counting rows twice."""

import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc import inference
from fedmcmc.kernels import _natural
from fedmcmc.runs._approximations import check_at_rest

KEY = jax.random.key(0)
NUM_CLIENTS = 6
ROWS = np.random.default_rng(0).normal(3.0, 1.0, (60, 2)).astype(np.float32)
DATA = fedmcmc.FederatedData.from_arrays(ROWS, np.repeat(np.arange(NUM_CLIENTS), 10))
POSTERIOR = fedmcmc.Posterior(
    lambda theta: -0.5 * jnp.sum(theta**2),
    lambda theta, x: -0.5 * jnp.sum((x - theta) ** 2, axis=-1),
)
EXACT = inference.exact_gaussian()
SD = (len(ROWS) + 1) ** -0.5


def said(kernel, num_rounds, data=DATA):
    """Return samples and what the run warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", fedmcmc.SamplingWarning)
        samples = fedmcmc.sample(
            KEY, kernel, data, jnp.zeros(2), num_rounds=num_rounds, progress=False
        )
    return samples, [str(w.message) for w in caught]


def ended(shifts, num_active=NUM_CLIENTS, proper=True):
    """Return what `check_at_rest` reads of a run with these shifts."""
    shifts = np.atleast_2d(np.asarray(shifts, np.float32))
    state = SimpleNamespace(
        server=_natural._NaturalServer(None, None, None, None, np.array([NUM_CLIENTS]), (), ()),
        broadcast=_natural._NaturalExtra(None, None, np.array([proper]), np.array([True])),
    )
    info = {"shift": shifts, "num_active": np.full(shifts.shape, num_active)}
    return SimpleNamespace(info=info, state=state)


def test_three_exact_rounds_are_at_rest():
    samples, warned = said(fedmcmc.fed_ep(POSTERIOR, inference=EXACT, structure="dense"), 3)
    shift = samples.info["shift"][0]
    assert shift[0] > 1 and shift[1:].max() < 1e-3
    np.testing.assert_allclose(samples.state.broadcast.position[0], ROWS.sum(0) / 61, rtol=1e-4)
    assert warned == []


def test_a_flat_prior_makes_the_first_shift_unknown_and_not_the_end_improper():
    flat = POSTERIOR._replace(logprior_fn=lambda theta: jnp.zeros(()))
    kernel = fedmcmc.fed_ep(flat, inference=EXACT, structure="dense")
    samples, warned = said(kernel, 3)
    assert np.isinf(samples.info["shift"][0, 0]) and warned == []
    _, warned = said(kernel, 1)
    assert len(warned) == 1 and "became proper only in the last rounds" in warned[0]


@pytest.mark.parametrize(
    "shifts",
    [
        [4.5, 0, 0],
        [np.inf, 0.01, 0.0],
        [8, 4, 2, 1, 0.5, 0.25, 0.05],  # the steps halve: less than a tenth is left
        [0.05, 0.06, 0.04, 0.055, 0.045, 0.05, 0.06],  # noise of the clients' inference
        [0.09, 0.07, 0.06, 0.03, 0.02, 0.015],
    ],
)
def test_shifts_that_end_small_are_at_rest(shifts):
    assert check_at_rest(ended(shifts)) is None


@pytest.mark.parametrize(
    ("shifts", "match"),
    [
        ([3.0, 3.1, 2.9, 3.0], "still moves by 3 of its sds"),  # oscillates
        ([0.2] * 50, "still moves by 0.2 of its sds"),  # drifts
        ([[0.0, 0.0, 0.0], [0.0, 0.0, 2.0]], "still moves by 2 of its sds"),  # one of two chains
        (0.09 * 0.97 ** np.arange(8), "about 2.4 of its sds to go"),
        (0.02 * 0.99 ** np.arange(20), "about 1.6 of its sds to go"),
    ],
)
def test_oscillation_and_slow_drift_are_told(shifts, match):
    assert match in check_at_rest(ended(shifts))


def test_with_cohorts_one_calm_round_is_no_rest():
    assert check_at_rest(ended([4.5, 0.0, 0.0], num_active=2)) is not None
    assert check_at_rest(ended([4.5, 0.0, 0.0], num_active=3)) is None
    assert check_at_rest(ended([4.5, 2.0, 0.0], num_active=3)) is not None
    assert "not proper at the end" in check_at_rest(ended([0.0, 0.0, 0.0], proper=False))


def test_rest_is_known_after_a_pass_over_the_clients():
    """Rounds of nobody, or of clients whose sites are at rest, say nothing of the others."""
    assert check_at_rest(ended([4.5, 0.0, 0.0, 0.0], num_active=1)) is not None
    assert check_at_rest(ended([4.5, *[0.0] * 6], num_active=1)) is None
    assert check_at_rest(ended([4.5, *[0.0] * 9], num_active=0)) is not None


@pytest.mark.parametrize("who", [fedmcmc.uniform(1), fedmcmc.bernoulli(0.1)])
def test_a_run_until_rest_waits_for_clients_that_were_absent(who):
    kernel = fedmcmc.fed_ep(POSTERIOR, inference=EXACT, structure="dense", participation=who)
    samples = fedmcmc.sample(
        KEY,
        kernel,
        DATA,
        jnp.zeros(2),
        until=fedmcmc.at_rest(),
        max_rounds=300,
        progress=False,
    )
    assert samples.stopped["reached"]
    assert samples.info["num_active"].sum() >= 3 * NUM_CLIENTS
    q = samples.state.server.approximation.gaussian
    np.testing.assert_allclose(q.precision[0], 61 * np.eye(2), rtol=1e-4)
    np.testing.assert_allclose(samples.state.broadcast.position[0], ROWS.sum(0) / 61, rtol=1e-4)


def test_an_oscillating_run_and_a_slowly_damped_run_warn():
    """Two-period oscillation: at a damping of two a change is undone by the next."""
    exact = dict(inference=EXACT, structure="dense", initial_precision=0.5)
    _, warned = said(fedmcmc.fed_ep(POSTERIOR, damping=1.999, **exact), 12)
    assert any("still moves by" in text for text in warned)
    samples, warned = said(fedmcmc.fed_ep(POSTERIOR, damping=0.02, **exact), 12)
    assert any("of its sds" in text for text in warned)
    assert samples.info["shift"][0, -1] < 0.5


def signed(*signs):
    """Return clients of three rows whose log likelihoods are concave or convex."""
    return fedmcmc.FederatedData.from_clients(
        [{"x": np.full((3, 2), i), "sign": np.full(3, sign)} for i, sign in enumerate(signs)]
    )


def test_clients_whose_fits_are_lost_at_rest_are_reported():
    """The prior's precision is 1, the clients' -9 and 3, so there is no posterior."""
    posterior = POSTERIOR._replace(
        loglikelihood_fn=lambda theta, rows: (
            -0.5 * rows["sign"] * jnp.sum((rows["x"] - theta) ** 2, axis=-1)
        )
    )
    kernel = fedmcmc.fed_ep(posterior, inference=EXACT, structure="dense")
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        _, warned = said(kernel, 5, signed(-3.0, 1.0))
    assert any("at rest, but 3 fits" in text and "proper?" in text for text in warned)
    # A posterior of precision 4, one of whose clients is convex: lost in the first round alone.
    samples, warned = said(kernel, 5, signed(-1.0, 1.0, 1.0))
    assert samples.info["num_lost"].sum() <= 1 and warned == []
    np.testing.assert_allclose(
        samples.state.server.approximation.gaussian.precision[0], 4 * np.eye(2), rtol=1e-5
    )


# Assumed density filtering


def test_one_pass_of_a_filter_is_the_posterior_and_warns_of_nothing():
    samples, warned = said(fedmcmc.adf(POSTERIOR, inference=EXACT), 1)
    q = samples.state.server.approximation.gaussian
    np.testing.assert_allclose(q.precision[0], 61.0, rtol=1e-5)
    np.testing.assert_allclose(q.precision_mean[0], ROWS.sum(0), rtol=1e-4)
    assert warned == []
    assert samples.diagnosis is not None  # draws of the approximation are judged


def test_more_passes_of_a_filter_warn_and_draws_are_judged():
    samples, warned = said(fedmcmc.adf(POSTERIOR, inference=EXACT), 5)
    np.testing.assert_allclose(samples.final_draws[0].std(0), (5 * 60 + 1) ** -0.5, rtol=0.1)
    again = [text for text in warned if "counts a client's rows each time" in text]
    assert len(again) == 1
    assert "on average 5 times" in again[0] and "(1 round)" in again[0]
    assert not any("The approximation still moves" in text for text in warned)
    found = samples.diagnosis.moments
    np.testing.assert_allclose(found.spread, (5 * 60 + 1) ** -0.5 / SD, rtol=0.1)
    assert len(warned) == 2  # and of the sds


def test_a_damped_filter_counts_rows_by_its_damping():
    samples, warned = said(fedmcmc.adf(POSTERIOR, inference=EXACT, damping=0.2), 5)
    np.testing.assert_allclose(
        samples.state.server.approximation.gaussian.precision[0], 61.0, rtol=1e-5
    )
    assert warned == []


def test_a_filter_of_cohorts_may_run_for_one_pass():
    _, warned = said(fedmcmc.adf(POSTERIOR, inference=EXACT, cohort_size=2), 3)
    assert not any("counts a client's rows" in text for text in warned)
    _, warned = said(fedmcmc.adf(POSTERIOR, inference=EXACT, cohort_size=2), 9)
    assert any("on average 3 times" in text and "(3 rounds)" in text for text in warned)
    kernel = fedmcmc.compress(
        fedmcmc.adf(POSTERIOR, inference=EXACT, cohort_size=2), fedmcmc.quantize(16)
    )
    _, warned = said(kernel, 9)
    assert any("on average 3 times" in text for text in warned)
