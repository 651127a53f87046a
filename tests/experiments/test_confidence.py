"""Networks' starts, surrogates and potentials against numpy, on multinomial regression."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("hydra")

from experiments import confidence, models, setup
from fedmcmc import FederatedData

RNG = np.random.default_rng(0)
CLIENTS = [
    {"features": RNG.normal(size=(n, 3)).astype(np.float32), "label": np.arange(n) % 4}
    for n in (9, 7)
]
DATA = FederatedData.from_clients(CLIENTS)
POSTERIOR = models.mlp(DATA, widths=(), prior_scale=0.5)
START = jax.tree.map(lambda leaf: leaf + 0.1, POSTERIOR.init_fn(jax.random.key(1)))


def test_surrogates_have_each_clients_gradient_and_fisher_information():
    found = setup.fisher_surrogates(POSTERIOR, DATA, START)
    layer = jax.tree.map(np.asarray, START)["Dense_0"]
    for i, rows in enumerate(CLIENTS):
        weights = np.exp(rows["features"] @ layer["kernel"] + layer["bias"])
        residual = np.eye(4)[rows["label"]] - weights / weights.sum(axis=1, keepdims=True)
        each = rows["features"][:, :, None] * residual[:, None]
        fisher = np.asarray(found.precision["Dense_0"]["kernel"][i])
        np.testing.assert_allclose(fisher, (each**2).sum(axis=0), rtol=1e-4, atol=1e-6)
        slope = found.precision_mean["Dense_0"]["kernel"][i] - fisher * layer["kernel"]
        np.testing.assert_allclose(slope, each.sum(axis=0), rtol=1e-4, atol=1e-4)


def test_potential_in_blocks_is_minus_the_log_posterior(monkeypatch):
    monkeypatch.setattr(confidence, "ROWS_OF_POTENTIAL", 5)
    found = jax.jit(partial(confidence.potential, POSTERIOR, DATA.pooled().rows))(START)
    np.testing.assert_allclose(found, setup.potential(POSTERIOR, DATA.rows, START), rtol=1e-5)


def test_training_approaches_the_mode():
    slope = jax.jit(jax.grad(lambda x: setup.potential(POSTERIOR, DATA.rows, x)))
    ends = [setup.adam_start(POSTERIOR, DATA, jax.random.key(0), n, 16, 0.05) for n in (0, 300)]
    before, after = (np.linalg.norm(slope(x)["Dense_0"]["kernel"]) for x in ends)
    assert after < 0.3 * before


def test_predictions_of_chains_apart_have_a_large_rhat():
    problem = SimpleNamespace(posterior=POSTERIOR, data=DATA, test=CLIENTS[0])
    found = []
    for shift in (0.0, 5.0):
        draws = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (2, 100, *leaf.shape)), START)
        noise = RNG.normal(size=(2, 100, 4)).astype(np.float32)
        noise[1, :, 0] += shift
        draws["Dense_0"]["bias"] = 0.3 * noise
        found.append(confidence.rhat_of_predictions(problem, draws))
    assert found[0] < 1.1 < 1.5 < found[1]
