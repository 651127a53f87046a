"""Local training: an optimizer on a client's own rows, and what is kept of where it went.

A client takes steps in windows: an epoch each, or so many steps. What a method needs of the
iterates (the last one, averages over windows, moments) is kept by a `Visitor`, which sees the end
and the average of each window after the burn-in, so that no iterate is stored that is not asked
for.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._checks import expect_optimizer
from fedmcmc._types import (
    ArrayTree,
    Client,
    Described,
    GradientEstimator,
    Number,
    as_functions,
    register_dataclass,
)
from fedmcmc.gradients import epochs, for_batch_size, full_gradient, steps_per_epoch
from fedmcmc.pytrees import schedules, trees

if TYPE_CHECKING:
    import optax


class Length(NamedTuple):
    """How long a client trains: windows of an epoch, or of so many steps.

    Attributes
    ----------
    num_windows, num_burnin
        Windows in all, and those at the beginning of which nothing is kept.
    batch_size
        Rows per step, which say how many steps an epoch has; ``None`` for all of them.
    num_steps
        Steps per window; ``None`` where it is an epoch.
    num_discarded
        Windows that are not kept between two that are.
    """

    num_windows: int
    num_burnin: int = 0
    batch_size: int | None = None
    num_steps: int | None = None
    num_discarded: int = 0

    @property
    def num_samples(self) -> int:
        """Windows that are kept; the last window is one."""
        return 1 + (self.num_windows - self.num_burnin - 1) // (self.num_discarded + 1)

    def steps(self, client: Client) -> Array | int:
        """Return the steps per window of this client."""
        if self.num_steps is not None:
            return self.num_steps
        return 1 if self.batch_size is None else steps_per_epoch(client.size, self.batch_size)

    def most(self, client: Client) -> int:
        """Return a static bound on the client's steps in all."""
        if self.num_steps is not None:
            return self.num_windows * self.num_steps
        per_window = 1 if self.batch_size is None else -(-client.max_size // self.batch_size)
        return self.num_windows * per_window


@register_dataclass
@dataclass(frozen=True, eq=False)
class Training:
    """An optimizer and how long it runs; its state starts anew in every round."""

    optimizer: Any  # as from optax
    learning_rate: Any  # multiplies the updates; a number, or a schedule of the round
    length: Length = field(metadata={"static": True})


class Visitor(Described):
    """What is kept of an optimizer's path: nothing, unless a subclass says otherwise.

    A visitor is made within a round and lives no longer.
    """

    averages: ClassVar[bool] = False  # whether `visit` is given averages

    def init(self, position: ArrayTree) -> ArrayTree:
        """Return what is kept before the first window."""
        return ()

    def visit(self, summary: ArrayTree, index: Array, last: ArrayTree, average: Any) -> ArrayTree:
        """Return what is kept after a window, the `index`-th of those that are kept.

        `last` is the window's last iterate, `average` the average of its iterates, ``None`` unless
        `averages`.
        """
        return summary


class Trained(NamedTuple):
    """Where training ended, the visitor's summary, and the gradients' mean square ``[]``."""

    position: ArrayTree
    summary: ArrayTree
    mean_square: Array


@functools.cache
def plain_steps() -> Any:
    """Return the optimizer of optax whose update is what it is given.

    Always the same object: kernels that hold it share their programs.
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
    """Return a checked `Training`; messages call the optimizer `name`.

    Raises
    ------
    TypeError
        If the optimizer is not one of optax.
    ValueError
        On numbers out of range.
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
    """Return length and minibatches of epochs, or of steps on rows drawn with replacement.

    With `num_local_epochs`, these are all epochs; with `num_local_steps`, each window has so many
    steps. There are ``num_burnin + num_samples`` windows, and `num_discarded` between any two
    samples.

    Raises
    ------
    ValueError
        If neither or both are given, or a number is not a positive integer or does not fit.
    """
    if (num_local_epochs is None) == (num_local_steps is None):
        raise ValueError("Give either num_local_epochs= or num_local_steps=, and not both.")
    _check_count("num_samples", num_samples, 1)
    _check_count("num_burnin", num_burnin, 0)
    _check_count("num_discarded", num_discarded, 0)
    kept = num_samples + (num_samples - 1) * num_discarded  # windows from the first sample on
    if num_local_steps is not None:
        _check_count("num_local_steps", num_local_steps, 1)
        length = Length(
            num_burnin + kept,
            num_burnin,
            num_steps=int(num_local_steps),
            num_discarded=int(num_discarded),
        )
        return length, for_batch_size(batch_size)
    assert num_local_epochs is not None
    _check_count("num_local_epochs", num_local_epochs, 1)
    if num_local_epochs < kept + num_burnin:
        between = f" with num_discarded={num_discarded} between them" if num_discarded else ""
        raise ValueError(
            f"num_local_epochs={num_local_epochs} leaves too few epochs for num_samples="
            f"{num_samples}{between} after num_burnin={num_burnin}."
        )
    length = Length(
        int(num_local_epochs),
        int(num_local_epochs) - kept,
        batch_size,
        num_discarded=int(num_discarded),
    )
    return length, full_gradient() if batch_size is None else epochs(batch_size)


def _check_count(name: str, x: Any, least: int) -> None:
    if not isinstance(x, int | np.integer) or isinstance(x, bool) or x < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {x!r}.")


def train(
    settings: Training,
    gradient_fn: Callable[[ArrayTree, ArrayTree], ArrayTree],
    draws: ArrayTree,
    position: ArrayTree,
    client: Client,
    round_: Array,
    visitor: Visitor | None = None,
) -> Trained:
    """Train from `position`, and let `visitor` see the windows.

    `gradient_fn` maps one step's draws and a position to the gradient of what is minimized. `draws`
    has leaves ``[num_steps, ...]``, of at least as many steps as the client takes, or is ``()``.
    `round_` is for schedules.
    """
    visitor = Visitor() if visitor is None else visitor
    length, optimizer = settings.length, settings.optimizer
    rate = schedules.value(settings.learning_rate, round_)
    steps = length.steps(client)

    def step(i: Array, carry: tuple[ArrayTree, ArrayTree, Array, Any]) -> Any:
        position_, state, square, total = carry
        drawn = jax.tree.map(lambda leaf: leaf[i], draws)
        gradient = gradient_fn(drawn, position_)
        updates, state = trees.descend(optimizer, gradient, state, position_)
        position_ = trees.add_scaled(position_, rate, updates)
        total = None if total is None else trees.add(total, position_)
        return position_, state, square + trees.squared_norm(gradient), total

    def window(carry: Any, index: Array, keep: bool) -> Any:
        position_, state, square, summary = carry
        total = trees.zeros_like(position_) if keep and visitor.averages else None
        first = index * steps
        position_, state, square, total = jax.lax.fori_loop(
            first, first + steps, step, (position_, state, square, total)
        )
        if keep:
            per_step = 1 / jnp.asarray(steps, jnp.result_type(float))
            average = None if total is None else trees.scale(per_step, total)
            number = index - length.num_burnin
            if length.num_discarded:
                number = number // stride
            summary = visitor.visit(summary, number, position_, average)
        return position_, state, square, summary

    stride = length.num_discarded + 1

    def sample_and_gap(number: Array, carry: Any) -> Any:
        first = length.num_burnin + number * stride
        carry = window(carry, first, True)
        return jax.lax.fori_loop(first + 1, first + stride, lambda i, c: window(c, i, False), carry)

    start = (position, optimizer.init(position), jnp.zeros((), jnp.float32), visitor.init(position))
    carry = jax.lax.fori_loop(0, length.num_burnin, lambda i, c: window(c, i, False), start)
    if length.num_discarded:
        carry = jax.lax.fori_loop(0, length.num_samples - 1, sample_and_gap, carry)
        carry = window(carry, jnp.int32(length.num_windows - 1), True)
    else:
        carry = jax.lax.fori_loop(
            length.num_burnin, length.num_windows, lambda i, c: window(c, i, True), carry
        )
    num = jnp.asarray(length.num_windows * steps, jnp.float32)
    return Trained(carry[0], carry[3], carry[2] / num)
