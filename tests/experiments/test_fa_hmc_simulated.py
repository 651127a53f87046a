"""The simulated FA-HMC experiments: the closed form against the oracle, grids against `sample`."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.oracles.laws_averaging import Averaging

pytest.importorskip("hydra")

import fedmcmc
from experiments import models, output
from experiments.fa_hmc import (
    dimension,
    dimension_law,
    drift,
    error_curves,
    grids,
    local_steps,
    local_steps_law,
    logistic,
    quadratic_law,
    rounds_by_law,
    rounds_to_error,
)
from fedmcmc.metrics import gaussian_w2, marginal_error

CLIENTS = dimension_law.Scalars(
    np.array([1.0, 3.0, 2.0]), np.array([-1.0, 2.0, 0.5]), np.array([0.4, 0.35, 0.25])
)


def oracle(**settings):
    return Averaging(
        precisions=(CLIENTS.weights * CLIENTS.curvatures)[:, None, None],
        means=CLIENTS.means[:, None],
        prior_precision=np.zeros((1, 1)),
        prior_mean=np.zeros(1),
        weights=CLIENTS.weights,
        **settings,
    )


@pytest.mark.parametrize("rho", [0.0, 0.6, 1.0])
def test_the_scalar_law_is_that_of_the_oracle(rho):
    settings = dict(step_size=0.15, num_steps=4, num_local_steps=3, rho=rho)
    round_map = dimension_law.map_of_round(CLIENTS, **settings)
    expected = oracle(**settings).map_of(np.ones(3))
    np.testing.assert_allclose(round_map, [x.item() for x in expected], rtol=1e-10)
    curve = dimension_law.w2_curve(CLIENTS, round_map, start=2.5, num_rounds=6)
    mean, variance = dimension_law.target(CLIENTS)
    for found, law in zip(curve, oracle(**settings).rounds([2.5], 6), strict=True):
        exact = gaussian_w2(law.mean, law.covariance, np.array([mean]), np.array([[variance]]))
        assert found == pytest.approx(float(exact), rel=2e-5)


@pytest.mark.parametrize("num_steps", [1, 4])
def test_noise_of_gradients_enters_the_scalar_law_as_it_does_the_oracle(num_steps):
    settings = dict(step_size=0.15, num_steps=num_steps, num_local_steps=3, rho=0.6)
    noises = np.full((3, 1, 1), 1.7**2)
    expected = oracle(noises=noises, gradients="reuse", **settings).map_of(np.ones(3))
    found = dimension_law.map_of_round(CLIENTS, noise=1.7, **settings)
    np.testing.assert_allclose(found, [x.item() for x in expected], rtol=1e-10)
    settings["step_size"] = np.array([0.1, 0.15])
    both = dimension_law.map_of_round(CLIENTS, noise=1.7, **settings)
    np.testing.assert_allclose([x[1] for x in both], found, rtol=1e-12)


def test_the_variance_of_a_round_is_linear_in_rho_and_in_that_of_noise():
    def variance(rho, noise):
        settings = dict(step_size=0.15, num_steps=4, num_local_steps=3, rho=rho, noise=noise)
        return dimension_law.map_of_round(CLIENTS, **settings)[2]

    apart, shared = variance(0, 0), variance(1, 0)
    assert apart > shared
    assert variance(0.3, 0) == pytest.approx(0.7 * apart + 0.3 * shared)
    assert variance(1, 3) - shared == pytest.approx(9 * (variance(1, 1) - shared))


def test_the_first_chain_that_arrives_is_the_nearest_then():
    settings = dict(num_steps=4, num_local_steps=1, rho=1.0)
    steps = np.array([0.02, 0.2, 0.1])
    one = dimension_law.map_of_round(CLIENTS, step_size=steps, **settings)
    found = dimension_law.first_to(CLIENTS, lambda _: one, 0.2, start=3.0, most=500)
    each = [
        dimension_law.w2_curve(CLIENTS, tuple(x[i] for x in one), start=3.0, num_rounds=500)
        for i in range(3)
    ]
    rounds = [dimension_law.rounds_to(curve, 0.2) for curve in each]
    assert found == (rounds[1], 1) and rounds[1] < min(rounds[0], rounds[2])
    assert dimension_law.first_to(CLIENTS, lambda _: one, 0.2, start=3.0, most=1) is None


def test_rounds_are_counted_from_zero_and_unstable_steps_say_so():
    assert dimension_law.rounds_to(np.array([3.0, 2.0, 1.0]), 2.0) == 1
    assert dimension_law.rounds_to(np.array([3.0]), 2.0) is None
    with pytest.raises(ValueError, match=r"step_size must be below 1.155.*got 1.2"):
        dimension_law.map_of_round(CLIENTS, step_size=1.2, num_steps=1, num_local_steps=1, rho=1.0)


def test_the_dimension_experiment_agrees_with_its_law(tmp_path):
    config = dimension.Config(dims=(2, 5, 20), num_runs=300, num_local_steps=3)
    metrics = dimension.run(config, tmp_path)
    assert (tmp_path / "rounds.png").is_file()
    rounds = [row["rounds, exact law"] for row in metrics["table"]]
    assert rounds[0] < rounds[1] < rounds[2]
    for row in metrics["table"]:
        assert abs(row["rounds, measured"] - row["rounds, exact law"]) <= 5


def test_rounds_over_local_steps_agree_with_the_law(tmp_path):
    config = local_steps.Config(
        dim=10,
        num_clients=2,
        num_integration_steps=3,
        local_steps=(1, 3),
        simulated=3,
        num_runs=200,
        gradient_noise=5.0,
        noises=(0.0, 5.0),
        tolerances=(0.3, 0.1),
        num_step_sizes=80,
    )
    metrics = local_steps.run(config, tmp_path)
    assert (tmp_path / "local_steps.png").is_file()
    for row in metrics["table"]:
        for name in local_steps_law.CASES:
            assert abs(row[f"measured, {name}"] - row[name]) <= 1 + row[name] // 10
    for row in metrics["schedules"]:
        assert 0 < row["falling"] < row["constant"]
    assert (
        abs(metrics["schedules"][1]["measured, falling"] - metrics["schedules"][1]["falling"]) < 3
    )
    exact, noisy = metrics["noises"]
    for row in metrics["table"]:
        assert exact[f"T = {row['T']}"] == row["vanilla"]
        assert noisy[f"T = {row['T']}"] == row["noisy gradients"]


def test_errors_of_drifting_clients_are_those_of_the_law(tmp_path):
    config = drift.Config(
        dim=10,
        num_rows=200,
        scaled_steps=(0.3,),
        num_rounds=400,
        num_burnin=100,
        reference_draws=500,
        reference_warmup=200,
    )
    metrics = drift.run(config, tmp_path)
    assert (tmp_path / "drift.png").is_file()
    (row,) = metrics["table"]
    for name in drift.METHODS:
        assert 0.8 < row[f"predicted, {name}"] / row[name] < 1.25
    assert row["bias of means, FA-HMC, control variate"] < 1e-3
    assert row["bias of means, FA-HMC"] > 0.1


def test_above_the_dimensions_of_the_law_errors_are_measured_only(tmp_path, monkeypatch):
    monkeypatch.setattr(drift, "MOST", 2)
    config = drift.Config(
        dim=3,
        num_rows=60,
        num_clients=3,
        scaled_steps=(0.3, 0.5),
        num_rounds=40,
        num_burnin=10,
        num_chains=2,
        reference_draws=500,
        reference_warmup=200,
    )
    metrics = drift.run(config, tmp_path)
    assert (tmp_path / "drift.png").is_file() and not drift.has_law(metrics)


def test_a_grid_draws_what_sample_draws():
    data = fedmcmc.FederatedData.from_clients([np.ones((3, 2)), np.zeros((4, 2))])
    posterior = fedmcmc.Posterior(
        lambda t: -0.5 * jnp.sum(t**2), lambda t, x: -0.5 * jnp.sum((x - t) ** 2, axis=-1)
    )

    def kernel_of(step_size):
        return fedmcmc.fa_hmc(
            posterior, step_size=step_size, num_integration_steps=3, num_local_steps=2, rho=0.5
        )

    settings = dict(num_chains=2, num_rounds=7, num_burnin=3)
    key, start = jax.random.key(3), jnp.zeros(2)
    found = grids.run_grid(key, kernel_of, data, start, [0.1, 0.2], **settings)
    assert found.shape == (2, 2, 4, 2)
    for draws, step_size in zip(found, (0.1, 0.2), strict=True):
        expected = fedmcmc.sample(
            key, kernel_of(step_size), data, start, progress=False, **settings
        )
        np.testing.assert_allclose(draws, expected.draws, rtol=1e-5, atol=1e-5)
    stretches = grids.run_stretches(key, kernel_of(0.2), data, start, num_chains=2, num_rounds=3)
    parts = [next(stretches) for _ in range(3)]  # rounds 1 to 9
    together = np.concatenate(parts, axis=1)[:, 3:7]
    np.testing.assert_allclose(together, expected.draws, rtol=1e-5, atol=1e-5)


TINY = dict(
    dim=3,
    num_rows=40,
    num_clients=4,
    scaled_steps=(0.1, 0.3),
    num_rounds=60,
    num_burnin=20,
    leapfrogs=(2,),
    local_steps=(1, 3),
    local_leapfrog=2,
    local_gradients=200,
    local_rounds=40,
    threshold=0.4,
    reference_draws=500,
    reference_warmup=200,
)


@pytest.mark.slow
def test_the_logistic_experiment_runs(tmp_path):
    metrics = logistic.run(logistic.Config(**TINY), tmp_path)
    assert (tmp_path / "errors.png").is_file()
    assert len(metrics["table"]) == 2 and 0 < metrics["floor"] < 0.3
    assert all(0 < row["FA-HMC, exact"] < 1 for row in metrics["table"])
    assert all(0 < row["s.e. FA-LD, noisy"] < 0.3 for row in metrics["table"])


def test_a_lost_chain_has_no_error():
    reference = np.random.default_rng(0).normal(size=(500, 2))
    chains = np.zeros((2, 5, 2))
    chains[0, 3, 1] = np.inf
    assert np.isnan(logistic._error(chains, reference))


def test_standard_errors_of_marginal_errors_are_those_of_repetitions():
    rng = np.random.default_rng(0)
    reference = rng.normal(size=(4000, 1))
    # Chains off by a whole chain's shift each, so that a chain is what varies.
    runs = rng.normal(1.0, 0.3, size=(300, 8, 1, 1)) + 0.3 * rng.normal(size=(300, 8, 20, 1))
    found = np.array([logistic._with_deviation(chains, reference) for chains in runs])
    assert found[:, 1].mean() / found[:, 0].std() == pytest.approx(1.0, abs=0.15)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (dict(num_rows=3), "num_rows must be at least 4, got 3"),
        (dict(num_burnin=60), "num_burnin must leave some of num_rounds, got 60"),
        (dict(scaled_steps=()), "scaled_steps must be positive, at least one"),
        (dict(local_gradients=3), "local_gradients must suffice for a round of every T, got 3"),
        (dict(gradient_noise=0.0), "gradient_noise must be positive, got 0"),
    ],
)
def test_settings_out_of_range_say_so(changed, message):
    with pytest.raises(ValueError, match=message):
        logistic.Config(**(TINY | changed))
    with pytest.raises(ValueError, match="num_clients must be even and positive, got 3"):
        dimension.Config(num_clients=3)


def test_steps_beyond_a_clients_stability_are_refused(tmp_path):
    config = logistic.Config(**(TINY | dict(scaled_steps=(50.0,))))
    with pytest.raises(ValueError, match=r"scaled_steps must stay below .* where every client"):
        logistic.run(config, tmp_path)


def test_errors_of_the_draws_so_far_are_marginal_errors(monkeypatch):
    monkeypatch.setattr(error_curves, "CHUNK", 50)  # of several chunks
    rng = np.random.default_rng(0)
    reference = rng.normal(size=(500, 3)).astype(np.float32)
    draws = (0.3 + 1.2 * rng.normal(size=(2, 80, 3))).astype(np.float32)
    draws[:, 3, 0], draws[:, 5, 1] = reference[:, 0].max(), 40
    asked = []

    def stretches():
        for start in range(0, 80, 10):
            asked.append(start)
            yield draws[:, start : start + 10]

    curve = error_curves.error_curve(stretches(), reference, 75)
    assert curve.rounds[-1] == 75 and asked[-1] == 70
    asked.clear()
    enough = sorted(curve.errors)[len(curve.errors) // 2]
    ended = error_curves.error_curve(stretches(), reference, 75, enough)
    largest = np.c_[curve.errors, curve.without].max(axis=1)
    first = int(np.argmax(largest <= enough))
    assert ended.errors == curve.errors[: first + 1] and ended.rounds == curve.rounds[: first + 1]
    assert asked[-1] < curve.rounds[first] <= asked[-1] + 10  # no stretch in vain
    curve = error_curves.error_curve([draws], reference, 80)
    assert curve.rounds[0] == 2 and curve.rounds[-1] == 80 and len(curve.rounds) > 50
    for mark, error, without in zip(*curve, strict=True):
        chains = draws[:, mark // 2 : mark]
        for part, found in ((chains, error), (chains[1:], without[0]), (chains[:1], without[1])):
            expected = float(marginal_error(part.reshape(-1, 3), reference))
            assert found == pytest.approx(expected, abs=1e-6)
    draws[1, 20, 2] = np.nan
    marked = error_curves.error_curve([draws], reference, 80)
    lost = [m for m, e in zip(marked.rounds, marked.errors, strict=True) if np.isnan(e)]
    assert lost == [mark for mark in curve.rounds if mark // 2 <= 20 < mark]


def test_rounds_to_an_error_have_the_deviation_of_a_jackknife():
    rounds = [10, 20, 40]
    errors = [0.8, 0.4, 0.2]
    without = np.array([[0.8, 0.8, 0.8], [0.4, 0.4, 0.4], [0.1, 0.2, 0.4]])
    curve = error_curves.ErrorCurve(rounds, errors, without)
    found = error_curves.arrival(curve, 0.4)
    assert found == (20.0, 0.0)
    found = error_curves.arrival(curve, 0.2 * 2**0.5)  # where each falls as a power of rounds
    assert found.rounds == pytest.approx(20 * 2**0.5) and np.isnan(found.error)
    curve.without[-1, 2] = 0.2
    parts = np.array([20 * 2**0.25, 20 * 2**0.5, 20 * 2**0.5])
    deviation = np.sqrt(2 / 3 * ((parts - parts.mean()) ** 2).sum())
    assert error_curves.arrival(curve, 0.2 * 2**0.5).error == pytest.approx(deviation)
    assert error_curves.arrival(curve, 0.1) is None
    assert error_curves.arrival(curve, 1.0) == (10.0, 0.0)


def test_the_deviation_of_rounds_is_that_of_runs():
    """Over many repetitions: off by sqrt(2), it would fail."""
    rng = np.random.default_rng(0)
    reference = rng.normal(size=(4000, 2))
    found = []
    for _ in range(120):
        start = 4 * np.exp(-np.arange(60) / 10)[:, None]
        draws = start + rng.normal(size=(12, 60, 2)) + 0.3 * rng.normal(size=(12, 1, 2))
        found.append(error_curves.arrival(error_curves.error_curve([draws], reference, 60), 0.3))
    rounds, errors = np.array(found).T
    assert np.sqrt((errors**2).mean()) == pytest.approx(rounds.std(ddof=1), rel=0.25)


@pytest.mark.parametrize(("num_local", "length", "noise"), [(1, 3, 2.0), (2, 3, 2.0), (3, 2, 0.0)])
def test_the_law_over_local_steps_is_that_of_predict_bias(num_local, length, noise):
    """Off by sqrt(2) in the noise, or with the prior twice, it would fail."""
    clients = rounds_by_law.clients_of(rounds_by_law.Config(dim=6, num_rows=60, num_clients=4))
    settings = dict(step_size=0.2, num_steps=length, noise=noise)
    ((_, one),) = quadratic_law.local_rounds(clients, [num_local], **settings)
    data = logistic.federation(logistic.Config(dim=6, num_rows=60, num_clients=4))
    posterior = models.logistic(data, 1.0)
    mode = fedmcmc.surrogates.mode(posterior, data, jnp.zeros(6)).position
    kernel = fedmcmc.fa_hmc(
        posterior,
        step_size=0.2,
        num_integration_steps=length,
        num_local_steps=num_local,
        gradient_noise=noise,
        gradients="reuse",
    )
    expected = fedmcmc.predict_bias(kernel, data, fedmcmc.surrogates.taylor(posterior, data, mode))
    assert not expected.simulated
    exact = quadratic_law.stationary(one.with_exact_gradients())[1]
    assert (exact < quadratic_law.stationary(one)[1]).all() == (noise > 0)
    mean, sd = quadratic_law.stationary(one)
    np.testing.assert_allclose(mean, expected.mean, atol=1e-6)
    np.testing.assert_allclose(sd, np.sqrt(np.diag(expected.covariance)), atol=1e-6)
    np.testing.assert_allclose(one.on_position, expected.on_position, atol=1e-6)
    late = next(itertools.islice(quadratic_law.moments(one, np.zeros(6)), 300, None))
    np.testing.assert_allclose(late, (mean, sd), atol=1e-6)
    np.testing.assert_allclose(quadratic_law.target(clients)[0], mode, atol=1e-6)


def test_rounds_by_the_law_are_those_of_many_chains(tmp_path):
    """The error of 4000 simulated chains comes to the thresholds in the same rounds."""
    config = rounds_by_law.Config(
        dim=6,
        num_rows=60,
        num_clients=4,
        gradient_noise=1.0,
        local_steps=(1, 4),
        local_step_size=0.1,
        local_leapfrog=3,
        thresholds=(0.3, 0.15, 0.1),
        threshold=0.15,
    )
    metrics = output.plain(rounds_by_law.run(config, tmp_path))
    assert (tmp_path / "law.png").is_file()
    clients = rounds_by_law.clients_of(config)
    settings = dict(step_size=metrics["step_size"], num_steps=3, noise=1.0)
    rounds = dict(quadratic_law.local_rounds(clients, (1, 4), **settings))
    rng, (mean, covariance) = np.random.default_rng(0), quadratic_law.target(clients)
    reference = rng.multivariate_normal(mean, covariance, 40_000)
    for line in metrics["local_steps"]:
        one = rounds[line["T"]]
        theta, draws = np.zeros((4000, 6)), []
        for _ in range(line["rounds run"]):
            noise = rng.multivariate_normal(np.zeros(6), one.noise, 4000)
            theta = theta @ one.on_position.T + one.shift + noise
            draws.append(theta)
        curve = error_curves.error_curve([np.stack(draws, 1)], reference, line["rounds run"])
        # At the same marks; the law's curve has the first round, too.
        law = dict(line["curve"][1:])
        shared = [at for at, num in enumerate(curve.rounds) if num in law]
        expected = [law[curve.rounds[at]] for at in shared]
        assert len(shared) > 10
        np.testing.assert_allclose(np.array(curve.errors)[shared], expected, atol=0.012)
    assert len(metrics["table"]) == 2


@pytest.mark.slow
def test_rounds_to_an_error_run(tmp_path):
    tiny = {name: TINY[name] for name in TINY if hasattr(rounds_to_error.Config, name)}
    metrics = output.plain(
        rounds_to_error.run(rounds_to_error.Config(**tiny | {"threshold": 0.8}), tmp_path)
    )
    assert (tmp_path / "rounds.png").is_file() and len(metrics["table"]) == 2
