"""Check of columns that index an axis of a model against the length of that axis.

JAX does not raise if an index lies outside an array: ``v[k]`` takes the nearest element and has no
gradient. The log likelihood's jaxpr shows which indices are computed from rows. If such an index is
outside, the row's term is computed again with other numbers in place of the element. If the term
does not change (as within ``jnp.where(k < 3, v[k], 0)``), the index does no harm.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.tree_util import Partial

from fedmcmc.data import warn_caller
from fedmcmc.interop._dependence import NO_FLAGS, called_jaxpr, propagate_flags
from fedmcmc.types import ArrayTree, Posterior, Shapes, as_functions, compiled

SUBSTITUTES = (0.7391, -1.3173, 2.1137)
"""Numbers that replace an element outside its array; integers are replaced by 0, 1 and 2."""
TOLERANCE = 1e-6
"""Relative change of a row's term above which the element matters."""
POSITION_SCALE = 0.3
"""Standard deviation of the position at which terms are computed."""

TermsFn = Callable[[ArrayTree, ArrayTree], Array]
"""``(position, rows) -> [num_rows]``, log likelihood of each row."""
Columns = frozenset[int]
"""Indices of the columns that a value is computed from."""
LookupId = tuple[int, ...]


@dataclass(frozen=True)
class BadIndex:
    """Row with an index outside an axis of some length, and the number of such rows.

    `columns` are the values in this row that the index is computed from, by name. `index` is
    ``None`` if a loop computes it.
    """

    row: int
    columns: dict[str, Any]
    index: int | None
    length: int
    num_bad: int

    def describe(self, row: str) -> str:
        """Return an error message; `row` is a description of the row."""
        columns = ", ".join(f"{name} = {value}" for name, value in self.columns.items())
        index = "an index" if self.index is None else f"index {self.index}"
        count = f" {self.num_bad} rows have this problem." if self.num_bad > 1 else ""
        last_index = self.length - 1
        return (
            f"In {row}, {columns} gives {index} on an axis of length {self.length} in the model, "
            f"whose indices are 0 to {last_index}; JAX would use another element without an error "
            f"(the last one for -1 and for an index beyond {last_index}).{count} Number the codes "
            f"from 0 to {last_index}, lengthen the axis, or define the model's value for other "
            f"codes, for example v.at[k].get(mode='fill', fill_value=0.0) (check_rows=False turns "
            f"this check off)."
        )


def find_bad_index(terms_fn: TermsFn, position: ArrayTree, rows: ArrayTree) -> BadIndex | None:
    """Return the first row with an index outside its axis that changes the row's term.

    `position` may be shapes; `rows` are all rows, leaves ``[num_rows, ...]``.
    """
    closed = jax.make_jaxpr(terms_fn)(position, rows)
    shapes, leaves = jax.tree.leaves(position), jax.tree.leaves(rows)
    walks: list[_Walk] = []

    def walk_rows(leaves: Sequence[Array]) -> None:
        walks.append(_walk_rows(closed, len(shapes), leaves))

    jax.eval_shape(walk_rows, leaves)
    (walk,) = walks
    if not walk.lookups and not walk.has_hidden:
        return None
    results = jax.tree.map(
        np.asarray, _count_outside(as_functions(terms_fn), Shapes(position), rows)
    )
    counted = [x for x in walk.lookups if x.counts is not None]
    for lookup, (counts, indices) in zip(counted, results, strict=True):
        lookup.counts, lookup.indices = counts, indices
    targets: list[_Lookup | None] = [x for x in counted if x.counts.any()]
    if walk.has_hidden:
        targets.append(None)
    if not targets:
        return None
    rng = np.random.default_rng(0)
    point = [jnp.asarray(rng.normal(0, POSITION_SCALE, x.shape), x.dtype) for x in shapes]
    names = _column_names(rows)
    counted_ids = frozenset(x.id for x in counted)
    for target in targets:
        is_changed, culprit = _changed_rows(closed, point, leaves, target, counted_ids)
        if culprit is not None and is_changed.any():
            row = int(is_changed.argmax())
            axis = 0 if culprit.counts is None else int(culprit.counts.argmax())
            columns = {names[i]: np.asarray(leaves[i])[row] for i in sorted(culprit.columns)}
            if len(leaves[0]) > 1:
                single = jax.tree.map(itemgetter(slice(row, row + 1)), rows)
                bad_alone = find_bad_index(terms_fn, position, single)
                index = None if bad_alone is None else bad_alone.index
            else:
                index = None if culprit.counts is None else int(culprit.indices[axis])
            return BadIndex(row, columns, index, culprit.lengths[axis], int(is_changed.sum()))
    return None


@compiled
def _count_outside(
    terms_fn: TermsFn, position: Shapes, rows: ArrayTree
) -> list[tuple[Array, Array]]:
    """Return the counts and the indices of the lookups outside of loops."""
    closed = jax.make_jaxpr(terms_fn)(position.tree, rows)
    num_unknown = len(jax.tree.leaves(position.tree))
    walk = _walk_rows(closed, num_unknown, jax.tree.leaves(rows))
    return [(x.counts, x.indices) for x in walk.lookups if x.counts is not None]


def _walk_rows(closed: ClosedJaxpr, num_unknown: int, leaves: Sequence[Array]) -> "_Walk":
    """Return a walk without a position, which computes only what depends on rows alone."""
    walk = _Walk()
    walk.evaluate(closed.jaxpr, closed.consts, [_Value(None)] * num_unknown + _inputs(leaves))
    return walk


def _changed_rows(
    closed: ClosedJaxpr,
    point: list[Array],
    leaves: Sequence[Array],
    target: "_Lookup | None",
    counted_ids: frozenset[LookupId],
) -> tuple[np.ndarray, "_Lookup | None"]:
    """Return a mask of rows whose term changes with substitutes, and the lookup that matters.

    Elements of `target` are replaced. Without a target, elements of all lookups are replaced except
    for `counted_ids`.
    """
    walks: list[_Walk] = []

    @jax.jit
    def terms(point: list[Array], leaves: Sequence[Array], substitute: Array) -> Any:
        target_id = None if target is None else target.id
        walks.append(walk := _Walk(substitute, target_id, counted_ids))
        inputs = [_Value(x) for x in point] + _inputs(leaves)
        (result,) = walk.evaluate(closed.jaxpr, closed.consts, inputs)
        new = [x for x in walk.lookups if x.id not in counted_ids]
        return jnp.asarray(result.value), [(x.counts, x.indices) for x in new]

    results = [terms(point, leaves, jnp.asarray(i)) for i in range(len(SUBSTITUTES))]
    values = np.stack([result[0] for result in results])
    is_finite = np.isfinite(values)
    with np.errstate(invalid="ignore"):
        is_far = np.abs(values - values[0]) > TOLERANCE * (1 + np.abs(values[0]))
    is_changed = (is_far | (is_finite != is_finite[0])).any(axis=0)
    if target is not None:
        return is_changed, target
    new = [x for x in walks[0].lookups if x.id not in counted_ids]
    for lookup, counts in zip(new, results[0][1], strict=True):
        lookup.counts, lookup.indices = jax.tree.map(np.asarray, counts)
    outside = [x for x in new if x.counts is not None and x.counts.any()]
    in_loops = [x for x in new if x.counts is None]
    return is_changed, next(iter(outside + in_loops), None)


def _inputs(leaves: Sequence[Array]) -> "list[_Value]":
    return [_Value(leaf, frozenset({i})) for i, leaf in enumerate(leaves)]


def _column_names(rows: ArrayTree) -> list[str]:
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(rows)]
    return [jax.tree_util.keystr(path, simple=True, separator=".") or "row" for path in paths]


@dataclass(eq=False)
class _Value:
    """Value of a variable, ``None`` if unknown, and the columns that it is computed from.

    `negative_of` and `shifted` are the operands ``x`` of ``x < 0`` and ``x + n``.
    """

    value: object
    columns: Columns = NO_FLAGS
    negative_of: ArrayTree = None
    shifted: ArrayTree = None


@dataclass(eq=False)
class _Lookup:
    """Lookup of elements of an array at indices that are computed from columns.

    `counts` and `indices` are the number of indices outside each axis and one of these indices;
    ``None`` in a loop.
    """

    id: LookupId
    columns: Columns
    lengths: tuple[int, ...]
    counts: ArrayTree = None
    indices: ArrayTree = None


class _Walk:
    """Evaluation of a jaxpr that lists lookups and replaces elements outside of their arrays.

    `substitute` is the index of the replacement in `SUBSTITUTES`. Elements of the lookup `target`
    are replaced. By default elements of all lookups except for `counted` are replaced: lookups in
    loops, and lookups at indices that loops compute. `has_hidden` becomes true if the walk skips a
    loop with lookups.
    """

    def __init__(
        self,
        substitute: object = None,
        target: LookupId | None = None,
        counted: frozenset[LookupId] = frozenset(),
    ) -> None:
        self.substitute, self.target, self.counted = substitute, target, counted
        self.lookups: list[_Lookup] = []
        self.has_hidden = False
        self.depth = 0
        self.path: LookupId = ()

    def evaluate(
        self, jaxpr: Jaxpr, consts: Sequence[Any], inputs: Sequence[_Value]
    ) -> list[_Value]:
        values: dict[Any, _Value] = dict(zip(jaxpr.invars, inputs, strict=True))
        values.update(zip(jaxpr.constvars, map(_Value, consts), strict=True))

        def read(atom: object) -> _Value:
            return _Value(atom.val) if hasattr(atom, "val") else values[atom]

        for eqn in jaxpr.eqns:
            results = self.equation(eqn, [read(atom) for atom in eqn.invars])
            values.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def equation(self, eqn: JaxprEqn, inputs: list[_Value]) -> list[_Value]:
        name, called = eqn.primitive.name, called_jaxpr(eqn)
        if called is not None:
            outer, self.path = self.path, (*self.path, id(eqn))
            results = self.evaluate(*called, inputs)
            self.path = outer
            return results
        columns = NO_FLAGS.union(*(x.columns for x in inputs))
        if name == "select_n" and len(inputs) == 3 and inputs[1].columns:
            condition, plain, wrapped = inputs
            if condition.negative_of is plain and wrapped.shifted is plain:
                return [plain]  # the negative index, before it counts from the end
        if name in ("gather", "dynamic_slice"):
            return [self.lookup(eqn, inputs, columns)]
        if name in ("scan", "while", "cond") and columns and _has_lookups(eqn):
            return self.loop(eqn, inputs, columns)
        if any(x.value is None for x in inputs):
            return [_Value(None, columns) for _ in eqn.outvars]
        values = [_Value(value, columns) for value in _bind(eqn, [x.value for x in inputs])]
        if name == "lt" and _is_zero(inputs[1].value):
            values[0].negative_of = inputs[0]
        if name == "add":
            values[0].shifted = inputs[0]
        return values

    def lookup(self, eqn: JaxprEqn, inputs: list[_Value], columns: Columns) -> _Value:
        """Return elements of an array, and list the lookup if its indices depend on columns."""
        indices = inputs[1:]
        index_columns = NO_FLAGS.union(*(x.columns for x in indices))
        values = [x.value for x in inputs]
        plain = None if any(x is None for x in values) else _bind(eqn, values)[0]
        has_indices = not any(x is None for x in values[1:])
        if not index_columns or not has_indices or _is_deliberate(eqn):
            return _Value(plain, columns)
        outside, counts, indices_outside, lengths = _outside(eqn, values[1:])
        lookup = _Lookup((*self.path, id(eqn)), index_columns, lengths)
        if not self.depth:
            lookup.counts, lookup.indices = counts, indices_outside
        self.lookups.append(lookup)
        is_target = self.target == lookup.id
        is_replaced = lookup.id not in self.counted if self.target is None else is_target
        if plain is None or self.substitute is None or not is_replaced:
            return _Value(plain, columns)
        if eqn.primitive.name == "gather":
            outside = jnp.expand_dims(outside, eqn.params["dimension_numbers"].offset_dims)
        is_inexact = jnp.issubdtype(plain.dtype, jnp.inexact)
        numbers = jnp.asarray(SUBSTITUTES) if is_inexact else jnp.arange(3)
        substitute = numbers[self.substitute].astype(plain.dtype)
        return _Value(jnp.where(outside, substitute, plain), columns)

    def loop(self, eqn: JaxprEqn, inputs: list[_Value], columns: Columns) -> list[_Value]:
        """Evaluate a loop or a branch whose body has lookups."""
        if self.substitute is None or any(x.value is None for x in inputs):
            self.has_hidden = True
            return [_Value(None, columns) for _ in eqn.outvars]
        values, params = [x.value for x in inputs], eqn.params
        labels = [x.columns for x in inputs]
        self.depth += 1
        if eqn.primitive.name == "cond":
            branches = [self.function_of(closed, labels[1:]) for closed in params["branches"]]
            results = jax.lax.switch(values[0], branches, *values[1:])
        elif eqn.primitive.name == "scan":
            num_consts, num_carried = params["num_consts"], params["num_carry"]
            consts, inputs_per_step = values[:num_consts], values[num_consts + num_carried :]
            body_labels = _loop_labels(params["jaxpr"], labels, num_consts, num_carried)
            body = self.function_of(params["jaxpr"], body_labels)

            def step(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
                out = body(*consts, *carry, *xs)
                return out[:num_carried], out[num_carried:]

            start = values[num_consts : num_consts + num_carried]
            final, stacked = jax.lax.scan(
                step, start, inputs_per_step, length=params["length"], reverse=params["reverse"]
            )
            results = [*final, *stacked]
        else:
            num_test, num_body = params["cond_nconsts"], params["body_nconsts"]
            test_consts, body_consts = values[:num_test], values[num_test : num_test + num_body]
            start = values[num_test + num_body :]
            body_labels = _loop_labels(
                params["body_jaxpr"], labels[num_test:], num_body, len(start)
            )
            test_labels = [*labels[:num_test], *body_labels[num_body:]]
            test = self.function_of(params["cond_jaxpr"], test_labels)
            body = self.function_of(params["body_jaxpr"], body_labels)
            results = jax.lax.while_loop(
                lambda state: test(*test_consts, *state)[0],
                lambda state: body(*body_consts, *state),
                start,
            )
        self.depth -= 1
        return [_Value(value, columns) for value in results]

    def function_of(
        self, closed: ClosedJaxpr, labels: Sequence[Columns]
    ) -> Callable[..., list[Any]]:
        """Return a closed jaxpr as a function whose inputs depend on the columns `labels`."""

        def evaluate(*values: Any) -> list[Any]:
            inputs = [_Value(*pair) for pair in zip(values, labels, strict=True)]
            outputs = self.evaluate(closed.jaxpr, closed.consts, inputs)
            return [jnp.asarray(x.value) for x in outputs]

        return evaluate


def _bind(eqn: JaxprEqn, values: list[Any]) -> list[Any]:
    results = eqn.primitive.bind(*values, **eqn.params)
    return list(results) if eqn.primitive.multiple_results else [results]


def _has_lookups(eqn: JaxprEqn) -> bool:
    for value in eqn.params.values():
        for part in value if isinstance(value, (tuple, list)) else (value,):
            jaxpr = getattr(part, "jaxpr", part)
            for inner in getattr(jaxpr, "eqns", ()):
                if inner.primitive.name in ("gather", "dynamic_slice") or _has_lookups(inner):
                    return True
    return False


def _loop_labels(
    closed: ClosedJaxpr, labels: Sequence[Columns], num_consts: int, num_carried: int
) -> list[Columns]:
    """Return the columns of a loop body's inputs after any number of iterations."""
    body_labels, end = list(labels), num_consts + num_carried
    while True:
        out = propagate_flags(closed, body_labels)[:num_carried]
        carried = [a | b for a, b in zip(body_labels[num_consts:end], out, strict=True)]
        if carried == body_labels[num_consts:end]:
            return body_labels
        body_labels[num_consts:end] = carried


def _is_zero(value: Any) -> bool:
    if isinstance(value, jax.core.Tracer) or np.ndim(value):
        return False
    return bool(np.asarray(value) == 0)  # by NumPy, because JAX would trace the comparison


def _is_deliberate(eqn: JaxprEqn) -> bool:
    """Return whether the model chooses a mode for indices outside an axis.

    The modes are ``"fill"`` with a number and ``"clip"``. A `dynamic_slice` in `jax.vmap` is also a
    clipping gather, but keeps the axis that it slices.
    """
    if eqn.primitive.name == "dynamic_slice":
        return False
    mode, fill = eqn.params["mode"], eqn.params["fill_value"]
    if mode == jax.lax.GatherScatterMode.FILL_OR_DROP:
        return fill is not None and not np.isnan(fill)
    clips = mode == jax.lax.GatherScatterMode.CLIP
    return clips and bool(eqn.params["dimension_numbers"].collapsed_slice_dims)


def _outside(eqn: Any, indices: list[Any]) -> tuple[Array, Array, Array, tuple[int, ...]]:
    """Return a mask of indices outside their axes, and a count, an index and a length per axis."""
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
    outside_indices = jnp.stack([part.ravel()[jnp.argmax(mask.ravel())] for part, mask in pairs])
    return outside, counts, outside_indices, tuple(shape[axis] for axis in axes)


def _row_terms(fn: Any, point: tuple[ArrayTree, ArrayTree], rows: ArrayTree) -> Array:
    return jnp.asarray(fn(point[0], rows))


def _group_terms(fn: Any, point: tuple[ArrayTree, ArrayTree], rows: ArrayTree) -> Array:
    """Return the log likelihood of each row, as if all groups had the same latent."""
    num = jax.tree.leaves(rows)[0].shape[0]
    latents = jax.tree.map(lambda x: jnp.broadcast_to(x, (num, *x.shape)), point[1])
    return jnp.asarray(fn(point[0], latents, rows))


def check_indices(
    posterior: Posterior,
    rows: ArrayTree,
    place_fn: Callable[[int], str],
    position: ArrayTree = None,
) -> None:
    """Raise if a column indexes an axis of the model outside its length.

    Parameters
    ----------
    posterior
        Model, with or without latents of groups.
    rows
        All rows, leaves ``[num_rows, ...]``.
    place_fn
        Function from the number of a row to its description.
    position
        Shapes of a position, by default the shapes of ``posterior.init_fn``. Without either,
        nothing is checked.

    Raises
    ------
    ValueError
        With the row, its columns, the index and the length of the axis.

    Warns
    -----
    UserWarning
        If an operation of the model cannot be evaluated by itself.
    """
    local = posterior.local or getattr(posterior.loglikelihood_fn, "local", None)
    fn = posterior.loglikelihood_fn if local is None else local.loglikelihood_fn
    terms_fn = Partial(_group_terms if local else _row_terms, as_functions(fn))
    latent: ArrayTree = ()
    try:
        if position is None:
            if posterior.init_fn is None:
                return
            position = jax.eval_shape(posterior.init_fn, jax.random.key(0))
        if local is not None:
            latent = local.like.tree
        bad = find_bad_index(terms_fn, (position, latent), rows)
    except (AttributeError, KeyError, NotImplementedError, TypeError) as error:
        # The model may still be fitted, but a skipped check must be visible.
        warn_caller(
            f"Columns that index an axis of the model were not compared with its length, because "
            f"an operation could not be evaluated by itself ({type(error).__name__}: {error})."
        )
        return
    if bad is not None:
        raise ValueError(bad.describe(place_fn(bad.row)))
