"""SGLD, DSGLD and FSGLD have exactly the law of the closed form, round by round.

Independent chains from one start are compared with the exact mean and covariance after a finite
number of rounds at the step size of the run: no burn-in, no discretization bias, no tolerance.
"""

import jax
import numpy as np
import pytest

import fedmcmc
from tests.oracles.federations import LIMIT, Federation, worst_z, z_scores
from tests.support.lanes import fast_and_slow

NUM_CHAINS = 16384
FEDERATION = Federation()
F = Federation.probabilities
STEP_SIZE = 0.006
FIVE = dict(num_local_steps=5, probabilities=F)
UNEQUAL = dict(num_local_steps=(2, 7, 1, 4), probabilities=F)
CASES = {
    "sgld": ("sgld", None, {}),
    "sgld-minibatch-cool": ("sgld", None, dict(batch=5, temperature=0.05)),
    "dsgld-one-step-uniform": ("dsgld", None, dict(num_local_steps=1, batch=3, temperature=0.05)),
    "dsgld-hot": ("dsgld", None, dict(**FIVE, temperature=2.0)),
    "dsgld-distinct-rows": ("dsgld", None, dict(**FIVE, batch=3, replace=False)),
    # Cold and without heterogeneity, so that nothing hides the gradient noise.
    "fsgld-exact-distinct-rows": (
        "fsgld",
        "exact",
        dict(**FIVE, batch=3, replace=False, temperature=0.02),
    ),
    "dsgld-own-steps": ("dsgld", None, dict(**UNEQUAL, batch=3, temperature=0.3)),
    "fsgld-own-steps": ("fsgld", "dense", dict(**UNEQUAL, batch=3, alpha=0.5)),
    "fsgld-one-step": ("fsgld", "dense", dict(num_local_steps=1, probabilities=F)),
    "fsgld-dense-half": ("fsgld", "dense", dict(**FIVE, batch=3, alpha=0.5)),
    "fsgld-diagonal": ("fsgld", "diagonal", dict(**FIVE, temperature=0.5)),
    "fsgld-scaled-uniform": (
        "fsgld",
        "scaled_identity",
        dict(num_local_steps=5, batch=3, replace=False, alpha=0.5),
    ),
    "relay-noise-inside": ("relay", "dense", dict(**FIVE, scale=3.0, alpha=0.5)),
}
FAST = ("sgld-minibatch-cool", "fsgld-dense-half")


def run(kernel, *, num_rounds=12, collect=None):
    """Return draws after half of the rounds and after all of them."""
    return fedmcmc.sample(
        jax.random.key(0),
        kernel,
        FEDERATION.data,
        FEDERATION.start,
        num_rounds=num_rounds,
        thinning=num_rounds // 2,
        num_chains=NUM_CHAINS,
        collect=collect,
        progress=False,
    ).draws


def build(case):
    """Return the kernel and its law."""
    name, structure, settings = CASES[case]
    settings = dict(settings, step_size=STEP_SIZE)
    public = {"batch_size" if key == "batch" else key: x for key, x in settings.items()}
    if name == "sgld":
        return fedmcmc.sgld(FEDERATION.posterior, **public), FEDERATION.law(pooled=True, **settings)
    if name == "dsgld":
        return fedmcmc.dsgld(FEDERATION.posterior, **public), FEDERATION.law(**settings)
    surrogates, parameters = FEDERATION.surrogates(structure)
    law = FEDERATION.law(surrogates=parameters, **settings)
    if name == "fsgld":
        return fedmcmc.fsgld(FEDERATION.posterior, surrogates, **public), law
    noisy = fedmcmc.noisy(fedmcmc.full_gradient(), public["scale"])
    kernel = fedmcmc.relay(
        FEDERATION.posterior,
        fedmcmc.conducive(noisy, surrogates, public["alpha"], shares=F),
        participation=fedmcmc.categorical(F),
        step_size=STEP_SIZE,
        num_local_steps=5,
    )
    return kernel, law


@pytest.mark.parametrize("case", fast_and_slow(CASES, FAST, ["fsgld-dense-half"]))
def test_law_after_six_and_twelve_rounds(case):
    kernel, law = build(case)
    expected, draws = law.rounds(FEDERATION.start, 12), run(kernel)
    assert worst_z(draws[:, 0], expected[6]) < LIMIT
    assert worst_z(draws[:, 1], expected[12]) < LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("case", ["dsgld-hot", "fsgld-diagonal"])
def test_law_after_many_rounds_is_stationary(case):
    kernel, law = build(case)
    limit, late = law.stationary(), law.rounds(FEDERATION.start, 120)[-1]
    np.testing.assert_allclose(late.mean, limit.mean, rtol=0, atol=1e-4)
    np.testing.assert_allclose(late.covariance, limit.covariance, rtol=1e-3, atol=1e-5)
    assert worst_z(run(kernel, num_rounds=120)[:, 1], limit) < LIMIT


@pytest.mark.slow
def test_local_iterates_have_their_law():
    kernel, law = build("fsgld-dense-half")
    draws = run(kernel, collect=fedmcmc.runs.local_positions)[:, -1]
    start = law.rounds(FEDERATION.start, 11)[-1]
    for t, expected in enumerate(law.local(start)):
        assert worst_z(draws[:, t], expected) < LIMIT, t
    average = law.local_average(start)
    gap = draws.astype(float) - average.mean
    products = np.einsum("cti,ctj->cij", gap, gap) / draws.shape[1]
    assert np.abs(z_scores(draws.mean(1), average.mean)).max() < LIMIT
    assert np.abs(z_scores(products, average.covariance)).max() < LIMIT


@pytest.mark.slow
def test_chains_are_independent():
    kernel, law = build("sgld")
    draws = run(kernel)[:, -1].astype(float) - law.rounds(FEDERATION.start, 12)[-1].mean
    neighbors = draws[0::2, :, None] * draws[1::2, None, :]
    assert np.abs(z_scores(neighbors, 0.0)).max() < LIMIT


@pytest.mark.parametrize("structure", [None, "dense"])
def test_small_steps_of_different_numbers_per_client_sample_the_posterior(structure):
    """The weights of the oracle are right, not only equal to the weights of the kernel."""
    parameters = None if structure is None else FEDERATION.surrogates(structure)[1]
    law = FEDERATION.law(**UNEQUAL, step_size=1e-6, surrogates=parameters).stationary()
    np.testing.assert_allclose(law.mean, FEDERATION.target.mean, rtol=0, atol=2e-3)
    np.testing.assert_allclose(law.covariance, FEDERATION.target.covariance, rtol=0.02, atol=1e-4)


def test_predictions_use_the_number_of_steps_of_each_client():
    surrogates, parameters = FEDERATION.surrogates("dense")
    kernel = fedmcmc.fsgld(FEDERATION.posterior, surrogates, step_size=STEP_SIZE, **UNEQUAL)
    predicted = fedmcmc.predict_bias(kernel, FEDERATION.data, FEDERATION.surrogates("exact")[0])
    law = FEDERATION.law(**UNEQUAL, step_size=STEP_SIZE, surrogates=parameters).stationary()
    np.testing.assert_allclose(predicted.mean, law.mean, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(predicted.covariance, law.covariance, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ((2, 7, 1), "num_local_steps must have one number for each of 4 clients, got 3"),
        ((2, 7, 0, 4), "num_local_steps must be a positive integer, or one per client"),
        ((2.0, 7.0, 1.0, 4.0), "num_local_steps must be a positive integer, or one per client"),
    ],
)
def test_numbers_of_steps_that_do_not_fit_raise(steps, message):
    settings = dict(step_size=STEP_SIZE, num_local_steps=steps)
    with pytest.raises(ValueError, match=message):
        fedmcmc.fsgld(FEDERATION.posterior, FEDERATION.surrogates("exact")[0], **settings)
    with pytest.raises(ValueError, match=message):
        kernel = fedmcmc.dsgld(FEDERATION.posterior, **settings)
        kernel.init(jax.random.key(0), FEDERATION.start, FEDERATION.data)
