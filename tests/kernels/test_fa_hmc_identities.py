"""Identities of FA-LD and FA-HMC: paths that NumPy computes from the draws of the kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc.participation import pooled
from tests.oracles.federations import LIMIT, worst_z, z_scores
from tests.oracles.federations_averaging import FEDERATION, law
from tests.support.lanes import fast_and_slow

DATA = FEDERATION.data
START = jnp.asarray(FEDERATION.start)
BROADCAST = fedmcmc.types.Broadcast(jnp.int32(0), START)
KEY = jax.random.key(5)
STEP_SIZE = 0.05
ROUNDING = dict(rtol=2e-5, atol=2e-5)


def run(kernel, data=DATA, *, position=START, num_rounds=6, **settings):
    settings = dict(num_rounds=num_rounds, progress=False) | settings
    return fedmcmc.sample(KEY, kernel, data, position, **settings)


def fa_hmc(**settings):
    settings = dict(step_size=STEP_SIZE, num_integration_steps=4, num_local_steps=3) | settings
    return fedmcmc.fa_hmc(FEDERATION.posterior, **settings)


def posterior_gradient(position):
    prior = FEDERATION.prior_precision @ (FEDERATION.prior_mean - position)
    return prior + np.einsum("cij,cj->i", FEDERATION.precisions, FEDERATION.means - position)


def key_of(round_, number):
    """Return the documented key of a client or a special number in a round of the first chain."""
    key = jax.random.fold_in(jax.random.fold_in(KEY, 0), round_)
    return jax.random.fold_in(key, jnp.uint32(number))


def shared_normals(kernel, round_):
    return np.asarray(kernel.prepare_shared(key_of(round_, 2**32 - 4), BROADCAST), float)


def leapfrog(gradient_fn, position, momentum, step_size, num_steps):
    for _ in range(num_steps):
        momentum = momentum + step_size / 2 * gradient_fn(position)
        position = position + step_size * momentum
        momentum = momentum + step_size / 2 * gradient_fn(position)
    return position


@pytest.mark.parametrize("rho", fast_and_slow([1.0, 0.3], [0.3]))
def test_i3_one_client_runs_unadjusted_hmc(rho):
    """With one client of weight one, the momentum is standard normal at any correlation."""
    kernel = fa_hmc(rho=rho, participation=pooled())
    position = np.asarray(START, float)
    for round_, draw in enumerate(run(kernel).draws[0]):
        client = kernel.prepare(key_of(round_, 0), BROADCAST, DATA.pooled().client(0)).momentum
        noise = np.sqrt(rho) * shared_normals(kernel, round_)
        if rho < 1:
            noise = noise + np.sqrt(1 - rho) * np.asarray(client, float)
        for momentum in noise:
            position = leapfrog(posterior_gradient, position, momentum, STEP_SIZE, 4)
        np.testing.assert_allclose(draw, position, **ROUNDING)


def test_i3_one_client_of_fa_ld_is_sgld():
    kernel = fedmcmc.fa_ld(
        FEDERATION.posterior, step_size=0.004, num_local_steps=1, participation=pooled()
    )
    position = np.asarray(START, float)
    for round_, draw in enumerate(run(kernel).draws[0]):
        noise = shared_normals(kernel, round_)[0]
        position = position + 0.004 * posterior_gradient(position) + np.sqrt(0.008) * noise
        np.testing.assert_allclose(draw, position, **ROUNDING)


@pytest.mark.slow
def test_i4_clients_with_equal_rows_and_a_common_momentum_stay_together():
    tree = FEDERATION.client_trees()[0]
    data = fedmcmc.FederatedData.from_clients([tree, tree, tree])
    precision, mean = 3 * FEDERATION.precisions[0], FEDERATION.means[0]

    def gradient(position):
        prior = FEDERATION.prior_precision @ (FEDERATION.prior_mean - position)
        return prior + precision @ (mean - position)

    def local_positions(state, info):
        return info.clients.local_positions

    kernel = fa_hmc(rho=1.0)
    iterates = run(kernel, data, collect=local_positions).draws[0]
    position = np.asarray(START, float)
    for round_, clients in enumerate(iterates):
        for step, momentum in enumerate(shared_normals(kernel, round_)):
            position = leapfrog(gradient, position, momentum, STEP_SIZE, 4)
            np.testing.assert_allclose(clients[:, step], np.tile(position, (3, 1)), **ROUNDING)


@pytest.mark.parametrize("steps", fast_and_slow([(1, 4), (5, 1), (4, 3)], [(4, 3)]))
def test_i34_a_control_variate_keeps_the_mode_and_costs_a_second_exchange(steps):
    mode = np.linalg.solve(
        FEDERATION.prior_precision + FEDERATION.precisions.sum(0),
        FEDERATION.prior_precision @ FEDERATION.prior_mean
        + np.einsum("cij,cj->i", FEDERATION.precisions, FEDERATION.means),
    )
    settings = dict(num_integration_steps=steps[0], num_local_steps=steps[1], temperature=0.0)
    moved = {}
    for num_exchanges, control_variate in ((1, False), (2, True)):
        kernel = fa_hmc(**settings, control_variate=control_variate)
        samples = run(kernel, position=jnp.asarray(mode), num_rounds=1)
        moved[control_variate] = np.abs(samples.draws[0, 0] - mode).max()
        for bits in ("bits_up", "bits_down"):
            assert samples.info[bits].tolist() == [[num_exchanges * 4 * 3 * 32]]
    assert moved[True] < 3e-6 and moved[False] > 1e-3


def test_exact_gradients_are_computed_once_between_two_drifts():
    """``gradients="fresh"`` must not compute a gradient twice if both results are equal."""

    def count_flops(**settings):
        init, step = fedmcmc.simulate(fa_hmc(num_integration_steps=2, **settings), DATA)
        return jax.jit(step).lower(KEY, init(START)).compile().cost_analysis()["flops"]

    assert count_flops(gradients="fresh") == count_flops(gradients="reuse")
    minibatch = dict(batch_size=2)
    assert count_flops(gradients="fresh", **minibatch) > count_flops(gradients="reuse", **minibatch)


@pytest.mark.slow
def test_quantized_averages_are_unbiased():
    keys = jax.random.split(KEY, 20000)

    def positions(kernel):
        init, step = fedmcmc.simulate(kernel, DATA)
        state = init(START)
        return jax.jit(jax.vmap(lambda key: step(key, state)[0].broadcast.position))(keys)

    gaps = positions(fedmcmc.compress(fa_hmc(), fedmcmc.quantize(2))) - positions(fa_hmc())
    assert np.abs(z_scores(gaps, 0.0)).max() < LIMIT
    assert np.asarray(gaps).std(0).min() > 1e-3


def test_long_rounds_draw_in_the_loop_with_the_same_distribution(monkeypatch):
    """Above a size, a client prepares only keys of its normals and of its minibatches."""
    monkeypatch.setattr("fedmcmc.random._streams.MAX_PREPARED_NORMALS", 4)
    monkeypatch.setattr("fedmcmc.gradients._minibatches.MAX_PREPARED_ROWS", 3)
    kernel = fa_hmc(rho=0.4, batch_size=2, num_local_steps=2)
    draws = jax.tree.leaves(kernel.prepare(KEY, BROADCAST, DATA.client(2)))
    assert [leaf.shape for leaf in draws] == [(2,), (2, 7)]
    assert all(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in draws)

    init, step = fedmcmc.simulate(kernel, DATA)
    state = init(START)
    positions = jax.jit(jax.vmap(lambda key: step(key, state)[0].broadcast.position))
    expected = law(num_steps=4, num_local_steps=2, step_size=STEP_SIZE, rho=0.4, batch=2)
    moments = expected.rounds(FEDERATION.start, 1)[-1]
    assert worst_z(positions(jax.random.split(KEY, 8192)), moments) < LIMIT
