"""`resample_fn` of `from_numpyro`: outcomes drawn from the model, or none at all."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers

from fedmcmc import from_numpyro
from tests.support.numpyro_models import observe, slope


def test_resample_draws_outcomes_in_the_order_in_which_they_matter():
    def model(x, y, later):
        a = numpyro.sample("a", dist.Normal(0, 1))
        # The outcome that is drawn last comes first in the model, and looks at a leaf of the rows.
        observe("later", dist.Normal(3 * y, 0.2), later)
        observe("y", dist.Normal(a + x, 0.5), y)

    rows = {"x": jnp.array([0.0, 1.0]), "y": jnp.zeros(2), "later": jnp.zeros(2)}
    posterior = from_numpyro(model, example=rows, check_rows=False)
    draw = jax.jit(jax.vmap(posterior.resample_fn, in_axes=(0, None, None)))
    num = 2000
    drawn = draw(jax.random.split(jax.random.key(0), num), {"a": jnp.float32(0.3)}, rows)
    assert {name: leaf.shape for name, leaf in drawn.items()} == dict.fromkeys(rows, (num, 2))
    np.testing.assert_array_equal(drawn["x"][0], rows["x"])
    first = (drawn["y"] - 0.3 - rows["x"]) / 0.5
    second = (drawn["later"] - 3 * drawn["y"]) / 0.2  # of the drawn y, not of the zeros in rows
    for z in (first, second):
        assert abs(float(z.mean())) * np.sqrt(z.size) < 5
        assert abs(float((z**2).mean()) - 1) * np.sqrt(z.size / 2) < 5
    assert abs(float((first * second).mean())) * np.sqrt(first.size) < 5


def test_resample_casts_to_the_dtype_of_the_rows():
    def model(y):
        observe("y", dist.Bernoulli(logits=slope()), y.astype(int))

    posterior = from_numpyro(model, example=np.ones(4, np.float32), check_rows=False)
    drawn = posterior.resample_fn(jax.random.key(1), {"slope": 0.0}, jnp.ones(50, jnp.float32))
    assert drawn.dtype == jnp.float32
    assert set(np.unique(drawn)) == {0.0, 1.0}


def derived_outcome(y):
    observe("y", dist.Normal(slope(), 1), 2 * y)


def factor_only(y):
    numpyro.factor("y", -((y - slope()) ** 2))


def tempered(y):
    s = slope()
    with handlers.scale(scale=0.5):
        observe("y", dist.Normal(s, 1), y)


def own_regressor(y):
    observe("y", dist.Normal(slope() * y, 1), y)


def observed_twice(y):
    s = slope()
    observe("y", dist.Normal(s, 1), y)
    observe("again", dist.Normal(2 * s, 1), y)


@pytest.mark.parametrize(
    "model", [derived_outcome, factor_only, tempered, own_regressor, observed_twice]
)
def test_resample_is_none_where_outcomes_cannot_be_known(model):
    assert from_numpyro(model, example=np.ones(3), check_rows=False).resample_fn is None
