"""Mode of the posterior of all rows."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedmcmc._checks import positive_integer
from fedmcmc.pytrees import trees
from fedmcmc.surrogates._ascents import (
    IMPOSSIBLE,
    NEWTON_DIMENSIONS,
    ROUNDING,
    Ledger,
    Objective,
    lbfgs,
    newton,
    run_ascents,
)
from fedmcmc.surrogates._checks import densities_of
from fedmcmc.surrogates._clients import as_summing_consortium
from fedmcmc.surrogates._nonfinite import explain_nonfinite, positions_around
from fedmcmc.types import ArrayTree, Posterior

SCALING_HINT = (
    "The usual reason is covariates whose mean is large compared with their sd (a year near 2000): "
    "center and scale them."
)


class ModeResult(NamedTuple):
    """Mode of a posterior, and the cost of the search.

    Attributes
    ----------
    position
        Position of the mode, a pytree.
    num_exchanges
        Number of exchanges, in each of which all clients receive a position and send their log
        likelihoods and derivatives.
    gradient_norm
        Norm of the log posterior's gradient at the last position of an exchange; with Newton's
        method `position` is one step further.
    bits_up, bits_down
        Number of bits that all clients send and receive.
    """

    position: ArrayTree
    num_exchanges: int
    gradient_norm: float
    bits_up: float
    bits_down: float


def mode(
    posterior: Posterior,
    data: object,
    position: ArrayTree,
    *,
    max_steps: int = 200,
    tolerance: float = 1e-7,
) -> ModeResult:
    """Find the mode of the posterior of all rows, a common center for `taylor`.

    The search uses Newton's method with a trust region up to 256 dimensions, and L-BFGS above. Each
    evaluation is one exchange: each client receives ``d`` numbers and sends its log likelihood, its
    gradient and, for Newton's method, the upper triangle of its Hessian.

    Parameters
    ----------
    posterior
        The model.
    data
        A `FederatedData`, or a consortium of clients.
    position
        Start of the search.
    max_steps, tolerance
        Largest number of steps, and predicted gain of a step, in nats, below which the search ends.

    Raises
    ------
    ValueError
        If the search ends at a position that is not finite, or does not end after `max_steps`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from fedmcmc import FederatedData, Posterior, surrogates
    >>> posterior = Posterior(lambda t: -0.5 * t**2, lambda t, x: -0.5 * (x - t) ** 2)
    >>> data = FederatedData.from_clients([jnp.ones(4), jnp.zeros(3)])
    >>> round(float(surrogates.mode(posterior, data, jnp.array(3.0)).position), 4)
    0.5
    """
    max_steps = positive_integer(max_steps, "max_steps")
    position = trees.as_floats(position, "position")
    flat = trees.ravel(position)
    by_newton = flat.shape[0] <= NEWTON_DIMENSIONS
    ledger = Ledger(as_summing_consortium(data))
    expand = Objective(densities_of(posterior), ledger, position, "dense" if by_newton else "none")
    # Newton's method needs one evaluation per step, L-BFGS sometimes two.
    max_evaluations = (1 if by_newton else 2) * max_steps + 1
    ascend = partial(newton, accept_flat=True) if by_newton else lbfgs
    ascent = ascend(np.asarray(flat, np.float64), min_gain=tolerance)
    with jax.default_matmul_precision("highest"):
        (best,) = run_ascents(expand, [ascent], max_evaluations)
    norm = float(np.linalg.norm(best.gradient))
    if not best.value < IMPOSSIBLE or not np.isfinite(norm):
        explain_nonfinite(expand.posterior, ledger.consortium, positions_around(position))
        raise ValueError(
            "mode: the log posterior or its gradient became infinite or not-a-number. Pass another "
            "position=: zeros if a log link overflows, for example with covariates in the "
            "hundreds; or scale the covariates."
        )
    if not best.gain <= tolerance or best.falls:
        repeated = expand(best.point[None])[0]
        difference = float(np.linalg.norm(repeated.gradient - best.gradient))
        if difference > ROUNDING * norm:
            raise ValueError(
                f"mode: the same question has two answers, gradients of length {norm:.2g} that are "
                f"{difference:.2g} apart, because messages are rounded. No step therefore gains "
                f"less than {tolerance:g} nats. Use no compression, or more levels, or raise "
                f"tolerance."
            )
        raise ValueError(
            f"mode: not finished after {max_steps} steps, of which the last has a predicted gain "
            f"of {best.gain:.2g} nats: raise max_steps, or tolerance if this gain does not matter "
            f"(0.01 nats is about a tenth of a standard deviation from the maximum). {SCALING_HINT}"
        )
    # With a Hessian a last step needs no exchange.
    point = best.point if best.clipped else best.point + best.step
    end = trees.unravel(jnp.asarray(point, flat.dtype), position)
    return ModeResult(trees.cast_like(end, position), ledger.rounds, norm, ledger.up, ledger.down)
