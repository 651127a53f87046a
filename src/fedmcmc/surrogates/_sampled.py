"""Surrogates with the moments of local Langevin samples."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree

from fedmcmc._types import ArrayTree, Broadcast, Client, GradientEstimator, Posterior, compiled
from fedmcmc.data import CHUNK_ROWS, FederatedData
from fedmcmc.dynamics import overdamped_langevin
from fedmcmc.gaussian import Gaussian
from fedmcmc.gradients import Target, as_gaussian, for_batch_size, row_size
from fedmcmc.pytrees import trees
from fedmcmc.random import as_key, client_key, normals, realize_normals
from fedmcmc.surrogates import _checks as checks
from fedmcmc.surrogates._asking import rows_of, with_labels
from fedmcmc.surrogates._maxima import DENSE_LIMIT, over_clients

_CHAIN_NUMBERS = 2**16  # random numbers and rows a client prepares at a time


def sampled(
    rng_key: Array,
    posterior: Posterior,
    data: FederatedData,
    step_size: Any,
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

    The surrogate of El Mekkaoui et al. (2021), section 3.1. The samples have the law of the chain
    at its step size: for a Gaussian likelihood of precision ``A`` and full gradients a covariance
    of ``inv(A @ (I - step_size * A / 2))``, and minibatch noise adds to that.

    Parameters
    ----------
    rng_key
        Client ``i`` draws from keys folded with ``i``, whoever else is there.
    posterior, data
        The model and every client's rows.
    step_size
        ``[]`` or ``[num_clients]``; the paper's ``h`` is ``2 * step_size``.
    num_samples
        Samples per client.
    structure
        ``"diagonal"`` or ``"dense"``.
    position
        Where every chain starts; by default ``posterior.init_fn(rng_key)``.
    batch_size
        Rows of a minibatch (with replacement); ``None`` for full gradients.
    num_burnin, thinning
        Steps before the first sample, and from sample to sample.
    prior_fraction
        Sample ``likelihood * prior**prior_fraction``, then divide the prior's part out again by its
        second-order expansion at the mean (exact for a Gaussian prior).
    shrinkage
        Replace a sample covariance ``S`` by ``(1 - shrinkage) * S + shrinkage * diag(S)`` before it
        is inverted (dense only). By default this is done only where ``S`` is singular, as it is
        where `num_samples` does not exceed the dimension ``d``, then with
        ``d / (d + num_samples)``, and a warning tells so.
    check
        ``"error"``, ``"warn"`` or ``"ignore"``: what to do with samples that are not finite or not
        stationary, as those of an improper likelihood, along which the chain walks off. The chain
        must have lasted 20 relaxation times in its slowest direction (dimensions above 256: in its
        slowest coordinate, unless dense), about as many as 10 independent samples; raise
        `step_size` or `num_samples` where a proper likelihood fails, and for a good fit aim at
        hundreds. A random walk lasts that long in about one percent of chains. ``"ignore"`` also
        leaves the warning about shrinkage out.

    Raises
    ------
    ValueError
        On arguments out of range, without a position, and where a client's likelihood is improper.

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
    data = rows_of(data, "surrogates.sampled", "surrogates.laplace or surrogates.taylor ask them")
    checks.choices(check, structure)
    num_samples = checks.integer("num_samples", num_samples, 2)
    num_burnin = checks.integer("num_burnin", num_burnin, 0)
    thinning = checks.integer("thinning", thinning, 1)
    steps = _step_sizes(step_size, data.num_clients)
    if shrinkage is not None and not 0 <= shrinkage <= 1:
        raise ValueError(f"shrinkage must lie in [0, 1], got {shrinkage!r}.")
    position = checks.start_position(rng_key, posterior, position)
    # A walk along no axis shows in the whole covariance only.
    small = trees.num_elements(position) <= DENSE_LIMIT
    dense = structure == "dense" or (check != "ignore" and small)
    fitted, measured, amounts = _fit(
        checks.densities(posterior),
        for_batch_size(batch_size),
        data,
        position,
        as_key(rng_key),
        steps,
        checks.fraction(prior_fraction),
        shrinkage,
        chain=Chain(num_samples, num_burnin, thinning, batch_size, dense),
        structure=structure,
    )
    checks.complain(check, "sampled", checks.describe_chain, measured, data)
    if shrinkage is None and check != "ignore":
        checks.warn_shrinkage(amounts, data)
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


class Moments(NamedTuple):
    """Of a chain: `num` samples ``[]``, `mean` ``[d]``, `second` the sum of squares about the mean.

    `second` is ``[d, d]``, or ``[d]`` for its diagonal.
    """

    num: Array
    mean: Array
    second: Array


class Chain(NamedTuple):
    """Static lengths of a local chain: a sample every `thinning` steps after `num_burnin`."""

    num_samples: int
    num_burnin: int
    thinning: int
    batch_size: int | None
    dense: bool

    @property
    def num_steps(self) -> int:
        """Steps of the whole chain."""
        return self.num_burnin + self.num_samples * self.thinning


def _run_chain(
    target: Target,
    estimator: GradientEstimator,
    chain: Chain,
    block: int,
    rng_key: Array,
    position: ArrayTree,
    client: Client,
    step_size: Array,
) -> Moments:
    """Run Langevin steps on a client's target, `block` at a time; return its samples' moments."""
    loglikelihood_fn, like = target.posterior.loglikelihood_fn, trees.shapes_of(position)
    nothing = Broadcast(jnp.zeros((), jnp.int32), position)
    context, _ = estimator.start(loglikelihood_fn, nothing, (), client)

    def step(at: ArrayTree, draws: tuple[ArrayTree, ArrayTree]) -> tuple[ArrayTree, Array]:
        noise, rows = draws
        gradient = estimator.estimate(loglikelihood_fn, rows, at, context, client)
        if target.prior_fraction is not None:
            prior = jax.grad(target.posterior.logprior_fn)(at)
            gradient = trees.add_scaled(gradient, target.prior_fraction, prior)
        at = overdamped_langevin(at, gradient, realize_normals(noise, like), step_size)
        return at, ravel_pytree(at)[0]

    def run_block(
        carry: tuple[ArrayTree, Moments], number: Array
    ) -> tuple[tuple[ArrayTree, Moments], None]:
        noise_key, rows_key = jax.random.split(client_key(rng_key, number, client.index))
        noise = normals(noise_key, like, block)
        rows = estimator.prepare(rows_key, like, client, block)
        at, iterates = jax.lax.scan(step, carry[0], (noise, rows), length=block)
        done = number * block + jnp.arange(1, block + 1) - chain.num_burnin
        is_kept = (
            (done > 0) & (done % chain.thinning == 0) & (done <= chain.num_samples * chain.thinning)
        )
        return (at, _add_samples(carry[1], iterates, is_kept)), None

    zeros = jnp.zeros_like(ravel_pytree(position)[0])
    second = jnp.outer(zeros, zeros) if chain.dense else zeros
    empty = Moments(jnp.zeros((), zeros.dtype), zeros, second)
    blocks = jnp.arange(-(-chain.num_steps // block))
    return jax.lax.scan(run_block, (position, empty), blocks)[0][1]


def _add_samples(moments: Moments, samples: Array, is_kept: Array) -> Moments:
    """Merge samples ``[num, d]`` where `is_kept` holds (Chan, Golub and LeVeque 1983)."""
    is_kept = is_kept[:, None]
    count = jnp.sum(is_kept).astype(samples.dtype)
    mean = jnp.sum(jnp.where(is_kept, samples, 0), axis=0) / jnp.maximum(count, 1)
    centered = jnp.where(is_kept, samples - mean[None, :], 0)
    away = mean - moments.mean
    total = moments.num + count
    weight = count / jnp.maximum(total, 1)
    if moments.second.ndim == 1:
        second, between = jnp.sum(jnp.square(centered), axis=0), jnp.square(away)
    else:
        second = jnp.matmul(centered.T, centered, precision=jax.lax.Precision.HIGHEST)
        between = jnp.outer(away, away)
    return Moments(
        total,
        moments.mean + weight * away,
        moments.second + second + moments.num * weight * between,
    )


@compiled(static_argnames=("chain", "structure"))
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
    chain: Chain,
    structure: str,
) -> tuple[Gaussian, tuple[Array, Array, Array], Array]:
    """Return Gaussians of the clients' samples, arguments of `describe_chain`, and shrinkages."""
    flat, unravel = ravel_pytree(position)
    size, dense = flat.shape[0], structure == "dense"
    tilted = Target(posterior, prior_fraction, unravel)
    row = row_size(data.rows)
    numbers = size + (chain.batch_size or 0) * row
    # Depends on nothing that another client could change.
    block = max(1, min(chain.num_steps, _CHAIN_NUMBERS // max(numbers, 1)))

    def one(index: Array) -> tuple[Gaussian, tuple[Array, Array, Array], Array]:
        moments = _run_chain(
            tilted,
            estimator,
            chain,
            block,
            rng_key,
            position,
            data.client(index),
            step_size[index],
        )
        mean, covariance = moments.mean, moments.second / (moments.num - 1)
        variance = jnp.diagonal(covariance) if chain.dense else covariance
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
        largest = jnp.linalg.eigvalsh(covariance)[-1] if chain.dense else variance.max()
        time = step_size[index] * (chain.num_samples * chain.thinning)
        return fitted, (finite, jnp.all(variance > 0), time / largest), amount

    moment_numbers = size * size if chain.dense else size
    cost = block * (numbers + size) + min(data.max_size, CHUNK_ROWS) * row + moment_numbers
    return over_clients(one, data.num_clients, cost)


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
    # In units of its diagonal, the diagonal of a covariance is the identity.
    values = (1 - amount) * values + amount
    inverse = jnp.matmul(vectors / values[None, :], vectors.T, precision=jax.lax.Precision.HIGHEST)
    return inverse / jnp.outer(scale, scale), amount
