"""Questions to separate clients that send bytes equal those of a simulation."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc import criticism
from fedmcmc.gaussian import Gaussian
from fedmcmc.runs import Consortium, Sum
from fedmcmc.types import as_functions
from tests.criticism.federation import LOGISTIC, clients, draws_near
from tests.criticism.test_predictive import HISTOGRAM
from tests.support.deployed import Server

SIZES = (60, 40, 25, 6)
KEY = jax.random.key(0)


class ByteConsortium:
    """Clients that each have only their own rows and answer in bytes."""

    def __init__(self, data):
        self.data, self.federation = data, data.federation

    def ask(self, question, content):
        kernel = as_functions(question)
        state, bits = Server(kernel, self.data, KEY, content).round()
        answered = kernel.draw(KEY, state)
        assert answered.whole
        return Sum(answered.value, 1, *map(float, bits))

    def sample(self, rng_key, kernel, *args, **kwargs):
        raise NotImplementedError


@pytest.fixture(scope="module")
def places():
    data = fedmcmc.FederatedData.from_clients(clients("logistic", SIZES))
    return data, ByteConsortium(data)


def check_close(result, expected, **tolerance):
    """Compare all figures of two results."""
    for name, value in vars(expected).items():
        if isinstance(value, float | np.ndarray):
            np.testing.assert_allclose(getattr(result, name), value, err_msg=name, **tolerance)
        else:
            assert getattr(result, name) == value, name


@pytest.mark.slow
def test_loo_and_compare_equal_a_simulation(places):
    draws = draws_near("logistic")
    simulated, remote = (criticism.loo(LOGISTIC, place, draws) for place in places)
    check_close(remote, simulated, rtol=1e-6)
    assert simulated.num_not_judged == 6 and simulated.totals["bits_up"] > 0
    with warnings.catch_warnings():  # a client is much to leave out
        warnings.simplefilter("ignore", fedmcmc.SamplingWarning)
        simulated, remote = (
            criticism.loo(LOGISTIC, place, draws, unit="client", secure_sum=True)
            for place in places
        )
    check_close(remote, simulated, rtol=1e-6)
    assert (simulated.num_rows, simulated.unit) == (len(SIZES), "clients")
    models = {"one": (LOGISTIC, draws), "second": (LOGISTIC, draws_near("logistic", 700, seed=3))}
    simulated, remote = (criticism.compare(models, place) for place in places)
    np.testing.assert_allclose(remote.difference, simulated.difference, atol=1e-4)
    np.testing.assert_allclose(remote.se, simulated.se, rtol=1e-4)


def test_a_predictive_check_equals_a_simulation(places):
    checks = {"y": lambda rows: rows["y"], "cells": HISTOGRAM}
    simulated, remote = (
        criticism.predictive_check(KEY, LOGISTIC, place, draws_near("logistic", 200), checks)
        for place in places
    )
    check_close(remote, simulated, atol=0)  # counts
    assert simulated.merged.any()
    assert isinstance(places[1], Consortium)


@pytest.mark.slow
def test_leave_out_equals_a_simulation(places):
    data, _ = places
    prior = Gaussian.from_moments(jnp.zeros(2), 2.5**2 * jnp.eye(2))
    mode = fedmcmc.surrogates.mode(LOGISTIC, data, jnp.zeros(2)).position
    expansions = fedmcmc.surrogates.taylor(LOGISTIC, data, mode)
    q = expansions.sum() * prior
    corrected = fedmcmc.correct(KEY, LOGISTIC, data, q, num_draws=1000)
    # Uneven weights make a refit without client 0 necessary.
    uneven = np.where(np.arange(1000) % 50 == 0, corrected.log_ratios + 9, corrected.log_ratios)
    object.__setattr__(corrected, "log_ratios", uneven)
    simulated, remote = (
        criticism.leave_out(LOGISTIC, place, corrected, surrogates=expansions, prior=prior)
        for place in places
    )
    assert simulated.refitted.any()
    check_close(remote, simulated, rtol=2e-3, atol=2e-3)


@pytest.mark.slow
def test_answers_are_not_compressed(places):
    data, _ = places
    squeezed = fedmcmc.runs.SimulatedConsortium(
        data, rng_key=KEY, transform=lambda kernel: fedmcmc.compress(kernel, fedmcmc.quantize(4))
    )
    draws = draws_near("logistic")
    simulated, remote = (criticism.loo(LOGISTIC, place, draws) for place in (data, squeezed))
    check_close(remote, simulated, rtol=1e-6)
