"""Which latent sites of a NumPyro model are those of a group, and how they are parametrized."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import jax
import numpy as np
from jax import Array
from numpyro import handlers
from numpyro.infer import init_to_uniform
from numpyro.infer.reparam import LocScaleReparam

from fedmcmc._types import ArrayTree
from fedmcmc.interop import _numpyro_trace as tracing
from fedmcmc.interop._dependence import Tracer
from fedmcmc.interop._numpyro_inputs import position_shapes
from fedmcmc.interop._numpyro_structure import Facts, Structure, facts_of

LOCAL_PLATES = ("client", "clients", "group")
"""Plates of size one whose latent sites are those of a group."""
DECENTERED = "_decentered"
"""What NumPyro appends to the name of a site for the latent behind it."""


LEVELS = ("client", "group")
"""Of a model of two levels, outer to inner."""


def marked_sites(trace: Facts, has_groups: bool | None) -> dict[str, list[str]]:
    """Return the latent sites that the model marks as local, by level.

    ``infer={"local": True}`` and ``"group"`` mark a site of a group of rows, and so does a plate of
    size one that is named `client`, `clients` or `group`. ``infer={"local": "client"}`` marks a
    site of a client whose groups have sites of their own, and so does the plate of a client beside
    one of a group, if the data have groups.

    Raises
    ------
    ValueError
        If a mark is anything else.
    """
    levels: dict[str, list[str]] = {level: [] for level in LEVELS}
    latent = {name: site for name, site in trace.items() if site["latent"]}
    of_clients = [
        name
        for name, site in latent.items()
        if site["plates"].get("group") != 1 and not site["local"]
    ]
    has_levels = has_groups and any(site["plates"].get("group") == 1 for site in latent.values())
    for name, site in latent.items():
        mark = site["local"]
        if not (mark is None or isinstance(mark, bool | np.bool_) or mark in LEVELS):
            raise ValueError(
                f"Site {name!r} has infer={{'local': {mark!r}}}; expected True, for an effect that "
                f"each group of rows has its own of (a group is a client, or what groups= of the "
                f"data says), or, for two levels, 'client' and 'group'."
            )
        in_plate = any(site["plates"].get(plate) == 1 for plate in LOCAL_PLATES)
        if mark or in_plate:
            is_client = mark == "client" or (has_levels and name in of_clients)
            levels["client" if is_client else "group"].append(name)
    return levels


def local_sites(
    model: Callable[..., Any], rows: ArrayTree, names: Sequence[str]
) -> tuple[str, ...]:
    """Return the named latent sites, each by the name of the latent behind it.

    Raises
    ------
    ValueError
        If a name is that of no latent site.
    """
    trace = facts_of(model, rows)
    latent = [name for name, site in trace.items() if site["latent"]]
    if isinstance(names, str):
        raise ValueError(f"local must be a list of names of sites, got {names!r}.")
    found = []
    for name in names:
        behind = next((x for x in (name, name + DECENTERED) if x in latent), None)
        if behind is None:
            raise ValueError(
                f"local names {name!r}, which is {_kind(trace.get(name, {}))}; the latent sites "
                f"are {', '.join(latent)}."
            )
        if trace[behind]["discrete"]:
            continue  # refused with its own message
        found.append(behind)
    return tuple(dict.fromkeys(found))


def _kind(site: dict[str, Any]) -> str:
    """Return what a site is that is no latent one."""
    if site.get("observed"):
        return "an observed site"
    return "a deterministic site" if site.get("type") == "deterministic" else "no site"


def local_sites_of_levels(
    model: Callable[..., Any],
    rows: ArrayTree,
    names: Sequence[str] | Mapping[str, Sequence[str]] | None,
    has_groups: bool | None = None,
) -> tuple[tuple[str, ...], int]:
    """Return the local sites, and how many of them, the first ones, are a client's own.

    `has_groups` says whether the data have groups of rows within clients, ``None`` if unknown.

    Raises
    ------
    ValueError
        As `local_sites`, and where levels are not two, with sites of their own.
    """
    if names is None:
        levels = marked_sites(facts_of(model, rows), has_groups)
        if levels["client"] and not levels["group"]:
            if has_groups is False:  # a client is the only group of its rows
                return tuple(levels["client"]), 0
            raise ValueError(
                f"Site {levels['client'][0]!r} has infer={{'local': 'client'}}, which needs a site "
                f"of the groups within a client, infer={{'local': 'group'}}. If clients are the "
                f"only groups of rows, write infer={{'local': True}}."
            )
        names = levels if levels["client"] else levels["group"]
    if not isinstance(names, Mapping):
        return local_sites(model, rows, names), 0
    if set(names) != set(LEVELS) or not all(names.values()):
        raise ValueError(
            f"local of two levels has sites for {LEVELS[0]!r} and for {LEVELS[1]!r}; for one level "
            f"give a list. Got {dict(names)!r}."
        )
    own, of_groups = (local_sites(model, rows, names[level]) for level in LEVELS)
    if both := [name for name in own if name in of_groups]:
        raise ValueError(f"local names {both[0]!r} for clients and for groups; it can be one's.")
    return (*own, *of_groups), len(own)


def reparametrized(
    model: Callable[..., Any],
    rows: ArrayTree,
    local: tuple[str, ...],
    centered: float | Mapping[str, float],
) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """Return the model with its local sites of a location and a scale reparametrized, and theirs.

    Raises
    ------
    ValueError
        If `centered` is not in ``[0, 1]``, or names a site that is not local.
    """
    if isinstance(centered, str):
        raise ValueError(
            "centered must be a number, or numbers by site; which are best depends on the data: "
            "centered=fedmcmc.interop.numpyro.centering(posterior, data, position), of the "
            "posterior with centered=0.0."
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
    trace = facts_of(model, rows)
    config = {
        name: LocScaleReparam(centered=float(value))
        for name, value in by_site.items()
        if value != 1 and trace[name].get("location_scale") and not name.endswith(DECENTERED)
    }
    if not config:
        return model, local
    names = tuple(name + DECENTERED if name in config else name for name in local)
    return handlers.reparam(model, config=config), names


def prior_spread(
    model: Callable[..., Any], structure: Structure, rows: ArrayTree, local: Iterable[str]
) -> Callable[[Array], dict[str, Array]]:
    """Return ``rng_key -> dict``, draws of shared sites on which the spread of sites depends.

    These are what the parameters of the distributions of `local` sites depend on, the location left
    out. `model` and `structure` are of sites as they are written.
    """
    whose = tuple(local)

    @cache
    def names() -> tuple[str, ...]:
        def parameters(position: ArrayTree) -> list[Any]:
            trace, found = tracing.trace_at(model, rows, position), []
            for name in whose:
                fn = tracing.bare(trace[name]["fn"])
                found += [getattr(fn, x) for x in sorted(fn.arg_constraints) if x != "loc"]
            return found

        shapes = position_shapes(structure.every)
        closed = jax.make_jaxpr(parameters)(shapes)
        labels: list[Any] = [(name, frozenset({name})) for name in sorted(shapes)]
        flags = [node.flags for node in Tracer().outputs(closed, labels)]
        reached: frozenset = frozenset().union(*flags)
        return tuple(name for name in structure.shapes if name in reached)

    def some_value(site: dict[str, Any]) -> Any:
        return init_to_uniform(site) if site["name"] in structure.improper else None

    def draw(rng_key: Array) -> dict[str, Array]:
        drawn = handlers.substitute(handlers.seed(model, rng_key), substitute_fn=some_value)
        with handlers.trace() as trace:
            tracing.call_model(drawn, rows)
        return {name: trace[name]["value"] for name in names()}

    return draw
