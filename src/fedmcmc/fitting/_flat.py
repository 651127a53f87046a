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
    directions = _directions(posterior, search)
    if not directions:
        return
    far = max(direction.far for direction in directions)
    num = min(max(int(np.ceil(np.log2(far))), WINDOW + 2), MOST_DOUBLINGS)
    distances = 2.0 ** np.arange(1, num + 1)
    start = search.modes[0].flat
    steps = np.stack([direction.step for direction in directions])
    flat = start + distances[None, :, None] * steps[:, None]
    places = flat.reshape(-1, len(start))
    points = as_positions(places, search.centre)
    value = np.asarray(ledger.ask(evaluations(posterior), Points(points)).value, np.float64)
    value[value < BELOW] = -np.inf
    prior = np.asarray(log_priors(posterior, points), np.float64)
    log_density = (value + prior).reshape(len(directions), num)
    flat_ones = [i for i, values in enumerate(log_density) if _ends_flat(values)]
    if len(flat_ones):
        names = ", ".join(posterior.improper)
        raise ValueError(
            f"The posterior is improper: its density does not fall along "
            f"{directions[flat_ones[0]].name}, and the prior of {names} is improper. Give it a "
            f"proper prior, or remove what the data cannot tell apart, such as one of two "
            f"collinear columns."
        )


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
    size = len(mode.flat)
    variances = np.diag(mode.covariance) if mode.covariance.ndim == 2 else mode.covariance
    if mode.covariance.ndim == 2:  # conditional ones
        variances = np.minimum(variances, 1 / np.diag(np.linalg.pinv(mode.covariance)))
    sds = np.sqrt(np.maximum(variances, 1e-30))
    units = np.minimum(sds, 1.0)
    far = FAR * np.maximum(sds, 1.0) / units
    names = trees.element_names(search.centre)
    found = []
    for place in _improper_coordinates(posterior, search.centre)[:MOST_COORDINATES]:
        step = units[place] * (np.arange(size) == place)
        found.append(Direction(f"{names[place]} towards plus infinity", step, far[place]))
        found.append(Direction(f"{names[place]} towards minus infinity", -step, far[place]))
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


def _improper_coordinates(posterior: Posterior, centre: ArrayTree) -> list[int]:
    places: list[int] = []
    first = 0
    for name, leaf in named_leaves(centre).items():
        if name in posterior.improper:
            places += range(first, first + leaf.size)
        first += leaf.size
    return places
