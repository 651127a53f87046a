"""The posterior's maximum, found by exchanging sums over clients."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree

from fedmcmc._types import ArrayTree, Posterior
from fedmcmc.data import FederatedData
from fedmcmc.pytrees import trees
from fedmcmc.surrogates._arguments import densities, integer
from fedmcmc.surrogates._newton import Maximum, maximize
from fedmcmc.surrogates._target import Target, value_and_gradient

__all__ = ["Mode", "mode"]


class Mode(NamedTuple):
    """The maximum of a posterior, and what finding it cost.

    Attributes
    ----------
    position
        A pytree.
    num_exchanges
        How often the position went down to every client and its log likelihood and gradient came
        up, an int; `setup_bits` counts the bits.
    gradient_norm
        ``[]``, of the log posterior at `position`.
    """

    position: ArrayTree
    num_exchanges: int
    gradient_norm: Array


def mode(
    posterior: Posterior,
    data: FederatedData,
    position: ArrayTree,
    *,
    max_steps: int = 200,
    tolerance: float = 1e-7,
) -> Mode:
    """Find the maximum of the posterior of all rows, a common center for `taylor`.

    The server runs the L-BFGS of optax, which needs only sums over clients of log likelihoods and
    gradients. A step takes one or a few evaluations. Each evaluation is one exchange: ``d`` numbers
    down and ``d + 1`` up for every client.

    Parameters
    ----------
    posterior, data
        The model and every client's rows.
    position
        Where to start.
    max_steps, tolerance
        Stop after so many steps, or when one promises to gain less than `tolerance` nats.

    Raises
    ------
    ValueError
        Where the ascent ends at a position that is not finite, or is unfinished after `max_steps`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from fedmcmc import FederatedData, Posterior, surrogates
    >>> posterior = Posterior(lambda t: -0.5 * t**2, lambda t, x: -0.5 * (x - t) ** 2)
    >>> data = FederatedData.from_clients([jnp.ones(4), jnp.zeros(3)])
    >>> round(float(surrogates.mode(posterior, data, jnp.array(3.0)).position), 4)
    0.5
    """
    max_steps = integer("max_steps", max_steps, 1)
    position = jax.tree.map(trees.as_float, position)
    with jax.default_matmul_precision("highest"):
        position, maximum = _fit(densities(posterior), data, position, max_steps, tolerance)
    norm = jnp.linalg.norm(maximum.gradient)
    if not np.isfinite(maximum.gain) or not np.isfinite(norm):
        raise ValueError(
            "mode: the log posterior or its gradient turned infinite or not-a-number: start from "
            "another position."
        )
    if not maximum.gain <= tolerance:
        raise ValueError(
            f"mode: not finished after {max_steps} steps, of which the last promised "
            f"{float(maximum.gain):.2g} nats: raise max_steps, or tolerance if that little does "
            f"not matter (0.01 is about a tenth of a standard deviation from the maximum)."
        )
    return Mode(position, int(maximum.num_evaluations), norm)


@jax.jit
def _fit(
    posterior: Posterior,
    data: FederatedData,
    position: ArrayTree,
    max_steps: Array,
    tolerance: Array,
) -> tuple[ArrayTree, Maximum]:
    """Return the maximum of the posterior of all rows."""
    start, unravel = ravel_pytree(position)
    target = Target(posterior, jnp.ones((), start.dtype), unravel)
    # A sum over clients of sums over their rows is the sum over all rows.
    everyone = data.pooled().client(0)
    maximum = maximize(
        lambda flat: value_and_gradient(target, everyone, flat), start, max_steps, tolerance
    )
    return unravel(maximum.flat), maximum
