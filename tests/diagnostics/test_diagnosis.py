"""Diagnoses of draws: exact errors where draws are wrong, and no alarm where they are exact."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedmcmc
from fedmcmc import diagnostics, inference
from fedmcmc.diagnostics._diagnosis import DEPTH
from tests.oracles.federations import LIMIT
from tests.support.lanes import fast_and_slow

KEY = jax.random.key(4)
PRECISION = np.array([[40.0, 6.0, 0.0], [6.0, 2.0, 0.3], [0.0, 0.3, 0.5]])
CENTERS = np.random.default_rng(0).normal(size=(3, 3))
SIZES = (4, 2, 7)
PRIOR = 5.0


def logprior(theta):
    return -0.5 * PRIOR * jnp.sum(theta**2)


def loglikelihood(theta, rows):
    gap = rows - theta
    return -0.5 * jnp.einsum("ni,ij,nj->n", gap, jnp.asarray(PRECISION, jnp.float32), gap)


POSTERIOR = fedmcmc.Posterior(logprior, loglikelihood)
DATA = fedmcmc.FederatedData.from_clients(
    [np.tile(c, (n, 1)).astype(np.float32) for c, n in zip(CENTERS, SIZES, strict=True)]
)
TOTAL = sum(SIZES) * PRECISION + PRIOR * np.eye(3)
COVARIANCE = np.linalg.inv(TOTAL)
SD = np.sqrt(np.diag(COVARIANCE))
MEAN = COVARIANCE @ sum(n * PRECISION @ c for n, c in zip(SIZES, CENTERS, strict=True))


def exact_draws(seed, num_chains=4, num=1000, correlation=0.0, mean=MEAN, factor=None):
    """Return draws of chains with this correlation from one draw to the next."""
    rng = np.random.default_rng(seed)
    noise = rng.normal(size=(num_chains, num, 3))
    z = noise.copy()
    for t in range(1, num):
        z[:, t] = correlation * z[:, t - 1] + np.sqrt(1 - correlation**2) * noise[:, t]
    factor = np.linalg.cholesky(COVARIANCE) if factor is None else factor
    return (mean + z @ factor.T).astype(np.float32)


@pytest.fixture(scope="module")
def white():
    return fedmcmc.whiten(POSTERIOR, DATA, jnp.zeros(3))


def judge(kernel, position=None, num_rounds=2000, **settings):
    """Return samples and the messages of warnings."""
    position = jnp.asarray(MEAN, jnp.float32) if position is None else position
    settings = dict(num_chains=4, progress=False) | settings
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        samples = fedmcmc.sample(KEY, kernel, DATA, position, num_rounds=num_rounds, **settings)
    return samples, [str(w.message) for w in caught]


# Exact errors.


@pytest.mark.parametrize("step_size", [0.2, 0.6, 1.2])
def test_the_spread_of_langevin_steps_is_exact(white, step_size):
    """In whitened coordinates the sds are ``1 / sqrt(1 - h / 2)`` of the posterior's."""
    kernel = fedmcmc.lsd(white.posterior, step_size=step_size)
    samples, _ = judge(kernel, white.position, num_burnin=100)
    result = samples.diagnosis.moments
    z = (np.log(result.spread) + np.log(1 - step_size / 2) / 2) / result.spread_error
    assert np.abs(z).max() < LIMIT
    assert np.log(1.05) > result.spread_error.max()


@pytest.mark.parametrize("num_local_steps", fast_and_slow([1, 4], [1]))
def test_the_bias_of_local_steps_is_exact(num_local_steps):
    weights = np.array([0.1, 0.3, 0.6])  # so that weighted losses differ in curvature
    kernel = fedmcmc.fa_hmc(
        POSTERIOR,
        step_size=0.015,
        num_integration_steps=4,
        num_local_steps=num_local_steps,
        weights=weights,
    )
    surrogates = fedmcmc.surrogates.taylor(POSTERIOR, DATA, jnp.asarray(MEAN, jnp.float32))
    expected = fedmcmc.predict_bias(kernel, DATA, surrogates)
    samples, _ = judge(kernel, num_burnin=200, num_rounds=4200)
    result = samples.diagnosis.moments
    assert np.abs(expected.bias).max() > 0.05 * num_local_steps
    assert (np.abs(result.bias - expected.bias) / result.bias_error).max() < LIMIT
    z = (np.log(result.spread) - np.log(expected.spread)) / result.spread_error
    assert np.abs(z).max() < LIMIT


@pytest.mark.parametrize("off", [0.0, 0.3])
def test_standard_errors_equal_the_spread_of_repetitions(off):
    result = [
        diagnostics.check_moments(
            POSTERIOR, DATA, exact_draws(seed, num=300, correlation=0.3, mean=MEAN + off * SD)
        )
        for seed in range(30)
    ]
    for name, exact in (("bias", off), ("spread", 0.0)):
        values = np.array([getattr(x, name) for x in result])
        values = np.log(values) if name == "spread" else values
        z = (values - exact) / np.array([getattr(x, f"{name}_error") for x in result])
        assert np.abs(z.mean(0)).max() < LIMIT / np.sqrt(30)
        assert 0.7 < z.std() < 1.4


def test_a_tempered_kernel_is_judged_by_its_own_density(white):
    kernel = fedmcmc.lsd(white.posterior, step_size=0.1, temperature=4.0)
    samples, messages = judge(kernel, white.position, num_rounds=8000, num_burnin=200)
    assert messages == [] and samples.diagnosis.moments.spread.max() < 1.1
    cold = diagnostics.check_moments(POSTERIOR, DATA, samples.draws)
    np.testing.assert_allclose(cold.spread, 2.0, rtol=0.1)


# Alarms.


@pytest.mark.parametrize("correlation", [0.0, 0.5])
def test_exact_draws_raise_no_alarm(correlation):
    for seed in range(40):
        result = diagnostics.diagnose(exact_draws(seed, correlation=correlation), POSTERIOR, DATA)
        assert result.findings == ()
    assert "means off by up to" in str(result)


def test_exact_draws_of_skewed_densities_raise_no_alarm():
    """The logarithm of a gamma variable, whose Gaussian at the mode is far off."""
    shape = 1.5
    skewed = fedmcmc.Posterior(
        lambda t: jnp.sum(shape * t - jnp.exp(t)), lambda t, rows: jnp.zeros(rows.shape[0])
    )
    for seed in range(20):
        draws = np.log(np.random.default_rng(seed).gamma(shape, size=(4, 1000, 3)))
        assert diagnostics.diagnose(draws.astype(np.float32), skewed, DATA).findings == ()


def test_a_wrong_moment_is_named_with_a_remedy():
    wide = exact_draws(0, factor=1.3 * np.linalg.cholesky(COVARIANCE))
    (finding,) = diagnostics.diagnose(wide, POSTERIOR, DATA).findings
    assert "not the posterior's" in finding and "3 of 3 coordinates" in finding
    shifted = exact_draws(0, mean=MEAN + np.array([0.0, 0.4, 0.0]) * SD)
    (finding,) = diagnostics.diagnose(
        {"a": shifted},
        POSTERIOR._replace(
            logprior_fn=lambda t: logprior(t["a"]),
            loglikelihood_fn=lambda t, rows: loglikelihood(t["a"], rows),
        ),
        DATA,
    ).findings
    assert "the mean of a[1] is 0.4" in finding and "a smaller step" in finding


def test_a_log_density_that_is_nan_is_reported_though_its_gradient_is_finite():
    @jax.custom_jvp
    def broken(x):
        return jnp.where(x > MEAN[0], jnp.nan, 0.0)

    broken.defjvp(lambda primals, tangents: (broken(*primals), 0.0 * tangents[0]))
    posterior = POSTERIOR._replace(logprior_fn=lambda t: logprior(t) + broken(t[0]))
    (finding,) = diagnostics.diagnose(exact_draws(0), posterior, DATA).findings
    assert "not finite at 1" in finding  # of 256 draws about a half


def test_mixing_is_judged_without_a_posterior():
    apart = exact_draws(0) + np.arange(4)[:, None, None] * SD.astype(np.float32)
    result = diagnostics.diagnose(apart)
    assert result.rhat > 1.1 and result.ess < 100 and "R-hat" in result.findings[0]
    assert result.moments is None
    # A single chain is judged by its parts.
    single = exact_draws(1, num_chains=1)
    assert diagnostics.diagnose(single).findings == ()
    drifting = single + np.linspace(0, 2, 1000)[:, None] * SD
    assert "R-hat" in diagnostics.diagnose(drifting).findings[0]
    # Many short chains are judged by nested R-hat.
    short = exact_draws(2, num_chains=64, num=100, correlation=0.8)
    result = diagnostics.diagnose(short)
    assert diagnostics.worst_mixing(short)[0] > 1.04
    assert result.rhat < 1.02 and result.findings == ()
    still = exact_draws(0)
    still[..., 1] = 2.0
    (finding,) = diagnostics.diagnose({"b": still}).findings
    assert finding.startswith("b[1] has the same value in all draws")


def test_some_of_many_coordinates_are_judged():
    draws = np.random.default_rng(0).normal(size=(2, 5000, 700)).astype(np.float32)
    result = diagnostics.diagnose(draws)
    num_judged = len(result.mixing.coordinates)
    assert num_judged == 2**19 // 10_000 and result.mixing.num_coordinates == 700
    assert f"of {num_judged} of 700 coordinates" in str(result)


def test_equal_coordinates_and_short_chains_get_the_right_advice():
    equal = exact_draws(4)
    equal[..., 2] = equal[..., 1]
    words = " ".join(diagnostics.diagnose(equal, POSTERIOR, DATA).findings)
    assert "cannot show whether means and sds are right" in words
    slow = exact_draws(5, num=400, correlation=0.999)
    words = " ".join(diagnostics.diagnose(slow, POSTERIOR, DATA).findings)
    assert "too short" in words and "a smaller step" not in words


# At the end of a run.


def test_an_exact_run_has_its_diagnosis_in_its_repr(white):
    kernel = fedmcmc.lsd(white.posterior, step_size=0.1)
    samples, messages = judge(kernel, white.position, num_rounds=8000, num_burnin=200)
    assert messages == []
    assert "4 x 7,800 draws of theta (3,)" in repr(samples)
    assert "effective draws; by gradients at" in repr(samples)


@pytest.mark.parametrize(
    ("reason", "settings"),
    [
        ("too few to judge", dict(num_rounds=99)),
        ("fewer than 4 per chain", dict(num_rounds=9, num_burnin=6, num_chains=200, thinning=1)),
    ],
)
def test_few_draws_are_not_judged(white, reason, settings):
    kernel = fedmcmc.lsd(white.posterior, step_size=1.9)
    samples, messages = judge(kernel, white.position, **settings)
    assert messages == [] and samples.diagnosis is None and reason in repr(samples)


def test_a_warning_has_the_line_of_the_user_and_a_filter_saves_its_time(white):
    run = KEY, fedmcmc.lsd(white.posterior, step_size=1.5), DATA, white.position
    with pytest.warns(fedmcmc.DiagnosisWarning, match="not the posterior's") as caught:
        fedmcmc.sample(*run, num_rounds=3000, progress=False)
    assert caught[0].filename == __file__
    for category in (fedmcmc.DiagnosisWarning, fedmcmc.SamplingWarning):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", category=category)
            samples = fedmcmc.sample(*run, num_rounds=3000, progress=False)
        assert samples.diagnosis is None and "not judged" in repr(samples)


@pytest.mark.slow
def test_runs_that_do_not_sample_are_not_judged():
    kernel = fedmcmc.fed_avg(
        POSTERIOR, client_optimizer=optax.sgd(1e-3), num_local_steps=2, batch_size=None
    )
    samples, messages = judge(kernel, num_rounds=500)
    assert messages == [] and samples.diagnosis is None
    cooled = fedmcmc.lsd(POSTERIOR, step_size=1e-3, temperature=lambda r: 1 / (1.0 + r))
    assert judge(cooled, num_rounds=500)[0].diagnosis is None
    collected, _ = judge(
        fedmcmc.lsd(POSTERIOR, step_size=1e-3), num_rounds=500, collect=lambda s, i: i.round
    )
    assert collected.diagnosis is None


@pytest.mark.slow
def test_a_wrong_approximation_warns():
    kernel = fedmcmc.fed_ep(
        POSTERIOR, inference=inference.exact_gaussian(), structure="diagonal", damping=0.3
    )
    # Conditional variances in place of marginal ones: too narrow.
    samples, messages = judge(kernel, num_rounds=600, num_burnin=100)
    assert any("approximation's draws are not the posterior's" in line for line in messages)
    assert samples.diagnosis.moments.spread.min() < 0.9
    dense = fedmcmc.fed_ep(
        POSTERIOR, inference=inference.exact_gaussian(), structure="dense", damping=0.3
    )
    assert judge(dense, num_rounds=600, num_burnin=100)[1] == []


@pytest.mark.slow
def test_compressed_kernels_are_judged(white):
    kernel = fedmcmc.compress(fedmcmc.lsd(white.posterior, step_size=1.5), fedmcmc.quantize(64))
    _, messages = judge(kernel, white.position)
    assert any("not the posterior's" in line for line in messages)


def test_a_predicted_divergence_warns_before_the_run():
    surrogates = fedmcmc.surrogates.taylor(POSTERIOR, DATA, jnp.asarray(MEAN, jnp.float32))
    largest = np.linalg.eigvalsh(TOTAL).max()
    fine, large = (
        fedmcmc.fa_hmc(POSTERIOR, step_size=step, num_integration_steps=3, num_local_steps=1)
        for step in (0.1 / np.sqrt(largest), 2.5 / np.sqrt(largest))
    )
    assert judge(fine, num_rounds=3, surrogates=surrogates)[1] == []
    messages = judge(large, num_rounds=3, surrogates=surrogates)[1]
    assert any("diverges" in line for line in messages)


def test_a_failed_diagnosis_costs_no_draws(white, monkeypatch, tmp_path):
    kernel = fedmcmc.lsd(white.posterior, step_size=0.1)

    def fail(*arguments, **settings):
        raise error

    monkeypatch.setattr("fedmcmc.runs._watch.diagnose", fail)
    for error in (ValueError("no such thing"), KeyboardInterrupt()):
        samples, (message,) = judge(kernel, white.position)
        assert message.startswith("The draws could not be judged: " + type(error).__name__)
        assert samples.draws.shape == (4, 2000, 3) and samples.diagnosis is None
    # An interrupt ends a resumable program.
    with pytest.raises(KeyboardInterrupt), fedmcmc.resumable(tmp_path):
        judge(kernel, white.position)


def test_draws_may_have_half_precision_or_no_numbers(white):
    result = diagnostics.diagnose(jnp.asarray(exact_draws(0) - MEAN, jnp.bfloat16))
    assert result.findings == ()
    nothing = fedmcmc.Posterior(lambda t: 0.0, lambda t, rows: jnp.zeros(rows.shape[0]))
    samples, messages = judge(fedmcmc.lsd(nothing, step_size=0.1), jnp.zeros(0))
    assert messages == [] and samples.diagnosis is None


def test_rare_excursions_are_reported_by_their_size():
    draws = exact_draws(3)
    draws[0, ::97, 1] = 1e30
    result = diagnostics.diagnose(draws, POSTERIOR, DATA)
    assert result.rhat < 1.01 and result.ess > 400
    assert "ran away and came back" in result.findings[0]


def test_draws_far_out_are_reported_by_their_log_density():
    draws = exact_draws(3)
    assert diagnostics.diagnose(draws, POSTERIOR, DATA).findings == ()
    draws[2, 500:503] += 12 * SD.astype(np.float32)
    result = diagnostics.diagnose(draws, POSTERIOR, DATA)
    assert result.rhat < 1.01 and result.ess > 400
    assert "thrown out and came back" in result.findings[0]
    # Without these three of 4,000 the draws have their exact width.
    sds = draws.std((0, 1)) / exact_draws(3).std((0, 1))
    np.testing.assert_allclose(result.moments.widened, sds.max(), rtol=2e-3)
    gaps = draws.reshape(-1, 3) - MEAN
    falls = 0.5 * np.einsum("ni,ij,nj->n", gaps, TOTAL, gaps)
    middle, low = np.quantile(falls[np.linspace(0, 3999, 256).astype(int)], [0.5, 0.9])
    np.testing.assert_allclose(
        result.moments.depth, (falls.max() - middle) / (low - middle), rtol=1e-3
    )
    # A single draw that widens nothing raises no alarm.
    draws = exact_draws(3)
    draws[2, 500] += 7 * SD.astype(np.float32)
    result = diagnostics.diagnose(draws, POSTERIOR, DATA)
    assert result.moments.depth > DEPTH and 1 < result.moments.widened < 1.02
    assert result.findings == ()
    # Nor does a chain that has yet to arrive.
    draws = exact_draws(3)
    draws[:, :20] += (12 * np.linspace(1, 0, 20)[:, None] * SD).astype(np.float32)
    assert diagnostics.diagnose(draws, POSTERIOR, DATA).moments.depth < DEPTH


FALLS = {
    "normal": lambda rng, shape: rng.normal(size=shape) ** 2 / 2,
    "normal in 30 dimensions": lambda rng, shape: rng.chisquare(30, shape) / 2,
    "exponential": lambda rng, shape: rng.exponential(size=shape),
    "Cauchy": lambda rng, shape: np.log1p(rng.standard_cauchy(shape) ** 2),
    # The density of its sds falls with their power: Neal (2003).
    "funnel": lambda rng, shape: (
        (v := 3 * rng.normal(size=shape)) ** 2 / 18 + 9 * v / 2 + rng.chisquare(9, shape) / 2
    ),
}


@pytest.mark.parametrize("name", FALLS)
def test_log_densities_of_a_posterior_end_far_above_the_limit(name):
    """However heavy the tails: those of the log density are about exponential."""
    rng = np.random.default_rng(5)
    depths = []
    for _ in range(200):
        falls = FALLS[name](rng, 16_000)
        values = np.concatenate([falls[np.linspace(0, 15_999, 256).astype(int)], [falls.max()]])
        depths.append(diagnostics.depth_of(-values, 256))
    assert 2 < np.median(depths) < 9 and max(depths) < 0.8 * DEPTH


@pytest.mark.slow
@pytest.mark.parametrize("slope, start", [(1.0, "tau grew to"), (-1.0, "tau fell to"), (0.0, "")])
def test_a_scale_that_drifts_is_reported_on_its_logarithm(slope, start):
    """``log tau`` drifts by 0.1 per round: the position stays small, the scale does not."""
    posterior = fedmcmc.Posterior(
        lambda t: slope * t["tau"] - 0.5 * (t["b"] ** 2 + (slope == 0) * t["tau"] ** 2),
        lambda t, rows: 0.0 * rows[:, 0],
        constrain_fn=lambda t: {"tau": jnp.exp(t["tau"]), "b": t["b"]},
    )
    kernel = fedmcmc.lsd(posterior, step_size=0.1)
    position = {"tau": jnp.zeros(()), "b": jnp.zeros(())}
    samples, messages = judge(kernel, position, num_rounds=300, num_chains=2)
    assert samples.diagnosis.findings  # 300 such rounds are too few as well
    if start:
        (message,) = messages
        assert message.startswith(start) and "more rounds" not in message
    else:
        assert messages == list(samples.diagnosis.findings)
    short, messages = judge(kernel, position, num_rounds=20, num_chains=2)
    assert messages == [] and short.diagnosis is None


def test_a_map_that_fails_costs_no_draws():
    def broken(theta):
        raise RuntimeError("no such map")

    posterior = fedmcmc.Posterior(
        lambda t: t, lambda t, rows: 0.0 * rows[:, 0], constrain_fn=broken
    )  # rises for ever
    samples, messages = judge(
        fedmcmc.lsd(posterior, step_size=0.1), jnp.zeros(()), num_rounds=300, num_chains=2
    )
    assert "could not be judged: RuntimeError: no such map" in messages[0]
    assert samples.draws.shape == (2, 300)
