"""FedEP's toy against the iterations of its equations, written out."""

import numpy as np
import pytest

from experiments.special import fed_ep_toy


@pytest.mark.parametrize("method", ["FedEP", "FedEP, scaled identity"])
def test_expectation_propagation_of_two_gaussians(method):
    pairs = fed_ep_toy.draw_pairs(0, 3, degrees=7, scale=0.2)
    precisions = np.linalg.inv(pairs.covariances)
    eta = np.einsum("nkij,nkj->nki", precisions, pairs.means)
    site_eta, site = np.zeros_like(pairs.means), np.zeros_like(pairs.means)
    expected = []
    for _ in range(4):
        cavity, cavity_eta = site[:, ::-1], site_eta[:, ::-1]  # the other client's site
        tilted = precisions + cavity[..., None] * np.eye(2)
        mean = np.linalg.solve(tilted, (eta + cavity_eta)[..., None])[..., 0]
        variances = np.diagonal(np.linalg.inv(tilted), axis1=-2, axis2=-1)
        product = 1 / variances if method == "FedEP" else cavity + 1.0
        site_eta, site = product * mean - cavity_eta, product - cavity
        expected.append(site_eta.sum(axis=1) / site.sum(axis=1))
    means = fed_ep_toy.means_by_round(fed_ep_toy.kernels()[method], pairs, 4)
    np.testing.assert_allclose(means, np.stack(expected, axis=1), rtol=1e-4, atol=1e-5)
