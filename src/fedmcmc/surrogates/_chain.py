"""Local Langevin chains on one client's likelihood, and the moments of their samples."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree

from fedmcmc._types import ArrayTree, Broadcast, GradientEstimator
from fedmcmc.data import CHUNK_ROWS, FederatedData
from fedmcmc.dynamics import overdamped_langevin
from fedmcmc.pytrees import trees
from fedmcmc.random import streams
from fedmcmc.surrogates._target import Target, row_size

__all__ = ["Chain", "Moments", "run_chain"]

_CHAIN_NUMBERS = 2**16  # random numbers and rows a client prepares at a time


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

    def block(self, data: FederatedData, size: int) -> int:
        """Return the steps whose random numbers are drawn at a time.

        Depends on nothing that another client could change.
        """
        numbers = size + (self.batch_size or 0) * row_size(data)
        return max(1, min(self.num_steps, _CHAIN_NUMBERS // max(numbers, 1)))

    def cost(self, data: FederatedData, size: int) -> int:
        """Return about how many numbers the chain of one client takes."""
        step = size + (self.batch_size or 0) * row_size(data)
        rows = min(data.max_size, CHUNK_ROWS) * row_size(data)
        return self.block(data, size) * (step + size) + rows + (size * size if self.dense else size)


def run_chain(
    target: Target,
    estimator: GradientEstimator,
    chain: Chain,
    rng_key: Array,
    position: ArrayTree,
    data: FederatedData,
    index: Array,
    step_size: Array,
) -> Moments:
    """Run Langevin steps on the target of client `index`; return the moments of its samples."""
    client = data.client(index)
    like = trees.shapes_of(position)
    loglikelihood_fn = target.posterior.loglikelihood_fn
    nothing = Broadcast(jnp.zeros((), jnp.int32), position)
    size = trees.num_elements(like)
    block = chain.block(data, size)
    context, _ = estimator.start(loglikelihood_fn, nothing, (), client)

    def step(at: ArrayTree, draws: tuple[ArrayTree, ArrayTree]) -> tuple[ArrayTree, Array]:
        noise, rows = draws
        gradient = estimator.estimate(loglikelihood_fn, rows, at, context, client)
        if target.prior_fraction is not None:
            prior = jax.grad(target.posterior.logprior_fn)(at)
            gradient = trees.add_scaled(gradient, target.prior_fraction, prior)
        at = overdamped_langevin(at, gradient, streams.realize_normals(noise, like), step_size)
        return at, ravel_pytree(at)[0]

    def run_block(
        carry: tuple[ArrayTree, Moments], number: Array
    ) -> tuple[tuple[ArrayTree, Moments], None]:
        noise_key, rows_key = jax.random.split(streams.client_key(rng_key, number, index))
        noise = streams.normals(noise_key, like, block)
        rows = estimator.prepare(rows_key, like, client, block)
        at, iterates = jax.lax.scan(step, carry[0], (noise, rows), length=block)
        done = number * block + jnp.arange(1, block + 1) - chain.num_burnin
        is_kept = (
            (done > 0) & (done % chain.thinning == 0) & (done <= chain.num_samples * chain.thinning)
        )
        return (at, _add_samples(carry[1], iterates, is_kept)), None

    flat = ravel_pytree(position)[0]
    shape = (size, size) if chain.dense else (size,)
    empty = Moments(jnp.zeros((), flat.dtype), jnp.zeros_like(flat), jnp.zeros(shape, flat.dtype))
    blocks = jnp.arange(-(-chain.num_steps // block))
    return jax.lax.scan(run_block, (position, empty), blocks)[0][1]


def _add_samples(moments: Moments, samples: Array, is_kept: Array) -> Moments:
    """Merge samples ``[num, d]`` where `kept` holds (Chan, Golub and LeVeque 1983)."""
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
