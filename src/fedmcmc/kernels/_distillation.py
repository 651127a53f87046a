"""Distillation of an ensemble into one model, with unlabeled inputs at the server."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc._checks import expect_optimizer, positive_integer
from fedmcmc.pytrees import trees
from fedmcmc.random import integers_below
from fedmcmc.types import ArrayTree, as_functions, register_dataclass

if TYPE_CHECKING:
    import optax


@register_dataclass
@dataclass(frozen=True, eq=False)
class Distillation:
    """Distiller of an ensemble into one model; see `distillation`."""

    predict_fn: Callable[[ArrayTree, ArrayTree], Array]
    inputs: ArrayTree
    optimizer: "optax.GradientTransformation"
    num_steps: int = field(metadata={"static": True})
    inputs_per_step: int | None = field(metadata={"static": True})
    average_from: int = field(metadata={"static": True})
    average_every: int = field(metadata={"static": True})

    def __call__(self, rng_key: Array, mean: ArrayTree, members: ArrayTree) -> ArrayTree:
        num_steps = self.num_steps
        teacher = self._average_probabilities(mean, members)
        batches = None
        if self.inputs_per_step is not None:
            num_inputs = jnp.asarray(jax.tree.leaves(self.inputs)[0].shape[0])
            batches = integers_below(rng_key, num_inputs, (num_steps, self.inputs_per_step))

        def loss(position: ArrayTree, offsets: Array | None) -> Array:
            rows, targets = (self.inputs, teacher)
            if offsets is not None:
                rows, targets = jax.tree.map(lambda leaf: leaf[offsets], (rows, targets))
            log_predicted = jax.nn.log_softmax(self.predict_fn(position, rows))
            # The Kullback-Leibler divergence up to the entropy of the teacher.
            return -jnp.mean(jnp.sum(targets * log_predicted, axis=-1))

        def step(
            carry: tuple[ArrayTree, ArrayTree, ArrayTree], now: tuple[Array, Array | None]
        ) -> tuple[tuple[ArrayTree, ArrayTree, ArrayTree], None]:
            position, state, total = carry
            index, offsets = now
            gradient = jax.grad(loss)(position, offsets)
            updates, state = self.optimizer.update(gradient, state, position)
            position = trees.add(position, updates)
            ahead = index - self.average_from
            counts = (ahead >= 0) & (ahead % self.average_every == 0)
            total = trees.select(counts, trees.add(total, position), total)
            return (position, state, total), None

        start = (mean, self.optimizer.init(mean), trees.zeros_like(mean))
        steps = jnp.arange(num_steps, dtype=jnp.int32)
        (_, _, total), _ = jax.lax.scan(step, start, (steps, batches))
        num_averaged = -(-(num_steps - self.average_from) // self.average_every)
        return trees.scale(1 / num_averaged, total)

    def _average_probabilities(self, mean: ArrayTree, members: ArrayTree) -> Array:
        """Return the predicted probabilities averaged over models, ``[n, num_classes]``."""
        models = jax.tree.map(lambda m, x: jnp.concatenate([m[None], x]), mean, members)
        num_models = jax.tree.leaves(models)[0].shape[0]
        # The activations of all inputs together may not fit into memory.
        size = self.inputs_per_step or jax.tree.leaves(self.inputs)[0].shape[0]

        def all_inputs(position: ArrayTree) -> Array:
            def predict_input(x: ArrayTree) -> Array:
                row = jax.tree.map(lambda leaf: leaf[None], x)
                return jax.nn.softmax(self.predict_fn(position, row)[0])

            return jax.lax.map(predict_input, self.inputs, batch_size=size)

        shape = jax.eval_shape(all_inputs, mean)

        def add(total: Array, position: ArrayTree) -> tuple[Array, None]:
            return total + all_inputs(position), None

        total, _ = jax.lax.scan(add, jnp.zeros(shape.shape, shape.dtype), models)
        return total / num_models


def distillation(
    predict_fn: Callable[[ArrayTree, ArrayTree], Array],
    inputs: ArrayTree,
    *,
    optimizer: "optax.GradientTransformation",
    num_steps: int,
    batch_size: int | None = None,
    average_from: int = 0,
    average_every: int = 1,
) -> Distillation:
    """Return a distiller that trains one model to predict the average of an ensemble.

    ``(rng_key, mean, members) -> position`` is for `fedmcmc.fed_be` and `fedmcmc.ensemble`. It
    starts at the mean of the clients' models, minimizes the Kullback-Leibler divergence from the
    average probabilities of the mean and the members, and returns the average of its iterates (Chen
    and Chao 2021, section 4.3; stochastic weight averaging, Izmailov et al. 2018).

    Parameters
    ----------
    predict_fn, inputs
        ``(position, inputs) -> [n, num_classes]``, logits, and unlabeled inputs ``[n, ...]``.
    optimizer, num_steps
        Optax optimizer, which starts again in every round, and its number of steps.
    batch_size
        Number of inputs per step, drawn with replacement; ``None`` for all inputs.
    average_from, average_every
        Averaged iterates: the iterate after step `average_from` (counted from zero) and every
        `average_every`-th iterate after it.

    Raises
    ------
    ValueError
        If a number is out of range or the inputs have different lengths.

    Examples
    --------
    >>> import optax
    >>> distill = distillation(
    ...     lambda w, x: x @ w, jnp.eye(2), optimizer=optax.sgd(1.0), num_steps=99, average_from=98
    ... )
    >>> models = 2 * jnp.stack([jnp.eye(2), jnp.eye(2)])
    >>> w = distill(jax.random.key(0), jnp.zeros((2, 2)), models)
    >>> jax.nn.softmax(w)[0].round(2).tolist()  # the mean of 0.88, 0.88 and 0.5
    [0.75, 0.25]
    """
    inputs = jax.tree.map(jnp.asarray, inputs)
    counts = {leaf.shape[0] if leaf.ndim else None for leaf in jax.tree.leaves(inputs)}
    if len(counts) != 1 or None in counts or 0 in counts:
        raise ValueError(
            "inputs must hold arrays of the same positive length, got shapes "
            f"{[leaf.shape for leaf in jax.tree.leaves(inputs)]}."
        )
    expect_optimizer(optimizer, "optimizer")
    num_steps = positive_integer(num_steps, "num_steps")
    if average_from != 0:
        average_from = positive_integer(average_from, "average_from")
    if average_from >= num_steps:
        raise ValueError(
            f"average_from must be below num_steps, got {average_from} and {num_steps}."
        )
    return as_functions(
        Distillation(
            predict_fn,
            inputs,
            optimizer,
            num_steps,
            None if batch_size is None else positive_integer(batch_size, "batch_size"),
            average_from,
            positive_integer(average_every, "average_every"),
        )
    )
