"""Bad input of FA-LD, FA-HMC and their blocks: one message, before anything is compiled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc.dynamics import Metric
from fedmcmc.tuning import proposition_step_size

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
        estimator=fedmcmc.full_gradient(), integrator=fedmcmc.dynamics.leapfrog(2), step_size=0.1
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
        (lambda: fa_hmc(rho=-0.1), r"rho must be in \[0, 1\], got -0.1"),
        (lambda: fa_hmc(gradient_noise=-1.0), "gradient_noise must be a finite number at least 0"),
        (lambda: fa_hmc(temperature=-1.0), "temperature must be a finite number at least 0"),
        (lambda: fa_hmc(weights=[0.5, 0.6]), "weights must be positive and sum to one.*1.1"),
        (lambda: fa_hmc(weights=[1.5, -0.5]), "smallest entry of -0.5"),
        (lambda: fa_hmc(weights=0.5), r"weights must have shape \[num_clients\], got shape \(\)"),
        (lambda: run(fa_hmc(weights=[0.5, 0.3, 0.2])), r"must have shape \(2,\), one per client"),
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
            "a client that is drawn twice updates its memory once",
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
            "needs an estimator that does not itself need a sum",
        ),
        (
            lambda: run(
                fedmcmc.langevin(
                    POSTERIOR, fedmcmc.scaffold(fedmcmc.full_gradient()), step_size=0.1
                )
            ),
            "needs the sum of all clients' gradients before each round",
        ),
        (
            lambda: run(
                fedmcmc.consensus(
                    POSTERIOR,
                    fedmcmc.scaffold(fedmcmc.full_gradient()),
                    step_size=0.1,
                    num_local_steps=1,
                    tolerance=0.1,
                )
            ),
            "needs the sum of all clients' gradients before each round",
        ),
        (lambda: fedmcmc.categorical(cohort_size=0), "must be a positive integer, got 0"),
    ],
)
def test_values_say_what_is_expected(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: averaging(integrator=fedmcmc.dynamics.leapfrog),
            "integrator must be a fedmcmc.dynamics.Integrator",
        ),
        (
            lambda: averaging(momentum=0.5),
            "momentum must be a fedmcmc.dynamics.Momentum, got float",
        ),
        (lambda: averaging(estimator=5), "estimator must be a fedmcmc.types.GradientEstimator"),
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


def test_kicks_take_the_matrix_of_the_trajectory():
    kick = Metric.of(jnp.array([1.0, 4.0])).times(jnp.ones(2))
    np.testing.assert_allclose(kick, [1.0, 4.0])


def test_schedules_are_checked_where_they_are_used():
    data = fedmcmc.FederatedData.from_clients([jnp.ones((3, 2)), jnp.zeros((2, 2))])
    for settings, match in (
        (
            dict(step_size=lambda r: 0.1 - 0.05 * r),
            r"step_size must be .* above 0, got 0 in round 2",
        ),
        (
            dict(step_size=0.1, rho=lambda r: 1.5 + 0 * r),
            r"rho must be in \[0, 1\], got 1.5 in round 0",
        ),
    ):
        kernel = fedmcmc.fa_hmc(POSTERIOR, num_integration_steps=2, num_local_steps=1, **settings)
        run = dict(num_rounds=5, progress=False)
        with pytest.raises(ValueError, match=match):
            fedmcmc.sample(jax.random.key(0), kernel, data, jnp.zeros(2), **run)
    # Values behind the last round do not count.
    kernel = fedmcmc.fa_hmc(
        POSTERIOR, step_size=lambda r: 0.1 - 0.02 * r, num_integration_steps=2, num_local_steps=1
    )
    fedmcmc.sample(jax.random.key(0), kernel, data, jnp.zeros(2), num_rounds=5, progress=False)


def test_a_schedule_needs_no_values_for_rounds_that_are_over():
    first = fedmcmc.lsd(POSTERIOR, step_size=0.01)
    then = fedmcmc.lsd(POSTERIOR, step_size=lambda r: 0.05 / r)
    settings = dict(num_rounds=3, progress=False)
    before = fedmcmc.sample(jax.random.key(0), first, DATA, jnp.zeros(2), **settings)
    more = fedmcmc.sample(jax.random.key(0), then, DATA, state=before.state, **settings)
    assert int(more.state.broadcast.round[0]) == 6
    with pytest.raises(ValueError, match="got inf in round 0"):
        fedmcmc.sample(jax.random.key(0), then, DATA, jnp.zeros(2), **settings)


def test_weights_are_checked_also_where_a_kernel_is_built_in_compiled_code():
    data = fedmcmc.FederatedData.from_clients([jnp.ones((3, 2)), jnp.zeros((2, 2))])

    @jax.jit
    def build(weights):
        return fedmcmc.fa_ld(POSTERIOR, step_size=0.1, num_local_steps=1, weights=weights)

    with pytest.raises(ValueError, match=r"weights must .* got a sum of 1\.1"):
        fedmcmc.simulate(build(jnp.array([0.5, 0.6])), data).init(jnp.zeros(2))


def test_a_word_is_no_choice_of_control_variates():
    with pytest.raises(TypeError, match="control_variate must be True or False, got 'no'"):
        fedmcmc.fa_ld(POSTERIOR, step_size=0.1, num_local_steps=1, control_variate="no")


def test_a_prediction_names_coordinates_and_what_it_leaves_out():
    data = fedmcmc.FederatedData.from_clients([jnp.ones((3, 2)), jnp.zeros((2, 2))])
    posterior = fedmcmc.Posterior(
        lambda theta: -0.5 * (theta["a"] ** 2 + jnp.sum(theta["b"] ** 2)),
        lambda theta, x: -0.5 * (x[:, 0] - theta["a"] - theta["b"][1]) ** 2,
    )
    kernel = fedmcmc.fa_ld(posterior, step_size=0.01, num_local_steps=4)
    mean = {"a": jnp.zeros(2), "b": jnp.array([[0.0, 1.0], [0.0, -1.0]])}
    variance = {"a": jnp.array([1.0, 0.2]), "b": jnp.array([[1.0, 0.1], [1.0, 0.7]])}
    q = fedmcmc.Gaussian.from_moments(mean, variance=variance)
    prediction = fedmcmc.predict_bias(kernel, data, q)
    assert prediction.names == ("a", "b[0]", "b[1]")
    assert "(b[1])" in str(prediction) and "exact gradients" in str(prediction)
    with pytest.raises(TypeError, match="takes a FederatedKernel, a FederatedData"):
        fedmcmc.predict_bias(data, kernel, q)


def test_a_step_size_is_suggested_from_what_was_estimated():
    settings = dict(dimension=4, num_integration_steps=3, num_local_steps=2)
    estimated = fedmcmc.tuning.Smoothness(3.0, 0.5)
    assert proposition_step_size(estimated, **settings) == proposition_step_size(3.0, **settings)
