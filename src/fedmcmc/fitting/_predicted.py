"""The tail of importance weights, predicted from curvature before any draw is weighted.

Weights of a Gaussian proposal with covariance ``C`` for a Gaussian target with precision ``H`` have
the tail index ``max(0, 1 - lam)``, with ``lam`` the smallest eigenvalue of ``C H``: a proposal that
is too narrow in one direction has few draws where the target still has mass.
"""

from dataclasses import dataclass

import jax
import numpy as np
from jax import Array

from fedmcmc._types import Posterior, as_functions
from fedmcmc.fitting._modes import Search
from fedmcmc.runs import Consortium
from fedmcmc.surrogates import Ledger, Objective

HOPELESS = 0.9
"""Above this predicted tail index no draws are weighted."""
MOST_PRODUCTS = 20
APART = 0.1
"""Between the places whose gradients make a product with the Hessian, in conditional sds."""


@dataclass(frozen=True)
class Tail:
    """A predicted tail index, and what it cost.

    Attributes
    ----------
    khat
        The index; where `products` is not zero, at least that.
    products
        Products with the Hessian, of which each took an exchange.
    rounds, bits_up, bits_down
        What they cost.
    """

    khat: float
    products: int = 0
    rounds: int = 0
    bits_up: float = 0.0
    bits_down: float = 0.0


def tail_index(covariance: np.ndarray, precision: np.ndarray) -> float:
    """Return the tail index of weights, from matrices ``[d, d]``."""
    root = np.linalg.cholesky(covariance)
    return float(max(0.0, 1 - np.linalg.eigvalsh(root.T @ precision @ root)[0]))


def predicted_tail(
    rng_key: Array, posterior: Posterior, consortium: Consortium, search: Search
) -> Tail:
    """Return the tail index of weights of a diagonal Gaussian at the highest mode.

    By Lanczos's method on the posterior's Hessian in units in which the diagonal is one. Its
    smallest Ritz value falls to the smallest eigenvalue, so that the index is at least what is
    returned, and the search ends once that is above 0.9. A product with the Hessian is a difference
    of two gradients, one exchange.
    """
    mode = search.modes[0]
    scales = np.sqrt(mode.covariance)
    ledger = Ledger(consortium)
    objective = Objective(as_functions(posterior), ledger, search.centre, "none")

    def product(vector: np.ndarray) -> np.ndarray:
        step = APART / 2 * scales * vector
        ahead, behind = objective(np.stack([mode.flat + step, mode.flat - step]))
        return scales * (ahead.gradient - behind.gradient) / APART

    size = len(scales)
    start = np.asarray(jax.random.normal(rng_key, (size,)), np.float64)
    basis = [start / np.linalg.norm(start)]
    tridiagonal = np.zeros((0, 0))
    smallest = np.inf
    while len(tridiagonal) < min(MOST_PRODUCTS, size) and 1 - smallest <= HOPELESS:
        image = product(basis[-1])
        vectors = np.stack(basis)
        # All of a row, and the basis kept orthogonal by hand: twenty vectors are few.
        overlaps = vectors @ image
        tridiagonal = np.pad(tridiagonal, (0, 1))
        tridiagonal[-1, :] = tridiagonal[:, -1] = overlaps
        smallest = float(np.linalg.eigvalsh(tridiagonal)[0])
        rest = image - overlaps @ vectors
        rest -= (vectors @ rest) @ vectors
        norm = float(np.linalg.norm(rest))
        if norm < 1e-6 * np.linalg.norm(image):
            break
        basis.append(rest / norm)
    khat = max(0.0, 1 - smallest)
    return Tail(khat, len(tridiagonal), ledger.rounds, ledger.up, ledger.down)
