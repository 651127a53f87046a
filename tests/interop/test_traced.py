"""Models are traced once and solve small triangular systems by plain arithmetic."""

import itertools
import os
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import stats

import fedmcmc
from fedmcmc.interop import _traced

SIZES = (1, 2, 9)


def draw_matrices(size, seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=(3, size, size)) + 4 * np.eye(size), jnp.float32)


@pytest.mark.parametrize("size", SIZES)
def test_factors_and_solves_equal_those_of_jax(size):
    matrix = draw_matrices(size)
    symmetric = matrix @ jnp.swapaxes(matrix, -1, -2)
    np.testing.assert_allclose(
        _traced.cholesky(symmetric), jnp.linalg.cholesky(symmetric), rtol=2e-4, atol=2e-4
    )
    rng = np.random.default_rng(1)
    for left_side, lower, transpose_a, unit in itertools.product([True, False], repeat=4):
        shape = (3, size, 4) if left_side else (3, 4, size)
        right = jnp.asarray(rng.normal(size=shape), jnp.float32)
        how = dict(left_side=left_side, lower=lower, transpose_a=transpose_a, unit_diagonal=unit)
        triangle = matrix / 8 if unit else matrix
        actual = _traced.triangular_solve(triangle, right, **how)
        expected = jax.lax.linalg.triangular_solve(triangle, right, **how)
        np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-4)


def test_factor_of_an_indefinite_matrix_is_nan():
    matrix = jnp.array([[1.0, 2.0], [2.0, 1.0]])
    assert np.isnan(_traced.cholesky(matrix)).all()


def loops(matrix, x):
    factor = jnp.linalg.cholesky(matrix)

    def solve(x):
        return jax.scipy.linalg.solve_triangular(factor, x, lower=True)

    scanned = jax.lax.scan(lambda x, _: (solve(x), x.sum()), x, None, length=2)
    chosen = jax.lax.cond(x[0] > 0, solve, lambda x: 2 * x, x)
    rematerialized = jax.checkpoint(solve)(x)
    outside_loops = jnp.linalg.solve(matrix, x), jnp.linalg.inv(matrix), jax.nn.softplus(x)
    return scanned, chosen, rematerialized, outside_loops


def test_loops_and_branches_are_written_out():
    matrix = draw_matrices(3)
    symmetric, x = matrix @ jnp.swapaxes(matrix, -1, -2), jnp.ones((3, 3), jnp.float32)
    once = _traced.traced_once(loops)
    assert "triangular_solve[" not in str(jax.make_jaxpr(once)(symmetric[0], x[0]))
    actual, expected = jax.vmap(once)(symmetric, x), jax.vmap(loops)(symmetric, x)
    chex.assert_trees_all_close(actual, expected, rtol=2e-3, atol=1e-4)


def test_function_is_called_once_per_shape():
    calls = []

    @_traced.traced_once
    def fn(tree):
        calls.append(1)
        return {"sum": tree["x"].sum() * 2.0}

    for _ in range(2):
        assert fn({"x": np.ones(3, np.float32)})["sum"] == 6
        assert jax.jit(jax.vmap(fn))({"x": jnp.ones((2, 3))})["sum"].tolist() == [6, 6]
        assert jax.grad(lambda x: fn({"x": x})["sum"])(jnp.ones(3)).tolist() == [2, 2, 2]
    assert len(calls) == 1
    assert fn({"x": np.ones(4, np.float32)})["sum"] == 8 and len(calls) == 2


def slopes(x, y=None):
    """Random intercept and slope, correlated."""
    mu = numpyro.sample("mu", dist.Normal(0, 2).expand([2]).to_event(1))
    tau = numpyro.sample("tau", dist.HalfNormal(1.0).expand([2]).to_event(1))
    factor = numpyro.sample("factor", dist.LKJCholesky(2, 2.0))
    effect = numpyro.sample(
        "effect",
        dist.MultivariateNormal(mu, scale_tril=tau[:, None] * factor),
        infer={"local": True},
    )
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Normal(effect[0] + effect[1] * x, 1.0), obs=y)


ROWS = {"x": np.array([-1.0, 0.0, 2.0], np.float32), "y": np.array([1.0, 0.5, 0.0], np.float32)}


def test_random_slopes_have_their_density():
    local = fedmcmc.from_numpyro(slopes, example=ROWS, check_rows=False).local
    position = {"mu": np.array([0.3, -0.2]), "tau": np.zeros(2), "factor": np.array([0.4])}
    position = jax.tree.map(lambda leaf: leaf.astype(np.float32), position)
    effect = {"effect": np.array([1.0, 0.5], np.float32)}
    correlation = np.tanh(0.4)
    expected = stats.multivariate_normal([0.3, -0.2], [[1, correlation], [correlation, 1]])
    actual = local.logprior_fn(position, effect)
    np.testing.assert_allclose(actual, expected.logpdf([1.0, 0.5]), rtol=1e-5)
    program = str(jax.make_jaxpr(jax.grad(local.logprior_fn, 1))(position, effect))
    assert "triangular_solve" not in program and "cholesky" not in program


ON_TWO_CORES = """
import os
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
import jax, jax.numpy as jnp, numpy as np
import fedmcmc
from tests.interop.test_traced import ROWS, slopes
local = fedmcmc.from_numpyro(slopes, example=ROWS, check_rows=False).local
position = {"mu": jnp.zeros(2), "tau": jnp.zeros(2), "factor": jnp.zeros(1)}
batch = jax.random.normal(jax.random.key(0), (32, 100_000, 2))
density = jax.vmap(lambda effect, scale: local.logprior_fn(
    {**position, "tau": jnp.stack([scale, scale])}, {"effect": effect}))
total = jax.jit(lambda batch, scale: [density(effect, scale) for effect in batch])
actual = total(batch, jnp.zeros(100_000))
expected = -np.log(2 * np.pi) - 0.5 * (np.asarray(batch) ** 2).sum(-1)
np.testing.assert_allclose(np.array(actual), expected, rtol=1e-3, atol=1e-3)
print("done")
"""
"""Many independent solves of batches in one program, which jaxlib up to 0.11.0 never finishes."""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores can be chosen on Linux")
def test_many_solves_end_on_two_cores():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(["", *sys.path])}
    run = subprocess.run(
        [sys.executable, "-c", ON_TWO_CORES],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    assert run.stdout.strip().endswith("done"), run.stderr
