"""Noise in the messages: what it does to a correction, by exact laws."""

import jax.numpy as jnp
import numpy as np

import fedmcmc
from fedmcmc.kernels import Evaluated
from fedmcmc.runs import SimulatedConsortium
from tests.exact.test_correct import FEDERATION, KEY, approximation, log_evidence, z_of
from tests.oracles.federations import LIMIT

NUM = 20_000


class Noisy:
    """A consortium whose summed log likelihoods have errors, a function of their number alone."""

    def __init__(self, error):
        self.inner, self.error = SimulatedConsortium(FEDERATION.data), error
        self.federation = self.inner.federation

    def ask(self, question, content):
        asked = self.inner.ask(question, content)
        answer: Evaluated = asked.value
        value = answer.value + jnp.asarray(self.error(np.asarray(answer.value, np.float64)))
        return asked._replace(value=answer._replace(value=value.astype(answer.value.dtype)))

    def sample(self, *args, **kwargs):
        raise AssertionError("a correction runs no kernel")


def correct(error):
    return fedmcmc.correct(
        KEY, FEDERATION.posterior, Noisy(error), approximation(), num_draws=NUM, tail=0.0
    )


def ess_of(corrected):
    weights = np.exp(corrected.log_ratios - corrected.log_ratios.max())
    return weights.sum() ** 2 / (weights**2).sum()


def test_normal_noise_costs_draws_and_shifts_the_evidence():
    """Effective draws times exp(-v), log evidence plus v / 2, draws still the posterior's."""
    v = 0.25
    noise = np.sqrt(v) * np.random.default_rng(0).normal(size=NUM)
    corrected = correct(lambda value: noise)
    assert abs(ess_of(corrected) / NUM / np.exp(-v) - 1) < 0.03
    sd = np.sqrt((np.exp(v) - 1) / NUM)
    assert abs(corrected.log_evidence - log_evidence() - v / 2) < LIMIT * sd + 1e-3
    assert z_of(corrected) < LIMIT


def test_subtractive_dither_is_a_constant_factor_of_the_evidence():
    """Each of four clients rounds with a shared uniform number, which the server subtracts."""
    step, rng = 1.0, np.random.default_rng(1)

    def dithered(value):
        parts = np.array([0.4, 0.3, 0.2, 0.1])[:, None] * value  # as if clients had these shares
        u = rng.random(parts.shape) - 0.5
        return ((np.round(parts / step + u) - u) * step - parts).sum(0)

    corrected = correct(dithered)
    factor = 4 * np.log(np.sinh(step / 2) / (step / 2))
    errors = dithered(np.linspace(-3, 3, NUM))
    assert abs(errors.var() / (4 * step**2 / 12) - 1) < 0.05
    sd = np.sqrt(np.var(np.exp(errors)) / np.mean(np.exp(errors)) ** 2 / NUM)
    assert abs(corrected.log_evidence - log_evidence() - factor) < LIMIT * sd + 1e-3
    assert z_of(corrected) < LIMIT
