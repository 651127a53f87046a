"""What a run accumulates on the device, against the same computed from its draws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc import metrics, streaming
from tests.support.lanes import fast_and_slow

POSTERIOR = fedmcmc.Posterior(
    lambda theta: -0.5 * jnp.sum(theta["a"] ** 2) - 0.5 * theta["b"] ** 2,
    lambda theta, x: -0.5 * jnp.sum((x - theta["a"] - theta["b"]) ** 2, axis=-1),
)
DATA = fedmcmc.FederatedData.from_clients(
    [np.random.default_rng(i).normal(size=(3 + i, 2)).astype(np.float32) for i in range(3)]
)
START = {"a": jnp.zeros(2), "b": jnp.zeros(())}


def run(streams=None, keep_draws=True, draws_to=None, **settings):
    defaults = dict(num_rounds=130, num_burnin=20, thinning=3, num_chains=2, progress=False)
    kernel = fedmcmc.lsd(POSTERIOR, step_size=0.02)
    record = fedmcmc.Record(streams or {}, keep_draws, draws_to)
    return fedmcmc.sample(
        jax.random.key(3), kernel, DATA, START, record=record, **(defaults | settings)
    )


def test_moments_are_those_of_the_draws():
    samples = run({"plain": streaming.moments(), "dense": streaming.moments(structure="dense")})
    for name in ("plain", "dense"):
        got = samples.streams[name]
        assert got.num_draws == samples.num_draws == 36
        for key in "ab":
            draws = np.asarray(samples.draws[key], np.float64)
            np.testing.assert_allclose(got.mean[key], draws.mean(axis=1), rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(got.variance[key], draws.var(axis=1, ddof=1), rtol=1e-4)
    flat = np.concatenate([samples.draws["a"], samples.draws["b"][..., None]], axis=2)
    for chain in range(2):
        np.testing.assert_allclose(
            samples.streams["dense"].covariance[chain], np.cov(flat[chain].T), rtol=1e-4, atol=1e-6
        )
    pooled = streaming.pool(samples.streams["dense"])
    together = flat.reshape(-1, 3).astype(np.float64)
    assert pooled.num_draws == 72
    np.testing.assert_allclose(pooled.mean["a"], together.mean(axis=0)[:2], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(pooled.variance["b"], together.var(axis=0, ddof=1)[2], rtol=1e-4)
    np.testing.assert_allclose(pooled.covariance, np.cov(together.T), rtol=1e-4, atol=1e-6)
    plain = streaming.pool(samples.streams["plain"])
    np.testing.assert_allclose(plain.variance["a"], pooled.variance["a"], rtol=1e-5)


def test_moments_far_from_zero_keep_their_digits():
    """At a mean of 10,000 sds a sum of squares in float32 has no digit of the variance left."""
    keep = streaming.moments()
    values = (1e4 + np.random.default_rng(0).normal(size=20_000)).astype(np.float32)

    def body(i, state):
        return keep.update(jax.random.key(0), i, jnp.asarray(values)[i], state)

    state = jax.lax.fori_loop(0, len(values), body, keep.init(jnp.zeros(())))
    got = keep.result(jax.tree.map(lambda leaf: np.asarray(leaf)[None], state), len(values))
    exact = values.astype(np.float64)
    np.testing.assert_allclose(got.variance[0], exact.var(ddof=1), rtol=1e-4)
    np.testing.assert_allclose(got.mean[0], exact.mean(), rtol=1e-7)


def test_a_transform_is_accumulated_in_place_of_the_draw():
    samples = run({"odds": streaming.moments(lambda theta: jnp.exp(theta["b"]))})
    want = np.exp(samples.draws["b"].astype(np.float64)).mean(axis=1)
    np.testing.assert_allclose(samples.streams["odds"].mean, want, rtol=1e-5)


@pytest.mark.slow
def test_without_draws_the_streams_are_the_same():
    streams = {"m": streaming.moments(), "r": streaming.reservoir(8), "t": streaming.thinned(8)}
    with_draws, without = run(streams), run(streams, keep_draws=False)
    assert without.num_draws == 0 and without.draws["a"].shape == (2, 0, 2)
    for a, b in zip(
        jax.tree.leaves(with_draws.streams), jax.tree.leaves(without.streams), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(with_draws.totals["bits_up"], without.totals["bits_up"])


@pytest.mark.parametrize("size", fast_and_slow([2, 8, 36, 64], [8]))
def test_thinned_draws_are_evenly_spaced(size):
    samples = run({"t": streaming.thinned(size)})
    got = samples.streams["t"]
    assert got.num_seen == 36 and min(size, 36) / 2 <= got.indices.shape[1] <= size
    step = np.diff(got.indices[0])
    assert got.indices[0, 0] == 0 and (step == step[0]).all() and step[0] & (step[0] - 1) == 0
    assert got.indices[0, -1] + step[0] >= 36
    for chain in range(2):
        np.testing.assert_array_equal(
            got.draws["a"][chain], samples.draws["a"][chain, got.indices[chain]]
        )


def test_a_reservoir_holds_draws_and_each_as_likely():
    samples = run({"r": streaming.reservoir(5)})
    got = samples.streams["r"]
    for chain in range(2):
        assert len(set(got.indices[chain].tolist())) == 5
        np.testing.assert_array_equal(
            got.draws["b"][chain], samples.draws["b"][chain, got.indices[chain]]
        )
    keep, num, size, runs = streaming.reservoir(4), 12, 4, 20_000

    def one(key):
        def body(i, state):
            return keep.update(jax.random.fold_in(key, i), i, i.astype(jnp.float32), state)

        return jax.lax.fori_loop(0, num, body, keep.init(jnp.zeros(()))).indices

    chosen = jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(1), runs))
    counts = np.bincount(np.asarray(chosen).ravel(), minlength=num)
    share = size / num
    z = (counts - runs * share) / np.sqrt(runs * share * (1 - share))
    assert np.abs(z).max() < 5
    # Pairs too: each of the two is there with probability size (size - 1) / (num (num - 1)).
    both = (np.any(chosen == 0, axis=1) & np.any(chosen == num - 1, axis=1)).mean()
    pair = size * (size - 1) / (num * (num - 1))
    assert abs(both - pair) < 5 * np.sqrt(pair * (1 - pair) / runs)


def probabilities(theta, x):
    score = x @ theta["a"] + theta["b"]
    return jnp.stack([jax.nn.sigmoid(score), jax.nn.sigmoid(-score)], axis=1)


def test_predictions_and_calibration_are_those_of_the_draws():
    rng = np.random.default_rng(5)
    x, labels = rng.normal(size=(40, 2)).astype(np.float32), rng.integers(0, 2, 40)
    samples = run(
        {
            "mean": streaming.predictive(probabilities, x),
            "bins": streaming.calibration(probabilities, x, labels, 10),
        }
    )
    each = jax.vmap(jax.vmap(lambda theta: probabilities(theta, x)))(samples.draws)
    np.testing.assert_allclose(samples.streams["mean"], each.mean(axis=1), rtol=1e-5)
    got = samples.streams["bins"]
    np.testing.assert_allclose(got.share.sum(axis=1), 1.0, rtol=1e-5)
    for chain in range(2):
        # All draws' predictions as those of one classifier on as many rows.
        rows = np.asarray(each[chain]).reshape(-1, 2)
        want = metrics.expected_calibration_error(rows, np.tile(labels, samples.num_draws), 10)
        np.testing.assert_allclose(got.error[chain], want, rtol=1e-4)
        right = (rows.argmax(axis=1) == np.tile(labels, samples.num_draws)).mean()
        np.testing.assert_allclose((got.accuracy * got.share)[chain].sum(), right, rtol=1e-5)


def test_streams_take_in_what_collect_makes_of_a_round():
    def collect(state, info):
        return {"norm": info.gradient_norm}

    samples = run({"m": streaming.moments()}, collect=collect)
    np.testing.assert_allclose(
        samples.streams["m"].mean["norm"], samples.draws["norm"].mean(axis=1), rtol=1e-5
    )


def test_chains_are_accumulated_apart():
    one, two = (run({"m": streaming.moments()}, num_chains=n).streams["m"] for n in (1, 2))
    np.testing.assert_allclose(one.mean["a"][0], two.mean["a"][0], rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"streams": 3}, TypeError, "mapping of names to accumulators"),
        ({"streams": {"m": 3}}, TypeError, "mapping of names to accumulators"),
        ({"keep_draws": False, "draws_to": "x.zarr"}, ValueError, "not both"),
        (
            {"keep_draws": False, "until": fedmcmc.rhat_below(), "max_rounds": 90},
            ValueError,
            "draws in memory",
        ),
    ],
)
def test_bad_settings(settings, error, message):
    settings = {"num_rounds": None if "until" in settings else 130} | settings
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
def test_bad_accumulators(make, message):
    with pytest.raises(ValueError, match=message):
        make()
