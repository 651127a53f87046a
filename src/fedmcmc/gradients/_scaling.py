"""Every rescaling of a gradient, in one place.

Log densities are sums over rows. A minibatch of ``m`` rows out of a client's ``n`` stands for
``n / m`` times its own sum; a client that takes part with probability ``p`` stands for ``1 / p``
times its own; the prior counts once for the whole federation. Where clients are averaged with
weights ``w_c``, a client stands for ``1 / w_c`` times its own.
"""

import jax.numpy as jnp
from jax import Array

from fedmcmc._types import ArrayTree, Client, Sender
from fedmcmc.pytrees import trees


def rows_over_batch(client: Client, batch_size: Array | int, gradient: ArrayTree) -> ArrayTree:
    """Scale a sum over `batch_size` of the client's rows to a sum over all of them."""
    size = client.size.astype(client.share.dtype)
    return trees.scale(size / jnp.asarray(batch_size).astype(size.dtype), gradient)


def importance(client: Client | Sender, gradient: ArrayTree) -> ArrayTree:
    """Scale a client's sum by one over its probability of taking part."""
    return trees.scale(client.weight, gradient)


def over_weight(weight: Array, gradient: ArrayTree) -> ArrayTree:
    """Scale a client's sum to the gradient of its weighted loss, by one over its weight."""
    return trees.scale(1 / weight, gradient)


def prior_share(client: Client, gradient: ArrayTree) -> ArrayTree:
    """Scale the prior's gradient to the client's part of it: its share of all rows."""
    return trees.scale(client.share, gradient)
