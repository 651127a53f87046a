"""Local training: an optimizer on a client's rows, and summaries of its path.

A client takes steps in windows of one epoch or of a fixed number of steps. A `Visitor` accumulates
what a method needs (the last iterate, averages over windows, moments) from the end and the average
of each window after the burn-in, so single iterates are not stored.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._checks import expect_optimizer
from fedmcmc.gradients import epochs, for_batch_size, full_gradient, steps_per_epoch
from fedmcmc.pytrees import schedules, trees
from fedmcmc.types import (
    ArrayTree,
    Client,
    Described,
    GradientEstimator,
    Number,
    as_functions,
    register_dataclass,
)

if TYPE_CHECKING:
    import optax


class Length(NamedTuple):
    """Length of local training in windows of one epoch or of a fixed number of steps.

    Attributes
    ----------
    num_windows
        Total number of windows.
    num_burnin
        Number of initial windows without samples.
    batch_size
        Number of rows per step, which determines the steps per epoch; ``None`` for all rows.
    num_steps
        Number of steps per window; ``None`` for one epoch.
    num_discarded
        Number of windows that are discarded between two samples.
    """

    num_windows: int
    num_burnin: int = 0
    batch_size: int | None = None
    num_steps: int | None = None
    num_discarded: int = 0

    @property
    def num_samples(self) -> int:
        """Number of windows with samples, including the last window."""
        return 1 + (self.num_windows - self.num_burnin - 1) // (self.num_discarded + 1)

    def steps(self, client: Client) -> Array | int:
        """Return the number of steps per window of this client."""
        if self.num_steps is not None:
            return self.num_steps
        return 1 if self.batch_size is None else steps_per_epoch(client.size, self.batch_size)

    def max_steps(self, client: Client) -> int:
        """Return a static bound on the client's total number of steps."""
        if self.num_steps is not None:
            return self.num_windows * self.num_steps
        per_window = 1 if self.batch_size is None else -(-client.max_size // self.batch_size)
        return self.num_windows * per_window


@register_dataclass
@dataclass(frozen=True, eq=False)
class Training:
    """Optimizer and length of local training; the optimizer's state is reset in every round."""

    optimizer: "optax.GradientTransformation"
    learning_rate: Number  # factor of the updates; a number, or a schedule of the round
    length: Length = field(metadata={"static": True})


class Visitor(Described):
    """Accumulator of a summary of an optimizer's path; by default the summary is empty."""

    averages: ClassVar[bool] = False
    """If true, `visit` receives averages over windows."""

    def init(self, position: ArrayTree) -> ArrayTree:
        """Return the summary before the first window."""
        return ()

    def visit(
        self, summary: ArrayTree, index: Array, position: ArrayTree, average: ArrayTree
    ) -> ArrayTree:
        """Return the summary after the sample `index`, which is the end of a window.

        `position` is the window's last iterate; `average` is the average of its iterates, or
        ``None`` without `averages`.
        """
        return summary


class Trained(NamedTuple):
    """Final position, the visitor's summary, and the squared norm of the first gradient ``[]``."""

    position: ArrayTree
    summary: ArrayTree
    square: Array


@functools.cache
def plain_steps() -> "optax.GradientTransformation":
    """Return gradient descent with learning rate one.

    It is always the same object, so that kernels that contain it share compiled programs.
    """
    import optax

    return optax.sgd(1.0)


def training(
    optimizer: "optax.GradientTransformation",
    length: Length,
    learning_rate: Number = 1.0,
    *,
    name: str = "optimizer",
) -> Training:
    """Return a checked `Training`; error messages use `name` for the optimizer.

    Raises
    ------
    TypeError
        If the optimizer is not an optax optimizer.
    ValueError
        If the learning rate is out of range.
    """
    expect_optimizer(optimizer, name)
    rate = schedules.number(learning_rate, "learning_rate", minimum=0.0, strict=True)
    settings: Training = as_functions(Training(optimizer, rate, length))
    return settings


def local_steps(
    num_local_epochs: int | None,
    num_local_steps: int | None,
    batch_size: int | None,
    num_samples: int = 1,
    num_burnin: int = 0,
    num_discarded: int = 0,
) -> tuple[Length, GradientEstimator]:
    """Return the length of training, and the estimator for its minibatches.

    With `num_local_epochs`, windows are epochs, and all epochs before the samples are burn-in. With
    `num_local_steps`, each window has this number of steps, on rows drawn with replacement, and
    there are `num_burnin` windows before the first sample. `num_discarded` windows lie between two
    samples.

    Raises
    ------
    ValueError
        If neither or both are passed, or a number is not a positive integer or does not fit.
    """
    if (num_local_epochs is None) == (num_local_steps is None):
        raise ValueError("Pass either num_local_epochs= or num_local_steps=, not both.")
    _check_count("num_samples", num_samples, 1)
    _check_count("num_burnin", num_burnin, 0)
    _check_count("num_discarded", num_discarded, 0)
    num_windows = num_samples + (num_samples - 1) * num_discarded  # from the first sample on
    if num_local_steps is not None:
        _check_count("num_local_steps", num_local_steps, 1)
        length = Length(
            num_burnin + num_windows,
            num_burnin,
            num_steps=int(num_local_steps),
            num_discarded=int(num_discarded),
        )
        return length, for_batch_size(batch_size)
    assert num_local_epochs is not None
    _check_count("num_local_epochs", num_local_epochs, 1)
    if num_local_epochs < num_windows + num_burnin:
        between = f" with num_discarded={num_discarded} between them" if num_discarded else ""
        raise ValueError(
            f"num_local_epochs={num_local_epochs} leaves too few epochs for num_samples="
            f"{num_samples}{between} after num_burnin={num_burnin}."
        )
    length = Length(
        int(num_local_epochs),
        int(num_local_epochs) - num_windows,
        batch_size,
        num_discarded=int(num_discarded),
    )
    return length, full_gradient() if batch_size is None else epochs(batch_size)


def _check_count(name: str, x: object, minimum: int) -> None:
    if not isinstance(x, int | np.integer) or isinstance(x, bool) or x < minimum:
        raise ValueError(f"{name} must be an integer of at least {minimum}, got {x!r}.")


def train(
    settings: Training,
    gradient_fn: Callable[[ArrayTree, ArrayTree], ArrayTree],
    draws: ArrayTree,
    position: ArrayTree,
    client: Client,
    round_: Array,
    visitor: Visitor | None = None,
) -> Trained:
    """Train from `position`, and pass the end of each window to `visitor`.

    `gradient_fn` maps one step's draws and a position to the gradient of the loss. `draws` is
    ``()`` or has leaves ``[num_steps, ...]`` for at least the client's number of steps. `round_`
    selects the values of schedules.
    """
    visitor = Visitor() if visitor is None else visitor
    length, optimizer = settings.length, settings.optimizer
    rate = schedules.value(settings.learning_rate, round_)
    steps = length.steps(client)

    def move(i: Array | int, position_: ArrayTree, state: ArrayTree) -> tuple[ArrayTree, ...]:
        gradient = gradient_fn(jax.tree.map(lambda leaf: leaf[i], draws), position_)
        updates, state = trees.descend(optimizer, gradient, state, position_)
        return trees.add_scaled(position_, rate, updates), state, gradient

    def step(i: Array, carry: ArrayTree) -> ArrayTree:
        position_, state, total = carry
        position_, state, _ = move(i, position_, state)
        total = None if total is None else trees.add(total, position_)
        return position_, state, total

    def window(carry: ArrayTree, index: Array, is_sample: bool) -> ArrayTree:
        position_, state, summary = carry
        total = None
        if is_sample and visitor.averages:
            total = trees.select(index == 0, position_, trees.zeros_like(position_))
        start, stop = jnp.maximum(index * steps, 1), (index + 1) * steps
        position_, state, total = jax.lax.fori_loop(start, stop, step, (position_, state, total))
        if is_sample:
            per_step = 1 / jnp.asarray(steps, jnp.result_type(float))
            average = None if total is None else trees.scale(per_step, total)
            number = index - length.num_burnin
            if length.num_discarded:
                number = number // stride
            summary = visitor.visit(summary, number, position_, average)
        return position_, state, summary

    stride = length.num_discarded + 1

    def sample_and_gap(number: Array, carry: ArrayTree) -> ArrayTree:
        start = length.num_burnin + number * stride
        carry = window(carry, start, True)
        return jax.lax.fori_loop(start + 1, start + stride, lambda i, c: window(c, i, False), carry)

    # The first step is outside of the loops, because a norm in every step makes XLA copy the
    # position, and costs a fifth of the time with 100,000 parameters.
    summary = visitor.init(position)
    position, state, gradient = move(0, position, optimizer.init(position))
    carry = (position, state, summary)
    carry = jax.lax.fori_loop(0, length.num_burnin, lambda i, c: window(c, i, False), carry)
    if length.num_discarded:
        carry = jax.lax.fori_loop(0, length.num_samples - 1, sample_and_gap, carry)
        carry = window(carry, jnp.int32(length.num_windows - 1), True)
    else:
        carry = jax.lax.fori_loop(
            length.num_burnin, length.num_windows, lambda i, c: window(c, i, True), carry
        )
    return Trained(carry[0], carry[2], trees.squared_norm(gradient))
