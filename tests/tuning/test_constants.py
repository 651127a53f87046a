"""Constants of bounds: the variance of a round's gradient, compared with rounds of kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc.types import ClientTerms
from tests.oracles.federations import LIMIT, Federation, z_scores

FEDERATION = Federation()
DATA, POSTERIOR = FEDERATION.data, FEDERATION.posterior
START = jnp.asarray(FEDERATION.start, jnp.float32)
STEP = 0.7  # so long that gradients move far more than noise
NUM = 16_384


def drift():
    """Return the gradient of the log posterior at the start."""
    slopes = FEDERATION.precisions @ FEDERATION.start
    pulls = np.einsum("cij,cj->ci", FEDERATION.precisions, FEDERATION.means) - slopes
    gap = FEDERATION.prior_mean - FEDERATION.start
    return pulls, pulls.sum(0) + FEDERATION.prior_precision @ gap


def squared_noise(kernel):
    """Return squared lengths of the gradients' noise in many first rounds."""
    init, step = fedmcmc.simulate(kernel, DATA)
    keys = jax.random.split(jax.random.key(0), NUM)
    moved, _ = jax.jit(jax.vmap(step, in_axes=(0, None)))(keys, init(START))
    noise = np.asarray(moved.broadcast.position, float) - FEDERATION.start - STEP * drift()[1]
    return ((noise**2).sum(1) - 2 * STEP * 3) / STEP**2


@pytest.mark.parametrize(
    ("compressor", "batch_size", "probability"),
    # With everyone and no compression, minibatches alone make noise.
    [(None, 2, 1.0), (fedmcmc.sparsify(0.4), 2, 0.6)],
)
def test_noise_at_a_position_is_the_noise_of_rounds(compressor, batch_size, probability):
    noise = fedmcmc.tuning.noise_at_mode(
        POSTERIOR,
        DATA,
        START,
        compressor=compressor,
        batch_size=batch_size,
        probability=probability,
    )
    settings = dict(step_size=STEP, batch_size=batch_size)
    if probability < 1:
        settings["participation"] = fedmcmc.bernoulli(probability)
    if compressor is None:
        kernel = fedmcmc.lsd(POSTERIOR, **settings)
    else:
        kernel = fedmcmc.qlsd(POSTERIOR, compressor=compressor, **settings)
    assert np.abs(z_scores(squared_noise(kernel), noise.qlsd)).max() < LIMIT
    np.testing.assert_allclose(noise.heterogeneity, (drift()[0] ** 2).sum(), rtol=1e-4)


def test_noise_of_a_quantized_round_is_below_its_bound():
    compressor = fedmcmc.quantize(2)
    constants = fedmcmc.tuning.noise_at_mode(POSTERIOR, DATA, START, compressor=compressor)
    # The quantizer's variance of a coordinate depends on its distance from two levels.
    norms = np.linalg.norm(drift()[0], axis=1)
    above = np.modf(2 * np.abs(drift()[0]) / norms[:, None])[0]
    exact = ((norms / 2) ** 2 * (above * (1 - above)).sum(1)).sum()
    noise = squared_noise(fedmcmc.qlsd(POSTERIOR, compressor=compressor, step_size=STEP))
    assert np.abs(z_scores(noise, exact)).max() < LIMIT
    assert constants.minibatch == 0.0 and exact < constants.qlsd


def test_noise_of_a_relay_with_exact_surrogates_is_its_constant():
    surrogates = FEDERATION.surrogates("exact")[0]
    probabilities, batch_size = FEDERATION.probabilities, 3
    constants = fedmcmc.tuning.relay_constants(
        POSTERIOR, DATA, surrogates, START[None], probabilities=probabilities
    )
    kernel = fedmcmc.fsgld(
        POSTERIOR,
        surrogates,
        step_size=STEP,
        num_local_steps=1,
        batch_size=batch_size,
        probabilities=probabilities,
    )
    assert np.abs(z_scores(squared_noise(kernel), constants.fsgld / batch_size)).max() < LIMIT


def test_constants_of_a_relay_are_largest_values_over_positions():
    rng = np.random.default_rng(0)
    positions = rng.normal(size=(3, 3))
    precisions, means = FEDERATION.surrogates("dense")[1]
    constants = fedmcmc.tuning.relay_constants(
        POSTERIOR, DATA, FEDERATION.surrogates("dense")[0], jnp.asarray(positions, jnp.float32)
    )
    for c, rows in enumerate(FEDERATION.rows):
        gamma, eps = [], []
        for theta in positions:
            gradients = (rows - theta) @ FEDERATION.row_precisions[c]
            slope = precisions[c] @ (means[c] - theta) / len(rows)
            gamma.append((gradients**2).sum(1).max())
            eps.append(((gradients - slope) ** 2).sum(1).mean())
        np.testing.assert_allclose(constants.gamma_squared[c], max(gamma), rtol=1e-4)
        np.testing.assert_allclose(constants.eps_squared[c], max(eps), rtol=1e-4)
    weights = 4 * np.array(FEDERATION.sizes) ** 2
    for total, squared in (("dsgld", "gamma_squared"), ("fsgld", "eps_squared")):
        expected = weights @ np.asarray(getattr(constants, squared))
        np.testing.assert_allclose(getattr(constants, total), expected, rtol=1e-5)


def compute_noise(posterior=POSTERIOR, **settings):
    return fedmcmc.tuning.noise_at_mode(posterior, DATA, START, **settings)


def compute_relay(probabilities):
    surrogates, _ = FEDERATION.surrogates("exact")
    return fedmcmc.tuning.relay_constants(
        POSTERIOR, DATA, surrogates, START[None], probabilities=probabilities
    )


@pytest.mark.parametrize(
    ("compute", "message"),
    [
        (lambda: compute_noise(probability=0.0), r"probability must lie in \(0, 1\]"),
        (lambda: compute_noise(batch_size=0), "batch_size must be a positive integer"),
        (
            lambda: compute_noise(POSTERIOR._replace(loglikelihood_fn=ClientTerms())),
            "must have one term per row",
        ),
        (lambda: compute_relay([0.5, 0.5]), "one positive number per client, 4 in all"),
    ],
)
def test_invalid_arguments_raise(compute, message):
    with pytest.raises(ValueError, match=message):
        compute()
