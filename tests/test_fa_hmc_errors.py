"""Bad input of FA-LD, FA-HMC and their blocks: one message, before anything is compiled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc import integrators

POSTERIOR = fedmcmc.Posterior(
    lambda theta: -0.5 * jnp.sum(theta**2),
    lambda theta, x: -0.5 * jnp.sum((x - theta) ** 2, axis=-1),
)
W3 = jnp.ones(3) / 3
FULL = fedmcmc.full_gradient()
DATA = fedmcmc.FederatedData.from_clients([np.ones((3, 2)), np.zeros((2, 2))])


def run(kernel, **settings):
    settings = {"num_rounds": 4, "progress": False, **settings}
    return fedmcmc.sample(jax.random.key(0), kernel, DATA, jnp.zeros(2), **settings)


def fa_hmc(**changed):
    settings = dict(step_size=0.1, num_integration_steps=2, num_local_steps=2) | changed
    return fedmcmc.fa_hmc(POSTERIOR, **settings)


def averaging(**changed):
    settings = dict(
        estimator=fedmcmc.full_gradient(), integrator=fedmcmc.leapfrog(2), step_size=0.1
    )
    settings |= changed
    return fedmcmc.averaging(POSTERIOR, settings.pop("estimator"), **settings)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fa_hmc(step_size=0.0), "step_size must be a finite number above 0"),
        (lambda: fa_hmc(num_integration_steps=0), "num_integration_steps must be a positive.*0"),
        (
            lambda: fa_hmc(num_integration_steps=1.5),
            "num_integration_steps must be a positive integer",
        ),
        (lambda: fa_hmc(num_local_steps=0), "num_local_steps must be a positive integer"),
        (lambda: fa_hmc(gradients="old"), "gradients must be .fresh. or .reuse., got 'old'"),
        (lambda: fa_hmc(rho=1.5), r"rho must be in \[0, 1\], got 1.5"),
        (lambda: fa_hmc(rho=-0.1), "rho must be a finite number at least 0"),
        (lambda: fa_hmc(gradient_noise=-1.0), "gradient_noise must be a finite number at least 0"),
        (lambda: fa_hmc(temperature=-1.0), "temperature must be a finite number at least 0"),
        (lambda: fa_hmc(weights=[0.5, 0.6]), "weights must be positive and sum to one.*1.1"),
        (lambda: fa_hmc(weights=[1.5, -0.5]), "smallest entry of -0.5"),
        (lambda: fa_hmc(weights=0.5), r"weights must have shape \[num_clients\], got shape \(\)"),
        (lambda: run(fa_hmc(weights=[0.5, 0.3, 0.2])), r"weights must have shape \(2,\), one a"),
        (lambda: run(fa_hmc(inverse_mass_matrix=jnp.array([1.0, 0.0]))), "positive in every"),
        (lambda: run(fa_hmc(inverse_mass_matrix=jnp.ones((2, 3)))), r"got \(2, 3\)"),
        (
            lambda: run(fa_hmc(inverse_mass_matrix=jnp.ones((2, 2)))),
            "symmetric and positive definite",
        ),
        (
            lambda: run(fa_hmc(control_variate=True, participation=fedmcmc.uniform(1))),
            "need the gradients of all clients",
        ),
        (
            lambda: fedmcmc.compress(
                fa_hmc(participation=fedmcmc.categorical(cohort_size=2)),
                fedmcmc.memory(fedmcmc.quantize(2), of="all"),
            ),
            "a client that is drawn twice moves its memory once",
        ),
        (
            lambda: run(averaging(estimator=fedmcmc.noisy(FULL, 1.0, weighted=True, weights=W3))),
            r"weights must have shape \(2,\)",
        ),
        (lambda: fedmcmc.noisy(FULL, 1.0, weights=W3), "weights only with weighted=True"),
        (
            lambda: run(fa_hmc(inverse_mass_matrix=jnp.ones(3))),
            r"inverse_mass_matrix must be shaped as the position, \(2,\), or be a matrix \(2, 2\)",
        ),
        (lambda: run(fa_hmc(inverse_mass_matrix=jnp.eye(3))), r"got \(3, 3\)"),
        (
            lambda: run(averaging(estimator=fedmcmc.scaffold(fedmcmc.full_gradient(), shares=W3))),
            r"shares must have shape \(2,\)",
        ),
        (
            lambda: fedmcmc.scaffold(fedmcmc.scaffold(fedmcmc.full_gradient())),
            "goes around an estimator that is not itself relative",
        ),
        (
            lambda: run(
                fedmcmc.langevin(
                    POSTERIOR, fedmcmc.scaffold(fedmcmc.full_gradient()), step_size=0.1
                )
            ),
            "needs the sum of all clients' gradients before each round",
        ),
        (lambda: fedmcmc.categorical(cohort_size=0), "positive integer cohort_size, got 0"),
    ],
)
def test_values_say_what_is_expected(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: averaging(integrator=fedmcmc.leapfrog), "integrator must be a fedmcmc.Integrator"),
        (lambda: averaging(momentum=0.5), "momentum must be a fedmcmc.Momentum, got float"),
        (lambda: averaging(estimator=5), "estimator must be a fedmcmc.GradientEstimator"),
    ],
)
def test_types_say_what_is_expected(call, message):
    with pytest.raises(TypeError, match=message):
        call()


def test_a_step_that_diverges_loses_nothing():
    with pytest.raises(fedmcmc.NonFiniteError, match="step size is too large") as caught:
        run(fa_hmc(step_size=5.0, num_integration_steps=8), num_rounds=200)
    assert caught.value.samples.num_draws == caught.value.round > 0
    assert np.isfinite(caught.value.samples.draws).all()


def test_half_kicks_take_the_matrix_of_the_trajectory():
    moved = integrators.half_kick(jnp.zeros(2), jnp.ones(2), 0.5, jnp.array([1.0, 4.0]))
    np.testing.assert_allclose(moved, [0.25, 1.0])
