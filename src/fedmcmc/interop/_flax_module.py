"""Flax modules, linen or nnx, and the columns of the rows that they read."""

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._checks import missing_extra_error
from fedmcmc.data import FederatedData
from fedmcmc.interop._rows import checked_rows, client_rows
from fedmcmc.types import ArrayTree

Column = str | int
Options = tuple[tuple[str, Hashable], ...]
Shapes = tuple[tuple[Any, tuple[tuple[tuple[int, ...], np.dtype], ...]], ...]
"""Hashable shapes of one row of each input: tree structure, and shape and dtype of each leaf."""


@dataclass(frozen=True)
class Linen:
    """Linen module; modules with equal `key` and options share compilations."""

    module: Any = field(compare=False)
    options: Options
    key: Hashable

    def init(self, rng_key: Array, shapes: Shapes) -> ArrayTree:
        inputs = [
            jax.tree.unflatten(treedef, [jnp.zeros((1, *shape), dtype) for shape, dtype in leaves])
            for treedef, leaves in shapes
        ]
        return self.module.init({"params": rng_key}, *inputs, **dict(self.options)).get("params")

    def apply(self, position: ArrayTree, inputs: tuple[ArrayTree, ...]) -> ArrayTree:
        return self.module.apply({"params": position}, *inputs, **dict(self.options))


@dataclass(frozen=True)
class Nnx:
    """Constructor of an nnx module, and the structure of the module."""

    construct: Callable[..., Any] = field(compare=False)
    structure: Any = field(compare=False)
    options: Options
    key: Hashable

    def init(self, rng_key: Array, shapes: Shapes) -> ArrayTree:
        from flax import nnx

        del shapes
        return nnx.to_pure_dict(nnx.state(self.construct(rngs=nnx.Rngs(rng_key)), nnx.Param))

    def apply(self, position: ArrayTree, inputs: tuple[ArrayTree, ...]) -> ArrayTree:
        from flax import nnx

        return nnx.merge(self.structure, position)(*inputs, **dict(self.options))


Network = Linen | Nnx


def read_module(module: object, options: Mapping[str, Hashable] | None) -> Network:
    """Return `module`, a linen module or the constructor of an nnx module, as a `Network`."""
    try:
        from flax import linen, nnx
    except ImportError as error:
        raise missing_extra_error(
            "Flax modules need flax, an optional dependency", "flax"
        ) from error
    items = tuple(sorted((options or {}).items()))
    if isinstance(module, linen.Module):
        return Linen(module, items, _hashable(_frozen(module)))
    if isinstance(module, nnx.Module):
        raise TypeError(
            f"module is an nnx module that already has its parameters ({type(module).__name__}). "
            f"Pass its constructor, called as module(rngs=...), for instance "
            f"functools.partial({type(module).__name__}, ...) or lambda rngs: ...; to start from "
            f"existing parameters, pass nnx.to_pure_dict(nnx.state(module, nnx.Param)) to sample."
        )
    if isinstance(module, type) and issubclass(module, linen.Module):
        raise TypeError(f"module is a linen class; pass an instance, {module.__name__}(...).")
    if not callable(module):
        raise TypeError(
            f"module must be a flax.linen module or the constructor of a flax.nnx module, got "
            f"{type(module).__name__}."
        )
    structure = _nnx_structure(module)
    return Nnx(module, structure, items, _hashable(structure))


def _hashable(value: object) -> Hashable:
    try:
        hash(value)
    except (TypeError, ValueError):  # attributes that are arrays: equal only to itself
        return object()
    return value


def _frozen(value: object) -> Any:
    """Return the class and the attributes of a linen module, with tuples in place of lists."""
    from flax import linen

    if isinstance(value, linen.Module):
        names = [f.name for f in dataclasses.fields(value) if f.name != "parent"]
        return type(value), tuple((name, _frozen(getattr(value, name))) for name in names)
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    if isinstance(value, Mapping):
        return tuple((key, _frozen(entry)) for key, entry in value.items())
    return value


def _nnx_structure(construct: Callable[..., Any]) -> Any:
    from flax import nnx

    def build() -> Any:
        module = construct(rngs=nnx.Rngs(0))
        if not isinstance(module, nnx.Module):
            raise TypeError(
                f"module(rngs=...) must return a flax.nnx module, got {type(module).__name__}."
            )
        return module

    parts: Any = nnx.split(nnx.eval_shape(build), nnx.Param, nnx.RngState, ...)
    structure, _, streams, variables = parts
    if streams:
        raise _random_error(f"has a stream of random numbers ({_variable_types(streams)})")
    if variables:
        raise _state_error(f"variables other than nnx.Param ({_variable_types(variables)})")
    return structure


def _variable_types(state: ArrayTree) -> str:
    from flax import nnx

    flat = nnx.to_flat_state(state)
    return ", ".join(f"{'.'.join(map(str, path))}: {type(leaf).__name__}" for path, leaf in flat)


def check_call(
    network: Network, shapes: Shapes, inputs: tuple[ArrayTree, ...]
) -> tuple[ArrayTree, ArrayTree]:
    """Return the shapes of the position and of the outputs.

    Raises
    ------
    ValueError
        If the module has no parameters, has state besides its parameters, or draws random numbers.
    """
    from flax import errors

    key = jax.eval_shape(lambda: jax.random.key(0))
    position = jax.eval_shape(lambda k: network.init(k, shapes), key)
    if not jax.tree.leaves(position):
        raise ValueError("The module has no parameters: there is nothing to sample.")
    try:
        return position, jax.eval_shape(network.apply, position, inputs)
    except errors.InvalidRngError as error:
        raise _random_error(f"draws random numbers ({_without_link(error)})") from error
    except (
        errors.ModifyScopeVariableError,
        errors.ScopeCollectionNotFound,
        errors.ScopeVariableNotFoundError,
    ) as error:
        raise _state_error(_without_link(error)) from error


def _without_link(error: Exception) -> str:
    return str(error).split(" (http")[0]


def _random_error(problem: str) -> ValueError:
    return ValueError(
        f"The module {problem}. A row's log likelihood must be a function of the position and of "
        f"that row only: build dropout layers with deterministic=True, or leave them out."
    )


def _state_error(state: str) -> ValueError:
    return ValueError(
        f"The module has state besides its parameters: {state}. A row's log likelihood must be a "
        f"function of the position and of that row only, and batch statistics depend on the "
        f"other rows: use layer, group or filter response normalization instead."
    )


@dataclass(frozen=True)
class Columns:
    """Keys of the rows for the module's arguments and for the outcome."""

    inputs: tuple[Column, ...]
    outcome: Column | None

    @classmethod
    def from_keys(cls, inputs: Column | Sequence[Column], outcome: Column | None) -> "Columns":
        return cls((inputs,) if isinstance(inputs, (str, int)) else tuple(inputs), outcome)

    def read(self, example: ArrayTree | FederatedData) -> Any:
        """Return the rows of an example, or raise if they or their keys do not fit."""
        rows = client_rows(example)
        if not isinstance(rows, dict) and type(rows) is not tuple:
            raise TypeError(
                f"Rows must be a dict or a tuple of arrays for inputs and outcomes, got "
                f"{type(rows).__name__}."
            )
        rows = checked_rows(rows, "rows")
        keys = list(rows) if isinstance(rows, dict) else list(range(len(rows)))
        for name, key in [*(("inputs", key) for key in self.inputs), ("outcome", self.outcome)]:
            if key not in keys:
                raise ValueError(
                    f"{name}={key!r} is not among the keys of the rows, {keys}: pass the rows' "
                    f"keys as inputs= and outcome=."
                )
        if not isinstance(rows[self.outcome], np.ndarray):
            raise ValueError(f"outcome={self.outcome!r} must be one array of the rows.")
        return rows

    def arguments(self, rows: ArrayTree) -> tuple[ArrayTree, ...]:
        return tuple(rows[key] for key in self.inputs)

    def input_shapes(self, rows: ArrayTree) -> Shapes:
        flat = [jax.tree.flatten(tree) for tree in self.arguments(rows)]
        return tuple((treedef, tuple((x.shape[1:], x.dtype) for x in xs)) for xs, treedef in flat)

    def replace_outcome(self, rows: ArrayTree, draw: Array) -> ArrayTree:
        draw = draw.astype(rows[self.outcome].dtype)
        if isinstance(rows, dict):
            return {**rows, self.outcome: draw}
        return tuple(draw if i == self.outcome else x for i, x in enumerate(rows))


class Setup(NamedTuple):
    """Network, and the columns that it reads."""

    network: Network
    columns: Columns

    def outputs(self, position: ArrayTree, rows: ArrayTree) -> ArrayTree:
        return self.network.apply(position, self.columns.arguments(rows))

    def real_outputs(self, position: ArrayTree, rows: ArrayTree) -> Array:
        # Half precision is too coarse for log densities.
        outputs: ArrayTree = self.outputs(position, rows)
        return outputs.astype(jnp.promote_types(outputs.dtype, jnp.float32))
