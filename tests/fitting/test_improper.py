"""Improper priors: no evidence, and no fit where the posterior is improper, too."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import fedmcmc

REAL = dist.constraints.real
X = np.array([[1, -1.0], [1, 0], [1, 1], [1, 2], [1, 0.5], [1, -2]])
Y = np.array([0.1, 0.9, 2.2, 2.8, 1.4, -1.2])


def data(x=X):
    return fedmcmc.FederatedData.from_clients([{"x": x[:3], "y": Y[:3]}, {"x": x[3:], "y": Y[3:]}])


def regression(prior):
    def model(x, y=None):
        b = numpyro.sample("b", prior)
        with numpyro.plate("rows", len(x)):
            numpyro.sample("y", dist.Normal(x @ b, 1.0), obs=y)

    return model


def fit(model, data, **settings):
    return fedmcmc.fit(model, data, rng_key=jax.random.key(1), progress=False, **settings)


class Flat(dist.Distribution):
    """A user's own flat density."""

    support = REAL

    def sample(self, key, sample_shape=()):
        return jax.random.normal(key, sample_shape)

    def log_prob(self, value):
        return jnp.zeros(jnp.shape(value))


FLAT = dist.ImproperUniform(dist.constraints.real_vector, (), (2,))
PRIORS = {
    "ImproperUniform": (FLAT, True),
    "masked": (dist.Normal(0, 1e4).expand([2]).to_event(1).mask(False), True),
    "own": (Flat().expand([2]).to_event(1), True),
    "ordered": (dist.ImproperUniform(dist.constraints.ordered_vector, (), (2,)), True),
    "transformed": (
        dist.TransformedDistribution(FLAT, dist.transforms.AffineTransform(0.0, 2.0)),
        True,
    ),
    "normal": (dist.Normal(0, 1e4).expand([2]).to_event(1), False),
    "uniform": (dist.Uniform(-9, 9).expand([2]).to_event(1), False),
    "not masked": (dist.Normal(0, 1).expand([2]).to_event(1).mask(True), False),
    "simplex": (dist.Dirichlet(jnp.ones(2)), False),
    "flat simplex": (dist.Dirichlet(jnp.ones(2)).mask(True), False),
    "mixture": (
        dist.MixtureSameFamily(dist.Categorical(jnp.ones(2) / 2), dist.Normal(jnp.zeros(2), 1))
        .expand([2])
        .to_event(1),
        False,
    ),
}


@pytest.mark.parametrize("name", PRIORS)
def test_tracing_detects_improper_priors(name):
    prior, improper = PRIORS[name]
    posterior = fedmcmc.from_numpyro(regression(prior), example=data(), check_rows=False)
    assert posterior.improper == (("b",) if improper else ())


@pytest.mark.parametrize("is_masked", [True, False])
def test_tracing_detects_masks_in_the_model(is_masked):
    """Evidence of a model with a masked entry would be that of a flat prior."""
    mask = jnp.array([True, not is_masked])

    def model(x, y=None):
        with numpyro.plate("columns", 2), numpyro.handlers.mask(mask=mask):
            b = numpyro.sample("b", dist.Normal(0, 1))
        with numpyro.plate("rows", len(x)):
            numpyro.sample("y", dist.Normal(x @ b, 1.0), obs=y)

    posterior = fedmcmc.from_numpyro(model, example=data(), check_rows=False)
    assert posterior.improper == (("b",) if is_masked else ())


def test_infinite_parameters_of_a_prior_are_named():
    for prior, message in (
        (dist.Normal(0, jnp.inf), "'b' has scale = inf"),
        (dist.HalfCauchy(np.inf), "'b' has scale = inf"),
        (dist.Uniform(-np.inf, 1.0), "'b' has low = -inf"),
    ):
        with pytest.raises(ValueError, match=message):
            fedmcmc.from_numpyro(regression(prior.expand([2])), example=data(), check_rows=False)


def test_a_prior_without_density_raises_an_error_on_the_prior():
    posterior = fedmcmc.Posterior(lambda b: jnp.log(b - b), lambda b, x: -0.5 * (x - b) ** 2)
    rows = fedmcmc.FederatedData.from_clients([np.ones(3, np.float32)])
    with pytest.raises(ValueError, match="density of the prior is finite at none of 32 starts"):
        fit(posterior, rows, position=jnp.zeros(()))


def test_a_flat_prior_has_a_posterior_and_no_evidence():
    """Columns of a millionth and of a million do not look flat."""
    x = X * np.array([1e-6, 1e6])
    fitted = fit(regression(FLAT), data(x.astype(np.float32)))
    assert fitted.verdict.kind == "passed" and np.isnan(fitted.log_evidence)
    assert "the prior of b is improper" in fitted.report.about["log evidence"]
    mean = np.linalg.solve(x.T @ x, x.T @ Y)
    sd = np.sqrt(np.diag(np.linalg.inv(x.T @ x)))
    draws = fitted.samples.constrained["b"][0]
    assert np.abs((draws.mean(0) - mean) / sd).max() < 0.1
    np.testing.assert_allclose(draws.std(0) / sd, 1, atol=0.1)


def test_the_direction_in_which_a_posterior_is_flat_is_named():
    flat = dist.ImproperUniform(dist.constraints.real_vector, (), (3,))
    x = np.column_stack([X[:, :1], 2 * X[:, :1], X[:, 1]])
    with pytest.raises(ValueError, match=r"improper: .* along b\[0\] - 0\.5 b\[1\]|- 0\.5 b\[1\]"):
        fit(regression(flat), data(x))


def test_separated_outcomes_have_no_posterior_under_a_flat_prior():
    def model(x, y=None):
        b = numpyro.sample("b", FLAT)
        with numpyro.plate("rows", len(x)):
            numpyro.sample("y", dist.Bernoulli(logits=x @ b), obs=y)

    y = (X[:, 1] > 0).astype(int)
    rows = [{"x": X[:3], "y": y[:3]}, {"x": X[3:], "y": y[3:]}]
    with pytest.raises(ValueError, match=r"improper: its density does not fall along b\[1\]"):
        fit(model, fedmcmc.FederatedData.from_clients(rows))


def test_a_flat_log_scale_of_effects_has_no_posterior():
    """As the scale goes to zero, the likelihood goes to that of equal groups, which is positive."""

    def model(y=None):
        mu = numpyro.sample("mu", dist.Normal(0, 5))
        log_scale = numpyro.sample("log_scale", dist.ImproperUniform(REAL, (), ()))
        # Means of six rows of a group; the groups' effects are integrated out.
        with numpyro.plate("rows", len(y)):
            sd = jnp.sqrt(jnp.exp(2 * log_scale) + 1 / 6)
            numpyro.sample("y", dist.Normal(mu, sd), obs=y)

    rng = np.random.default_rng(0)
    groups = np.array([0.1 * i + rng.normal(size=6).mean() for i in range(8)])
    with pytest.raises(ValueError, match="along log_scale towards minus infinity"):
        fit(model, fedmcmc.FederatedData.from_clients([{"y": groups[:4]}, {"y": groups[4:]}]))


@pytest.mark.slow
def test_an_improper_posterior_never_passes():
    def separated(b, rows):
        return jax.nn.log_sigmoid(rows["s"] * (b[0] + b[1] * rows["x"]))

    flat = fedmcmc.Posterior(lambda b: jnp.zeros(()), separated)
    rows = [{"x": np.array([-2.0, -1.0]), "s": np.array([-1.0, -1.0])}]
    rows.append({"x": np.array([1.0, 2.0]), "s": np.array([1.0, 1.0])})
    data = fedmcmc.FederatedData.from_clients(rows)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fedmcmc.SamplingWarning)
        fitted = fit(flat, data, position=jnp.zeros(2))
    assert fitted.verdict.kind != "passed", fitted.verdict
    if fitted.verdict.method == "SMC":
        assert "does not fall along coordinate" in fitted.verdict
