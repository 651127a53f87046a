"""Models for which `from_numpyro` raises an error that names the site."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers

import fedmcmc
from fedmcmc import from_numpyro
from tests.support.numpyro_models import clients, observe, slope


def latent_in_plate(x, y, g, w):
    s = slope()
    with numpyro.plate("people", x.shape[0]):
        effect = numpyro.sample("effect", dist.Normal(s, 1))
        numpyro.sample("y", dist.Normal(effect, 1), obs=y)


def latent_in_fixed_plate(x, y, g, w):
    with numpyro.plate("people", 5):
        effect = numpyro.sample("effect", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(effect, 1), obs=y)


def latent_that_grows(x, y, g, w):
    effect = numpyro.sample("effect", dist.Normal(0, 1).expand([x.shape[0]]).to_event(1))
    observe("y", dist.Normal(effect, 1), y)


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
        (
            latent_in_plate,
            "'effect' lies in the data plate 'people'.*NegativeBinomial2.*groups=.*'local'",
        ),
        (latent_in_fixed_plate, "'effect' lies in the data plate 'people'"),
        (latent_that_grows, "'effect' grows with the number of rows"),
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
def test_invalid_models_raise_before_they_run(model, message):
    calls_with_numbers = []

    def spied(**rows):
        has_numbers = any(not isinstance(leaf, jax.core.Tracer) for leaf in rows.values())
        calls_with_numbers.append(has_numbers)
        return model(**rows)

    with pytest.raises(ValueError, match=message):
        from_numpyro(spied, example=clients()[0])
    assert calls_with_numbers and not any(calls_with_numbers)


def rescaled(x, y, g, w):
    s = slope()
    with handlers.scale(scale=100 / x.shape[0]):
        observe("y", dist.Normal(s, 1), y)


@pytest.mark.parametrize("client", [0, 1])
def test_weights_that_depend_on_the_number_of_rows_raise(client):
    with pytest.raises(ValueError, match="depends on the other rows of its batch"):
        from_numpyro(rescaled, example=clients()[client])


@pytest.mark.parametrize(
    "example", [{}, {"y": np.float32(1.0)}, {"y": np.zeros(0)}, {"y": np.ones(2), "x": np.ones(3)}]
)
def test_an_example_without_rows_raises(example):
    with pytest.raises(ValueError, match="example must hold one client's rows"):
        from_numpyro(no_latent, example=example)


def test_the_error_of_a_call_has_a_note_with_its_arguments():
    with pytest.raises(TypeError) as caught:
        from_numpyro(lambda x, y: None, example=(np.ones(3),))
    assert any("1 positional arguments" in note for note in caught.value.__notes__)


def bernoulli(x, y=None):
    slope = numpyro.sample("slope", dist.Normal())
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Bernoulli(logits=slope * x), obs=y)


def normal(x, y=None):
    slope = numpyro.sample("slope", dist.Normal())
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Normal(slope * x), obs=y)


@pytest.mark.parametrize(
    ("model", "names", "error", "message"),
    [
        (normal, "zy", TypeError, r"takes x, y; the rows hold y, z\. They lack 'x'"),
        (normal, "xyw", TypeError, r"takes x, y; the rows hold w, x, y\. They hold 'w', too"),
        (normal, "x", ValueError, r"pass it as obs=\. The rows hold no 'y': was it forgotten"),
        (bernoulli, "x", ValueError, r"observe it\. The rows hold no 'y': was it forgotten"),
    ],
)
def test_columns_must_be_the_arguments_of_the_model(model, names, error, message):
    with pytest.raises(error, match=message):
        from_numpyro(model, example={name: np.zeros(3) for name in names})


def build_observed(*fns):
    def model(y, n):
        u = numpyro.sample("u", dist.Normal())
        with numpyro.plate("rows", len(y)):
            for i, fn in enumerate(fns):
                numpyro.sample(f"y{i}", fn(u, n), obs=y)

    return model


@pytest.mark.parametrize(
    ("fn", "value"),
    [
        (lambda u, n: dist.Bernoulli(logits=u), 2),
        (lambda u, n: dist.Binomial(n, logits=u), 6),
        (lambda u, n: dist.Poisson(jnp.exp(u)), -1),
        (lambda u, n: dist.Gamma(jnp.exp(u), 1.0), -0.5),
        (lambda u, n: dist.Categorical(logits=jnp.stack([u, 0.0, 0.0])), 3),
    ],
)
def test_values_outside_the_support_raise_with_their_row(fn, value):
    y, n = np.ones(5, type(value)), np.full(5, 5)
    model = build_observed(lambda u, n: dist.Normal(u), fn)
    y[3] = value
    with pytest.raises(ValueError, match=f"'y1' observes 1 values .* first, {value}, in row 3"):
        from_numpyro(model, example={"y": y, "n": n})
    clients = {"Bern": {"y": y[:2], "n": n[:2]}, "Basel": {"y": y[2:], "n": n[2:]}}
    data = fedmcmc.FederatedData.from_clients(clients)
    with pytest.raises(ValueError, match="in row 1 of client 'Basel'"):
        from_numpyro(model, example=data)
    from_numpyro(model, example=data, check_rows=False)


def test_supports_that_move_and_masked_rows_are_not_checked():
    def model(y, mask):
        top = numpyro.sample("top", dist.HalfNormal(100.0))
        with numpyro.plate("rows", len(y)):
            numpyro.sample("y", dist.Uniform(0.0, top), obs=y)
            numpyro.sample("z", dist.Poisson(top).mask(mask), obs=jnp.where(mask, y, -1))

    from_numpyro(model, example={"y": np.array([3.0, 50.0]), "mask": np.array([True, False])})


def hierarchy(y, group=None):
    top = numpyro.sample("top", dist.Normal())
    tau = numpyro.sample("tau", dist.HalfNormal())
    if group is None:
        u = numpyro.sample("u", dist.Normal(top, tau))
    else:
        with numpyro.plate("groups", 3):
            u = numpyro.sample("u", dist.Normal(top, tau))[group]
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(u), obs=y)


def test_a_scalar_site_with_a_latent_scale_warns():
    with pytest.warns(
        UserWarning, match="'u' has one value for all clients, .* on 'tau', as"
    ) as caught:
        posterior = from_numpyro(hierarchy, example={"y": np.zeros(3)})
    assert [warning.filename for warning in caught] == [__file__]
    assert str(posterior).startswith("Posterior(shared by all clients: top, tau, u; logprior_fn, ")
    rows = {"y": np.zeros(3), "group": np.arange(3)}
    posterior = from_numpyro(hierarchy, example=rows, check_rows=False)
    assert "top, tau, u[3]; " in repr(posterior)
    assert repr(posterior._replace(logprior_fn=abs, init_fn=None)) == (
        "Posterior(logprior_fn, loglikelihood_fn, resample_fn, constrain_fn)"
    )


def test_a_run_needs_the_columns_of_the_example():
    rows = {"x": np.zeros(3), "y": np.zeros(3)}
    posterior = from_numpyro(normal, example=rows, check_rows=False)
    data = fedmcmc.FederatedData.from_clients([{"x": np.zeros(3)}])
    with pytest.raises(ValueError, match="rows with the structure of example"):
        kernel = fedmcmc.lsd(posterior, step_size=0.1)
        fedmcmc.sample(jax.random.key(0), kernel, data, {"slope": 0.0}, num_rounds=1)


@pytest.mark.parametrize(
    ("fn", "name"),
    [
        (lambda u: dist.Weibull(u, 1.0), "Weibull"),
        (lambda u: dist.Weibull(u, 1.0).expand([1]), "Weibull"),
        (
            lambda u: dist.TransformedDistribution(dist.Normal(u), dist.transforms.ExpTransform()),
            "TransformedDistribution of Normal",
        ),
    ],
)
def test_the_error_of_a_support_names_the_base_distribution(fn, name):
    model = build_observed(lambda u, n: fn(jnp.exp(u)))
    with pytest.raises(ValueError, match=rf"distribution \({name}\) cannot have, the first, 0"):
        from_numpyro(model, example={"y": np.array([2.0, 0.0, 1.0]), "n": np.ones(3)})


def test_a_partial_likelihood_raises_with_the_remedies():
    def cox(time, event):
        b = numpyro.sample("b", dist.Normal())
        risk = jnp.log(jnp.sum(jnp.where(time[None] >= time[:, None], jnp.exp(b), 0), axis=1))
        numpyro.factor("partial", jnp.sum(event * (b - risk)))

    rows = {"time": np.arange(1.0, 4.0), "event": np.ones(3)}
    remedies = r"'partial' .*Cox .*risk sets.*models\.survival.*Poisson.*Weibull"
    with pytest.raises(ValueError, match=remedies):
        from_numpyro(cox, example=rows)


def test_intervals_may_start_at_the_bound_of_the_support():
    def model(y, left, right):
        u = numpyro.sample("u", dist.Normal())
        fn = dist.IntervalCensoredDistribution(dist.Exponential(jnp.exp(u)), left, right)
        observe("y", fn, y)

    rows = {"y": np.array([[0.0, 1.0], [1.0, 2.0], [2.0, np.inf]]), "left": np.zeros(3)}
    posterior = from_numpyro(model, example={**rows, "right": np.array([0, 0, 1])})
    terms = posterior.loglikelihood_fn(
        {"u": jnp.float32(0.0)}, {**rows, "right": np.array([0, 0, 1])}
    )
    expected = [np.log(1 - np.exp(-1)), np.log(np.exp(-1) - np.exp(-2)), -2.0]
    np.testing.assert_allclose(terms, expected, rtol=1e-5)


@pytest.mark.parametrize("site_first", [True, False])
def test_a_plate_with_the_name_of_a_site_raises(site_first):
    def model(y):
        if site_first:
            numpyro.sample("rows", dist.Normal(0, 1))
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        with numpyro.plate("rows", len(y)):
            numpyro.sample("y", dist.Normal(0, scale), obs=y)
        if not site_first:
            numpyro.sample("rows", dist.Normal(0, 1))

    with pytest.raises(ValueError, match="'rows' is the name of a plate and of a site"):
        fedmcmc.from_numpyro(model, example={"y": np.ones(3, np.float32)})
