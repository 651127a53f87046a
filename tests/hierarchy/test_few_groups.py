"""Warnings of groups that are too few to estimate how much groups differ."""

import jax
import numpy as np
import numpyro
import pytest
from numpyro import distributions as dist

import fedmcmc
from fedmcmc import diagnostics, hierarchy
from tests.hierarchy.models import gaussian, logistic, rows

NUM, LIMIT = 1000, 5.0
SHARED = {"tau": np.log(np.linspace(0.5, 1.5, NUM))[None], "slope": np.zeros((1, NUM))}


def correlated(x, y=None):
    sds = numpyro.sample("sds", dist.HalfNormal(2).expand([2]).to_event(1))
    normal = dist.MultivariateNormal(np.zeros(2), scale_tril=jax.numpy.diag(sds))
    effects = numpyro.sample("effects", normal, infer={"local": True})
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Normal(effects[0] + effects[1] * x, 1.0), obs=y)


def posterior(model, **settings):
    kind = "logistic" if model is logistic else "gaussian"
    return fedmcmc.from_numpyro(model, example=rows(0, 4, kind), **settings)


@pytest.mark.parametrize("centered", [0.0, 1.0])
def test_what_the_prior_says_is_beside_what_is_left(centered):
    own = posterior(logistic, centered=centered)
    told = hierarchy.few_groups_warning(own, 4, SHARED)
    problem = "4 groups are too few to estimate how much groups differ"
    assert told.startswith(f"{problem}: the prior of tau matters (its sd is")
    before, after = (float(x.strip("()")) for x in told.split() if x.strip("()")[:2] == "0.")
    half_normal = np.sqrt(1 - 2 / np.pi)
    # Of as many draws; a fourth moment of a half-normal below that of a normal.
    assert abs(before / half_normal - 1) * np.sqrt(2 * NUM) < LIMIT
    np.testing.assert_allclose(after, np.std(np.exp(SHARED["tau"])), rtol=1e-2)
    assert hierarchy.few_groups_warning(fedmcmc.marginal(own), 4, SHARED) == told
    assert hierarchy.few_groups_warning(own, 5, SHARED) is None


def test_a_spread_that_is_no_parameter_is_not_spoken_of():
    shared = {"mu": np.zeros((1, 400)), "slope": np.zeros((1, 400))}
    own = posterior(gaussian)
    assert hierarchy.few_groups_warning(own, 2, shared) is None
    by_hand = own._replace(local=own.local._replace(prior_spread_fn=None))
    assert "the prior of their spread matters" in hierarchy.few_groups_warning(by_hand, 1, shared)
    assert sorted(posterior(correlated).local.prior_spread_fn(jax.random.key(0))) == ["sds"]


@pytest.mark.parametrize("flat", ["tau", "mu"])
def test_a_flat_prior_has_no_sd(flat):
    """NumPyro draws from no flat prior; that of a mean does not hide the sd of a scale's."""
    positive, real = dist.constraints.positive, dist.constraints.real

    def model(x, y=None):
        priors = {"tau": dist.HalfNormal(1), "mu": dist.Normal(0, 2)}
        support = positive if flat == "tau" else real
        priors |= {flat: dist.ImproperUniform(support, (), ())}
        tau, mu = (numpyro.sample(name, priors[name]) for name in ("tau", "mu"))
        effect = numpyro.sample("effect", dist.Normal(mu, tau), infer={"local": True})
        with numpyro.plate("rows", len(x)):
            numpyro.sample("y", dist.Normal(effect, 1.0), obs=y)

    shared = {"tau": SHARED["tau"], "mu": np.zeros((1, NUM))}
    told = hierarchy.few_groups_warning(posterior(model), 4, shared)
    if flat == "tau":
        assert "the prior of tau, which is improper, matters" in told
    else:
        before = float(told.split("its sd is ")[1].split()[0])
        assert abs(before / np.sqrt(1 - 2 / np.pi) - 1) * np.sqrt(2 * NUM) < LIMIT


@pytest.mark.slow
def test_a_fit_and_a_run_of_few_groups_warn():
    data = fedmcmc.FederatedData.from_clients([rows(i, 9, "logistic") for i in range(3)])
    with pytest.warns(fedmcmc.SamplingWarning, match="3 groups are too few.*prior of tau"):
        fitted = fedmcmc.fit(
            logistic, data, rng_key=jax.random.key(0), effort="approximate", progress=False
        )
    found = diagnostics.diagnose(fitted.samples.draws, fitted.posterior, data)
    assert "3 groups are too few" in found.findings[-1]
