"""Calls of `sample` that wait for each other, run in as few programs as can be."""

import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from fedmcmc import schedules
from fedmcmc._jax_settings import under
from fedmcmc._points import points_of, structure
from fedmcmc._points_run import PointsRun, runs_faster_together
from fedmcmc._run import Run
from fedmcmc._segments import prepared_bytes
from fedmcmc.resuming import alone
from fedmcmc.samples import Samples
from fedmcmc.trees import num_bytes

__all__ = ["Call", "run_calls"]


@dataclass
class Call:
    """A call of `sample` that waits, and then what came of it."""

    run: Run
    rounds: tuple[int, int, int]  # num_burnin, num_rounds, thinning
    bar: Any
    settings: tuple[Any, ...]  # of JAX, where it was made
    joins: bool  # whether it can be run with others
    samples: Samples | None = None
    error: BaseException | None = None

    def alone(self) -> None:
        """Run it by itself."""
        try:
            with alone(), under(self.settings):
                self.samples = self.run.go(*self.rounds, self.bar)
        except BaseException as error:
            self.error = error

    def like(self) -> Hashable:
        """Return what calls must have in common to run in one program."""
        run = self.run
        own = (self.rounds, run.first, run.keeping.collect, run.canonical, self.settings)
        with under(self.settings):
            leaves, treedef = jax.tree.flatten((run.data, run.keys, run.state))
            shapes = tuple(jax.typeof(leaf) for leaf in leaves)
            return structure(run.kernel), treedef, shapes, own


def run_calls(calls: Sequence[Call], *, always: bool, max_bytes: int) -> None:
    """Run all calls, together where they differ by numbers alone and that is faster, or `always`.

    An interrupt that a call hands on is that of all that have not run.
    """
    groups: dict[Hashable, list[Call]] = {}
    for i, call in enumerate(calls):
        groups.setdefault(_like_or(i, call), []).append(call)
    for group in groups.values():
        run = group[0].run
        fast = always or runs_faster_together(run.state, canonical=run.canonical)
        with under(group[0].settings):
            num = _at_once(group, max_bytes) if fast and len(group) > 1 else 1
        for at in range(0, len(group), num):
            some = group[at : at + num]
            if any(isinstance(call.error, KeyboardInterrupt) for call in calls):
                for call in some:
                    call.error = KeyboardInterrupt()
            elif num == 1:
                some[0].alone()
            else:
                _try_together(some, num, max_bytes)


def _like_or(index: int, call: Call) -> Hashable:
    """Return what a call has in common with others, or its index where it runs by itself."""
    if not call.joins:
        return index
    try:
        like = call.like()
        hash(like)
    except Exception:  # its own error, which it raises when it runs
        return index
    return like


def _try_together(group: Sequence[Call], num: int, max_bytes: int) -> None:
    try:
        with alone(), under(group[0].settings):
            whole, interrupted = _run_together(group, num, max_bytes)
    except Exception as error:  # one's own fault, or memory, which may do for each of them
        warnings.warn(
            f"{len(group)} runs could not be computed together, and are run by themselves "
            f"({type(error).__name__}: {error}).",
            RuntimeWarning,
            stacklevel=4,
        )
        for call in group:
            call.alone()
        return
    for i, call in enumerate(group):
        try:
            with under(call.settings):
                _hand_out(whole, i, call, interrupted=interrupted)
        except Exception as error:  # a warning that the user made one
            call.error = error


def _run_together(group: Sequence[Call], num: int, max_bytes: int) -> tuple[PointsRun, bool]:
    """Run calls as one run of `num` kernels; the last is repeated where there are fewer.

    Return the run and whether it was interrupted.
    """
    num_burnin, num_rounds, thinning = group[0].rounds
    runs = [call.run for call in group]
    some = runs + runs[-1:] * (num - len(runs))
    kernels, first = [run.kernel for run in some], runs[0].first
    points = points_of([schedules.tabulate(kernel, first, num_rounds) for kernel in kernels])
    state = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *[run.state for run in some])
    on = [(run.data, run.keys) for run in some]
    whole = PointsRun(kernels, points, on, runs[0].keeping.collect, state, max_bytes)
    whole.keep(num_burnin, thinning)
    try:
        whole.advance(first + num_rounds, _Bars(group))
    except KeyboardInterrupt:
        return whole, True
    return whole, False


def _hand_out(whole: PointsRun, i: int, call: Call, *, interrupted: bool) -> None:
    """Give a call its chains of `whole`, in which it was the `i`-th."""
    chains = slice(i * len(call.run.keys), (i + 1) * len(call.run.keys))
    if interrupted and call.run.keeping.hands_on_interrupts:
        call.error = KeyboardInterrupt()
        return
    if (whole.first_bad[chains] >= 0).any():
        call.alone()  # again, up to the last good round
        return
    kept, state, totals = jax.tree.map(
        lambda leaf: leaf[chains], (whole.keeper.all(), whole.state, whole.totals)
    )
    num_burnin, _, thinning = call.rounds
    call.run.keep(num_burnin, thinning)
    call.run.adopt(kept, state, totals, whole.at)
    call.samples = call.run.finished(interrupted=interrupted)


@dataclass(frozen=True)
class _Bars:
    calls: Sequence[Call]

    def update(self, num: int) -> None:
        """Add `num` rounds to every run's bar."""
        for call in self.calls:
            call.bar.update(num)


def _at_once(group: Sequence[Call], max_bytes: int) -> int:
    """Return how many runs are computed at a time, in equal parts."""
    run = group[0].run
    kernel = schedules.tabulate(run.kernel, 0, 1, 0)
    size = 2 * num_bytes(run.state) + len(run.keys) * (
        num_bytes(run.keeper.shapes) + prepared_bytes(kernel, run.data, run.keys, run.state)
    )
    if any(call.run.data is not run.data for call in group):
        size += num_bytes(run.data)
    most = min(max(max_bytes // 2 // max(size, 1), 1), len(group))
    return -(-len(group) // -(-len(group) // most))
