"""The order of corrections: what one adds, another around it must not take out."""

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
    """Return the displacements ``[num_rounds, 3]`` of single rounds that start at `PLACE`."""
    init, step = fedmcmc.simulate(kernel, FEDERATION.data)
    state, step = init(START), jax.jit(step)
    displacements = []
    for seed in range(num_rounds):
        at = state.broadcast._replace(position=PLACE)
        moved, _ = step(jax.random.key(seed), state._replace(broadcast=at))
        displacements.append(np.asarray(moved.broadcast.position, float) - np.asarray(PLACE, float))
    return np.array(displacements)


def gradient(place):
    """Return the gradient of the log posterior."""
    prior = FEDERATION.prior_precision @ (FEDERATION.prior_mean - place)
    return prior + np.einsum("kij,kj->i", FEDERATION.precisions, FEDERATION.means - place)


@pytest.mark.parametrize("control", ["svrg", "fixed_point"])
def test_conducive_around_a_control_variate_gives_every_client_the_whole_gradient(control):
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


def test_scaffold_around_conducive_moves_all_clients_alike():
    """With exact surrogates several local steps of an average are those of one machine."""
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


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda c, s: fedmcmc.svrg(c, 3), r"write conducive\(svrg\(\.\.\.\), surrogates\)"),
        (
            lambda c, s: fedmcmc.svrg(fedmcmc.noisy(c, 0.1), 3),
            r"write conducive\(svrg\(\.\.\.\), surrogates\)",
        ),
        (
            lambda c, s: fedmcmc.fixed_point(c, START),
            r"write conducive\(fixed_point\(\.\.\.\), surrogates\)",
        ),
        (
            lambda c, s: fedmcmc.fixed_point(c, START, centred=True),
            r"write conducive\(fixed_point\(\.\.\.\), surrogates\)",
        ),
        (lambda c, s: fedmcmc.svrg(s, 3), r"write scaffold\(\.\.\.\) without svrg"),
        (
            lambda c, s: fedmcmc.fixed_point(fedmcmc.noisy(s, 0.1), START),
            r"write scaffold\(\.\.\.\) without fixed_point",
        ),
        (
            lambda c, s: fedmcmc.conducive(s, SURROGATES),
            r"write scaffold\(conducive\(\.\.\., surrogates\)\)",
        ),
        (
            lambda c, s: fedmcmc.conducive(fedmcmc.noisy(s, 0.1), SURROGATES),
            r"write scaffold\(conducive\(\.\.\., surrogates\)\)",
        ),
    ],
)
def test_an_order_in_which_a_correction_cancels_is_refused(build, match):
    conducive = fedmcmc.conducive(MINIBATCH, SURROGATES)
    scaffold = fedmcmc.scaffold(MINIBATCH)
    with pytest.raises(ValueError, match=match):
        build(conducive, scaffold)
