"""Leapfrog trajectories with a metric, and momenta that clients share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc.dynamics import Metric
from fedmcmc.pytrees import trees
from tests.oracles.federations import LIMIT, z_scores
from tests.support.lanes import fast_and_slow

DENSE = np.array([[1.2, 0.3, 0.0], [0.3, 0.8, -0.2], [0.0, -0.2, 0.5]])
INVERSE_MASSES = {"identity": None, "diagonal": np.diag(DENSE), "dense": DENSE}


def quartic(position):
    """Return the gradient of minus ``sum(x^4) / 4 + |x|^2 / 2`` with a coupling."""
    return -(position**3) - position - 0.3 * jnp.roll(position, 1) - 0.3 * jnp.roll(position, -1)


def energy(position, momentum, inverse_mass):
    coupling = 0.3 * jnp.sum(position * jnp.roll(position, 1))
    potential = jnp.sum(position**4) / 4 + jnp.sum(position**2) / 2 + coupling
    return potential + momentum @ (inverse_mass @ momentum) / 2


def textbook(position, momentum, inverse_mass, step_size, num_steps):
    for _ in range(num_steps):
        momentum = momentum + step_size / 2 * quartic(position)
        position = position + step_size * inverse_mass @ momentum
        momentum = momentum + step_size / 2 * quartic(position)
    return position, momentum


def flow(inverse_mass, num_steps):
    """Return the map ``(position, momentum, step_size) -> (position, momentum)``."""
    steps = fedmcmc.dynamics.leapfrog(num_steps, inverse_mass_matrix=inverse_mass)
    matrix = np.eye(3) if inverse_mass is None else np.asarray(inverse_mass)
    matrix = np.diag(matrix) if matrix.ndim == 1 else matrix
    root = np.linalg.cholesky(matrix)

    @jax.jit
    def move(position, momentum, step_size):
        # The velocity is root @ noise, and the momentum is the mass times the velocity.
        noise = jnp.linalg.solve(root, matrix @ momentum)
        position, velocity, _ = steps.move(
            lambda _, x: quartic(x), (), position, noise, jnp.asarray(step_size)
        )
        # A trajectory leaves out the half kick after its last drift.
        kick = Metric.of(inverse_mass).times(quartic(position))
        velocity = velocity + jnp.asarray(step_size) / 2 * kick
        return position, jnp.linalg.solve(matrix, velocity)

    return move, matrix


@pytest.mark.parametrize("name", fast_and_slow(INVERSE_MASSES, ["dense"]))
def test_i33_leapfrog_is_the_reversible_textbook_loop_that_keeps_volume(name):
    with jax.enable_x64(True):
        position, momentum = jnp.array([0.5, -0.3, 0.8]), jnp.array([0.2, 1.0, -0.4])
        move, inverse_mass = flow(INVERSE_MASSES[name], 7)
        end = move(position, momentum, 0.1)
        for actual, expected in zip(
            end, textbook(position, momentum, inverse_mass, 0.1, 7), strict=True
        ):
            np.testing.assert_allclose(actual, expected, atol=1e-12)
        back = move(end[0], -end[1], 0.1)
        np.testing.assert_allclose(back[0], position, atol=1e-12)
        np.testing.assert_allclose(back[1], -momentum, atol=1e-12)
        jacobian = jax.jacfwd(lambda z: jnp.concatenate(move(z[:3], z[3:], 0.1)))(
            jnp.concatenate([position, momentum])
        )
        np.testing.assert_allclose(np.linalg.det(jacobian), 1.0, atol=1e-10)
        before = energy(position, momentum, inverse_mass)
        errors = []
        for num_steps in (35, 70):
            move, _ = flow(INVERSE_MASSES[name], num_steps)
            after = energy(*move(position, momentum, 0.7 / num_steps), inverse_mass)
            errors.append(abs(float(after - before)))
        assert 3.5 < errors[0] / errors[1] < 4.5  # second order


@pytest.mark.parametrize("rho", [0.0, 0.35, 1.0])
def test_i32_momenta_have_the_stated_covariances(rho):
    momentum = fedmcmc.dynamics.shared_momentum(rho)
    weights = np.array([0.5, 0.2, 0.3])
    num, like, key = 40000, jnp.zeros(2), jax.random.key(5)
    shared = momentum.prepare_shared(jax.random.fold_in(key, 9), like, num)
    combine = jax.vmap(momentum.combine, in_axes=(0, 0, None, None, None))
    momenta = [
        combine(
            momentum.prepare(jax.random.fold_in(key, i), like, num),
            shared,
            jnp.float32(weights[i]),
            momentum.correlation(0),
            like,
        )
        for i in range(3)
    ]
    momenta = np.asarray(jnp.stack(momenta, 1), float)[..., 0]  # [num, clients]
    expected = rho + (1 - rho) * np.diag(1 / weights)
    products = momenta[:, :, None] * momenta[:, None, :]
    assert np.abs(z_scores(products, expected)).max() < LIMIT
    assert abs(z_scores((momenta @ weights) ** 2, 1.0)) < LIMIT


MATRIX = np.array([[2.0, 0.5], [3.0, 1.0]])
NESTED = {"a": jnp.array(2.0), "b": jnp.array([0.5, 3.0, 1.0])}


@pytest.mark.parametrize(
    ("like", "diagonal"),
    [
        (jnp.zeros((2, 2)), MATRIX),
        (jnp.zeros((2, 2), jnp.bfloat16), MATRIX),
        ({"a": jnp.zeros(()), "b": jnp.zeros(3)}, NESTED),
    ],
)
def test_a_metric_has_the_structure_and_the_dtype_of_the_position(like, diagonal):
    ones = jax.tree.map(jnp.ones_like, like)
    for matrix in (diagonal, np.diag([2.0, 0.5, 3.0, 1.0])):
        metric = Metric.of(matrix)
        metric.check(like)
        for actual, power in ((metric.times(ones), 1), (metric.root_times(ones), 0.5)):
            assert trees.shapes_of(actual) == trees.shapes_of(like)
            expected = np.array([2.0, 0.5, 3.0, 1.0]) ** power
            np.testing.assert_allclose(trees.ravel(actual).astype(float), expected, rtol=1e-2)
