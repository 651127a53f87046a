"""The networks of the federated benchmarks of Reddi et al. (2021), as flax modules.

Group normalisation in place of batch statistics (Hsieh et al. 2020), and no dropout: every row is
seen alone, and the likelihood of a row is a function of the parameters.
"""

import jax.numpy as jnp
from flax import linen as nn
from jax import Array

__all__ = ["EmnistCnn", "ResNet18"]


class ResNet18(nn.Module):
    """ResNet-18 for small images, pre-activation, with group normalisation: 11.2 million numbers.

    Four stages of two blocks of two 3 x 3 convolutions, 64 to 512 channels; projections where
    shapes change; a mean over all places.
    """

    num_outputs: int = 100
    width: int = 64
    num_groups: int = 2

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Return ``[n, num_outputs]``."""

        def convolve(x: Array, features: int, size: int, strides: int = 1) -> Array:
            init = nn.initializers.he_normal()
            return nn.Conv(features, (size, size), strides, use_bias=False, kernel_init=init)(x)

        def activate(x: Array) -> Array:
            return nn.relu(nn.GroupNorm(self.num_groups)(x))

        x = convolve(x, self.width, 3)
        for stage in range(4):
            features = self.width * 2**stage
            for block in range(2):
                changes = stage > 0 and block == 0
                strides = 2 if changes else 1
                y = activate(x)
                skip = convolve(y, features, 1, strides) if changes else x
                y = convolve(y, features, 3, strides)
                x = skip + convolve(activate(y), features, 3)
        return nn.Dense(self.num_outputs)(jnp.mean(activate(x), axis=(1, 2)))


class EmnistCnn(nn.Module):
    """Two convolutions, a maximum of four and two dense layers: 1.2 million numbers."""

    num_outputs: int = 62

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Return ``[n, num_outputs]``."""
        for features in (32, 64):
            x = nn.relu(nn.Conv(features, (3, 3), padding="VALID")(x))
        x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = nn.relu(nn.Dense(128)(x.reshape(x.shape[0], -1)))
        return nn.Dense(self.num_outputs)(x)
