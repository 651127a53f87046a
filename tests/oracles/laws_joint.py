"""Exact laws of kernels that move latents, on Gaussian models; imports nothing of fedmcmc.

Group g has the log density ``-x' [[A, B], [B', D]] x / 2 + a' phi + e' theta`` of ``x = (phi,
theta)``, phi ``[d]`` shared and theta ``[k]`` its own, whose prior it contains; phi has the prior
``N(m0, P^-1)``. A round is an affine map of all of them and of standard normals, so that mean and
covariance follow a linear recursion.
"""

from typing import NamedTuple

import numpy as np

from tests.oracles.laws import Moments, at_point, geometric, iterate, mixture, push
from tests.oracles.laws_qlsd import bernoulli


class Group(NamedTuple):
    """The quadratic form of one group, and whose it is."""

    client: int
    A: np.ndarray
    B: np.ndarray  # [d, k]
    D: np.ndarray
    a: np.ndarray
    e: np.ndarray


class Refreshed(NamedTuple):
    """``theta' = keep theta + gain (e - B' phi) + N(0, noise)``."""

    keep: np.ndarray
    gain: np.ndarray
    noise: np.ndarray


def ula(group, step_size, num_steps):
    """Return Langevin steps of a size relative to the curvature ``D``."""
    inverse, k = np.linalg.inv(group.D), len(group.D)
    step = (1 - step_size) * np.eye(k)
    sums = geometric(step, num_steps)
    noise = 2 * step_size * geometric(step @ step, num_steps) @ inverse
    return Refreshed(np.linalg.matrix_power(step, num_steps), step_size * sums @ inverse, noise)


def exact(group):
    """Return an independent draw of the conditional."""
    inverse = np.linalg.inv(group.D)
    return Refreshed(np.zeros_like(inverse), inverse, inverse)


class Affine(NamedTuple):
    """``matrix x + shift + noise z``, ``z`` standard normals."""

    matrix: np.ndarray
    shift: np.ndarray
    noise: np.ndarray

    def times(self, matrix):
        return Affine(matrix @ self.matrix, matrix @ self.shift, matrix @ self.noise)

    def plus(self, other):
        return Affine(*(x + y for x, y in zip(self, other, strict=True)))


class Model(NamedTuple):
    """Groups and the prior of phi."""

    groups: list
    P: np.ndarray
    m0: np.ndarray

    @property
    def size(self):
        return len(self.m0) + sum(len(g.D) for g in self.groups)

    def place(self, i):
        """Return where the latent of group `i` lies in the joint vector."""
        begin = len(self.m0) + sum(len(g.D) for g in self.groups[:i])
        return slice(begin, begin + len(self.groups[i].D))

    @property
    def joint(self):
        """The joint precision and the linear term."""
        d = len(self.m0)
        H, linear = np.zeros((self.size, self.size)), np.zeros(self.size)
        H[:d, :d], linear[:d] = self.P, self.P @ self.m0
        for i, g in enumerate(self.groups):
            at = self.place(i)
            H[:d, :d] += g.A
            H[:d, at], H[at, :d], H[at, at] = g.B, g.B.T, g.D
            linear[:d], linear[at] = linear[:d] + g.a, g.e
        return H, linear

    @property
    def posterior(self):
        H, linear = self.joint
        return Moments(np.linalg.solve(H, linear), np.linalg.inv(H))

    @property
    def missing(self):
        """Return ``W``, the precision of phi that not knowing the latents takes."""
        return sum(g.B @ np.linalg.solve(g.D, g.B.T) for g in self.groups)

    def at_modes(self, phi):
        """Return the joint vector at phi and the modes of the latents given it."""
        modes = [np.linalg.solve(g.D, g.e - g.B.T @ phi) for g in self.groups]
        return np.concatenate([phi, *modes])


def langevin_round(model, refresh, weights, *, step_size, order, num_draws=1, metric=None):
    """Return a round in which clients of a weight above zero take part, as an `Affine`."""
    d, n = len(model.m0), model.size
    sizes = [len(g.D) for g in model.groups]
    nz = num_draws * sum(sizes) + d
    metric = np.eye(d) if metric is None else metric
    identity = Affine(np.eye(n), np.zeros(n), np.zeros((n, nz)))
    parts = [identity.times(np.eye(n)[:d])]
    parts += [identity.times(np.eye(n)[model.place(i)]) for i in range(len(sizes))]
    phi, thetas, used = parts[0], parts[1:], 0
    nothing = phi.times(np.zeros((d, d)))
    drift = phi.times(-model.P)._replace(shift=model.P @ model.m0)
    for _ in range(num_draws):
        for i, g in enumerate(model.groups):
            weight = weights[g.client]
            if weight:
                rule = refresh(g)
                old = thetas[i]
                pull = phi.times(-rule.gain @ g.B.T)
                pull = pull._replace(shift=pull.shift + rule.gain @ g.e)
                noise = np.zeros((sizes[i], nz))
                noise[:, used : used + sizes[i]] = np.linalg.cholesky(rule.noise)
                moved = old.times(rule.keep).plus(pull)
                thetas[i] = moved._replace(noise=moved.noise + noise)
                at = old if order == "gradient_first" else thetas[i]
                slope = nothing.plus(phi.times(-g.A)).plus(at.times(-g.B))
                slope = slope._replace(shift=slope.shift + g.a)
                drift = drift.plus(slope.times(weight / num_draws * np.eye(d)))
            used += sizes[i]
    kick = np.zeros((d, nz))
    kick[:, used:] = np.sqrt(2 * step_size) * np.linalg.cholesky(metric)
    phi = phi.plus(drift.times(step_size * metric))
    phi = phi._replace(noise=phi.noise + kick)
    return Affine(*(np.concatenate(x) for x in zip(phi, *thetas, strict=True)))


def gibbs_round(model, active):
    """Return a round in which active clients draw their latents and phi is drawn given all."""
    d, n = len(model.m0), model.size
    sizes = [len(g.D) for g in model.groups]
    nz = sum(sizes) + d
    identity = Affine(np.eye(n), np.zeros(n), np.zeros((n, nz)))
    phi, used, thetas = identity.times(np.eye(n)[:d]), 0, []
    precision = model.P + sum(g.A for g in model.groups)
    pull = phi.times(np.zeros((d, d)))
    pull = pull._replace(shift=model.P @ model.m0 + sum(g.a for g in model.groups))
    for i, g in enumerate(model.groups):
        theta = identity.times(np.eye(n)[model.place(i)])
        if active[g.client]:
            rule, noise = exact(g), np.zeros((sizes[i], nz))
            noise[:, used : used + sizes[i]] = np.linalg.cholesky(rule.noise)
            theta = phi.times(-rule.gain @ g.B.T)
            theta = Affine(theta.matrix, theta.shift + rule.gain @ g.e, noise)
        pull = pull.plus(theta.times(-g.B))
        thetas.append(theta)
        used += sizes[i]
    phi = pull.times(np.linalg.inv(precision))
    kick = np.zeros((d, nz))
    kick[:, used:] = np.linalg.cholesky(np.linalg.inv(precision))
    phi = phi._replace(noise=phi.noise + kick)
    return Affine(*(np.concatenate(x) for x in zip(phi, *thetas, strict=True)))


def cohorts(probabilities):
    """Return ``(chance, weights)`` of every set of clients that may take part."""
    return [(chance, weights) for chance, weights in bernoulli(probabilities) if chance > 0]


def after(rounds, law):
    """Return the law one round after `law`; `rounds` are ``(chance, Affine)``."""
    parts = [push(law, m.matrix, m.shift, m.noise @ m.noise.T) for _, m in rounds]
    return mixture([chance for chance, _ in rounds], parts)


def laws_of(rounds, start, num_rounds):
    """Return the laws after ``0 .. num_rounds`` rounds from a point."""
    return iterate(lambda law, _: after(rounds, law), at_point(start), num_rounds)


def stationary(rounds, start):
    """Return the law after so many rounds that nothing changes any more."""
    law = at_point(start)
    for _ in range(20_000):
        moved = after(rounds, law)
        if all(np.allclose(x, y, rtol=1e-12, atol=1e-14) for x, y in zip(moved, law, strict=True)):
            return moved
        law = moved
    raise ValueError("no stationary law")
