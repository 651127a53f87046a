"""`simulate` has the interface of a BlackJAX sampling algorithm."""

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


@pytest.mark.parametrize("is_new", [True, False], ids=["from a position", "from a state"])
def test_run_inference_algorithm_equals_a_loop(algorithm, is_new):
    """Keys are split as BlackJAX documents, from a typed key and from a raw key."""
    if is_new:
        key, position = jax.random.key(3), jnp.array([1.0, -1.0])
        start = {"initial_position": position}
        loop_key, init_key = jax.random.split(key, 2)
        state = algorithm.init(position, init_key)
    else:
        key = loop_key = jax.random.PRNGKey(4)
        state = algorithm.init(jnp.zeros(2))
        start = {"initial_state": state}
    final, (positions, infos) = blackjax_util.run_inference_algorithm(
        key,
        algorithm,
        num_steps=NUM_STEPS,
        transform=lambda state, info: (state.broadcast.position, info),
        **start,
    )
    step = jax.jit(algorithm.step)
    expected, bits = [], []
    for step_key in jax.random.split(loop_key, NUM_STEPS):
        state, info = step(step_key, state)
        expected.append(state.broadcast.position)
        bits.append(info.bits_up)
    np.testing.assert_allclose(positions, np.stack(expected), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(final.broadcast.position, expected[-1], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(infos.bits_up, np.stack(bits))
    np.testing.assert_array_equal(infos.num_active, 1)
    np.testing.assert_array_equal(infos.round, np.arange(NUM_STEPS))
    assert int(final.broadcast.round) == int(state.broadcast.round) == NUM_STEPS
    assert len(np.unique(np.asarray(positions)[:, 0])) == NUM_STEPS
