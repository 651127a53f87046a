"""Local latent sites of a NumPyro model (one value per group), and their parametrization."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import jax
import numpy as np
from jax import Array
from numpyro import handlers
from numpyro.infer import init_to_uniform
from numpyro.infer.reparam import LocScaleReparam

from fedmcmc.interop import _numpyro_trace as tracing
from fedmcmc.interop._dependence import NO_FLAGS, output_flags
from fedmcmc.interop._numpyro_structure import DECENTERED, Facts, Structure
from fedmcmc.types import ArrayTree

LOCAL_PLATES = ("client", "clients", "group")
"""Names of plates of size one whose latent sites have one value per group."""
ONE_LEVEL = (
    "A model has one level of local sites: if clients have groups, "
    "fedmcmc.interop.numpyro.share_client_effects(model, data) turns the effects of clients into "
    "shared parameters."
)


def local_sites(
    facts: Facts, names: Sequence[str] | None, has_groups: bool | None = None
) -> tuple[str, ...]:
    """Return the local sites.

    `names` is the argument `local` of `from_numpyro`. `has_groups` is true if the data have groups
    of rows within clients, ``None`` if this is unknown.
    """
    return _latent_names(facts, _marked_sites(facts, has_groups) if names is None else names)


def _marked_sites(facts: Facts, has_groups: bool | None) -> list[str]:
    """Return the latent sites that the model marks as local.

    The marks are ``infer={"local": True}`` and a plate of size one with a name in `LOCAL_PLATES`.
    """
    latent = {name: site for name, site in facts.items() if site["latent"]}
    marked = []
    for name, site in latent.items():
        mark = site["local"]
        if not (mark is None or isinstance(mark, bool | np.bool_)):
            raise ValueError(
                f"Site {name!r} has infer={{'local': {mark!r}}}; expected True, for an effect with "
                f"one value per group of rows (a client, or a group of the data's groups=). "
                f"{ONE_LEVEL}"
            )
        if mark or any(site["plates"].get(plate) == 1 for plate in LOCAL_PLATES):
            marked.append(name)
    if has_groups and any(site["plates"].get("group") == 1 for site in latent.values()):
        of_clients = [
            name
            for name in marked
            if latent[name]["plates"].get("group") != 1 and not latent[name]["local"]
        ]
        if of_clients:
            raise ValueError(
                f"Site {of_clients[0]!r} lies in a plate of clients, and the model has a plate of "
                f"groups within them. {ONE_LEVEL}"
            )
    return marked


def _latent_names(facts: Facts, names: Sequence[str]) -> tuple[str, ...]:
    """Return the named latent sites; a reparametrized site has the name of its latent site."""
    latent = [name for name, site in facts.items() if site["latent"]]
    if isinstance(names, str | Mapping):
        raise ValueError(f"local must be a list of names of sites, got {names!r}.")
    latent_names = []
    for name in names:
        latent_name = next((x for x in (name, name + DECENTERED) if x in latent), None)
        if latent_name is None:
            raise ValueError(
                f"local names {name!r}, which is {_kind(facts.get(name, {}))}; the latent sites "
                f"are {', '.join(latent)}."
            )
        if not facts[latent_name]["discrete"]:  # `find_structure` raises for discrete sites
            latent_names.append(latent_name)
    return tuple(dict.fromkeys(latent_names))


def _kind(site: dict[str, Any]) -> str:
    if site.get("observed"):
        return "an observed site"
    return "a deterministic site" if site.get("type") == "deterministic" else "no site"


def reparametrized(
    model: Callable[..., Any],
    facts: Facts,
    local: tuple[str, ...],
    centered: float | Mapping[str, float],
) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """Return the model with its local location-scale sites reparametrized, and its local sites."""
    if isinstance(centered, str):
        raise ValueError(
            "centered must be a number, or numbers by site. The best numbers depend on the data: "
            "centered=fedmcmc.interop.numpyro.centering(posterior, data, position) computes them "
            "from the posterior with centered=0.0."
        )
    by_site = dict(centered) if isinstance(centered, Mapping) else dict.fromkeys(local, centered)
    unknown = [name for name in by_site if name not in local]
    if unknown:
        raise ValueError(
            f"centered names {unknown[0]!r}; the local sites are {', '.join(local) or 'none'}."
        )
    for name, value in by_site.items():
        if isinstance(value, str) or not 0 <= value <= 1:
            raise ValueError(f"centered must lie in [0, 1], got {value!r} for site {name!r}.")
    config = {
        name: LocScaleReparam(centered=float(value))
        for name, value in by_site.items()
        if value != 1 and facts[name].get("location_scale") and not name.endswith(DECENTERED)
    }
    if not config:
        return model, local
    names = tuple(name + DECENTERED if name in config else name for name in local)
    return handlers.reparam(model, config=config), names


def prior_spread(
    model: Callable[..., Any], structure: Structure, rows: ArrayTree, local: Iterable[str]
) -> Callable[[Array], dict[str, Array]]:
    """Return ``rng_key -> dict``, prior draws of the shared sites behind the spread of `local`.

    A shared site is behind the spread if a parameter of a local site's distribution other than the
    location depends on it. `model` and `structure` belong to the model before reparametrization.
    """
    names = tuple(local)

    @cache
    def spread_sites() -> tuple[str, ...]:
        def parameters(position: ArrayTree) -> list[Any]:
            trace = tracing.trace_at(model, rows, position)
            fns = [tracing.bare(trace[name]["fn"]) for name in names]
            return [getattr(fn, x) for fn in fns for x in sorted(fn.arg_constraints) if x != "loc"]

        shapes = tracing.position_shapes(structure.latent_shapes)
        flags = output_flags(parameters, (shapes,), ({name: frozenset({name}) for name in shapes},))
        reached = NO_FLAGS.union(*jax.tree.leaves(flags))
        return tuple(name for name in structure.shared_shapes if name in reached)

    def fill_improper(site: dict[str, Any]) -> Any:
        return init_to_uniform(site) if site["name"] in structure.improper else None

    def draw(rng_key: Array) -> dict[str, Array]:
        proper_model = handlers.substitute(
            handlers.seed(model, rng_key), substitute_fn=fill_improper
        )
        with handlers.trace() as trace:
            tracing.call_model(proper_model, rows)
        return {name: trace[name]["value"] for name in spread_sites()}

    return draw
