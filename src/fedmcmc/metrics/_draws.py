"""Averages over draws of positions."""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc._checks import positive_integer
from fedmcmc.metrics._arguments import as_wide_float
from fedmcmc.pytrees import trees
from fedmcmc.types import ArrayTree, as_functions


def predictive(
    apply_fn: Callable[..., ArrayTree],
    draws: ArrayTree,
    *inputs: ArrayTree,
    sample_axes: int = 1,
    batch_size: int = 1,
) -> ArrayTree:
    """Return a prediction averaged over draws: ``(1 / M) sum_m p(y | x, theta_m)``.

    Memory holds the predictions of one batch of draws at a time. For a curve over chains, map the
    function with `jax.vmap`.

    Parameters
    ----------
    apply_fn
        ``(position, *inputs) -> prediction``, an array or a pytree. Scores need the probabilities
        ``[num_rows, num_classes]``: averages of logits are another model.
    draws, sample_axes
        Positions, leaves ``[*sample, *event]``, and the static number of sample axes; 2 for
        `fedmcmc.Samples.draws`.
    *inputs
        Further arguments of `apply_fn`, such as the rows' features.
    batch_size
        Number of draws computed together, static.

    Returns
    -------
    ArrayTree
        Mean with the shapes of one prediction, floats of at least 32 bits.

    Raises
    ------
    ValueError
        If leaves disagree about their leading axes, or there is no draw.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> draws = jnp.array([[100.0, 0.0], [0.0, 100.0], [0.0, 0.0]])
    >>> predictive(lambda theta, x: jax.nn.softmax(x[:, None] * theta), draws, jnp.ones(1)).tolist()
    [[0.5, 0.5]]
    """
    batch_size = positive_integer(batch_size, "batch_size")
    flat, _ = flatten_draws(draws, sample_axes)
    return _average(as_functions(apply_fn), flat, inputs, batch_size=batch_size)


def flatten_draws(draws: ArrayTree, sample_axes: int) -> tuple[ArrayTree, tuple[int, ...]]:
    """Return draws with one leading axis, and the shape of the `sample_axes` they had."""
    num_axes = positive_integer(sample_axes, "sample_axes")
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(draws)]
    leading = {shape[:num_axes] for shape in shapes}
    sample = next(iter(leading), ())
    if len(leading) != 1 or len(sample) != num_axes or 0 in sample:
        raise ValueError(
            f"All leaves of draws need the same {num_axes} leading axes that count draws "
            f"(sample_axes={num_axes}), none of them 0, got shapes {shapes}."
        )
    num_draws = math.prod(sample)
    flat = jax.tree.map(lambda x: jnp.reshape(x, (num_draws, *jnp.shape(x)[num_axes:])), draws)
    return flat, sample


@partial(jax.jit, static_argnames="batch_size")
def _average(
    apply_fn: Callable[..., ArrayTree], draws: ArrayTree, inputs: ArrayTree, *, batch_size: int
) -> ArrayTree:
    num_draws = jax.tree.leaves(draws)[0].shape[0]
    num_batches, num_left = divmod(num_draws, batch_size)

    def sum_batch(batch: ArrayTree) -> ArrayTree:
        predictions = jax.vmap(lambda position: apply_fn(position, *inputs))(batch)
        return jax.tree.map(lambda x: jnp.sum(as_wide_float(x), axis=0), predictions)

    def add_batch(total: ArrayTree, batch: ArrayTree) -> tuple[ArrayTree, None]:
        return trees.add(total, sum_batch(batch)), None

    remainder = jax.tree.map(lambda x: x[num_draws - num_left :], draws)
    batches = jax.tree.map(
        lambda x: x[: num_draws - num_left].reshape(num_batches, batch_size, *x.shape[1:]), draws
    )
    shapes = jax.eval_shape(sum_batch, remainder)
    initial = sum_batch(remainder) if num_left else trees.zeros_like(shapes)
    total, _ = jax.lax.scan(add_batch, initial, batches)
    return jax.tree.map(lambda x: _divide(x, num_draws), total)


def _divide(total: Array, num_draws: int) -> Array:
    return total / jnp.asarray(num_draws, total.dtype)
