"""Default priors, overrides, their text, and the coordinates of samplers."""

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from numpyro import distributions as dist
from numpyro.distributions import biject_to
from scipy import integrate, stats

from fedmcmc import models
from fedmcmc.models._priors import OrderedDraws, ParameterPrior, describe, inverse_square

RNG = np.random.default_rng(0)
TABLE = pd.DataFrame(
    {
        "y": RNG.normal(120, 15, 60),
        "count": RNG.poisson(30, 60),
        "died": RNG.integers(0, 2, 60),
        "pain": RNG.integers(0, 4, 60),
        "time": RNG.uniform(1, 2, 60),
        "age": RNG.normal(60, 10, 60),
        "arm": np.tile(["drug", "placebo"], 30),
        "site": np.repeat(list("abcd"), 15),
    }
)


def priors(formula, family="gaussian", **settings):
    return models.specify(formula, TABLE, client="site", family=family, **settings).priors


def test_gaussian_priors_have_the_scale_of_outcome_and_columns():
    mean, sd, sd_age = TABLE.y.mean(), TABLE.y.std(), TABLE.age.std()
    lines = repr(priors("y ~ age + arm + (1 + age | site)")).splitlines()
    assert [line.split(maxsplit=1) for line in lines] == [
        ["Intercept", f"Normal({mean:.4g}, {2.5 * sd:.4g})"],
        ["age", f"Normal(0, {2.5 * sd / sd_age:.4g})"],
        ["arm[placebo]", f"Normal(0, {2.5 * sd / TABLE.arm.eq('drug').std():.4g})"],
        ["sigma", f"Exponential({1 / sd:.4g})"],
        ["sd_site[Intercept]", f"HalfNormal({sd:.4g})"],
        ["sd_site[age]", f"HalfNormal({sd / sd_age:.4g})"],
        ["cor_site", "LKJ(2)"],
    ]


def test_priors_off_the_identity_link_have_unit_scale():
    binary = priors("died ~ age + (1 | site)", "bernoulli")
    assert describe(binary["Intercept"]) == "Normal(0, 2.5)"
    assert describe(binary["age"]) == f"Normal(0, {2.5 / TABLE.age.std():.4g})"
    assert describe(binary["sd_site"]) == "HalfNormal(1)"
    counts = priors("count ~ 1", "negative_binomial")
    assert describe(counts["Intercept"]) == f"Normal({np.log(TABLE['count'].mean()):.4g}, 2.5)"
    assert describe(counts["shape"]) == "1 / sqrt(.) ~ Exponential(1)"
    with_offset = priors("count ~ offset(log(time))", "poisson")
    assert describe(with_offset["Intercept"]) == "Normal(0, 5)"
    ordinal = priors("pain ~ age", "ordinal")
    assert "Intercept" not in ordinal and describe(ordinal["cutpoints"]) == "Normal(0, 2.5)"


def test_overrides_replace_priors_by_name():
    chosen = priors(
        "y ~ age + (1 + age | site)",
        priors={
            "age": dist.StudentT(3, 0, 1),
            "sd_site": dist.HalfNormal(2),
            "cor_site": 4,
            "sigma": dist.ImproperUniform(dist.constraints.positive, (), ()),
        },
    )
    assert [describe(chosen[x]) for x in ("age", "sd_site[Intercept]", "sd_site[age]")] == [
        "StudentT(3, 0, 1)",
        "HalfNormal(2)",
        "HalfNormal(2)",
    ]
    assert describe(chosen["cor_site"]) == "LKJ(4)" and describe(chosen["sigma"]) == "flat"
    single = priors("y ~ 1 + (1 + age || site)", priors={"sd_site[age]": dist.HalfNormal(3)})
    assert describe(single["sd_site[age]"]) == "HalfNormal(3)"
    assert describe(single["sd_site[Intercept]"]) != "HalfNormal(3)"
    assert "cor_site" not in single


def test_bad_overrides_are_named():
    with pytest.raises(ValueError, match=r"'agee', which is no .* Intercept, age, sigma\."):
        priors("y ~ age", priors={"agee": dist.Normal(0, 1)})
    with pytest.raises(TypeError, match=r"'age' must be .* such as Normal\(0, .*got float"):
        priors("y ~ age", priors={"age": 1.0})
    with pytest.raises(TypeError, match=r"got Normal of shape \(2,\)"):
        priors("y ~ age", priors={"age": dist.Normal(0, jnp.ones(2))})


JOINT = ParameterPrior(
    (
        dist.Normal(1.0, 2.0),
        dist.StudentT(3.0, 0.0, 1.0),
        dist.HalfNormal(5.0),
        dist.Beta(2.0, 3.0),
        dist.Exponential(0.1),
    ),
    ((3.0, 4.0), (0.0, 0.5), (0.0, 7.0), (0.0, 1.0), (0.0, 10.0)),
)


def test_a_joint_prior_is_the_product_of_its_parts():
    value = jnp.array([0.3, -1.2, 4.0, 0.25, 6.0])
    parts = [float(p.log_prob(v)) for p, v in zip(JOINT.priors, value, strict=True)]
    np.testing.assert_allclose(JOINT.log_prob(value), sum(parts), rtol=1e-6)
    draws = JOINT.sample(jax.random.key(0), (2000,))
    assert draws.shape == (2000, 5) and bool(jnp.all(JOINT.support(draws)))
    assert not bool(JOINT.support(value.at[2].set(-1.0)))
    means = [1.0, 0.0, 5.0 * np.sqrt(2 / np.pi), 0.4, 10.0]
    np.testing.assert_allclose(draws.mean(0), means, atol=5 * draws.std(0).max() / 2000**0.5)


def test_coordinates_are_in_units_of_typical_values():
    transform = biject_to(JOINT.support)
    u = jnp.array([0.3, -0.7, 0.2, 0.4, -1.1])
    value = transform(u)
    expected = [3 + 4 * 0.3, -0.35, 7 * np.exp(0.2), 1 / (1 + np.exp(-0.4)), 10 * np.exp(-1.1)]
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(transform.inv(value), u, rtol=1e-5)
    log_det = transform.log_abs_det_jacobian(u, value)
    exact = np.linalg.slogdet(np.asarray(jax.jacobian(transform)(u)))[1]
    np.testing.assert_allclose(log_det, exact, rtol=1e-5)


@pytest.mark.parametrize("i", range(5))
def test_coordinates_of_scalars_are_those_of_vectors(i):
    scalar = biject_to(ParameterPrior((JOINT.priors[i],), (JOINT.units[i],), True).support)
    u = jnp.array([0.3, -0.7, 0.2, 0.4, -1.1])
    y = scalar(u[i])
    np.testing.assert_allclose(y, biject_to(JOINT.support)(u)[i], rtol=1e-6)
    np.testing.assert_allclose(scalar.inv(y), u[i], rtol=1e-5)
    log_det = scalar.log_abs_det_jacobian(u[i], y)
    np.testing.assert_allclose(log_det, jnp.log(jax.grad(scalar)(u[i])), rtol=1e-5, atol=1e-6)


def test_sorted_draws_have_a_normalized_density():
    fn = OrderedDraws(dist.Normal(0.5, 2.0), 2)

    def density(b, a):
        return float(np.exp(fn.log_prob(np.array([a, b]))))

    total = integrate.dblquad(density, -9, 10, lambda a: a, lambda a: 10, epsabs=1e-4)[0]
    np.testing.assert_allclose(total, 1, atol=1e-3)
    draws = np.asarray(fn.sample(jax.random.key(0), (3000,)))
    assert (np.diff(draws) > 0).all()
    np.testing.assert_allclose(draws.mean(0), 0.5 + 2 * np.array([-1, 1]) / np.pi**0.5, atol=0.15)


def test_the_prior_of_a_shape_is_that_of_its_inverse_root():
    prior = inverse_square(dist.Exponential(1.0))
    shapes = np.array([0.1, 1.0, 20.0])
    exact = stats.expon.logpdf(shapes**-0.5) + np.log(0.5 * shapes**-1.5)
    np.testing.assert_allclose(prior.log_prob(shapes), exact, rtol=1e-5)
