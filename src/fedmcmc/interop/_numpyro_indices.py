"""Columns of rows that index an axis of a model, compared with the length of that axis.

JAX does not raise where an index lies beyond an array: ``v[k]`` takes the nearest element and has
no gradient. The log likelihood's jaxpr shows which indices are computed from rows. Where one lies
outside of its axis, the row's term is computed with other numbers in place of the element; if
all give the same term (as within ``jnp.where(k < 3, v[k], 0)``), the index does no harm.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._types import ArrayTree, Posterior
from fedmcmc.data import FederatedData
from fedmcmc.interop._dependence import INLINED

REPLACED = (0.7391, -1.3173, 2.1137)
"""Numbers that stand for an element outside of its array; integers are replaced by 0, 1 and 2."""
CHANGE = 1e-6
"""Relative change of a row's term beyond which the element matters."""
SCALE = 0.3
"""Standard deviation of positions at which terms are computed."""

Terms = Callable[[ArrayTree, ArrayTree], Array]
"""A position and rows to the log likelihood of each row, ``[num_rows]``."""


@dataclass(frozen=True)
class BadIndex:
    """Row whose index lies outside of an axis: its number, columns with values, index, length."""

    row: int
    columns: dict[str, Any]
    index: int | None
    length: int
    num_bad: int

    def describe(self, place: str) -> str:
        """Return an error message for a row at `place`."""
        columns = ", ".join(f"{name} = {value}" for name, value in self.columns.items())
        index = "an index" if self.index is None else f"index {self.index}"
        others = f" {self.num_bad} rows are like this." if self.num_bad > 1 else ""
        last = self.length - 1
        return (
            f"In {place}, {columns} gives {index} on an axis of length {self.length} in the model, "
            f"whose indices are 0 to {last}; JAX would use another element without an error "
            f"(the last one for -1 and for an index beyond {last}).{others} Number the codes from "
            f"0 to {last}, lengthen the axis, or write what the model does with other codes: "
            f"v.at[k].get(mode='fill', fill_value=0.0), say (check_rows=False turns this off)."
        )


def find_bad_index(terms_fn: Terms, position: ArrayTree, rows: ArrayTree) -> BadIndex | None:
    """Return the first row with an index outside of its axis that changes the row's term.

    Parameters
    ----------
    terms_fn
        Log likelihood of each row.
    position
        Shapes of a position.
    rows
        All rows, leaves ``[num_rows, ...]``.
    """
    closed = jax.make_jaxpr(terms_fn)(position, rows)
    num = len(jax.tree.leaves(position))
    leaves = jax.tree.leaves(rows)
    lookups = _Lookups()

    # Without a position only what depends on rows alone is computed: a small program.
    def outside_of(leaves: Sequence[Array]) -> list[tuple[Array, Array]]:
        walk = _Walk(_Lookups())
        walk.closed(closed, [_Value(None)] * num + _columns(leaves))
        lookups.found = walk.lookups.found
        lookups.hidden = walk.lookups.hidden
        return [(x.counts, x.firsts) for x in lookups.found if x.counts is not None]

    jax.eval_shape(outside_of, leaves)
    if not lookups.found and not lookups.hidden:
        return None
    counts = jax.tree.map(np.asarray, jax.jit(outside_of)(leaves))
    known = [x for x in lookups.found if x.counts is not None]
    for one, (num_outside, firsts) in zip(known, counts, strict=True):
        one.counts, one.firsts = num_outside, firsts
    suspects = [x for x in known if x.counts.any()]
    if not suspects and not lookups.hidden:
        return None
    draws = np.random.default_rng(0)
    like = jax.tree.leaves(position)
    place = [jnp.asarray(draws.normal(0, SCALE, x.shape), x.dtype) for x in like]
    names = _names(rows)
    targets: list[_Lookup | None] = [*suspects, *([None] if lookups.hidden else [])]
    for target in targets:
        listed = frozenset(x.number for x in known)
        changed, lookup = _changed_rows(closed, place, leaves, target, listed)
        if lookup is not None and changed.any():
            row = int(changed.argmax())
            axis = 0 if lookup.counts is None else int(lookup.counts.argmax())
            columns = {names[i]: np.asarray(leaves[i])[row] for i in sorted(lookup.columns)}
            bad = BadIndex(row, columns, None, lookup.lengths[axis], int(changed.sum()))
            if len(leaves[0]) > 1:
                single = jax.tree.map(itemgetter(slice(row, row + 1)), rows)
                alone = find_bad_index(terms_fn, position, single)
                return replace(bad, index=None if alone is None else alone.index)
            return replace(bad, index=None if lookup.counts is None else int(lookup.firsts[axis]))
    return None


def _changed_rows(
    closed: Any,
    place: list[Array],
    leaves: Sequence[Array],
    target: "_Lookup | None",
    listed: frozenset[tuple[int, ...]],
) -> tuple[np.ndarray, "_Lookup | None"]:
    """Return whose term changes with the elements outside of an axis, and the lookup of these.

    Without a target the elements of all lookups but the listed ones are replaced.
    """
    walks: list[_Walk] = []

    @jax.jit
    def terms(place: list[Array], leaves: Sequence[Array], other: Array) -> Any:
        number = None if target is None else target.number
        walks.append(walk := _Walk(_Lookups(), other, number, listed))
        (found,) = walk.closed(closed, [_Value(x) for x in place] + _columns(leaves))
        unlisted = [x for x in walk.lookups.found if x.number not in listed]
        return jnp.asarray(found.value), [(x.counts, x.firsts) for x in unlisted]

    results = [terms(place, leaves, jnp.asarray(i)) for i in range(len(REPLACED))]
    one, *others = (np.asarray(result[0]) for result in results)
    changed = np.zeros(one.shape, bool)
    for other in others:
        with np.errstate(invalid="ignore"):
            changed |= np.abs(one - other) > CHANGE * (1 + np.abs(one))
        changed |= np.isfinite(one) != np.isfinite(other)
    if target is not None:
        return changed, target
    unlisted = [x for x in walks[0].lookups.found if x.number not in listed]
    for lookup, counts in zip(unlisted, results[0][1], strict=True):
        lookup.counts, lookup.firsts = jax.tree.map(np.asarray, counts)
    outside = [x for x in unlisted if x.counts is not None and x.counts.any()]
    in_loops = [x for x in unlisted if x.counts is None]
    return changed, next(iter(outside + in_loops), None)


def _columns(leaves: Sequence[Array]) -> "list[_Value]":
    return [_Value(leaf, frozenset({i})) for i, leaf in enumerate(leaves)]


def _names(rows: ArrayTree) -> list[str]:
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(rows)]
    return [jax.tree_util.keystr(path, simple=True, separator=".") or "row" for path in paths]


@dataclass(eq=False)
class _Value:
    """Value of a variable, ``None`` if not known, and the columns that it is computed from.

    `negative_of` and `shifted` are what ``x < 0`` and ``x + n`` are computed from.
    """

    value: Any
    columns: frozenset[int] = frozenset()
    negative_of: Any = None
    shifted: Any = None


@dataclass(eq=False)
class _Lookup:
    """Elements of an axis at indices that are computed from columns.

    `counts` and `firsts` are how many indices lie outside of each axis, and the first of them;
    ``None`` in a loop. `number` tells lookups of one function apart.
    """

    number: tuple[int, ...]
    columns: frozenset[int]
    lengths: tuple[int, ...]
    counts: Any = None
    firsts: Any = None


class _Lookups:
    """All lookups of a function; `hidden` is whether loops hold some that were not looked into."""

    def __init__(self) -> None:
        self.found: list[_Lookup] = []
        self.hidden = False


class _Walk:
    """Evaluates a jaxpr, with another element in place of each that lies outside of its array.

    Parameters
    ----------
    lookups
        Where lookups are listed.
    other
        Which of the numbers takes the place of elements, ``[]`` int.
    target
        Number of the lookup whose elements are replaced, by default all that are not `listed`:
        those in loops, and those whose indices loops return.
    """

    def __init__(
        self,
        lookups: _Lookups,
        other: Any = None,
        target: tuple[int, ...] | None = None,
        listed: frozenset[tuple[int, ...]] = frozenset(),
    ) -> None:
        self.lookups, self.other, self.target, self.listed = lookups, other, target, listed
        self.depth = 0
        self.path: tuple[int, ...] = ()

    def closed(self, closed: Any, inputs: Sequence[_Value]) -> list[_Value]:
        return self.walk(closed.jaxpr, closed.consts, inputs)

    def walk(self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[_Value]) -> list[_Value]:
        values: dict[Any, _Value] = dict(zip(jaxpr.invars, inputs, strict=True))
        values.update(zip(jaxpr.constvars, map(_Value, consts), strict=True))

        def read(atom: Any) -> _Value:
            return _Value(atom.val) if hasattr(atom, "val") else values[atom]

        for eqn in jaxpr.eqns:
            results = self.equation(eqn, [read(atom) for atom in eqn.invars])
            values.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def equation(self, eqn: Any, inputs: list[_Value]) -> list[_Value]:
        name = eqn.primitive.name
        if name in INLINED:
            inner = _inner(eqn, len(inputs))
            if inner is not None:
                outer, self.path = self.path, (*self.path, id(eqn))
                results = self.walk(*inner, inputs)
                self.path = outer
                return results
        columns = frozenset().union(*(x.columns for x in inputs))
        if name == "select_n" and len(inputs) == 3 and inputs[1].columns:
            condition, plain, wrapped = inputs
            if condition.negative_of is plain and wrapped.shifted is plain:
                return [plain]  # a negative index before it counts from the end
        if name in ("gather", "dynamic_slice"):
            return [self.lookup(eqn, inputs, columns)]
        if name in ("scan", "while", "cond") and columns and _has_lookups(eqn):
            return self.loop(eqn, inputs, columns)
        if any(x.value is None for x in inputs):
            return [_Value(None, columns) for _ in eqn.outvars]
        results = _bind(eqn, [x.value for x in inputs])
        found = [_Value(value, columns) for value in results]
        if name == "lt" and _is_zero(inputs[1].value):
            found[0].negative_of = inputs[0]
        if name == "add":
            found[0].shifted = inputs[0]
        return found

    def lookup(self, eqn: Any, inputs: list[_Value], columns: frozenset[int]) -> _Value:
        """Return elements of an array, and list the lookup if columns are what it looks for."""
        indices = inputs[1:]
        own = frozenset().union(*(x.columns for x in indices))
        values = [x.value for x in inputs]
        plain = None if any(x is None for x in values) else _bind(eqn, values)[0]
        known = not any(x.value is None for x in indices)
        if not own or not known or _is_deliberate(eqn):
            return _Value(plain, columns)
        outside, counts, firsts, lengths = _outside(eqn, [x.value for x in indices])
        found = _Lookup((*self.path, id(eqn)), own, lengths)
        if not self.depth:
            found.counts, found.firsts = counts, firsts
        self.lookups.found.append(found)
        is_target = self.target == found.number
        replaced = found.number not in self.listed if self.target is None else is_target
        if plain is None or self.other is None or not replaced:
            return _Value(plain, columns)
        if eqn.primitive.name == "gather":
            outside = jnp.expand_dims(outside, eqn.params["dimension_numbers"].offset_dims)
        numbers = (
            jnp.asarray(REPLACED) if jnp.issubdtype(plain.dtype, jnp.inexact) else jnp.arange(3)
        )
        return _Value(jnp.where(outside, numbers[self.other].astype(plain.dtype), plain), columns)

    def loop(self, eqn: Any, inputs: list[_Value], columns: frozenset[int]) -> list[_Value]:
        """Evaluate a loop or a branch, in whose body columns may look something up."""
        if self.other is None or any(x.value is None for x in inputs):
            self.lookups.hidden = True
            return [_Value(None, columns) for _ in eqn.outvars]
        values, params = [x.value for x in inputs], eqn.params
        labels = [x.columns for x in inputs]
        self.depth += 1
        if eqn.primitive.name == "cond":

            def branch(closed: Any) -> Callable[..., list[Any]]:
                return lambda *args: self.values_of(closed, args, labels[1:])

            branches = [branch(closed) for closed in params["branches"]]
            results = jax.lax.switch(values[0], branches, *values[1:])
        elif eqn.primitive.name == "scan":
            consts, carried = params["num_consts"], params["num_carry"]
            split = consts + carried
            own = _settled(params["jaxpr"], labels, consts, carried)

            def body(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
                out = self.values_of(params["jaxpr"], [*values[:consts], *carry, *xs], own)
                return out[:carried], out[carried:]

            last, stacked = jax.lax.scan(
                body,
                values[consts:split],
                values[split:],
                length=params["length"],
                reverse=params["reverse"],
            )
            results = [*last, *stacked]
        else:
            first, second = params["cond_nconsts"], params["body_nconsts"]
            of_test, of_body = values[:first], values[first : first + second]
            start = values[first + second :]
            inner = _settled(params["body_jaxpr"], labels[first:], second, len(start))
            results = jax.lax.while_loop(
                lambda state: self.values_of(
                    params["cond_jaxpr"], [*of_test, *state], [*labels[:first], *inner[second:]]
                )[0],
                lambda state: self.values_of(params["body_jaxpr"], [*of_body, *state], inner),
                start,
            )
        self.depth -= 1
        return [_Value(value, columns) for value in results]

    def values_of(
        self, closed: Any, values: Sequence[Any], labels: Sequence[frozenset[int]]
    ) -> list[Any]:
        inputs = [_Value(*pair) for pair in zip(values, labels, strict=True)]
        return [jnp.asarray(x.value) for x in self.closed(closed, inputs)]


def _bind(eqn: Any, values: list[Any]) -> list[Any]:
    results = eqn.primitive.bind(*values, **eqn.params)
    return list(results) if eqn.primitive.multiple_results else [results]


def _inner(eqn: Any, num_inputs: int) -> tuple[Any, Sequence[Any]] | None:
    """Return jaxpr and constants of a function that is called, if it has these inputs."""
    for value in eqn.params.values():
        inner = getattr(value, "jaxpr", value)
        if hasattr(inner, "eqns") and len(inner.invars) == num_inputs:
            return inner, getattr(value, "consts", ())
    return None


def _jaxprs(eqn: Any) -> list[Any]:
    found = []
    for value in eqn.params.values():
        for part in value if isinstance(value, (tuple, list)) else (value,):
            inner = getattr(part, "jaxpr", part)
            if hasattr(inner, "eqns"):
                found.append(inner)
    return found


def _has_lookups(eqn: Any) -> bool:
    return any(
        inner.primitive.name in ("gather", "dynamic_slice") or _has_lookups(inner)
        for jaxpr in _jaxprs(eqn)
        for inner in jaxpr.eqns
    )


def _settled(
    closed: Any, labels: Sequence[frozenset[int]], num_consts: int, num_carried: int
) -> list[frozenset[int]]:
    """Return the columns of a body's inputs, once those of what it carries grow no more."""
    own, end = list(labels), num_consts + num_carried
    while True:
        out = _labels_of(closed.jaxpr, own)[:num_carried]
        grown = [a | b for a, b in zip(own[num_consts:end], out, strict=True)]
        if grown == own[num_consts:end]:
            return own
        own[num_consts:end] = grown


def _labels_of(jaxpr: Any, labels: Sequence[frozenset[int]]) -> list[frozenset[int]]:
    known: dict[Any, frozenset[int]] = dict(zip(jaxpr.invars, labels, strict=True))
    nothing: frozenset[int] = frozenset()

    def read(atom: Any) -> frozenset[int]:
        return nothing if hasattr(atom, "val") else known.get(atom, nothing)

    for eqn in jaxpr.eqns:
        inputs = [read(atom) for atom in eqn.invars]
        inner = _inner(eqn, len(inputs)) if eqn.primitive.name in INLINED else None
        union = nothing.union(*inputs)
        out = [union] * len(eqn.outvars) if inner is None else _labels_of(inner[0], inputs)
        known.update(zip(eqn.outvars, out, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _is_zero(value: Any) -> bool:
    if isinstance(value, jax.core.Tracer) or np.ndim(value):
        return False
    return bool(np.asarray(value) == 0)  # by NumPy, as JAX would trace the comparison


def _is_deliberate(eqn: Any) -> bool:
    """Return whether the model says what it does with indices outside: a mode of its own.

    ``mode="fill"`` with a number, or ``mode="clip"``; a `dynamic_slice` in `jax.vmap` is a clipping
    gather, too, but keeps the axis that it slices.
    """
    if eqn.primitive.name == "dynamic_slice":
        return False
    mode, fill = eqn.params["mode"], eqn.params["fill_value"]
    if mode == jax.lax.GatherScatterMode.FILL_OR_DROP:
        return fill is not None and not np.isnan(fill)
    clips = mode == jax.lax.GatherScatterMode.CLIP
    return clips and bool(eqn.params["dimension_numbers"].collapsed_slice_dims)


def _outside(eqn: Any, indices: list[Any]) -> tuple[Array, Array, Array, tuple[int, ...]]:
    """Return which places lie outside, and by axis how many do and one such index."""
    shape, sizes = eqn.invars[0].aval.shape, eqn.params["slice_sizes"]
    if eqn.primitive.name == "gather":
        axes = eqn.params["dimension_numbers"].start_index_map
        table = jnp.moveaxis(jnp.asarray(indices[0]), -1, 0)
        parts = [table[i] for i in range(len(axes))]
    else:
        axes, parts = tuple(range(len(shape))), [jnp.asarray(x) for x in indices]
    masks = [
        (part < 0) | (part > shape[axis] - sizes[axis])
        for part, axis in zip(parts, axes, strict=True)
    ]
    outside = masks[0]
    for mask in masks[1:]:
        outside = outside | mask
    counts = jnp.stack([jnp.sum(mask) for mask in masks])
    pairs = zip(parts, masks, strict=True)
    firsts = jnp.stack([part.ravel()[jnp.argmax(mask.ravel())] for part, mask in pairs])
    return outside, counts, firsts, tuple(shape[axis] for axis in axes)


def check_indices(
    posterior: Posterior,
    rows: ArrayTree,
    place_fn: Callable[[int], str],
    position: ArrayTree = None,
) -> None:
    """Raise `ValueError` where a column indexes an axis of the model outside of its length.

    Parameters
    ----------
    posterior
        The model, with or without latents of groups.
    rows
        All rows, leaves ``[num_rows, ...]``.
    place_fn
        Words for the place of a row.
    position
        Shapes of a position, by default those of ``posterior.init_fn``; without either, nothing is
        checked.

    Warns
    -----
    UserWarning
        If the model has an operation that cannot be evaluated by itself.
    """
    local = posterior.local or getattr(posterior.loglikelihood_fn, "local", None)

    def terms_fn(place: tuple[ArrayTree, ArrayTree], rows: ArrayTree) -> Array:
        if local is None:
            return jnp.asarray(posterior.loglikelihood_fn(place[0], rows))
        num = jax.tree.leaves(rows)[0].shape[0]
        of_rows = jax.tree.map(lambda x: jnp.broadcast_to(x, (num, *x.shape)), place[1])
        return jnp.asarray(local.loglikelihood_fn(place[0], of_rows, rows))

    own: ArrayTree = ()
    try:
        if position is None:
            if posterior.init_fn is None:
                return
            position = jax.eval_shape(posterior.init_fn, jax.random.key(0))
        if local is not None:
            position = position if local.client is None else (position, local.client.like.tree)
            own = local.like.tree
        bad = find_bad_index(terms_fn, (position, own), rows)
    except (AttributeError, KeyError, NotImplementedError, TypeError) as error:
        # The likelihood decides whether a model can be fitted, but no check is left out in silence.
        warnings.warn(
            f"Columns that index an axis of the model were not compared with its length, as an "
            f"operation could not be evaluated by itself ({type(error).__name__}: {error}).",
            stacklevel=3,  # the caller of `from_numpyro`
        )
        return
    if bad is not None:
        raise ValueError(bad.describe(place_fn(bad.row)))


def place_of(data: FederatedData | None) -> Callable[[int], str]:
    """Return words for the place of a row among those of data, or of an example."""
    if data is None:
        return lambda row: f"row {row} of example"
    start = np.asarray(data.start)

    def place(row: int) -> str:
        client = int(np.searchsorted(start, row, side="right")) - 1
        return f"row {row - int(start[client])} of client {data.labels[client]!r}"

    return place
