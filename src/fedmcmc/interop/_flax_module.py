"""Flax modules of either interface as two functions: `init` of a key, `apply` of a position."""

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._types import ArrayTree

__all__ = ["Network", "Shapes", "check_call", "read_module"]

Options = tuple[tuple[str, Hashable], ...]
Shapes = tuple[tuple[Any, tuple[tuple[tuple[int, ...], np.dtype], ...]], ...]
"""Hashable shapes of one row of each input: tree structure, and shape and dtype of each leaf."""


@dataclass(frozen=True)
class Linen:
    """A linen module. Modules that are equal share compilations where they can be hashed."""

    module: Any = field(compare=False)
    options: Options
    key: Hashable

    def init(self, rng_key: Array, shapes: Shapes) -> ArrayTree:
        inputs = _one_row(shapes)
        return self.module.init({"params": rng_key}, *inputs, **dict(self.options)).get("params")

    def apply(self, position: ArrayTree, inputs: tuple[ArrayTree, ...]) -> ArrayTree:
        return self.module.apply({"params": position}, *inputs, **dict(self.options))


@dataclass(frozen=True)
class Nnx:
    """The constructor of an nnx module and the structure of what it constructs."""

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


def read_module(module: Any, options: Mapping[str, Hashable] | None) -> Network:
    """Return `module`, a linen module or the constructor of an nnx module, as a `Network`."""
    try:
        from flax import linen, nnx
    except ImportError as error:
        raise ImportError(
            'Flax modules need flax, an optional dependency: pip install "fedmcmc[flax]".'
        ) from error
    fixed = tuple(sorted((options or {}).items()))
    if isinstance(module, linen.Module):
        return Linen(module, fixed, _hashable(_frozen(module)))
    if isinstance(module, nnx.Module):
        raise TypeError(
            f"module is an nnx module that already has its parameters ({type(module).__name__}). "
            f"Pass what constructs it, called as module(rngs=...), for instance "
            f"functools.partial({type(module).__name__}, ...) or lambda rngs: ...; to start from "
            f"parameters at hand, give sample nnx.to_pure_dict(nnx.state(module, nnx.Param))."
        )
    if isinstance(module, type) and issubclass(module, linen.Module):
        raise TypeError(f"module is a linen class; pass an instance, {module.__name__}(...).")
    if not callable(module):
        raise TypeError(
            f"module must be a flax.linen module or the constructor of a flax.nnx module, got "
            f"{type(module).__name__}."
        )
    structure = _nnx_structure(module)
    return Nnx(module, structure, fixed, _hashable(structure))


def _hashable(value: Any) -> Hashable:
    try:
        hash(value)
    except (TypeError, ValueError):  # attributes that are arrays: equal to itself alone
        return object()
    return value


def _frozen(value: Any) -> Any:
    """Return what makes linen modules equal, with tuples for the lists that cannot be hashed."""
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
        built = construct(rngs=nnx.Rngs(0))
        if not isinstance(built, nnx.Module):
            raise TypeError(
                f"module(rngs=...) must return a flax.nnx module, got {type(built).__name__}."
            )
        return built

    parts: Any = nnx.split(nnx.eval_shape(build), nnx.Param, nnx.RngState, ...)
    structure, _, streams, rest = parts
    if streams:
        raise _draws_random_numbers(f"keeps a stream of random numbers ({_kinds(streams)})")
    if rest:
        raise _has_state(f"variables other than nnx.Param ({_kinds(rest)})")
    return structure


def _kinds(state: Any) -> str:
    from flax import nnx

    flat = nnx.to_flat_state(state)
    return ", ".join(f"{'.'.join(map(str, path))}: {type(leaf).__name__}" for path, leaf in flat)


def check_call(
    network: Network, shapes: Shapes, inputs: tuple[ArrayTree, ...]
) -> tuple[ArrayTree, ArrayTree]:
    """Return the shapes of position and outputs, after checking that a position is all it takes.

    Raises
    ------
    ValueError
        If the module has no parameters, state besides them, or draws random numbers.
    """
    from flax import errors

    key = jax.eval_shape(lambda: jax.random.key(0))
    position = jax.eval_shape(lambda k: network.init(k, shapes), key)
    if not jax.tree.leaves(position):
        raise ValueError("The module has no parameters: there is nothing to sample.")
    try:
        return position, jax.eval_shape(network.apply, position, inputs)
    except errors.InvalidRngError as error:
        raise _draws_random_numbers(f"draws random numbers ({_first_line(error)})") from error
    except (
        errors.ModifyScopeVariableError,
        errors.ScopeCollectionNotFound,
        errors.ScopeVariableNotFoundError,
    ) as error:
        raise _has_state(_first_line(error)) from error


def _first_line(error: Exception) -> str:
    return str(error).split(" (http")[0]


def _draws_random_numbers(what: str) -> ValueError:
    return ValueError(
        f"The module {what}. A row's log likelihood must be a function of the position and of "
        f"that row alone: build dropout layers with deterministic=True, or leave them out."
    )


def _has_state(what: str) -> ValueError:
    return ValueError(
        f"The module has state besides its parameters: {what}. A row's log likelihood must be a "
        f"function of the position and of that row alone, and batch statistics are made of the "
        f"other rows: use layer, group or filter response normalization instead."
    )


def _one_row(shapes: Shapes) -> tuple[ArrayTree, ...]:
    return tuple(
        jax.tree.unflatten(treedef, [jnp.zeros((1, *shape), dtype) for shape, dtype in leaves])
        for treedef, leaves in shapes
    )
