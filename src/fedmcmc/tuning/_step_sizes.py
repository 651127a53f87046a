"""Step sizes of trajectories: from smoothness, for a tolerance, and falling with the round."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree

from fedmcmc._checks import check_positive_numbers, positive_integer
from fedmcmc.data import FederatedData
from fedmcmc.gradients import client_gradient, over_weight
from fedmcmc.pytrees import trees
from fedmcmc.types import ArrayTree, Client, Posterior, as_functions, compiled


class Smoothness(NamedTuple):
    """Curvatures of minus the log posterior and of the clients' weighted losses.

    Attributes
    ----------
    largest
        Largest eigenvalue of the Hessian of any client's weighted loss, the smoothness constant
        ``L`` of the papers.
    smallest
        Smallest eigenvalue ``mu`` of the Hessian of minus the log posterior.
    """

    largest: float
    smallest: float


def estimate_smoothness(
    rng_key: Array,
    posterior: Posterior,
    data: FederatedData,
    position: ArrayTree,
    *,
    weights: Array | None = None,
    num_steps: int = 100,
) -> Smoothness:
    """Estimate curvatures at a position, by power iteration on products with the Hessians.

    Each client can compute the largest eigenvalue of its Hessian alone. The smallest eigenvalue of
    the posterior needs one exchange of a vector per step.

    Parameters
    ----------
    rng_key
        Key for the initial vectors.
    posterior, data
        Model, and rows of all clients.
    position
        Position, preferably the mode (`fedmcmc.surrogates.mode`). Curvatures may be larger
        elsewhere.
    weights
        ``[num_clients]``, weights of the clients' losses in their average; shares of rows by
        default.
    num_steps
        Number of products with a Hessian. The largest eigenvalue is approached from below, the
        smallest from above, at a rate of the gap to the next eigenvalue.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(
    ...     lambda t: -0.5 * t**2, lambda t, x: -0.5 * (x - t) ** 2
    ... )
    >>> data = fedmcmc.FederatedData.from_clients([jnp.ones(3), jnp.zeros(5)])
    >>> smoothness = estimate_smoothness(jax.random.key(0), posterior, data, 0.0)
    >>> round(smoothness.largest, 4), round(smoothness.smallest, 4)
    (9.0, 9.0)
    """
    num_steps = positive_integer(num_steps, "num_steps")
    if not isinstance(data, FederatedData):
        raise TypeError(
            f"estimate_smoothness needs a FederatedData, got {type(data).__name__}. For remote "
            "clients, surrogates.taylor(posterior, data, position) returns curvatures."
        )
    position = trees.as_floats(position, "position")
    shares = data.share if weights is None else jnp.asarray(weights, jnp.result_type(float))
    if shares.shape != (data.num_clients,):
        raise ValueError(
            f"weights must have shape ({data.num_clients},), one per client, got {shares.shape}."
        )
    largest, smallest = _curvatures(
        rng_key, as_functions(posterior), data, position, shares, num_steps=num_steps
    )
    return Smoothness(float(jnp.max(largest)), float(smallest))


@compiled(static_argnames=("num_steps",))
def _curvatures(
    rng_key: Array,
    posterior: Posterior,
    data: FederatedData,
    position: ArrayTree,
    weights: Array,
    *,
    num_steps: int,
) -> tuple[Array, Array]:
    """Return each client's largest eigenvalue and the posterior's smallest eigenvalue."""
    flat, unravel = ravel_pytree(position)
    clients = data.everyone()
    axes = (0, data.client_axes())

    def loss_gradient(x: Array, weight: Array, client: Client) -> Array:
        theta = unravel(x)
        gradient = client_gradient(posterior.loglikelihood_fn, theta, client)
        total = trees.add(over_weight(weight, gradient), jax.grad(posterior.logprior_fn)(theta))
        return -ravel_pytree(total)[0]

    def hessian_product(vector: Array, weight: Array, client: Client) -> Array:
        return jax.jvp(lambda x: loss_gradient(x, weight, client), (flat,), (vector,))[1]

    def posterior_product(vector: Array) -> Array:
        products = jax.vmap(lambda w, c: hessian_product(vector, w, c), in_axes=axes)
        return weights @ products(weights, clients)

    start = jax.random.normal(rng_key, flat.shape, flat.dtype)

    def dominant(apply: Callable[[Array], Array]) -> Array:
        """Return the eigenvalue with the largest absolute value."""

        def step(_: Array, pair: tuple[Array, Array]) -> tuple[Array, Array]:
            norm = jnp.linalg.norm(pair[0])
            vector = pair[0] / jnp.where(norm > 0, norm, 1)
            image = apply(vector)
            return image, vector @ image

        return jax.lax.fori_loop(0, num_steps, step, (start, jnp.zeros((), flat.dtype)))[1]

    def extreme(apply: Callable[[Array], Array], sign: float) -> Array:
        """Return the largest eigenvalue, or the smallest one for ``sign=-1``."""
        # The shift makes its absolute value the largest.
        shift = 1.05 * jnp.abs(dominant(apply))
        return sign * (dominant(lambda v: shift * v + sign * apply(v)) - shift)

    largest = jax.vmap(lambda w, c: extreme(lambda v: hessian_product(v, w, c), 1.0), in_axes=axes)
    return largest(weights, clients), extreme(posterior_product, -1.0)


def proposition_step_size(
    smoothness: float | Smoothness,
    *,
    dimension: int,
    num_integration_steps: int,
    num_local_steps: int,
    tolerance: float = 0.1,
) -> float:
    """Return a leapfrog step size for `fedmcmc.fa_hmc` with exact gradients, from a proposition.

    The step size ``eta`` of ``L`` integration steps and ``T`` local steps satisfies ``(L eta)^2 = 4
    tolerance / (T smoothness sqrt(d))``, at most ``1 / smoothness``. By Proposition 4.3, the number
    of rounds to a given accuracy then grows with the root of the dimension ``d`` and hardly depends
    on ``T``.

    Parameters
    ----------
    smoothness
        Largest curvature of any client's weighted loss: a number, or the result of
        `estimate_smoothness`.
    dimension
        Number of elements of a position.
    num_integration_steps, num_local_steps
        See `fedmcmc.fa_hmc`.
    tolerance
        Limit on the 2-Wasserstein distance to the posterior, in ``1 / sqrt(smoothness)``.

    Raises
    ------
    ValueError
        If a number is not positive.

    Notes
    -----
    The powers of ``d`` and ``T`` follow from the conclusion of the proposition; the constant 4 is
    ours, from the leading bias on Gaussian clients (``docs/explanation/exact_distributions.md``).
    The result is too large if gradients are longer than ``sqrt(smoothness d)``: prefer
    `fedmcmc.tune`.

    References
    ----------
    Liang et al. (2024), Proposition 4.3.

    Examples
    --------
    >>> settings = dict(num_integration_steps=10, num_local_steps=5)
    >>> small, large = (proposition_step_size(4.0, dimension=d, **settings) for d in (16, 256))
    >>> round(small / large, 6)
    2.0
    """
    if isinstance(smoothness, Smoothness):
        smoothness = smoothness.largest
    check_positive_numbers(
        smoothness=smoothness,
        dimension=dimension,
        num_integration_steps=num_integration_steps,
        num_local_steps=num_local_steps,
        tolerance=tolerance,
    )
    squared_length = 4 * tolerance / (num_local_steps * smoothness * math.sqrt(dimension))
    return math.sqrt(min(squared_length, 1 / smoothness)) / num_integration_steps


def inverse_sqrt_schedule(step_size: float, decay_rounds: float) -> Callable[[Array], Array]:
    """Return a schedule of leapfrog step sizes, ``step_size / sqrt(1 + round / decay_rounds)``.

    Its square, the step size of Langevin dynamics, falls as one over the round. So the bias of a
    constant step size vanishes, while the simulated time, the sum of squares, still diverges.

    Parameters
    ----------
    step_size
        Step size in round zero.
    decay_rounds
        Number of rounds until the square has halved.

    References
    ----------
    Liang et al. (2024), Proposition 4.5; its constants are in the supplement.

    Examples
    --------
    >>> schedule = inverse_sqrt_schedule(0.1, 100)
    >>> [round(float(schedule(r)), 3) for r in (0, 300)]
    [0.1, 0.05]
    """
    check_positive_numbers(step_size=step_size, decay_rounds=decay_rounds)

    def schedule(round_: Array) -> Array:
        return step_size / jnp.sqrt(1 + jnp.asarray(round_, float) / decay_rounds)

    return schedule
