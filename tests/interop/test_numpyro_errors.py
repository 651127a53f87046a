"""Models that `from_numpyro` turns away, each with one error that names the site."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers

from fedmcmc import from_numpyro
from tests.support.numpyro_models import clients, observe, slope


def latent_in_plate(x, y, g, w):
    s = slope()
    with numpyro.plate("people", x.shape[0]):
        own = numpyro.sample("own", dist.Normal(s, 1))
        numpyro.sample("y", dist.Normal(own, 1), obs=y)


def latent_in_fixed_plate(x, y, g, w):
    with numpyro.plate("people", 5):
        own = numpyro.sample("own", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(own, 1), obs=y)


def latent_that_grows(x, y, g, w):
    own = numpyro.sample("own", dist.Normal(0, 1).expand([x.shape[0]]).to_event(1))
    observe("y", dist.Normal(own, 1), y)


def forgotten_outcome(x, y, g, w):
    s = slope()
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(s, 1))


def missing_outcomes(x, y, g, w):
    s = slope()
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(s, 1), obs=y, obs_mask=y > 0)


def discrete_latent(x, y, g, w):
    which = numpyro.sample("which", dist.Bernoulli(0.5))
    observe("y", dist.Normal(slope() * which, 1), y)


def enumerated_latent(x, y, g, w):
    which = numpyro.sample(
        "which", dist.Categorical(jnp.ones(3) / 3), infer={"enumerate": "parallel"}
    )
    observe("y", dist.Normal(slope() * which, 1), y)


def joint_over_rows(x, y, g, w):
    noise = jnp.eye(x.shape[0])
    numpyro.sample("field", dist.MultivariateNormal(slope() * x[:, 0], noise), obs=y)


def rows_as_event(x, y, g, w):
    numpyro.sample("field", dist.Normal(slope() * x[:, 0], 1).to_event(1), obs=y)


def outer_product(x, y, g, w):
    numpyro.sample("field", dist.Normal(slope() * x[:, :1], 1), obs=y)


def differences(x, y, g, w):
    numpyro.sample("field", dist.Normal(slope(), 1), obs=y[1:] - y[:-1])


def scalar_factor(x, y, g, w):
    numpyro.factor("penalty", -slope() * jnp.sum(x))
    observe("y", dist.Normal(0, 1), y)


def factor_of_the_count(x, y, g, w):
    s = slope()
    numpyro.factor("penalty", -s * x.shape[0])
    observe("y", dist.Normal(s, 1), y)


def prior_of_the_rows(x, y, g, w):
    s = numpyro.sample("slope", dist.Normal(0, jnp.std(y)))
    observe("y", dist.Normal(s, 1), y)


def prior_of_the_count(x, y, g, w):
    s = numpyro.sample("slope", dist.Normal(0, 1 / x.shape[0]))
    observe("y", dist.Normal(s, 1), y)


def support_of_the_rows(x, y, g, w):
    s = numpyro.sample("slope", dist.Uniform(0, jnp.max(y) + 10))
    observe("y", dist.Normal(s, 1), y)


def subsampled(x, y, g, w):
    with numpyro.plate("people", x.shape[0], subsample_size=2) as chosen:
        numpyro.sample("y", dist.Normal(slope(), 1), obs=y[chosen])


def point_estimate(x, y, g, w):
    level = numpyro.param("level", 0.0)
    observe("y", dist.Normal(slope() + level, 1), y)


def delta(x, y, g, w):
    observe("y", dist.Normal(numpyro.sample("point", dist.Delta(slope())), 1), y)


def site_a_row(x, y, g, w):
    s = slope()
    for i in range(x.shape[0]):
        numpyro.sample(f"y{i}", dist.Normal(s, 1), obs=y[i])


def fixed_plate(x, y, g, w):
    s = slope()
    with numpyro.plate("people", 5):
        numpyro.sample("y", dist.Normal(s, 1), obs=y)


def no_latent(x, y, g, w):
    observe("y", dist.Normal(0, 1), y)


def no_outcome(x, y, g, w):
    slope()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (latent_in_plate, "'own' lies in the data plate 'people'"),
        (latent_in_fixed_plate, "'own' lies in the data plate 'people'"),
        (latent_that_grows, "'own' grows with the number of rows"),
        (forgotten_outcome, "'y' lies in the data plate"),
        (missing_outcomes, "'y_unobserved' lies in the data plate"),
        (discrete_latent, "'which' is discrete"),
        (enumerated_latent, "'which' is discrete"),
        (joint_over_rows, "'field' depends on the rows but has not one term per row"),
        (rows_as_event, "'field' depends on the rows but has not one term per row"),
        (outer_product, "'field' depends on the rows but has not one term per row"),
        (differences, "'field' depends on the rows but has not one term per row"),
        (scalar_factor, "'penalty' depends on the rows but has not one term per row"),
        (factor_of_the_count, "'penalty' depends on the rows but has not one term per row"),
        (prior_of_the_rows, "prior of latent site 'slope' depends on the rows"),
        (prior_of_the_count, "prior of latent site 'slope' depends on the rows"),
        (support_of_the_rows, "prior of latent site 'slope' depends on the rows"),
        (subsampled, "Plate 'people' subsamples"),
        (point_estimate, "'y' depends on a numpyro.param"),
        (delta, "'point' has a delta distribution"),
        (site_a_row, "sites of the model change with the number of rows"),
        (fixed_plate, "runs on 5 rows but not on 11.*plate 'people' has size 5"),
        (no_latent, "no latent site"),
        (no_outcome, "no observed site"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_models_that_do_not_fit_are_turned_away_by_name_before_anything_runs(model, message):
    ran = []

    def spied(**rows):
        ran.append(any(not isinstance(leaf, jax.core.Tracer) for leaf in rows.values()))
        return model(**rows)

    with pytest.raises(ValueError, match=message):
        from_numpyro(spied, example=clients()[0])
    assert ran and not any(ran)


def centred(x, y, g, w):
    observe("y", dist.Normal(slope() * (x[:, 0] - x[:, 0].mean()), 1), y)


def rescaled(x, y, g, w):
    s = slope()
    with handlers.scale(scale=100 / x.shape[0]):
        observe("y", dist.Normal(s, 1), y)


@pytest.mark.parametrize(("model", "client"), [(centred, 0), (rescaled, 0), (rescaled, 1)])
def test_rows_that_look_at_each_other_are_found(model, client):
    with pytest.raises(ValueError, match="depends on the other rows of its batch"):
        from_numpyro(model, example=clients()[client])


@pytest.mark.parametrize(
    "example", [{}, {"y": np.float32(1.0)}, {"y": np.zeros(0)}, {"y": np.ones(2), "x": np.ones(3)}]
)
def test_an_example_without_rows_is_an_error(example):
    with pytest.raises(ValueError, match="example must hold one client's rows"):
        from_numpyro(no_latent, example=example)


def test_a_wrong_call_says_how_the_model_was_called():
    with pytest.raises(TypeError) as caught:
        from_numpyro(lambda covariates: None, example={"x": np.ones(3)})
    assert any("keyword arguments ['x']" in note for note in caught.value.__notes__)
