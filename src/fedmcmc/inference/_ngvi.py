"""Natural-gradient variational inference of a client's covariance."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree
from jax.tree_util import register_dataclass

from fedmcmc._checks import expect, positive_integer
from fedmcmc._types import ArrayTree, Client, Number, Posterior
from fedmcmc.gaussian import Gaussian
from fedmcmc.gradients import offsets_of_call, steps_an_epoch
from fedmcmc.inference._fisher import FisherInference, fisher
from fedmcmc.inference._shapes import (
    checked_clip,
    clipped,
    flat_precision,
    from_flat,
    in_structure,
)
from fedmcmc.inference._types import Inference, Mean, Tilted
from fedmcmc.pytrees import schedules, trees
from fedmcmc.random import integers_below

__all__ = ["ngvi"]


class _Length(NamedTuple):
    """Steps, or passes over the client's rows in minibatches."""

    num_steps: int | None
    num_epochs: int | None
    batch_size: int | None

    def steps(self, client: Client) -> Array | int:
        if self.num_epochs is None:
            assert self.num_steps is not None
            return self.num_steps
        return self.num_epochs * steps_an_epoch(client.size, self.batch_size)

    def most(self, client: Client) -> int:
        """Return a static bound on the number of steps."""
        if self.num_epochs is None:
            assert self.num_steps is not None
            return self.num_steps
        return self.num_epochs * -(-client.max_size // (self.batch_size or client.max_size))

    def offsets(self, rows_key: Array, passes: Array, i: Array, client: Client) -> Array | None:
        """Return which rows step `i` uses, ``[batch_size]``; ``None`` for all."""
        if self.batch_size is None:
            return None
        if self.num_epochs is None:
            return integers_below(rows_key, client.size, (self.batch_size,))
        key = jax.random.fold_in(passes, i // steps_an_epoch(client.size, self.batch_size))
        return offsets_of_call(self.batch_size, key, i, client)


def ngvi(
    mean: Mean,
    *,
    num_steps: int | None = None,
    num_epochs: int | None = None,
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
    ``decay * s + (1 - decay) * (their mean Fisher information per row)``. The mean stays where it
    was found.

    Parameters
    ----------
    mean
        How the tilted mean is found.
    num_steps, num_epochs
        Either steps, on all rows or on minibatches drawn with replacement; or passes over the
        rows, a step a minibatch, as in the released code.
    num_samples
        Positions per step.
    decay
        Between zero and one, ``beta``.
    initial
        Precision per row to start from; by default the Fisher information at the mean. Zero, as in
        the released code, takes a proper cavity.
    batch_size
        Rows per step, the same for all its positions; all of the client's by default, as in the
        paper.
    clip
        As for `laplace`, of each step's information, averaged over its positions.
    scale
        As for `laplace`.

    References
    ----------
    Guo et al. (2023), Algorithm 5; Khan and Rue (2023), The Bayesian learning rule.
    """
    expect(mean, Mean, "mean")
    if (num_steps is None) == (num_epochs is None):
        raise ValueError(
            f"ngvi takes num_steps= or num_epochs=, one of them, got {num_steps!r} and "
            f"{num_epochs!r}."
        )
    length = _Length(
        *(
            None if number is None else positive_integer(number, name)
            for name, number in (
                ("num_steps", num_steps),
                ("num_epochs", num_epochs),
                ("batch_size", batch_size),
            )
        )
    )
    start: Any = () if initial is None else schedules.number(initial, "initial", minimum=0.0)
    return Ngvi(
        mean,
        schedules.number(scale, "scale", minimum=0.0, strict=True),
        checked_clip(clip),
        schedules.number(decay, "decay", minimum=0.0, maximum=1.0),
        start,
        length,
        positive_integer(num_samples, "num_samples"),
    )


class _Draws(NamedTuple):
    mean: ArrayTree
    first: Array
    passes: Array  # a key, of the orders of the rows
    steps: Array  # keys, one per step


@register_dataclass
@dataclass(frozen=True, eq=False)
class Ngvi(FisherInference):
    """Information averaged over the tilted distribution; see `ngvi`."""

    decay: Any
    initial: Any  # () for the information at the mean
    length: _Length = field(metadata={"static": True})
    num_samples: int = field(metadata={"static": True})

    def prepare(self, rng_key: Array, like: ArrayTree, client: Client) -> _Draws:
        """Draw what the search for the mean draws, and keys for the information."""
        mean_key, first, passes, steps = jax.random.split(rng_key, 4)
        drawn = self.mean.prepare(mean_key, like, client)
        return _Draws(drawn, first, passes, jax.random.split(steps, self.length.most(client)))

    def fit(
        self,
        posterior: Posterior,
        draws: _Draws,
        position: ArrayTree,
        cavity: Gaussian,
        client: Client,
        round_: Array,
    ) -> Tilted:
        """Find the mean, and average the information about it."""
        structure = cavity.structure
        target = self.mean.with_decay(cavity, client, round_)
        estimate = self.mean.find(posterior, draws.mean, position, target, client, round_, None)
        dense, before = structure == "dense", flat_precision(target)
        size = client.size.astype(before.dtype)
        decay = trees.cast(schedules.value(self.decay, round_), before)
        unravel = ravel_pytree(estimate.mean)[1]

        def of_structure(information: Array) -> Array:
            return in_structure(clipped(information, self.clip), structure)

        def step(i: Array, per_row: Array) -> Array:
            rows_key, sample_key = jax.random.split(draws.steps[i])
            # One minibatch per step, which all samples share.
            offsets = self.length.offsets(rows_key, draws.passes, i, client)
            q = from_flat(estimate.mean, size * per_row + before, structure)

            def sample(key: Array) -> Array:
                draw_key, label_key = jax.random.split(key)
                at = unravel(ravel_pytree(q.draw(draw_key))[0])
                return fisher(posterior, label_key, at, client, dense=dense, offsets=offsets)

            each = jax.lax.map(sample, jax.random.split(sample_key, self.num_samples))
            return decay * per_row + (1 - decay) * of_structure(jnp.mean(each, axis=0))

        if trees.is_empty(self.initial):
            first = of_structure(fisher(posterior, draws.first, estimate.mean, client, dense=dense))
        else:
            number = trees.cast(schedules.value(self.initial, round_), before)
            first = jnp.zeros_like(before) + (
                number * jnp.eye(before.shape[0], dtype=before.dtype) if dense else number
            )
        per_row = jax.lax.fori_loop(0, self.length.steps(client), step, first)
        tilted = self.added_to(cavity, target, estimate.mean, size * per_row, round_)
        return Tilted(tilted, estimate.gradient_norm)
