"""Surrogates that clients refit during a run: what they are, when, and who knows of it."""

import itertools

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


def dense(q):
    precision = jax.vmap(jnp.diag)(q.precision)
    return fedmcmc.Gaussian(q.precision_mean, precision, "dense")


def build(structure="diagonal", **settings):
    q = first_surrogates(VECTOR)
    q = dense(q) if structure == "dense" else q
    settings = dict(refresh_every=3) | settings
    return q, fedmcmc.fsgld(POSTERIOR, q, **SETTINGS, **settings)


def rounds(kernel, num):
    """Return the states before each round, and after the last."""
    init, step = fedmcmc.simulate(kernel, DATA)
    step, states = jax.jit(step), [init(VECTOR)]
    for _ in range(num):
        states.append(step(KEY, states[-1])[0])
    return states


def of(q, i):
    return jax.tree.map(lambda leaf: np.asarray(leaf[i]), q)


@pytest.mark.parametrize("structure", fast_and_slow(["dense", "diagonal"], ["diagonal"]))
def test_a_client_expands_its_likelihood_where_its_visit_begins(structure):
    _, kernel = build(structure, refresh_until=8)
    states = rounds(kernel, 14)
    answered, refits = np.zeros(3, int), []
    for round_, (before, after) in enumerate(itertools.pairwise(states)):
        latest = round_ - round_ % 3
        here = surrogates.taylor(POSTERIOR, DATA, before.broadcast.position, structure=structure)
        moved = [
            i
            for i in range(3)
            if np.any(
                of(before.clients.surrogate, i).precision_mean
                != of(after.clients.surrogate, i).precision_mean
            )
        ]
        assert len(moved) <= 1
        if round_ < 3 or round_ >= 8:
            assert not moved
        for i in moved:
            assert answered[i] < latest
            answered[i] = latest
            refits.append(round_)
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
                of(after.clients.surrogate, i),
                of(here, i),
            )
        # What everyone is sent is the product of what all have.
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
            after.broadcast.extra,
            after.clients.surrogate.sum(),
        )
    assert len(refits) >= 3
    np.testing.assert_array_equal(states[-1].clients.refresh, answered)


def test_before_any_refresh_draws_are_those_of_fsgld():
    q, kernel = build(refresh_every=50)
    plain = fedmcmc.fsgld(POSTERIOR, q, **SETTINGS)

    def run(kernel):
        return fedmcmc.sample(KEY, kernel, DATA, VECTOR, num_rounds=8, progress=False)

    refreshed, expected = run(kernel), run(plain)
    # Shares are 1 / (1 / p) here, which rounds.
    np.testing.assert_allclose(refreshed.draws, expected.draws, rtol=1e-5, atol=1e-6)
    # The natural parameters cross besides, both ways.
    more = 32 * 2 * 3
    np.testing.assert_array_equal(refreshed.info["bits_up"], expected.info["bits_up"] + more)
    np.testing.assert_array_equal(refreshed.info["bits_down"], expected.info["bits_down"] + more)


@pytest.mark.parametrize(
    "compressor", [fedmcmc.quantize(3), fedmcmc.memory(fedmcmc.sparsify(0.5), 0.4)]
)
def test_compressed_changes_are_what_both_sides_add(compressor):
    _, kernel = build("dense", refresh_every=2)
    states = rounds(fedmcmc.compress(kernel, compressor), 9)
    moved = states[-1].clients.kernel.surrogate
    assert (
        np.abs(np.asarray(moved.precision - states[0].clients.kernel.surrogate.precision)).max() > 0
    )
    for state in states:
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
            state.broadcast.extra,
            state.clients.kernel.surrogate.sum(),
        )


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
    init, _ = fedmcmc.simulate(kernel, data)
    client, state = data.client(0), init(jnp.array([0.3]))
    states = jax.tree.map(lambda leaf: leaf[0], state.clients)
    broadcast = state.broadcast._replace(round=jnp.int32(4))
    draws = kernel.prepare(KEY, broadcast, client)
    message, after, _ = kernel.step(draws, broadcast, states, client)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(message.change))
    assert int(after.refresh) == 4


@pytest.mark.slow
def test_a_prediction_follows_the_refits():
    """By simulation on the Gaussian clients, where surrogates are exact after one visit each."""
    federation = Federation()
    bad, exact = federation.surrogates("dense")[0], federation.surrogates("exact")[0]
    kernel = fedmcmc.fsgld(
        federation.posterior, bad, step_size=0.006, num_local_steps=5, refresh_every=1
    )
    found = fedmcmc.predict_bias(kernel, federation.data, exact)
    assert found.simulated == "it refits surrogates"
    assert np.abs(found.bias).max() < 0.1 + 4 * found.bias_error.max()


POSTERIOR_OF = Federation().posterior


@pytest.mark.parametrize(
    ("build_", "message"),
    [
        (
            lambda: build(refresh_every=None, refresh_until=3),
            "refresh_until needs refresh_every",
        ),
        (lambda: build(refresh_every=0), "refresh_every must be a positive integer"),
        (lambda: build(refresh_until=-1), "refresh_until must be a round, at least 0, got -1"),
        (
            lambda: fedmcmc.fsgld(
                POSTERIOR_OF,
                Federation().surrogates("scaled_identity")[0],
                step_size=0.01,
                num_local_steps=2,
                refresh_every=2,
            ),
            "refitted by expansions, which are dense or diagonal",
        ),
        (
            lambda: fedmcmc.faults(build()[1], late=0.2),
            "late: this kernel needs a client's message of a round in that round",
        ),
        (
            lambda: fedmcmc.kernels.refreshed_relay(
                POSTERIOR,
                fedmcmc.svrg(fedmcmc.minibatch(2), 3),
                first_surrogates(VECTOR),
                participation=fedmcmc.categorical(P),
                refresh_every=2,
                step_size=0.01,
            ),
            r"supports no estimator that broadcasts a reference \(svrg\)",
        ),
    ],
)
def test_what_does_not_fit_is_refused(build_, message):
    with pytest.raises(ValueError, match=message):
        build_()
