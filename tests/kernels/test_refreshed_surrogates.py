"""Surrogates that clients refit during a run."""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc import surrogates
from tests.contracts.model import DATA, POSITIONS, POSTERIOR, P
from tests.contracts.model import surrogates as first_surrogates
from tests.oracles.federations import Federation
from tests.support.lanes import fast_and_slow

KEY = jax.random.key(7)
VECTOR = POSITIONS["vector"]
SETTINGS = dict(step_size=0.02, num_local_steps=2, probabilities=P)


def build(structure="diagonal", **settings):
    q = first_surrogates(VECTOR)
    if structure == "dense":
        q = fedmcmc.Gaussian(q.precision_mean, jax.vmap(jnp.diag)(q.precision), "dense")
    return fedmcmc.fsgld(POSTERIOR, q, **SETTINGS, **settings)


def run(kernel, num_rounds):
    """Return the states before the first round and after each round, and the rounds' reports."""
    init, step = fedmcmc.simulate(kernel, DATA)
    step, states, infos = jax.jit(step), [init(VECTOR)], []
    for _ in range(num_rounds):
        state, info = step(KEY, states[-1])
        states.append(state)
        infos.append(info)
    return states, infos


@pytest.mark.parametrize("structure", fast_and_slow(["dense", "diagonal"], ["diagonal"]))
def test_a_client_expands_its_likelihood_where_its_visit_begins(structure):
    states, _ = run(build(structure, refresh_every=3, refresh_until=9), 14)
    refreshed, num_refits = np.zeros(3, int), 0
    for round_, (before, after) in enumerate(itertools.pairwise(states)):
        q, position = after.clients.surrogate, before.broadcast.position
        changed = before.clients.surrogate.precision_mean != q.precision_mean
        (clients,) = np.nonzero(np.any(changed, axis=1))
        assert len(clients) <= (3 <= round_ < 9)
        for i in clients:
            latest = round_ - round_ % 3
            assert refreshed[i] < latest
            refreshed[i] = latest
            num_refits += 1
            expansions = surrogates.taylor(POSTERIOR, DATA, position, structure=structure)
            actual, expected = (jax.tree.map(lambda leaf, i=i: leaf[i], x) for x in (q, expansions))
            chex.assert_trees_all_close(actual, expected, rtol=1e-4, atol=1e-5)
        # The server broadcasts the product of all clients' surrogates.
        chex.assert_trees_all_close(after.broadcast.extra, q.sum(), rtol=1e-4, atol=1e-5)
    assert num_refits >= 3
    np.testing.assert_array_equal(states[-1].clients.refresh, refreshed)


def test_draws_before_any_refresh_are_those_of_fsgld():
    refreshed, refreshed_infos = run(build(refresh_every=50), 8)
    plain, plain_infos = run(build(), 8)
    for actual, expected in zip(refreshed, plain, strict=True):
        # Shares are 1 / (1 / p), which rounds.
        np.testing.assert_allclose(
            actual.broadcast.position, expected.broadcast.position, rtol=1e-5, atol=1e-6
        )
    # The natural parameters are sent in addition, in both directions.
    for actual, expected in zip(refreshed_infos, plain_infos, strict=True):
        assert actual.bits_up - expected.bits_up == 32 * 2 * 3
        assert actual.bits_down - expected.bits_down == 32 * 2 * 3


@pytest.mark.parametrize(
    "compressor", [fedmcmc.quantize(3), fedmcmc.memory(fedmcmc.sparsify(0.5), 0.4)]
)
def test_client_and_server_add_the_same_compressed_change(compressor):
    states, _ = run(fedmcmc.compress(build("dense", refresh_every=2), compressor), 9)
    initial, final = (states[i].clients.kernel.surrogate.precision for i in (0, -1))
    assert np.abs(np.asarray(final - initial)).max() > 0
    for state in states:
        product = state.clients.kernel.surrogate.sum()
        chex.assert_trees_all_close(state.broadcast.extra, product, rtol=1e-4, atol=1e-4)


def test_an_expansion_that_is_not_finite_leaves_the_old_surrogate():
    posterior = POSTERIOR._replace(
        loglikelihood_fn=lambda theta, rows: (
            -jnp.sum(jnp.sqrt(jnp.abs(rows["x"] - theta[0])), axis=-1)
        )
    )
    data = fedmcmc.FederatedData.from_clients([{"x": np.full((2, 1), 0.3, np.float32)}])
    q = fedmcmc.Gaussian.from_moments(jnp.zeros((1, 1)), variance=jnp.ones((1, 1)))
    kernel = fedmcmc.fsgld(
        posterior, q, step_size=1e-3, num_local_steps=1, refresh_every=1, alpha=0.0
    )
    client, state = data.client(0), kernel.init(KEY, jnp.array([0.3]), data)
    client_state = jax.tree.map(lambda leaf: leaf[0], state.clients)
    broadcast = state.broadcast._replace(round=jnp.int32(4))
    draws = kernel.prepare(KEY, broadcast, client)
    message, after, _ = kernel.step(draws, broadcast, client_state, client)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(message.change))
    assert int(after.refresh) == 4


@pytest.mark.slow
def test_a_prediction_follows_the_refits():
    """On Gaussian clients, surrogates are exact after a visit of each client."""
    federation = Federation()
    bad, exact = federation.surrogates("dense")[0], federation.surrogates("exact")[0]
    kernel = fedmcmc.fsgld(
        federation.posterior, bad, step_size=0.006, num_local_steps=5, refresh_every=1
    )
    prediction = fedmcmc.predict_bias(kernel, federation.data, exact)
    assert prediction.simulated == "it refits surrogates"
    assert np.abs(prediction.bias).max() < 0.1 + 4 * prediction.bias_error.max()
