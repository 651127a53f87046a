"""Accumulators of a run, against the same quantities computed from its draws."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc import metrics, streaming

POSTERIOR = fedmcmc.Posterior(
    lambda theta: -0.5 * jnp.sum(theta["a"] ** 2) - 0.5 * theta["b"] ** 2,
    lambda theta, x: -0.5 * jnp.sum((x - theta["a"] - theta["b"]) ** 2, axis=-1),
)
DATA = fedmcmc.FederatedData.from_clients(
    [np.random.default_rng(i).normal(size=(3 + i, 2)).astype(np.float32) for i in range(3)]
)
START = {"a": jnp.zeros(2), "b": jnp.zeros(())}
NUM_DRAWS = 36
SIZES = [2, 8, 36, 64]
X = np.random.default_rng(5).normal(size=(40, 2)).astype(np.float32)
LABELS = np.random.default_rng(6).integers(0, 2, 40)


def probabilities(theta, x):
    score = x @ theta["a"] + theta["b"]
    return jnp.stack([jax.nn.sigmoid(score), jax.nn.sigmoid(-score)], axis=1)


def run(streams=None, keep_draws=True, draws_to=None, **settings):
    defaults = dict(num_rounds=130, num_burnin=20, thinning=3, num_chains=2, progress=False)
    kernel = fedmcmc.lsd(POSTERIOR, step_size=0.02)
    record = fedmcmc.Record(streams or {}, keep_draws, draws_to)
    return fedmcmc.sample(
        jax.random.key(3), kernel, DATA, START, record=record, **(defaults | settings)
    )


STREAMS = {
    "plain": streaming.moments(),
    "dense": streaming.moments(structure="dense"),
    "odds": streaming.moments(lambda theta: jnp.exp(theta["b"])),
    "reservoir": streaming.reservoir(5),
    "predictive": streaming.predictive(probabilities, X),
    "calibration": streaming.calibration(probabilities, X, LABELS, 10),
} | {f"thinned {size}": streaming.thinned(size) for size in SIZES}


@pytest.fixture(scope="module")
def samples():
    """Two chains with all draws and all accumulators."""
    return run(STREAMS)


def test_moments_are_moments_of_the_draws(samples):
    dense, plain = samples.streams["dense"], samples.streams["plain"]
    for moments in (plain, dense):
        assert moments.num_draws == samples.num_draws == NUM_DRAWS
        for key in "ab":
            draws = np.asarray(samples.draws[key], np.float64)
            np.testing.assert_allclose(moments.mean[key], draws.mean(axis=1), rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(moments.variance[key], draws.var(axis=1, ddof=1), rtol=1e-4)
    flat = np.concatenate([samples.draws["a"], samples.draws["b"][..., None]], axis=2)
    for chain in range(2):
        covariance = np.cov(flat[chain].T)
        np.testing.assert_allclose(dense.covariance[chain], covariance, rtol=1e-4, atol=1e-6)
    pooled, together = streaming.pool(dense), flat.reshape(-1, 3).astype(np.float64)
    assert pooled.num_draws == 2 * NUM_DRAWS
    np.testing.assert_allclose(pooled.mean["a"], together.mean(axis=0)[:2], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(pooled.variance["b"], together.var(axis=0, ddof=1)[2], rtol=1e-4)
    np.testing.assert_allclose(pooled.covariance, np.cov(together.T), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(streaming.pool(plain).variance["a"], pooled.variance["a"], rtol=1e-5)
    odds = np.exp(samples.draws["b"].astype(np.float64)).mean(axis=1)
    np.testing.assert_allclose(samples.streams["odds"].mean, odds, rtol=1e-5)


def test_moments_far_from_zero_keep_their_digits():
    """At a mean of 10,000 sds a sum of squares in float32 has no digit of the variance left."""
    moments = streaming.moments()
    values = (1e4 + np.random.default_rng(0).normal(size=20_000)).astype(np.float32)

    def body(i, state):
        return moments.update(jax.random.key(0), i, jnp.asarray(values)[i], state)

    state = jax.lax.fori_loop(0, len(values), body, moments.init(jnp.zeros(())))
    result = moments.result(jax.tree.map(lambda leaf: np.asarray(leaf)[None], state), len(values))
    exact = values.astype(np.float64)
    np.testing.assert_allclose(result.variance[0], exact.var(ddof=1), rtol=1e-4)
    np.testing.assert_allclose(result.mean[0], exact.mean(), rtol=1e-7)


@pytest.mark.slow
def test_streams_without_draws_are_the_same():
    streams = {"m": streaming.moments(), "r": streaming.reservoir(8), "t": streaming.thinned(8)}
    with_draws, without = run(streams), run(streams, keep_draws=False)
    assert without.num_draws == 0 and without.draws["a"].shape == (2, 0, 2)
    chex.assert_trees_all_close(with_draws.streams, without.streams, rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(with_draws.totals["bits_up"], without.totals["bits_up"])


@pytest.mark.parametrize("size", SIZES)
def test_thinned_draws_are_evenly_spaced(size, samples):
    thinned = samples.streams[f"thinned {size}"]
    indices = thinned.indices
    assert thinned.num_seen == NUM_DRAWS and min(size, 36) / 2 <= indices.shape[1] <= size
    step = np.diff(indices[0])
    assert indices[0, 0] == 0 and (step == step[0]).all() and step[0] & (step[0] - 1) == 0
    assert indices[0, -1] + step[0] >= NUM_DRAWS
    for chain in range(2):
        draws = samples.draws["a"][chain, indices[chain]]
        np.testing.assert_array_equal(thinned.draws["a"][chain], draws)


def test_a_reservoir_holds_draws_with_equal_probabilities(samples):
    result = samples.streams["reservoir"]
    for chain in range(2):
        assert len(set(result.indices[chain].tolist())) == 5
        draws = samples.draws["b"][chain, result.indices[chain]]
        np.testing.assert_array_equal(result.draws["b"][chain], draws)
    num, size, num_runs = 12, 4, 20_000
    reservoir = streaming.reservoir(size)

    def choose(key):
        def body(i, state):
            return reservoir.update(jax.random.fold_in(key, i), i, i.astype(jnp.float32), state)

        return jax.lax.fori_loop(0, num, body, reservoir.init(jnp.zeros(()))).indices

    chosen = np.asarray(jax.jit(jax.vmap(choose))(jax.random.split(jax.random.key(1), num_runs)))
    counts = np.bincount(chosen.ravel(), minlength=num)
    share = size / num
    z = (counts - num_runs * share) / np.sqrt(num_runs * share * (1 - share))
    assert np.abs(z).max() < 5
    # Each pair is chosen with probability size (size - 1) / (num (num - 1)).
    both = (np.any(chosen == 0, axis=1) & np.any(chosen == num - 1, axis=1)).mean()
    pair = size * (size - 1) / (num * (num - 1))
    assert abs(both - pair) < 5 * np.sqrt(pair * (1 - pair) / num_runs)


def test_predictions_and_calibration_are_averages_over_the_draws(samples):
    each = jax.vmap(jax.vmap(lambda theta: probabilities(theta, X)))(samples.draws)
    np.testing.assert_allclose(samples.streams["predictive"], each.mean(axis=1), rtol=1e-5)
    bins = samples.streams["calibration"]
    np.testing.assert_allclose(bins.share.sum(axis=1), 1.0, rtol=1e-5)
    labels = np.tile(LABELS, NUM_DRAWS)
    for chain in range(2):
        # The predictions of all draws are like predictions of one classifier on as many rows.
        rows = np.asarray(each[chain]).reshape(-1, 2)
        error = metrics.expected_calibration_error(rows, labels, 10)
        np.testing.assert_allclose(bins.error[chain], error, rtol=1e-4)
        accuracy = (rows.argmax(axis=1) == labels).mean()
        np.testing.assert_allclose((bins.accuracy * bins.share)[chain].sum(), accuracy, rtol=1e-5)


def test_streams_accumulate_what_collect_returns():
    def collect(state, info):
        return {"norm": info.gradient_norm}

    samples = run({"m": streaming.moments()}, collect=collect)
    mean = samples.draws["norm"].mean(axis=1)
    np.testing.assert_allclose(samples.streams["m"].mean["norm"], mean, rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"streams": 3}, TypeError, "mapping of names to accumulators"),
        ({"streams": {"m": 3}}, TypeError, "mapping of names to accumulators"),
        ({"keep_draws": False, "draws_to": "x.zarr"}, ValueError, "not both"),
        (
            {
                "keep_draws": False,
                "until": fedmcmc.rhat_below(),
                "max_rounds": 90,
                "num_rounds": None,
            },
            ValueError,
            "draws in memory",
        ),
    ],
)
def test_bad_settings_are_refused(settings, error, message):
    with pytest.raises(error, match=message):
        run(**settings)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: streaming.thinned(3), "an even size"),
        (lambda: streaming.reservoir(0), "size must be a positive integer"),
        (lambda: streaming.moments(structure="banded"), "structure must be one of"),
        (lambda: streaming.calibration(probabilities, 0, np.zeros(3)), "labels must be integers"),
    ],
)
def test_bad_accumulators_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
