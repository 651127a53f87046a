"""Networks for images and tables as flax modules, without state: every row is seen alone.

LeNet-5 (LeCun et al. 1998, with rectifiers and maxima), the ResNet-20 of Izmailov et al. (2021),
which has filter response normalisation instead of batch statistics, and multilayer perceptrons.
"""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import Array

__all__ = ["Conv", "FilterResponseNorm", "LeNet5", "Mlp", "ResNet", "SmallCnn", "resnet20"]

Method = Literal["lax", "patches", "banded"]
Padding = Literal["SAME", "VALID"]


class Mlp(nn.Module):
    """Dense layers of `widths` and one of `num_outputs`; without widths a linear model.

    Rows of any shape are flattened.
    """

    widths: tuple[int, ...]
    num_outputs: int
    activation: Callable[[Array], Array] = nn.relu

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Return ``[n, num_outputs]``."""
        x = x.reshape(x.shape[0], -1)
        for width in self.widths:
            x = self.activation(nn.Dense(width)(x))
        return nn.Dense(self.num_outputs)(x)


class Conv(nn.Module):
    """A convolution of images ``[n, height, width, channels]``, computed in one of three ways.

    All have the parameters of `flax.linen.Conv` and agree with it up to rounding.

    - ``"lax"``: XLA's convolution. On CPU it is several times slower inside of loops
      (jax-ml/jax#12868), and again where each member of a `jax.vmap` has a kernel of its own.
    - ``"patches"``: a product of the patches under the kernel with the kernel as a matrix
      ``[height * width * channels, features]``.
    - ``"banded"``: a product of rows of the image with a matrix that holds the kernel once for
      every place in a row. It does ``image width / kernel width`` times the arithmetic in
      products large enough to be fast; for narrow images with few channels the fastest.
    """

    features: int
    kernel_size: tuple[int, int]
    strides: int = 1
    padding: Padding = "SAME"
    method: Method = "lax"
    kernel_init: Callable[..., Array] = nn.initializers.lecun_normal()

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Return ``[n, height', width', features]``."""
        shape = (*self.kernel_size, x.shape[-1], self.features)
        kernel = self.param("kernel", self.kernel_init, shape)
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        x, kernel, bias = nn.dtypes.promote_dtype(x, kernel, bias)
        pads = [_pads(x.shape[1 + i], shape[i], self.strides, self.padding) for i in range(2)]
        x = jnp.pad(x, ((0, 0), *pads, (0, 0)))
        return _METHODS[self.method](x, kernel, self.strides) + bias.reshape(1, 1, 1, -1)


def _pads(size: int, kernel: int, strides: int, padding: Padding) -> tuple[int, int]:
    if padding == "VALID":
        return 0, 0
    total = max((-(-size // strides) - 1) * strides + kernel - size, 0)
    return total // 2, total - total // 2


def _lax(x: Array, kernel: Array, strides: int) -> Array:
    axes = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, (strides,) * 2, "VALID", dimension_numbers=axes)


def _slices(x: Array, axis: int, kernel: int, strides: int) -> list[Array]:
    """Return what each position of the kernel along `axis` meets, one array a position."""
    num = (x.shape[axis] - kernel) // strides + 1
    stop = (num - 1) * strides + 1
    return [jax.lax.slice_in_dim(x, i, i + stop, strides, axis) for i in range(kernel)]


def _patches(x: Array, kernel: Array, strides: int) -> Array:
    height, width, _, features = kernel.shape
    x = jnp.concatenate(_slices(x, 2, width, strides), axis=-1)
    x = jnp.concatenate(_slices(x, 1, height, strides), axis=-1)
    flat = x.reshape(-1, x.shape[-1]) @ kernel.reshape(-1, features)
    return flat.reshape(*x.shape[:3], features)


def _banded(x: Array, kernel: Array, strides: int) -> Array:
    height, width, _, features = kernel.shape
    size = x.shape[2]
    places = np.arange((size - width) // strides + 1)
    select = np.zeros((width, size, places.size), np.float32)
    for j in range(width):
        select[j, places * strides + j, places] = 1
    band = jnp.einsum("jvw,ijco->ivcwo", select.astype(kernel.dtype), kernel)
    x = jnp.concatenate(_slices(x.reshape(*x.shape[:2], -1), 1, height, strides), axis=-1)
    flat = x.reshape(-1, x.shape[-1]) @ band.reshape(x.shape[-1], -1)
    return flat.reshape(*x.shape[:2], places.size, features)


_METHODS: dict[str, Callable[[Array, Array, int], Array]] = {
    "lax": _lax,
    "patches": _patches,
    "banded": _banded,
}


class LeNet5(nn.Module):
    """LeNet-5 for images ``[n, height, width, channels]``, 61706 parameters for 28 x 28 x 1."""

    num_outputs: int = 10
    method: Method = "banded"

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Return ``[n, num_outputs]``."""
        x = nn.relu(_max_of_four(Conv(6, (5, 5), method=self.method)(x)))
        x = nn.relu(_max_of_four(Conv(16, (5, 5), padding="VALID", method=self.method)(x)))
        x = x.reshape(x.shape[0], -1)
        for width in (120, 84):
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(self.num_outputs)(x)


class SmallCnn(nn.Module):
    """Two convolutions that halve the image, and a dense layer."""

    num_outputs: int = 10
    width: int = 16
    method: Method = "patches"

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Return ``[n, num_outputs]``."""
        for features in (self.width, 2 * self.width):
            x = nn.relu(Conv(features, (3, 3), 2, method=self.method)(x))
        return nn.Dense(self.num_outputs)(x.reshape(x.shape[0], -1))


def _max_of_four(x: Array) -> Array:
    # A reshape and a maximum, because the gradient of a pooling window is slow on CPU.
    num, height, width, channels = x.shape
    return x.reshape(num, height // 2, 2, width // 2, 2, channels).max(axis=(2, 4))


class FilterResponseNorm(nn.Module):
    """Divide each channel of each image by its root mean square, scale and shift it.

    With `threshold` the result is at least a third parameter ``tau`` a channel (the thresholded
    linear unit). Source: Singh and Krishnan (2020), Filter response normalization layer, eqs. 1-3.
    """

    epsilon: float = 1e-6
    threshold: bool = True

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Return an array of the shape of `x`, ``[n, height, width, channels]``."""
        shape = (1, 1, 1, x.shape[-1])
        names = ["scale", "bias", "threshold"][: 3 if self.threshold else 2]
        starts = [nn.initializers.ones, nn.initializers.zeros, nn.initializers.zeros]
        given = [self.param(n, start, shape[3:]) for n, start in zip(names, starts, strict=False)]
        scale, bias, *threshold = (leaf.reshape(shape) for leaf in given)
        square = jnp.mean(jnp.square(x), axis=(1, 2), keepdims=True)
        x = x * jax.lax.rsqrt(square + self.epsilon) * scale + bias
        return jnp.maximum(x, threshold[0]) if threshold else x


class ResNet(nn.Module):
    """Residual network for small images, with `FilterResponseNorm` and swish.

    Three stages of `num_blocks` blocks with two 3 x 3 convolutions each, whose width doubles and
    whose images halve from one stage to the next; projections where shapes change; a mean over
    all places. Source: Izmailov et al. (2021), What are Bayesian neural network posteriors really
    like?, with the depth ``6 * num_blocks + 2``.
    """

    num_blocks: int
    num_outputs: int = 10
    width: int = 16
    activation: Callable[[Array], Array] = nn.swish
    threshold: bool = True
    method: Method = "lax"

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Return ``[n, num_outputs]``."""

        def layer(x: Array, features: int, size: int = 3, strides: int = 1) -> Array:
            init = nn.initializers.he_normal()
            x = Conv(features, (size,) * 2, strides, method=self.method, kernel_init=init)(x)
            return FilterResponseNorm(threshold=self.threshold)(x)

        x = self.activation(layer(x, self.width))
        for stage in range(3):
            features = self.width * 2**stage
            for block in range(self.num_blocks):
                halves = stage > 0 and block == 0
                strides = 2 if halves else 1
                y = self.activation(layer(x, features, strides=strides))
                y = layer(y, features)
                if halves:
                    x = layer(x, features, size=1, strides=strides)
                x = self.activation(x + y)
        return nn.Dense(self.num_outputs)(jnp.mean(x, axis=(1, 2)))


def resnet20(num_outputs: int = 10, **kwargs: object) -> ResNet:
    """Return the `ResNet` of depth 20 (274042 parameters for 10 outputs and 3 channels)."""
    return ResNet(3, num_outputs, **kwargs)
