"""Natural-gradient variational inference of a client's covariance."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree
from jax.tree_util import Partial

from fedmcmc import schedules, trees
from fedmcmc._types import ArrayTree, Client, Number, Posterior, Static
from fedmcmc.gaussian import Gaussian
from fedmcmc.inference._blocks import _check_fisher, _clip, scaled_addition
from fedmcmc.inference._fisher import fisher
from fedmcmc.inference._shapes import clipped, flat_precision, from_flat, in_structure
from fedmcmc.inference._types import Inference, Mean, Tilted, with_decay
from fedmcmc.streams import integers_below

__all__ = ["ngvi"]


class _Ngvi(NamedTuple):
    mean: Mean
    decay: Any
    scale: Any
    initial: Any  # () for the information at the mean
    num_steps: Static[int]
    num_samples: Static[int]
    batch_size: Static[int | None]
    clip: Static[float | None]


def ngvi(
    mean: Mean,
    *,
    num_steps: int,
    num_samples: int = 1,
    decay: Number = 0.99,
    initial: Number | None = None,
    batch_size: int | None = None,
    clip: float | None = None,
    scale: Number = 1.0,
) -> Inference:
    """Average the Fisher information over the tilted distribution itself (variant V).

    From ``s = initial`` on, each step draws `num_samples` positions with precision
    ``n_k * s + cavity`` about the tilted mean and moves ``s`` to
    ``decay * s + (1 - decay) * (their mean Fisher information a row)``. The mean stays where it
    was found.

    Parameters
    ----------
    mean
        How the tilted mean is found.
    num_steps, num_samples
        Steps, and positions a step.
    decay
        Between zero and one, ``beta``.
    initial
        Precision a row to start from; by default the Fisher information at the mean. Zero, as in
        the released code, takes a proper cavity.
    batch_size
        Rows a step, drawn with replacement; all of the client's by default, as in the paper. The
        released code takes a step a minibatch.
    clip
        As for `laplace`, of each step's information.
    scale
        As for `laplace`.

    References
    ----------
    Guo et al. (2023), Algorithm 5; Khan and Rue (2023), The Bayesian learning rule.
    """
    for name, number in (("num_steps", num_steps), ("num_samples", num_samples)):
        if int(number) != number or number < 1:
            raise ValueError(f"{name} must be a positive integer, got {number!r}.")
    if batch_size is not None and (int(batch_size) != batch_size or batch_size < 1):
        raise ValueError(f"batch_size must be a positive integer or None, got {batch_size!r}.")
    start: Any = () if initial is None else schedules.number(initial, "initial", minimum=0.0)
    settings = _Ngvi(
        mean,
        schedules.number(decay, "decay", minimum=0.0),
        schedules.number(scale, "scale", minimum=0.0, strict=True),
        start,
        Static(int(num_steps)),
        Static(int(num_samples)),
        Static(batch_size),
        Static(_clip(clip)),
    )
    return Inference(
        Partial(_prepare, settings), Partial(_fit, settings), Partial(_check_fisher, mean)
    )


class _Draws(NamedTuple):
    mean: ArrayTree
    first: Array
    steps: Array  # keys [num_steps]


def _prepare(settings: _Ngvi, rng_key: Array, like: ArrayTree, client: Client) -> _Draws:
    mean_key, first, steps = jax.random.split(rng_key, 3)
    return _Draws(
        settings.mean.prepare(mean_key, like, client),
        first,
        jax.random.split(steps, settings.num_steps.value),
    )


def _fit(
    settings: _Ngvi,
    posterior: Posterior,
    draws: _Draws,
    position: ArrayTree,
    cavity: Gaussian,
    client: Client,
    round_: Array,
) -> Tilted:
    mean, structure = settings.mean, cavity.structure
    target = with_decay(mean, cavity, client)
    found = mean.find(posterior, draws.mean, position, target, client, round_, None)
    dense, before = structure == "dense", flat_precision(target)
    size = client.size.astype(before.dtype)
    decay = trees.cast(schedules.value(settings.decay, round_), before)
    unravel = ravel_pytree(found.mean)[1]

    def information(key: Array, at: ArrayTree) -> Array:
        offsets, batch_size = None, settings.batch_size.value
        rows_key, label_key = jax.random.split(key)
        if batch_size is not None:
            offsets = integers_below(rows_key, client.size, (batch_size,))
        found_ = fisher(posterior, label_key, at, client, dense=dense, offsets=offsets)
        return in_structure(clipped(found_, settings.clip.value), structure)

    def sample(key: Array, per_row: Array) -> Array:
        draw_key, key = jax.random.split(key)
        q = from_flat(found.mean, size * per_row + before, structure)
        return information(key, unravel(ravel_pytree(q.draw(draw_key))[0]))

    def step(per_row: Array, key: Array) -> tuple[Array, None]:
        keys = jax.random.split(key, settings.num_samples.value)
        each = jax.lax.map(lambda k: sample(k, per_row), keys)
        return decay * per_row + (1 - decay) * jnp.mean(each, axis=0), None

    if trees.is_empty(settings.initial):
        first = information(draws.first, found.mean)
    else:
        number = trees.cast(schedules.value(settings.initial, round_), before)
        first = jnp.zeros_like(before) + (
            number * jnp.eye(before.shape[0], dtype=before.dtype) if dense else number
        )
    per_row, _ = jax.lax.scan(step, first, draws.steps)
    tilted = scaled_addition(
        found.mean, size * per_row, target, cavity, schedules.value(settings.scale, round_)
    )
    return Tilted(tilted, found.gradient_norm)
