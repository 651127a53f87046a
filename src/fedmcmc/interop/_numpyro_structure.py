"""What the sites of a NumPyro model are: found by abstract tracing, before anything compiles.

The model is traced on rows of two made-up counts. What changes its shape with the count has a row
axis; what is computed from rows or from their count depends on the data; the rest is global.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from numpyro import distributions as dist
from numpyro.distributions import biject_to

from fedmcmc._types import ArrayTree
from fedmcmc.interop import _numpyro_trace as tracing
from fedmcmc.interop._dependence import Node, Tracer
from fedmcmc.interop._numpyro_improper import (
    has_traced_mask,
    is_improper,
    nonfinite_parameters,
    sites_masked_out,
)
from fedmcmc.interop._numpyro_inputs import (
    COUNTS,
    LOCAL,
    PARAMS,
    labels_of,
    position_shapes,
    row_shapes,
)
from fedmcmc.interop._numpyro_outcomes import find_outcomes, why_not_drawable

NO_RISK_SETS = (
    " A Cox partial likelihood is such a factor: its risk sets compare each row with the others. "
    "Use a piecewise-exponential model in its place (one row per person and interval, "
    "dist.Poisson for the event with log(time at risk) as an offset), or a parametric survival "
    "model (dist.RightCensoredDistribution of dist.Weibull)."
)
"""Advice where a factor combines rows."""

Facts = dict[str, dict[str, Any]]
"""What can be said about each site without a position."""


class Structure(NamedTuple):
    """The sites of a model.

    Attributes
    ----------
    shapes, local
        Unconstrained shape of each latent site that all groups share, and that each has its own of.
    prior, local_prior
        Names of the sites (Jacobian factors among them) that make up the prior of either.
    likelihood
        The axis of rows in the log density of each site that makes up the likelihood.
    deterministic, local_deterministic
        Names of the deterministic sites that do not depend on rows, nor the former on local sites.
    distributions
        Name of the distribution of each local site.
    outcomes
        ``(site, leaf)`` for each observed site in an order in which they can be drawn, `leaf` the
        index among the leaves of rows that is its value; ``None`` if outcomes cannot be drawn.
    why_not_drawn
        Reason why outcomes cannot be drawn, a clause; empty if they can.
    improper
        Latent sites whose prior is no density.
    factors
        Names of the sites that are a `numpyro.factor`.
    """

    shapes: dict[str, tuple[int, ...]]
    local: dict[str, tuple[int, ...]]
    prior: tuple[str, ...]
    local_prior: tuple[str, ...]
    likelihood: dict[str, int]
    deterministic: tuple[str, ...]
    local_deterministic: tuple[str, ...]
    distributions: dict[str, str]
    outcomes: tuple[tuple[str, int], ...] | None
    why_not_drawn: str
    improper: tuple[str, ...]
    factors: tuple[str, ...]

    @property
    def every(self) -> dict[str, tuple[int, ...]]:
        """Unconstrained shape of each latent site."""
        return {**self.shapes, **self.local}


class _Outputs(NamedTuple):
    """Nodes and shapes of one abstract trace at one count of rows."""

    log_prob: dict[str, Node]
    shape: dict[str, tuple[int, ...]]
    value: dict[str, list[Node]]
    why_not_drawn: dict[str, str]
    factors: set[str]


def find_structure(
    model: Callable[..., Any], rows: ArrayTree, local: tuple[str, ...] = ()
) -> Structure:
    """Sort the sites of `model`, or raise a `ValueError` that names the site that does not fit.

    `local` names the latent sites that each group has its own of.
    """
    num_rows = jax.tree.leaves(rows)[0].shape[0]
    trace = facts_of(model, rows)
    _check_sites(trace)
    first, second = (_start_at(model, rows, count, num_rows, trace, local) for count in COUNTS)
    _check_no_row_axis(first, second, local)
    shapes = {name: site["shape"] for name, site in first.items() if site["latent"]}
    if not shapes:
        raise ValueError("The model has no latent site: there is nothing to sample.")
    if set(local) == set(shapes):
        raise ValueError(
            f"All latent sites, {', '.join(shapes)}, are local: clients share nothing, and each "
            f"can fit its own rows alone."
        )
    tracer = Tracer()
    params = {name: site["value"] for name, site in first.items() if site["type"] == "param"}
    pair = [_outputs(model, rows, count, shapes, params, tracer, local) for count in COUNTS]
    prior, local_prior, likelihood = _sort(shapes, local, *pair)
    global_ = {
        name: _flags(nodes)
        for name, nodes in pair[0].value.items()
        if name not in pair[0].log_prob
        and nodes == pair[1].value[name]
        and _flags(nodes) <= {LOCAL}
    }
    deterministic = tuple(name for name, flags in global_.items() if not flags)
    outcomes, why_not = None, f"the model has local sites ({', '.join(local)})"
    if not local:
        outcomes, why_not = find_outcomes(
            model, rows, shapes, pair[0].value, pair[0].why_not_drawn, tuple(likelihood), tracer
        )
    return Structure(
        {name: shape for name, shape in shapes.items() if name not in local},
        {name: shapes[name] for name in local},
        prior,
        local_prior,
        likelihood,
        deterministic,
        tuple(name for name in global_ if name not in deterministic),
        {name: trace[name]["distribution"] for name in local},
        outcomes,
        why_not,
        tuple(name for name, site in trace.items() if site.get("improper")),
        tuple(sorted(pair[0].factors)),
    )


def _outputs(
    model: Callable[..., Any],
    rows: ArrayTree,
    count: int,
    shapes: dict[str, tuple[int, ...]],
    params: dict[str, Any],
    tracer: Tracer,
    local: tuple[str, ...],
) -> _Outputs:
    why_not_drawn, factors = {}, set()

    def run(position: ArrayTree, params: ArrayTree, rows: ArrayTree) -> Any:
        values, log_probs = {}, {}
        for name, site in tracing.trace_at(model, rows, position, params).items():
            if site["type"] in ("sample", "deterministic"):
                values[name] = site["value"]
            if site["type"] == "sample":
                log_probs[name] = tracing.log_prob(site)
                why_not_drawn[name] = why_not_drawable(site)
                if tracing.is_factor(site):
                    factors.add(name)
        return values, log_probs

    position = position_shapes(shapes)
    arguments = (position, params, row_shapes(rows, count))
    closed, (values, log_probs) = jax.make_jaxpr(run, return_shape=True)(*arguments)
    nodes = iter(tracer.outputs(closed, labels_of(*arguments, local=local)))
    value = {name: [next(nodes) for _ in jax.tree.leaves(v)] for name, v in values.items()}
    log_prob = {name: next(nodes) for name in log_probs}
    shape = {name: struct.shape for name, struct in log_probs.items()}
    return _Outputs(log_prob, shape, value, why_not_drawn, factors)


def _flags(nodes: list[Node]) -> frozenset:
    return frozenset().union(*(node.flags for node in nodes))


def _sort(
    shapes: dict[str, tuple[int, ...]],
    local: tuple[str, ...],
    first: _Outputs,
    second: _Outputs,
) -> tuple[tuple[str, ...], tuple[str, ...], dict[str, int]]:
    """Return the sites of the priors, shared and local, and of the likelihood with row axes."""
    jacobians = {tracing.jacobian_name(name): name for name in shapes}
    prior, local_prior, likelihood = [], [], {}
    for name, node in first.log_prob.items():
        if PARAMS in node.flags:
            raise ValueError(
                f"Site {name!r} depends on a numpyro.param, which has no prior and would not be "
                f"sampled. Make it a numpyro.sample site (random_flax_module for networks)."
            )
        latent = jacobians.get(name, name)
        same = node == second.log_prob[name] and node.flags <= {LOCAL}
        if latent in shapes:
            same &= first.value[latent] == second.value[latent]
            if not same or not _flags(first.value[latent]) <= {LOCAL}:
                if latent in local:
                    raise ValueError(
                        f"The prior of the local site {latent!r} depends on the rows; it may "
                        f"depend on latent sites alone. Put the group's covariate in the "
                        f"likelihood: add its part to the mean of what is observed, in place of "
                        f"that of {latent!r}."
                    )
                raise ValueError(
                    f"The prior of latent site {latent!r} depends on the rows, so every client "
                    f"would have another. Give it numbers that all clients share."
                )
            if latent not in local and node.flags:
                raise ValueError(
                    f"The prior of the shared site {latent!r} depends on a local one. Draw shared "
                    f"sites first, or make {latent!r} local, too."
                )
        if latent in local or (same and node.flags):
            local_prior.append(name)
        elif same:
            prior.append(name)
        else:
            is_factor = name in first.factors
            likelihood[name] = _row_axis(name, first.shape[name], second.shape[name], is_factor)
    if not likelihood:
        raise ValueError("The model has no observed site that depends on rows: pass it obs=.")
    return tuple(prior), tuple(local_prior), likelihood


def _row_axis(name: str, first: tuple[int, ...], second: tuple[int, ...], is_factor: bool) -> int:
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
        + (NO_RISK_SETS if is_factor else "")
    )


def facts_of(model: Callable[..., Any], rows: ArrayTree) -> Facts:
    """Return what can be said about each site without a position."""
    return _abstract_start(model, row_shapes(rows, jax.tree.leaves(rows)[0].shape[0]))


def _abstract_start(model: Callable[..., Any], shapes: ArrayTree) -> Facts:
    """Trace abstractly without a position; return plain facts about each site."""
    facts: Facts = {}

    def run(rows: ArrayTree) -> dict[str, Any]:
        params = {}
        for name, site in tracing.start_trace(model, rows).items():
            facts[name] = _facts(site)
            if site["type"] == "param":
                params[name] = site["value"]
            elif facts[name]["observed"]:
                # A value that does not fit its distribution fails here.
                tracing.log_prob(site)
        return params

    for name, value in jax.eval_shape(run, shapes).items():
        facts[name]["value"] = value
    masked = tuple(name for name, site in facts.items() if site.get("masked"))
    if masked:
        for name in sites_masked_out(model, shapes, masked):
            facts[name]["improper"] = True
    return facts


def _facts(site: dict[str, Any]) -> dict[str, Any]:
    facts = {
        "type": site["type"],
        "latent": tracing.is_latent(site),
        "observed": site["type"] == "sample" and site["is_observed"],
        "discrete": False,
        "local": (site.get("infer") or {}).get("local", False),
        "plates": {frame.name: frame.size for frame in site.get("cond_indep_stack", ())},
    }
    if site["type"] == "plate":
        size, subsample_size = site["args"]
        facts["size"] = size
        facts["subsampled"] = subsample_size not in (None, size) or len(site["value"]) != size
    if facts["latent"]:
        facts["discrete"] = site["fn"].support.is_discrete
        # Handlers do not see into a scan: its sites stay as they are written.
        steps = "_scan_current_index" in (site.get("infer") or {})
        facts["location_scale"] = not steps and _has_location_and_scale(site["fn"])
        facts["distribution"] = tracing.name_of(site["fn"])
        facts["delta"] = isinstance(site["fn"], dist.Delta)
        facts["improper"] = not facts["discrete"] and is_improper(site)
        facts["masked"] = not facts["discrete"] and has_traced_mask(site)
        facts["nonfinite"] = nonfinite_parameters(site)
        if not facts["discrete"]:
            transform = biject_to(site["fn"].support)
            facts["shape"] = tuple(transform.inverse_shape(jnp.shape(site["value"])))
    return facts


def _has_location_and_scale(fn: dist.Distribution) -> bool:
    fn = tracing.bare(fn)
    real = fn.support is dist.constraints.real
    return real and {"loc", "scale"} <= set(fn.arg_constraints)


def _check_sites(trace: Facts) -> None:
    for name, site in trace.items():
        if site["type"] == "mutable":
            raise ValueError(
                f"Site {name!r} is mutable state; a posterior is a function of its position alone."
            )
        if site.get("subsampled"):
            raise ValueError(
                f"Plate {name!r} subsamples its rows. Write the model for all the rows it is "
                f"given: kernels draw the minibatches (batch_size=...) and rescale them."
            )
        if site["discrete"]:
            raise ValueError(
                f"Latent site {name!r} is discrete, which a gradient-based sampler cannot move. "
                f"Sum it out of the model, for instance with a mixture distribution, or observe it."
            )
        if site.get("delta"):
            raise ValueError(
                f"Latent site {name!r} has a delta distribution; use numpyro.deterministic."
            )
        for parameter, value in site.get("nonfinite", {}).items():
            raise ValueError(
                f"The prior of site {name!r} has {parameter} = {value}, which is no density: "
                f"choose a finite {parameter}. For a flat prior use dist.ImproperUniform."
            )


def _start_at(
    model: Callable[..., Any],
    rows: ArrayTree,
    count: int,
    num_rows: int,
    trace: Facts,
    local: tuple[str, ...],
) -> Facts:
    try:
        other = _abstract_start(model, row_shapes(rows, count))
    except Exception as error:
        plates = [n for n, site in trace.items() if site.get("size") == num_rows]
        inside = [n for n, s in trace.items() if s["latent"] and set(s["plates"]) & set(plates)]
        if inside:
            raise _one_per_row(inside[0], plates, local) from error
        raise ValueError(
            f"The model runs on {num_rows} rows but not on {count}. It must run on any number of "
            f"rows, for kernels pass it minibatches and clients of all sizes: take sizes from the "
            f"rows' shapes" + (f" (plate {plates[0]!r} has size {num_rows})." if plates else ".")
        ) from error
    if other.keys() != trace.keys():
        raise ValueError(
            f"The sites of the model change with the number of rows: "
            f"{sorted(other.keys() ^ trace.keys())}. A model over rows has sites with a row axis, "
            f"not one site per row."
        )
    return other


def _one_per_row(name: str, plates: list[str], local: tuple[str, ...]) -> ValueError:
    where = f"lies in the data plate {plates[0]!r}" if plates else "grows with the number of rows"
    if name in local:
        return ValueError(
            f"The local site {name!r} {where}: it is to have one value per group, not one per row. "
            f"Put it outside of the plate; the model is written for the rows of one group, and "
            f"the data say which these are (groups=)."
        )
    return ValueError(
        f"Latent site {name!r} {where}: it would be one parameter per row, and a client's rows "
        f"never leave it. Make it global (outside of the plate, indexed by a group id per row), "
        f"sum it out (dist.NegativeBinomial2 and dist.BetaBinomial have such an effect summed "
        f"out), make each row a group (data with groups=, the site outside of the plate and with "
        f"infer={{'local': True}}), or, if it is an outcome, pass it as obs=."
    )


def _check_no_row_axis(first: Facts, second: Facts, local: tuple[str, ...]) -> None:
    for name, site in first.items():
        if site["latent"]:
            other = second[name]
            plates = [p for p, n in site["plates"].items() if other["plates"].get(p) != n]
            if plates or site["shape"] != other["shape"]:
                raise _one_per_row(name, plates, local)
