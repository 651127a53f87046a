"""Underdamped Langevin dynamics: moments after some rounds, and the exact stationary distribution.

On Gaussian clients a round is an affine map of position and velocity with Gaussian noise.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.linalg import block_diag, solve_discrete_lyapunov

import fedmcmc
from tests.oracles.chains import draw, split_keys
from tests.oracles.federations import LIMIT, Federation, worst_z
from tests.oracles.laws import at_point, iterate, push

NUM_CHAINS = 8192
FEDERATION = Federation()
DATA, START = FEDERATION.data, Federation.start
EXACT = FEDERATION.target
PRECISION = np.linalg.inv(EXACT.covariance)
DIAGONAL = np.array([0.5, 2.0, 1.0])
LARGEST = 2 / np.sqrt(np.linalg.eigvalsh(PRECISION).max())
"""Step size at which the dynamics become unstable."""
CASES = {
    "exact gradients": dict(step_size=0.5 * LARGEST, friction=3.0),
    "minibatches": dict(step_size=0.2 * LARGEST, friction=8.0, temperature=0.05, batch_size=3),
    "a metric": dict(step_size=0.3 * LARGEST, friction=2.0, metric=DIAGONAL),
    "schedules": dict(step_size=lambda r: LARGEST / (3 + r), friction=lambda r: 2.0 + r),
}


def affine(round_, *, step_size, friction, temperature=1.0, batch_size=None, metric=None):
    """Return a round as a map, a shift and a covariance of noise of ``(position, velocity)``."""
    h, friction = (x(round_) if callable(x) else x for x in (step_size, friction))
    eye, zero = np.eye(3), np.zeros((3, 3))
    mass = eye if metric is None else np.diag(metric)
    kick = np.block([[eye, zero], [-h * mass @ PRECISION, eye]])
    impulse = np.concatenate([np.zeros(3), h * mass @ PRECISION @ EXACT.mean])
    drift = np.block([[eye, h / 2 * eye], [zero, eye]])
    decay = np.exp(-friction * h)
    fresh = block_diag(zero, (1 - decay**2) * temperature * mass)
    gradients = zero if batch_size is None else FEDERATION.location_noises(batch_size).sum(0)
    after_kick = block_diag(zero, h**2 * mass @ gradients @ mass)
    flow = drift @ block_diag(eye, decay * eye) @ drift
    return flow @ kick, flow @ impulse, flow @ after_kick @ flow.T + drift @ fresh @ drift.T


def build(*, batch_size=None, metric=None, **settings):
    estimator = fedmcmc.full_gradient() if batch_size is None else fedmcmc.minibatch(batch_size)
    metric = None if metric is None else jnp.asarray(metric)
    return fedmcmc.underdamped(FEDERATION.posterior, estimator, metric=metric, **settings)


def get_phase_point(state):
    return jnp.concatenate([state.broadcast.position, state.server.velocity])


@pytest.mark.parametrize("case", CASES)
def test_moments_after_six_rounds_are_exact(case):
    start = at_point(np.concatenate([START, np.zeros(3)]))
    laws = iterate(lambda law, r: push(law, *affine(r, **CASES[case])), start, 6)
    draws = draw(build(**CASES[case]), DATA, START, split_keys(NUM_CHAINS), 6, get_phase_point)
    assert worst_z(draws, laws[-1]) < LIMIT


@pytest.mark.parametrize("share", [0.1, 0.9])
@pytest.mark.parametrize("metric", [None, DIAGONAL / 4])
def test_positions_have_exactly_the_posterior_at_every_stable_step_size(share, metric):
    matrix, shift, noise = affine(0, step_size=share * LARGEST, friction=2.0, metric=metric)
    covariance = solve_discrete_lyapunov(matrix, noise)
    np.testing.assert_allclose(covariance[:3, :3], EXACT.covariance, rtol=1e-7, atol=1e-10)
    mean = np.linalg.solve(np.eye(6) - matrix, shift)
    np.testing.assert_allclose(mean[:3], EXACT.mean, rtol=1e-8)


@pytest.mark.parametrize("name", ["step_size", "friction"])
def test_numbers_must_be_positive(name):
    with pytest.raises(ValueError, match=f"{name} must be a finite number above 0"):
        build(**(dict(step_size=0.1, friction=1.0) | {name: 0.0}))
