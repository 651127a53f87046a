"""Conflict between a client's Gaussian surrogate and the other clients.

Source: Marshall and Spiegelhalter (2007), node splitting, here in natural parameters; Cochran
(1954) and Higgins and Thompson (2002) for heterogeneity.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import gammaincc

from fedmcmc._checks import expect, in_quotes
from fedmcmc.criticism._draws import refuse_whitened, weighted_draws
from fedmcmc.criticism._priors import expanded_prior
from fedmcmc.data import FederatedData
from fedmcmc.fitting import Fitted
from fedmcmc.gaussian import Gaussian, as_dense
from fedmcmc.hierarchy import MarginalTerms
from fedmcmc.pytrees import trees
from fedmcmc.runs import Consortium
from fedmcmc.surrogates import taylor
from fedmcmc.types import Posterior

SINGULAR = 20
"""Size, in units in the last place of the largest eigenvalue, below which an eigenvalue is zero."""
REMEDY_OF_SURROGATES = "Expand at the posterior's mode, or fit surrogates.laplace or .sampled."
REMEDY_OF_POSTERIORS = (
    "Use criticism.leave_out(posterior, data, draws), which needs no Gaussians, or fit "
    "surrogates.laplace or .sampled and pass them: conflict(surrogates, prior)."
)
REMEDY_OF_RANDOM_EFFECTS = (
    "With random effects this is common, because a client's rows hardly determine the spread of "
    "effects. Use criticism.leave_out(posterior, data, draws), which needs no Gaussians."
)


@dataclass(frozen=True)
class Conflict:
    """Conflict of each client with the other clients and the prior.

    Client i has natural parameters ``(A_i, eta_i)``; the product of the prior and all other clients
    has ``(Lam, eta)`` and mean ``m``. With ``g = eta_i - A_i m``,

        T_i = g' (A_i + A_i Lam^-1 A_i)^+ g,
        Q = sum_i eta_i' A_i^+ eta_i - eta' (sum_i A_i)^+ eta,    where eta = sum_i eta_i.

    Both are chi-squared for Gaussian likelihoods if clients agree, and score tests for expansions.

    Attributes
    ----------
    statistic
        ``T_i``, ``[num_clients]``, chi-squared with `ranks` degrees of freedom if no client
        differs.
    ranks
        Rank of ``A_i``, ``[num_clients]`` int: number of directions that a client's rows inform.
    p_values
        ``[num_clients]``. A small p-value shows that a client differs, not that it is wrong.
    shift
        ``[num_clients, d]``, posterior mean with the client minus the mean without it, in posterior
        sds.
    heterogeneity, heterogeneity_degrees
        Cochran's Q of all clients, and its degrees of freedom, the sum of ranks minus the rank of
        the sum.
    coordinates, labels
        Names of the ``d`` coordinates, and labels of the clients in the order of axis 0.
    """

    statistic: np.ndarray
    ranks: np.ndarray
    p_values: np.ndarray
    shift: np.ndarray
    heterogeneity: float
    heterogeneity_degrees: int
    coordinates: tuple[str, ...]
    labels: tuple[Any, ...]

    @property
    def heterogeneity_p_value(self) -> float:
        """Probability of a larger Q if no client differs; one without degrees of freedom."""
        if not self.heterogeneity_degrees:
            return 1.0
        return float(gammaincc(self.heterogeneity_degrees / 2, self.heterogeneity / 2))

    @property
    def i_squared(self) -> float:
        """Share of the variation between clients that chance does not explain, ``1 - df / Q``."""
        if self.heterogeneity <= self.heterogeneity_degrees:
            return 0.0
        return 1 - self.heterogeneity_degrees / self.heterogeneity

    def __repr__(self) -> str:
        """Return the clients with the smallest p-values, and the heterogeneity of all."""
        order = np.argsort(self.p_values)[:10]
        width = max(len("client"), *(len(str(self.labels[i])) for i in order))
        lines = [f"{'client':>{width}}  chi2  df        p  largest shift (posterior sds)"]
        for i in order:
            j = int(np.argmax(np.abs(self.shift[i])))
            lines.append(
                f"{self.labels[i]!s:>{width}}  {self.statistic[i]:>4.1f}  {self.ranks[i]:>2}  "
                f"{self.p_values[i]:>7.2g}  {self.shift[i, j]:+.2f} in {self.coordinates[j]}"
            )
        if len(self.p_values) > len(order):
            lines.append(f"... and {len(self.p_values) - len(order)} more with larger p")
        smallest = min(1.0, float(np.min(self.p_values)) * len(self.p_values))
        lines.append(f"smallest p times {len(self.p_values)} clients: {smallest:.2g}")
        lines.append(
            f"heterogeneity: Q {self.heterogeneity:.1f} of {self.heterogeneity_degrees} degrees of "
            f"freedom, p {self.heterogeneity_p_value:.2g}, I^2 {self.i_squared:.0%}"
        )
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the figures, vectors as lists."""
        vectors = ("statistic", "ranks", "p_values", "shift")
        return {
            "labels": list(self.labels),
            **{name: getattr(self, name).tolist() for name in vectors},
            "heterogeneity": self.heterogeneity,
            "heterogeneity_degrees": self.heterogeneity_degrees,
            "heterogeneity_p_value": self.heterogeneity_p_value,
            "i_squared": self.i_squared,
        }


@overload
def conflict(
    posterior: Posterior, data: FederatedData | Consortium, draws: object, /
) -> Conflict: ...
@overload
def conflict(
    surrogates: Gaussian, prior: Gaussian, *, labels: Sequence[Any] | None = None
) -> Conflict: ...
def conflict(
    surrogates: Any, prior: Any = None, draws: Any = None, *, labels: Sequence[Any] | None = None
) -> Conflict:
    """Compare each client with the other clients: ``conflict(posterior, data, fitted)``.

    The prior and the clients' log likelihoods are expanded to second order, in one exchange, at the
    mode of a fit or at the mean of other draws. Alternatively pass Gaussians:
    ``conflict(surrogates, prior)`` needs no exchange.

    Parameters
    ----------
    posterior, data, draws
        See `loo`.
    surrogates
        One Gaussian per client that approximates its likelihood, such as
        `fedmcmc.surrogates.taylor` at the posterior mode. They may be improper.
    prior
        Prior, or its expansion at the same point; `Gaussian.uniform` for a flat prior.
    labels
        Labels of the clients, by default the labels of the data behind the surrogates.

    Raises
    ------
    TypeError, ValueError
        If an argument has the wrong type or shape, a surrogate has negative curvature (common with
        random effects: use `leave_out`), or the prior and the other clients do not determine a
        direction.

    Examples
    --------
    >>> q = Gaussian.from_moments(jnp.array([0.0, 0.2, 3.0]), variance=jnp.full(3, 0.5))
    >>> print(conflict(q, Gaussian.from_moments(jnp.array(0.0), variance=jnp.array(100.0))))
    client  chi2  df        p  largest shift (posterior sds)
         2  11.2   1  0.00081  +2.37 in the coordinate
         0   3.4   1    0.065  -1.30 in the coordinate
         1   2.2   1     0.13  -1.06 in the coordinate
    smallest p times 3 clients: 0.0024
    heterogeneity: Q 11.3 of 2 degrees of freedom, p 0.0036, I^2 82%
    """
    remedy = REMEDY_OF_SURROGATES
    if isinstance(surrogates, Posterior):
        has_effects = isinstance(surrogates.loglikelihood_fn, MarginalTerms)
        remedy = REMEDY_OF_RANDOM_EFFECTS if has_effects else REMEDY_OF_POSTERIORS
        surrogates, prior = _expansions(surrogates, prior, draws)
    expect(surrogates, Gaussian, "surrogates")
    expect(prior, Gaussian, "prior")
    position = prior.precision_mean
    num = surrogates.num_clients
    surrogates.check_clients(position, num)
    labels = surrogates.labels if labels is None else labels
    labels = tuple(range(num) if labels is None else labels)
    if len(labels) != num:
        raise ValueError(f"labels must name the {num} clients, got {len(labels)} labels.")
    clients = jax.vmap(as_dense)(surrogates)
    precision = np.asarray(clients.precision, np.float64)
    eta = np.asarray(jax.vmap(trees.ravel)(clients.precision_mean), np.float64)
    dense_prior = as_dense(prior)
    prior_precision = np.asarray(dense_prior.precision, np.float64)
    prior_eta = np.asarray(trees.ravel(dense_prior.precision_mean), np.float64)
    if not all(np.isfinite(x).all() for x in (precision, eta, prior_precision, prior_eta)):
        raise ValueError("Surrogates and prior must be finite.")
    resolution = SINGULAR * np.finfo(np.asarray(clients.precision).dtype).eps
    # Scale coordinates so that the posterior's curvature is one; the results have no units.
    diagonal = np.diag(prior_precision + precision.sum(0))
    unit = np.sqrt(np.where(diagonal > 0, diagonal, 1))
    precision, eta = precision / np.outer(unit, unit), eta / unit
    full = prior_precision / np.outer(unit, unit) + precision.sum(0)
    full_eta = prior_eta / unit + eta.sum(0)
    roots = [
        _root(precision[i], resolution, f"client {in_quotes(labels[i])}", remedy)
        for i in range(num)
    ]
    covariance = _inverse(full, resolution, "The product of the prior and all clients")
    mean = covariance @ full_eta
    statistic, shift = np.empty(num), np.empty((num, len(mean)))
    for i, root in enumerate(roots):
        name = f"Without client {in_quotes(labels[i])} the product of the prior and other clients"
        cavity_covariance = _inverse(full - precision[i], resolution, name)
        cavity_mean = cavity_covariance @ (full_eta - eta[i])
        # In the coordinates of the root, A_i = V V' and g = V u: T = u' (1 + V' Lam^-1 V)^-1 u.
        u = _solve(root, eta[i] - precision[i] @ cavity_mean)
        spread = np.eye(root.shape[1]) + root.T @ cavity_covariance @ root
        statistic[i] = u @ np.linalg.solve(spread, u)
        shift[i] = (mean - cavity_mean) / np.sqrt(np.diag(covariance))
    ranks = np.array([root.shape[1] for root in roots])
    total = _root(precision.sum(0), resolution, "the sum of all clients", remedy)
    squares = sum(float(np.sum(_solve(root, eta[i]) ** 2)) for i, root in enumerate(roots))
    return Conflict(
        statistic,
        ranks,
        np.where(ranks > 0, gammaincc(np.maximum(ranks, 1) / 2, statistic / 2), 1.0),
        shift,
        max(0.0, squares - float(np.sum(_solve(total, eta.sum(0)) ** 2))),
        int(ranks.sum() - total.shape[1]),
        tuple(trees.element_names(jax.tree.map(jnp.asarray, position))),
        labels,
    )


def _expansions(
    posterior: Posterior, data: FederatedData | Consortium, draws: object
) -> tuple[Gaussian, Gaussian]:
    """Return the expansions of all clients and of the prior at the center of the draws."""
    refuse_whitened(posterior)
    if isinstance(draws, Fitted) and draws.gaussian is not None:
        center = draws.gaussian.mean()
    else:
        chosen = weighted_draws(draws, posterior)
        center = jax.tree.map(
            lambda leaf: jnp.asarray(np.tensordot(chosen.weights, leaf, 1), leaf.dtype),
            chosen.positions,
        )
    return taylor(posterior, data, center), expanded_prior(posterior, center)


def _root(precision: np.ndarray, resolution: float, name: str, remedy: str) -> np.ndarray:
    """Return ``V`` ``[d, rank]`` with ``V V'`` the precision; raise `ValueError` if indefinite."""
    diagonal = np.diag(precision)
    scale = np.sqrt(np.where(diagonal > 0, diagonal, 1))
    values, vectors = np.linalg.eigh((precision + precision.T) / 2 / np.outer(scale, scale))
    zero = resolution * len(values) * max(values.max(initial=0), 1e-30)
    if values.min() < -zero:
        raise ValueError(
            f"The surrogate of {name} has a direction of negative curvature (smallest eigenvalue "
            f"{values.min():.2g}, in units of its diagonal), which no Gaussian likelihood has. "
            f"{remedy}"
        )
    positive = values > zero
    return scale[:, None] * vectors[:, positive] * np.sqrt(values[positive])


def _solve(root: np.ndarray, vector: np.ndarray) -> np.ndarray:
    """Return ``V^+ vector``."""
    solution: np.ndarray = np.linalg.lstsq(root, vector, rcond=None)[0]
    return solution


def _inverse(precision: np.ndarray, resolution: float, name: str) -> np.ndarray:
    lowest = np.linalg.eigvalsh(precision)[0]
    if not lowest > resolution * len(precision):
        raise ValueError(
            f"{name} is no proper density (smallest eigenvalue {lowest:.2g}, in units of the "
            "posterior's diagonal): use a prior that is proper where the clients have no "
            "information."
        )
    inverse: np.ndarray = np.linalg.inv(precision)
    return inverse
