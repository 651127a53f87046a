"""What the sites of a NumPyro model are: found by abstract tracing, before anything compiles.

The model is traced on rows of two made-up counts. What changes its shape with the count has a row
axis; what is computed from rows or from their count depends on the data; the rest is global.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedmcmc._types import ArrayTree
from fedmcmc.interop import _numpyro_trace as tracing
from fedmcmc.interop._dependence import Node, Tracer
from fedmcmc.interop._numpyro_checks import (
    abstract_start,
    check_global,
    check_sites,
    row_shapes,
    start_at,
)

__all__ = ["Structure", "find_structure"]

COUNTS = (11, 13)
"""Numbers of rows to trace with; any two that no model writes down."""
_ROWS, _PARAMS = "rows", "params"


class Structure(NamedTuple):
    """The sites of a model.

    Attributes
    ----------
    shapes
        Unconstrained shape of each latent site.
    prior
        Names of the sites (Jacobian factors among them) that make up the prior.
    likelihood
        The axis of rows in the log density of each site that makes up the likelihood.
    deterministic
        Names of the deterministic sites that do not depend on rows.
    outcomes
        ``(site, leaf)`` for each observed site in an order in which they can be drawn, `leaf` the
        index among the leaves of rows that is its value; ``None`` where that cannot be known.
    """

    shapes: dict[str, tuple[int, ...]]
    prior: tuple[str, ...]
    likelihood: dict[str, int]
    deterministic: tuple[str, ...]
    outcomes: tuple[tuple[str, int], ...] | None


class _Outputs(NamedTuple):
    """Nodes and shapes of one abstract trace at one count of rows."""

    log_prob: dict[str, Node]
    shape: dict[str, tuple[int, ...]]
    value: dict[str, list[Node]]
    observed: dict[str, bool]
    drawable: dict[str, bool]


def find_structure(model: Callable[..., Any], rows: ArrayTree) -> Structure:
    """Sort the sites of `model`, or raise a `ValueError` that names the site that does not fit."""
    num_rows = jax.tree.leaves(rows)[0].shape[0]
    trace = abstract_start(model, row_shapes(rows, num_rows))
    check_sites(trace)
    first, second = (start_at(model, rows, count, num_rows, trace) for count in COUNTS)
    check_global(first, second)
    shapes = {name: site["shape"] for name, site in first.items() if site["latent"]}
    if not shapes:
        raise ValueError("The model has no latent site: there is nothing to sample.")
    tracer = Tracer()
    params = {name: site["value"] for name, site in first.items() if site["type"] == "param"}
    pair = [_outputs(model, rows, count, shapes, params, tracer) for count in COUNTS]
    prior, likelihood = _sort(shapes, *pair)
    deterministic = tuple(
        name
        for name, nodes in pair[0].value.items()
        if name not in pair[0].log_prob and nodes == pair[1].value[name] and not _flags(nodes)
    )
    outcomes = _outcomes(model, rows, shapes, likelihood, pair[0], tracer)
    return Structure(shapes, prior, likelihood, deterministic, outcomes)


def _outputs(
    model: Callable[..., Any],
    rows: ArrayTree,
    count: int,
    shapes: dict[str, tuple[int, ...]],
    params: dict[str, Any],
    tracer: Tracer,
) -> _Outputs:
    observed, drawable = {}, {}

    def run(position: ArrayTree, params: ArrayTree, rows: ArrayTree) -> Any:
        values, log_probs = {}, {}
        for name, site in tracing.trace_at(model, rows, position, params).items():
            if site["type"] in ("sample", "deterministic"):
                values[name] = site["value"]
            if site["type"] == "sample":
                log_probs[name] = tracing.log_prob(site)
                observed[name] = site["is_observed"]
                # A tempered likelihood is not the density of what `sample` would draw.
                drawable[name] = not tracing.is_factor(site) and _is_one(site["scale"])
        return values, log_probs

    position = _position_shapes(shapes)
    arguments = (position, params, row_shapes(rows, count))
    closed, (values, log_probs) = jax.make_jaxpr(run, return_shape=True)(*arguments)
    nodes = iter(tracer.outputs(closed, _labels(*arguments)))
    value = {name: [next(nodes) for _ in jax.tree.leaves(v)] for name, v in values.items()}
    log_prob = {name: next(nodes) for name in log_probs}
    shape = {name: struct.shape for name, struct in log_probs.items()}
    return _Outputs(log_prob, shape, value, observed, drawable)


def _position_shapes(shapes: dict[str, tuple[int, ...]]) -> dict[str, jax.ShapeDtypeStruct]:
    dtype = jnp.result_type(float)
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}


def _labels(*groups: ArrayTree) -> list[tuple[Any, frozenset]]:
    """Label the flat inputs; rows flag all that they reach, each leaf by its index too."""
    labels = []
    for group, tree in zip(("position", _PARAMS, _ROWS), groups, strict=True):
        for i, _ in enumerate(jax.tree.leaves(tree)):
            flags = {_ROWS: (_ROWS, i), _PARAMS: (_PARAMS,)}.get(group, ())
            labels.append(((group, i), frozenset(flags)))
    return labels


def _is_one(scale: Any) -> bool:
    return scale is None or (isinstance(scale, (int, float)) and scale == 1)


def _flags(nodes: list[Node]) -> frozenset:
    return frozenset().union(*(node.flags for node in nodes))


def _sort(
    shapes: dict[str, tuple[int, ...]], first: _Outputs, second: _Outputs
) -> tuple[tuple[str, ...], dict[str, int]]:
    """Return the sites of the prior, and those of the likelihood with their row axes."""
    jacobians = {tracing.jacobian_name(name): name for name in shapes}
    prior, likelihood = [], {}
    for name, node in first.log_prob.items():
        _check_params(name, node)
        latent = jacobians.get(name, name)
        same = node == second.log_prob[name] and not node.flags
        if latent in shapes:
            same &= first.value[latent] == second.value[latent]
            if not same or _flags(first.value[latent]):
                raise ValueError(
                    f"The prior of latent site {latent!r} depends on the rows, so every client "
                    f"would have another. Give it numbers that all clients share."
                )
            prior.append(name)
        elif same:
            prior.append(name)
        else:
            likelihood[name] = _row_axis(name, first.shape[name], second.shape[name])
    if not likelihood:
        raise ValueError("The model has no observed site that depends on rows: pass it obs=.")
    return tuple(prior), likelihood


def _check_params(name: str, node: Node) -> None:
    if _PARAMS in node.flags:
        raise ValueError(
            f"Site {name!r} depends on a numpyro.param, which has no prior and would not be "
            f"sampled. Make it a numpyro.sample site (random_flax_module for networks)."
        )


def _row_axis(name: str, first: tuple[int, ...], second: tuple[int, ...]) -> int:
    axes = [i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b]
    if len(first) == len(second) and len(axes) == 1:
        axis = axes[0]
        if (first[axis], second[axis]) == COUNTS:
            return axis
    raise ValueError(
        f"Site {name!r} depends on the rows but has not one term per row: on {COUNTS[0]} rows its "
        f"log density has shape {first}, on {COUNTS[1]} rows {second}. The rows must be "
        f"independent given the latent sites, with one axis for them in the batch shape (a scalar "
        f"factor or a distribution over all rows together cannot be split over minibatches)."
    )


def _outcomes(
    model: Callable[..., Any],
    rows: ArrayTree,
    shapes: dict[str, tuple[int, ...]],
    likelihood: dict[str, int],
    outputs: _Outputs,
    tracer: Tracer,
) -> tuple[tuple[str, int], ...] | None:
    ids = {node: i for i, node in enumerate(tracer.inputs(_labels((), (), rows)))}
    leaf_of: dict[str, int] = {}
    for name in likelihood:
        leaf = ids.get(tracer.uncast(outputs.value[name][0]))
        if leaf is None or leaf in leaf_of.values() or not outputs.drawable[name]:
            return None
        leaf_of[name] = leaf

    def draws(position: ArrayTree, rows: ArrayTree) -> dict[str, Any]:
        trace = tracing.trace_at(model, rows, position)
        return {name: tracing.draw_site(jax.random.key(0), trace[name]) for name in leaf_of}

    arguments = (_position_shapes(shapes), row_shapes(rows, COUNTS[0]))
    try:
        closed, drawn = jax.make_jaxpr(draws, return_shape=True)(*arguments)
    except NotImplementedError:  # a distribution that cannot be drawn from
        return None
    leaves = jax.tree.leaves(arguments[1])
    if any(drawn[name].shape != leaves[leaf].shape for name, leaf in leaf_of.items()):
        return None
    nodes = tracer.outputs(closed, _labels(arguments[0], (), arguments[1]))
    needs = {name: node.flags for name, node in zip(drawn, nodes, strict=True)}
    return _in_order(leaf_of, needs)


def _in_order(
    leaf_of: dict[str, int], needs: dict[str, frozenset]
) -> tuple[tuple[str, int], ...] | None:
    """Order sites so that each is drawn after the outcomes that its distribution looks at."""
    waiting, ordered = dict(leaf_of), []
    while waiting:
        ready = [name for name in waiting if not needs[name] & set(waiting.values())]
        if not ready:
            return None
        ordered.append((ready[0], waiting.pop(ready[0])))
    return tuple(ordered)
