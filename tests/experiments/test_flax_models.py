"""The experiments' networks: sizes, and values and gradients against other implementations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from experiments import models
from experiments.models import EmnistCnn, FilterResponseNorm, LeNet5, Mlp, ResNet, ResNet18

METHODS = ("lax", "patches", "banded")
IMAGE = np.zeros((1, 28, 28, 1), np.float32)


def num_parameters(module, image):
    shapes = jax.eval_shape(module.init, jax.random.key(0), image)
    return sum(leaf.size for leaf in jax.tree.leaves(shapes["params"]))


def test_numbers_of_parameters():
    assert num_parameters(LeNet5(), IMAGE) == 61_706
    cifar = np.zeros((1, 32, 32, 3), np.float32)
    # Izmailov et al. (2021) state 274042 for their network.
    assert num_parameters(ResNet(), cifar) == 274_042
    assert num_parameters(Mlp((), 10), IMAGE) == 7850
    crop = np.zeros((1, 24, 24, 3), np.float32)
    assert num_parameters(ResNet18(100), crop) == pytest.approx(11.2e6, rel=5e-3)
    assert num_parameters(EmnistCnn(62), IMAGE) == pytest.approx(1.2e6, rel=1e-2)


@pytest.mark.parametrize(("padding", "strides"), [("SAME", 2), ("VALID", 1)])
def test_every_way_to_convolve_is_that_of_flax(padding, strides):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2, 9, 8, 3)), jnp.float32)
    theirs = nn.Conv(4, (3, 5), strides, padding=padding)
    variables = jax.tree.map(lambda leaf: leaf + 0.1, theirs.init(jax.random.key(0), x))
    ways = [models._conv(method)(4, (3, 5), strides, padding=padding) for method in METHODS]

    def both(module, variables, x):
        return module.apply(variables, x), jax.grad(loss, (1, 2))(module, variables, x)

    def loss(module, variables, x):
        return jnp.sum(jnp.sin(module.apply(variables, x)))

    exact, *found = jax.jit(lambda v, x: [both(m, v, x) for m in (theirs, *ways)])(variables, x)
    for other in found:
        for a, b in zip(jax.tree.leaves(exact), jax.tree.leaves(other), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_filter_response_norm_is_numpys():
    rng = np.random.default_rng(2)
    x = rng.normal(size=(2, 3, 5, 4))
    scale, bias, threshold = rng.normal(size=(3, 4))
    root = np.sqrt(np.mean(x**2, axis=(1, 2), keepdims=True) + 1e-6)
    params = dict(scale=scale, bias=bias, threshold=threshold)
    normalized = FilterResponseNorm().apply({"params": params}, x)
    exact = np.maximum(x / root * scale + bias, threshold)
    np.testing.assert_allclose(normalized, exact, rtol=1e-5, atol=1e-6)
