"""Distillation: one model made of an ensemble, with unlabelled inputs that the server has."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.tree_util import Partial

from fedmcmc._checks import positive_integer
from fedmcmc._types import ArrayTree, Static, as_functions
from fedmcmc.pytrees import trees
from fedmcmc.random import integers_below

__all__ = ["distillation"]


class _Config(NamedTuple):
    num_steps: int
    batch_size: int
    average_from: int
    average_every: int


class _Parts(NamedTuple):
    config: Static[_Config]
    predict_fn: Any
    inputs: ArrayTree
    optimizer: Any


def distillation(
    predict_fn: Callable[[ArrayTree, ArrayTree], Array],
    inputs: ArrayTree,
    *,
    optimizer: optax.GradientTransformation,
    num_steps: int,
    batch_size: int | None = None,
    average_from: int = 0,
    average_every: int = 1,
) -> Partial:
    """Return a distiller: train one model to predict what the ensemble does on average.

    From the mean of the clients' models on, it minimises the Kullback-Leibler divergence of its
    predictions from the average of the mean's and the members' probabilities, and returns the
    average of its iterates (SWA).

    Parameters
    ----------
    predict_fn
        ``(position, inputs) -> [n, num_classes]``, logits.
    inputs
        What the server has without labels, leaves ``[n, ...]``.
    optimizer
        As from optax; its state starts anew in every round.
    num_steps
        Steps of the optimiser a round.
    batch_size
        Inputs a step, drawn with replacement; ``None`` for all of them.
    average_from, average_every
        The iterates that are averaged: the one after step `average_from` (counted from zero) and
        every `average_every`-th after it.

    Returns
    -------
    jax.tree_util.Partial
        ``(rng_key, mean, members) -> position``, for `fedmcmc.fed_be` and `fedmcmc.ensemble`.

    Raises
    ------
    ValueError
        If a number is out of range, or the inputs disagree about how many they are.

    References
    ----------
    Chen and Chao (2021), section 4.3; Izmailov et al. (2018), Averaging weights leads to wider
    optima and better generalization.

    Examples
    --------
    >>> distill = distillation(
    ...     lambda w, x: x @ w, jnp.eye(2), optimizer=optax.sgd(1.0), num_steps=99, average_from=98
    ... )
    >>> models = 2 * jnp.stack([jnp.eye(2), jnp.eye(2)])
    >>> w = distill(jax.random.key(0), jnp.zeros((2, 2)), models)
    >>> jax.nn.softmax(w)[0].round(2).tolist()  # the mean of 0.88, 0.88 and the start's 0.5
    [0.75, 0.25]
    """
    inputs = jax.tree.map(jnp.asarray, inputs)
    counts = {leaf.shape[0] if leaf.ndim else None for leaf in jax.tree.leaves(inputs)}
    if len(counts) != 1 or None in counts or 0 in counts:
        raise ValueError(
            "inputs must hold arrays of one and the same positive length, got shapes "
            f"{[leaf.shape for leaf in jax.tree.leaves(inputs)]}."
        )
    if not isinstance(optimizer, optax.GradientTransformation):
        raise TypeError(
            f"optimizer must be an optax.GradientTransformation, got {type(optimizer).__name__}."
        )
    num_steps = positive_integer(num_steps, "num_steps")
    if average_from != 0:
        average_from = positive_integer(average_from, "average_from")
    if average_from >= num_steps:
        raise ValueError(
            f"average_from must be below num_steps, got {average_from} and {num_steps}."
        )
    config = _Config(
        num_steps,
        0 if batch_size is None else positive_integer(batch_size, "batch_size"),
        average_from,
        positive_integer(average_every, "average_every"),
    )
    return Partial(_distill, as_functions(_Parts(Static(config), predict_fn, inputs, optimizer)))


def _distill(parts: _Parts, rng_key: Array, mean: ArrayTree, members: ArrayTree) -> ArrayTree:
    config, inputs = parts.config.value, parts.inputs
    num_inputs = jax.tree.leaves(inputs)[0].shape[0]
    teacher = _average_probabilities(parts, mean, members)
    batches = None
    if config.batch_size:
        shape = (config.num_steps, config.batch_size)
        batches = integers_below(rng_key, jnp.asarray(num_inputs), shape)

    def loss(position: ArrayTree, offsets: Array | None) -> Array:
        rows, wanted = (inputs, teacher)
        if offsets is not None:
            rows, wanted = jax.tree.map(lambda leaf: leaf[offsets], (inputs, teacher))
        said = jax.nn.log_softmax(parts.predict_fn(position, rows))
        # The divergence up to the teacher's own entropy.
        return -jnp.mean(jnp.sum(wanted * said, axis=-1))

    def step(
        carry: tuple[ArrayTree, ArrayTree, ArrayTree], now: tuple[Array, Array | None]
    ) -> tuple[tuple[ArrayTree, ArrayTree, ArrayTree], None]:
        position, state, total = carry
        index, offsets = now
        updates, state = parts.optimizer.update(jax.grad(loss)(position, offsets), state, position)
        position = trees.add(position, updates)
        ahead = index - config.average_from
        counts = (ahead >= 0) & (ahead % config.average_every == 0)
        total = trees.select(counts, trees.add(total, position), total)
        return (position, state, total), None

    start = (mean, parts.optimizer.init(mean), trees.zeros_like(mean))
    steps = jnp.arange(config.num_steps, dtype=jnp.int32)
    (_, _, total), _ = jax.lax.scan(step, start, (steps, batches))
    num_averaged = -(-(config.num_steps - config.average_from) // config.average_every)
    return trees.scale(1 / num_averaged, total)


def _average_probabilities(parts: _Parts, mean: ArrayTree, members: ArrayTree) -> Array:
    """Return the average over models of the predicted probabilities, ``[n, num_classes]``."""
    models = jax.tree.map(lambda m, x: jnp.concatenate([m[None], x]), mean, members)
    num_models = jax.tree.leaves(models)[0].shape[0]
    num_inputs = jax.tree.leaves(parts.inputs)[0].shape[0]

    def one_input(position: ArrayTree, x: ArrayTree) -> Array:
        row = jax.tree.map(lambda leaf: leaf[None], x)
        return jax.nn.softmax(parts.predict_fn(position, row)[0])

    def all_inputs(position: ArrayTree) -> Array:
        # In batches: activations of all inputs at once may not fit.
        size = parts.config.value.batch_size or num_inputs
        return jax.lax.map(Partial(one_input, position), parts.inputs, batch_size=size)

    shape = jax.eval_shape(all_inputs, mean)

    def add(total: Array, position: ArrayTree) -> tuple[Array, None]:
        return total + all_inputs(position), None

    total, _ = jax.lax.scan(add, jnp.zeros(shape.shape, shape.dtype), models)
    return total / num_models
