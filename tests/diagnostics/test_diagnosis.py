"""What draws say of themselves at the end of a run: right where they are wrong, and else silent."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedmcmc
from fedmcmc import diagnostics, inference
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


def judged(kernel, position=None, num_rounds=2000, **settings):
    """Return samples and what the run warned of."""
    position = jnp.asarray(MEAN, jnp.float32) if position is None else position
    settings = dict(num_chains=4, progress=False) | settings
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        samples = fedmcmc.sample(KEY, kernel, DATA, position, num_rounds=num_rounds, **settings)
    return samples, [str(w.message) for w in caught]


# The law of its errors.


@pytest.mark.parametrize("step_size", [0.2, 0.6, 1.2])
def test_the_spread_of_langevin_steps_is_found(white, step_size):
    """In whitened coordinates the sds are ``1 / sqrt(1 - h / 2)`` of the posterior's."""
    kernel = fedmcmc.lsd(white.posterior, step_size=step_size)
    samples, _ = judged(kernel, white.position, num_burnin=100)
    result = samples.diagnosis.moments
    z = (np.log(result.spread) + np.log(1 - step_size / 2) / 2) / result.spread_error
    assert np.abs(z).max() < LIMIT
    assert np.log(1.05) > result.spread_error.max()


@pytest.mark.parametrize("num_local_steps", fast_and_slow([1, 4], [1]))
def test_the_bias_of_local_steps_is_found(num_local_steps):
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
    samples, _ = judged(kernel, num_burnin=200, num_rounds=4200)
    result = samples.diagnosis.moments
    assert np.abs(expected.bias).max() > 0.05 * num_local_steps
    assert (np.abs(result.bias - expected.bias) / result.bias_error).max() < LIMIT
    z = (np.log(result.spread) - np.log(expected.spread)) / result.spread_error
    assert np.abs(z).max() < LIMIT


@pytest.mark.parametrize("off", [0.0, 0.3])
def test_standard_errors_are_those_of_repetitions(off):
    result = [
        diagnostics.check_moments(
            POSTERIOR, DATA, exact_draws(seed, num=300, correlation=0.3, mean=MEAN + off * SD)
        )
        for seed in range(30)
    ]
    for name, true in (("bias", off), ("spread", 0.0)):
        values = np.array([getattr(f, name) for f in result])
        values = np.log(values) if name == "spread" else values
        z = (values - true) / np.array([getattr(f, f"{name}_error") for f in result])
        assert np.abs(z.mean(0)).max() < LIMIT / np.sqrt(30)
        assert 0.7 < z.std() < 1.4


def test_a_tempered_kernel_is_judged_by_its_own_density(white):
    kernel = fedmcmc.lsd(white.posterior, step_size=0.1, temperature=4.0)
    samples, warned = judged(kernel, white.position, num_rounds=8000, num_burnin=200)
    assert warned == [] and samples.diagnosis.moments.spread.max() < 1.1
    cold = diagnostics.check_moments(POSTERIOR, DATA, samples.draws)
    np.testing.assert_allclose(cold.spread, 2.0, rtol=0.1)


# Alarms.


def logcosh(theta, rows):
    return -3.0 * jnp.sum(jnp.log(jnp.cosh((rows - theta) / 3)), axis=-1)


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


def test_what_is_off_is_named_with_what_helps():
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


def test_a_log_density_that_is_no_number_is_said_though_its_gradient_is_one():
    @jax.custom_jvp
    def broken(x):
        return jnp.where(x > MEAN[0], jnp.nan, 0.0)

    broken.defjvp(lambda primals, tangents: (broken(*primals), 0.0 * tangents[0]))
    posterior = POSTERIOR._replace(logprior_fn=lambda t: logprior(t) + broken(t[0]))
    (finding,) = diagnostics.diagnose(exact_draws(0), posterior, DATA).findings
    assert "not finite at 1" in finding  # of 256 draws about a half


def test_chains_that_disagree_are_said():
    draws = exact_draws(0) + np.arange(4)[:, None, None] * SD.astype(np.float32)
    result = diagnostics.diagnose(draws)
    assert result.rhat > 1.1 and result.ess < 100 and "R-hat" in result.findings[0]
    assert result.moments is None


def test_a_single_chain_is_judged_by_its_parts():
    assert diagnostics.diagnose(exact_draws(1, num_chains=1)).findings == ()
    drifting = exact_draws(1, num_chains=1) + np.linspace(0, 2, 1000)[:, None] * SD
    assert "R-hat" in diagnostics.diagnose(drifting).findings[0]


def test_many_short_chains_are_judged_by_nested_rhat():
    draws = exact_draws(2, num_chains=64, num=100, correlation=0.8)
    usual, _ = diagnostics.worst_mixing(draws)
    result = diagnostics.diagnose(draws)
    assert usual > 1.04 and result.rhat < 1.02 and result.findings == ()


def test_of_many_coordinates_some_are_judged_and_it_is_said():
    draws = np.random.default_rng(0).normal(size=(2, 5000, 700)).astype(np.float32)
    result = diagnostics.diagnose(draws)
    judged_, size = len(result.mixing.coordinates), result.mixing.num_coordinates
    assert judged_ == 2**19 // 10_000 and size == 700
    assert f"of {judged_} of 700 coordinates" in str(result)


def test_a_coordinate_that_never_moves_is_named():
    draws = exact_draws(0)
    draws[..., 1] = 2.0
    (finding,) = diagnostics.diagnose({"b": draws}).findings
    assert finding.startswith("b[1] has the same value in all draws")


# At the end of a run.


def test_a_run_that_is_well_says_so_in_its_repr_alone(white):
    kernel = fedmcmc.lsd(white.posterior, step_size=0.1)
    samples, warned = judged(kernel, white.position, num_rounds=8000, num_burnin=200)
    assert warned == []
    assert "4 x 7,800 draws of theta (3,)" in repr(samples)
    assert "effective draws; by gradients at" in repr(samples)


def test_fewer_than_400_draws_are_too_few_to_judge(white):
    kernel = fedmcmc.lsd(white.posterior, step_size=1.9)
    samples, warned = judged(kernel, white.position, num_rounds=99)
    assert warned == [] and samples.diagnosis is None
    assert "too few to judge" in repr(samples)


def test_one_draw_of_each_of_many_chains_is_not_called_stuck(white):
    kernel = fedmcmc.lsd(white.posterior, step_size=0.1)
    samples, warned = judged(
        kernel, white.position, num_rounds=9, num_burnin=6, num_chains=200, thinning=1
    )
    assert warned == [] and samples.diagnosis is None
    assert "fewer than 4 per chain" in repr(samples)


def test_the_warning_is_at_the_users_line(white):
    kernel = fedmcmc.lsd(white.posterior, step_size=1.5)
    with pytest.warns(fedmcmc.DiagnosisWarning, match="not the posterior's") as caught:
        fedmcmc.sample(KEY, kernel, DATA, white.position, num_rounds=3000, progress=False)
    assert caught[0].filename == __file__


@pytest.mark.parametrize("category", [fedmcmc.DiagnosisWarning, fedmcmc.SamplingWarning])
def test_a_filter_silences_it_and_saves_its_time(white, category):
    kernel = fedmcmc.lsd(white.posterior, step_size=1.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=category)
        samples = fedmcmc.sample(KEY, kernel, DATA, white.position, num_rounds=1000, progress=False)
    assert samples.diagnosis is None and "not judged" in repr(samples)


@pytest.mark.slow
def test_what_does_not_sample_is_not_judged():
    kernel = fedmcmc.fed_avg(
        POSTERIOR, client_optimizer=optax.sgd(1e-3), num_local_steps=2, batch_size=None
    )
    samples, warned = judged(kernel, num_rounds=500)
    assert warned == [] and samples.diagnosis is None
    cooled = fedmcmc.lsd(POSTERIOR, step_size=1e-3, temperature=lambda r: 1 / (1.0 + r))
    assert judged(cooled, num_rounds=500)[0].diagnosis is None
    kept, _ = judged(
        fedmcmc.lsd(POSTERIOR, step_size=1e-3), num_rounds=500, collect=lambda s, i: i.round
    )
    assert kept.diagnosis is None


@pytest.mark.slow
def test_an_approximation_that_is_off_is_called_one():
    kernel = fedmcmc.fed_ep(
        POSTERIOR, inference=inference.exact_gaussian(), structure="diagonal", damping=0.3
    )
    # Conditional variances in place of marginal ones: too narrow.
    samples, warned = judged(kernel, num_rounds=600, num_burnin=100)
    assert any("approximation's draws are not the posterior's" in line for line in warned)
    assert samples.diagnosis.moments.spread.min() < 0.9
    dense = fedmcmc.fed_ep(
        POSTERIOR, inference=inference.exact_gaussian(), structure="dense", damping=0.3
    )
    assert judged(dense, num_rounds=600, num_burnin=100)[1] == []


@pytest.mark.slow
def test_wrapped_kernels_are_judged_as_what_they_wrap(white):
    kernel = fedmcmc.compress(fedmcmc.lsd(white.posterior, step_size=1.5), fedmcmc.quantize(64))
    _, warned = judged(kernel, white.position)
    assert any("not the posterior's" in line for line in warned)


def test_a_prediction_that_is_off_warns_before_the_run():
    surrogates = fedmcmc.surrogates.taylor(POSTERIOR, DATA, jnp.asarray(MEAN, jnp.float32))
    largest = np.linalg.eigvalsh(TOTAL).max()
    fine, large = (
        fedmcmc.fa_hmc(POSTERIOR, step_size=step, num_integration_steps=3, num_local_steps=1)
        for step in (0.1 / np.sqrt(largest), 2.5 / np.sqrt(largest))
    )
    assert judged(fine, num_rounds=3, surrogates=surrogates)[1] == []
    warned = judged(large, num_rounds=3, surrogates=surrogates)[1]
    assert any("diverges" in line for line in warned)


@pytest.mark.parametrize("error", [ValueError("no such thing"), KeyboardInterrupt()])
def test_a_run_keeps_its_draws_whatever_befalls_their_judge(white, monkeypatch, error):
    def fails(*arguments, **settings):
        raise error

    monkeypatch.setattr("fedmcmc.runs._watch.diagnose", fails)
    kernel = fedmcmc.lsd(white.posterior, step_size=0.1)
    samples, (warned,) = judged(kernel, white.position)
    assert warned.startswith("The draws could not be judged: " + type(error).__name__)
    assert samples.draws.shape == (4, 2000, 3) and samples.diagnosis is None


def test_draws_of_half_precision_and_of_no_numbers(white):
    result = diagnostics.diagnose(jnp.asarray(exact_draws(0) - MEAN, jnp.bfloat16))
    assert result.findings == ()
    nothing = fedmcmc.Posterior(lambda t: 0.0, lambda t, rows: jnp.zeros(rows.shape[0]))
    samples, warned = judged(fedmcmc.lsd(nothing, step_size=0.1), jnp.zeros(0))
    assert warned == [] and samples.diagnosis is None


def test_rare_excursions_are_said_though_ranks_do_not_see_them():
    draws = exact_draws(3)
    draws[0, ::97, 1] = 1e30
    result = diagnostics.diagnose(draws, POSTERIOR, DATA)
    assert result.rhat < 1.01 and result.ess > 400
    assert "ran away and came back" in result.findings[0]


def test_draws_that_were_thrown_out_are_said_by_their_log_density():
    draws = exact_draws(3)
    assert diagnostics.diagnose(draws, POSTERIOR, DATA).findings == ()
    draws[2, 500:503] += 12 * SD.astype(np.float32)
    result = diagnostics.diagnose(draws, POSTERIOR, DATA)
    assert result.rhat < 1.01 and result.ess > 400
    assert "thrown out and came back" in result.findings[0]
    # Three of 4,000, and as wide without them as ever.
    sds = draws.std((0, 1)) / exact_draws(3).std((0, 1))
    np.testing.assert_allclose(result.moments.widened, sds.max(), rtol=2e-3)
    gaps = draws.reshape(-1, 3) - MEAN
    falls = 0.5 * np.einsum("ni,ij,nj->n", gaps, TOTAL, gaps)
    middle, low = np.quantile(falls[np.linspace(0, 3999, 256).astype(int)], [0.5, 0.9])
    np.testing.assert_allclose(
        result.moments.depth, (falls.max() - middle) / (low - middle), rtol=1e-3
    )


def test_a_draw_that_was_thrown_out_and_widens_nothing_is_left_alone():
    draws = exact_draws(3)
    draws[2, 500] += 7 * SD.astype(np.float32)
    result = diagnostics.diagnose(draws, POSTERIOR, DATA)
    assert result.moments.depth > diagnostics.DEPTH and 1 < result.moments.widened < 1.02
    assert result.findings == ()


def test_a_chain_that_has_yet_to_arrive_was_not_thrown():
    draws = exact_draws(3)
    draws[:, :20] += (12 * np.linspace(1, 0, 20)[:, None] * SD).astype(np.float32)
    result = diagnostics.diagnose(draws, POSTERIOR, DATA)
    assert result.moments.depth < diagnostics.DEPTH


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
    assert 2 < np.median(depths) < 9 and max(depths) < 0.8 * diagnostics.DEPTH


@pytest.mark.slow
@pytest.mark.parametrize("slope, said", [(1.0, "tau grew to"), (-1.0, "tau fell to"), (0.0, None)])
def test_a_scale_that_went_far_is_seen_on_its_logarithm(slope, said):
    """``log tau`` drifts by 0.1 per round: the position stays small, the scale does not."""
    posterior = fedmcmc.Posterior(
        lambda t: slope * t["tau"] - 0.5 * (t["b"] ** 2 + (slope == 0) * t["tau"] ** 2),
        lambda t, rows: 0.0 * rows[:, 0],
        constrain_fn=lambda t: {"tau": jnp.exp(t["tau"]), "b": t["b"]},
    )
    kernel = fedmcmc.lsd(posterior, step_size=0.1)
    start = {"tau": jnp.zeros(()), "b": jnp.zeros(())}
    samples, warned = judged(kernel, start, num_rounds=300, num_chains=2)
    assert samples.diagnosis.findings  # 300 such rounds are too few as well
    if said is None:
        assert warned == list(samples.diagnosis.findings)
    else:
        (only,) = warned
        assert only.startswith(said) and "more rounds" not in only
    quiet, none = judged(kernel, start, num_rounds=20, num_chains=2)
    assert none == [] and quiet.diagnosis is None


def test_a_map_that_fails_costs_no_draws():
    def broken(theta):
        raise RuntimeError("no such map")

    posterior = fedmcmc.Posterior(
        lambda t: t, lambda t, rows: 0.0 * rows[:, 0], constrain_fn=broken
    )  # rises for ever
    samples, warned = judged(
        fedmcmc.lsd(posterior, step_size=0.1), jnp.zeros(()), num_rounds=300, num_chains=2
    )
    assert "could not be judged: RuntimeError: no such map" in warned[0]
    assert samples.draws.shape == (2, 300)


def test_what_cannot_be_compared_is_said():
    draws = exact_draws(4)
    draws[..., 2] = draws[..., 1]
    words = " ".join(diagnostics.diagnose(draws, POSTERIOR, DATA).findings)
    assert "cannot show whether means and sds are right" in words


def test_far_too_few_effective_draws_get_no_advice_on_steps():
    slow = exact_draws(5, num=400, correlation=0.999)
    words = " ".join(diagnostics.diagnose(slow, POSTERIOR, DATA).findings)
    assert "too short" in words and "a smaller step" not in words


def test_an_interrupt_of_the_judge_ends_a_resumable_program(white, monkeypatch, tmp_path):
    def interrupted(*arguments, **settings):
        raise KeyboardInterrupt

    monkeypatch.setattr("fedmcmc.runs._watch.diagnose", interrupted)
    kernel = fedmcmc.lsd(white.posterior, step_size=0.1)
    with pytest.raises(KeyboardInterrupt), fedmcmc.resumable(tmp_path):
        judged(kernel, white.position)
