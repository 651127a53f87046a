"""Draws of positions: leading axes that count them, and averages over them."""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc._types import ArrayTree, as_functions
from fedmcmc.metrics._arguments import positive_integer, single_precision
from fedmcmc.pytrees import trees


def predictive(
    apply_fn: Callable[..., ArrayTree],
    draws: ArrayTree,
    *inputs: ArrayTree,
    sample_axes: int = 1,
    batch_size: int = 1,
) -> ArrayTree:
    """Return a prediction averaged over draws: ``(1 / M) sum_m p(y | x, theta_m)``.

    A running sum over draws: the predictions of one batch of draws are in memory at a time.
    For a curve over chains, map it with `jax.vmap`.

    Parameters
    ----------
    apply_fn
        ``(position, *inputs) -> prediction``, an array or a pytree; for the scores of this module
        the probabilities ``[num_rows, num_classes]``, a softmax and not its logits (of which the
        average is another model). A compiled program is kept a function object.
    draws
        Positions, leaves ``[*sample, *event]`` with `sample_axes` leading axes.
    *inputs
        What `apply_fn` takes beside a position, such as the rows' features.
    sample_axes
        How many leading axes count draws, at least 1: 2 for `fedmcmc.Samples.draws`.
    batch_size
        Draws computed at a time, static.

    Returns
    -------
    ArrayTree
        Shaped as one prediction, floats of at least 32 bits.

    Raises
    ------
    ValueError
        If leaves disagree about their leading axes, or there is no draw.

    Examples
    --------
    >>> import jax
    >>> import jax.numpy as jnp
    >>> def apply_fn(theta, x):
    ...     return jax.nn.softmax(x[:, None] * theta, axis=-1)
    >>> draws = jnp.array([[100.0, 0.0], [0.0, 100.0], [0.0, 0.0]])
    >>> predictive(apply_fn, draws, jnp.ones(1)).tolist()
    [[0.5, 0.5]]
    """
    batch_size = positive_integer("batch_size", batch_size)
    flat, _ = flatten_draws(draws, sample_axes)
    return _average(as_functions(apply_fn), flat, inputs, batch_size=batch_size)


def flatten_draws(draws: ArrayTree, sample_axes: int) -> tuple[ArrayTree, tuple[int, ...]]:
    """Return draws with one leading axis, and the shape of the `sample_axes` they had."""
    num_axes = positive_integer("sample_axes", sample_axes)
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(draws)]
    leads = {shape[:num_axes] for shape in shapes}
    lead = next(iter(leads), ())
    if len(leads) != 1 or len(lead) != num_axes or 0 in lead:
        raise ValueError(
            f"Every leaf of draws needs the same {num_axes} leading axes that count draws "
            f"(sample_axes={num_axes}), none of them 0, got shapes {shapes}."
        )
    flat = jax.tree.map(
        lambda x: jnp.reshape(x, (math.prod(lead), *jnp.shape(x)[num_axes:])), draws
    )
    return flat, lead


@partial(jax.jit, static_argnames="batch_size")
def _average(
    apply_fn: Callable[..., ArrayTree], draws: ArrayTree, inputs: ArrayTree, *, batch_size: int
) -> ArrayTree:
    num_draws = jax.tree.leaves(draws)[0].shape[0]
    num_batches, rest = divmod(num_draws, batch_size)

    def total(batch: ArrayTree) -> ArrayTree:
        each = jax.vmap(lambda position: apply_fn(position, *inputs))(batch)
        return jax.tree.map(lambda x: jnp.sum(single_precision(x), axis=0), each)

    def body(running: ArrayTree, batch: ArrayTree) -> tuple[ArrayTree, None]:
        return trees.add(running, total(batch)), None

    last = jax.tree.map(lambda x: x[num_draws - rest :], draws)
    batches = jax.tree.map(
        lambda x: x[: num_draws - rest].reshape(num_batches, batch_size, *x.shape[1:]), draws
    )
    shapes = jax.eval_shape(total, last)
    start = total(last) if rest else trees.zeros_like(shapes)
    summed, _ = jax.lax.scan(body, start, batches)
    return jax.tree.map(lambda x: _divide(x, num_draws), summed)


def _divide(total: Array, number: int) -> Array:
    return total / jnp.asarray(number, total.dtype)
