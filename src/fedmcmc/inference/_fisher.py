"""Inference from the Fisher information of a client's rows, with outcomes drawn from the model."""

from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree

from fedmcmc._checks import expect, positive_integer
from fedmcmc.data import gather
from fedmcmc.dynamics import Length
from fedmcmc.gaussian import flat_precision, from_flat, plus_precision
from fedmcmc.gradients import offsets_of_call, steps_per_epoch
from fedmcmc.inference._moments import checked_clip, clipped, in_structure
from fedmcmc.inference._types import Fit, Inference, Mean, MeanFirst
from fedmcmc.pytrees import schedules, trees
from fedmcmc.random import integers_below
from fedmcmc.types import ArrayTree, Client, Federation, Number, Posterior, register_dataclass

_MAX_ELEMENTS = 2**22  # in the gradients of rows that are computed together
_MAX_ROWS = 256


@dataclass(frozen=True, eq=False, repr=False)
class FisherInference(MeanFirst):
    """Mean, and the cavity's precision plus the Fisher information at or around the mean."""

    mean: Mean
    scale: ArrayTree
    clip: float | None = field(metadata={"static": True})

    def information(self, fit: Fit) -> Array:
        """Return the client's information, unscaled, as a precision of the cavity's structure."""
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
            "The Fisher information uses outcomes drawn from the model: the posterior needs a "
            "resample_fn, (rng_key, position, batch) -> batch."
            + (
                f" from_numpyro built none, because {why}."
                if why
                else " from_numpyro and from_flax build one if they can."
            )
        )
    rows = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((2, *leaf.shape[1:]), leaf.dtype), federation.rows
    )
    key = jax.eval_shape(lambda: jax.random.key(0))
    drawn = jax.eval_shape(posterior.resample_fn, key, trees.shapes_of(position), rows)
    if trees.shapes_of(drawn) != trees.shapes_of(rows):
        raise ValueError(
            "resample_fn must return rows of the same shapes as its argument: "
            f"{jax.tree.map(lambda x: x.shape, rows)}, got "
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
    """Return the mean over rows of squared gradients, with one drawn outcome per row.

    It is an unbiased estimate of the Fisher information per row, minus the expected second
    derivative: ``[d]``, or ``[d, d]`` if `dense`. `offsets` ``[batch_size]`` are the client's rows,
    negative for an empty entry; by default all rows.
    """
    flat, unravel = ravel_pytree(position)
    resample_fn, loglikelihood_fn = posterior.resample_fn, posterior.loglikelihood_fn
    assert resample_fn is not None

    def row_gradient(row: ArrayTree) -> Array:
        batch = jax.tree.map(lambda leaf: leaf[None], row)
        return jax.grad(lambda x: loglikelihood_fn(unravel(x), batch)[0])(flat)

    def total(key: Array, offsets: Array, mask: Array) -> Array:
        # An empty entry reads the client's first row, never the row of another client.
        rows = resample_fn(key, position, gather(client, jnp.where(mask, offsets, 0)))
        gradients = jax.vmap(row_gradient)(rows)
        gradients = jnp.where(mask[:, None], gradients, 0)
        return gradients.T @ gradients if dense else jnp.sum(jnp.square(gradients), axis=0)

    if offsets is not None:
        mask = offsets >= 0
        return total(rng_key, offsets, mask) / jnp.sum(mask).astype(flat.dtype)
    chunk = max(1, min(client.max_size, _MAX_ROWS, _MAX_ELEMENTS // max(flat.size, 1)))

    def body(i: Array, sums: Array) -> Array:
        rows = i * chunk + jnp.arange(chunk, dtype=jnp.int32)
        return sums + total(jax.random.fold_in(rng_key, i), rows, rows < client.size)

    shape = (flat.size, flat.size) if dense else (flat.size,)
    sums = jax.lax.fori_loop(
        0, (client.size + chunk - 1) // chunk, body, jnp.zeros(shape, flat.dtype)
    )
    return sums / client.size.astype(flat.dtype)


def laplace(
    mean: Mean, *, num_passes: int = 1, clip: float | None = None, scale: Number = 1.0
) -> Inference:
    """Add the Fisher information at the tilted mean to the cavity's precision (variant L).

    The information is the sum over rows of squared gradients (for dense sites, of outer products),
    with outcomes drawn from the model once per row and pass. It estimates minus the expected second
    derivatives without computing any, and is never negative. The posterior needs a ``resample_fn``
    that draws outcomes; `fedmcmc.from_numpyro` and `fedmcmc.from_flax` build it.

    Parameters
    ----------
    mean
        Method for the tilted mean: `sgd_mean`, `langevin_mean` or `exact_mean`.
    num_passes
        Number of passes over the rows, each with new outcomes; 5 or 10 in the paper.
    clip
        Number of standard deviations over coordinates around their mean, to which the information
        is clipped: 2 in the released code, no clipping in the paper.
    scale
        Factor of the precision that is added to the cavity, including the weight decay of `mean`;
        one in the paper.

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
    """Fisher information at the mean; see `laplace`."""

    num_passes: int = field(metadata={"static": True})

    def prepare(self, rng_key: Array, like: ArrayTree, client: Client) -> tuple[ArrayTree, Array]:
        mean_key, pass_key = jax.random.split(rng_key)
        keys = jax.random.split(pass_key, self.num_passes)
        return self.mean.prepare(mean_key, like, client), keys

    def information(self, fit: Fit) -> Array:
        structure, mean, client = fit.cavity.structure, fit.moments.mean, fit.client
        dense = structure == "dense"
        passes = jax.lax.map(
            lambda key: fisher(fit.posterior, key, mean, client, dense=dense), fit.draws
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
    """Average the Fisher information over the tilted distribution (variant V).

    Starting at ``s = initial``, each step draws `num_samples` positions with precision
    ``n_k * s + cavity`` around the tilted mean, and replaces ``s`` by ``decay * s + (1 - decay) *
    (their mean Fisher information per row)``. The mean does not change.

    Parameters
    ----------
    mean
        Method for the tilted mean, as in `laplace`.
    num_steps, num_epochs
        Number of steps, on all rows or on minibatches drawn with replacement; or number of passes
        over the rows, with one step per minibatch, as in the released code.
    num_samples
        Number of positions per step.
    decay
        Number ``beta`` between zero and one.
    initial
        Initial precision per row; by default the Fisher information at the mean. Zero, as in the
        released code, requires a proper cavity.
    batch_size
        Number of rows per step, shared by its positions; all rows by default, as in the paper.
    clip, scale
        The same as in `laplace`. `clip` applies to the mean information of each step.

    References
    ----------
    Guo et al. (2023), Algorithm 5; Khan and Rue (2023), The Bayesian learning rule.
    """
    expect(mean, Mean, "mean")
    if (num_steps is None) == (num_epochs is None):
        raise ValueError(
            f"ngvi takes exactly one of num_steps= and num_epochs=, got {num_steps!r} and "
            f"{num_epochs!r}."
        )
    if batch_size is not None:
        batch_size = positive_integer(batch_size, "batch_size")
    if num_steps is None:
        length = Length(positive_integer(num_epochs, "num_epochs"), batch_size=batch_size)
    else:
        num_steps = positive_integer(num_steps, "num_steps")
        length = Length(1, batch_size=batch_size, num_steps=num_steps)
    start: ArrayTree = () if initial is None else schedules.number(initial, "initial", minimum=0.0)
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
    initial: Array  # for the information at the mean
    passes: Array  # for the orders of the rows
    steps: Array  # one per step


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Ngvi(FisherInference):
    """Fisher information averaged over the tilted distribution; see `ngvi`."""

    decay: ArrayTree
    initial: ArrayTree  # () for the information at the mean
    length: Length = field(metadata={"static": True})
    num_samples: int = field(metadata={"static": True})

    def prepare(self, rng_key: Array, like: ArrayTree, client: Client) -> tuple[ArrayTree, _Keys]:
        mean_key, initial, passes, steps = jax.random.split(rng_key, 4)
        keys = _Keys(initial, passes, jax.random.split(steps, self.length.max_steps(client)))
        return self.mean.prepare(mean_key, like, client), keys

    def information(self, fit: Fit) -> Array:
        posterior, mean, client = fit.posterior, fit.moments.mean, fit.client
        structure, keys = fit.cavity.structure, fit.draws
        dense, before = structure == "dense", flat_precision(fit.target)
        size = client.size.astype(before.dtype)
        decay = trees.cast(schedules.value(self.decay, fit.round), before)
        unravel = ravel_pytree(mean)[1]

        def as_precision(information: Array) -> Array:
            return in_structure(clipped(information, self.clip), structure)

        def step(i: Array, per_row: Array) -> Array:
            rows_key, sample_key = jax.random.split(keys.steps[i])
            offsets = self._offsets(rows_key, keys.passes, i, client)
            q = from_flat(mean, size * per_row + before, structure)

            def sample(key: Array) -> Array:
                draw_key, label_key = jax.random.split(key)
                position = unravel(ravel_pytree(q.draw(draw_key))[0])
                return fisher(posterior, label_key, position, client, dense=dense, offsets=offsets)

            samples = jax.lax.map(sample, jax.random.split(sample_key, self.num_samples))
            return decay * per_row + (1 - decay) * as_precision(jnp.mean(samples, axis=0))

        if trees.is_empty(self.initial):
            start = as_precision(fisher(posterior, keys.initial, mean, client, dense=dense))
        else:
            number = schedules.value(self.initial, fit.round)
            start = flat_precision(plus_precision(trees.zeros_like(fit.target), number))
        epoch = steps_per_epoch(client.size, self.length.batch_size)
        num_steps = self.length.num_steps or self.length.num_windows * epoch
        return size * jax.lax.fori_loop(0, num_steps, step, start)

    def _offsets(self, rows_key: Array, passes: Array, i: Array, client: Client) -> Array | None:
        """Return the rows of step `i`, ``[batch_size]``, or ``None`` for all rows."""
        batch_size = self.length.batch_size
        if batch_size is None:
            return None
        if self.length.num_steps is not None:
            return integers_below(rows_key, client.size, (batch_size,))
        key = jax.random.fold_in(passes, i // steps_per_epoch(client.size, batch_size))
        return offsets_of_call(batch_size, key, i, client)
