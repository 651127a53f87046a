"""Prediction of the tail index of importance weights from the posterior's curvature.

For a Gaussian proposal with covariance ``C`` and a Gaussian target with precision ``H`` the tail
index of the weights is ``max(0, 1 - lam)``, where ``lam`` is the smallest eigenvalue of ``C H``. A
proposal that is too narrow in one direction has few draws in regions where the target has mass.
"""

from dataclasses import dataclass

import jax
import numpy as np
from jax import Array

from fedmcmc.fitting._modes import ModeSearch
from fedmcmc.runs import Consortium
from fedmcmc.surrogates import Ledger, Objective
from fedmcmc.types import Posterior, as_functions

MAX_KHAT = 0.9
"""Predicted tail index above which no draws are weighted."""
MAX_PRODUCTS = 20
DIFFERENCE_SDS = 0.1
"""Distance of the two gradients of a Hessian-vector product, in conditional sds."""


@dataclass(frozen=True)
class PredictedTail:
    """Lower bound of the tail index, with the number of Hessian-vector products and the cost."""

    k_hat: float
    products: int
    rounds: int
    bits_up: float
    bits_down: float


def tail_index(covariance: np.ndarray, precision: np.ndarray) -> float:
    """Return the tail index of weights for a covariance and a precision, both ``[d, d]``."""
    root = np.linalg.cholesky(covariance)
    return float(max(0.0, 1 - np.linalg.eigvalsh(root.T @ precision @ root)[0]))


def predict_tail(
    rng_key: Array, posterior: Posterior, consortium: Consortium, search: ModeSearch
) -> PredictedTail:
    """Return a lower bound of the tail index of weights of a diagonal Gaussian at the mode.

    Lanczos's method is applied to the posterior's Hessian, scaled to a unit diagonal. The smallest
    Ritz value decreases towards the smallest eigenvalue, so the returned index is a lower bound.
    The iteration stops as soon as the bound exceeds 0.9. Each Hessian-vector product is a
    difference of two gradients and takes one exchange.
    """
    mode = search.modes[0]
    scales = np.sqrt(mode.covariance)
    ledger = Ledger(consortium)
    objective = Objective(as_functions(posterior), ledger, search.centre, "none")

    def product(vector: np.ndarray) -> np.ndarray:
        step = DIFFERENCE_SDS / 2 * scales * vector
        ahead, behind = objective(np.stack([mode.flat + step, mode.flat - step]))
        return scales * (ahead.gradient - behind.gradient) / DIFFERENCE_SDS

    size = len(scales)
    start = np.asarray(jax.random.normal(rng_key, (size,)), np.float64)
    basis = [start / np.linalg.norm(start)]
    tridiagonal = np.zeros((0, 0))
    smallest = np.inf
    while len(tridiagonal) < min(MAX_PRODUCTS, size) and 1 - smallest <= MAX_KHAT:
        image = product(basis[-1])
        vectors = np.stack(basis)
        # Full reorthogonalization is cheap for at most 20 vectors.
        overlaps = vectors @ image
        tridiagonal = np.pad(tridiagonal, (0, 1))
        tridiagonal[-1, :] = tridiagonal[:, -1] = overlaps
        smallest = float(np.linalg.eigvalsh(tridiagonal)[0])
        residual = image - overlaps @ vectors
        residual -= (vectors @ residual) @ vectors
        norm = float(np.linalg.norm(residual))
        if norm < 1e-6 * np.linalg.norm(image):
            break
        basis.append(residual / norm)
    k_hat = max(0.0, 1 - smallest)
    return PredictedTail(k_hat, len(tridiagonal), ledger.rounds, ledger.up, ledger.down)
