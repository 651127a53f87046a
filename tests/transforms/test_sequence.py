"""Sequences of kernels: the distribution after a round, and errors for unsuitable kernels."""

import jax
import numpy as np
import pytest

import fedmcmc
from tests.oracles import laws
from tests.oracles.federations import LIMIT, worst_z
from tests.oracles.federations_averaging import FEDERATION, law

POSTERIOR, DATA = FEDERATION.posterior, FEDERATION.data
HMC = dict(num_local_steps=2, rho=0.5)


def fa_hmc(**settings):
    return fedmcmc.fa_hmc(POSTERIOR, step_size=0.05, num_integration_steps=3, **HMC, **settings)


@pytest.mark.slow
def test_a_round_has_the_distribution_of_a_round_of_each_kernel():
    kernel = fedmcmc.sequence(
        fa_hmc(control_variate=True),
        fedmcmc.lsd(POSTERIOR, step_size=0.004),
        fa_hmc(gradient_noise=5.0),
    )
    settings = dict(step_size=0.05, num_steps=3, **HMC)
    maps = [
        law(**settings, control_variate=True).map_of(np.ones(4)),
        None,
        law(**settings, gradient_noise=5.0).map_of(np.ones(4)),
    ]
    target = laws.posterior(
        FEDERATION.precisions, FEDERATION.means, FEDERATION.prior_precision, FEDERATION.prior_mean
    )
    precision = np.linalg.inv(target.covariance)
    contraction = np.eye(3) - 0.004 * precision
    maps[1] = (contraction, 0.004 * precision @ target.mean, 0.008 * np.eye(3))
    moments = laws.Moments(FEDERATION.start, np.zeros((3, 3)))
    for a, b, v in maps * 2:
        moments = laws.Moments(a @ moments.mean + b, a @ moments.covariance @ a.T + v)
    samples = fedmcmc.sample(
        jax.random.key(0),
        kernel,
        DATA,
        FEDERATION.start,
        num_rounds=2,
        num_chains=16384,
        progress=False,
    )
    assert worst_z(samples.draws[:, 1], moments) < LIMIT
    # Three numbers from each of four clients, in two, one and one phases.
    assert (samples.info["bits_up"] == 4 * 4 * 3 * 32).all()
    assert (np.asarray(samples.state.broadcast.round) == 2).all()


def test_compressors_within_and_around_draw_different_words():
    quantized = [fedmcmc.compress(fa_hmc(), fedmcmc.quantize(2)) for _ in range(2)]
    kernel = fedmcmc.compress(fedmcmc.sequence(*quantized), fedmcmc.quantize(2))
    client = DATA.client(1)
    state = kernel.init(jax.random.key(0), FEDERATION.start, DATA)
    draws = kernel.prepare(jax.random.key(1), state.broadcast, client)
    words = [x for x in jax.tree.leaves(draws) if x.dtype == np.uint32]
    assert len(words) == 2 and not np.array_equal(*words)


MEMORY = fedmcmc.compress(fa_hmc(), fedmcmc.memory(fedmcmc.quantize(2)))
SNAPSHOT = fedmcmc.lsd_pp(POSTERIOR, step_size=0.01, batch_size=2, refresh_every=3)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: fedmcmc.compress(fedmcmc.sequence(MEMORY, MEMORY), fedmcmc.quantize(2)),
            "compress each kernel first",
        ),
        (
            lambda: fedmcmc.sequence(MEMORY, fa_hmc()),
            "all or none of them with memories of all",
        ),
        (lambda: fedmcmc.sequence(fa_hmc()), "two or more kernels, got 1"),
        (
            lambda: fedmcmc.sequence(fa_hmc(), fa_hmc(participation=fedmcmc.uniform(2))),
            "use the same participation",
        ),
        (
            lambda: fedmcmc.sequence(SNAPSHOT, fa_hmc()).init(
                jax.random.key(0), FEDERATION.start, DATA
            ),
            "Only the last kernel of a sequence may keep a snapshot",
        ),
    ],
)
def test_unsuitable_kernels_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_parts_of_a_sequence_must_be_kernels():
    message = r"kernels\[1\] must be a fedmcmc.FederatedKernel, got int"
    with pytest.raises(TypeError, match=message):
        fedmcmc.sequence(fa_hmc(), 3)
