"""Cache of the functions that are built from a NumPyro model, and their pickle support.

JAX compiles a program again for each new function. `from_numpyro` therefore returns the functions
of an earlier call if the model, traced again, is still the same program. The cache is an attribute
of the model itself, so it is freed with the model.
"""

import copy
import functools
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial
from numpyro.primitives import Messenger

from fedmcmc.interop import _numpyro_trace as tracing
from fedmcmc.interop._dependence import NO_FLAGS, Tracer
from fedmcmc.interop._numpyro_structure import Structure
from fedmcmc.types import ArrayTree, Posterior, check_picklable

MAX_PROGRAMS = 8
"""Maximal number of cached programs per model; the least recently used program is evicted."""
_ATTRIBUTE = "_fedmcmc_programs"


class Built(NamedTuple):
    """Posterior without `init_fn`, compiled ``(rng_key, rows) -> start``, and compiled checks."""

    posterior: Posterior
    start_fn: Callable[..., Any]
    compiled: dict[str, Callable[..., Any]]


class Recipe(NamedTuple):
    """Arguments of `from_numpyro` from which a posterior was built, with shapes for rows."""

    builder: Callable[..., Posterior]  # `from_numpyro` itself
    model: Callable[..., Any]
    shapes: ArrayTree
    options: tuple[tuple[str, Any], ...]

    def posterior(self) -> Posterior:
        """Build the posterior again, with made-up rows to check starts."""

        def made_up(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
            is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
            return np.full((2, *leaf.shape[1:]), 0.5 if is_float else 1).astype(leaf.dtype)

        rows = jax.tree.map(made_up, self.shapes)
        return self.builder(self.model, example=rows, check_rows=False, **dict(self.options))


class Origin:
    """Common origin of functions that were built together.

    A pickle stores the recipe once for all its functions. Unpickling builds the posterior again.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    def __reduce__(self) -> tuple[Any, ...]:
        check_picklable(self.recipe.model, "The posterior of a NumPyro model")
        return Recipe.posterior, (self.recipe,)


class ModelFunction:
    """Function of a posterior that was built from a NumPyro model.

    A pickle stores the model and the function's path, its attribute names in the posterior. Two
    functions are equal if they were built together and have the same path, so that JAX shares
    compiled programs between them.
    """

    def __init__(self, fn: Callable[..., Any], origin: Origin, path: tuple[str, ...]) -> None:
        functools.update_wrapper(self, fn)
        self._fn, self._origin, self._path = fn, origin, path

    def __call__(self, *args: ArrayTree) -> Any:
        """Call the function."""
        return self._fn(*args)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, ModelFunction)
            and self._origin is other._origin
            and self._path == other._path
        )

    def __hash__(self) -> int:
        return hash((id(self._origin), self._path))

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModelFunction":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _function_at, (self._origin, self._path)


def _function_at(posterior: Posterior, path: tuple[str, ...]) -> Any:
    return functools.reduce(getattr, path, posterior)


def cached_build(
    recipe: Recipe,
    model: Callable[..., Any],
    structure: Structure,
    rows: ArrayTree,
    build: Callable[[], Built],
) -> Built:
    """Return the result of `build`, or its earlier result for the same program.

    `model` has its local sites reparametrized, unlike ``recipe.model``.
    """
    owner = _function_of(recipe.model)
    key = None if owner is None else _program_key(recipe, model, structure, rows)
    if owner is None or key is None:
        return _with_origin(build(), recipe)
    programs: OrderedDict[Hashable, Built] = owner.__dict__.setdefault(_ATTRIBUTE, OrderedDict())
    if key in programs:
        programs.move_to_end(key)
        return programs[key]
    # The model has changed: earlier functions may have been traced before or after the change.
    for stale in [k for k, built in programs.items() if _is_same_call(built, recipe)]:
        del programs[stale]
    programs[key] = _with_origin(build(), recipe)
    while len(programs) > MAX_PROGRAMS:
        programs.popitem(last=False)
    return programs[key]


def _is_same_call(built: Built, recipe: Recipe) -> bool:
    """Return whether a program was built from the same model, options and columns."""
    logprior_fn: Any = built.posterior.logprior_fn
    earlier = logprior_fn._origin.recipe
    if earlier.model != recipe.model or repr(earlier.options) != repr(recipe.options):
        return False
    one_row = [jax.tree.map(lambda x: (*x.shape[1:], x.dtype), x.shapes) for x in (earlier, recipe)]
    return bool(one_row[0] == one_row[1])


def with_starts(built: Built, rows: ArrayTree) -> Posterior:
    """Return the posterior with an `init_fn` that checks starts with `rows`."""
    logprior_fn: Any = built.posterior.logprior_fn

    start = Partial(built.start_fn, rows=rows)
    init_fn: Any = ModelFunction(start, logprior_fn._origin, ("init_fn",))
    init_fn.as_partial = start
    return built.posterior._replace(init_fn=init_fn)


def _with_origin(built: Built, recipe: Recipe) -> Built:
    origin = Origin(recipe)

    def wrap(value: object, path: tuple[str, ...]) -> Any:
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            parts = {name: wrap(getattr(value, name), (*path, name)) for name in value._fields}
            return type(value)(**parts)
        return ModelFunction(value, origin, path) if callable(value) else value

    return built._replace(posterior=wrap(built.posterior, ()))


def _function_of(model: Callable[..., object]) -> FunctionType | None:
    """Return the function behind a model, whose attribute is the cache."""
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
    rows: ArrayTree,
) -> Hashable:
    """Return a key of the traced model: a digest, and the classes of its distributions.

    Constants are part of the program: a variable of a closure, a global, a default or an argument
    of `functools.partial` changes the digest if the model's densities depend on it. ``None`` if the
    model calls back to Python, because a trace does not show the called code.
    """
    classes: list[tuple[str, type]] = []

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

    shapes = (
        tracing.position_shapes(structure.latent_shapes),
        tracing.row_shapes(rows, tracing.COUNTS[0]),
    )
    closed = jax.make_jaxpr(run)(*shapes)
    tracer = Tracer()
    labels: list[Any] = [((i, str(x)), NO_FLAGS) for i, x in enumerate(closed.in_avals)]
    outputs = [node.number for node in tracer.outputs(closed, labels)]
    if any("callback" in str(computation) for computation in tracer.computations):
        return None
    treedef = jax.tree.structure(rows)
    digest = hashlib.sha256()
    for part in (recipe.options, structure, treedef, outputs, *tracer.computations):
        digest.update(repr(part).encode() + b"\0")
    return digest.hexdigest(), tuple(classes)


def _is_array(x: object) -> bool:
    return isinstance(x, (jax.Array, np.ndarray, np.generic, int, float))


def recipe_of(
    builder: Callable[..., Posterior],
    model: Callable[..., Any],
    rows: ArrayTree,
    local: Sequence[str] | Mapping[str, Sequence[str]] | None,
    centered: float | Mapping[str, float],
    init_radius: float,
) -> Recipe:
    """Return the recipe of a call of `from_numpyro`."""
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype), rows)
    arguments = dict(local=local, centered=centered, init_radius=float(init_radius))
    options = tuple((name, copy.deepcopy(value)) for name, value in arguments.items())
    return Recipe(builder, model, shapes, options)
