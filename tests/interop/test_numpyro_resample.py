"""`resample_fn` of `from_numpyro`: outcomes drawn from the model, or none at all."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from scipy import stats

import fedmcmc
import fedmcmc.criticism
from fedmcmc import from_numpyro
from tests.support.numpyro_models import observe, slope


def test_outcomes_are_drawn_in_the_order_of_their_dependence():
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
    z_y = (drawn["y"] - 0.3 - rows["x"]) / 0.5
    z_later = (drawn["later"] - 3 * drawn["y"]) / 0.2  # of the drawn y, not of the zeros in rows
    for z in (z_y, z_later):
        assert abs(float(z.mean())) * np.sqrt(z.size) < 5
        assert abs(float((z**2).mean()) - 1) * np.sqrt(z.size / 2) < 5
    assert abs(float((z_y * z_later).mean())) * np.sqrt(z_y.size) < 5


def test_draws_have_the_dtype_of_the_rows():
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


def outcome_as_regressor(y):
    observe("y", dist.Normal(slope() * y, 1), y)


def observed_twice(y):
    s = slope()
    observe("y", dist.Normal(s, 1), y)
    observe("again", dist.Normal(2 * s, 1), y)


def censored(rows):
    y, c = rows
    observe("y", dist.RightCensoredDistribution(dist.Exponential(jnp.exp(slope())), c > 0), y)


def cured(rows):
    y, _ = rows
    parts = dist.RightCensoredDistribution(dist.Exponential(jnp.exp(jnp.ones(2) * slope())), 1)
    observe("y", dist.MixtureSameFamily(dist.Categorical(jnp.ones(2) / 2), parts), y)


def masked_by_its_outcome(y):
    observe("y", dist.Normal(slope(), 1).mask(y > 0), y)


def masked_by_another(rows):
    y, c = rows
    s = slope()
    observe("c", dist.Bernoulli(logits=s), c)
    observe("y", dist.Normal(s, 1).mask(c == 1), y)


class ChangedDensity(dist.Normal):
    def log_prob(self, value):
        return jnp.log1p(-self.cdf(value))


def changed_density(y):
    observe("y", ChangedDensity(slope(), 1.0), y)


def counts_with_totals(y):
    chances = jax.nn.softmax(slope() * jnp.arange(3))
    observe("y", dist.Multinomial(y.sum(-1), chances), y)


def totals_of_floats(rows):
    y, n = rows
    observe("y", dist.BetaBinomial(jnp.exp(slope()), 2.0, n), y.astype(int))


PAIR = (np.array([0.5, 2.0]), np.array([0.0, 1.0]))


@pytest.mark.parametrize(
    ("model", "example", "reason"),
    [
        (derived_outcome, np.ones(3), "what site 'y' observes is computed from the rows"),
        (factor_only, np.ones(3), "site 'y' is a factor"),
        (tempered, np.ones(3), "site 'y' is weighted"),
        (
            outcome_as_regressor,
            np.ones(3),
            "the distribution of site 'y' depends on its own outcome",
        ),
        (observed_twice, np.ones(3), "site 'y' observes what another site does"),
        (censored, (PAIR,), r"site 'y' has a censored distribution \(RightCens"),
        (cured, (PAIR,), "site 'y' has a censored distribution"),
        (masked_by_its_outcome, np.ones(3), "the distribution of site 'y' depends on its own"),
        (masked_by_another, (PAIR,), "mask of site 'y' depends on another outcome"),
        (
            changed_density,
            np.ones(3),
            "ChangedDensity, which defines log_prob and inherits sample",
        ),
        (counts_with_totals, np.ones((3, 3), int), "drawing .* site 'y' fails with ValueError"),
        (totals_of_floats, (PAIR,), "drawing .* site 'y' fails with TypeError"),
    ],
)
def test_models_without_outcomes_to_draw_have_a_reason(model, example, reason):
    posterior = from_numpyro(model, example=example, check_rows=False)
    assert posterior.resample_fn is None
    assert re.search(reason, posterior.no_resample_reason)
    data = fedmcmc.FederatedData.from_clients([example])
    with pytest.raises(ValueError, match=f"from_numpyro could not create one, because .*{reason}"):
        fedmcmc.criticism.predictive_check(
            jax.random.key(0),
            posterior,
            data,
            {"slope": np.zeros(100)},
            lambda rows: jax.tree.leaves(rows)[0],
        )


def test_counts_with_totals_have_the_likelihood_of_scipy():
    counts = np.array([[3, 0, 2], [0, 0, 0], [10, 5, 1]])
    posterior = from_numpyro(counts_with_totals, example=counts, check_rows=False)
    terms = posterior.loglikelihood_fn({"slope": jnp.float32(0.5)}, counts)
    chances = np.exp(0.5 * np.arange(3)) / np.exp(0.5 * np.arange(3)).sum()
    expected = [stats.multinomial(row.sum(), chances).logpmf(row) for row in counts]
    np.testing.assert_allclose(terms, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", ["distribution", "handler", "event"])
def test_masked_entries_do_not_change_and_observed_entries_are_drawn(way):
    is_observed = np.tile([True, False], 3000)
    y = np.where(is_observed, 0.0, -100.0).astype(np.float32)
    rows = {"y": y, "is_observed": is_observed}
    if way == "event":
        rows["y"] = y[:, None]

    def model(y, is_observed):
        s = slope()
        if way == "handler":
            with handlers.mask(mask=is_observed):
                observe("y", dist.Normal(s, 1.0), y)
        elif way == "event":
            fn = dist.Normal(s, 1.0).expand([len(y), 1])
            observe("y", fn.mask(is_observed[:, None]).to_event(1), y)
        else:
            observe("y", dist.Normal(s, 1.0).mask(is_observed), y)

    posterior = from_numpyro(model, example=rows, check_rows=False)
    drawn = posterior.resample_fn(jax.random.key(0), {"slope": jnp.float32(2.0)}, rows)
    values = np.asarray(drawn["y"]).reshape(-1)
    np.testing.assert_array_equal(values[~is_observed], -100.0)
    assert abs(values[is_observed].mean() - 2) * np.sqrt(3000) < 5
    assert abs(values[is_observed].var() - 1) * np.sqrt(1500) < 5


def test_measurements_in_integers_are_rounded():
    def model(y):
        observe("y", dist.Normal(slope(), 2.0), y)

    posterior = from_numpyro(model, example=np.arange(5), check_rows=False)
    drawn = posterior.resample_fn(
        jax.random.key(0), {"slope": jnp.float32(-3.0)}, jnp.zeros(9000, jnp.int32)
    )
    assert drawn.dtype == jnp.int32
    assert abs(float(drawn.mean()) + 3) < 5 * 2 / np.sqrt(9000)  # cutting digits off is 0.47 away


def test_a_scale_of_one_is_ignored():
    def model(y):
        with handlers.scale(scale=np.float32(1)):
            observe("y", dist.Normal(slope(), 1), y)

    assert from_numpyro(model, example=np.ones(3), check_rows=False).resample_fn is not None
