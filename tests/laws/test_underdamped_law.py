"""Underdamped Langevin dynamics: moments after some rounds, and the exact stationary distribution.

On Gaussian clients a round is an affine map of position and velocity with Gaussian noise.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.linalg import block_diag, solve_discrete_lyapunov

import fedmcmc
from tests.oracles.federations import LIMIT, Federation, worst_z
from tests.oracles.laws import Moments, location_noise, posterior

NUM_CHAINS = 8192
FEDERATION = Federation()
EXACT = posterior(
    FEDERATION.precisions, FEDERATION.means, FEDERATION.prior_precision, FEDERATION.prior_mean
)
PRECISION = np.linalg.inv(EXACT.covariance)
DIAGONAL = np.array([0.5, 2.0, 1.0])
LARGEST = 2 / np.sqrt(np.linalg.eigvalsh(PRECISION).max())
"""Step size at which the dynamics turn unstable."""
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
    push = np.concatenate([np.zeros(3), h * mass @ PRECISION @ EXACT.mean])
    drift = np.block([[eye, h / 2 * eye], [zero, eye]])
    decay = np.exp(-friction * h)
    damp = block_diag(eye, decay * eye)
    fresh = block_diag(zero, (1 - decay**2) * temperature * mass)
    gradients = zero
    if batch_size is not None:
        pairs = zip(FEDERATION.rows, FEDERATION.row_precisions, strict=True)
        gradients = sum(location_noise(x, p, batch_size, replace=True) for x, p in pairs)
    after_kick = block_diag(zero, h**2 * mass @ gradients @ mass)
    whole = drift @ damp @ drift
    return whole @ kick, whole @ push, whole @ after_kick @ whole.T + drift @ fresh @ drift.T


def kernel_of(*, batch_size=None, metric=None, **settings):
    estimator = fedmcmc.full_gradient() if batch_size is None else fedmcmc.minibatch(batch_size)
    metric = None if metric is None else jnp.asarray(metric)
    return fedmcmc.underdamped(FEDERATION.posterior, estimator, metric=metric, **settings)


@jax.jit
def after(kernel, keys, num_rounds):
    """Return positions and velocities after some rounds, a row per key."""
    init, step = fedmcmc.simulate(kernel, FEDERATION.data)

    def chain(key):
        start = init(jnp.asarray(FEDERATION.start))
        state = jax.lax.fori_loop(0, num_rounds, lambda _, s: step(key, s)[0], start)
        return jnp.concatenate([state.broadcast.position, state.server.velocity])

    return jax.vmap(chain)(keys)


@pytest.mark.parametrize("case", CASES)
def test_moments_after_six_rounds(case):
    settings = CASES[case]
    mean, covariance = np.concatenate([FEDERATION.start, np.zeros(3)]), np.zeros((6, 6))
    for round_ in range(6):
        on_state, shift, noise = affine(round_, **settings)
        mean, covariance = on_state @ mean + shift, on_state @ covariance @ on_state.T + noise
    draws = after(kernel_of(**settings), jax.random.split(jax.random.key(0), NUM_CHAINS), 6)
    assert worst_z(draws, Moments(mean, covariance)) < LIMIT


@pytest.mark.parametrize("share", [0.1, 0.9])
@pytest.mark.parametrize("metric", [None, DIAGONAL / 4])
def test_positions_have_exactly_the_posterior_at_every_stable_step_size(share, metric):
    on_state, shift, noise = affine(0, step_size=share * LARGEST, friction=2.0, metric=metric)
    covariance = solve_discrete_lyapunov(on_state, noise)
    np.testing.assert_allclose(covariance[:3, :3], EXACT.covariance, rtol=1e-7, atol=1e-10)
    mean = np.linalg.solve(np.eye(6) - on_state, shift)
    np.testing.assert_allclose(mean[:3], EXACT.mean, rtol=1e-8)


def test_a_long_run_has_the_posterior():
    kernel = kernel_of(step_size=0.6 * LARGEST, friction=3.0)
    draws = after(kernel, jax.random.split(jax.random.key(1), NUM_CHAINS), 300)[:, :3]
    assert worst_z(draws, EXACT) < LIMIT


@pytest.mark.parametrize("name", ["step_size", "friction"])
def test_numbers_must_be_positive(name):
    with pytest.raises(ValueError, match=f"{name} must be a finite number above 0"):
        kernel_of(**(dict(step_size=0.1, friction=1.0) | {name: 0.0}))
