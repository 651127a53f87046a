"""Settings that `tune` finds by prediction: the largest accepted step, and the best of a grid."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc.dynamics import mala_acceptance
from fedmcmc.tuning._metropolis import mala_rounds_per_draw
from tests.oracles.federations import Federation

FEDERATION = Federation()
METRIC = np.array([[1.2, 0.3, 0.0], [0.3, 0.8, -0.2], [0.0, -0.2, 0.5]])
EXACT, _ = FEDERATION.surrogates("exact")


@pytest.fixture(scope="module")
def white():
    return fedmcmc.whiten(FEDERATION.posterior, FEDERATION.data, jnp.zeros(3))


@pytest.fixture(scope="module")
def best_langevin(white):
    return tune(lambda step_size: fedmcmc.lsd(white.posterior, step_size=step_size), white)


def tune(kernel_fn, white, **settings):
    return fedmcmc.tune(kernel_fn, white.posterior, FEDERATION.data, white.surrogates, **settings)


def predict(kernel, white, **settings):
    return fedmcmc.predict_bias(kernel, FEDERATION.data, white.surrogates, **settings)


def averaging(white):
    def kernel_fn(**settings):
        return fedmcmc.fa_hmc(
            white.posterior, num_integration_steps=5, num_local_steps=2, **settings
        )

    return kernel_fn


def errors(prediction):
    """Return the largest errors of a mean, in sds, and of an sd."""
    return np.abs(prediction.bias).max(), np.abs(prediction.spread - 1).max()


def test_langevin_steps_are_as_long_as_two_percent_allow(best_langevin):
    """In whitened coordinates sds are ``1 / sqrt(1 - h / 2)``, and a draw takes ``(2 - h) / h``."""
    best, longest = best_langevin, 2 * (1 - 1 / 1.02**2)
    step = best.settings["step_size"]
    assert 0.99 * longest < step <= longest * (1 + 1e-6)
    np.testing.assert_allclose(best.prediction.slowest, (2 - step) / step, rtol=1e-3)
    np.testing.assert_allclose(best.prediction.rounds_per_draw, (2 - step) / step, rtol=1e-3)
    assert "rounds per effective draw" in str(best) and "step_size=0.077" in str(best)


def test_the_report_compares_the_result_with_an_exact_kernel(best_langevin):
    figure = f"about {mala_rounds_per_draw(3):.2g} rounds per effective draw"
    report = str(best_langevin)
    assert f"fedmcmc.mala in whitened coordinates takes {figure}" in report
    assert "in 3 dimensions" in report and "fedmcmc.correct" in report
    assert mala_rounds_per_draw(3) < best_langevin.prediction.slowest / 10


@pytest.mark.parametrize("kernel", ["fa_hmc", "dsgld"])
def test_autocorrelation_times_are_sums_over_lags(kernel):
    if kernel == "fa_hmc":
        built = fedmcmc.fa_hmc(
            FEDERATION.posterior,
            step_size=0.05,
            num_integration_steps=3,
            num_local_steps=2,
            inverse_mass_matrix=METRIC,
        )
    else:
        built = fedmcmc.dsgld(
            FEDERATION.posterior, step_size=0.002, num_local_steps=3, metric=METRIC
        )
    prediction = fedmcmc.predict_bias(built, FEDERATION.data, EXACT)
    power, total = np.eye(3), np.zeros((3, 3))
    for _ in range(20_000):
        power = power @ prediction.on_position
        total = total + power @ prediction.covariance
    times = 1 + 2 * np.diag(total) / np.diag(prediction.covariance)
    np.testing.assert_allclose(prediction.rounds_per_draw, times, rtol=1e-8)
    assert prediction.slowest >= prediction.rounds_per_draw.max() * (1 - 1e-9)
    asymmetry = np.abs(prediction.on_position - prediction.on_position.T).max()
    assert asymmetry > 1e-3  # so that the transposed map fails


def test_a_run_has_the_predicted_number_of_effective_draws(white):
    kernel = fedmcmc.lsd(white.posterior, step_size=0.2)
    prediction = predict(kernel, white)
    samples = fedmcmc.sample(
        jax.random.key(0),
        kernel,
        FEDERATION.data,
        white.position,
        num_rounds=20_200,
        num_burnin=200,
        num_chains=8,
        progress=False,
    )
    mixing = fedmcmc.diagnostics.mixing(samples.draws[:, :4000])
    num_draws = 8 * 4000 / prediction.rounds_per_draw.max()
    np.testing.assert_allclose(mixing.ess_bulk.min(), num_draws, rtol=0.15)


def test_the_result_is_accepted_and_a_longer_step_is_not(white):
    kernel_fn = averaging(white)
    step_size = tune(kernel_fn, white).settings["step_size"]
    result, longer = (
        errors(predict(kernel_fn(step_size=factor * step_size), white)) for factor in (1, 1.05)
    )
    assert result[0] <= 0.05 and result[1] <= 0.02
    assert longer[0] > 0.05 or longer[1] > 0.02


@pytest.mark.slow
def test_the_result_is_the_best_of_the_table(white):
    grid = {"control_variate": [False, True]}
    kernel_fn = averaging(white)
    best = tune(kernel_fn, white, grid=grid)
    feasible = [entry for entry in best.table if entry["feasible"]]
    cheapest = min(feasible, key=lambda entry: entry["cost"])
    assert all(best.settings[name] == cheapest[name] for name in ("step_size", *grid))
    assert best.settings["control_variate"] is True
    assert isinstance(best.kernel, fedmcmc.FederatedKernel)
    bits = tune(kernel_fn, white, grid=grid, objective="bits")
    seconds = tune(kernel_fn, white, grid=grid, objective="seconds", latency=1.0)
    # Control variates need a second exchange per round.
    entry = next(e for e in seconds.table if e["control_variate"] and e["feasible"])
    np.testing.assert_allclose(entry["cost"], 2 * entry["rounds"])
    entry = next(e for e in bits.table if not e["control_variate"] and e["feasible"])
    np.testing.assert_allclose(entry["cost"], 2 * 4 * 3 * 32 * entry["rounds"])


@pytest.mark.slow
def test_relays_are_tuned(white):
    def kernel_fn(**settings):
        return fedmcmc.fsgld(white.posterior, white.surrogates, **settings)

    best = tune(kernel_fn, white, grid={"num_local_steps": [1, 10]})
    assert best.settings["num_local_steps"] == 10
    assert 0.06 < best.settings["step_size"] < 0.0778
    assert best.prediction.slowest < 4


def sparse(white):
    def kernel_fn(step_size):
        return fedmcmc.qlsd(white.posterior, step_size=step_size, compressor=fedmcmc.sparsify(0.9))

    return kernel_fn


def minibatches(white):
    def kernel_fn(step_size):
        return fedmcmc.lsd(
            white.posterior, step_size=step_size, batch_size=3, participation=fedmcmc.uniform(3)
        )

    return kernel_fn


def estimate_scores(white):
    return fedmcmc.surrogates.score_covariance(white.posterior, FEDERATION.data, white.position)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [sparse, minibatches])
def test_noise_of_cohorts_minibatches_and_compression_needs_shorter_steps(white, kernel):
    scores = estimate_scores(white)
    best = tune(kernel(white), white, scores=scores, max_spread=0.1)
    step_size = best.settings["step_size"]
    result, longer = (
        predict(kernel(white)(factor * step_size), white, scores=scores)
        for factor in (1, 1.05 if kernel is minibatches else 1.1)
    )
    assert errors(result)[0] <= 0.05 and errors(result)[1] <= 0.1
    assert errors(longer)[0] > 0.05 or errors(longer)[1] > 0.1
    without_noise = 2 * (1 - 1 / 1.1**2)  # the longest step of whole messages of all clients
    assert step_size < 0.5 * without_noise
    assert best.prediction.simulated == ("it compresses messages" if kernel is sparse else "")
    np.testing.assert_array_equal(best.prediction.covariance, result.covariance)


@pytest.mark.slow
def test_the_search_continues_below_its_first_step(white):
    best = tune(minibatches(white), white, scores=estimate_scores(white), max_spread=0.005)
    assert best.settings["step_size"] < 1e-3 / 1.01
    assert 0.004 < errors(best.prediction)[1] <= 0.005


@pytest.mark.parametrize("prior_precision", [0.0, 500.0])
def test_the_search_starts_below_the_stiffest_direction(prior_precision):
    """The rows of the precision sum to nearly zero, or the prior outweighs the rows."""
    posterior = fedmcmc.Posterior(
        lambda t: -0.5 * prior_precision * jnp.sum(t**2), lambda t, x: 0.0 * x[:, 0]
    )
    data = fedmcmc.FederatedData.from_clients([np.zeros((1, 1)), np.zeros((1, 1))])
    covariance = np.linalg.inv(np.array([[1.0, -0.99], [-0.99, 1.0]]))
    surrogates = fedmcmc.Gaussian.from_moments(np.zeros((2, 2)), np.stack([covariance] * 2))
    best = fedmcmc.tune(
        lambda step_size: fedmcmc.lsd(posterior, step_size=step_size), posterior, data, surrogates
    )
    largest = 2 * 1.99 + prior_precision
    longest = 2 * (1 - 1 / 1.02**2) / largest
    # Coordinates mix the stiff direction with softer directions, so the limit is less strict.
    assert 0.98 * longest < best.settings["step_size"] < 2 / largest
    assert best.table[0]["step_size"] < 0.01 * longest * 2


def run_metropolis(step_size, size, num=2**15, length=40, seed=0):
    """Return the acceptance of MALA on a standard normal, and its chains ``[length, num]``."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num, size))
    rates, chain = [], []
    for _ in range(length):
        y = (1 - step_size) * x + np.sqrt(2 * step_size) * rng.normal(size=x.shape)

        def gap(a, b):
            return np.sum((b - (1 - step_size) * a) ** 2, 1) / (4 * step_size)

        ratio = np.sum(x**2 - y**2, 1) / 2 + gap(x, y) - gap(y, x)
        is_accepted = np.log(rng.random(num)) < ratio
        rates.append(is_accepted.mean())
        x = np.where(is_accepted[:, None], y, x)
        chain.append(x[:, 0])
    return np.array(rates), np.stack(chain)


@pytest.mark.parametrize(
    ("step_size", "size"), [(1.0, 3), (0.6, 10), pytest.param(0.4, 30, marks=pytest.mark.slow)]
)
def test_metropolis_steps_have_the_acceptance_and_autocorrelation_of_the_formula(step_size, size):
    rates, chain = run_metropolis(step_size, size)
    rate = mala_acceptance(step_size, size)
    error = np.sqrt(rate * (1 - rate) / (len(rates) * chain.shape[1] / 10))
    assert abs(rates.mean() - rate) < 5.5 * error
    gain = (step_size + step_size**2 / 2) * mala_acceptance(step_size, size + 2)
    of_chains = (chain[:-1] * chain[1:]).mean(0)
    error = of_chains.std() / np.sqrt(len(of_chains))
    assert abs(of_chains.mean() - (1 - gain)) < 5.5 * error


@pytest.mark.parametrize("size", [3, pytest.param(30, marks=pytest.mark.slow)])
def test_rounds_per_draw_of_metropolis_steps_are_about_right(size):
    steps = np.geomspace(0.05, 2, 30)
    rates = np.array([mala_acceptance(step, size + 2) for step in steps])
    best = steps[np.argmax((steps + steps**2 / 2) * rates)]
    _, chain = run_metropolis(best, size, num=2**13, length=200)
    covariances = [np.mean(chain[: 200 - k] * chain[k:]) for k in range(60)]
    time = 2 * np.sum(covariances) / covariances[0] - 1
    assert 0.85 * time < mala_rounds_per_draw(size) < 1.03 * time


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(objective="time"), "objective must be one of"),
        (dict(objective="seconds"), "needs latency="),
        (dict(max_bias=1e-9, max_spread=1e-9), "No settings keep means within 1e-09 sd"),
    ],
)
def test_impossible_settings_raise(white, settings, message):
    with pytest.raises(ValueError, match=message):
        tune(averaging(white), white, **settings)


def test_a_function_that_builds_no_kernel_raises(white):
    with pytest.raises(TypeError, match="must return a FederatedKernel, got int"):
        tune(lambda step_size: 3, white)


@pytest.mark.parametrize(
    ("kernel_fn", "message"),
    [
        (lambda eta: None, r"calls kernel_fn\(step_size=\.\.\.\), but .*\(eta\): missing"),
        (lambda: None, "unexpected keyword argument 'step_size'"),
    ],
)
def test_a_function_without_a_step_size_raises(white, kernel_fn, message):
    with pytest.raises(TypeError, match=message):
        tune(kernel_fn, white)
