"""All rescalings of gradients.

Log densities are sums over rows. The sum over a minibatch of ``m`` of a client's ``n`` rows is
multiplied by ``n / m``. The sum of a client that takes part with probability ``p`` is multiplied by
``1 / p``, and by ``1 / w_c`` if clients are averaged with weights ``w_c``. The prior counts once
for the federation.
"""

import jax.numpy as jnp
from jax import Array

from fedmcmc.pytrees import trees
from fedmcmc.types import ArrayTree, Client, Sender


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
    """Scale the prior's gradient by the client's share of all rows."""
    return trees.scale(client.share, gradient)
