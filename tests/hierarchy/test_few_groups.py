"""Warnings of groups that are too few to estimate how much groups differ."""

import jax
import numpy as np
import numpyro
import pytest
from numpyro import distributions as dist

import fedmcmc
from fedmcmc import diagnostics
from fedmcmc.hierarchy import few_groups_warning
from tests.hierarchy.models import gaussian, logistic, rows

NUM, LIMIT = 1000, 5.0
ZEROS, LOG_TAU = np.zeros((1, NUM)), np.log(np.linspace(0.5, 1.5, NUM))[None]
SHARED = {"slope": ZEROS, "tau": LOG_TAU}
HALF_NORMAL_SD = np.sqrt(1 - 2 / np.pi)


def correlated(x, y=None):
    sds = numpyro.sample("sds", dist.HalfNormal(2).expand([2]).to_event(1))
    normal = dist.MultivariateNormal(np.zeros(2), scale_tril=jax.numpy.diag(sds))
    effects = numpyro.sample("effects", normal, infer={"local": True})
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Normal(effects[0] + effects[1] * x, 1.0), obs=y)


def improper(name):
    """Return a model with an improper prior of the spread `tau` or of the mean `mu`."""
    support = dist.constraints.positive if name == "tau" else dist.constraints.real
    priors = {"tau": dist.HalfNormal(1), "mu": dist.Normal(0, 2)}
    priors[name] = dist.ImproperUniform(support, (), ())

    def model(x, y=None):
        tau, mu = (numpyro.sample(site, priors[site]) for site in ("tau", "mu"))
        effect = numpyro.sample("effect", dist.Normal(mu, tau), infer={"local": True})
        with numpyro.plate("rows", len(x)):
            numpyro.sample("y", dist.Normal(effect, 1.0), obs=y)

    return model


def build_posterior(model, **settings):
    kind = "logistic" if model is logistic else "gaussian"
    return fedmcmc.from_numpyro(model, example=rows(0, 4, kind), **settings)


def assert_half_normal_sd(sd):
    # The fourth moment of a half-normal is below the moment of a normal.
    assert abs(sd / HALF_NORMAL_SD - 1) * np.sqrt(2 * NUM) < LIMIT


@pytest.mark.parametrize("centered", [0.0, 1.0])
def test_the_warning_compares_the_sd_of_the_prior_with_that_of_the_posterior(centered):
    posterior = build_posterior(logistic, centered=centered)
    warning = few_groups_warning(posterior, 4, SHARED)
    problem = "4 groups are too few to estimate how much groups differ"
    assert warning.startswith(f"{problem}: the prior of tau matters (prior sd ")
    before, after = (float(x.strip("(),.")) for x in warning.split() if x.strip("(),.")[:2] == "0.")
    assert_half_normal_sd(before)
    np.testing.assert_allclose(after, np.std(np.exp(LOG_TAU)), rtol=1e-2)
    assert few_groups_warning(fedmcmc.marginal(posterior), 4, SHARED) == warning
    assert few_groups_warning(posterior, 5, SHARED) is None


def test_a_spread_that_is_no_parameter_has_no_warning():
    posterior, shared = build_posterior(gaussian), {"mu": ZEROS, "slope": ZEROS}
    assert few_groups_warning(posterior, 2, shared) is None
    by_hand = posterior._replace(local=posterior.local._replace(prior_spread_fn=None))
    assert "the prior of their spread matters" in few_groups_warning(by_hand, 1, shared)
    draw_prior = build_posterior(correlated).local.prior_spread_fn
    assert sorted(draw_prior(jax.random.key(0))) == ["sds"]


def test_an_improper_prior_has_no_sd():
    """NumPyro cannot draw from it; an improper prior of the mean does not hide the spread's sd."""
    shared = {"mu": ZEROS, "tau": LOG_TAU}
    warning = few_groups_warning(build_posterior(improper("tau")), 4, shared)
    assert "the prior of tau, which is improper, matters" in warning
    warning = few_groups_warning(build_posterior(improper("mu")), 4, shared)
    assert_half_normal_sd(float(warning.split("prior sd ")[1].split(",")[0]))


@pytest.mark.slow
def test_a_fit_and_a_run_of_few_groups_warn():
    data = fedmcmc.FederatedData.from_clients([rows(i, 9, "logistic") for i in range(3)])
    settings = dict(rng_key=jax.random.key(0), effort="approximate", progress=False)
    with pytest.warns(fedmcmc.SamplingWarning, match="3 groups are too few.*prior of tau"):
        fit = fedmcmc.fit(logistic, data, **settings)
    diagnosis = diagnostics.diagnose(fit.samples.draws, fit.posterior, data)
    assert "3 groups are too few" in diagnosis.findings[-1]
