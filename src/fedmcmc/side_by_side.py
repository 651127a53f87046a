"""`side_by_side`: functions that sample, and what they sample in as few programs as can be."""

import queue
import threading
from collections.abc import Callable, Hashable, Sequence
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast, overload

import jax
import jax.numpy as jnp

from fedmcmc import schedules
from fedmcmc._points import points_of, structure
from fedmcmc._points_run import PointsRun, runs_faster_together
from fedmcmc._run import Run
from fedmcmc._segments import prepared_bytes
from fedmcmc.resuming import alone
from fedmcmc.samples import Samples
from fedmcmc.trees import num_bytes

__all__ = ["run_now_or_together", "side_by_side"]

MODES = ("auto", "sequential", "vmapped")
T = TypeVar("T")


@overload
def side_by_side(
    functions: Sequence[Callable[[], T]],
    *,
    mode: Literal["auto", "sequential", "vmapped"] = ...,
    max_bytes: int = ...,
    return_exceptions: Literal[False] = ...,
) -> list[T]: ...


@overload
def side_by_side(
    functions: Sequence[Callable[[], T]],
    *,
    mode: Literal["auto", "sequential", "vmapped"] = ...,
    max_bytes: int = ...,
    return_exceptions: Literal[True],
) -> list[T | BaseException]: ...


def side_by_side(
    functions: Sequence[Callable[[], T]],
    *,
    mode: Literal["auto", "sequential", "vmapped"] = "auto",
    max_bytes: int = 2**30,
    return_exceptions: bool = False,
) -> list[T] | list[T | BaseException]:
    """Call functions, and run what they sample at the same time in one program.

    Every function is run up to its next call of `fedmcmc.sample`. Once each waits in one, or has
    ended, those runs that differ by numbers alone (settings, rows, keys, where they start) are
    computed together, the others one after another; then the functions go on. It is `sweep` for
    programs that do more than sample: those that draw their own data, run one kernel from where
    another ended, write files.

    Only one function runs at any moment, in a thread of its own. A chain that turns non-finite is
    that function's `NonFiniteError`, and stops no other.

    Parameters
    ----------
    functions
        Take nothing. Runs share a program only if they have the same functions (log densities,
        `collect`), which a compiler takes for the same if they are the same object: define them
        outside.
    mode
        ``"vmapped"`` computes together what can be, with draws as of a run of its own up to
        rounding; ``"sequential"`` nothing, with the very same draws, for functions that share what
        is compiled. ``"auto"`` chooses for every program as `fedmcmc.sweep` does.
    max_bytes
        Memory for the runs that are computed at the same time, as in `fedmcmc.sweep`.
    return_exceptions
        Whether to return what a function raised in place of its result.

    Returns
    -------
    One result a function, in their order.

    Raises
    ------
    ExceptionGroup
        Of what functions raised, once all have ended.
    ValueError, TypeError
        On settings that do not fit.

    Notes
    -----
    Runs with `until`, `streams`, `checkpoint`, `client_store`, `mesh` or `draws_to` are computed by
    themselves. Settings of JAX that hold for one thread (``with jax.enable_x64(True)``) must be
    made around `side_by_side`, and not in a function.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(
    ...     lambda theta: -0.5 * theta**2, lambda theta, x: -0.5 * (x - theta) ** 2
    ... )
    >>> def program(seed, step_size):
    ...     key, rows_key = jax.random.split(jax.random.key(seed))
    ...     rows = jax.random.normal(rows_key, (3, 20))
    ...     samples = fedmcmc.sample(
    ...         key, fedmcmc.lsd(posterior, step_size=step_size),
    ...         fedmcmc.FederatedData.from_clients(list(rows)), 0.0,
    ...         num_rounds=200, progress=False,
    ...     )
    ...     return float(samples.draws.var())
    >>> found = side_by_side(
    ...     [lambda s=s, h=h: program(s, h) for s in (0, 1) for h in (0.001, 0.01)]
    ... )
    >>> len(found)
    4
    """
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}.")
    if max_bytes < 1:
        raise ValueError(f"max_bytes must be at least 1, got {max_bytes}.")
    workers = [_Worker(fn) for fn in functions]
    stopped = False
    waiting = list(workers)
    while waiting:
        for worker in waiting:
            stopped |= worker.go_on()
        waiting = [worker for worker in waiting if worker.call is not None]
        calls = [cast(_Call, worker.call) for worker in waiting]
        if stopped:
            for call in calls:
                call.error = KeyboardInterrupt()
        else:
            _run_all(calls, mode, max_bytes)
    errors = [worker.error for worker in workers if worker.error is not None]
    if stopped or any(isinstance(error, KeyboardInterrupt) for error in errors):
        raise KeyboardInterrupt
    if errors and not return_exceptions:
        raise BaseExceptionGroup(f"{len(errors)} of {len(workers)} functions failed.", errors)
    return [worker.result if worker.error is None else worker.error for worker in workers]


@dataclass
class _Call:
    """A call of `sample` that waits, and then what came of it."""

    run: Run
    rounds: tuple[int, int, int]  # num_burnin, num_rounds, thinning
    bar: Any
    joins: bool  # whether it can be run with others
    samples: Samples | None = None
    error: BaseException | None = None

    def alone(self) -> None:
        """Run it by itself."""
        try:
            with alone():
                self.samples = self.run.go(*self.rounds, self.bar)
        except BaseException as error:
            self.error = error

    def like(self) -> Hashable:
        """Return what calls must have in common to run in one program."""
        run = self.run
        given = (run.data, run.keys, run.state)
        leaves, treedef = jax.tree.flatten(given)
        shapes = tuple(jax.typeof(leaf) for leaf in leaves)
        own = (self.rounds, run.first, run.keeping.collect, run.canonical)
        return structure(run.kernel), treedef, shapes, own


class _Worker:
    """A function in a thread of its own, that runs only while `go_on` waits for it."""

    def __init__(self, fn: Callable[[], Any]) -> None:
        self.fn = fn
        self.call: _Call | None = None
        self.result: Any = None
        self.error: BaseException | None = None
        self.turn: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.rest: queue.SimpleQueue[None] = queue.SimpleQueue()
        context = copy_context()
        # Where the caller is killed by an error, threads that wait must not keep the process.
        threading.Thread(target=context.run, args=(self._work,), daemon=True).start()

    def _work(self) -> None:
        _WORKER.set(self)
        self.turn.get()
        try:
            self.result = self.fn()
        except BaseException as error:
            self.error = error
        self.call = None
        self.rest.put(None)

    def go_on(self) -> bool:
        """Let the function run until it samples or ends; return whether it was interrupted."""
        self.turn.put(None)
        try:
            self.rest.get()
            return False
        except KeyboardInterrupt:  # which a thread does not hear: it ends at its next call
            self.rest.get()
            return True

    def take(self, call: _Call) -> Samples:
        """Wait, in the function's thread, for what comes of a call."""
        self.call = call
        self.rest.put(None)
        self.turn.get()
        if call.error is not None:
            raise call.error
        assert call.samples is not None
        return call.samples


_WORKER: ContextVar[_Worker | None] = ContextVar("fedmcmc_side_by_side", default=None)


def run_now_or_together(
    run: Run, num_burnin: int, num_rounds: int, thinning: int, bar: Any, *, joins: bool
) -> Samples:
    """Run all rounds: at once, or in `side_by_side` when the other functions sample, too."""
    worker = _WORKER.get()
    if worker is None:
        with alone():
            return run.go(num_burnin, num_rounds, thinning, bar)
    joins = joins and type(run) is Run
    return worker.take(_Call(run, (num_burnin, num_rounds, thinning), bar, joins))


def _run_all(calls: Sequence[_Call], mode: str, max_bytes: int) -> None:
    groups: dict[Hashable, list[_Call]] = {}
    for i, call in enumerate(calls):
        groups.setdefault(call.like() if call.joins and mode != "sequential" else i, []).append(
            call
        )
    for group in groups.values():
        run = group[0].run
        fast = mode == "vmapped" or runs_faster_together(run.state, canonical=run.canonical)
        num = _at_once(group, max_bytes) if fast else 1
        if num == 1:
            for call in group:
                call.alone()
            continue
        for at in range(0, len(group), num):
            some = group[at : at + num]
            try:
                _run_together(some, num, max_bytes)
            except Exception as error:  # memory may do for other runs, and functions go on
                for call in some:
                    call.error = error


def _run_together(group: Sequence[_Call], num: int, max_bytes: int) -> None:
    """Run calls as one run of `num` kernels; the last is repeated where there are fewer."""
    num_burnin, num_rounds, thinning = group[0].rounds
    runs = [call.run for call in group]
    some = runs + runs[-1:] * (num - len(runs))
    kernels, first = [run.kernel for run in some], runs[0].first
    points = points_of([schedules.tabulate(kernel, first, num_rounds) for kernel in kernels])
    state = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *[run.state for run in some])
    on = [(run.data, run.keys) for run in some]
    whole = PointsRun(kernels, points, on, runs[0].keeping.collect, state, max_bytes)
    whole.keep(num_burnin, thinning)
    interrupted = False
    try:
        whole.advance(first + num_rounds, _Bars(group))
    except KeyboardInterrupt:
        interrupted = True
    for i, call in enumerate(group):
        chains = slice(i * len(call.run.keys), (i + 1) * len(call.run.keys))
        if (whole.first_bad[chains] >= 0).any():
            call.alone()  # again, up to the last good round
            continue
        kept, state, totals = jax.tree.map(
            lambda leaf, chains=chains: leaf[chains],
            (whole.keeper.all(), whole.state, whole.totals),
        )
        call.run.keep(num_burnin, thinning)
        call.run.adopt(kept, state, totals, whole.at)
        call.samples = call.run.finished(interrupted=interrupted)


@dataclass(frozen=True)
class _Bars:
    calls: Sequence[_Call]

    def update(self, num: int) -> None:
        """Add `num` rounds to every run's bar."""
        for call in self.calls:
            call.bar.update(num)


def _at_once(group: Sequence[_Call], max_bytes: int) -> int:
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
