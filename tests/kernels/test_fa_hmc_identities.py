"""Identities of FA-LD and FA-HMC, and of their blocks.

Two programs of the same mathematics differ by rounding; runs of one program must not differ.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc.dynamics import Metric
from fedmcmc.participation import pooled
from fedmcmc.pytrees import trees
from tests.oracles.federations import LIMIT, z_scores
from tests.oracles.federations_averaging import FEDERATION, SHARES
from tests.support.lanes import fast_and_slow

DATA = FEDERATION.data
START = jnp.asarray(FEDERATION.start)
KEY = jax.random.key(5)
ETA = 0.05
SAME = dict(rtol=2e-5, atol=2e-5)


def run(kernel, data=DATA, *, num_rounds=6, num_chains=2, **kwargs):
    return fedmcmc.sample(
        KEY,
        kernel,
        data,
        START,
        num_rounds=num_rounds,
        num_chains=num_chains,
        progress=False,
        **kwargs,
    )


def fa_hmc(step_size=ETA, **kwargs):
    settings = dict(num_integration_steps=4, num_local_steps=3) | kwargs
    return fedmcmc.fa_hmc(FEDERATION.posterior, step_size=step_size, **settings)


def gradients_of(precisions, means, position, weights):
    """Return the gradient of minus every client's weighted loss, ``[b, d]``, in NumPy."""
    prior = FEDERATION.prior_precision @ (FEDERATION.prior_mean - position)
    return prior + np.einsum("cij,cj->ci", precisions, means - position) / weights[:, None]


def posterior_gradient(position):
    return gradients_of(FEDERATION.precisions, FEDERATION.means, position, SHARES).T @ SHARES


def key_of(round_, number, chain=0):
    key = jax.random.fold_in(jax.random.fold_in(KEY, chain), round_)
    return jax.random.fold_in(key, jnp.uint32(number))


def shared_normals(kernel, round_):
    """Return what all clients draw alike in a round, with the documented key."""
    like = fedmcmc.types.Broadcast(jnp.int32(0), START)
    return np.asarray(kernel.prepare_shared(key_of(round_, 2**32 - 4), like), float)


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [None, 2])
@pytest.mark.parametrize("gradients", ["fresh", "reuse"])
def test_i2_one_leapfrog_step_is_langevin_at_half_the_square(batch_size, gradients):
    settings = dict(num_local_steps=3, rho=0.4, batch_size=batch_size, gradient_noise=2.0)
    hmc = fa_hmc(**settings, num_integration_steps=1, gradients=gradients)
    ld = fedmcmc.fa_ld(FEDERATION.posterior, step_size=ETA**2 / 2, **settings)
    np.testing.assert_allclose(run(hmc).draws, run(ld).draws, **SAME)


@pytest.mark.parametrize("rho", fast_and_slow([1.0, 0.3], [0.3]))
def test_i3_one_client_runs_unadjusted_hmc(rho):
    """Any correlation: with one client of weight one the momentum is standard normal."""
    kernel = fa_hmc(rho=rho, participation=pooled())
    found = run(kernel, num_chains=1).draws[0]
    position = np.asarray(START, float)
    for round_, draw in enumerate(found):
        like = fedmcmc.types.Broadcast(jnp.int32(0), START)
        own = kernel.prepare(key_of(round_, 0), like, DATA.pooled().client(0)).momentum
        shared = shared_normals(kernel, round_)
        noise = np.sqrt(rho) * shared
        if rho < 1:
            noise = noise + np.sqrt(1 - rho) * np.asarray(own, float)
        for xi in noise:
            position = leapfrog_in_numpy(posterior_gradient, position, xi, ETA, 4)[0]
        np.testing.assert_allclose(draw, position, **SAME)


def test_i3_one_client_of_fa_ld_is_sgld():
    """The same law; pathwise, plain Langevin dynamics with the noise that the kernel drew."""
    kernel = fedmcmc.fa_ld(
        FEDERATION.posterior, step_size=0.004, num_local_steps=1, participation=pooled()
    )
    position = np.asarray(START, float)
    for round_, draw in enumerate(run(kernel, num_chains=1).draws[0]):
        xi = shared_normals(kernel, round_)[0]
        position = position + 0.004 * posterior_gradient(position) + np.sqrt(0.008) * xi
        np.testing.assert_allclose(draw, position, **SAME)


def leapfrog_in_numpy(gradient_fn, position, momentum, step_size, num_steps):
    for _ in range(num_steps):
        momentum = momentum + step_size / 2 * gradient_fn(position)
        position = position + step_size * momentum
        momentum = momentum + step_size / 2 * gradient_fn(position)
    return position, momentum


@pytest.mark.slow
def test_i4_clients_of_one_loss_stay_together_and_run_as_one_machine():
    """Equal clients with a common momentum: every local position is that of one machine."""
    tree = FEDERATION.client_trees()[0]
    data = fedmcmc.FederatedData.from_clients([tree, tree, tree])
    precision, mean = 3 * FEDERATION.precisions[0], FEDERATION.means[0]

    def gradient(position):
        prior = FEDERATION.prior_precision @ (FEDERATION.prior_mean - position)
        return prior + precision @ (mean - position)

    def every_local_position(state, info):
        return info.clients.local_positions

    kernel = fa_hmc(rho=1.0)
    found = run(kernel, data, num_chains=1, collect=every_local_position).draws[0]
    position = np.asarray(START, float)
    for round_, clients in enumerate(found):
        for t, xi in enumerate(shared_normals(kernel, round_)):
            position = leapfrog_in_numpy(gradient, position, xi, ETA, 4)[0]
            np.testing.assert_allclose(clients[:, t], np.tile(position, (3, 1)), **SAME)


@pytest.mark.slow
@pytest.mark.parametrize("rho", fast_and_slow((0.0, 0.6, 1.0), (0.6,)))
def test_i5_one_langevin_step_between_averages_moves_the_mean_by_one_langevin_step(rho):
    """The mean's noise is the weighted mean of the clients', which has covariance one."""
    kernel = fedmcmc.fa_ld(FEDERATION.posterior, step_size=0.004, num_local_steps=1, rho=rho)
    draws = run(kernel, num_rounds=1, num_chains=4096).draws[:, 0]
    start = np.asarray(START, float)
    noise = (draws - start - 0.004 * posterior_gradient(start)) / np.sqrt(0.008)
    assert np.abs(z_scores(noise, 0.0)).max() < LIMIT
    products = noise[:, :, None] * noise[:, None, :]
    assert np.abs(z_scores(products, np.eye(3))).max() < LIMIT


@pytest.mark.parametrize("rho", [0.0, 0.35, 1.0])
def test_i32_momenta_have_the_stated_covariances(rho):
    momentum = fedmcmc.dynamics.shared_momentum(rho)
    weights = jnp.array([0.5, 0.2, 0.3])
    num, like = 40000, jnp.zeros(2)
    shared = momentum.prepare_shared(jax.random.fold_in(KEY, 9), like, num)
    combine = jax.vmap(momentum.combine, in_axes=(0, 0, None, None, None))
    p = [
        combine(
            momentum.prepare(jax.random.fold_in(KEY, c), like, num),
            shared,
            weights[c],
            momentum.correlation(0),
            like,
        )
        for c in range(3)
    ]
    p = np.asarray(jnp.stack(p, 1), float)[..., 0]  # [num, clients]
    expected = rho + (1 - rho) * np.diag(1 / np.asarray(weights, float))
    products = p[:, :, None] * p[:, None, :]
    assert np.abs(z_scores(products, expected)).max() < LIMIT
    mean = p @ np.asarray(weights, float)
    assert abs(z_scores(mean**2, 1.0)) < LIMIT


def quartic(position):
    """Gradient of minus ``sum(x^4) / 4 + |x|^2 / 2`` with a coupling."""
    return -(position**3) - position - 0.3 * jnp.roll(position, 1) - 0.3 * jnp.roll(position, -1)


def energy(position, momentum, mass):
    coupling = 0.3 * jnp.sum(position * jnp.roll(position, 1))
    potential = jnp.sum(position**4) / 4 + jnp.sum(position**2) / 2 + coupling
    return potential + momentum @ (mass @ momentum) / 2


DENSE = np.array([[1.2, 0.3, 0.0], [0.3, 0.8, -0.2], [0.0, -0.2, 0.5]])
MASSES = {"identity": None, "diagonal": np.diag(DENSE), "dense": DENSE}


def flow(inverse_mass, step_size, num_steps):
    """Return the whole map ``(position, momentum) -> (position, momentum)``."""
    steps = fedmcmc.dynamics.leapfrog(num_steps, inverse_mass_matrix=inverse_mass)
    matrix = np.eye(3) if inverse_mass is None else np.asarray(inverse_mass)
    matrix = np.diag(matrix) if matrix.ndim == 1 else matrix
    root = np.linalg.cholesky(matrix)

    def move(position, momentum):
        # The velocity is root @ noise, and the momentum is its inverse mass times less.
        noise = jnp.linalg.solve(root, matrix @ momentum)
        position, velocity, _ = steps.move(
            lambda _, x: quartic(x), (), position, noise, jnp.asarray(step_size)
        )
        # The half kick after the last drift, which a trajectory leaves out.
        kick = Metric.of(inverse_mass).times(quartic(position))
        velocity = velocity + jnp.asarray(step_size) / 2 * kick
        return position, jnp.linalg.solve(matrix, velocity)

    return move, matrix


@pytest.mark.parametrize("mass", fast_and_slow(MASSES, ["dense"]))
def test_i33_leapfrog_is_reversible_keeps_volume_and_nearly_energy(mass):
    with jax.enable_x64(True):
        position, momentum = jnp.array([0.5, -0.3, 0.8]), jnp.array([0.2, 1.0, -0.4])
        move, matrix = flow(MASSES[mass], 0.1, 7)
        there = move(position, momentum)
        back = move(there[0], -there[1])
        np.testing.assert_allclose(back[0], position, atol=1e-12)
        np.testing.assert_allclose(back[1], -momentum, atol=1e-12)
        jacobian = jax.jacfwd(lambda z: jnp.concatenate(move(z[:3], z[3:])))(
            jnp.concatenate([position, momentum])
        )
        np.testing.assert_allclose(np.linalg.det(jacobian), 1.0, atol=1e-10)
        before = energy(position, momentum, matrix)
        errors = []
        for step_size in (0.02, 0.01):
            move, _ = flow(MASSES[mass], step_size, round(0.7 / step_size))
            errors.append(abs(float(energy(*move(position, momentum), matrix) - before)))
        assert 3.5 < errors[0] / errors[1] < 4.5  # second order


def test_a_trajectory_is_the_textbook_loop():
    with jax.enable_x64(True):
        position, momentum = jnp.array([0.5, -0.3, 0.8]), jnp.array([0.2, 1.0, -0.4])
        move, _ = flow(None, 0.1, 7)
        expected = leapfrog_in_numpy(quartic, position, momentum, 0.1, 7)
        for found, wanted in zip(move(position, momentum), expected, strict=True):
            np.testing.assert_allclose(found, wanted, atol=1e-12)


@pytest.mark.parametrize("steps", fast_and_slow([(1, 4), (5, 1), (4, 3)], [(4, 3)]))
def test_i34_with_a_control_variate_the_mode_is_a_fixed_point(steps):
    mode = np.linalg.solve(
        FEDERATION.prior_precision + FEDERATION.precisions.sum(0),
        FEDERATION.prior_precision @ FEDERATION.prior_mean
        + np.einsum("cij,cj->i", FEDERATION.precisions, FEDERATION.means),
    )
    settings = dict(num_integration_steps=steps[0], num_local_steps=steps[1], temperature=0.0)

    def after(control_variate):
        kernel = fa_hmc(**settings, control_variate=control_variate)
        return fedmcmc.sample(
            KEY, kernel, DATA, jnp.asarray(mode), num_rounds=1, progress=False
        ).draws[0, 0]

    np.testing.assert_allclose(after(True), mode, atol=3e-6)
    assert np.abs(after(False) - mode).max() > 1e-3


@pytest.mark.slow
def test_a_control_variate_costs_one_more_exchange():
    for control_variate, factor in ((False, 1), (True, 2)):
        info = run(fa_hmc(control_variate=control_variate)).info
        assert (info["bits_up"] == factor * 4 * 3 * 32).all()
        assert (info["bits_down"] == factor * 4 * 3 * 32).all()


def test_exact_gradients_are_computed_once_between_two_drifts():
    """Else ``fresh`` would ask twice for what cannot differ."""

    def flops(**settings):
        init, step = fedmcmc.simulate(fa_hmc(num_integration_steps=2, **settings), DATA)
        return jax.jit(step).lower(KEY, init(START)).compile().cost_analysis()["flops"]

    assert flops(gradients="fresh") == flops(gradients="reuse")
    assert flops(gradients="fresh", batch_size=2) > flops(gradients="reuse", batch_size=2)


@pytest.mark.slow
def test_identity_compression_changes_nothing_and_quantised_averages_are_unbiased():
    plain = fa_hmc(rho=0.4, control_variate=True)
    same = fedmcmc.compress(plain, fedmcmc.compression.identity())
    np.testing.assert_allclose(run(same).draws, run(plain).draws, **SAME)

    init, step = fedmcmc.simulate(fedmcmc.compress(fa_hmc(), fedmcmc.quantize(2)), DATA)
    state = init(START)
    quantised, exact = (
        jax.jit(jax.vmap(lambda key, s=s: s(key, state)[0].broadcast.position))
        for s in (step, fedmcmc.simulate(fa_hmc(), DATA).step)
    )
    keys = jax.random.split(KEY, 20000)
    gaps = np.asarray(quantised(keys) - exact(keys))
    assert np.abs(z_scores(gaps, 0.0)).max() < LIMIT
    assert gaps.std(0).min() > 1e-3


def test_long_rounds_draw_in_the_loop_what_they_would_draw_ahead(monkeypatch):
    """Above a size only keys are prepared: of normals, and of the rows of minibatches."""
    from fedmcmc.gradients import _minibatches as minibatches
    from fedmcmc.random import _streams as streams

    settings = dict(rho=0.4, batch_size=2, num_local_steps=2)
    monkeypatch.setattr(streams, "MAX_PREPARED_NORMALS", 4)
    monkeypatch.setattr(minibatches, "MAX_PREPARED_ROWS", 3)
    kernel = fa_hmc(**settings)
    client = DATA.client(2)
    draws = kernel.prepare(KEY, fedmcmc.types.Broadcast(jnp.int32(0), START), client)
    keys = [x for x in jax.tree.leaves(draws) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]
    assert [key.shape for key in keys] == [(2,), (2, 7)]
    assert len(jax.tree.leaves(draws)) == 2

    init, step = fedmcmc.simulate(kernel, DATA)
    many = jax.jit(jax.vmap(lambda key: step(key, init(START))[0].broadcast.position))
    draws = np.asarray(many(jax.random.split(KEY, 8192)))
    from tests.oracles.federations import worst_z
    from tests.oracles.federations_averaging import law

    expected = law(num_steps=4, num_local_steps=2, step_size=ETA, rho=0.4, batch=2)
    assert worst_z(draws, expected.rounds(FEDERATION.start, 1)[-1]) < LIMIT


def test_a_mass_matrix_fits_nested_positions_too():
    like = {"a": jnp.zeros(()), "b": jnp.zeros(2)}
    mass = {"a": jnp.array(2.0), "b": jnp.array([0.5, 3.0])}
    dense = np.diag([2.0, 0.5, 3.0])
    for given in (mass, dense):
        block = Metric.of(given)
        block.check(like)
        found = block.times(jax.tree.map(jnp.ones_like, like))
        np.testing.assert_allclose(trees.ravel(found), [2.0, 0.5, 3.0])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_position_that_is_a_matrix_has_a_diagonal_of_its_shape(dtype):
    like = jnp.zeros((2, 2), dtype)
    diagonal, dense = np.array([[2.0, 0.5], [3.0, 1.0]]), np.diag([2.0, 0.5, 3.0, 1.0])
    for given in (diagonal, dense):
        block = Metric.of(given)
        block.check(like)
        for found, wanted in (
            (block.times(jnp.ones_like(like)), diagonal),
            (block.root_times(jnp.ones_like(like)), np.sqrt(diagonal)),
        ):
            assert found.dtype == dtype
            np.testing.assert_allclose(np.asarray(found, float), wanted, rtol=1e-2)
