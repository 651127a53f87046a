"""Compiled functions whose arguments hold a user's functions."""

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar, overload

import jax
import numpy as np

P = ParamSpec("P")
T = TypeVar("T")

MAX_PROGRAMS = 128
"""Maximum number of programs in a process; a call of `fit` uses about twelve, of `sample` eight."""
_PROGRAMS: OrderedDict[Hashable, "_Program"] = OrderedDict()
"""Programs by function and structure of arguments, ordered from least to most recently used."""
_LOCK = threading.Lock()
_COMPILERS = ThreadPoolExecutor(2, "fedmcmc-compiler")
"""Threads that compile programs ahead of their first call."""


class _Ahead(NamedTuple):
    """Compilation in another thread, and the shapes of the results."""

    done: "Future[Any]"
    shapes: Any


@dataclass
class _Program:
    """Program of `jax.jit`, and compilations for some shapes of its arguments."""

    jitted: Any
    ahead: dict[Hashable, _Ahead] = field(default_factory=dict)

    def compile_ahead(self, leaves: list[Any]) -> Any:
        shapes = _shapes_of(leaves)
        if shapes not in self.ahead:
            # The user's functions run in the calling thread; NumPyro's traces, for example, use
            # global variables.
            traced = self.jitted.trace(leaves)
            done = _COMPILERS.submit(traced.lower().compile)
            self.ahead[shapes] = _Ahead(done, traced.out_info)
        return self.ahead[shapes].shapes

    def wait(self, leaves: list[Any]) -> None:
        """Wait for a compilation that has started; cancel one that has not."""
        ahead = self.ahead.get(_shapes_of(leaves))
        if ahead is not None and not ahead.done.cancel():
            ahead.done.exception()

    def cancel(self) -> None:
        """Cancel the compilations that have not started; they are not tried again."""
        for ahead in self.ahead.values():
            ahead.done.cancel()


class Compiled(Generic[P, T]):
    """Function that `jax.jit` compiles once per structure and shapes of its arguments.

    The structure of the arguments contains the user's functions. The caches of `jax.jit` keep
    thousands of structures and their programs, so the memory of a process that creates new
    functions for each run would grow without bound. Here each structure has its own program, whose
    arguments are the leaves. Programs and functions are freed after `MAX_PROGRAMS` newer ones.
    """

    def __init__(
        self, fn: Callable[P, T], static_argnames: Sequence[str] = (), optimize: bool = True
    ) -> None:
        functools.update_wrapper(self, fn)
        self._fn, self._static_argnames, self._optimize = fn, tuple(static_argnames), optimize

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the function."""
        program, leaves = self._find_program(args, kwargs)
        if program.ahead:
            program.wait(leaves)
        result: T = program.jitted(leaves)
        return result

    def compile_ahead(self, *args: Any, **kwargs: Any) -> Any:
        """Start to compile the program in another thread, and return the shapes of its results.

        Arrays among the arguments may be `jax.ShapeDtypeStruct`. A later call of the function waits
        for the compilation. `cancel_compilations` cancels those that have not started.
        """
        program, leaves = self._find_program(args, kwargs)
        return program.compile_ahead(leaves)

    def trace(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Return the trace, like the method `trace` of a function from `jax.jit`."""
        program, leaves = self._find_program(args, kwargs)
        return program.jitted.trace(leaves)

    def now(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result as NumPy arrays, computed immediately even while the caller is traced.

        Arguments must contain no tracer. `jax.ensure_compile_time_eval` would compile a program per
        operation, which takes ten times as long.
        """
        program, leaves = self._find_program(args, kwargs)
        arrays: T = jax.tree.map(np.asarray, program.jitted.lower(leaves).compile()(leaves))
        return arrays

    def _find_program(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[_Program, list[Any]]:
        """Return the program for these arguments, and the leaves of the arguments."""
        static = {name: kwargs[name] for name in self._static_argnames if name in kwargs}
        arrays = {name: x for name, x in kwargs.items() if name not in static}
        leaves, structure = jax.tree.flatten((args, arrays))
        key = (self, structure, *static.items())
        with _LOCK:
            program = _PROGRAMS.pop(key, None) or self._build_program(structure, static)
            _PROGRAMS[key] = program
            while len(_PROGRAMS) > MAX_PROGRAMS:
                _PROGRAMS.popitem(last=False)
        return program, leaves

    def _build_program(self, structure: object, static: dict[str, Any]) -> _Program:
        def program(leaves: list[Any]) -> T:
            args, kwargs = jax.tree.unflatten(structure, leaves)
            return self._fn(*args, **kwargs, **static)

        program.__name__ = program.__qualname__ = self._fn.__name__
        options = None
        if not self._optimize and jax.default_backend() == "cpu":
            options = {"xla_backend_optimization_level": 0}
        return _Program(jax.jit(program, compiler_options=options))


def cancel_compilations() -> None:
    """Cancel the compilations ahead that have not started."""
    with _LOCK:
        for program in _PROGRAMS.values():
            program.cancel()


def _shapes_of(leaves: list[Any]) -> Hashable:
    return tuple((np.shape(leaf), jax.typeof(leaf).dtype) for leaf in leaves)


@overload
def compiled(fn: Callable[P, T]) -> Compiled[P, T]: ...


@overload
def compiled(
    *, static_argnames: Sequence[str] = (), optimize: bool = True
) -> Callable[[Callable[P, T]], Compiled[P, T]]: ...


def compiled(fn: Any = None, *, static_argnames: Sequence[str] = (), optimize: bool = True) -> Any:
    """Return `fn` as a `Compiled` function, whose static arguments are passed by name.

    Without `optimize`, XLA hardly optimizes the program for a CPU, and compiles it in half the
    time: for programs that run once or twice on small arrays.
    """
    if fn is None:
        return functools.partial(Compiled, static_argnames=static_argnames, optimize=optimize)
    return Compiled(fn)
