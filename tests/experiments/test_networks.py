"""Networks: models, starts, surrogates, scores of images, and FedEP's methods."""

from functools import partial
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.tree_util import Partial
from sklearn import decomposition

import fedmcmc
from experiments import confidence, loaders, models, setup, study, wiring
from experiments import data as sources
from experiments.special import fa_hmc_images, fed_ep_runs, fsgld_mlp
from fedmcmc import FederatedData

RNG = np.random.default_rng(0)
CLIENTS = [
    {"features": RNG.normal(size=(n, 3)).astype(np.float32), "label": np.arange(n) % 4}
    for n in (9, 7)
]
DATA = FederatedData.from_clients(CLIENTS)
POSTERIOR = models.mlp(DATA, widths=(), prior_scale=0.5)
START = jax.tree.map(lambda leaf: leaf + 0.1, POSTERIOR.init_fn(jax.random.key(1)))
SPECIAL = {
    name: study.load(f"fed_ep/{name}")["special"]
    for name in ("cifar", "emnist", "hyperparameters", "linear_pixels")
}


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
    ends = [setup.adam_start(POSTERIOR, DATA, jax.random.key(0), n, 16, 0.05) for n in (0, 300)]
    slope = jax.jit(jax.grad(lambda x: setup.potential(POSTERIOR, DATA.rows, x)))
    before, after = (np.linalg.norm(slope(x)["Dense_0"]["kernel"]) for x in ends)
    assert after < 0.3 * before


def test_predictions_of_chains_apart_have_a_large_rhat():
    problem = SimpleNamespace(posterior=POSTERIOR, data=DATA, test=CLIENTS[0])
    draws = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (2, 100, *leaf.shape)), START)
    draws["Dense_0"]["bias"] = noise = 0.3 * RNG.normal(size=(2, 100, 4)).astype(np.float32)
    assert confidence.rhat_of_predictions(problem, draws) < 1.1
    noise[1, :, 0] += 1.5
    assert confidence.rhat_of_predictions(problem, draws) > 1.5


def test_expansions_have_the_fisher_information():
    x = RNG.normal(size=(2, 6)).astype(np.float32)
    terms = Partial(lambda t, rows: jax.nn.log_sigmoid(rows * t))
    posterior = fedmcmc.Posterior(terms, terms)
    data = fedmcmc.FederatedData.from_clients(list(x))
    found = fsgld_mlp.fisher(posterior, data, np.float32([0.7]), structure="diagonal")
    p = 1 / (1 + np.exp(-0.7 * x))
    np.testing.assert_allclose(found.precision[:, 0], (p * (1 - p) * x**2).sum(1), rtol=1e-4)


@pytest.mark.parametrize(
    ("module", "side", "number"),
    [
        (models.LeNet5(), 28, 61_706),
        (models.Mlp((), 10), 28, 7_850),
        (models.ResNet(), 32, 274_042),  # as Izmailov et al. (2021) state
        (models.ResNet18(100), 24, pytest.approx(11.2e6, rel=5e-3)),
        (models.EmnistCnn(62), 28, pytest.approx(1.2e6, rel=1e-2)),
    ],
)
def test_numbers_of_parameters(module, side, number):
    image = np.zeros((1, side, side, 1 if side == 28 else 3), np.float32)
    shapes = jax.eval_shape(module.init, jax.random.key(0), image)
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes["params"])) == number


@pytest.mark.parametrize(("padding", "strides"), [("SAME", 2), ("VALID", 1)])
def test_every_way_to_convolve_is_that_of_flax(padding, strides):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 9, 8, 3)).astype(np.float32)
    theirs = nn.Conv(4, (3, 5), strides, padding=padding)
    variables = jax.tree.map(lambda leaf: leaf + 0.1, theirs.init(jax.random.key(0), x))

    def both(module):
        def fn(variables, x):
            return jnp.sum(jnp.sin(module.apply(variables, x)))

        return jax.jit(jax.value_and_grad(fn, (0, 1)))(variables, x)

    for method in ("lax", "patches", "banded"):
        ours = models._conv(method)(4, (3, 5), strides, padding=padding)
        chex.assert_trees_all_close(both(ours), both(theirs), rtol=1e-4, atol=1e-5)


def test_filter_response_norm_is_numpys():
    rng = np.random.default_rng(2)
    x = rng.normal(size=(2, 3, 5, 4))
    scale, bias, threshold = rng.normal(size=(3, 4))
    root = np.sqrt(np.mean(x**2, axis=(1, 2), keepdims=True) + 1e-6)
    params = dict(scale=scale, bias=bias, threshold=threshold)
    normalized = models.FilterResponseNorm().apply({"params": params}, x)
    exact = np.maximum(x / root * scale + bias, threshold)
    np.testing.assert_allclose(normalized, exact, rtol=1e-5, atol=1e-6)


def test_a_sweep_of_images_scores_the_draws_of_sample(monkeypatch):
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


def tiny():
    rng = np.random.default_rng(0)
    label = rng.integers(0, 3, 40).astype(np.int32)
    rows = {"features": rng.normal(size=(40, 4, 4, 1)).astype(np.float32), "label": label}
    test = {name: column[:12] for name, column in rows.items()}
    return fedmcmc.FederatedData.from_arrays(rows, rng.integers(0, 5, 40)), test


@pytest.mark.parametrize("name", ["cifar", "emnist", "hyperparameters"])
def test_a_study_that_was_not_run_builds_all_its_kernels(name):
    methods, settings, runs = (SPECIAL[name][key] for key in ("methods", "settings", "runs"))
    supplies = wiring.Supplies(tiny()[0], models.mlp(tiny()[0], ()))
    for method, changed in fed_ep_runs._variants(runs, methods, settings):
        node = fed_ep_runs._filled(methods[method], settings | changed)
        assert isinstance(wiring.build(node, method, supplies), fedmcmc.FederatedKernel)
    with pytest.raises(ValueError, match=r"runs has .*speed"):
        list(fed_ep_runs._variants([{"method": "FedPA", "speed": 1}], methods, settings))


@pytest.mark.slow
def test_the_first_seed_is_the_same_with_sites_on_the_host(monkeypatch):
    counts = dict(num_seeds=2, num_burnin=2, num_rounds=5, checkpoints=[5], window=2, best_window=2)
    special = SPECIAL["linear_pixels"] | counts | {"runs": [{"method": "FedEP (I)"}]}
    special["data"] = {"_target_": f"{__name__}.tiny"}
    special["settings"] = special["settings"] | dict(cohort_size=3, batch_size=4, num_epochs=3)
    given = {key: value for key, value in special.items() if key not in wiring.HYDRA_KEYS}
    found = []
    for limit in (fed_ep_runs.CLIENT_BYTES, 0):
        monkeypatch.setattr(fed_ep_runs, "CLIENT_BYTES", limit)
        found.append([row.value for row in fed_ep_runs.images(**given) if row.seed == 0])
    np.testing.assert_allclose(*found, rtol=1e-5)


def test_losses_are_finite_where_a_probability_rounds_to_zero():
    rows = {"features": np.float32([[0, 200], [200, 0]]), "label": np.zeros(2, int)}
    scores = fed_ep_runs._scores(lambda scale, batch: scale * batch["features"], rows, 1.0, 0)
    assert float(scores["accuracy"]) == 0.5 and float(scores["loss"]) == pytest.approx(100.0)


@pytest.mark.parametrize("scaled", [True, False])
def test_principal_components_are_those_of_scikit_learn(scaled):
    x = RNG.normal(size=(60, 2, 3, 1)).astype(np.float32) * np.arange(1, 4)[:, None]
    rows = {"features": x, "label": RNG.integers(0, 3, 60).astype(np.int32)}
    of = fedmcmc.FederatedData.from_arrays(rows, RNG.integers(0, 4, 60)), rows
    _, found = loaders.principal_components(of, 4, scaled)
    exact = decomposition.PCA(4, whiten=scaled).fit_transform(x.reshape(60, -1))
    np.testing.assert_allclose(abs(found["features"]), abs(exact), rtol=1e-3, atol=1e-4)
