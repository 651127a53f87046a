"""The pairs of clients of Table 4, and expectation propagation on them in double precision."""

from typing import NamedTuple, Protocol

import numpy as np
from sklearn.datasets import make_spd_matrix

__all__ = ["IDENTITY", "Problems", "Settings", "exact_distances", "random_problems"]

IDENTITY = 1.0
"""Precision of a client's site that is a scaled identity; the released code's, not in the text."""


class Settings(Protocol):
    """What the problems are drawn by; see `toy.Config`."""

    seed: int
    num_problems: int
    degrees: int
    scale: float
    random_scale: bool


class Problems(NamedTuple):
    """Clients' means ``[n, 2, 2]`` and covariances ``[n, 2, 2, 2]``."""

    means: np.ndarray
    covariances: np.ndarray

    @property
    def exact(self) -> np.ndarray:
        """The global means, ``[n, 2]``."""
        precisions = np.linalg.inv(self.covariances)
        eta = np.einsum("nkij,nkj->ni", precisions, self.means)
        return np.linalg.solve(precisions.sum(1), eta[..., None])[..., 0]


def random_problems(config: Settings) -> Problems:
    """Draw pairs of clients from the normal-inverse-Wishart distribution."""
    rng = np.random.default_rng(config.seed)
    shape = (config.num_problems, 2)
    if config.random_scale:
        matrices = np.stack(
            [make_spd_matrix(2, random_state=config.seed + i) for i in range(shape[0])]
        )
        matrices = np.repeat(matrices[:, None], 2, axis=1)
    else:
        matrices = np.broadcast_to(make_spd_matrix(2, random_state=0), (*shape, 2, 2))
    # Of an inverse-Wishart matrix the inverse is a sum of squares of normals.
    factors = np.linalg.cholesky(np.linalg.inv(matrices))
    normals = factors @ rng.normal(size=(*shape, 2, config.degrees))
    covariances = np.linalg.inv(normals @ normals.swapaxes(-1, -2))
    root = np.linalg.cholesky(covariances / config.scale)
    means = (root @ rng.normal(size=(*shape, 2, 1)))[..., 0]
    return Problems(means, covariances)


def exact_distances(problems: Problems, num_rounds: int, *, identity: bool) -> np.ndarray:
    """Return the mean distance from the global mean after each round, in double precision.

    Parameters
    ----------
    problems
        Pairs of clients.
    num_rounds
        Of expectation propagation, both clients at once, without damping.
    identity
        Whether sites have the precision `IDENTITY`, else a diagonal that keeps the variances.
    """
    precisions = np.linalg.inv(problems.covariances)
    own = np.einsum("nkij,nkj->nki", precisions, problems.means)
    eta, site = np.zeros_like(problems.means), np.zeros_like(problems.means)
    exact, found = problems.exact, []
    for _ in range(num_rounds):
        # The cavity of one of two clients is the other's site.
        cavity, pull = site[:, ::-1], eta[:, ::-1]
        tilted = precisions + cavity[..., None] * np.eye(2)
        mean = np.linalg.solve(tilted, (own + pull)[..., None])[..., 0]
        variances = np.diagonal(np.linalg.inv(tilted), axis1=-2, axis2=-1)
        whole = cavity + IDENTITY if identity else 1 / variances
        eta, site = whole * mean - pull, whole - cavity
        gap = eta.sum(axis=1) / site.sum(axis=1) - exact
        found.append(np.linalg.norm(gap, axis=-1).mean())
    return np.array(found)
