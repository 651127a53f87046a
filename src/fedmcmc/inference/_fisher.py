"""Inference by the Fisher information of a client's rows, with outcomes drawn from the model."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree

from fedmcmc._checks import expect, positive_integer
from fedmcmc._types import ArrayTree, Client, Federation, Number, Posterior, register_dataclass
from fedmcmc.data import gather
from fedmcmc.dynamics import Length
from fedmcmc.gaussian import flat_precision, from_flat, plus_precision
from fedmcmc.gradients import offsets_of_call, steps_per_epoch
from fedmcmc.inference._moments import checked_clip, clipped, in_structure
from fedmcmc.inference._types import Fit, Inference, Mean, MeanFirst
from fedmcmc.pytrees import schedules, trees
from fedmcmc.random import integers_below

_BUDGET = 2**22  # numbers that the gradients of rows treated together may take
_MAX_ROWS = 256


@dataclass(frozen=True, eq=False, repr=False)
class FisherInference(MeanFirst):
    """A mean, and the cavity's precision plus an information at or about it."""

    mean: Mean
    scale: Any
    clip: float | None = field(metadata={"static": True})

    def information(self, fit: Fit) -> Array:
        """Return the client's information as a precision of the cavity's structure, unscaled."""
        raise NotImplementedError

    def precision(self, fit: Fit) -> Array:
        before = flat_precision(fit.cavity)
        added = self.information(fit) + flat_precision(fit.target) - before
        return before + trees.cast(schedules.value(self.scale, fit.round), before) * added

    def check(
        self, posterior: Posterior, position: ArrayTree, federation: Federation, structure: str
    ) -> None:
        _check_resample(posterior, position, federation)
        super().check(posterior, position, federation, structure)


def _check_resample(posterior: Posterior, position: ArrayTree, federation: Federation) -> None:
    if posterior.resample_fn is None:
        why = posterior.no_resample_reason
        raise ValueError(
            "The Fisher information takes outcomes drawn from the model: the posterior needs a "
            "resample_fn, (rng_key, position, batch) -> batch."
            + (
                f" from_numpyro made none, as {why}."
                if why
                else " from_numpyro and from_flax make one where they can."
            )
        )
    two = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((2, *leaf.shape[1:]), leaf.dtype), federation.rows
    )
    key = jax.eval_shape(lambda: jax.random.key(0))
    drawn = jax.eval_shape(posterior.resample_fn, key, trees.shapes_of(position), two)
    if trees.shapes_of(drawn) != trees.shapes_of(two):
        raise ValueError(
            "resample_fn must return rows of the shapes it is given: "
            f"{jax.tree.map(lambda x: x.shape, two)}, got "
            f"{jax.tree.map(lambda x: jnp.shape(x), drawn)}."
        )


def fisher(
    posterior: Posterior,
    rng_key: Array,
    position: ArrayTree,
    client: Client,
    *,
    dense: bool = False,
    offsets: Array | None = None,
) -> Array:
    """Return the mean over rows of squared gradients, outcomes drawn once per row from the model.

    Unbiased for the Fisher information of a row, which is minus the expected second derivative:
    ``[d]``, or ``[d, d]`` where `dense`. `offsets` ``[batch_size]`` says which of the client's rows
    are used, negative for none; by default all of them are, a few at a time.
    """
    flat, unravel = ravel_pytree(position)
    resample_fn, loglikelihood_fn = posterior.resample_fn, posterior.loglikelihood_fn
    assert resample_fn is not None

    def row_gradient(row: ArrayTree) -> Array:
        one = jax.tree.map(lambda leaf: leaf[None], row)
        return jax.grad(lambda x: loglikelihood_fn(unravel(x), one)[0])(flat)

    def total(key: Array, offsets: Array, mask: Array) -> Array:
        # Rows that are missing are copies of the client's first: none of another client.
        rows = resample_fn(key, position, gather(client, jnp.where(mask, offsets, 0)))
        gradients = jax.vmap(row_gradient)(rows)
        gradients = jnp.where(mask[:, None], gradients, 0)
        return gradients.T @ gradients if dense else jnp.sum(jnp.square(gradients), axis=0)

    if offsets is not None:
        mask = offsets >= 0
        return total(rng_key, offsets, mask) / jnp.sum(mask).astype(flat.dtype)
    chunk = max(1, min(client.max_size, _MAX_ROWS, _BUDGET // max(flat.size, 1)))

    def body(i: Array, sums: Array) -> Array:
        at = i * chunk + jnp.arange(chunk, dtype=jnp.int32)
        return sums + total(jax.random.fold_in(rng_key, i), at, at < client.size)

    shape = (flat.size, flat.size) if dense else (flat.size,)
    sums = jax.lax.fori_loop(
        0, (client.size + chunk - 1) // chunk, body, jnp.zeros(shape, flat.dtype)
    )
    return sums / client.size.astype(flat.dtype)


def laplace(
    mean: Mean, *, num_passes: int = 1, clip: float | None = None, scale: Number = 1.0
) -> Inference:
    """Add the Fisher information at the tilted mean to the cavity's precision (variant L).

    The information is the sum over rows of squared gradients, or of products of gradients where
    sites are dense, with outcomes that the model draws once per row and pass. It estimates minus
    the expected second derivatives, needs no curvature and is never negative.

    Parameters
    ----------
    mean
        How the tilted mean is found: `sgd_mean`, `langevin_mean` or `exact_mean`.
    num_passes
        Passes over the rows, each with new outcomes; 5 or 10 in the paper.
    clip
        Clip the information to its mean plus and minus so many standard deviations over
        coordinates; 2 in the released code, no clipping in the paper.
    scale
        Multiplies all that is added to the cavity, the weight decay of `mean` included; one in the
        paper.

    Notes
    -----
    The posterior needs a ``resample_fn``, which draws outcomes (`fedmcmc.from_numpyro` and
    `fedmcmc.from_flax` make one).

    References
    ----------
    Guo et al. (2023), section 2.2.2.

    Examples
    --------
    >>> import optax
    >>> from fedmcmc.inference import sgd_mean
    >>> mean = sgd_mean(optax.sgd(0.01, momentum=0.9), num_samples=10, batch_size=20)
    >>> block = laplace(mean, num_passes=5)  # fedmcmc.fed_ep(posterior, inference=block, ...)
    """
    expect(mean, Mean, "mean")
    number = schedules.number(scale, "scale", minimum=0.0, strict=True)
    return Laplace(mean, number, checked_clip(clip), positive_integer(num_passes, "num_passes"))


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Laplace(FisherInference):
    """Information at the mean; see `laplace`."""

    num_passes: int = field(metadata={"static": True})

    def prepare(self, rng_key: Array, like: ArrayTree, client: Client) -> tuple[ArrayTree, Array]:
        mean_key, pass_key = jax.random.split(rng_key)
        keys = jax.random.split(pass_key, self.num_passes)
        return self.mean.prepare(mean_key, like, client), keys

    def information(self, fit: Fit) -> Array:
        structure, mean, client = fit.cavity.structure, fit.moments.mean, fit.client
        dense = structure == "dense"
        passes = jax.lax.map(
            lambda key: fisher(fit.posterior, key, mean, client, dense=dense), fit.randomness
        )
        per_row = clipped(jnp.mean(passes, axis=0), self.clip)
        return in_structure(client.size.astype(per_row.dtype) * per_row, structure)


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
        rows, one step per minibatch, as in the released code.
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
    if batch_size is not None:
        batch_size = positive_integer(batch_size, "batch_size")
    if num_steps is None:
        length = Length(positive_integer(num_epochs, "num_epochs"), batch_size=batch_size)
    else:
        num_steps = positive_integer(num_steps, "num_steps")
        length = Length(1, batch_size=batch_size, num_steps=num_steps)
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


class _Keys(NamedTuple):
    first: Array  # of the information at the mean
    passes: Array  # of the orders of the rows
    steps: Array  # one per step


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Ngvi(FisherInference):
    """Information averaged over the tilted distribution; see `ngvi`."""

    decay: Any
    initial: Any  # () for the information at the mean
    length: Length = field(metadata={"static": True})
    num_samples: int = field(metadata={"static": True})

    def prepare(self, rng_key: Array, like: ArrayTree, client: Client) -> tuple[ArrayTree, _Keys]:
        mean_key, first, passes, steps = jax.random.split(rng_key, 4)
        keys = _Keys(first, passes, jax.random.split(steps, self.length.most(client)))
        return self.mean.prepare(mean_key, like, client), keys

    def information(self, fit: Fit) -> Array:
        posterior, mean, client = fit.posterior, fit.moments.mean, fit.client
        structure, keys = fit.cavity.structure, fit.randomness
        dense, before = structure == "dense", flat_precision(fit.target)
        size = client.size.astype(before.dtype)
        decay = trees.cast(schedules.value(self.decay, fit.round), before)
        unravel = ravel_pytree(mean)[1]

        def of_structure(information: Array) -> Array:
            return in_structure(clipped(information, self.clip), structure)

        def step(i: Array, per_row: Array) -> Array:
            rows_key, sample_key = jax.random.split(keys.steps[i])
            # One minibatch per step, which all samples share.
            offsets = self._offsets(rows_key, keys.passes, i, client)
            q = from_flat(mean, size * per_row + before, structure)

            def sample(key: Array) -> Array:
                draw_key, label_key = jax.random.split(key)
                at = unravel(ravel_pytree(q.draw(draw_key))[0])
                return fisher(posterior, label_key, at, client, dense=dense, offsets=offsets)

            each = jax.lax.map(sample, jax.random.split(sample_key, self.num_samples))
            return decay * per_row + (1 - decay) * of_structure(jnp.mean(each, axis=0))

        if trees.is_empty(self.initial):
            first = of_structure(fisher(posterior, keys.first, mean, client, dense=dense))
        else:
            number = schedules.value(self.initial, fit.round)
            first = flat_precision(plus_precision(trees.zeros_like(fit.target), number))
        epoch = steps_per_epoch(client.size, self.length.batch_size)
        num_steps = self.length.num_steps or self.length.num_windows * epoch
        return size * jax.lax.fori_loop(0, num_steps, step, first)

    def _offsets(self, rows_key: Array, passes: Array, i: Array, client: Client) -> Array | None:
        """Return which rows step `i` uses, ``[batch_size]``; ``None`` for all."""
        batch_size = self.length.batch_size
        if batch_size is None:
            return None
        if self.length.num_steps is not None:
            return integers_below(rows_key, client.size, (batch_size,))
        key = jax.random.fold_in(passes, i // steps_per_epoch(client.size, batch_size))
        return offsets_of_call(batch_size, key, i, client)
