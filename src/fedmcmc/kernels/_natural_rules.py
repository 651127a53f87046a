"""Cavities, changes of natural parameters, and how sites and the global product take them up."""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc._types import ArrayTree, Client, Participation
from fedmcmc.gaussian import Gaussian, is_proper, with_mean
from fedmcmc.participation import full
from fedmcmc.pytrees import schedules, trees

__all__ = [
    "CAVITIES",
    "Approximation",
    "Server",
    "Site",
    "ascend",
    "cavity_of",
    "change_of",
    "first_site",
    "own_participation",
    "to_broadcast",
]

CAVITIES = ("site", "average", "power", "global", "none")


class Site(NamedTuple):
    """What a client keeps: its site, and its optimizer's state."""

    site: Gaussian
    optimizer: ArrayTree


class Approximation(NamedTuple):
    """The last proper global Gaussian, and whether there has been one, ``[]`` bool."""

    gaussian: Gaussian
    known: Array


class Server(NamedTuple):
    """What the server keeps besides the broadcast."""

    approximation: Approximation
    prior: Gaussian
    optimizer: ArrayTree
    num_clients: Array  # [] int32


def own_participation(participation: Participation | None, cavity: str) -> Participation:
    """Return the rule, with weights only where a cohort stands for everyone.

    That is so with average sites. A site changes by just what its client sends, and a filter takes
    in just the rows that it sees.

    Raises
    ------
    ValueError
        If a client that keeps a site may be drawn twice in a round.
    """
    participation = full() if participation is None else participation
    if cavity in ("average", "power"):
        return participation
    if participation.repeats and cavity != "global":
        raise ValueError(
            "A client that keeps a site takes part at most once per round: use "
            "uniform(cohort_size) or bernoulli(...), or a stateless cavity."
        )
    return replace(participation, weighted=False)


def first_site(position: ArrayTree, num_rows: Array, per_row: Array, structure: str) -> Gaussian:
    """Return a site about `position` whose precision is `per_row` per row."""
    like = Gaussian.uniform(position, structure).precision
    number = num_rows.astype(jnp.result_type(float)) * per_row
    if structure == "dense":
        precision = trees.cast(number, like) * jnp.eye(like.shape[0], dtype=like.dtype)
    else:
        precision = jax.tree.map(lambda leaf: leaf + trees.cast(number, leaf), like)
    return with_mean(position, precision, structure)


def to_broadcast(
    cavity: str, whole: Gaussian, prior: Gaussian, num_clients: Array
) -> tuple[Gaussian, ...]:
    """Return what clients are told besides the position: the global Gaussian, and of what a share.

    The share of all sites together that a client leaves out is its own, with ``"power"``, else the
    same for all.
    """
    if cavity not in ("average", "power"):
        return (whole,)
    sites = whole / prior
    if cavity == "power":
        return whole, sites
    return whole, sites ** (1 / num_clients.astype(jnp.result_type(float)))


def cavity_of(
    cavity: str, whole: Gaussian, rest: list[Gaussian], client_state: ArrayTree, client: Client
) -> Gaussian:
    """Return what the client's likelihood is multiplied by."""
    if cavity == "site":
        return whole / client_state.site
    if cavity == "average":
        (average,) = rest
        return whole / average
    if cavity == "power":
        (sites,) = rest
        return whole / sites**client.share
    if cavity == "global":
        return whole
    return trees.zeros_like(whole)


def change_of(
    tilted: Gaussian, before: Gaussian, max_norm: Any, round_: Array
) -> tuple[Gaussian, Array]:
    """Return the change from `before` that a fit asks for, zero where the fit is not proper."""
    proper = is_proper(tilted)
    change = trees.select(proper, tilted / before, trees.zeros_like(tilted))
    if not trees.is_empty(max_norm):
        norm = jnp.sqrt(trees.squared_norm(change))
        limit = trees.cast(schedules.value(max_norm, round_), norm)
        change = change ** jnp.minimum(1, limit / jnp.where(norm > 0, norm, 1))
    return change, proper


def ascend(
    optimizer: Any, damping: Array, change: Gaussian, q: Gaussian, state: ArrayTree
) -> tuple[Gaussian, ArrayTree]:
    """Return `q` moved along a change of its natural parameters, and the optimizer's state."""
    if optimizer == ():
        return q * change**damping, state
    # Optimizers descend.
    updates, state = trees.descend(optimizer, change ** (-1), state, q)
    return q * updates**damping, state
