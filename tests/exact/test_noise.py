"""Tests of the effect of noise in messages on a correction, against exact values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import fedmcmc
from fedmcmc.kernels import LOG_ZERO_THRESHOLD, Dithered, Evaluated, Points, dither_of, evaluations
from fedmcmc.runs import SimulatedConsortium
from tests.contracts.model import DATA
from tests.exact.test_correct import EXACT, FEDERATION, KEY, approximation, log_evidence, z_of
from tests.oracles.federations import LIMIT, z_scores

NUM = 20_000


class NoisyConsortium:
    """Consortium that adds errors to the summed log likelihoods."""

    def __init__(self, errors):
        self.inner, self.errors = SimulatedConsortium(FEDERATION.data), errors
        self.federation = self.inner.federation

    def ask(self, question, content):
        reply = self.inner.ask(question, content)
        answer: Evaluated = reply.value
        value = answer.value + jnp.asarray(self.errors)
        return reply._replace(value=answer._replace(value=value.astype(answer.value.dtype)))

    def sample(self, *args, **kwargs):
        raise NotImplementedError


def correct(consortium, **settings):
    settings = dict(num_draws=NUM, tail=0.0) | settings
    return fedmcmc.correct(KEY, FEDERATION.posterior, consortium, approximation(), **settings)


@pytest.fixture(scope="module")
def plain():
    return correct(SimulatedConsortium(FEDERATION.data))


def ess_of(corrected):
    weights = np.exp(corrected.log_ratios - corrected.log_ratios.max())
    return weights.sum() ** 2 / (weights**2).sum()


def test_normal_noise_costs_draws_and_shifts_the_evidence():
    """Noise of variance v multiplies effective draws by exp(-v) and adds v / 2 to the evidence."""
    v = 0.25
    noise = np.sqrt(v) * np.random.default_rng(0).normal(size=NUM)
    corrected = correct(NoisyConsortium(noise))
    assert abs(ess_of(corrected) / NUM / np.exp(-v) - 1) < 0.03
    sd = np.sqrt((np.exp(v) - 1) / NUM)
    assert abs(corrected.log_evidence - log_evidence() - v / 2) < LIMIT * sd + 1e-3
    assert z_of(corrected) < LIMIT


def dithered(step, *, transform=None):
    return correct(SimulatedConsortium(FEDERATION.data, transform=transform), dither=step)


def test_dithered_values_cost_draws_and_keep_weights_and_evidence_exact(plain):
    """Each of four clients multiplies the weights by a factor with the same mean at all draws."""
    step = 1.0
    corrected = dithered(step)
    first, second = (np.log(np.sinh(x) / x) for x in (step / 2, step))  # of exp(e), of exp(2 e)
    share = np.exp(4 * (2 * first - second))
    np.testing.assert_allclose(ess_of(corrected) / NUM, share, rtol=0.03)
    sd = np.sqrt((1 / share - 1) / NUM)
    gap = abs(corrected.log_evidence - log_evidence())
    assert gap / sd < LIMIT and 4 * first > 20 * sd
    assert z_of(corrected) < LIMIT
    # Fewer than half of the bits: an integer of a few bits per draw and client.
    assert corrected.totals["bits_up"] < 0.35 * plain.totals["bits_up"]
    assert corrected.totals["bits_down"] < 1.01 * plain.totals["bits_down"]


def test_a_fine_dither_has_no_visible_cost(plain):
    fine = dithered(2.0**-8)
    np.testing.assert_allclose(fine.log_weights, plain.log_weights, atol=4 * 2.0**-8)
    assert np.abs(fine.log_weights - plain.log_weights).max() > 2.0**-9
    assert abs(fine.log_evidence - plain.log_evidence) < 1e-4
    # A secure sum of integers on the same grid loses nothing else.
    summed = dithered(2.0**-8, transform=fedmcmc.secure_sum)
    np.testing.assert_allclose(summed.log_weights, fine.log_weights, atol=2e-5)


def errors_of(step, *, subtract=True, num=NUM):
    """Return values of one client at points on a line, and the errors by dither."""
    points = jnp.linspace(-0.8, 0.8, num)[:, None] * jnp.ones(3)
    content = Points(points, jnp.asarray(EXACT.mean, jnp.float32))
    data = fedmcmc.FederatedData.from_clients(
        [jax.tree.map(lambda x: x[: int(FEDERATION.data.sizes[0])], FEDERATION.data.rows)]
    )
    consortium, question = SimulatedConsortium(data), evaluations(FEDERATION.posterior)
    value = np.asarray(consortium.ask(question, content).value.value, np.float64)
    words = jax.random.bits(KEY, (2,), jnp.uint32)
    noisy = Dithered(content, words, jnp.asarray(step, jnp.float32))
    dithered = np.asarray(consortium.ask(question, noisy).value.value, np.float64)
    added = np.asarray(dither_of(noisy, 0, num), np.float64)
    return value, dithered - subtract * step * added - value


def test_errors_are_uniform_and_independent_of_the_value():
    step = 0.5
    value, error = errors_of(step)
    assert np.ptp(value) > 20 * step
    scaled = error / step
    for power, moment in ((1, 0.0), (2, 1 / 12)):
        assert abs(z_scores(scaled**power, moment)) < LIMIT
    assert np.abs(scaled).max() < 0.5 + 1e-3
    assert stats.kstest(scaled + 0.5, "uniform").pvalue > 1e-6
    place = value / step - np.round(value / step)
    for fn in (place, place**2, value):
        for of_error in (scaled, scaled**2 - 1 / 12, np.exp(error) - np.mean(np.exp(error))):
            assert abs(z_scores((fn - fn.mean()) * of_error, 0.0)) < LIMIT
    factor = np.sinh(step / 2) / (step / 2)
    assert abs(z_scores(np.exp(error), factor)) < LIMIT
    # Stochastic rounding subtracts nothing, and its factor depends on the value.
    value, plain = errors_of(2.0, subtract=False)
    up = value / 2 - np.floor(value / 2)
    expected = (1 - up) * np.exp(-2 * up) + up * np.exp(2 * (1 - up))
    assert abs(z_scores(np.exp(plain) - expected, 0.0)) < LIMIT
    gap = expected - expected.mean()
    assert abs(z_scores(gap * (np.exp(plain) - expected.mean()), 0.0)) > 3 * LIMIT


def test_values_beyond_the_range_and_of_zero_density_count_as_impossible():
    posterior = fedmcmc.Posterior(
        lambda theta: -0.5 * jnp.sum(theta**2),
        lambda theta, rows: jnp.where(theta[0] > 0, rows["x"][:, 0] ** 2 * theta[0], -jnp.inf),
    )
    content = Points(jnp.array([[-1.0], [2.0], [1e9]]), jnp.ones(1))
    words = jnp.zeros(2, jnp.uint32)
    coarse = Dithered(content, words, jnp.asarray(0.25))
    consortium = SimulatedConsortium(DATA)
    plain = consortium.ask(evaluations(posterior), content).value
    answer = consortium.ask(evaluations(posterior), coarse).value
    value = np.asarray(answer.value)
    assert (value[[0, 2]] < LOG_ZERO_THRESHOLD).all()
    assert abs(value[1] - plain.value[1]) < 3 * 0.25
    assert int(answer.invalid.value) == 3  # one per client: too large for 24 bits
    with pytest.raises(ValueError, match="Dithered log likelihoods have no gradients"):
        consortium.ask(evaluations(posterior, gradients=True), coarse)
    for wrong in (0.0, -1.0, np.inf):
        with pytest.raises(ValueError, match="dither must be a positive number"):
            dithered(wrong)
