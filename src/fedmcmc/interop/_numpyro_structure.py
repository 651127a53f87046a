"""Classification of the sites of a NumPyro model by abstract tracing, before anything compiles.

The model is traced on two made-up numbers of rows. A value whose shape changes with that number has
a row axis. A value that is computed from the rows or from their number depends on the data. All
other values are global.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from numpyro import distributions as dist
from numpyro.distributions import biject_to

from fedmcmc.interop import _numpyro_trace as tracing
from fedmcmc.interop._dependence import NO_FLAGS, Node, Tracer
from fedmcmc.interop._numpyro_improper import (
    has_traced_mask,
    is_improper,
    nonfinite_parameters,
    sites_masked_out,
)
from fedmcmc.interop._numpyro_outcomes import find_outcomes, why_not_drawable
from fedmcmc.interop._numpyro_trace import COUNTS, LOCAL, PARAMS
from fedmcmc.types import ArrayTree

SURVIVAL_ADVICE = (
    " A Cox partial likelihood is such a factor: its risk sets compare each row with the others. "
    "Use fedmcmc.models.survival('Surv(time, event) ~ x', tables) in its place, which has nearly "
    "the same estimates, or write a piecewise-exponential model (one row per person and interval, "
    "dist.Poisson for the event with log(time at risk) as an offset) or a parametric survival "
    "model (dist.RightCensoredDistribution of dist.Weibull)."
)
"""Advice that is added to an error message if a factor combines rows."""

DECENTERED = "_decentered"
"""Suffix that NumPyro adds to a reparametrized site's name for the latent site that it samples."""
Facts = dict[str, dict[str, Any]]
"""Properties of each site that do not depend on a position."""


class Structure(NamedTuple):
    """Sites of a model by their roles.

    Attributes
    ----------
    shared_shapes, local_shapes
        Unconstrained shapes of the latent sites that all groups share, and of the latent sites with
        one value per group.
    prior, local_prior
        Names of the sites (Jacobian factors included) that make up each prior.
    likelihood
        Axis of rows in the log density of each site that makes up the likelihood.
    deterministic, local_deterministic
        Names of the deterministic sites that do not depend on rows: those that do not depend on
        local sites either, and those that do.
    distributions
        Name of the distribution of each local site.
    outcomes
        ``(site, leaf)`` for each observed site in an order in which they can be drawn. `leaf` is
        the index of the observed value among the leaves of rows. ``None`` if outcomes cannot be
        drawn.
    why_not_drawn
        Reason why outcomes cannot be drawn, a clause; empty if they can.
    improper
        Latent sites with an improper prior.
    factors
        Names of the sites that are a `numpyro.factor`.
    """

    shared_shapes: dict[str, tuple[int, ...]]
    local_shapes: dict[str, tuple[int, ...]]
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
    def latent_shapes(self) -> dict[str, tuple[int, ...]]:
        """Unconstrained shape of each latent site."""
        return {**self.shared_shapes, **self.local_shapes}


class _Outputs(NamedTuple):
    """Nodes and shapes of one abstract trace at one number of rows."""

    log_prob: dict[str, Node]
    shape: dict[str, tuple[int, ...]]
    value: dict[str, list[Node]]
    why_not_drawn: dict[str, str]
    factors: set[str]


def find_structure(
    model: Callable[..., Any], rows: ArrayTree, facts: Facts, local: tuple[str, ...] = ()
) -> Structure:
    """Return the roles of the sites of `model`, or raise if a site does not fit.

    `facts` are the facts about its sites on `rows`; `local` are the sites with one value per group.
    """
    _check_sites(facts)
    fewer, more = (_facts_at(model, rows, count, facts, local) for count in COUNTS)
    _check_no_row_axis(fewer, more, local)
    shapes = {name: site["shape"] for name, site in fewer.items() if site["latent"]}
    if not shapes:
        raise ValueError("The model has no latent site: there is nothing to sample.")
    if set(local) == set(shapes):
        raise ValueError(
            f"All latent sites, {', '.join(shapes)}, are local: clients share nothing, and each "
            f"can fit its rows alone."
        )
    tracer = Tracer()
    params = {name: site["value"] for name, site in fewer.items() if site["type"] == "param"}
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
    outcomes, why_not = None, _why_not_drawn(local, facts)
    if not local:
        outcomes, why_not = find_outcomes(
            model, rows, shapes, pair[0].value, pair[0].why_not_drawn, tuple(likelihood), tracer
        )
    return Structure(
        shared_shapes={name: shape for name, shape in shapes.items() if name not in local},
        local_shapes={name: shapes[name] for name in local},
        prior=prior,
        local_prior=local_prior,
        likelihood=likelihood,
        deterministic=deterministic,
        local_deterministic=tuple(name for name in global_ if name not in deterministic),
        distributions={name: facts[name]["distribution"] for name in local},
        outcomes=outcomes,
        why_not_drawn=why_not,
        improper=tuple(name for name, site in facts.items() if site.get("improper")),
        factors=tuple(sorted(pair[0].factors)),
    )


def _why_not_drawn(local: tuple[str, ...], facts: Facts) -> str:
    """Return why outcomes cannot be drawn given the shared sites alone, with the user's names."""
    short = [name.removesuffix(DECENTERED) for name in local]
    names = [x if x in facts else name for x, name in zip(short, local, strict=True)]
    return (
        f"outcomes depend on random effects ({', '.join(names)}), which draws of the shared "
        "parameters do not contain (docs/tutorials/random_effects.md has a resample_fn that draws "
        "them)"
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

    arguments = (tracing.position_shapes(shapes), params, tracing.row_shapes(rows, count))
    closed, (values, log_probs) = jax.make_jaxpr(run, return_shape=True)(*arguments)
    nodes = iter(tracer.outputs(closed, tracing.labels_of(*arguments, local)))
    value = {name: [next(nodes) for _ in jax.tree.leaves(v)] for name, v in values.items()}
    log_prob = {name: next(nodes) for name in log_probs}
    shape = {name: struct.shape for name, struct in log_probs.items()}
    return _Outputs(log_prob, shape, value, why_not_drawn, factors)


def _flags(nodes: list[Node]) -> frozenset:
    return NO_FLAGS.union(*(node.flags for node in nodes))


def _sort(
    shapes: dict[str, tuple[int, ...]],
    local: tuple[str, ...],
    fewer: _Outputs,
    more: _Outputs,
) -> tuple[tuple[str, ...], tuple[str, ...], dict[str, int]]:
    """Return the sites of the shared prior, of the local prior and of the likelihood.

    `fewer` and `more` are the outputs at the two `COUNTS`. Sites of the likelihood come with their
    axis of rows.
    """
    jacobians = {tracing.jacobian_name(name): name for name in shapes}
    prior, local_prior, likelihood = [], [], {}
    for name, node in fewer.log_prob.items():
        if PARAMS in node.flags:
            raise ValueError(
                f"Site {name!r} depends on a numpyro.param, which has no prior and would not be "
                f"sampled. Make it a numpyro.sample site (random_flax_module for networks)."
            )
        latent = jacobians.get(name, name)
        is_row_free = node == more.log_prob[name] and node.flags <= {LOCAL}
        if latent in shapes:
            is_row_free &= fewer.value[latent] == more.value[latent]
            if not is_row_free or not _flags(fewer.value[latent]) <= {LOCAL}:
                if latent in local:
                    raise ValueError(
                        f"The prior of the local site {latent!r} depends on the rows; it may "
                        f"depend only on latent sites. Put the group's covariate in the "
                        f"likelihood: add its effect to the mean of the observed site, not to the "
                        f"mean of {latent!r}."
                    )
                raise ValueError(
                    f"The prior of latent site {latent!r} depends on the rows, so every client "
                    f"would have a different prior. Use numbers that all clients share."
                )
            if latent not in local and node.flags:
                raise ValueError(
                    f"The prior of the shared site {latent!r} depends on a local one. Sample "
                    f"shared sites before local sites, or make {latent!r} local too."
                )
        if latent in local or (is_row_free and node.flags):
            local_prior.append(name)
        elif is_row_free:
            prior.append(name)
        else:
            is_factor = name in fewer.factors
            likelihood[name] = _row_axis(name, fewer.shape[name], more.shape[name], is_factor)
    if not likelihood:
        raise ValueError("The model has no observed site that depends on rows: pass it obs=.")
    return tuple(prior), tuple(local_prior), likelihood


def _row_axis(name: str, fewer: tuple[int, ...], more: tuple[int, ...], is_factor: bool) -> int:
    axes = [i for i, (a, b) in enumerate(zip(fewer, more, strict=False)) if a != b]
    if len(fewer) == len(more) and len(axes) == 1:
        axis = axes[0]
        if (fewer[axis], more[axis]) == COUNTS:
            return axis
    raise ValueError(
        f"Site {name!r} depends on the rows but has not one term per row: the shape of its log "
        f"density is {fewer} on {COUNTS[0]} rows and {more} on {COUNTS[1]} rows. The rows must be "
        f"independent given the latent sites, with one axis for them in the batch shape. A scalar "
        f"factor, or a distribution over all rows together, cannot be split into minibatches."
        + (SURVIVAL_ADVICE if is_factor else "")
    )


def facts_of(model: Callable[..., Any], rows: ArrayTree) -> Facts:
    """Return facts about each site, from an abstract trace without a position.

    `rows` may be shapes.
    """
    facts: Facts = {}

    def run(rows: ArrayTree) -> dict[str, Any]:
        params = {}
        for name, site in tracing.start_trace(model, rows).items():
            facts[name] = _site_facts(site)
            if site["type"] == "param":
                params[name] = site["value"]
            elif facts[name]["observed"]:
                # A value that does not fit its distribution raises an error here.
                tracing.log_prob(site)
        return params

    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), rows)
    for name, value in jax.eval_shape(run, shapes).items():
        facts[name]["value"] = value
    masked = tuple(name for name, site in facts.items() if site.get("masked"))
    if masked:
        for name in sites_masked_out(model, shapes, masked):
            facts[name]["improper"] = True
    return facts


def _site_facts(site: dict[str, Any]) -> dict[str, Any]:
    infer = site.get("infer") or {}
    facts = {
        "type": site["type"],
        "latent": tracing.is_latent(site),
        "observed": site["type"] == "sample" and site["is_observed"],
        "discrete": False,
        "local": infer.get("local", False),
        "plates": {frame.name: frame.size for frame in site.get("cond_indep_stack", ())},
    }
    if site["type"] == "plate":
        size, subsample_size = site["args"]
        facts["size"] = size
        facts["subsampled"] = subsample_size not in (None, size) or len(site["value"]) != size
    if facts["latent"]:
        facts["discrete"] = site["fn"].support.is_discrete
        # Handlers do not reach into a scan, so its sites cannot be reparametrized.
        in_scan = "_scan_current_index" in infer
        facts["location_scale"] = not in_scan and _has_location_and_scale(site["fn"])
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
    is_real = fn.support is dist.constraints.real
    return is_real and {"loc", "scale"} <= set(fn.arg_constraints)


def _check_sites(facts: Facts) -> None:
    for name, site in facts.items():
        if site["type"] == "mutable":
            raise ValueError(
                f"Site {name!r} is mutable state; a posterior is a function of its position only."
            )
        if site.get("subsampled"):
            raise ValueError(
                f"Plate {name!r} subsamples its rows. Write the model for all the rows that it "
                f"gets: kernels draw the minibatches (batch_size=...) and rescale them."
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
                f"The prior of site {name!r} has {parameter} = {value} and is therefore not a "
                f"density: choose a finite {parameter}. For a flat prior use dist.ImproperUniform."
            )


def _facts_at(
    model: Callable[..., Any], rows: ArrayTree, count: int, facts: Facts, local: tuple[str, ...]
) -> Facts:
    """Return facts about the model on `count` rows, after comparing its sites with `facts`."""
    num_rows = jax.tree.leaves(rows)[0].shape[0]
    try:
        facts_at_count = facts_of(model, tracing.row_shapes(rows, count))
    except Exception as error:
        plates = [name for name, site in facts.items() if site.get("size") == num_rows]
        inside = [n for n, s in facts.items() if s["latent"] and set(s["plates"]) & set(plates)]
        if inside:
            raise _one_per_row(inside[0], plates, local) from error
        raise ValueError(
            f"The model runs on {num_rows} rows but not on {count}. It must run on any number of "
            f"rows, because kernels pass it minibatches and clients of all sizes: take sizes from "
            f"the rows' shapes"
            + (f" (plate {plates[0]!r} has size {num_rows})." if plates else ".")
        ) from error
    if facts_at_count.keys() != facts.keys():
        raise ValueError(
            f"The sites of the model change with the number of rows: "
            f"{sorted(facts_at_count.keys() ^ facts.keys())}. A model over rows has sites with a "
            f"row axis, not one site per row."
        )
    return facts_at_count


def _one_per_row(name: str, plates: list[str], local: tuple[str, ...]) -> ValueError:
    problem = f"lies in the data plate {plates[0]!r}" if plates else "grows with the number of rows"
    if name in local:
        return ValueError(
            f"The local site {name!r} {problem}: it must have one value per group, not one per "
            f"row. Move it out of the plate; the model is written for the rows of one group, and "
            f"the data define the groups (groups=)."
        )
    return ValueError(
        f"Latent site {name!r} {problem}: it would be one parameter per row, and a client's rows "
        f"never leave it. Make it global (outside of the plate, indexed by a group id per row), "
        f"sum it out (dist.NegativeBinomial2 and dist.BetaBinomial have such an effect summed "
        f"out), make each row a group (data with groups=, the site outside of the plate and with "
        f"infer={{'local': True}}), or, if it is an outcome, pass it as obs=."
    )


def _check_no_row_axis(fewer: Facts, more: Facts, local: tuple[str, ...]) -> None:
    for name, site in fewer.items():
        if site["latent"]:
            plates = [p for p, n in site["plates"].items() if more[name]["plates"].get(p) != n]
            if plates or site["shape"] != more[name]["shape"]:
                raise _one_per_row(name, plates, local)
