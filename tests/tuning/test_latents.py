"""What is predicted of kernels that move latents, beside the law of all latents."""

import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc.hierarchy import conjugate, hmc, independence, ula
from fedmcmc.runs import as_consortium
from tests.oracles import laws_joint
from tests.oracles.federations_gibbs import POSTERIOR as NORMAL
from tests.oracles.federations_joint import DATA, MODEL, POSTERIOR, PROBABILITIES, START, D
from tests.support.lanes import fast_and_slow

STEP = 0.1
METRIC = np.array([[0.8, 0.3], [0.3, 1.2]])
MARGINAL = fedmcmc.marginal(POSTERIOR)
MODE = jnp.asarray(MODEL.posterior.mean[:D], jnp.float32)


@pytest.fixture(scope="module")
def surrogates():
    return fedmcmc.surrogates.taylor(MARGINAL, DATA, MODE)


def law_of(refresh, probabilities=(1, 1, 1), order="refresh_first", **settings):
    rounds = [
        (
            chance,
            laws_joint.langevin_round(
                MODEL, refresh, weights, step_size=STEP, order=order, **settings
            ),
        )
        for chance, weights in laws_joint.cohorts(np.asarray(probabilities, float))
    ]
    law = laws_joint.stationary(rounds, MODEL.at_modes(START))
    return law.mean[:D], law.covariance[:D, :D]


CASES = {
    "draws": (conjugate(), {}),
    "some clients": (independence(), dict(probabilities=PROBABILITIES)),
    "many draws, a metric": (hmc(3), dict(num_draws=3, metric=METRIC)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", fast_and_slow(CASES, ["draws"]))
def test_of_draws_the_law_is_exact(case, surrogates):
    refresh, settings = CASES[case]
    own = dict(settings)
    if "probabilities" in own:
        own["participation"] = fedmcmc.bernoulli(own.pop("probabilities"))
    kernel = fedmcmc.lsd(POSTERIOR, step_size=STEP, refresh=refresh, **own)
    told = fedmcmc.predict_bias(kernel, DATA, surrogates)
    mean, covariance = law_of(laws_joint.exact, **settings)
    assert not told.simulated and "new latents in every move" in str(told)
    np.testing.assert_allclose(told.mean, mean, atol=3e-5)
    np.testing.assert_allclose(told.covariance, covariance, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(
        told.target_covariance, MODEL.posterior.covariance[:D, :D], rtol=1e-3
    )


LANGEVIN = {
    "refresh first": (0.6, 1, {}),
    "gradient first": (0.3, 3, dict(order="gradient_first")),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", LANGEVIN)
def test_of_langevin_steps_it_is_simulated(case, surrogates):
    size, steps, settings = LANGEVIN[case]
    kernel = fedmcmc.lsd(POSTERIOR, step_size=STEP, refresh=ula(size, num_steps=steps), **settings)
    told = fedmcmc.predict_bias(kernel, DATA, surrogates)
    mean, covariance = law_of(lambda group: laws_joint.ula(group, size, steps), **settings)
    assert "new latents depend on the previous" in told.simulated
    assert (np.abs(told.mean - mean) < 5.5 * told.mean_error).all()
    sd = np.sqrt(np.diag(covariance))
    assert (np.abs(np.sqrt(np.diag(told.covariance)) - sd) < 5.5 * told.sd_error).all()
    plain = law_of(laws_joint.exact)[1]  # what draws would give is told apart
    assert (np.abs(np.sqrt(np.diag(plain)) - sd) > 10 * told.sd_error).any()


@pytest.mark.slow
def test_what_cannot_be_predicted_is_refused(surrogates):
    gibbs = fedmcmc.fed_gibbs(NORMAL, refresh=conjugate())
    with pytest.raises(ValueError, match="fed_gibbs is exact"):
        fedmcmc.predict_bias(gibbs, DATA, surrogates)
    kernel = fedmcmc.lsd(POSTERIOR, step_size=STEP, refresh=conjugate())
    elsewhere = as_consortium(DATA)
    with pytest.raises(ValueError, match="in one place"):
        fedmcmc.predict_bias(kernel, elsewhere, surrogates)
