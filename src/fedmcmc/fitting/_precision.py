"""Rounding errors of the summed log likelihood, measured near the posterior's center."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedmcmc.kernels import Expanded, Points, evaluations, expansions
from fedmcmc.pytrees import trees
from fedmcmc.runs import Consortium
from fedmcmc.surrogates import NEWTON_DIMENSIONS, Ledger, Structure
from fedmcmc.types import ArrayTree, Posterior, as_functions

MAX_NOISE = 0.3
"""Largest root mean square of rounding errors, in nats, that does not distort the draws."""
MAX_SPACING = 1.0
"""Largest distance of neighboring floats, in posterior standard deviations."""
NUM_POINTS = 8
"""Number of points, equal to the starts of `find_modes` to share a compiled program."""
LENGTHS = np.array([0.05, 0.07, 0.1, 0.3, 0.6, 1.0, 1.5])
"""Distances of points from the center, in posterior standard deviations."""
SHORT_STEP = 1e-5
"""Largest short step, relative to the parameter or to 1; it rarely crosses a kink or a jump."""
SEED = 0


class PrecisionCheck(NamedTuple):
    """Rounding errors of log likelihoods near a position.

    `noise_nats` is the root mean square of the rounding errors of the log likelihood, summed over
    all clients and relative to its value at the center; NaN if it could not be measured. If `ok` is
    false, draws and weights cannot be trusted, and `message` contains the reason and a remedy.
    """

    noise_nats: float
    ok: bool
    message: str
    rounds: int
    bits_up: float
    bits_down: float


def check_precision(
    posterior: Posterior,
    consortium: Consortium,
    centre: ArrayTree,
    covariance: np.ndarray,
    *,
    max_noise: float = MAX_NOISE,
) -> PrecisionCheck:
    """Measure how much rounding changes the summed log likelihood near a position.

    The derivatives at two points predict the difference of their log likelihoods (Hermite's rule).
    The scatter around this prediction is rounding error. The check takes one exchange, in the
    shapes of `find_modes` so that nothing compiles again. If the scatter is larger than `max_noise`
    nats, up to two more exchanges distinguish rounding from kinks or jumps of the likelihood.
    `centre` has a high posterior density, and `covariance` is the posterior covariance of the
    raveled position, ``[d, d]``, or its diagonal.
    """
    posterior, ledger = as_functions(posterior), Ledger(consortium)
    centre = jax.tree.map(np.asarray, centre)
    covariance = np.asarray(covariance, np.float64)
    noise = _measure_scatter(posterior, ledger, centre, _draw_steps(covariance, LENGTHS))
    if noise > max_noise:
        nearby = _measure_scatter(posterior, ledger, centre, _draw_short_steps(centre, covariance))
        # A large constant that absorbs all digits leaves no scatter between such close points.
        noise = np.nanmax([nearby, min(noise, _estimate_term_noise(posterior, ledger, centre))])
    message = _explain_spacing(centre, covariance) or _explain_noise(noise, centre, max_noise)
    return PrecisionCheck(noise, not message, message, ledger.rounds, ledger.up, ledger.down)


def _measure_scatter(
    posterior: Posterior, ledger: Ledger, centre: ArrayTree, steps: np.ndarray
) -> float:
    """Return the sd of log likelihoods around Hermite's rule, at `steps` ``[num, d]``."""
    flat = trees.ravel(centre)
    structure: Structure = "dense" if flat.shape[0] <= NEWTON_DIMENSIONS else "none"
    steps = np.concatenate([np.zeros((1, flat.shape[0])), steps])
    points = (np.asarray(flat, np.float64) + steps).astype(flat.dtype)
    question = expansions(posterior, curvature=structure)
    answer: Expanded = ledger.ask(question, Points(trees.restore(points, centre), centre))
    moved = np.asarray(points, np.float64) - np.asarray(flat, np.float64)
    with np.errstate(invalid="ignore"):
        value, gradient = (np.asarray(x, np.float64) for x in (answer.value, answer.gradient))
        error = value - np.sum((gradient + gradient[0]) / 2 * moved, axis=1)
        if structure == "dense":
            upper = np.asarray(answer.curvature, np.float64)
            rows, columns = np.triu_indices(flat.shape[0])
            products = moved[:, rows] * moved[:, columns] * np.where(rows == columns, 1, 2)
            error -= np.sum((upper - upper[0]) * products, axis=1) / 12
    error = error[np.isfinite(error)]
    return float(error.std(ddof=1)) if len(error) > 2 else np.nan


def _draw_steps(covariance: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return steps of these Mahalanobis lengths in random directions, ``[num, d]``."""
    size = covariance.shape[0]
    directions = np.random.default_rng(SEED).normal(size=(len(lengths), size))
    directions *= (lengths / np.linalg.norm(directions, axis=1))[:, None]
    if covariance.ndim == 1:
        return np.asarray(directions * np.sqrt(covariance))
    values, vectors = np.linalg.eigh(covariance)
    return np.asarray(directions @ (np.sqrt(np.maximum(values, 0))[:, None] * vectors.T))


def _draw_short_steps(centre: ArrayTree, covariance: np.ndarray) -> np.ndarray:
    flat = np.asarray(trees.ravel(centre), np.float64)
    sds = np.sqrt(covariance if covariance.ndim == 1 else np.diagonal(covariance))
    limit = np.minimum(SHORT_STEP * np.maximum(np.abs(flat), 1), LENGTHS[0] * sds)
    return np.random.default_rng(SEED).uniform(-limit, limit, (NUM_POINTS - 1, len(flat)))


def _estimate_term_noise(posterior: Posterior, ledger: Ledger, centre: ArrayTree) -> float:
    """Return the rounding error of the sum if all rows had equal terms."""
    position = jax.tree.map(lambda leaf: leaf[None], centre)
    total = float(ledger.ask(evaluations(posterior), Points(position)).value[0])
    epsilon = float(jnp.finfo(trees.ravel(centre).dtype).eps)
    return epsilon / 2 * abs(total) / np.sqrt(ledger.consortium.federation.num_rows)


def _explain_noise(noise: float, centre: ArrayTree, max_noise: float) -> str:
    if not noise > max_noise:
        return ""
    return (
        f"rounding in {trees.ravel(centre).dtype} changes the log likelihood by about {noise:.2g} "
        f"nats from draw to draw, more than the harmless {max_noise:g}, because the terms of the "
        f"rows are too large. {_remedy(centre)}"
    )


def _explain_spacing(centre: ArrayTree, covariance: np.ndarray) -> str:
    """Return a message if neighboring floats of a parameter differ by more than a posterior sd."""
    flat = np.asarray(trees.ravel(centre))
    sds = np.sqrt(covariance if covariance.ndim == 1 else np.diagonal(covariance))
    ratios = np.spacing(np.abs(flat)).astype(np.float64) / np.maximum(sds, np.finfo(float).tiny)
    worst = int(np.argmax(ratios))
    if not ratios[worst] > MAX_SPACING:
        return ""
    return (
        f"{trees.element_names(centre)[worst]} is near {flat[worst]:.6g} with a posterior standard "
        f"deviation of {sds[worst]:.2g}, and neighboring numbers of {flat.dtype} are "
        f"{np.spacing(np.abs(flat[worst])):.2g} apart. {_remedy(centre)}"
    )


def _remedy(centre: ArrayTree) -> str:
    rescale = "subtract a constant from large numbers, or choose a larger unit"
    if trees.ravel(centre).dtype == jnp.float64:
        return f"{rescale[0].upper()}{rescale[1:]}."
    return (
        f"Call jax.config.update('jax_enable_x64', True) before the data are made (also at real "
        f"sites), or {rescale}."
    )
