"""Kernels whose clients share part of their noise: exact moments after some rounds."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from tests.oracles import laws_consensus
from tests.oracles.chains import draw, split_keys
from tests.oracles.federations import LIMIT, Federation, worst_z
from tests.oracles.laws import at_point, iterate, push
from tests.support.lanes import fast_and_slow

NUM_CHAINS = 8192
FEDERATION = Federation()
DATA, START = FEDERATION.data, Federation.start
KEYS = split_keys(NUM_CHAINS, seed=3)
STEP_SIZE, TEMPERATURE, BATCH_SIZE = 0.004, 0.3, 3
LOCAL = dict(step_size=STEP_SIZE, num_local_steps=3, tolerance=0.05)


def dg_sgld():
    return fedmcmc.dg_sgld(FEDERATION.posterior, **LOCAL)


def noisy_lsd(**settings):
    return fedmcmc.lsd(
        FEDERATION.posterior,
        step_size=STEP_SIZE,
        temperature=TEMPERATURE,
        batch_size=BATCH_SIZE,
        noise="clients",
        **settings,
    )


def get_positions(state):
    return jnp.concatenate([state.broadcast.position, state.clients.position.reshape(-1)])


@pytest.mark.parametrize("rho", fast_and_slow([0.6, 1.0], [0.6]))
def test_copies_of_dg_sgld_are_correlated(rho):
    law = laws_consensus.consensus(
        *FEDERATION.split_terms,
        step_sizes=STEP_SIZE,
        num_local_steps=3,
        tolerances=0.05,
        correlation=rho,
    )
    kernel = fedmcmc.share_momentum(dg_sgld(), rho)
    draws = draw(kernel, DATA, START, KEYS, 5, get_positions)
    assert worst_z(draws, law.rounds(START, 5)[-1]) < LIMIT


SUMS = {f"{prior}-{rho}": (prior, rho) for prior in ("server", "split") for rho in (None, 0.5, 1.0)}


@pytest.mark.parametrize("case", fast_and_slow(SUMS, ["server-None", "split-0.5", "server-1.0"]))
def test_the_noise_of_all_clients_has_the_distribution_of_the_servers(case):
    prior, rho = SUMS[case]
    kernel = noisy_lsd(prior=prior)
    if rho is not None:
        kernel = fedmcmc.share_momentum(kernel, rho)
    exact = FEDERATION.target
    precision = np.linalg.inv(exact.covariance)
    noise = STEP_SIZE**2 * FEDERATION.location_noises(BATCH_SIZE).sum(0)
    noise = noise + 2 * STEP_SIZE * TEMPERATURE * np.eye(3)
    matrix, shift = np.eye(3) - STEP_SIZE * precision, STEP_SIZE * precision @ exact.mean
    law = iterate(lambda law, _: push(law, matrix, shift, noise), at_point(START), 4)[-1]
    assert worst_z(draw(kernel, DATA, START, KEYS, 4), law) < LIMIT


@jax.jit
def draw_messages(kernel, keys):
    """Return the messages of all clients in many first rounds, ``[num, num_clients, d]``."""
    state = kernel.init(jax.random.key(3), jnp.asarray(START), DATA)
    like = state.broadcast._replace(shared=())

    def draw_round(key):
        shared = kernel.prepare_shared(jax.random.fold_in(key, 99), like)

        def send(index):
            client = DATA.client(index)
            draws = kernel.prepare(jax.random.fold_in(key, client.index), like, client)
            return kernel.step(draws, like._replace(shared=shared), (), client)[0]

        return jax.vmap(send)(jnp.arange(DATA.num_clients))

    return jax.vmap(draw_round)(keys)


def test_the_noise_of_two_clients_has_the_correlation_rho():
    kernel = fedmcmc.lsd(FEDERATION.posterior, step_size=STEP_SIZE, noise="clients")
    messages = np.asarray(draw_messages(fedmcmc.share_momentum(kernel, 0.4), KEYS[:4096]))
    shares = np.asarray(DATA.share)
    scaled = (messages - messages.mean(0)) / shares[:, None] / np.sqrt(2 / STEP_SIZE)
    expected = 0.4 + np.diag(0.6 / shares)
    covariance = np.einsum("nad,nbd->ab", scaled, scaled) / (3 * (len(scaled) - 1))
    diagonal = np.diag(expected)
    spread = np.sqrt((np.outer(diagonal, diagonal) + expected**2) / (3 * len(scaled)))
    assert np.abs((covariance - expected) / spread).max() < 5


@pytest.mark.parametrize("name", ["fa_hmc", "fa_ld"])
def test_rho_of_a_kernel_is_a_shorthand(name):
    settings = dict(step_size=0.01, num_local_steps=2)
    if name == "fa_hmc":
        settings["num_integration_steps"] = 3
    build = getattr(fedmcmc, name)
    shared = fedmcmc.share_momentum(build(FEDERATION.posterior, **settings), 0.3)
    chex.assert_trees_all_equal(build(FEDERATION.posterior, rho=0.3, **settings), shared)


def test_momentum_is_shared_within_and_around_another_transform():
    inner = fedmcmc.compress(fedmcmc.share_momentum(dg_sgld(), 0.5), fedmcmc.quantize(8))
    outer = fedmcmc.share_momentum(fedmcmc.compress(dg_sgld(), fedmcmc.quantize(8)), 0.5)
    chex.assert_trees_all_equal(inner, outer)


@pytest.mark.parametrize(
    "kernel",
    [
        fedmcmc.lsd(FEDERATION.posterior, step_size=0.1),
        fedmcmc.dsgld(FEDERATION.posterior, step_size=0.1, num_local_steps=2),
        fedmcmc.mala(FEDERATION.posterior, jnp.zeros(3)),
    ],
    ids=lambda kernel: kernel.name,
)
def test_kernels_whose_clients_draw_no_noise_raise(kernel):
    with pytest.raises(ValueError, match=f"The clients of {kernel.name} draw no momenta"):
        fedmcmc.share_momentum(kernel, 0.5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(participation=fedmcmc.bernoulli(0.5)), "needs the noise of all clients"),
        (dict(metric=jnp.ones(3)), "does not support metric= and preconditioner="),
    ],
)
def test_settings_that_change_the_sum_of_the_noise_raise(settings, message):
    with pytest.raises(ValueError, match=message):
        noisy_lsd(**settings)
