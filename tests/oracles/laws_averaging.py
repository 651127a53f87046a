"""Exact laws of the averaging family on Gaussian targets, by composing elementary maps.

Client ``c`` moves along ``grad = slope_c - curvature_c theta`` (of minus its weighted loss). Kicks
and drifts are affine, so a round is ``theta' = A theta + b + noise`` given who takes part; the law
over cohorts is a mixture. Nothing here is the closed form of a trajectory: that is tested against
this.
"""

import itertools
from typing import NamedTuple

import numpy as np

from tests.oracles.laws import Moments, at_point, fixed_point, iterate, mixture, push
from tests.oracles.laws_qlsd import bernoulli, cohorts

__all__ = ["Averaging", "bernoulli", "scheme_one", "scheme_two", "trajectory"]


class Trajectory(NamedTuple):
    """``on_start theta + on_anchor theta_0 + shift + on_noise xi + sum_k on_calls[k] e_k``.

    ``theta_0`` is where the round starts, which a control variate refers to; ``e_k`` is the noise
    of gradient call ``k``.
    """

    on_start: np.ndarray
    on_anchor: np.ndarray
    shift: np.ndarray
    on_noise: np.ndarray
    on_calls: list


def trajectory(curvature, slope, on_anchor, *, step_size, num_steps, gradients, inverse_mass=None):
    """Return one trajectory along ``slope + on_anchor theta_0 - curvature theta`` plus noise."""
    d = len(slope)
    mass = np.eye(d) if inverse_mass is None else np.asarray(inverse_mass, float)
    mass = np.diag(mass) if mass.ndim == 1 else mass
    # What position and velocity are made of: theta, theta_0, one, xi, and the noise of every call.
    position = {"theta": np.eye(d)}
    velocity = {"xi": np.linalg.cholesky(mass)}

    def kick(call):
        push = {name: -curvature @ m for name, m in position.items()}
        push["one"] = push.get("one", 0) + slope[:, None]
        push["anchor"] = push.get("anchor", 0) + on_anchor
        push[call] = push.get(call, 0) + np.eye(d)
        for name, m in push.items():
            velocity[name] = velocity.get(name, 0) + step_size / 2 * mass @ m

    for step in range(num_steps):
        before = f"e{step}" if gradients == "reuse" else f"e{step}-first"
        after = f"e{step + 1}" if gradients == "reuse" else f"e{step}-second"
        kick(before)
        for name, m in velocity.items():
            position[name] = position.get(name, 0) + step_size * m
        kick(after)
    calls = [m for name, m in position.items() if name.startswith("e")]
    return Trajectory(
        position["theta"], position["anchor"], position["one"][:, 0], position["xi"], calls
    )


def langevin(curvature, slope, on_anchor, *, step_size):
    """Return one Langevin step, likewise."""
    d = len(slope)
    return Trajectory(
        np.eye(d) - step_size * curvature,
        step_size * on_anchor,
        step_size * slope,
        np.sqrt(2 * step_size) * np.eye(d),
        [step_size * np.eye(d)],
    )


class Local(NamedTuple):
    """A client's round: ``theta_c = on_start theta_0 + shift + sum_t on_noise[t] xi_t + ...``."""

    on_start: np.ndarray
    shift: np.ndarray
    on_noise: list  # one a trajectory
    on_calls: list  # all of them


def local_round(one: Trajectory, num_local_steps) -> Local:
    start, shift = np.eye(len(one.shift)), np.zeros(len(one.shift))
    noises, calls = [], []
    for _ in range(num_local_steps):
        start = one.on_start @ start + one.on_anchor
        shift = one.on_start @ shift + one.shift
        noises = [one.on_start @ m for m in noises] + [one.on_noise]
        calls = [one.on_start @ m for m in calls] + list(one.on_calls)
    return Local(start, shift, noises, calls)


class Averaging(NamedTuple):
    """Rounds of an averaging kernel.

    Log likelihoods are ``-(theta - m_c)' A_c (theta - m_c) / 2``; the prior counts once.
    """

    precisions: np.ndarray  # [b, d, d], A_c
    means: np.ndarray  # [b, d], m_c
    prior_precision: np.ndarray
    prior_mean: np.ndarray
    weights: np.ndarray  # [b]
    step_size: float
    num_local_steps: int
    num_steps: int  # leapfrog steps, 0 for a Langevin step
    rho: float = 1.0
    gradients: str = "fresh"
    inverse_mass: np.ndarray = None
    temperature: float = 1.0
    noises: np.ndarray = None  # [b, d, d], covariance of a call's noise on the weighted gradient
    surrogates: tuple = None  # (precisions, means) of conducive gradients
    alpha: float = 1.0
    control_variate: bool = False
    cohorts: tuple = None  # pairs (probability, coefficients [b] of w_c (theta_c - theta))

    def local_rounds(self, coefficients) -> list:
        """Return every client's round where the sum of gradients has these coefficients."""
        a, w = self.precisions, self.weights
        natural = np.einsum("cij,cj->ci", a, self.means)
        prior_natural = self.prior_precision @ self.prior_mean
        curvatures = self.prior_precision + a / w[:, None, None]
        slopes = prior_natural + natural / w[:, None]
        anchors = np.zeros_like(curvatures)
        if self.surrogates is not None:
            q, u = self.surrogates
            q_natural = np.einsum("cij,cj->ci", q, u)
            curvatures = curvatures + self.alpha * (q.sum(0) - q / w[:, None, None])
            slopes = slopes + self.alpha * (q_natural.sum(0) - q_natural / w[:, None])
        if self.control_variate:
            # A_c / w_c (theta_0 - theta) + sum of gradients at theta_0, and the prior's at theta.
            total = np.einsum("c,cij->ij", coefficients, a)
            anchors = a / w[:, None, None] - total
            slopes = np.repeat((prior_natural + coefficients @ natural)[None], len(w), axis=0)
        locals_ = []
        for parts in zip(curvatures, slopes, anchors, strict=True):
            if self.num_steps:
                one = trajectory(
                    *parts,
                    step_size=self.step_size,
                    num_steps=self.num_steps,
                    gradients=self.gradients,
                    inverse_mass=self.inverse_mass,
                )
            else:
                one = langevin(*parts, step_size=self.step_size)
            locals_.append(local_round(one, self.num_local_steps))
        return locals_

    def map_of(self, coefficients):
        """Return ``(A, b, V)`` of a round with these coefficients."""
        locals_, d = self.local_rounds(coefficients), self.means.shape[1]
        factor = coefficients * self.weights
        on_start = np.eye(d) + sum(
            x * (c.on_start - np.eye(d)) for x, c in zip(factor, locals_, strict=True)
        )
        shift = sum(x * c.shift for x, c in zip(factor, locals_, strict=True))
        noise = np.zeros((d, d))
        for t in range(self.num_local_steps):
            shared = sum(x * c.on_noise[t] for x, c in zip(factor, locals_, strict=True))
            noise += self.rho * shared @ shared.T
            for x, w, c in zip(factor, self.weights, locals_, strict=True):
                noise += (1 - self.rho) / w * x**2 * c.on_noise[t] @ c.on_noise[t].T
        noise *= self.temperature
        if self.noises is not None:
            for x, c, one in zip(factor, locals_, self.noises, strict=True):
                noise += x**2 * sum(m @ one @ m.T for m in c.on_calls)
        return on_start, shift, noise

    def maps(self):
        cohorts = self.cohorts or ((1.0, np.ones(len(self.weights))),)
        return [(p, *self.map_of(coefficients)) for p, coefficients in cohorts]

    def rounds(self, position, num_rounds) -> list:
        """Return the laws after ``0 .. num_rounds`` rounds from a deterministic start."""
        maps = self.maps()
        chances = [chance for chance, *_ in maps]

        def step(law, _):
            return mixture(chances, [push(law, *moves) for _, *moves in maps])

        return iterate(step, at_point(position), num_rounds)

    def stationary(self) -> Moments:
        return fixed_point(self.maps())


def scheme_one(probabilities, cohort_size):
    """Return cohorts of draws with replacement: coefficients ``count / (S p)``."""
    p, b = np.asarray(probabilities, float), len(probabilities)
    counted = []
    for drawn in itertools.product(range(b), repeat=cohort_size):
        count = np.bincount(drawn, minlength=b)
        counted.append((p[list(drawn)].prod(), count / (cohort_size * p)))
    return counted


def scheme_two(num_clients, cohort_size):
    """Return cohorts of `cohort_size` distinct clients: coefficients ``b / S``."""
    return cohorts(cohort_size, num_clients)
