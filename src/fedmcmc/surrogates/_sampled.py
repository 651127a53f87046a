"""Surrogates with the moments of local Langevin samples."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree
from jax.typing import ArrayLike

from fedmcmc.data import CHUNK_ROWS, FederatedData
from fedmcmc.dynamics import overdamped_langevin
from fedmcmc.gaussian import Gaussian
from fedmcmc.gradients import ClientDensity, as_gaussian, for_batch_size, row_size
from fedmcmc.pytrees import trees
from fedmcmc.random import as_key, client_key, normals, realize_normals
from fedmcmc.surrogates import _checks as checks
from fedmcmc.surrogates._clients import map_clients, require_rows, with_labels
from fedmcmc.types import ArrayTree, Broadcast, Client, GradientEstimator, Posterior, compiled

BLOCK_NUMBERS = 2**16
"""Number of random numbers and numbers of rows that a client prepares at a time."""


def sampled(
    rng_key: Array,
    posterior: Posterior,
    data: FederatedData,
    step_size: ArrayLike,
    num_samples: int = 3000,
    *,
    structure: str = "diagonal",
    position: ArrayTree = None,
    batch_size: int | None = None,
    num_burnin: int = 1000,
    thinning: int = 1,
    prior_fraction: float = 0.0,
    shrinkage: float | None = None,
    check: str = "error",
) -> Gaussian:
    """Fit moments of local Langevin (SGLD) samples of each client's likelihood.

    This is the surrogate of El Mekkaoui et al. (2021), section 3.1. The samples have the stationary
    distribution of the chain at its step size: for a Gaussian likelihood of precision ``A`` and
    full gradients, the covariance is ``inv(A @ (I - step_size * A / 2))``; minibatches increase it.

    Parameters
    ----------
    rng_key
        Random key; client ``i`` uses keys folded with ``i``.
    posterior, data
        Model, and every client's rows.
    step_size
        Step size, ``[]`` or ``[num_clients]``; the paper's ``h`` is ``2 * step_size``.
    num_samples
        Number of samples per client.
    structure
        ``"diagonal"`` or ``"dense"``.
    position
        Start of all chains; by default ``posterior.init_fn(rng_key)``.
    batch_size
        Number of rows per minibatch (with replacement); ``None`` for full gradients.
    num_burnin, thinning
        Number of steps before the first sample, and from sample to sample.
    prior_fraction
        Power of the prior by which the sampled likelihood is multiplied. The fit divides it out
        again by its second-order expansion at the mean, exactly for a Gaussian prior.
    shrinkage
        Weight of the diagonal: a sample covariance ``S`` becomes
        ``(1 - shrinkage) * S + shrinkage * diag(S)`` before inversion (dense only). By default only
        a singular ``S`` is shrunk, with ``d / (d + num_samples)`` and a warning; it is singular if
        `num_samples` does not exceed the dimension ``d``.
    check
        ``"error"``, ``"warn"`` or ``"ignore"``: action if samples are not finite or not stationary,
        for example because the likelihood is improper. Stationary means a length of 20 relaxation
        times, about 10 independent samples, in the slowest direction (above 256 dimensions in the
        slowest coordinate, unless dense). If a proper likelihood fails, raise `step_size` or
        `num_samples`; a good fit has hundreds. About one percent of random walks pass.
        ``"ignore"`` also omits the warning about shrinkage.

    Raises
    ------
    ValueError
        If an argument is out of range, without a position, or if a client's likelihood is improper.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from fedmcmc import FederatedData, Posterior, surrogates
    >>> posterior = Posterior(lambda t: -0.5 * t**2, lambda t, x: -0.5 * (x - t) ** 2)
    >>> data = FederatedData.from_clients([jnp.ones(4), jnp.zeros(8)])
    >>> q = surrogates.sampled(
    ...     jax.random.key(0), posterior, data, step_size=0.02, position=jnp.array(0.0)
    ... )
    >>> q.precision.shape
    (2,)
    """
    data = require_rows(data, "surrogates.sampled", "surrogates.laplace or surrogates.taylor")
    checks.check_choices(check, structure)
    num_samples = checks.integer_from(2, num_samples, "num_samples")
    num_burnin = checks.integer_from(0, num_burnin, "num_burnin")
    thinning = checks.integer_from(1, thinning, "thinning")
    steps = _step_sizes(step_size, data.num_clients)
    if shrinkage is not None and not 0 <= shrinkage <= 1:
        raise ValueError(f"shrinkage must lie in [0, 1], got {shrinkage!r}.")
    position = checks.start_position(rng_key, posterior, position)
    # A diagonal covariance does not show a random walk along a direction that is no axis.
    small = trees.num_elements(position) <= checks.MAX_DENSE_CHECK
    dense = structure == "dense" or (check != "ignore" and small)
    fitted, measured, amounts = _fit(
        checks.densities_of(posterior),
        for_batch_size(batch_size),
        data,
        position,
        as_key(rng_key),
        steps,
        checks.positive_or_none(prior_fraction),
        shrinkage,
        lengths=ChainLengths(num_samples, num_burnin, thinning, batch_size, dense),
        structure=structure,
    )
    checks.report_bad_clients(check, "sampled", checks.describe_chain, measured, data)
    if shrinkage is None and check != "ignore":
        checks.warn_of_shrinkage(amounts, data)
    return with_labels(fitted, data)


def _step_sizes(step_size: Any, num_clients: int) -> Array:
    """Return one step size per client."""
    steps = trees.as_float(step_size)
    if steps.shape not in ((), (num_clients,)):
        raise ValueError(
            f"step_size must be a number or one per client, ({num_clients},), got {steps.shape}."
        )
    if not isinstance(steps, jax.core.Tracer) and not bool(jnp.all(steps > 0)):
        raise ValueError(f"step_size must be positive, got {step_size!r}.")
    return jnp.broadcast_to(steps, (num_clients,))


class SampleMoments(NamedTuple):
    """Moments of the samples of a chain.

    Attributes
    ----------
    num, mean
        Number of samples ``[]``, and their mean ``[d]``.
    second
        Sum of squares about the mean, ``[d, d]``, or its diagonal ``[d]``.
    """

    num: Array
    mean: Array
    second: Array


class ChainLengths(NamedTuple):
    """Static settings of a local chain, see `sampled`; `dense` is that of its moments."""

    num_samples: int
    num_burnin: int
    thinning: int
    batch_size: int | None
    dense: bool

    @property
    def num_steps(self) -> int:
        """Total number of steps."""
        return self.num_burnin + self.num_samples * self.thinning


def _run_chain(
    target: ClientDensity,
    estimator: GradientEstimator,
    lengths: ChainLengths,
    block: int,
    rng_key: Array,
    position: ArrayTree,
    client: Client,
    step_size: Array,
) -> SampleMoments:
    """Run Langevin steps on a client's target, `block` at a time; return the samples' moments."""
    loglikelihood_fn, like = target.posterior.loglikelihood_fn, trees.shapes_of(position)
    broadcast = Broadcast(jnp.zeros((), jnp.int32), position)
    context, _ = estimator.start(loglikelihood_fn, broadcast, (), client)

    def step(current: ArrayTree, draws: tuple[ArrayTree, ArrayTree]) -> tuple[ArrayTree, Array]:
        noise, rows = draws
        gradient = estimator.estimate(loglikelihood_fn, rows, current, context, client)
        if target.prior_fraction is not None:
            prior = jax.grad(target.posterior.logprior_fn)(current)
            gradient = trees.add_scaled(gradient, target.prior_fraction, prior)
        noise = realize_normals(noise, like)
        following = overdamped_langevin(current, gradient, noise, step_size)
        return following, ravel_pytree(following)[0]

    def run_block(
        carry: tuple[ArrayTree, SampleMoments], number: Array
    ) -> tuple[tuple[ArrayTree, SampleMoments], None]:
        noise_key, rows_key = jax.random.split(client_key(rng_key, number, client.index))
        noise = normals(noise_key, like, block)
        rows = estimator.prepare(rows_key, like, client, block)
        end, iterates = jax.lax.scan(step, carry[0], (noise, rows), length=block)
        age = number * block + jnp.arange(1, block + 1) - lengths.num_burnin
        max_age = lengths.num_samples * lengths.thinning
        is_sample = (age > 0) & (age % lengths.thinning == 0) & (age <= max_age)
        return (end, _add_samples(carry[1], iterates, is_sample)), None

    zeros = jnp.zeros_like(ravel_pytree(position)[0])
    second = jnp.outer(zeros, zeros) if lengths.dense else zeros
    empty = SampleMoments(jnp.zeros((), zeros.dtype), zeros, second)
    blocks = jnp.arange(-(-lengths.num_steps // block))
    return jax.lax.scan(run_block, (position, empty), blocks)[0][1]


def _add_samples(moments: SampleMoments, iterates: Array, is_sample: Array) -> SampleMoments:
    """Add those iterates ``[num, d]`` that are samples (Chan et al. 1983)."""
    is_sample = is_sample[:, None]
    count = jnp.sum(is_sample).astype(iterates.dtype)
    mean = jnp.sum(jnp.where(is_sample, iterates, 0), axis=0) / jnp.maximum(count, 1)
    centered = jnp.where(is_sample, iterates - mean[None, :], 0)
    difference = mean - moments.mean
    total = moments.num + count
    weight = count / jnp.maximum(total, 1)
    if moments.second.ndim == 1:
        second, between = jnp.sum(jnp.square(centered), axis=0), jnp.square(difference)
    else:
        second = jnp.matmul(centered.T, centered, precision=jax.lax.Precision.HIGHEST)
        between = jnp.outer(difference, difference)
    return SampleMoments(
        total,
        moments.mean + weight * difference,
        moments.second + second + moments.num * weight * between,
    )


@compiled(static_argnames=("lengths", "structure"))
def _fit(
    posterior: Posterior,
    estimator: GradientEstimator,
    data: FederatedData,
    position: ArrayTree,
    rng_key: Array,
    step_size: Array,
    prior_fraction: Array | None,
    shrinkage: float | Array | None,
    *,
    lengths: ChainLengths,
    structure: str,
) -> tuple[Gaussian, tuple[Array, Array, Array], Array]:
    """Return Gaussians of the clients' samples, arguments of `describe_chain`, and shrinkages."""
    flat, unravel = ravel_pytree(position)
    size, dense = flat.shape[0], structure == "dense"
    tilted = ClientDensity(posterior, prior_fraction, unravel)
    row = row_size(data.rows)
    step_numbers = size + (lengths.batch_size or 0) * row
    # The block does not depend on the data of other clients, so that no draw does.
    block = max(1, min(lengths.num_steps, BLOCK_NUMBERS // max(step_numbers, 1)))

    def fit_client(index: Array) -> tuple[Gaussian, tuple[Array, Array, Array], Array]:
        moments = _run_chain(
            tilted,
            estimator,
            lengths,
            block,
            rng_key,
            position,
            data.client(index),
            step_size[index],
        )
        mean, covariance = moments.mean, moments.second / (moments.num - 1)
        variance = jnp.diagonal(covariance) if lengths.dense else covariance
        amount = jnp.zeros_like(moments.num)
        if dense:
            precision, amount = _regularized_inverse(covariance, moments.num, shrinkage)
        else:
            precision = 1 / variance
        gradient = jnp.zeros_like(mean)
        if prior_fraction is not None:
            prior_gradient, prior_precision = tilted.expand_prior(mean, dense)
            gradient, precision = gradient - prior_gradient, precision - prior_precision
        fitted = as_gaussian(gradient, precision, mean, unravel)
        finite = jnp.all(jnp.isfinite(mean)) & jnp.all(jnp.isfinite(covariance))
        largest = jnp.linalg.eigvalsh(covariance)[-1] if lengths.dense else variance.max()
        time = step_size[index] * (lengths.num_samples * lengths.thinning)
        return fitted, (finite, jnp.all(variance > 0), time / largest), amount

    moment_numbers = size * size if lengths.dense else size
    numbers = block * (step_numbers + size) + min(data.max_size, CHUNK_ROWS) * row + moment_numbers
    return map_clients(fit_client, data.num_clients, numbers)


def _regularized_inverse(
    covariance: Array, num: Array, shrinkage: float | Array | None
) -> tuple[Array, Array]:
    """Invert a covariance of `num` samples, regularized if it is singular; return the amount."""
    scale, values, vectors = checks.scaled_eigen(covariance)
    assert vectors is not None
    if shrinkage is None:
        size = values.shape[0]
        singular = values.min() <= checks.singular_below(values)
        amount = jnp.where(singular, size / (size + num), 0)
    else:
        amount = trees.cast(shrinkage, values)
    # The scaled covariance has a unit diagonal.
    values = (1 - amount) * values + amount
    inverse = jnp.matmul(vectors / values[None, :], vectors.T, precision=jax.lax.Precision.HIGHEST)
    return inverse / jnp.outer(scale, scale), amount
