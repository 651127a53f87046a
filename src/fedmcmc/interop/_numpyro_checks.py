"""What can be said about the sites of a NumPyro model without a position, and what does not fit."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from numpyro import distributions as dist
from numpyro.distributions import biject_to

from fedmcmc._types import ArrayTree
from fedmcmc.interop._numpyro_trace import log_prob, start_trace

__all__ = ["abstract_start", "check_global", "check_sites", "row_shapes", "start_at"]

Facts = dict[str, dict[str, Any]]


def row_shapes(rows: ArrayTree, count: int) -> ArrayTree:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype), rows)


def abstract_start(model: Callable[..., Any], shapes: ArrayTree) -> Facts:
    """Trace abstractly without a position; return plain facts about each site."""
    facts: Facts = {}

    def run(rows: ArrayTree) -> dict[str, Any]:
        params = {}
        for name, site in start_trace(model, rows).items():
            facts[name] = _facts(site)
            if site["type"] == "param":
                params[name] = site["value"]
            elif facts[name]["observed"]:
                log_prob(site)  # so that a value that does not fit its distribution fails here
        return params

    for name, value in jax.eval_shape(run, shapes).items():
        facts[name]["value"] = value
    return facts


def _facts(site: dict[str, Any]) -> dict[str, Any]:
    facts: dict[str, Any] = {"type": site["type"], "latent": False, "discrete": False}
    facts["plates"] = {frame.name: frame.size for frame in site.get("cond_indep_stack", ())}
    if site["type"] == "plate":
        size, subsample_size = site["args"]
        facts["size"] = size
        facts["subsampled"] = subsample_size not in (None, size) or len(site["value"]) != size
    facts["observed"] = site["type"] == "sample" and site["is_observed"]
    if site["type"] == "sample" and not site["is_observed"]:
        facts["latent"] = True
        facts["discrete"] = site["fn"].support.is_discrete
        facts["delta"] = isinstance(site["fn"], dist.Delta)
        if not facts["discrete"]:
            transform = biject_to(site["fn"].support)
            facts["shape"] = tuple(transform.inverse_shape(jnp.shape(site["value"])))
    return facts


def check_sites(trace: Facts) -> None:
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


def start_at(
    model: Callable[..., Any],
    rows: ArrayTree,
    count: int,
    num_rows: int,
    trace: Facts,
) -> Facts:
    try:
        other = abstract_start(model, row_shapes(rows, count))
    except Exception as error:
        plates = [n for n, site in trace.items() if site.get("size") == num_rows]
        inside = [n for n, s in trace.items() if s["latent"] and set(s["plates"]) & set(plates)]
        if inside:
            raise _local_latent(inside[0], plates) from error
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


def _local_latent(name: str, plates: list[str]) -> ValueError:
    where = f"lies in the data plate {plates[0]!r}" if plates else "grows with the number of rows"
    return ValueError(
        f"Latent site {name!r} {where}: it would be a parameter a row, and a client's rows never "
        f"leave it. Make it global (outside of the plate, indexed by a group id a row), sum it "
        f"out, or, if it is an outcome, pass it as obs=."
    )


def check_global(first: Facts, second: Facts) -> None:
    for name, site in first.items():
        if site["latent"]:
            other = second[name]
            plates = [p for p, n in site["plates"].items() if other["plates"].get(p) != n]
            if plates or site["shape"] != other["shape"]:
                raise _local_latent(name, plates)
