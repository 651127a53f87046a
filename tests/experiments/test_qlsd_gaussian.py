"""The Gaussian experiment: its law is that of independent oracles, and tiny runs agree with it."""

import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from tests.oracles import laws_quantised
from tests.oracles.federations import LIMIT
from tests.oracles.laws import location_noise

pytest.importorskip("hydra")

from experiments.qlsd import consistency, federations, gaussian, gaussian_figures, gaussian_law
from fedmcmc.compression import bound_bits

RNG = np.random.default_rng(12)


def test_the_quantisers_variance_is_that_of_all_its_values():
    vectors = RNG.normal(size=(7, 4))
    for num_levels in (1, 2, 7):
        expected = laws_quantised.variance(vectors, num_levels).sum(axis=1)
        found = gaussian_law.quantiser_variance(vectors, num_levels)
        np.testing.assert_allclose(found, expected, rtol=1e-10)


def test_the_error_of_an_average_is_the_sum_of_all_covariances():
    variance, contraction, num = 1.7, 0.6, np.array([1, 2, 3, 10, 50])
    lags = np.abs(np.subtract.outer(np.arange(50), np.arange(50)))
    covariance = variance * contraction**lags
    expected = [covariance[:n, :n].mean() for n in num]
    np.testing.assert_allclose(
        gaussian_law.average_error(variance, contraction, num), expected, rtol=1e-12
    )


def test_the_error_of_an_average_square_is_that_of_chains():
    variance, target, dim, contraction, num = 1.3, 1.0, 3, 0.7, 20
    x = RNG.normal(0, variance**0.5, size=(40_000, dim))
    total = np.zeros(len(x))
    for _ in range(num):
        total += (x**2).sum(1)
        noise = RNG.normal(size=x.shape)
        x = contraction * x + (variance * (1 - contraction**2)) ** 0.5 * noise
    squared = (total / num / (dim * target) - 1) ** 2
    found = gaussian_law.square_error(variance, target, dim, contraction, np.array([num]))[0]
    assert abs(squared.mean() - found) < 4 * squared.std() / len(squared) ** 0.5


def law(federation, **settings):
    defaults = dict(step_size=1 / federation.precision, batch_fraction=0.1, seed=0)
    return gaussian_law.stationary_variance(federation, **(defaults | settings))


def test_law_of_minibatches_without_compression():
    federation = federations.gaussian(5, 3)
    step_size, noise, data = 0.3 / federation.precision, 0.0, federation.data
    for first, size in zip(np.asarray(data.start), data.sizes, strict=True):
        rows = np.asarray(data.rows)[first : first + size].astype(np.float64)
        num = max(int(size) // 10, 1)
        noise = noise + location_noise(rows, np.eye(3), num, replace=True)
    contraction = (1 - 0.3) ** 2
    each = (2 * step_size + step_size**2 * np.diag(noise)) / (1 - contraction)
    found = law(federation, step_size=step_size, num_levels=None, centred=False)
    assert found == pytest.approx(each.mean(), rel=1e-6)
    centred = law(federation, step_size=step_size, num_levels=None, centred=True)
    assert centred == pytest.approx(2 * step_size / (1 - contraction), rel=1e-6)


def test_law_of_quantised_messages_is_that_of_a_loop():
    # All messages are along the same vector: their common distance from the mean.
    federation, num_levels, num_chains = federations.gaussian(3, 4), 1, 40_000
    sizes = np.asarray(federation.data.sizes, float)
    step_size, x = 0.5 / federation.precision, np.zeros((num_chains, 4))
    for _ in range(60):
        norm = np.linalg.norm(x, axis=1, keepdims=True)
        exact = num_levels * np.abs(x) / np.where(norm > 0, norm, 1)
        total = 0.0
        for size in sizes:
            level = np.floor(exact) + (RNG.random(x.shape) < exact - np.floor(exact))
            total = total + size * norm * np.sign(x) * level / num_levels
        x = x - step_size * total + np.sqrt(2 * step_size) * RNG.standard_normal(x.shape)
    square = (x**2).mean(axis=1)
    found = law(federation, step_size=step_size, num_levels=num_levels, centred=True)
    # The law takes the mean over directions from 4000 of them; compression makes a tenth of it.
    error = np.hypot(square.std() / np.sqrt(num_chains), 0.002 * found)
    assert abs(square.mean() - found) < 4 * error
    without = law(federation, step_size=step_size, num_levels=None, centred=True)
    assert found - without > 10 * error


def test_rows_of_clients_are_those_of_the_run():
    made = federations.gaussian(4, 3)
    metrics = {"sizes": np.asarray(made.data.sizes).tolist(), "dim": 3}
    rows, mean = gaussian_figures.rows_of_clients(metrics)
    assert [len(own) for own in rows] == metrics["sizes"]
    np.testing.assert_allclose(np.concatenate(rows).mean(axis=0), mean, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="clients of other sizes"):
        gaussian_figures.rows_of_clients(metrics | {"sizes": [5, 5, 5, 5]})


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    config = gaussian.Config(
        num_clients=3,
        dim=4,
        bits=(1, 3),
        num_rounds=400,
        num_burnin=100,
        num_chains=40,
        budget=2000.0,
        budget_levels=2,
        budget_factors=(1.0, 0.5),
    )
    return config, gaussian.run(config, tmp_path_factory.mktemp("gaussian"))


@pytest.mark.slow
def test_runs_agree_with_the_law(tiny):
    _, metrics = tiny
    rows = {row["algorithm"]: row for row in metrics["table"]}
    assert list(rows) == [
        "QLSD, 1 bits",
        "QLSD, 3 bits",
        "QLSD*, 1 bits",
        "QLSD*, 3 bits",
        "LSD*",
    ]
    assert abs(rows["LSD*"]["z (MSE)"]) < LIMIT
    for name in ("QLSD*, 1 bits", "QLSD*, 3 bits", "LSD*"):
        row = rows[name]
        assert row["variance"] == pytest.approx(row["variance, law"], rel=0.08)
        assert row["E |theta - mean|^2"] == pytest.approx(4 * row["variance"], rel=1e-6)
        # The quantizer's noise is in the law of the second moment.
        assert abs(row["E |theta - mean|^2"] - 4 * row["variance, law"]) < 6 * row["its s.e."]
    assert rows["LSD*"]["bits per message"] == 32 * 4
    assert rows["QLSD, 1 bits"]["bound, log2"] == pytest.approx(float(bound_bits(4, 2)), rel=1e-6)
    natural = float(bound_bits(4, 2, base="natural"))
    assert rows["QLSD, 1 bits"]["bound, ln (paper)"] == pytest.approx(natural, rel=1e-6)


@pytest.mark.slow
def test_a_budget_pays_for_as_many_rounds_as_real_messages_allow(tiny):
    config, metrics = tiny
    grid = metrics["budget"]
    assert grid["levels"].tolist() == [1, 10_000]
    # Between a norm, signs and places of what is not zero, and a number for each coordinate.
    assert (grid["bits"] > 32).all() and (grid["bits"] < 32 * 4 + 32).all()
    assert grid["rounds"].tolist() == [int(config.budget / bits) for bits in grid["bits"]]
    assert grid["error"].shape == (2, 2) and (grid["error"] > 0).all()
    assert (grid["error_sd"] < grid["error"]).all()


@pytest.mark.parametrize("algorithm", ["QLSD", "QLSD*", "QLSD++"])
@pytest.mark.parametrize(("participation", "num_levels"), [(1.0, 1), (0.5, 2)])
def test_law_of_memories_and_of_absent_clients_is_that_of_a_loop(
    algorithm, participation, num_levels
):
    """QLSD sends whole messages here: quantized ones have their noise at the mode in the law."""
    made, num_chains, rng = federations.gaussian(3, 4), 2000, np.random.default_rng(0)
    sizes = np.asarray(made.data.sizes, float)
    own = [np.asarray(made.data.client_rows(i), np.float64) for i in range(3)]
    settings = dict(step_size=0.3 / made.precision, seed=0, participation=participation)
    away, spread, rate = np.zeros((3, 4)), np.zeros((3, 4)), 0.0
    if algorithm == "QLSD":
        away = np.array([made.mean - rows.mean(axis=0) for rows in own])
        spread = np.array([rows.std(axis=0) for rows in own]) / np.sqrt(sizes[:, None])
    if algorithm == "QLSD++":
        rate = 1 / (1 + min(4 / num_levels**2, 2 / num_levels))
        found = gaussian_law.memory_variance(sizes, 4, num_levels=num_levels, **settings)
    else:
        found = gaussian_law.stationary_variance(
            made,
            batch_fraction=1.0,
            num_levels=None if algorithm == "QLSD" else num_levels,
            centred=algorithm == "QLSD*",
            **settings,
        )

    def sent(messages):
        norms = np.linalg.norm(messages, axis=-1, keepdims=True)
        scaled = num_levels * np.abs(messages) / norms
        whole = np.floor(scaled) + (rng.random(scaled.shape) < scaled % 1)
        code = messages if algorithm == "QLSD" else np.sign(messages) * norms * whole / num_levels
        return (rng.random((num_chains, 3, 1)) < participation) * code

    x, memories, seen = 1e-3 * rng.standard_normal((num_chains, 4)), np.zeros((3, 4)), []
    for number in range(600):
        chance = spread * rng.standard_normal((num_chains, 3, 4))
        code = sent(sizes[:, None] * (x[:, None] + away + chance) - memories)
        total = (memories + code / participation).sum(axis=1)
        memories = memories + rate * code
        x = x - settings["step_size"] * total
        x = x + (2 * settings["step_size"]) ** 0.5 * rng.standard_normal(x.shape)
        if number >= 100:
            seen.append((x**2).mean())
    assert found == pytest.approx(np.mean(seen), rel=0.01)


def test_the_bias_by_rows_and_clients_follows_from_the_noise_at_the_mode(tmp_path):
    """Full messages of single rows: the variance that the recursion has, by hand."""
    config = consistency.Config(num_clients=3, dim=4, levels=2**20, row_factors=(1, 4))
    found, size = consistency.squared_bias(config, "QLSD", consistency.Point())
    federation = federations.gaussian(3, 4)
    noise = fedmcmc.tuning.noise_at_mode(
        gaussian.posterior(),
        federation.data,
        jnp.asarray(federation.mean, jnp.float32),
        batch_size=1,
    )
    step, rows = 0.1 / federation.precision, federation.precision
    variance = (2 * step + step**2 * noise.minibatch / 4) / (1 - (1 - step * rows) ** 2)
    expected = 4 * (variance**0.5 - rows**-0.5) ** 2
    assert found == pytest.approx(expected, rel=1e-3) and size == pytest.approx(4 / rows)
    metrics = consistency.run(config, tmp_path)
    for name in ("QLSD*", "QLSD++"):
        assert consistency.power(metrics, "rows", name) == pytest.approx(-1, abs=1e-3)
        assert consistency.power(metrics, "spread", name) == pytest.approx(0, abs=1e-6)
    for name in ("batch", "participation"):
        assert consistency.power(metrics, name, "QLSD") < -0.3
    assert consistency.power(metrics, "rows", "QLSD") > -0.1
