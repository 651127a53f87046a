"""Nested corrections of gradients, and orders in which they would cancel."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from tests.oracles.federations import Federation

FEDERATION = Federation()
SURROGATES, _ = FEDERATION.surrogates("exact")
PLACE = jnp.array([0.4, -1.0, 0.7], jnp.float32)
START = jnp.asarray(FEDERATION.start, jnp.float32)
MINIBATCH = fedmcmc.minibatch(2)


FULL = fedmcmc.full_gradient()
STEP_SIZE = 1e-3


def moves(kernel, num_rounds=6):
    """Return the displacements ``[num_rounds, 3]`` of single rounds from `PLACE`."""
    init, step = fedmcmc.simulate(kernel, FEDERATION.data)
    state, step = init(START), jax.jit(step)
    displacements = []
    for seed in range(num_rounds):
        broadcast = state.broadcast._replace(position=PLACE)
        moved, _ = step(jax.random.key(seed), state._replace(broadcast=broadcast))
        displacements.append(np.asarray(moved.broadcast.position, float) - np.asarray(PLACE, float))
    return np.array(displacements)


def gradient(place):
    """Return the gradient of the log posterior."""
    prior = FEDERATION.prior_precision @ (FEDERATION.prior_mean - place)
    return prior + np.einsum("kij,kj->i", FEDERATION.precisions, FEDERATION.means - place)


@pytest.mark.parametrize("control", ["svrg", "fixed_point"])
def test_each_client_has_the_total_gradient_with_conducive_around_a_control_variate(control):
    """With exact surrogates a relay does not depend on the client that moves the chain."""
    inner = fedmcmc.svrg(FULL, 3) if control == "svrg" else fedmcmc.fixed_point(FULL, START)
    probabilities = jnp.asarray(FEDERATION.probabilities)
    kernel = fedmcmc.relay(
        FEDERATION.posterior,
        fedmcmc.conducive(inner, SURROGATES, shares=probabilities),
        step_size=STEP_SIZE,
        num_local_steps=1,
        participation=fedmcmc.categorical(probabilities),
        temperature=1e-12,
    )
    expected = STEP_SIZE * gradient(np.asarray(PLACE, float))
    np.testing.assert_allclose(moves(kernel), np.tile(expected, (6, 1)), rtol=2e-3, atol=2e-5)


def test_scaffold_around_conducive_moves_all_clients_together():
    """With exact surrogates, an average of several local steps is a chain on a single machine."""
    kernel = fedmcmc.averaging(
        FEDERATION.posterior,
        fedmcmc.scaffold(fedmcmc.conducive(FULL, SURROGATES)),
        integrator=fedmcmc.dynamics.euler_maruyama(),
        step_size=STEP_SIZE,
        num_local_steps=4,
        temperature=1e-12,
    )
    place = np.asarray(PLACE, float)
    for _ in range(4):
        place = place + STEP_SIZE * gradient(place)
    expected = place - np.asarray(PLACE, float)
    np.testing.assert_allclose(moves(kernel, 1)[0], expected, rtol=2e-3, atol=2e-5)


CONDUCIVE, SCAFFOLD = fedmcmc.conducive(MINIBATCH, SURROGATES), fedmcmc.scaffold(MINIBATCH)


@pytest.mark.parametrize(
    ("build", "remedy"),
    [
        (lambda: fedmcmc.svrg(CONDUCIVE, 3), "conducive(svrg(...), surrogates)"),
        (
            lambda: fedmcmc.svrg(fedmcmc.noisy(CONDUCIVE, 0.1), 3),
            "conducive(svrg(...), surrogates)",
        ),
        (
            lambda: fedmcmc.fixed_point(CONDUCIVE, START),
            "conducive(fixed_point(...), surrogates)",
        ),
        (
            lambda: fedmcmc.fixed_point(CONDUCIVE, START, centred=True),
            "conducive(fixed_point(...), surrogates)",
        ),
        (lambda: fedmcmc.svrg(SCAFFOLD, 3), "scaffold(...) without svrg"),
        (
            lambda: fedmcmc.fixed_point(fedmcmc.noisy(SCAFFOLD, 0.1), START),
            "scaffold(...) without fixed_point",
        ),
        (
            lambda: fedmcmc.conducive(SCAFFOLD, SURROGATES),
            "scaffold(conducive(..., surrogates))",
        ),
        (
            lambda: fedmcmc.conducive(fedmcmc.noisy(SCAFFOLD, 0.1), SURROGATES),
            "scaffold(conducive(..., surrogates))",
        ),
    ],
)
def test_an_order_in_which_a_correction_cancels_is_refused(build, remedy):
    with pytest.raises(ValueError, match=re.escape(f"write {remedy}")):
        build()
