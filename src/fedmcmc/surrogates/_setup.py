"""What setting up conducive gradients costs in communication."""

import jax

from fedmcmc.gaussian import Gaussian
from fedmcmc.pytrees import trees

__all__ = ["setup_bits"]


def setup_bits(surrogates: Gaussian, *, num_exchanges: int = 0) -> int:
    """Return the bits that setting up conducive gradients costs all clients together.

    Up: each client's natural parameters. Down: their sums, to each client. A dense precision is
    symmetric and counts ``d * (d + 1) / 2`` numbers. With `Mode.num_exchanges`, also what finding
    the common center of `taylor` cost: per exchange and client ``d`` numbers down, ``d + 1`` up.

    Examples
    --------
    Two clients, two dimensions, dense: five numbers up and five down, each 32 bits.

    >>> import jax.numpy as jnp
    >>> from fedmcmc import Gaussian, surrogates
    >>> q = Gaussian.from_moments(jnp.zeros((2, 2)), jnp.stack([jnp.eye(2)] * 2))
    >>> surrogates.setup_bits(q)
    640
    """
    num_clients = jax.tree.leaves(surrogates.precision_mean)[0].shape[0]
    down = trees.num_bits(surrogates.precision_mean)
    precision = trees.num_bits(surrogates.precision)
    if surrogates.structure == "dense":
        size = surrogates.precision.shape[-1]
        precision = precision // (size * size) * (size * (size + 1) // 2)
    value = down // trees.num_elements(surrogates.precision_mean) * num_clients
    return 2 * (down + precision) + num_exchanges * (2 * down + value)
