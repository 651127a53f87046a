"""Functions built from a NumPyro model: kept for the next call, and stored by their model.

JAX compiles a program again for each new function. `from_numpyro` therefore returns the functions
of an earlier call if the model, traced again, is still the same program. They are stored on the
model itself, and are freed with it.
"""

import copy
import functools
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable
from types import FunctionType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.primitives import Messenger

from fedmcmc._types import ArrayTree, Posterior, refuse_unstorable
from fedmcmc.interop import _numpyro_trace as tracing
from fedmcmc.interop._dependence import Tracer
from fedmcmc.interop._numpyro_inputs import COUNTS, position_shapes
from fedmcmc.interop._numpyro_structure import Structure

MAX_PROGRAMS = 8
"""Programs that are kept per model; the one that was used least recently goes first."""
_ATTRIBUTE = "_fedmcmc_programs"


class Built(NamedTuple):
    """What was built from a model for rows of one structure.

    Attributes
    ----------
    posterior
        Its functions, all but `init_fn`, which depends on the rows.
    start_fn
        ``(rng_key, rows) -> position``, compiled.
    compiled
        Compiled programs of checks, by name.
    """

    posterior: Posterior
    start_fn: Callable[..., Any]
    compiled: dict[str, Callable[..., Any]]


class Recipe(NamedTuple):
    """How a posterior was built: the arguments of `from_numpyro`, with shapes for rows."""

    model: Callable[..., Any]
    shapes: ArrayTree
    options: tuple[tuple[str, Any], ...]

    def posterior(self) -> Posterior:
        """Build the posterior again; starts are checked with made-up rows."""
        from fedmcmc.interop._numpyro_model import from_numpyro

        def made_up(leaf: Any) -> np.ndarray:
            is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
            return np.full((2, *leaf.shape[1:]), 0.5 if is_float else 1).astype(leaf.dtype)

        rows = jax.tree.map(made_up, self.shapes)
        return from_numpyro(self.model, example=rows, check_rows=False, **dict(self.options))


class Origin:
    """What functions that were built together have in common.

    Pickle stores the recipe, once for all functions in one pickle, and builds the posterior again.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    def __reduce__(self) -> tuple[Any, ...]:
        refuse_unstorable(self.recipe.model, "The posterior of a NumPyro model")
        return Recipe.posterior, (self.recipe,)


class ModelFunction:
    """Function of a posterior that was built from a NumPyro model.

    Pickle stores the model and the place of the function in the posterior. Two functions are equal
    if they were built together and have the same place, so that JAX shares compiled programs
    between them.
    """

    def __init__(self, fn: Callable[..., Any], origin: Origin, place: tuple[str, ...]) -> None:
        functools.update_wrapper(self, fn)
        self._fn, self._origin, self._place = fn, origin, place

    def __call__(self, *args: Any) -> Any:
        """Call the function."""
        return self._fn(*args)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, ModelFunction)
            and self._origin is other._origin
            and self._place == other._place
        )

    def __hash__(self) -> int:
        return hash((id(self._origin), self._place))

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModelFunction":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self._origin, self._place)


def _restored(posterior: Any, place: tuple[str, ...]) -> Any:
    return functools.reduce(getattr, place, posterior)


def built(
    recipe: Recipe,
    model: Callable[..., Any],
    structure: Structure,
    inner: Structure | None,
    rows: ArrayTree,
    build: Callable[[], Built],
) -> Built:
    """Return what `build` returns, or what it returned for the same program before.

    Parameters
    ----------
    recipe
        Arguments of `from_numpyro`.
    model
        The model as it is traced, its local sites reparametrized.
    structure, inner
        Its sites.
    rows
        The example.
    build
        Called if the program is new.
    """
    owner = _function_of(recipe.model)
    key = None if owner is None else _program_key(recipe, model, structure, inner, rows)
    if owner is None or key is None:
        return _with_origin(build(), recipe)
    programs: OrderedDict[Hashable, Built] = owner.__dict__.setdefault(_ATTRIBUTE, OrderedDict())
    if key in programs:
        programs.move_to_end(key)
        return programs[key]
    # The model has changed since: what it built may have been traced before or after the change.
    for other in [other for other, kept in programs.items() if _is_same_call(kept, recipe)]:
        del programs[other]
    programs[key] = _with_origin(build(), recipe)
    while len(programs) > MAX_PROGRAMS:
        programs.popitem(last=False)
    return programs[key]


def _is_same_call(kept: Built, recipe: Recipe) -> bool:
    """Return whether a program was built from the same model, options and columns."""
    like: Any = kept.posterior.logprior_fn
    earlier = like._origin.recipe
    if earlier.model != recipe.model or repr(earlier.options) != repr(recipe.options):
        return False
    one_row = [jax.tree.map(lambda x: (*x.shape[1:], x.dtype), x.shapes) for x in (earlier, recipe)]
    return bool(one_row[0] == one_row[1])


def with_starts(found: Built, rows: ArrayTree) -> Posterior:
    """Return the posterior, whose starts are checked with `rows`."""
    like: Any = found.posterior.logprior_fn
    start_fn = functools.partial(_start, found.start_fn, rows)
    init_fn = ModelFunction(start_fn, like._origin, ("init_fn",))
    return found.posterior._replace(init_fn=init_fn)


def _start(start_fn: Callable[..., Any], rows: ArrayTree, rng_key: Any) -> Any:
    return start_fn(rng_key, rows)


def _with_origin(found: Built, recipe: Recipe) -> Built:
    origin = Origin(recipe)

    def wrapped(value: Any, place: tuple[str, ...]) -> Any:
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            parts = {name: wrapped(getattr(value, name), (*place, name)) for name in value._fields}
            return type(value)(**parts)
        return ModelFunction(value, origin, place) if callable(value) else value

    return found._replace(posterior=wrapped(found.posterior, ()))


def _function_of(model: Any) -> FunctionType | None:
    """Return the function behind a model, on which programs are kept."""
    while not isinstance(model, FunctionType):
        if isinstance(model, functools.partial):
            model = model.func
        elif isinstance(model, Messenger):
            model = model.fn
        elif hasattr(model, "__func__"):
            model = model.__func__
        else:
            call = vars(type(model)).get("__call__")
            return call if isinstance(call, FunctionType) else None
    return model


def _program_key(
    recipe: Recipe,
    model: Callable[..., Any],
    structure: Structure,
    inner: Structure | None,
    rows: ArrayTree,
) -> Hashable:
    """Return a digest of the program that the model is, and the classes of its distributions.

    Constants are part of the program: a variable of a closure, a global, a default or an argument
    of `functools.partial` changes the digest where the model's densities depend on it. A model that
    calls back to Python, which no trace shows, has ``None``.
    """

    def run(position: ArrayTree, rows: ArrayTree) -> Any:
        values, parameters = {}, {}
        for name, site in tracing.trace_at(model, rows, position).items():
            if site["type"] == "deterministic":
                values[name] = site["value"]
            if site["type"] == "sample":
                values[name] = site["value"], tracing.log_prob(site)
                fn = tracing.bare(site["fn"])
                arguments = {x: getattr(fn, x, None) for x in sorted(fn.arg_constraints)}
                parameters[name] = {n: x for n, x in arguments.items() if _is_array(x)}
                classes.append((name, type(fn)))
        return values, parameters

    classes: list[tuple[str, type]] = []
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((COUNTS[0], *np.shape(leaf)[1:]), leaf.dtype), rows
    )
    arguments = position_shapes(structure.every), shapes
    closed = jax.make_jaxpr(run)(*arguments)
    tracer = Tracer()
    labels: list[Any] = [((i, str(x)), frozenset()) for i, x in enumerate(closed.in_avals)]
    outputs = [node.number for node in tracer.outputs(closed, labels)]
    if any("callback" in str(how) for how in tracer.computations):
        return None
    treedef = jax.tree.structure(rows)
    found = hashlib.sha256()
    for part in (recipe.options, structure, inner, treedef, outputs, *tracer.computations):
        found.update(repr(part).encode() + b"\0")
    return found.hexdigest(), tuple(classes)


def _is_array(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray, np.generic, int, float))


def recipe_of(
    model: Callable[..., Any], rows: ArrayTree, local: Any, centered: Any, init_radius: float
) -> Recipe:
    """Return the recipe of a call of `from_numpyro`."""
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype), rows)
    given = dict(local=local, centered=centered, init_radius=float(init_radius))
    options = tuple((name, copy.deepcopy(value)) for name, value in given.items())
    return Recipe(model, shapes, options)
