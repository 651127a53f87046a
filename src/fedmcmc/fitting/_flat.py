"""Detection of directions along which an improper prior leaves the posterior improper."""

from typing import NamedTuple

import numpy as np

from fedmcmc.fitting._modes import ModeSearch, log_priors
from fedmcmc.kernels import LOG_ZERO_THRESHOLD, Points, evaluations
from fedmcmc.pytrees import named_leaves, trees
from fedmcmc.surrogates import Ledger
from fedmcmc.types import ArrayTree, Posterior

MAX_COORDINATES = 32
"""Largest number of coordinates with improper priors that are tried."""
MAX_DISTANCE, MAX_DOUBLINGS = 64.0, 60
"""Largest distance, in multiples of the conditional sd or of 1 if that is larger; largest number of
doublings of the distance."""
WINDOW, MIN_DECREASE = 3, 0.1
"""Number of doublings before a density overflows or the distances end; smallest decrease over each
of these doublings, in nats, along a direction that is not flat."""


class Direction(NamedTuple):
    """Initial step in raveled coordinates, with the largest distance in multiples of it."""

    name: str
    step: np.ndarray
    far: float


def refuse_flat_directions(posterior: Posterior, ledger: Ledger, search: ModeSearch) -> None:
    """Raise `ValueError` if the log posterior does not decrease far out along a direction.

    The function tries both signs of each coordinate with an improper prior, and the directions
    without curvature at the highest mode. The initial step is a conditional sd at that mode, but at
    most 1.
    """
    name = _find_flat_direction(
        posterior, ledger, search.centre, search.modes[0].flat, _list_directions(posterior, search)
    )
    if name:
        names = ", ".join(posterior.improper)
        raise ValueError(
            f"The posterior is improper: its density does not fall along {name}, and the prior of "
            f"{names} is improper. Use a proper prior, or remove parameters that the data cannot "
            f"distinguish, such as the coefficient of one of two collinear columns."
        )


def find_flat_coordinate(
    posterior: Posterior, ledger: Ledger, centre: ArrayTree, draws: np.ndarray
) -> str:
    """Return the name of a coordinate along which the log posterior does not fall, else "".

    Distances start at the median of the draws ``[num, d]`` and extend far beyond the draws.
    """
    units, far = _choose_units(draws.var(0))
    indices = list(range(min(draws.shape[1], MAX_COORDINATES)))
    directions = _list_axis_directions(indices, trees.element_names(centre), units, far)
    return _find_flat_direction(posterior, ledger, centre, np.median(draws, axis=0), directions)


def _find_flat_direction(
    posterior: Posterior,
    ledger: Ledger,
    centre: ArrayTree,
    start: np.ndarray,
    directions: list[Direction],
) -> str:
    """Return the name of a flat direction from `start`, ``[d]``, else ""."""
    if not directions:
        return ""
    far = max(direction.far for direction in directions)
    num = min(max(int(np.ceil(np.log2(far))), WINDOW + 2), MAX_DOUBLINGS)
    distances = 2.0 ** np.arange(1, num + 1)
    steps = np.stack([direction.step for direction in directions])
    flat = start + distances[None, :, None] * steps[:, None]
    points = trees.restore(flat.reshape(-1, len(start)), centre)
    value = np.asarray(ledger.ask(evaluations(posterior), Points(points)).value, np.float64)
    value[value < LOG_ZERO_THRESHOLD] = -np.inf
    prior = np.asarray(log_priors(posterior, points), np.float64)
    log_density = (value + prior).reshape(len(directions), num)
    names = (x.name for x, values in zip(directions, log_density, strict=True) if _is_flat(values))
    return next(names, "")


def _is_flat(values: np.ndarray) -> bool:
    """Return true if log densities ``[num]`` hardly decrease over the last finite doublings."""
    is_finite = np.isfinite(values)
    num = len(values) if is_finite.all() else int(np.argmin(is_finite))
    decreases = -np.diff(values[:num])[-WINDOW:]
    return len(decreases) == WINDOW and bool((decreases < MIN_DECREASE).all())


def _list_directions(posterior: Posterior, search: ModeSearch) -> list[Direction]:
    if not posterior.improper:
        return []
    mode = search.modes[0]
    variances = mode.covariance
    if variances.ndim == 2:
        conditional = 1 / np.diag(np.linalg.pinv(variances))
        variances = np.minimum(np.diag(variances), conditional)
    units, far = _choose_units(variances)
    names = trees.element_names(search.centre)
    indices = _list_improper_coordinates(posterior, search.centre)[:MAX_COORDINATES]
    directions = _list_axis_directions(indices, names, units, far)
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
        far_along = MAX_DISTANCE**2
        directions += [Direction(name, step, far_along), Direction(name, -step, far_along)]
    return directions


def _choose_units(variances: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return initial steps along coordinates, and largest distances in multiples of these steps."""
    sds = np.sqrt(np.maximum(variances, 1e-30))
    units = np.minimum(sds, 1.0)
    return units, MAX_DISTANCE * np.maximum(sds, 1.0) / units


def _list_axis_directions(
    indices: list[int], names: list[str], units: np.ndarray, far: np.ndarray
) -> list[Direction]:
    """Return the positive and the negative direction of each coordinate."""
    directions = []
    for i in indices:
        step = units[i] * (np.arange(len(units)) == i)
        directions.append(Direction(f"{names[i]} towards plus infinity", step, far[i]))
        directions.append(Direction(f"{names[i]} towards minus infinity", -step, far[i]))
    return directions


def _list_improper_coordinates(posterior: Posterior, centre: ArrayTree) -> list[int]:
    indices: list[int] = []
    start = 0
    for name, leaf in named_leaves(centre).items():
        if name in posterior.improper:
            indices += range(start, start + leaf.size)
        start += leaf.size
    return indices
