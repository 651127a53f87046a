"""The experiments' networks: sizes, and values and gradients against other implementations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from experiments.group_norm import EmnistCnn, ResNet18
from experiments.models import Conv, FilterResponseNorm, LeNet5, Mlp, ResNet, resnet20
from fedmcmc import from_flax

IMAGE = np.zeros((1, 28, 28, 1), np.float32)


def num_parameters(module, image):
    shapes = jax.eval_shape(module.init, jax.random.key(0), image)
    return sum(leaf.size for leaf in jax.tree.leaves(shapes["params"]))


def test_numbers_of_parameters():
    assert num_parameters(LeNet5(), IMAGE) == 61_706
    cifar = np.zeros((1, 32, 32, 3), np.float32)
    # Izmailov et al. (2021) state 274042 for their network.
    assert num_parameters(resnet20(), cifar) == 274_042
    channels = 16 * 7 + 32 * 7 + 64 * 7
    assert num_parameters(resnet20(threshold=False), cifar) == 274_042 - channels
    assert num_parameters(Mlp((), 10), IMAGE) == 7850
    crop = np.zeros((1, 24, 24, 3), np.float32)
    assert num_parameters(ResNet18(100), crop) == pytest.approx(11.2e6, rel=5e-3)
    assert num_parameters(EmnistCnn(62), IMAGE) == pytest.approx(1.2e6, rel=1e-2)


@pytest.mark.parametrize(("padding", "strides"), [("SAME", 2), ("VALID", 1)])
def test_every_way_to_convolve_is_that_of_flax(padding, strides):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2, 9, 8, 3)), jnp.float32)
    theirs = nn.Conv(4, (3, 5), strides, padding=padding)
    variables = theirs.init(jax.random.key(0), x)
    ways = [Conv(4, (3, 5), strides, padding, method) for method in ("lax", "patches", "banded")]
    for way in ways:
        same = jax.tree.map(np.array_equal, way.init(jax.random.key(0), x), variables)
        assert all(jax.tree.leaves(same))
    variables = jax.tree.map(lambda leaf: leaf + 0.1, variables)

    def both(module, variables, x):
        return module.apply(variables, x), jax.grad(loss, (1, 2))(module, variables, x)

    def loss(module, variables, x):
        return jnp.sum(jnp.sin(module.apply(variables, x)))

    exact, *found = jax.jit(lambda v, x: [both(m, v, x) for m in (theirs, *ways)])(variables, x)
    for other in found:
        for a, b in zip(jax.tree.leaves(exact), jax.tree.leaves(other), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


class TheirLeNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        for features, padding in ((6, "SAME"), (16, "VALID")):
            x = nn.max_pool(nn.relu(nn.Conv(features, (5, 5), padding=padding)(x)), (2, 2), (2, 2))
        x = x.reshape(x.shape[0], -1)
        for width in (120, 84):
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(10)(x)


def test_lenet_is_the_one_built_from_flaxs_layers():
    rng = np.random.default_rng(1)
    rows = {"x": rng.normal(size=(4, 28, 28, 1)), "y": np.arange(4)}
    rows = {"x": rows["x"].astype(np.float32), "y": rows["y"].astype(np.int32)}
    kwargs = dict(example=rows, prior_scale=1.0, likelihood="categorical", check=False)
    ours, theirs = (from_flax(module, **kwargs) for module in (LeNet5(), TheirLeNet()))
    position = theirs.init_fn(jax.random.key(0))

    @jax.jit
    def both(position):
        fns = [lambda z, fn=p.loglikelihood_fn: jnp.sum(fn(z, rows)) for p in (ours, theirs)]
        return [jax.value_and_grad(fn)(position) for fn in fns]

    a, b = map(jax.tree.leaves, both(position))
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4)


def test_filter_response_norm_is_numpys():
    rng = np.random.default_rng(2)
    x = rng.normal(size=(2, 3, 5, 4))
    scale, bias, threshold = rng.normal(size=(3, 4))
    given = dict(scale=scale, bias=bias, threshold=threshold)
    exact = np.empty_like(x)
    for n in range(2):
        for c in range(4):
            root = np.sqrt(np.mean(x[n, :, :, c] ** 2) + 1e-6)
            exact[n, :, :, c] = np.maximum(x[n, :, :, c] / root * scale[c] + bias[c], threshold[c])
    found = FilterResponseNorm().apply({"params": given}, x)
    np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-6)


def reference_resnet(params, x, num_blocks):
    """The same network written on the parameters, layers taken in the order of their use."""
    index = iter(range(10_000))

    def layer(x, strides=1):
        i = next(index)
        kernel, bias = params[f"Conv_{i}"]["kernel"], params[f"Conv_{i}"]["bias"]
        norm = params[f"FilterResponseNorm_{i}"]
        x = jax.lax.conv_general_dilated(
            x, kernel, (strides, strides), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = x + bias
        x = x / jnp.sqrt(jnp.mean(x**2, (1, 2), keepdims=True) + 1e-6)
        return jnp.maximum(norm["scale"] * x + norm["bias"], norm["threshold"])

    def swish(x):
        return x / (1 + jnp.exp(-x))

    x = swish(layer(x))
    for stage in range(3):
        for block in range(num_blocks):
            strides = 2 if stage and not block else 1
            y = layer(swish(layer(x, strides)))
            x = swish((layer(x, strides) if strides == 2 else x) + y)
    return x.mean((1, 2)) @ params["Dense_0"]["kernel"] + params["Dense_0"]["bias"]


@pytest.mark.slow
def test_resnet_is_the_one_written_on_its_parameters():
    network = ResNet(1, num_outputs=3, width=4)
    x = np.random.default_rng(3).normal(size=(2, 8, 8, 3)).astype(np.float32)
    params = jax.jit(network.init)(jax.random.key(0), x)["params"]
    params = jax.tree.map(lambda leaf: leaf + 0.1, params)
    exact = jax.jit(functools.partial(reference_resnet, num_blocks=1))(params, x)
    found = jax.jit(network.apply)({"params": params}, x)
    np.testing.assert_allclose(found, exact, rtol=1e-4, atol=1e-5)
