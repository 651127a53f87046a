"""Kernels whose clients share part of their noise: exact moments after some rounds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from tests.laws.test_dg_sgld import FEDERATION, LOCAL, NUM_CHAINS, START, after, densities
from tests.oracles import laws_consensus
from tests.oracles.federations import LIMIT, worst_z
from tests.oracles.laws import Moments, location_noise, posterior

KEY = jax.random.key(3)
STEP_SIZE, TEMPERATURE, BATCH_SIZE = 0.004, 0.3, 3


def dg_sgld():
    return fedmcmc.dg_sgld(FEDERATION.posterior, **LOCAL)


@pytest.mark.parametrize("rho", [0.6, 1.0])
def test_copies_of_dg_sgld_are_correlated(rho):
    law = laws_consensus.consensus(
        *densities(),
        step_sizes=LOCAL["step_size"],
        num_local_steps=LOCAL["num_local_steps"],
        tolerances=LOCAL["tolerance"],
        correlation=rho,
    )
    expected = law.rounds(START, 5)[-1]
    kernel = fedmcmc.share_momentum(dg_sgld(), rho)
    draws = after(kernel, jax.random.split(KEY, NUM_CHAINS), 5)
    assert worst_z(draws, expected) < LIMIT


def noisy_lsd(**settings):
    return fedmcmc.lsd(
        FEDERATION.posterior,
        step_size=STEP_SIZE,
        temperature=TEMPERATURE,
        batch_size=BATCH_SIZE,
        noise="clients",
        **settings,
    )


@jax.jit
def positions(kernel, keys):
    """Return positions after four rounds, a row per key."""
    init, step = fedmcmc.simulate(kernel, FEDERATION.data)

    def chain(key):
        start = init(jnp.asarray(START))
        return jax.lax.fori_loop(0, 4, lambda _, s: step(key, s)[0], start).broadcast.position

    return jax.vmap(chain)(keys)


@pytest.mark.parametrize("rho", [None, 0.5, 1.0])
@pytest.mark.parametrize("prior", ["server", "split"])
def test_the_noise_of_all_clients_has_the_distribution_of_the_servers(rho, prior):
    kernel = noisy_lsd(prior=prior)
    if rho is not None:
        kernel = fedmcmc.share_momentum(kernel, rho)
    exact = posterior(
        FEDERATION.precisions, FEDERATION.means, FEDERATION.prior_precision, FEDERATION.prior_mean
    )
    precision = np.linalg.inv(exact.covariance)
    pairs = zip(FEDERATION.rows, FEDERATION.row_precisions, strict=True)
    gradients = sum(location_noise(x, p, BATCH_SIZE, replace=True) for x, p in pairs)
    noise = 2 * STEP_SIZE * TEMPERATURE * np.eye(3) + STEP_SIZE**2 * gradients
    contraction = np.eye(3) - STEP_SIZE * precision
    mean, covariance = START - exact.mean, np.zeros((3, 3))
    for _ in range(4):
        mean, covariance = contraction @ mean, contraction @ covariance @ contraction + noise
    draws = positions(kernel, jax.random.split(KEY, NUM_CHAINS))
    assert worst_z(draws, Moments(exact.mean + mean, covariance)) < LIMIT


def messages(kernel, num=4096):
    """Return the messages of all clients in many first rounds, ``[num, num_clients, d]``."""
    data = FEDERATION.data
    state = kernel.init(KEY, jnp.asarray(START), data)

    @jax.vmap
    def one(key):
        like = state.broadcast._replace(shared=())
        shared = kernel.prepare_shared(jax.random.fold_in(key, 99), like)
        broadcast = like._replace(shared=shared)

        def of_client(client, own):
            draws = kernel.prepare(jax.random.fold_in(key, client.index), like, client)
            return kernel.step(draws, broadcast, own, client)[0]

        return jax.vmap(lambda i: of_client(data.client(i), ()))(jnp.arange(data.num_clients))

    return np.asarray(jax.jit(one)(jax.random.split(KEY, num)))


def test_noise_of_two_clients_has_the_correlation_that_is_asked_for():
    kernel = fedmcmc.share_momentum(
        fedmcmc.lsd(FEDERATION.posterior, step_size=STEP_SIZE, noise="clients"), 0.4
    )
    sent = messages(kernel)
    shares = np.asarray(FEDERATION.data.share)
    scaled = (sent - sent.mean(0)) / shares[:, None] / np.sqrt(2 / STEP_SIZE)
    wanted = 0.4 + np.diag(0.6 / shares)
    found = np.einsum("nad,nbd->ab", scaled, scaled) / (3 * (len(scaled) - 1))
    diagonal = np.diag(wanted)
    spread = np.sqrt((np.outer(diagonal, diagonal) + wanted**2) / (3 * len(scaled)))
    assert np.abs((found - wanted) / spread).max() < 5


@pytest.mark.parametrize("name", ["fa_hmc", "fa_ld"])
def test_rho_of_a_kernel_is_a_shorthand(name):
    settings = dict(step_size=0.01, num_local_steps=2)
    if name == "fa_hmc":
        settings["num_integration_steps"] = 3
    build = getattr(fedmcmc, name)
    given = build(FEDERATION.posterior, rho=0.3, **settings)
    changed = fedmcmc.share_momentum(build(FEDERATION.posterior, **settings), 0.3)
    both = [positions(kernel, jax.random.split(KEY, 2)) for kernel in (given, changed)]
    np.testing.assert_array_equal(*both)


def test_within_another_transform():
    inner = fedmcmc.compress(fedmcmc.share_momentum(dg_sgld(), 0.5), fedmcmc.quantize(8))
    outer = fedmcmc.share_momentum(fedmcmc.compress(dg_sgld(), fedmcmc.quantize(8)), 0.5)
    both = [positions(kernel, jax.random.split(KEY, 2)) for kernel in (inner, outer)]
    np.testing.assert_array_equal(*both)


@pytest.mark.parametrize(
    "kernel",
    [
        fedmcmc.lsd(FEDERATION.posterior, step_size=0.1),
        fedmcmc.dsgld(FEDERATION.posterior, step_size=0.1, num_local_steps=2),
        fedmcmc.mala(FEDERATION.posterior, jnp.zeros(3)),
    ],
    ids=lambda kernel: kernel.name,
)
def test_kernels_whose_clients_draw_no_noise_are_refused(kernel):
    with pytest.raises(ValueError, match=f"The clients of {kernel.name} draw no momenta"):
        fedmcmc.share_momentum(kernel, 0.5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(participation=fedmcmc.bernoulli(0.5)), "needs the noise of all clients"),
        (dict(metric=jnp.ones(3)), "does not support metric= and preconditioner="),
    ],
)
def test_settings_that_change_the_sum_of_the_noise_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        noisy_lsd(**settings)
