"""Expectation propagation on Gaussian likelihoods, round by round, in float64 and matrices alone.

Written from SYSTEMS' and the paper's formulas without anything of the package: sites, cavities and
the global product are pairs (precision mean, precision matrix), whatever the family.
"""

import numpy as np


class Run:
    """All rounds of one run: ``eta [rounds + 1, d]``, ``precision [rounds + 1, d, d]``."""

    def __init__(self, eta, precision, sites):
        self.eta, self.precision, self.sites = eta, precision, sites

    @property
    def means(self):
        """Global means, ``[rounds + 1, d]``."""
        return np.linalg.solve(self.precision, self.eta[..., None])[..., 0]


def project(precision, structure):
    """Return the precision of the family with the mean kept and variances matched."""
    if structure == "dense":
        return precision
    variances = np.diag(np.linalg.inv(precision))
    if structure == "diagonal":
        return np.diag(1 / variances)
    return np.eye(len(variances)) / variances.mean()


def matched(structure):
    """Client inference by matched moments."""
    return lambda precision, cavity, size: project(precision + cavity, structure)


def added(number, per_row=False):
    """Client inference whose covariance is a scaled identity besides the cavity."""
    return lambda precision, cavity, size: (
        cavity + number * (size if per_row else 1) * np.eye(len(cavity))
    )


def constant(variance):
    """Client inference whose tilted covariance is always the same."""
    return lambda precision, cavity, size: np.eye(len(cavity)) / variance


def propagate(
    precisions,
    means,
    rule,
    *,
    prior=None,
    cavity="site",
    damping=1.0,
    sizes=None,
    first=0.0,
    start=None,
    cohorts=None,
    num_rounds=5,
):
    """Run expectation propagation; `cohorts` is who takes part in each round, by default all."""
    num, dim = means.shape
    sizes = np.ones(num) if sizes is None else np.asarray(sizes, float)
    shares = sizes / sizes.sum()
    start = np.zeros(dim) if start is None else start
    prior_precision, prior_eta = (np.zeros((dim, dim)), np.zeros(dim)) if prior is None else prior
    site_precision = first * sizes[:, None, None] * np.eye(dim)
    site_eta = site_precision @ start
    eta, precision = prior_eta + site_eta.sum(0), prior_precision + site_precision.sum(0)
    etas, all_precisions = [eta], [precision]
    for r in range(num_rounds):
        members = range(num) if cohorts is None else cohorts[r]
        change_eta, change = np.zeros(dim), np.zeros((dim, dim))
        moves = {}
        for k in members:
            if cavity == "site":
                minus = eta - site_eta[k], precision - site_precision[k]
            elif cavity == "average":
                minus = (
                    eta - (eta - prior_eta) / num,
                    precision - (precision - prior_precision) / num,
                )
            elif cavity == "power":
                minus = (
                    eta - shares[k] * (eta - prior_eta),
                    precision - shares[k] * (precision - prior_precision),
                )
            elif cavity == "global":
                minus = eta, precision
            else:
                minus = np.zeros(dim), np.zeros((dim, dim))
            mean = np.linalg.solve(precisions[k] + minus[1], precisions[k] @ means[k] + minus[0])
            tilted = rule(precisions[k], minus[1], sizes[k])
            before = (site_eta[k], site_precision[k]) if cavity == "none" else (eta, precision)
            moves[k] = tilted @ mean - before[0], tilted - before[1]
            change_eta, change = change_eta + moves[k][0], change + moves[k][1]
        for k, (d_eta, d_precision) in moves.items():
            site_eta[k] += damping * d_eta
            site_precision[k] += damping * d_precision
        eta, precision = eta + damping * change_eta, precision + damping * change
        etas.append(eta)
        all_precisions.append(precision)
    return Run(np.array(etas), np.array(all_precisions), (site_eta, site_precision))
