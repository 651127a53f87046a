"""Tests of questions: complete sums of log likelihoods at many points, or void rounds."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc.data import CHUNK_ROWS
from fedmcmc.gaussian import defensive
from fedmcmc.kernels import LOG_ZERO_THRESHOLD, Dithered, PointRecipe, Points, evaluations
from fedmcmc.kernels._evaluations import compensated_sum, split_sum
from fedmcmc.runs import SimulatedConsortium, as_consortium
from fedmcmc.types import as_functions
from tests.contracts.model import DATA, KEY, POSTERIOR, loglikelihood
from tests.support.deployed import Server
from tests.support.lanes import fast_and_slow

CENTRE = jnp.array([0.3, -0.2, 0.5])
POINTS = CENTRE + jax.random.normal(jax.random.key(1), (20, 3))


def pooled(points, data=DATA):
    rows = jax.tree.map(np.asarray, data.rows)
    return np.array([float(jnp.sum(loglikelihood(point, rows))) for point in points])


def test_values_and_gradients_equal_sums_over_pooled_rows():
    reply = as_consortium(DATA).ask(evaluations(POSTERIOR, gradients=True), Points(POINTS, CENTRE))
    answer = reply.value
    at_centre = pooled([CENTRE])[0]
    np.testing.assert_allclose(answer.value, pooled(POINTS) - at_centre, rtol=1e-5, atol=1e-5)
    total = jax.vmap(jax.grad(lambda x: jnp.sum(loglikelihood(x, DATA.rows))))(POINTS)
    np.testing.assert_allclose(answer.gradient, total, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.sum(answer.at_centre.value), at_centre, rtol=1e-6)
    assert (reply.rounds, int(answer.invalid.value)) == (1, 0)
    # Up: a value and three gradients per point, three parts, a count, a number of invalid points.
    assert reply.bits_up == 3 * 32 * (20 * 4 + 3 + 1 + 1)
    assert reply.bits_down == 3 * 32 * (20 * 3 + 3)


def test_batches_of_clients_and_points_change_nothing(monkeypatch):
    monkeypatch.setattr("fedmcmc.kernels._evaluations.POINTS_BUDGET", 100)
    monkeypatch.setattr("fedmcmc.runs._consortium.CLIENTS_AT_A_TIME", 2)
    reply = SimulatedConsortium(DATA).ask(evaluations(POSTERIOR), Points(POINTS, CENTRE))
    expected = pooled(POINTS) - pooled([CENTRE])[0]
    np.testing.assert_allclose(reply.value.value, expected, rtol=1e-5, atol=1e-5)


def test_a_client_reads_only_its_own_chunks():
    chunks = []

    def loglikelihood(theta, rows):
        jax.debug.callback(chunks.append, rows[0])
        return -0.5 * (rows - theta) ** 2

    sizes = (2 * CHUNK_ROWS + 1, 10, 20)
    data = fedmcmc.FederatedData.from_clients(
        [np.full(n, i, np.float32) for i, n in enumerate(sizes)]
    )
    posterior = fedmcmc.Posterior(lambda theta: -0.5 * theta**2, loglikelihood)
    reply = SimulatedConsortium(data).ask(evaluations(posterior), Points(jnp.ones(1)))
    jax.effects_barrier()
    assert sorted(map(int, chunks)) == [0, 0, 0, 1, 2]
    np.testing.assert_allclose(reply.value.value, [-0.5 * (sizes[0] + sizes[2])])


def test_a_recipe_gives_the_points_that_the_server_draws():
    words = jax.random.bits(KEY, (2,), jnp.uint32)
    recipe = PointRecipe(words, defensive(np.asarray(CENTRE), np.eye(3)), CENTRE, 50)
    consortium = SimulatedConsortium(DATA)
    by_recipe = consortium.ask(evaluations(POSTERIOR), recipe)
    points = consortium.ask(evaluations(POSTERIOR), Points(recipe.draw(), CENTRE))
    np.testing.assert_allclose(by_recipe.value.value, points.value.value, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(by_recipe.value.checksum.value, 3 * recipe.checksum())
    assert by_recipe.bits_down < points.bits_down
    with jax.default_prng_impl("rbg"):  # clients may have set another generator
        again = jax.jit(lambda r: r.draw())(recipe)
    np.testing.assert_allclose(again, recipe.draw(), rtol=1e-5)


def test_float32_keeps_the_digits_of_differences_and_of_the_value_at_the_centre():
    """With 200,000 rows a difference of sums has an error of a thousandth of a nat or more."""
    x = np.random.default_rng(0).normal(3.0, 1.0, 200_000).astype(np.float32)
    posterior = fedmcmc.Posterior(
        lambda theta: -0.5 * theta**2, lambda theta, rows: -0.5 * (rows - theta) ** 2
    )
    data = fedmcmc.FederatedData.from_clients([x[:150_000], x[150_000:]])
    centre, point = np.float32(x.mean()), np.float32(x.mean()) + np.float32(0.0103)
    answer = as_consortium(data).ask(
        evaluations(posterior), Points(jnp.asarray([point]), jnp.asarray(centre))
    )
    exact = x.astype(np.float64)
    total, total_at_centre = (
        -0.5 * ((exact - np.float64(theta)) ** 2).sum() for theta in (point, centre)
    )
    difference = total - total_at_centre
    assert abs(difference) > 10
    assert abs(float(answer.value.value[0]) - difference) < 1e-4
    naive = jnp.sum(-0.5 * (x - point) ** 2) - jnp.sum(-0.5 * (x - centre) ** 2)
    assert abs(float(naive) - difference) > 1e-3
    at_centre = np.asarray(answer.value.at_centre.value, np.float64).sum()
    assert abs(at_centre - total_at_centre) < 1e-2  # of 100,000 nats: rounding of single rows


def test_a_compensated_sum_loses_nothing():
    terms = jax.random.normal(KEY, (1000,)) * 10.0 ** jax.random.randint(KEY, (1000,), -6, 6)
    high, low = jax.jit(compensated_sum)(terms)
    exact = np.asarray(terms, np.float64).sum()
    assert abs(np.float64(high) + np.float64(low) - exact) < 1e-6 * abs(exact) * 1e-4
    parts = np.asarray(split_sum(high, low), np.float64)
    assert abs(parts.sum() - exact) < 1e-6
    assert parts[0] % 256 == 0 and (parts[1] * 256) % 1 == 0


def test_a_density_of_zero_is_an_answer():
    posterior = fedmcmc.Posterior(
        lambda theta: -0.5 * jnp.sum(theta**2),
        lambda theta, rows: jnp.where(theta[0] > 0, rows["x"][:, 0] * theta[0], -jnp.inf),
    )
    consortium, points = as_consortium(DATA), Points(jnp.array([[-1.0], [2.0]]), jnp.ones(1))
    answer = consortium.ask(evaluations(posterior, gradients=True), points).value
    assert float(answer.value[0]) < LOG_ZERO_THRESHOLD and np.isfinite(answer.value).all()
    assert np.isfinite(answer.gradient).all() and not answer.gradient[0].any()
    assert int(answer.invalid.value) == 0
    broken = posterior._replace(
        loglikelihood_fn=lambda theta, rows: jnp.log(theta[0]) * rows["x"][:, 0]
    )
    answer = consortium.ask(evaluations(broken), points).value
    assert int(answer.invalid.value) == 3  # at one point, of each client


def test_a_round_without_a_client_is_void_and_repeated():
    consortium = SimulatedConsortium(
        DATA, transform=lambda kernel: fedmcmc.faults(kernel, drop=0.1, nan=0.05, rescale=False)
    )
    content, question = Points(POINTS[:1], CENTRE), evaluations(POSTERIOR)
    replies = [consortium.ask(question, content) for _ in range(300)]
    expected = pooled(POINTS[:1]) - pooled([CENTRE])[0]
    values = np.stack([reply.value.value for reply in replies])
    np.testing.assert_allclose(values, np.tile(expected, (300, 1)), rtol=1e-5, atol=1e-5)
    tries = sum(reply.rounds for reply in replies)
    complete = (0.9 * 0.95) ** 3
    assert abs(300 / tries - complete) < 5.5 * np.sqrt(complete * (1 - complete) / tries)


def test_clients_that_never_answer_are_an_error(monkeypatch):
    monkeypatch.setattr("fedmcmc.runs._consortium.MAX_TRIES", 3)
    consortium = SimulatedConsortium(
        DATA, transform=lambda kernel: fedmcmc.faults(kernel, drop=0.999, rescale=False)
    )
    with pytest.raises(
        RuntimeError, match="At least one of the 3 clients was missing in each of 3 rounds"
    ):
        consortium.ask(evaluations(POSTERIOR), Points(POINTS[:1], CENTRE))


def test_biased_settings_raise():
    question = evaluations(POSTERIOR)
    with pytest.raises(ValueError, match="late: this kernel needs a client's message"):
        fedmcmc.faults(question, late=0.1)
    for biased in (fedmcmc.top_k(0.5), fedmcmc.memory(fedmcmc.quantize(16))):
        with pytest.raises(ValueError, match="unbiased compressor without memory"):
            fedmcmc.compress(question, biased)
    fedmcmc.compress(question, fedmcmc.quantize(256))
    with pytest.raises(ValueError, match="loglikelihood_fn does not take"):
        as_consortium(DATA).ask(question, Points(jnp.ones((2, 9, 9)), jnp.ones((9, 9))))
    with pytest.raises(TypeError, match="a consortium of clients, got list"):
        as_consortium([1])


@pytest.mark.parametrize("content", fast_and_slow(["points", "recipe", "dithered"], ["recipe"]))
def test_a_deployed_round_equals_a_simulated_round(content):
    """Each client has only its own rows, and sends bytes."""
    words, points = jax.random.bits(KEY, (2,), jnp.uint32), Points(POINTS, CENTRE)
    value = {
        "points": points,
        "recipe": PointRecipe(words, defensive(np.asarray(CENTRE), np.eye(3)), CENTRE, 20),
        "dithered": Dithered(points, words, jnp.asarray(0.5)),
    }[content]
    question = as_functions(evaluations(POSTERIOR, gradients=content != "dithered"))
    state, bits = Server(question, DATA, KEY, value).round()
    answered = question.draw(KEY, state)
    simulated = as_consortium(DATA).ask(question, value)
    assert bool(answered.whole)
    assert bits.tolist() == [simulated.bits_up, simulated.bits_down]
    chex.assert_trees_all_close(answered.value, simulated.value, rtol=1e-5, atol=1e-5)
