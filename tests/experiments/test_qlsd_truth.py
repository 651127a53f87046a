"""Ground truths: MALA leaves its target as it is, is tuned, and refuses what did not converge."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from experiments.qlsd import federations, logistic, reference, truth

KEY = jax.random.key(11)
COVARIANCE = np.array([[1.0, 0.8, 0.0], [0.8, 1.5, -0.3], [0.0, -0.3, 0.5]])
MEAN = np.array([1.0, -2.0, 0.5])
NUM_CHAINS = 20_000


def potential(theta):
    return 0.5 * (theta - MEAN) @ jnp.linalg.inv(jnp.asarray(COVARIANCE)) @ (theta - MEAN)


def exact_draws(num, seed=0):
    """Standard normals that the target's Cholesky factor turns into draws."""
    noise = np.random.default_rng(seed).standard_normal((num, 3))
    return MEAN + noise @ np.linalg.cholesky(COVARIANCE).T


def worst_z(draws, mean, covariance):
    """Return the largest z-score of means and covariances of independent Gaussian draws."""
    num = len(draws)
    centred = draws - mean
    means = centred.mean(axis=0) / np.sqrt(np.diag(covariance) / num)
    variance = np.outer(np.diag(covariance), np.diag(covariance)) + covariance**2
    spread = (centred.T @ centred / num - covariance) / np.sqrt(variance / num)
    return max(np.abs(means).max(), np.abs(spread).max())


def numpy_mala(start, step_size, num_steps, *, old_gradient):
    """Take MALA steps of all chains at once; with the notebooks' bug if `old_gradient`.

    The bug: the reverse proposal's density is taken with the gradient at the old position.
    """
    rng, precision = np.random.default_rng(5), np.linalg.inv(COVARIANCE)

    def value_and_gradient(x):
        gradient = (x - MEAN) @ precision
        return 0.5 * (gradient * (x - MEAN)).sum(1), gradient

    x = start
    for _ in range(num_steps):
        value, gradient = value_and_gradient(x)
        noise = rng.standard_normal(x.shape)
        y = x - step_size * gradient + np.sqrt(2 * step_size) * noise
        value_y, gradient_y = value_and_gradient(y)
        back = x - y + step_size * (gradient if old_gradient else gradient_y)
        log_ratio = value - value_y + (noise**2).sum(1) / 2 - (back**2).sum(1) / (4 * step_size)
        accepted = np.log(rng.uniform(size=len(x))) < log_ratio
        x = np.where(accepted[:, None], y, x)
    return x


def test_mala_leaves_a_correlated_gaussian_as_it_is():
    start = exact_draws(NUM_CHAINS)
    found = truth.mala(
        KEY,
        potential,
        jnp.asarray(start, jnp.float32),
        step_size=0.4,
        num_warmup=0,
        num_draws=4,
        thinning=6,
    )
    last = found.draws[:, -1].astype(float)
    assert worst_z(start, MEAN, COVARIANCE) < 4.5
    assert worst_z(last, MEAN, COVARIANCE) < 4.5
    assert found.step_size == pytest.approx(0.4) and 0.4 < found.acceptance < 0.8
    moved = np.abs(np.diff(found.draws, axis=1)).max(axis=2) > 0
    assert moved.mean() > 0.95
    np.testing.assert_allclose(found.potential[:, -1], jax.vmap(potential)(last), atol=1e-4)


def test_the_notebooks_bug_would_be_seen():
    start = exact_draws(NUM_CHAINS)
    right = numpy_mala(start, 0.4, 24, old_gradient=False)
    wrong = numpy_mala(start, 0.4, 24, old_gradient=True)
    assert worst_z(right, MEAN, COVARIANCE) < 4.5 < 15 < worst_z(wrong, MEAN, COVARIANCE)


def cholesky():
    return jnp.asarray(np.linalg.cholesky(COVARIANCE), jnp.float32)


def slowly(name):
    return pytest.param(name, marks=pytest.mark.slow)


@pytest.mark.parametrize("scale", ["dense", slowly("none"), slowly("diagonal")])
def test_mala_is_tuned_and_scaled(scale):
    matrix = {"dense": cholesky(), "diagonal": jnp.asarray([1.0, 1.2, 0.7])}.get(scale)
    found = truth.mala(
        KEY,
        potential,
        jnp.zeros((40, 3)),
        step_size=1e-3,
        num_warmup=400,
        num_draws=800,
        thinning=3,
        scale=matrix,
    )
    assert abs(found.acceptance - truth.MALA_ACCEPTANCE) < 0.03
    assert found.draws.shape == (40, 800, 3) and found.potential.shape == (40, 800)
    chain_means = found.draws.astype(float).mean(axis=1)
    error = chain_means.std(axis=0, ddof=1) / np.sqrt(40)
    assert np.abs((chain_means.mean(axis=0) - MEAN) / error).max() < 5
    squares = ((found.draws - MEAN) ** 2).astype(float).mean(axis=1)
    error = squares.std(axis=0, ddof=1) / np.sqrt(40)
    assert np.abs((squares.mean(axis=0) - np.diag(COVARIANCE)) / error).max() < 5
    assert truth.require_converged(found) is found
    assert found.summary()["ess"] == found.ess > 400 and found.num_checked == 3


@pytest.mark.slow
def test_a_badly_scaled_target_is_refused_without_the_scale():
    deviations = np.array([1.0, 100.0])
    start = np.random.default_rng(1).standard_normal((10, 2)) * deviations
    arguments = dict(step_size=0.1, num_warmup=200, num_draws=1000)

    def stretched(theta):
        return 0.5 * jnp.sum((theta / deviations) ** 2)

    plain = truth.mala(KEY, stretched, jnp.asarray(start, jnp.float32), **arguments)
    scaled = truth.mala(
        KEY,
        stretched,
        jnp.asarray(start, jnp.float32),
        scale=truth.laplace_scale(stretched, jnp.zeros(2)),
        **arguments,
    )
    assert scaled.ess > 1000 > plain.ess
    with pytest.raises(truth.NotConverged, match=r"no ground truth: R-hat \d"):
        truth.require_converged(plain)


def test_positions_may_be_trees_and_what_is_kept_is_free():
    def tree_potential(tree):
        return potential(jnp.concatenate([tree["a"], tree["b"][None]]))

    def collect(tree):
        return tree | {"sum": jnp.sum(tree["a"]) + tree["b"]}

    positions = {"a": jnp.zeros((6, 2)), "b": jnp.zeros(6)}
    arguments = dict(step_size=0.3, num_warmup=20, num_draws=8, collect=collect)
    draws, values, *_ = truth.mala(KEY, tree_potential, positions, **arguments)
    assert draws["a"].shape == (6, 8, 2) and draws["b"].shape == draws["sum"].shape == (6, 8)
    flat = np.concatenate([draws["a"], draws["b"][..., None]], axis=-1)
    np.testing.assert_allclose(draws["sum"], flat.sum(axis=-1), atol=1e-5)
    np.testing.assert_allclose(values, jax.vmap(jax.vmap(potential))(flat), atol=1e-4)


def test_diagnostics_are_of_the_potential_and_of_coordinates():
    rng = np.random.default_rng(2)
    draws, values = rng.normal(size=(4, 200, 300)), rng.normal(size=(4, 200))
    found = reference.diagnosed(draws, values, 0.5, 0.1)
    assert found.num_checked == 256 and found.rhat < 1.05 and 400 < found.ess < 1000
    one = reference.diagnosed({"a": draws[..., :1]}, values + np.arange(4)[:, None], 0.5, 0.1)
    assert one.num_checked == 1 and one.rhat > 1.2 and one.ess < 20  # chains disagree about U
    few = reference.diagnosed(draws[..., :5], values, 0.5, 0.1)
    moved = draws[..., :5] + np.array([0, 0, 0, 0, 3]) * np.arange(4)[:, None, None]
    apart = reference.diagnosed(moved, values, 0.5, 0.1)
    assert few.rhat < 1.03 < 1.5 < apart.rhat


def test_what_is_stuck_or_apart_is_refused():
    good = truth.Reference(np.zeros((2, 4)), np.zeros((2, 4)), 0.6, 0.1, 1.001, 900.0, 1)
    assert truth.require_converged(good) is good
    for bad in (dict(rhat=1.02), dict(ess=399.0), dict(rhat=np.nan), dict(num_divergent=1)):
        with pytest.raises(truth.NotConverged, match="no ground truth"):
            truth.require_converged(good._replace(**bad))
    truth.require_converged(good._replace(rhat=1.02), max_rhat=1.05)
    stuck = reference.diagnosed(np.zeros((3, 500, 2)), np.zeros((3, 500)), 0.0, 0.1)
    with pytest.raises(truth.NotConverged, match="R-hat nan"):
        truth.require_converged(stuck)


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="two or more chains, got leading axes"):
        truth.mala(KEY, potential, jnp.zeros((1, 3)), step_size=0.1, num_warmup=0, num_draws=9)
    with pytest.raises(ValueError, match="two or more chains"):
        both = {"a": jnp.zeros((4, 2)), "b": jnp.zeros(3)}
        truth.nuts(KEY, potential, both, num_warmup=1, num_draws=9)
    with pytest.raises(ValueError, match="num_draws must be at least 4"):
        truth.nuts(KEY, potential, jnp.zeros((4, 3)), num_warmup=1, num_draws=2)
    with pytest.raises(ValueError, match="not positive definite"):
        truth.laplace_scale(lambda theta: -jnp.sum(theta**2), jnp.zeros(2))


def test_laplace_scale_squares_to_the_covariance():
    scale = truth.laplace_scale(potential, jnp.zeros(3))
    np.testing.assert_allclose(scale @ scale.T, COVARIANCE, atol=1e-5)
    tree = truth.laplace_scale(
        lambda t: potential(jnp.append(t["a"], t["b"])), {"a": jnp.zeros(2), "b": jnp.zeros(1)}
    )
    np.testing.assert_allclose(tree @ tree.T, COVARIANCE, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hmc", "nuts"])
def test_hamiltonian_chains_of_numpyro(name):
    start = jnp.asarray(exact_draws(50), jnp.float32)
    arguments = dict(num_warmup=100, num_draws=40, thinning=2)
    if name == "hmc":
        found = truth.hmc(KEY, potential, start, num_steps=7, **arguments)
    else:
        found = truth.nuts(KEY, potential, start, **arguments)
    assert found.draws.shape == (50, 40, 3) and found.num_divergent == 0
    values = jax.vmap(jax.vmap(potential))(jnp.asarray(found.draws))
    np.testing.assert_allclose(found.potential, values, atol=1e-4)
    chain_means = found.draws.astype(float).mean(axis=1)
    error = chain_means.std(axis=0, ddof=1) / np.sqrt(50)
    assert np.abs((chain_means.mean(axis=0) - MEAN) / error).max() < 5
    assert 0.6 < found.acceptance < 1


@pytest.mark.slow
def test_mala_and_nuts_agree_on_a_logistic_posterior():
    federation = federations.synthetic(dim=6)
    posterior = logistic.binary(6, prior_precision=1.0)
    potential_fn = logistic.potential_fn(posterior, federation.data)
    centre = fedmcmc.surrogates.mode(posterior, federation.data, jnp.zeros(6)).position
    scale = truth.laplace_scale(potential_fn, centre)
    start = centre + jax.random.normal(KEY, (8, 6)) @ scale.T
    one = truth.mala(
        KEY, potential_fn, start, step_size=0.5, num_warmup=500, num_draws=3000, scale=scale
    )
    other = truth.nuts(KEY, potential_fn, start, num_warmup=500, num_draws=2000)
    draws = []
    for found in map(truth.require_converged, (one, other)):
        # Eight chains: each gives one mean and one mean square, independent of the others'.
        moments = np.concatenate([found.draws, (found.draws - centre) ** 2], axis=-1)
        moments = np.append(moments, found.potential[..., None], axis=-1).astype(float)
        draws.append(moments.mean(axis=1))
    error = np.sqrt(sum(d.var(axis=0, ddof=1) / len(d) for d in draws))
    assert np.abs((draws[0].mean(axis=0) - draws[1].mean(axis=0)) / error).max() < 5.5
