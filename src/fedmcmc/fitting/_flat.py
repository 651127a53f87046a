"""Directions along which an improper prior leaves the posterior flat, so that there is none."""

from typing import NamedTuple

import numpy as np

from fedmcmc._types import ArrayTree, Posterior
from fedmcmc.fitting._modes import Search, as_positions, log_priors
from fedmcmc.kernels import BELOW, Points, evaluations
from fedmcmc.pytrees import named_leaves, trees
from fedmcmc.surrogates import Ledger

MOST_COORDINATES = 32
"""Coordinates with improper priors that are tried."""
FAR, MOST_DOUBLINGS = 64.0, 60
"""Conditional sds, or units if these are larger, up to which distances are tried, each twice the
one before."""
WINDOW, LEAST_FALL = 3, 0.1
"""Doublings in a row, the last with finite densities, over each of which a flat log density falls
by less than so many nats."""


class Direction(NamedTuple):
    """A name, a first step in raveled coordinates, and how many times its length is far away."""

    name: str
    step: np.ndarray
    far: float


def refuse_flat_directions(posterior: Posterior, ledger: Ledger, search: Search) -> None:
    """Raise `ValueError` if the log posterior does not fall along a direction far out.

    Only directions of improper priors are tried: each coordinate, both ways, and the directions
    without curvature at the best place of the search. The first step is a conditional sd there, at
    most one.
    """
    mode = search.modes[0]
    name = _flat_direction(
        posterior, ledger, search.centre, mode.flat, _directions(posterior, search)
    )
    if name:
        names = ", ".join(posterior.improper)
        raise ValueError(
            f"The posterior is improper: its density does not fall along {name}, and the prior of "
            f"{names} is improper. Give it a proper prior, or remove what the data cannot tell "
            f"apart, such as one of two collinear columns."
        )


def flat_coordinate(
    posterior: Posterior, ledger: Ledger, centre: ArrayTree, draws: np.ndarray
) -> str:
    """Return the name of a coordinate along which the log posterior does not fall, else "".

    From the middle of draws ``[num, d]``, both ways, far beyond them.
    """
    size = draws.shape[1]
    units, far = _units(draws.var(0))
    places = range(min(size, MOST_COORDINATES))
    directions = _axes(list(places), trees.element_names(centre), units, far)
    return _flat_direction(posterior, ledger, centre, np.median(draws, axis=0), directions)


def _flat_direction(
    posterior: Posterior,
    ledger: Ledger,
    centre: ArrayTree,
    start: np.ndarray,
    directions: list[Direction],
) -> str:
    """Return the name of the first flat direction from `start`, ``[d]``, else ""."""
    if not directions:
        return ""
    far = max(direction.far for direction in directions)
    num = min(max(int(np.ceil(np.log2(far))), WINDOW + 2), MOST_DOUBLINGS)
    distances = 2.0 ** np.arange(1, num + 1)
    steps = np.stack([direction.step for direction in directions])
    flat = start + distances[None, :, None] * steps[:, None]
    points = as_positions(flat.reshape(-1, len(start)), centre)
    value = np.asarray(ledger.ask(evaluations(posterior), Points(points)).value, np.float64)
    value[value < BELOW] = -np.inf
    prior = np.asarray(log_priors(posterior, points), np.float64)
    log_density = (value + prior).reshape(len(directions), num)
    flat_ones = [i for i, values in enumerate(log_density) if _ends_flat(values)]
    return directions[flat_ones[0]].name if flat_ones else ""


def _ends_flat(values: np.ndarray) -> bool:
    """Return whether log densities ``[num]`` hardly fall over the last finite doublings."""
    is_finite = np.isfinite(values)
    num = len(values) if is_finite.all() else int(np.argmin(is_finite))
    falls = -np.diff(values[:num])[-WINDOW:]
    return len(falls) == WINDOW and bool((falls < LEAST_FALL).all())


def _directions(posterior: Posterior, search: Search) -> list[Direction]:
    if not posterior.improper:
        return []
    mode = search.modes[0]
    variances = np.diag(mode.covariance) if mode.covariance.ndim == 2 else mode.covariance
    if mode.covariance.ndim == 2:  # conditional ones
        variances = np.minimum(variances, 1 / np.diag(np.linalg.pinv(mode.covariance)))
    units, far = _units(variances)
    names = trees.element_names(search.centre)
    places = _improper_coordinates(posterior, search.centre)[:MOST_COORDINATES]
    found = _axes(places, names, units, far)
    for vector in mode.flat_along.T:
        largest = np.argmax(np.abs(vector))
        vector = vector / vector[largest]
        terms = [
            f"{'+' if coefficient > 0 else '-'} "
            + (f"{abs(coefficient):.2g} " if abs(abs(coefficient) - 1) > 0.01 else "")
            + names[i]
            for i, coefficient in enumerate(vector)
            if abs(coefficient) > 0.01
        ]
        name = " ".join(terms).removeprefix("+ ")
        step = units[largest] * vector
        found += [Direction(name, step, FAR**2), Direction(name, -step, FAR**2)]
    return found


def _units(variances: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return first steps along coordinates, and how many times these are far away."""
    sds = np.sqrt(np.maximum(variances, 1e-30))
    units = np.minimum(sds, 1.0)
    return units, FAR * np.maximum(sds, 1.0) / units


def _axes(
    places: list[int], names: list[str], units: np.ndarray, far: np.ndarray
) -> list[Direction]:
    """Return the directions of coordinates, both ways."""
    found = []
    for place in places:
        step = units[place] * (np.arange(len(units)) == place)
        found.append(Direction(f"{names[place]} towards plus infinity", step, far[place]))
        found.append(Direction(f"{names[place]} towards minus infinity", -step, far[place]))
    return found


def _improper_coordinates(posterior: Posterior, centre: ArrayTree) -> list[int]:
    places: list[int] = []
    first = 0
    for name, leaf in named_leaves(centre).items():
        if name in posterior.improper:
            places += range(first, first + leaf.size)
        first += leaf.size
    return places
