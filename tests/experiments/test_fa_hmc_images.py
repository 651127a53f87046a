"""FA-HMC on images: the scores of a sweep against those of `fedmcmc.sample`, and gains."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from experiments import data as sources
from experiments import loaders, models
from experiments.special import fa_hmc_images
from experiments.special.fa_hmc_images import Score, compare


def test_a_sweep_scores_the_draws_of_sample(monkeypatch):
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (60, 4, 4)).astype(np.uint8), np.arange(60, dtype=np.int32) % 3
    monkeypatch.setattr(sources, "fashion_mnist", lambda: sources.Images(x, y, x, y))
    data, test = loaders.standardized_images("fashion_mnist", num_clients=4)
    assert data.sizes.tolist() == [15] * 4
    np.testing.assert_allclose(np.mean(data.rows["features"]), 0, atol=1e-5)
    posterior = models.mlp(data, (), 0.5)
    sizes = dict(num_integration_steps=3, num_local_steps=2, batch_size=5, gradients="reuse")
    kernel, key = partial(fedmcmc.fa_hmc, **sizes), jax.random.key(5)
    start = posterior.init_fn(jax.random.key(6))
    counts = dict(num_rounds=14, thinning=2)
    chains = dict(**counts, num_chains=2, progress=False)
    draws = fedmcmc.sample(key, kernel(posterior, step_size=0.05), data, start, **chains).draws
    keys = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(2))
    starts = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), start)
    given = posterior, data, test, jnp.arange(3), keys, starts, jnp.array([0.05, 1e30])
    scores, later = fa_hmc_images.sweep(kernel, *given, **counts, num_bins=20)
    assert np.isfinite(scores["accuracy"]).all((1, 2)).tolist() == [True, False]
    assert fa_hmc_images._best("nll", jax.device_get(scores), (1.0, 2.0)).step_size == 1.0
    kernels, biases = draws["Dense_0"]["kernel"][0], draws["Dense_0"]["bias"][0, :, None]
    probabilities = jax.nn.softmax(test["features"] @ kernels + biases)
    # The largest powers of two up to the number of samples are 1, 2, 2, 4, 4, 4, 4.
    for found, begins in ((scores, [0] * 7), (later, [0, 1, 1, 2, 2, 2, 2])):
        means = np.stack([probabilities[a:b].mean(0) for b, a in enumerate(begins, start=1)])
        expected = -np.log(means[:, np.arange(60), test["label"]]).mean(-1)
        np.testing.assert_allclose(found["nll"][0, 0], expected, rtol=1e-4)


def test_a_gain_is_judged_by_welchs_test():
    better, worse = (Score(1.0, False, -np.array([[a], [a + 0.1]])) for a in (0.1, 0.9))
    gain = compare(better, worse)
    assert gain.rank == 2 and gain.share.value == pytest.approx(0.8 / 0.95)
    assert 2 * gain.share.error == pytest.approx(4.302653 * 0.005**0.5 / 0.95)
    assert compare(worse, better).rank == -2
    assert np.isnan(compare(better._replace(at_end=True), worse).rank)
