"""The Fisher information of a client's rows, with outcomes drawn from the model."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree

from fedmcmc._types import ArrayTree, Client, Federation, Posterior
from fedmcmc.data import gather
from fedmcmc.gaussian import Gaussian
from fedmcmc.inference._shapes import flat_precision, from_flat
from fedmcmc.inference._types import Inference, Mean
from fedmcmc.pytrees import schedules, trees

__all__ = ["FisherInference", "fisher"]

_BUDGET = 2**22  # numbers that the gradients of rows treated together may take
_MOST_ROWS = 256


@dataclass(frozen=True, eq=False)
class FisherInference(Inference):
    """A mean, and the cavity's precision plus an information at or about it."""

    mean: Mean
    scale: Any
    clip: float | None = field(metadata={"static": True})

    def added_to(
        self,
        cavity: Gaussian,
        target: Gaussian,
        mean: ArrayTree,
        information: Array,
        round_: Array,
    ) -> Gaussian:
        """Return the cavity plus `scale` times what the client adds, its weight decay included."""
        before = flat_precision(cavity)
        added = information + flat_precision(target) - before
        scale = trees.cast(schedules.value(self.scale, round_), before)
        return from_flat(mean, before + scale * added, cavity.structure)

    def check(
        self, posterior: Posterior, position: ArrayTree, federation: Federation, structure: str
    ) -> None:
        """Check that the model draws outcomes, and the search for the mean."""
        _check_resample(posterior, position, federation)
        self.mean.check(posterior, position, federation, None)


def _check_resample(posterior: Posterior, position: ArrayTree, federation: Federation) -> None:
    """Raise `ValueError` unless the model can draw outcomes."""
    if posterior.resample_fn is None:
        raise ValueError(
            "The Fisher information takes outcomes drawn from the model: the posterior needs a "
            "resample_fn, (rng_key, position, batch) -> batch (from_numpyro and from_flax make "
            "one)."
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

    Unbiased for the Fisher information of a row, which is minus the expected second derivative.

    Parameters
    ----------
    offsets
        ``[batch_size]``, which of the client's rows, negative for none; all of them by default, a
        few at a time.

    Returns
    -------
    Array
        ``[d]``, or ``[d, d]`` where `dense`.
    """
    flat, unravel = ravel_pytree(position)
    resample_fn, loglikelihood_fn = posterior.resample_fn, posterior.loglikelihood_fn
    assert resample_fn is not None

    def row_gradient(row: ArrayTree) -> Array:
        one = jax.tree.map(lambda leaf: leaf[None], row)
        return jax.grad(lambda x: loglikelihood_fn(unravel(x), one)[0])(flat)

    def total(key: Array, places: Array, mask: Array) -> Array:
        # Rows that are missing are copies of the client's first: none of another client.
        rows = resample_fn(key, position, gather(client, jnp.where(mask, places, 0)))
        gradients = jax.vmap(row_gradient)(rows)
        gradients = jnp.where(mask[:, None], gradients, 0)
        return gradients.T @ gradients if dense else jnp.sum(jnp.square(gradients), axis=0)

    if offsets is not None:
        mask = offsets >= 0
        return total(rng_key, offsets, mask) / jnp.sum(mask).astype(flat.dtype)
    chunk = max(1, min(client.max_size, _MOST_ROWS, _BUDGET // max(flat.size, 1)))

    def body(i: Array, sums: Array) -> Array:
        places = i * chunk + jnp.arange(chunk, dtype=jnp.int32)
        return sums + total(jax.random.fold_in(rng_key, i), places, places < client.size)

    shape = (flat.size, flat.size) if dense else (flat.size,)
    sums = jax.lax.fori_loop(
        0, (client.size + chunk - 1) // chunk, body, jnp.zeros(shape, flat.dtype)
    )
    return sums / client.size.astype(flat.dtype)
