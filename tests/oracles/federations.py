"""Gaussian federations to sample, and the statistic that compares samples with their law."""

import jax.numpy as jnp
import numpy as np

import fedmcmc
from tests.oracles import laws

LIMIT = 5.5
"""Largest |z| of one entry; with fixed seeds a correct sampler passes for good."""


def loglikelihood(position, rows):
    """Rows ``{"x": [n, d], "factor": [n, d, d]}``, ``log N(x; theta, (L' L)^-1)`` a row."""
    scaled = jnp.einsum("nij,nj->ni", rows["factor"], rows["x"] - position)
    return -0.5 * jnp.sum(scaled**2, axis=-1)


class Federation:
    """Clients of ragged sizes (one of a single row), each with a random dense curvature.

    All rows of a client share its curvature, so that minibatch noise does not depend on theta.
    """

    sizes = (7, 1, 12, 4)
    probabilities = np.array([0.35, 0.15, 0.3, 0.2])
    start = np.array([1.5, -1.0, 0.5])

    def __init__(self, seed=0):
        rng = np.random.default_rng(seed)
        num, d = len(self.sizes), len(self.start)
        self.factors = (0.5 * rng.normal(size=(num, d, d)) + np.eye(d)).round(2)
        self.rows = [
            rng.normal(2 * rng.normal(size=d), 1.0, size=(n, d)).round(2) for n in self.sizes
        ]
        self.row_precisions = self.factors.transpose(0, 2, 1) @ self.factors
        self.precisions = np.array(self.sizes)[:, None, None] * self.row_precisions
        self.means = np.array([rows.mean(0) for rows in self.rows])
        self.prior_precision = np.array([[2.0, 0.4, 0.0], [0.4, 1.5, -0.3], [0.0, -0.3, 1.0]])
        self.prior_mean = np.array([0.5, 0.0, -1.0])
        self.posterior = fedmcmc.Posterior(self._logprior, loglikelihood)

    def _logprior(self, position):
        gap = position - jnp.asarray(self.prior_mean, position.dtype)
        precision = jnp.asarray(self.prior_precision, position.dtype)
        return -0.5 * gap @ (precision @ gap)

    def client_trees(self):
        return [
            {"x": rows, "factor": np.broadcast_to(factor, (len(rows), *factor.shape))}
            for rows, factor in zip(self.rows, self.factors, strict=True)
        ]

    @property
    def data(self):
        return fedmcmc.FederatedData.from_clients(self.client_trees())

    @property
    def prior(self):
        return dict(prior_precision=self.prior_precision, prior_mean=self.prior_mean)

    @property
    def target(self):
        """Return the moments of the exact posterior."""
        return laws.posterior(self.precisions, self.means, **self.prior)

    @property
    def split_terms(self):
        """Return precisions and means of the clients' terms, each with its share of the prior."""
        shares = np.array(self.sizes)[:, None] / sum(self.sizes)
        precisions = self.precisions + shares[..., None] * self.prior_precision
        slopes = np.einsum("sij,sj->si", self.precisions, self.means)
        slopes = slopes + shares * (self.prior_precision @ self.prior_mean)
        return precisions, np.linalg.solve(precisions, slopes[..., None])[..., 0]

    def location_noises(self, batch, *, replace=True):
        """Return the covariances of the clients' minibatch gradients, ``[num_clients, d, d]``."""
        pairs = zip(self.rows, self.row_precisions, strict=True)
        return np.stack([laws.location_noise(*pair, batch, replace=replace) for pair in pairs])

    def law(self, *, pooled=False, batch=None, replace=True, scale=0.0, surrogates=None, **kwargs):
        """Return the law of a kernel; `surrogates` are ``(precisions, means)``."""
        precisions, means, num = self.precisions, self.means, len(self.sizes)
        noises = np.stack([scale**2 * np.eye(len(self.start))] * num)
        if pooled:
            precisions, means = laws.pool(precisions, means)
            noises, kwargs = noises[:1], dict(kwargs, probabilities=[1.0], num_local_steps=1)
            if batch is not None:
                curvatures = np.repeat(self.row_precisions, self.sizes, axis=0)
                rows = np.concatenate(self.rows)
                kwargs["batches"] = [laws.batch_noise(rows, curvatures, batch, replace=replace)]
        elif batch is not None:
            noises = noises + self.location_noises(batch, replace=replace)
        if not pooled and "probabilities" not in kwargs:
            kwargs["probabilities"] = np.full(num, 1 / num)
        if surrogates is not None:
            kwargs["surrogate_precisions"], kwargs["surrogate_means"] = surrogates
        return laws.relay(precisions, means, noises=noises, **self.prior, **kwargs)

    def surrogates(self, structure, seed=0):
        """Return a surrogate a client, inexact but for "exact", and its ``(precisions, means)``."""
        if structure == "exact":
            q = fedmcmc.Gaussian.from_moments(self.means, np.linalg.inv(self.precisions))
            return q, (self.precisions, self.means)
        rng = np.random.default_rng(seed)
        means = self.means + 0.3 * rng.normal(size=self.means.shape)
        if structure == "dense":
            factor = 0.2 * rng.normal(size=self.precisions.shape)
            precisions = 0.8 * self.precisions + factor @ factor.transpose(0, 2, 1)
            q = fedmcmc.Gaussian.from_moments(means, np.linalg.inv(precisions))
        elif structure == "diagonal":
            diagonals = 0.9 * np.diagonal(self.precisions, axis1=1, axis2=2)
            precisions = np.stack([np.diag(p) for p in diagonals])
            q = fedmcmc.Gaussian.from_moments(means, variance=1 / diagonals)
        else:
            scales = np.trace(self.precisions, axis1=1, axis2=2) / 3
            precisions = scales[:, None, None] * np.eye(3)
            q = fedmcmc.Gaussian.from_moments(means, variance=1 / scales)
        assert q.structure == structure
        return q, (precisions, means)


def z_scores(statistics, expected):
    """Return z of the mean of independent `statistics` ``[n, ...]`` against `expected`.

    The standard error is empirical, so the distribution may be any (it is a mixture). If all
    statistics are equal, z is infinite.
    """
    statistics = np.asarray(statistics, float)
    spread = statistics.std(axis=0, ddof=1) / np.sqrt(len(statistics))
    with np.errstate(divide="ignore"):
        return (statistics.mean(axis=0) - expected) / spread


def worst_z(draws, moments):
    """Return the largest |z| over every entry of mean and covariance; draws ``[n, d]``, i.i.d."""
    gap = np.asarray(draws, float) - moments.mean
    of_mean = z_scores(draws, moments.mean)
    of_covariance = z_scores(gap[:, :, None] * gap[:, None, :], moments.covariance)
    return max(np.abs(of_mean).max(), np.abs(of_covariance).max())
