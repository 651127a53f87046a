"""Warnings at the end of a run about an approximation that moves or counts rows twice."""

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


def run(kernel, num_rounds, data=DATA):
    """Return the samples of a run and the messages of its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", fedmcmc.SamplingWarning)
        samples = fedmcmc.sample(
            KEY, kernel, data, jnp.zeros(2), num_rounds=num_rounds, progress=False
        )
    return samples, [str(warning.message) for warning in caught]


def fed_ep(posterior=POSTERIOR, **settings):
    return fedmcmc.fed_ep(posterior, inference=EXACT, structure="dense", **settings)


def gaussian_of(samples):
    return samples.state.server.approximation.gaussian


def samples_with(shifts, num_active=NUM_CLIENTS, proper=True):
    """Return the part of samples that `check_at_rest` reads."""
    shifts = np.atleast_2d(np.asarray(shifts, np.float32))
    state = SimpleNamespace(
        server=_natural._NaturalServer(None, None, None, None, np.array([NUM_CLIENTS]), (), ()),
        broadcast=_natural._NaturalExtra(None, None, np.array([proper]), np.array([True])),
    )
    info = {"shift": shifts, "num_active": np.full(shifts.shape, num_active)}
    return SimpleNamespace(info=info, state=state)


@pytest.mark.parametrize(
    ("shifts", "settings"),
    [
        ([4.5, 0, 0], {}),
        ([np.inf, 0.01, 0.0], {}),
        ([8, 4, 2, 1, 0.5, 0.25, 0.05], {}),  # the steps halve: less than a tenth is left
        ([0.05, 0.06, 0.04, 0.055, 0.045, 0.05, 0.06], {}),  # noise of the clients' inference
        ([0.09, 0.07, 0.06, 0.03, 0.02, 0.015], {}),
        ([4.5, 0.0, 0.0], dict(num_active=3)),
        ([4.5, *[0.0] * 6], dict(num_active=1)),
    ],
)
def test_small_last_shifts_do_not_warn(shifts, settings):
    assert check_at_rest(samples_with(shifts, **settings)) is None


@pytest.mark.parametrize(
    ("shifts", "settings", "message"),
    [
        ([3.0, 3.1, 2.9, 3.0], {}, "still moves by 3 of its sds"),  # oscillates
        ([0.2] * 50, {}, "still moves by 0.2 of its sds"),  # drifts
        ([[0.0, 0.0, 0.0], [0.0, 0.0, 2.0]], {}, "still moves by 2 of its sds"),  # in one chain
        (0.09 * 0.97 ** np.arange(8), {}, "about 2.4 of its sds to go"),
        (0.02 * 0.99 ** np.arange(20), {}, "about 1.6 of its sds to go"),
        ([0.0, 0.0, 0.0], dict(proper=False), "not proper at the end"),
        # The last rounds are less than a pass over the clients.
        ([4.5, 0.0, 0.0], dict(num_active=2), "still moves by 4.5"),
        ([4.5, 2.0, 0.0], dict(num_active=3), "still moves by 2"),
        ([4.5, 0.0, 0.0, 0.0], dict(num_active=1), "still moves by 4.5"),
        ([4.5, *[0.0] * 9], dict(num_active=0), "still moves by 4.5"),
    ],
)
def test_large_last_shifts_and_slow_drifts_warn(shifts, settings, message):
    assert message in check_at_rest(samples_with(shifts, **settings))


def test_three_exact_rounds_reach_the_posterior():
    samples, messages = run(fed_ep(), 3)
    shift = samples.info["shift"][0]
    assert shift[0] > 1 and shift[1:].max() < 1e-3
    np.testing.assert_allclose(samples.state.broadcast.position[0], ROWS.sum(0) / 61, rtol=1e-4)
    assert messages == []


def test_a_flat_prior_makes_the_first_shift_infinite():
    kernel = fed_ep(POSTERIOR._replace(logprior_fn=lambda theta: jnp.zeros(())))
    samples, messages = run(kernel, 3)
    assert np.isinf(samples.info["shift"][0, 0]) and messages == []
    _, (message,) = run(kernel, 1)
    assert "became proper only in the last rounds" in message


@pytest.mark.parametrize("participation", [fedmcmc.uniform(1), fedmcmc.bernoulli(0.1)])
def test_a_run_until_rest_waits_for_absent_clients(participation):
    samples = fedmcmc.sample(
        KEY,
        fed_ep(participation=participation),
        DATA,
        jnp.zeros(2),
        until=fedmcmc.at_rest(),
        max_rounds=300,
        progress=False,
    )
    assert samples.stopped["reached"]
    assert samples.info["num_active"].sum() >= 3 * NUM_CLIENTS
    np.testing.assert_allclose(gaussian_of(samples).precision[0], 61 * np.eye(2), rtol=1e-4)
    np.testing.assert_allclose(samples.state.broadcast.position[0], ROWS.sum(0) / 61, rtol=1e-4)


def test_oscillating_and_slowly_damped_runs_warn():
    """At a damping of two, each round undoes the change of the round before."""
    _, messages = run(fed_ep(damping=1.999, initial_precision=0.5), 12)
    assert any("still moves by" in text for text in messages)
    samples, messages = run(fed_ep(damping=0.02, initial_precision=0.5), 12)
    assert any("of its sds" in text for text in messages)
    assert samples.info["shift"][0, -1] < 0.5


def test_lost_fits_of_clients_warn_at_rest():
    """The prior's precision is 1; each client adds 3 times its sign."""
    posterior = POSTERIOR._replace(
        loglikelihood_fn=lambda theta, rows: (
            -0.5 * rows["sign"] * jnp.sum((rows["x"] - theta) ** 2, axis=-1)
        )
    )

    def run_with_signs(*signs):
        clients = [
            {"x": np.full((3, 2), i), "sign": np.full(3, sign)} for i, sign in enumerate(signs)
        ]
        return run(fed_ep(posterior), 5, fedmcmc.FederatedData.from_clients(clients))

    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        _, messages = run_with_signs(-3.0, 0.5, 0.5)
    assert any("at rest, but 3 fits" in text and "proper?" in text for text in messages)
    # This posterior is proper: the fit of the convex client is lost in the first round alone.
    samples, messages = run_with_signs(-1.0, 1.0, 1.0)
    assert samples.info["num_lost"].sum() <= 1 and messages == []
    np.testing.assert_allclose(gaussian_of(samples).precision[0], 4 * np.eye(2), rtol=1e-5)


@pytest.mark.parametrize(("num_rounds", "damping"), [(1, 1.0), (5, 0.2)])
def test_a_filter_that_counts_rows_once_is_the_posterior(num_rounds, damping):
    kernel = fedmcmc.adf(POSTERIOR, inference=EXACT, damping=damping)
    samples, messages = run(kernel, num_rounds)
    np.testing.assert_allclose(gaussian_of(samples).precision[0], 61.0, rtol=1e-5)
    if damping == 1:
        np.testing.assert_allclose(gaussian_of(samples).precision_mean[0], ROWS.sum(0), rtol=1e-4)
    assert messages == []
    assert samples.diagnosis is not None  # the approximation's draws are judged


def test_a_filter_that_counts_rows_five_times_warns_and_its_draws_are_too_narrow():
    samples, messages = run(fedmcmc.adf(POSTERIOR, inference=EXACT), 5)
    sd, posterior_sd = (5 * 60 + 1) ** -0.5, 61**-0.5
    np.testing.assert_allclose(samples.final_draws[0].std(0), sd, rtol=0.1)
    np.testing.assert_allclose(samples.diagnosis.moments.spread, sd / posterior_sd, rtol=0.1)
    (repeated,) = [text for text in messages if "counts a client's rows each time" in text]
    assert "on average 5 times" in repeated and "(1 round)" in repeated
    assert not any("The approximation still moves" in text for text in messages)
    assert len(messages) == 2  # the second is about the sds


def test_a_filter_of_cohorts_may_run_for_one_pass():
    kernel = fedmcmc.adf(POSTERIOR, inference=EXACT, cohort_size=2)
    kernel = fedmcmc.compress(kernel, fedmcmc.quantize(16))
    _, messages = run(kernel, 3)
    assert not any("counts a client's rows" in text for text in messages)
    _, messages = run(kernel, 9)
    assert any("on average 3 times" in text and "(3 rounds)" in text for text in messages)
