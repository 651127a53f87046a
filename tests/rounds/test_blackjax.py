"""`simulate` has the shape of a BlackJAX sampling algorithm."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc

blackjax_util = pytest.importorskip("blackjax.util")

NUM_STEPS = 12


@pytest.fixture(scope="module")
def algorithm():
    posterior = fedmcmc.Posterior(
        lambda theta: -0.5 * jnp.sum(theta**2),
        lambda theta, rows: -0.5 * jnp.sum((rows - theta) ** 2, axis=-1),
    )
    rng = np.random.default_rng(0)
    data = fedmcmc.FederatedData.from_clients([rng.normal(size=(n, 2)) for n in (5, 1, 8)])
    surrogates = fedmcmc.Gaussian.from_moments(
        jnp.asarray(rng.normal(size=(3, 2))), variance=jnp.full((3, 2), 0.3)
    )
    kernel = fedmcmc.fsgld(posterior, surrogates, step_size=0.01, num_local_steps=3, batch_size=2)
    return fedmcmc.simulate(kernel, data)


def by_hand(algorithm, rng_key, position, initial_state=None):
    """Return the last state and all positions, with the keys that BlackJAX documents."""
    state = initial_state
    if state is None:
        rng_key, init_key = jax.random.split(rng_key, 2)
        state = algorithm.init(position, init_key)
    step, positions, bits = jax.jit(algorithm.step), [], []
    for key in jax.random.split(rng_key, NUM_STEPS):
        state, info = step(key, state)
        positions.append(state.broadcast.position)
        bits.append(info.bits_up)
    return state, jnp.stack(positions), jnp.stack(bits)


def test_run_inference_algorithm_equals_a_loop_by_hand(algorithm):
    start = jnp.array([1.0, -1.0])
    state, (positions, bits) = blackjax_util.run_inference_algorithm(
        jax.random.key(3),
        algorithm,
        num_steps=NUM_STEPS,
        initial_position=start,
        transform=lambda state, info: (state.broadcast.position, info.bits_up),
    )
    last, expected, sent = by_hand(algorithm, jax.random.key(3), start)
    np.testing.assert_allclose(positions, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(bits, sent)
    assert int(state.broadcast.round) == int(last.broadcast.round) == NUM_STEPS
    assert len(np.unique(np.asarray(positions)[:, 0])) == NUM_STEPS


def test_run_inference_algorithm_goes_on_from_a_state_with_a_raw_key(algorithm):
    start = algorithm.init(jnp.zeros(2))
    key = jax.random.PRNGKey(4)
    state, (states, infos) = blackjax_util.run_inference_algorithm(
        key, algorithm, num_steps=NUM_STEPS, initial_state=start
    )
    last, expected, _ = by_hand(algorithm, key, None, start)
    np.testing.assert_allclose(states.broadcast.position, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(state.broadcast.position, last.broadcast.position, rtol=1e-5)
    np.testing.assert_array_equal(infos.num_active, 1)
    np.testing.assert_array_equal(infos.round, np.arange(NUM_STEPS))
