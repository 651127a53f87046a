"""`from_flax`: densities and draws against NumPy and SciPy, chains against a hand-written model."""

import functools
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.tree_util import Partial
from scipy import special, stats

import fedmcmc
from fedmcmc import from_flax
from fedmcmc.interop.flax import predictive

LIMIT = 5.5


class Mlp(nnx.Module):
    def __init__(self, hidden, out, *, rngs):
        self.layers = nnx.List(
            [nnx.Linear(4, hidden, rngs=rngs), nnx.Linear(hidden, out, rngs=rngs)]
        )

    def __call__(self, x):
        return self.layers[1](jnp.tanh(self.layers[0](x)))


def linen_mlp(out=3):
    return nn.Sequential([nn.Dense(5), nn.tanh, nn.Dense(out)])


def nnx_mlp(out=3):
    return functools.partial(Mlp, 5, out)


BOTH = pytest.mark.parametrize("make", [linen_mlp, nnx_mlp])


def layers(position):
    """Return the weights of either network: ``(kernel, bias)`` of both layers, as float64."""
    two = position.get("layers", position)
    return [[np.asarray(two[k][n], np.float64) for n in ("kernel", "bias")] for k in sorted(two)]


def forward(position, x):
    (w, b), (v, c) = layers(position)
    return np.tanh(x @ w + b) @ v + c


def draw_rows(num=7, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num, 4)).astype(np.float32)
    return {"x": x, "y": rng.integers(0, 3, num).astype(np.int32)}


def build(make=linen_mlp, example=None, likelihood="categorical", **kwargs):
    kwargs = dict(prior_scale=0.7, check=False) | kwargs
    example = draw_rows() if example is None else example
    return from_flax(make(), example=example, likelihood=likelihood, **kwargs)


def draw_start(posterior):
    return jax.jit(posterior.init_fn)(jax.random.key(1))


@BOTH
def test_categorical_terms_equal_the_softmax_of_numpy(make):
    batch = draw_rows()
    posterior = build(make)
    position = draw_start(posterior)
    logits = forward(position, batch["x"])
    terms = (logits - special.logsumexp(logits, axis=1, keepdims=True))[np.arange(7), batch["y"]]
    actual = posterior.loglikelihood_fn(position, batch)
    np.testing.assert_allclose(actual, terms, rtol=1e-5)
    probabilities = predictive(make(), likelihood="categorical")(position, {"x": batch["x"]})
    np.testing.assert_allclose(probabilities, special.softmax(logits, axis=1), rtol=1e-5)


@pytest.mark.parametrize("x64", [False, True])
def test_gaussian_and_bernoulli_terms_equal_those_of_scipy(x64):
    rng = np.random.default_rng(2)
    with jax.enable_x64(x64):
        batch = {"x": rng.normal(size=(6, 4)), "y": rng.normal(size=6)}
        example = jax.tree.map(lambda leaf: leaf.astype(jnp.result_type(float)), batch)
        posterior = build(lambda: linen_mlp(1), example, "gaussian", noise_scale=0.3)
        position = draw_start(posterior)
        means = forward(position, batch["x"])[:, 0]
        actual = posterior.loglikelihood_fn(position, example)
        assert actual.dtype == jnp.result_type(float)
        exact = stats.norm(means, 0.3).logpdf(batch["y"])
        np.testing.assert_allclose(actual, exact, rtol=1e-11 if x64 else 1e-5)
        labels = rng.integers(0, 2, 6)
        posterior = build(lambda: linen_mlp(1), {**example, "y": labels}, "bernoulli")
        actual = posterior.loglikelihood_fn(position, {**example, "y": labels})
        exact = stats.bernoulli(special.expit(means)).logpmf(labels)
        np.testing.assert_allclose(actual, exact, rtol=1e-11 if x64 else 1e-5)


def test_events_with_axes_have_one_term_per_row():
    rng = np.random.default_rng(3)
    x, noise = rng.normal(size=(5, 4)).astype(np.float32), np.array([0.5, 1.0, 2.0])
    batch = {"x": x, "y": rng.normal(size=(5, 3)).astype(np.float32)}
    posterior = build(example=batch, likelihood="gaussian", noise_scale=noise)
    position = draw_start(posterior)
    exact = stats.norm(forward(position, x), noise).logpdf(batch["y"]).sum(axis=1)
    np.testing.assert_allclose(posterior.loglikelihood_fn(position, batch), exact, rtol=1e-5)


@BOTH
def test_the_prior_equals_that_of_scipy(make):
    position = draw_start(build(make))
    flat = np.concatenate([leaf.ravel() for pair in layers(position) for leaf in pair])
    exact = stats.norm(0, 0.7).logpdf(flat).sum()
    np.testing.assert_allclose(build(make).logprior_fn(position), exact, rtol=1e-5)


def test_prior_scales_depend_on_the_name_the_prefix_or_the_entry():
    position = draw_start(build())
    (w, b), (v, c) = layers(position)

    def scale(path, leaf):
        return 0.1 if path.endswith("bias") else 1 / np.sqrt(leaf.shape[0])

    def total(*pairs):
        return sum(stats.norm(0, s).logpdf(x).sum() for x, s in pairs)

    actual = build(prior_scale=scale).logprior_fn(position)
    exact = total((w, 0.5), (b, 0.1), (v, 1 / np.sqrt(5)), (c, 0.1))
    np.testing.assert_allclose(actual, exact, rtol=1e-5)
    columns = np.array([0.5, 1.0, 2.0])
    prefix = {"layers_0": 2.0, "layers_2": {"kernel": columns, "bias": 0.3}}
    actual = build(prior_scale=prefix).logprior_fn(position)
    exact = total((w, 2.0), (b, 2.0), (v, columns), (c, 0.3))
    np.testing.assert_allclose(actual, exact, rtol=1e-5)


def test_resampled_outcomes_have_the_frequencies_of_the_model():
    num = 20_000
    x = np.repeat(draw_rows(2)["x"], num // 2, axis=0)
    posterior = build()
    position = jax.tree.map(lambda leaf: 1.5 * leaf, draw_start(posterior))
    batch = {"x": x, "y": np.zeros(num, np.int32)}
    drawn = jax.jit(posterior.resample_fn)(jax.random.key(3), position, batch)
    np.testing.assert_array_equal(drawn["x"], x)
    assert drawn["y"].dtype == np.int32
    exact = special.softmax(forward(position, x[[0, -1]]), axis=1)
    counts = np.stack([np.bincount(y, minlength=3) for y in np.split(np.asarray(drawn["y"]), 2)])
    z = (counts / (num // 2) - exact) / np.sqrt(exact * (1 - exact) / (num // 2))
    assert np.abs(z).max() < LIMIT
    labels = {"x": x, "y": np.zeros(num, bool)}
    drawn = jax.jit(build(lambda: linen_mlp(1), labels, "bernoulli").resample_fn)
    single = jax.tree.map(lambda leaf: leaf[..., :1] if leaf.shape[-1] == 3 else leaf, position)
    means = forward(single, x[[0, -1]])[:, 0]
    flags = np.asarray(drawn(jax.random.key(4), single, labels)["y"])
    assert flags.dtype == bool
    p = special.expit(means)
    z = (flags.reshape(2, -1).mean(axis=1) - p) / np.sqrt(p * (1 - p) / (num // 2))
    assert np.abs(z).max() < LIMIT
    numbers = {"x": x, "y": np.zeros(num, np.float32)}
    gaussian = build(lambda: linen_mlp(1), numbers, "gaussian", noise_scale=0.4)
    y = np.asarray(jax.jit(gaussian.resample_fn)(jax.random.key(5), single, numbers)["y"]).reshape(
        2, -1
    )
    scores = (y - means[:, None]) / 0.4
    z = scores.mean(axis=1) * np.sqrt(num // 2)
    z_square = (np.square(scores).mean(axis=1) - 1) * np.sqrt(num // 4)
    assert max(np.abs(z).max(), np.abs(z_square).max()) < LIMIT


@BOTH
def test_rows_do_not_affect_each_other(make):
    batch, posterior = draw_rows(), build(make)
    position = draw_start(posterior)
    is_other = (np.arange(7) != 2)[:, None]
    far = {"x": np.where(is_other, 9 * batch["x"][::-1], batch["x"]), "y": batch["y"]}
    nan = {"x": np.where(is_other, np.float32(np.nan), batch["x"]), "y": batch["y"]}

    @jax.jit
    def value_and_gradient(batch):
        return jax.value_and_grad(lambda z: posterior.loglikelihood_fn(z, batch)[2])(position)

    value, gradient = value_and_gradient(batch)
    # (Zero times NaN is NaN in a gradient, so the gradient check uses finite rows.)
    chex.assert_trees_all_equal(value, value_and_gradient(nan)[0])
    chex.assert_trees_all_equal((value, gradient), value_and_gradient(far))


def logprior(position):
    return -0.5 * sum(jnp.sum((leaf / 2.0) ** 2) for leaf in jax.tree.leaves(position))


def loglikelihood(position, batch):
    logits = batch["x"] @ position["kernel"] + position["bias"]
    chosen = jax.nn.one_hot(batch["y"], 3, dtype=logits.dtype)
    return jnp.sum(jax.nn.log_softmax(logits) * chosen, axis=-1)


@pytest.mark.slow
def test_a_linear_module_has_the_chain_of_the_same_model_in_jax():
    # In 64 bits, because a compiler may round the two programs differently.
    with jax.enable_x64(True):
        clients = [
            {"x": c["x"].astype(np.float64), "y": c["y"]}
            for c in (draw_rows(num, seed) for seed, num in enumerate((7, 1, 12)))
        ]
        data = fedmcmc.FederatedData.from_clients(clients)
        posterior = build(lambda: nn.Dense(3), data, prior_scale=2.0)
        in_jax = fedmcmc.Posterior(logprior, loglikelihood)
        position = jax.tree.map(lambda leaf: leaf.astype(np.float64), draw_start(posterior))
        density = [jnp.sum(p.loglikelihood_fn(position, clients[0])) for p in (posterior, in_jax)]
        np.testing.assert_allclose(*density, rtol=1e-14)
        runs = [
            fedmcmc.sample(
                jax.random.key(0),
                fedmcmc.dsgld(p, step_size=0.01, num_local_steps=3, batch_size=4),
                data,
                position,
                num_rounds=20,
                num_chains=2,
                progress=False,
            ).draws
            for p in (posterior, in_jax)
        ]
    assert np.ptp(runs[0]["kernel"]) > 0.1
    chex.assert_trees_all_close(*runs, rtol=1e-12, atol=1e-14)
    assert {leaf.dtype for run in runs for leaf in jax.tree.leaves(run)} == {np.dtype(float)}


@BOTH
def test_equal_modules_share_a_compiled_program(make):
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(1)
    def density(posterior, position, batch):
        likelihood = posterior.loglikelihood_fn(position, batch)
        return posterior.logprior_fn(position) + jnp.sum(likelihood)

    densities = []
    for scale in (0.5, 1.0):
        posterior = build(make, prior_scale=scale)._replace(init_fn=None)
        densities.append(density(posterior, draw_start(build(make)), draw_rows()))
    assert densities[0] != densities[1]


def test_modules_need_not_be_hashable():
    class Scaled(nn.Module):
        factor: np.ndarray

        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(x * self.factor)

    posterior = build(lambda: Scaled(np.arange(4.0)))
    position = draw_start(posterior)
    assert jax.jit(posterior.loglikelihood_fn)(position, draw_rows()).shape == (7,)


def test_a_likelihood_may_be_a_function_and_rows_may_be_a_pair():
    batch = draw_rows()

    def loglikelihood(power, outputs, batch):
        return -jnp.sum(jnp.abs(outputs - batch[2][:, None]) ** power, axis=1)

    posterior = build(
        linen_mlp,
        (batch["y"], batch["x"], batch["x"][:, 0]),
        Partial(loglikelihood, jnp.float32(1.5)),
        inputs=1,
        outcome=2,
    )
    assert posterior.resample_fn is None
    position = draw_start(posterior)
    exact = -(np.abs(forward(position, batch["x"]) - batch["x"][:, :1]) ** 1.5).sum(axis=1)
    actual = posterior.loglikelihood_fn(position, (batch["y"], batch["x"], batch["x"][:, 0]))
    np.testing.assert_allclose(actual, exact, rtol=1e-5)


def test_several_inputs_and_fixed_arguments():
    class Two(nn.Module):
        @nn.compact
        def __call__(self, a, b, *, train):
            return nn.Dropout(0.5, deterministic=not train)(
                nn.Dense(3)(jnp.concatenate([a, b], -1))
            )

    batch = {"a": draw_rows()["x"], "b": draw_rows()["x"] ** 2, "label": draw_rows()["y"]}
    kwargs = dict(inputs=("a", "b"), outcome="label", options={"train": False})
    posterior = build(Two, batch, **kwargs)
    drawn = posterior.resample_fn(jax.random.key(0), draw_start(posterior), batch)
    assert drawn.keys() == batch.keys() and drawn["label"].shape == (7,)


def test_impossible_outcomes_are_nan_in_terms_and_gradients():
    batch, posterior = draw_rows(), build()
    position = draw_start(posterior)
    batch["y"][3] = 3

    def total(position, row):
        single = jax.tree.map(lambda leaf: leaf[row : row + 1], batch)
        return jnp.sum(posterior.loglikelihood_fn(position, single))

    value, gradient = jax.value_and_grad(total)(position, 3)
    assert np.isnan(value) and np.isnan(gradient["layers_2"]["bias"]).all()
    assert np.isfinite(total(position, 2))


@pytest.mark.slow
def test_a_network_learns_digits():
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    table = {"x": (x / 16).astype(np.float32), "y": y.astype(np.int32)}
    train, test = (
        {k: v[part] for k, v in table.items()} for part in (slice(1500), slice(1500, None))
    )
    data = fedmcmc.FederatedData.from_arrays(train, np.arange(1500) % 5)
    network = nn.Sequential([nn.Dense(16), nn.relu, nn.Dense(10)])
    posterior = from_flax(network, example=data, prior_scale=1.0, likelihood="categorical")
    samples = fedmcmc.sample(
        jax.random.key(0),
        fedmcmc.dsgld(posterior, step_size=1e-4, num_local_steps=5, batch_size=50),
        data,
        posterior.init_fn,
        num_rounds=400,
        num_burnin=300,
        thinning=10,
        num_chains=2,
        progress=False,
    )
    predict = predictive(network, likelihood="categorical")
    each = jax.vmap(jax.vmap(predict, (0, None)), (0, None))(samples.draws, test)
    mean = np.asarray(each.mean(axis=(0, 1)))
    np.testing.assert_allclose(mean.sum(axis=1), 1, rtol=1e-5)
    assert (mean.argmax(axis=1) == test["y"]).mean() > 0.85


@pytest.mark.slow
def test_flax_is_imported_only_when_it_is_used():
    script = (
        "import sys, fedmcmc\n"
        "assert 'flax' not in sys.modules\n"
        "sys.modules['flax'] = None\n"
        "try:\n"
        "    fedmcmc.from_flax(None, example={'x': [0.0]}, prior_scale=1, likelihood='gaussian')\n"
        "except ImportError as error:\n"
        "    assert 'pip install \"flax>=' in str(error), error\n"
        "else:\n"
        "    raise AssertionError('no ImportError')\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
