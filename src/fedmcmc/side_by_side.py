"""`side_by_side`: functions that sample, and what they sample in as few programs as can be."""

import queue
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import Any, Literal, TypeVar, overload

import jax

from fedmcmc._calls import Call, run_calls
from fedmcmc._jax_settings import jax_settings, under
from fedmcmc._run import Run
from fedmcmc.resuming import alone
from fedmcmc.samples import Samples

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

    Only one function runs at any moment, each in a thread of its own, from call to call in turn. A
    chain that turns non-finite is that function's `NonFiniteError`, and stops no other.

    Parameters
    ----------
    functions
        Take nothing. Runs share a program only if they have the same functions (log densities,
        `collect`), which a compiler takes for the same if they are the same object: define them
        outside.
    mode
        ``"vmapped"`` computes together what can be, with draws as of a run of its own up to
        rounding. ``"sequential"`` calls one function after the other, from beginning to end, as a
        loop would. ``"auto"`` computes together what `fedmcmc.sweep` would.
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
    themselves, and so are those with keys other than ``threefry2x32``, whose draws depend on what
    they are computed with.

    Functions that take turns must leave alone what belongs to the whole process: global generators
    (``numpy.random.seed``), filters of warnings, NumPyro's handlers around a call of `sample`.
    Settings of JAX (``with jax.enable_x64(True)``) hold in a function if they do around
    `side_by_side`, and if the function makes them. An interrupt (Ctrl-C) in a run returns what was
    kept to each, as in `fedmcmc.sample`; elsewhere it ends every function in its next call, and a
    second one at once.

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
    if mode == "sequential":
        found = [_outcome(fn) for fn in functions]
    else:
        found = _in_turns(functions, always=mode == "vmapped", max_bytes=max_bytes)
    errors = [error for _, error in found if error is not None]
    if any(isinstance(error, KeyboardInterrupt) for error in errors):
        raise KeyboardInterrupt
    if errors and not return_exceptions:
        raise BaseExceptionGroup(f"{len(errors)} of {len(found)} functions failed.", errors)
    return [result if error is None else error for result, error in found]


def _outcome(fn: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    try:
        return fn(), None
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return None, error


def _in_turns(
    functions: Sequence[Callable[[], Any]], *, always: bool, max_bytes: int
) -> list[tuple[Any, BaseException | None]]:
    """Call all functions, each up to its next call of `sample`, run those calls, and so on."""
    waiting = workers = [_Worker(fn) for fn in functions]
    stopped = threading.Event()
    while waiting:
        with _noting_interrupts(stopped):
            for worker in waiting:
                worker.go_on(stop=stopped.is_set())
        waiting = [worker for worker in waiting if worker.call is not None]
        calls = [worker.call for worker in waiting if worker.call is not None]
        try:
            if not stopped.is_set():
                run_calls(calls, always=always, max_bytes=max_bytes)
        except KeyboardInterrupt:
            stopped.set()
        if any(isinstance(call.error, KeyboardInterrupt) for call in calls):
            stopped.set()
    if stopped.is_set():
        raise KeyboardInterrupt
    return [(worker.result, worker.error) for worker in workers]


@contextmanager
def _noting_interrupts(noted: threading.Event) -> Iterator[None]:
    """Set `noted` at an interrupt, which no other thread hears; a second one is raised."""
    default = signal.default_int_handler
    here = threading.current_thread() is threading.main_thread()
    if not here or signal.getsignal(signal.SIGINT) is not default:
        yield
        return

    def note(number: int, frame: Any) -> None:
        if noted.is_set():
            default(number, frame)
        noted.set()

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, default)


class _Worker:
    """A function in a thread of its own, that runs only while `go_on` waits for it."""

    def __init__(self, fn: Callable[[], Any]) -> None:
        self.fn = fn
        self.call: Call | None = None
        self.stops = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.turn: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.rests = threading.Event()
        self.settings = jax_settings()
        context = copy_context()
        # Where the caller is killed by an error, threads that wait must not keep the process.
        threading.Thread(target=context.run, args=(self._work,), daemon=True).start()

    def _work(self) -> None:
        _WORKER.set(self)
        self.turn.get()
        try:
            if self.stops:
                raise KeyboardInterrupt
            with under(self.settings):
                self.result = self.fn()
        except BaseException as error:
            self.error = error
        self.call = None
        self.rests.set()

    def go_on(self, *, stop: bool) -> None:
        """Let the function run until it samples or ends.

        With `stop` its call raises, or the function is not called at all.
        """
        self.stops = stop
        self.rests.clear()
        self.turn.put(None)
        self.rests.wait()

    def take(self, call: Call) -> Samples:
        """Wait, in the function's thread, for what comes of a call."""
        self.call = call
        self.rests.set()
        self.turn.get()
        if self.stops and call.samples is None and call.error is None:
            raise KeyboardInterrupt
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
    # Mapped over keys of other kinds, the functions of jax.random draw other numbers.
    joins = joins and type(run) is Run and jax.random.key_impl(run.keys) == "threefry2x32"
    return worker.take(Call(run, (num_burnin, num_rounds, thinning), bar, jax_settings(), joins))
