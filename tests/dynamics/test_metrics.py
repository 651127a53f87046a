"""A metric ``C C'`` is the same kernel on the model in coordinates ``inverse(C) position``."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from tests.support.lanes import fast_and_slow

KEY = jax.random.key(2)
DENSE = np.array([[0.04, 0.03, 0.0], [0.03, 0.5, -0.1], [0.0, -0.1, 1.0]], np.float32)
METRICS = {"dense": DENSE, "diagonal": np.diag(DENSE)}
ROWS = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32) * [3.0, 1.0, 0.5] + 0.5
DATA = fedmcmc.FederatedData.from_clients([r.astype(np.float32) for r in np.split(ROWS, [2, 5, 6])])
SURROGATES = fedmcmc.Gaussian.from_moments(
    jnp.asarray(np.random.default_rng(1).normal(size=(4, 3)), jnp.float32),
    covariance=jnp.stack([jnp.eye(3) * s for s in (0.5, 0.3, 1.0, 0.2)]),
)


def logprior(theta):
    return -0.5 * jnp.sum(theta**2) - jnp.sum(jnp.log(jnp.cosh(theta)))


def loglikelihood(theta, rows):
    return -jnp.sum(jnp.log(jnp.cosh(rows - theta)), axis=-1)  # not a Gaussian


POSTERIOR = fedmcmc.Posterior(logprior, loglikelihood)


def root(name):
    metric = METRICS[name]
    return np.linalg.cholesky(metric) if metric.ndim == 2 else np.diag(np.sqrt(metric))


def in_coordinates(name):
    """Return the model and its surrogates in coordinates ``inverse(C) position``."""
    c = jnp.asarray(root(name), jnp.float32)
    posterior = fedmcmc.Posterior(
        lambda z: logprior(c @ z), lambda z, rows: loglikelihood(c @ z, rows)
    )
    shaped = fedmcmc.Gaussian(
        SURROGATES.precision_mean @ c, c.T @ SURROGATES.precision @ c, "dense"
    )
    return posterior, shaped


TRAJECTORY = dict(num_integration_steps=3, num_local_steps=2, rho=0.5)
KERNELS = {
    "lsd": lambda p, q, **metric: fedmcmc.lsd(p, step_size=0.1, batch_size=1, **metric),
    "lsd_pp": lambda p, q, **metric: fedmcmc.lsd_pp(
        p,
        step_size=0.1,
        batch_size=1,
        refresh_every=3,
        participation=fedmcmc.bernoulli(0.6),
        **metric,
    ),
    "dsgld": lambda p, q, **metric: fedmcmc.dsgld(p, step_size=0.01, num_local_steps=3, **metric),
    "fsgld": lambda p, q, **metric: fedmcmc.fsgld(
        p, q, step_size=0.01, num_local_steps=3, temperature=0.7, **metric
    ),
    "fa_ld": lambda p, q, **metric: fedmcmc.fa_ld(
        p, step_size=0.02, num_local_steps=3, rho=0.5, **metric
    ),
    "fa_hmc": lambda p, q, metric=None: fedmcmc.fa_hmc(
        p, step_size=0.1, inverse_mass_matrix=metric, **TRAJECTORY
    ),
}


def path(kernel, position):
    init, step = fedmcmc.simulate(kernel, DATA)
    step, state, positions = jax.jit(step), init(jnp.asarray(position, jnp.float32)), []
    for _ in range(12):
        state, _ = step(KEY, state)
        positions.append(state.broadcast.position)
    return np.asarray(positions, np.float64)


@pytest.mark.parametrize("metric", fast_and_slow(METRICS, ["dense"]))
@pytest.mark.parametrize("name", fast_and_slow(KERNELS, ["lsd"]))
def test_a_metric_and_transformed_coordinates_give_the_same_path(name, metric):
    c, start = root(metric), np.array([0.3, -0.2, 0.1])
    build, matrix = KERNELS[name], jnp.asarray(METRICS[metric])
    actual = path(build(POSTERIOR, SURROGATES, metric=matrix), start)
    transformed = path(build(*in_coordinates(metric)), np.linalg.solve(c, start)) @ c.T
    np.testing.assert_allclose(actual, transformed, rtol=2e-4, atol=2e-4)
    plain = path(build(POSTERIOR, SURROGATES), start)
    assert np.abs(actual - plain).max() > 0.05


def test_compressed_messages_and_a_metric_compose():
    kernel = fedmcmc.qlsd(
        POSTERIOR, step_size=0.1, compressor=fedmcmc.quantize(4), metric=jnp.asarray(DENSE)
    )
    assert np.isfinite(path(kernel, np.zeros(3))).all()


@pytest.mark.slow
def test_whitening_gives_the_metric():
    for structure, shape in (("dense", (3, 3)), ("diagonal", (3,))):
        white = fedmcmc.whiten(POSTERIOR, DATA, jnp.zeros(3), structure=structure)
        factor = np.asarray(white.posterior.position_fn.factor, np.float64)
        square = factor @ factor.T if factor.ndim == 2 else factor**2
        assert white.metric.shape == shape
        np.testing.assert_allclose(white.metric, square, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (jnp.array([1.0, 0.0, 1.0]), "metric must be positive in every coordinate"),
        (jnp.ones((3, 3)), "metric must be symmetric and positive definite"),
        (jnp.ones(2), r"metric must be shaped as the position, \(3,\), or be a matrix \(3, 3\)"),
    ],
)
@pytest.mark.parametrize("name", ["lsd", "fsgld", "fa_ld"])
def test_an_unsuitable_metric_is_named(name, metric, message):
    with pytest.raises(ValueError, match=message):
        KERNELS[name](POSTERIOR, SURROGATES, metric=metric).init(KEY, jnp.zeros(3), DATA)


def test_a_metric_and_a_preconditioner_exclude_each_other():
    with pytest.raises(ValueError, match="preconditioner= or metric="):
        fedmcmc.langevin(
            POSTERIOR,
            fedmcmc.full_gradient(),
            step_size=0.1,
            metric=jnp.ones(3),
            preconditioner=fedmcmc.dynamics.preconditioners.rms(),
        )
