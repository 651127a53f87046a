"""Settings found by law: the largest step that is accepted, and the best of a grid."""

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


def tuned(kernel_fn, white, **settings):
    return fedmcmc.tune(kernel_fn, white.posterior, FEDERATION.data, white.surrogates, **settings)


def fa_hmc(white, **fixed):
    def kernel_fn(**settings):
        return fedmcmc.fa_hmc(white.posterior, **(fixed | settings))

    return kernel_fn


def test_langevin_steps_are_as_long_as_two_percent_allow(white):
    """In whitened coordinates sds are ``1 / sqrt(1 - h / 2)``, and a draw takes ``(2 - h) / h``."""
    best = tuned(lambda step_size: fedmcmc.lsd(white.posterior, step_size=step_size), white)
    wanted = 2 * (1 - 1 / 1.02**2)
    step = best.settings["step_size"]
    assert 0.99 * wanted < step <= wanted * (1 + 1e-6)
    np.testing.assert_allclose(best.prediction.slowest, (2 - step) / step, rtol=1e-3)
    np.testing.assert_allclose(best.prediction.rounds_per_draw, (2 - step) / step, rtol=1e-3)
    assert "rounds per effective draw" in str(best) and "step_size=0.077" in str(best)


@pytest.mark.parametrize("kernel", ["fa_hmc", "dsgld"])
def test_autocorrelation_times_are_sums_over_lags(kernel):
    built = {
        "fa_hmc": lambda: fedmcmc.fa_hmc(
            FEDERATION.posterior,
            step_size=0.05,
            num_integration_steps=3,
            num_local_steps=2,
            inverse_mass_matrix=METRIC,
        ),
        "dsgld": lambda: fedmcmc.dsgld(
            FEDERATION.posterior, step_size=0.002, num_local_steps=3, metric=METRIC
        ),
    }[kernel]()
    told = fedmcmc.predict_bias(built, FEDERATION.data, EXACT)
    power, total = np.eye(3), np.zeros((3, 3))
    for _ in range(20_000):
        power = power @ told.on_position
        total = total + power @ told.covariance
    variances = np.diag(told.covariance)
    np.testing.assert_allclose(told.rounds_per_draw, 1 + 2 * np.diag(total) / variances, rtol=1e-8)
    assert told.slowest >= told.rounds_per_draw.max() * (1 - 1e-9)
    assert np.abs(told.on_position - told.on_position.T).max() > 1e-3  # the side matters


def test_a_run_has_the_effective_draws_that_were_predicted(white):
    kernel = fedmcmc.lsd(white.posterior, step_size=0.2)
    told = fedmcmc.predict_bias(kernel, FEDERATION.data, white.surrogates)
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
    found = fedmcmc.diagnostics.mixing(samples.draws[:, :4000])
    draws = 8 * 4000 / told.rounds_per_draw.max()
    np.testing.assert_allclose(found.ess_bulk.min(), draws, rtol=0.15)


def test_what_is_found_is_accepted_and_a_longer_step_is_not(white):
    kernel_fn = fa_hmc(white, num_integration_steps=5, num_local_steps=2)
    best = tuned(kernel_fn, white)
    at, above = (
        fedmcmc.predict_bias(
            kernel_fn(step_size=factor * best.settings["step_size"]),
            FEDERATION.data,
            white.surrogates,
        )
        for factor in (1, 1.05)
    )

    def accepted(told):
        return np.abs(told.bias).max() <= 0.05 and np.abs(told.spread - 1).max() <= 0.02

    assert accepted(at) and not accepted(above)


@pytest.mark.slow
def test_the_best_of_a_grid_is_that_of_all_that_was_tried(white):
    grid = {"control_variate": [False, True]}
    kernel_fn = fa_hmc(white, num_integration_steps=5, num_local_steps=2)
    best = tuned(kernel_fn, white, grid=grid)
    accepted = [entry for entry in best.table if entry["feasible"]]
    least = min(accepted, key=lambda entry: entry["cost"])
    assert all(best.settings[name] == least[name] for name in ("step_size", *grid))
    assert best.settings["control_variate"] is True
    assert isinstance(best.kernel, fedmcmc.FederatedKernel)
    bits = tuned(kernel_fn, white, grid=grid, objective="bits")
    seconds = tuned(kernel_fn, white, grid=grid, objective="seconds", latency=1.0)
    # Control variates take an exchange more per round.
    entry = next(e for e in seconds.table if e["control_variate"] and e["feasible"])
    np.testing.assert_allclose(entry["cost"], 2 * entry["rounds"])
    entry = next(e for e in bits.table if not e["control_variate"] and e["feasible"])
    np.testing.assert_allclose(entry["cost"], 2 * 4 * 3 * 32 * entry["rounds"])


@pytest.mark.slow
def test_relays_are_tuned(white):
    def kernel_fn(step_size, num_local_steps):
        return fedmcmc.fsgld(
            white.posterior,
            white.surrogates,
            step_size=step_size,
            num_local_steps=num_local_steps,
        )

    best = tuned(kernel_fn, white, grid={"num_local_steps": [1, 10]})
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


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [sparse, minibatches])
def test_cohorts_minibatches_and_compression_are_tuned(white, kernel):
    """Their noise needs shorter steps than whole messages of everyone."""
    scores = fedmcmc.surrogates.score_covariance(white.posterior, FEDERATION.data, white.position)
    best = tuned(kernel(white), white, scores=scores, max_spread=0.1)
    below, above = (
        fedmcmc.predict_bias(
            kernel(white)(factor * best.settings["step_size"]),
            FEDERATION.data,
            white.surrogates,
            scores=scores,
        )
        for factor in (1, 1.05 if kernel is minibatches else 1.1)
    )
    assert np.abs(below.bias).max() <= 0.05 and np.abs(below.spread - 1).max() <= 0.1
    assert np.abs(above.bias).max() > 0.05 or np.abs(above.spread - 1).max() > 0.1
    longest = 2 * (1 - 1 / 1.1**2)  # where nothing but the step itself makes sds too wide
    assert best.settings["step_size"] < 0.5 * longest
    assert best.prediction.simulated == ("it compresses messages" if kernel is sparse else "")
    np.testing.assert_array_equal(best.prediction.covariance, below.covariance)


@pytest.mark.slow
def test_noise_that_allows_only_tiny_steps(white):
    """The search goes down where already its first step, far below Langevin's, is too long."""
    scores = fedmcmc.surrogates.score_covariance(white.posterior, FEDERATION.data, white.position)
    best = tuned(minibatches(white), white, scores=scores, max_spread=0.005)
    assert best.settings["step_size"] < 1e-3 / 1.01
    assert 0.004 < np.abs(best.prediction.spread - 1).max() <= 0.005


def metropolis(step_size, size, num=2**15, length=40, seed=0):
    """Return the acceptance of MALA on a standard normal, and its chains ``[length, num]``."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num, size))
    accepted, first = [], []
    for _ in range(length):
        y = (1 - step_size) * x + np.sqrt(2 * step_size) * rng.normal(size=x.shape)

        def gap(a, b):
            return np.sum((b - (1 - step_size) * a) ** 2, 1) / (4 * step_size)

        ratio = np.sum(x**2 - y**2, 1) / 2 + gap(x, y) - gap(y, x)
        take = np.log(rng.random(num)) < ratio
        accepted.append(take.mean())
        x = np.where(take[:, None], y, x)
        first.append(x[:, 0])
    return np.array(accepted), np.stack(first)


@pytest.mark.parametrize(
    ("step_size", "size"), [(1.0, 3), (0.6, 10), pytest.param(0.4, 30, marks=pytest.mark.slow)]
)
def test_what_an_accepted_step_is_worth(step_size, size):
    """Acceptance and autocorrelation at lag one in closed form, against chains in NumPy."""
    accepted, chain = metropolis(step_size, size)
    rate = mala_acceptance(step_size, size)
    error = np.sqrt(rate * (1 - rate) / (len(accepted) * chain.shape[1] / 10))
    assert abs(accepted.mean() - rate) < 5.5 * error
    products = chain[:-1] * chain[1:]
    gain = (step_size + step_size**2 / 2) * mala_acceptance(step_size, size + 2)
    of_chains = products.mean(0)
    error = of_chains.std() / np.sqrt(len(of_chains))
    assert abs(of_chains.mean() - (1 - gain)) < 5.5 * error


@pytest.mark.parametrize("size", [3, pytest.param(30, marks=pytest.mark.slow)])
def test_rounds_per_draw_of_metropolis_steps_are_about_right(size):
    steps = np.geomspace(0.05, 2, 30)
    accepted = np.array([mala_acceptance(step, size + 2) for step in steps])
    best = steps[np.argmax((steps + steps**2 / 2) * accepted)]
    _, chain = metropolis(best, size, num=2**13, length=200)
    covariances = [np.mean(chain[: 200 - k] * chain[k:]) for k in range(60)]
    time = 2 * np.sum(covariances) / covariances[0] - 1
    told = mala_rounds_per_draw(size)
    assert 0.85 * time < told < 1.03 * time


def test_the_exact_alternative_stands_beside_what_is_tuned(white):
    best = tuned(lambda step_size: fedmcmc.lsd(white.posterior, step_size=step_size), white)
    figure = f"about {mala_rounds_per_draw(3):.2g} rounds per effective draw"
    assert f"fedmcmc.mala in whitened coordinates takes {figure}" in str(best)
    assert "in 3 dimensions" in str(best) and "fedmcmc.correct" in str(best)
    assert mala_rounds_per_draw(3) < best.prediction.slowest / 10


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(objective="time"), "objective must be one of"),
        (dict(objective="seconds"), "needs latency="),
        (dict(max_bias=1e-9, max_spread=1e-9), "No settings keep means within 1e-09 sd"),
    ],
)
def test_what_cannot_be_is_said(white, settings, words):
    kernel_fn = fa_hmc(white, num_integration_steps=5, num_local_steps=5)
    with pytest.raises(ValueError, match=words):
        tuned(kernel_fn, white, **settings)


def test_a_function_that_builds_no_kernel_is_named(white):
    with pytest.raises(TypeError, match="must return a FederatedKernel, got int"):
        tuned(lambda step_size: 3, white)


@pytest.mark.parametrize("prior_precision", [0.0, 500.0])
def test_the_search_begins_below_the_stiffest_direction(prior_precision):
    """Of a precision whose rows sum to nearly nothing, and of a prior that outweighs the rows."""
    posterior = fedmcmc.Posterior(
        lambda t: -0.5 * prior_precision * jnp.sum(t**2), lambda t, x: 0.0 * x[:, 0]
    )
    data = fedmcmc.FederatedData.from_clients([np.zeros((1, 1)), np.zeros((1, 1))])
    precision = np.array([[1.0, -0.99], [-0.99, 1.0]])
    surrogates = fedmcmc.Gaussian.from_moments(
        np.zeros((2, 2)), np.stack([np.linalg.inv(precision)] * 2)
    )
    best = fedmcmc.tune(
        lambda step_size: fedmcmc.lsd(posterior, step_size=step_size), posterior, data, surrogates
    )
    largest = 2 * 1.99 + prior_precision
    wanted = 2 * (1 - 1 / 1.02**2) / largest
    # Coordinates mix the stiff direction with softer ones, so theirs are a little less strict.
    assert 0.98 * wanted < best.settings["step_size"] < 2 / largest
    assert best.table[0]["step_size"] < 0.01 * wanted * 2
