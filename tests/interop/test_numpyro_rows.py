"""The check of `from_numpyro` that a row's term does not depend on the other rows of its batch."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import stats

import fedmcmc
from fedmcmc import from_numpyro
from fedmcmc.interop._numpyro_batches import BATCH_SIZE, batches_of


def build_regression(column_fn, outcome_fn=lambda y: y):
    def model(x, y):
        a = numpyro.sample("a", dist.Normal())
        b = numpyro.sample("b", dist.Normal())
        with numpyro.plate("rows", len(x)):
            numpyro.sample("y", dist.Normal(a + b * column_fn(x), 1.0), obs=outcome_fn(y))

    return model


def draw_clients(*sizes, x=None):
    rng = np.random.default_rng(0)
    return [
        {"x": rng.normal(size=n) if x is None else x(rng, i, n), "y": rng.normal(size=n)}
        for i, n in enumerate(sizes)
    ]


def build_arms(*counts):
    """Return clients whose rows are sorted by arm."""
    return draw_clients(
        *map(sum, counts), x=lambda rng, i, n: np.repeat([0.0, 1.0], counts[i]).astype(float)
    )


SHAPES = {"x": jax.ShapeDtypeStruct((2,), np.float32), "y": jax.ShapeDtypeStruct((2,), np.float32)}


def expect_dependence():
    return pytest.raises(ValueError, match="depends on the other rows of its batch")


@pytest.mark.parametrize(
    ("column_fn", "example"),
    [
        (lambda x: (x - x.mean()) / x.std(), draw_clients(30, 40)),
        (lambda x: (x - x.mean()) / x.std(ddof=1), SHAPES),
        (lambda x: (x - x.min()) / (x.max() - x.min()), draw_clients(1, 1, 1)),
        (lambda x: jnp.nan_to_num((x - x.mean()) / x.std()), draw_clients(30, 40)),
        (lambda x: x - jnp.median(x), build_arms((20, 0), (5, 5))),
        (lambda x: x - x.mean(), build_arms((12, 4), (10, 30))),
        (lambda x: x - x.mean(), build_arms((300, 0), (300, 0), (300, 1))),
        (lambda x: jnp.where(x == 1, x - x.mean(), x), build_arms((3000, 0), (3000, 2))),
        (lambda x: x / x.max(), build_arms((20, 0))[0]),
        (lambda x: jnp.argsort(jnp.argsort(x)), draw_clients(30)[0]),
        (lambda x: x - jnp.roll(x, 1), draw_clients(1)[0]),
        (jnp.cumsum, draw_clients(30)[0]),
        (jax.nn.softmax, SHAPES),
        (lambda x: x / len(x), SHAPES),
    ],
)
def test_models_that_rescale_columns_raise(column_fn, example):
    if isinstance(example, list):
        example = fedmcmc.FederatedData.from_clients(example)
    with expect_dependence():
        from_numpyro(build_regression(column_fn), example=example)


def test_coefficients_are_compared_at_the_scale_of_their_prior():
    """Outcomes of 1e5 hide the effect of a coefficient of size one."""

    def model(x, y, center):
        a = numpyro.sample("a", dist.Normal(0.0, 1e5))
        b = numpyro.sample("b", dist.Normal(0.0, 1e4).expand([1]).to_event(1))
        with numpyro.plate("rows", len(x)):
            column = x - x.mean() if center else x
            numpyro.sample("y", dist.Normal(a + b[0] * column, 2e4), obs=y)

    rows = draw_clients(30)[0]
    rows["y"] = 1e5 + 2e4 * rows["y"]
    from_numpyro(functools.partial(model, center=False), example=rows)
    with expect_dependence():
        from_numpyro(functools.partial(model, center=True), example=rows)


def test_a_model_that_needs_several_rows_raises():
    def model(x, y):
        b = numpyro.sample("b", dist.Normal().expand([2]).to_event(1))
        with numpyro.plate("rows", len(y)):
            numpyro.sample("y", dist.Normal(jnp.linalg.qr(x)[0] @ b, 1.0), obs=y)

    rows = {"x": np.random.default_rng(0).normal(size=(9, 2)), "y": np.ones(9)}
    with pytest.raises(ValueError, match="does not run on one row: TypeError"):
        from_numpyro(model, example=rows)


def test_the_error_names_the_row_and_both_terms():
    clients = {"Bern": draw_clients(3)[0], "Zug": {"x": np.array([5.0]), "y": np.array([2.0])}}
    data = fedmcmc.FederatedData.from_clients(clients)
    with pytest.raises(ValueError, match=r"row \d of client '(Bern|Zug)' has nan alone and -?\d"):
        from_numpyro(build_regression(lambda x: (x - x.mean()) / x.std()), example=data)
    with expect_dependence():
        from_numpyro(build_regression(lambda x: x, lambda y: y / y.std()), example=data)
    with pytest.raises(ValueError, match=r"a made-up row has .* alone and .* among 16 rows"):
        from_numpyro(build_regression(jnp.cumsum), example=SHAPES)


def test_a_factor_of_risk_sets_raises_with_the_remedy():
    def cox(x, y):
        terms = numpyro.sample("slope", dist.Normal(0, 1)) * x
        with numpyro.plate("rows", len(x)):
            numpyro.factor("cox", terms - jax.lax.cumlogsumexp(terms, reverse=True))

    with pytest.raises(ValueError, match="piecewise-exponential"):
        from_numpyro(cox, example=draw_clients(20)[0])


def test_large_rows_and_infinite_terms_are_no_dependence():
    rng = np.random.default_rng(0)

    def model(y, count, share, known):
        a = numpyro.sample("a", dist.Normal())
        with numpyro.plate("rows", len(y)):
            numpyro.sample("y", dist.Normal(5e5 + 1e5 * a, 1.0), obs=y)
            # Terms of 1e8 that cancel up to about ten, so that single precision keeps no digit.
            numpyro.sample("count", dist.Poisson(1e7 * jnp.exp(1e-4 * a)), obs=count)
            numpyro.factor("impossible", jnp.where(share < 0.9, -a * share, -jnp.inf))
            numpyro.factor("undefined", jnp.where(known, 0.0, jnp.nan * a))

    rows = {
        "y": 5e5 + 1e5 * rng.normal(size=30),
        "count": rng.poisson(1e7, 30),
        "share": rng.uniform(size=30),
        "known": rng.random(30) < 0.5,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        posterior = from_numpyro(model, example=rows)
        check = dict(rows, known=np.ones(30, bool))
    with jax.enable_x64(True):
        terms = jax.jit(posterior.loglikelihood_fn)({"a": np.float64(0.2)}, check)
    rate = 1e7 * np.exp(2e-5)
    expected = -0.5 * (rows["y"] - 5.2e5) ** 2 - 0.5 * np.log(2 * np.pi)
    expected += stats.poisson(rate).logpmf(rows["count"])
    expected += np.where(rows["share"] < 0.9, -0.2 * rows["share"], -np.inf)
    np.testing.assert_allclose(terms, expected, rtol=1e-6)


def draw_observed_values(rng, n):
    """Return functions of a latent that return distributions, and values in their supports."""
    x, counts = rng.normal(size=n), rng.poisson(2, n)
    positive, flags, codes = np.exp(x), rng.random(n) < 0.5, rng.integers(0, 3, n)
    fraction, pair = 1 / (1 + np.exp(-x)), rng.normal(size=(n, 2))
    table = rng.multinomial(5, [0.2, 0.3, 0.5], n)
    simplex = rng.dirichlet(np.ones(3), n)
    few, half = np.minimum(counts, 5), jnp.ones(2) / 2

    def e(u):
        return jnp.exp(u)

    return {
        "Normal": (lambda u, c: dist.Normal(u, e(u)), x),
        "StudentT": (lambda u, c: dist.StudentT(4.0, u, 1.0), x),
        "Cauchy": (lambda u, c: dist.Cauchy(u, 1.0), 1e6 * x),
        "Laplace": (lambda u, c: dist.Laplace(u, 1.0), x),
        "Logistic": (lambda u, c: dist.Logistic(u, 1.0), x),
        "AsymmetricLaplace": (lambda u, c: dist.AsymmetricLaplaceQuantile(u, 1.0, 0.9), x),
        "Bernoulli": (lambda u, c: dist.Bernoulli(logits=u), flags.astype(int)),
        "BernoulliProbs": (lambda u, c: dist.Bernoulli(jax.nn.sigmoid(u)), flags.astype(int)),
        "Binomial": (lambda u, c: dist.Binomial(5, logits=u), few),
        "BinomialFloats": (lambda u, c: dist.Binomial(jnp.full(len(c), 5.0), logits=u), few),
        "BetaBinomial": (lambda u, c: dist.BetaBinomial(e(u), 2.0, jnp.full(len(c), 5.0)), few),
        "Multinomial": (lambda u, c: dist.Multinomial(5, jax.nn.softmax(u * jnp.arange(3))), table),
        "MultinomialRows": (
            lambda u, c: dist.Multinomial(c.sum(-1), jax.nn.softmax(u * jnp.arange(3))),
            table,
        ),
        "DirichletMultinomial": (
            lambda u, c: dist.DirichletMultinomial(e(u) * jnp.ones(3), c.sum(-1)),
            table,
        ),
        "Poisson": (lambda u, c: dist.Poisson(e(u)), counts),
        "GammaPoisson": (lambda u, c: dist.GammaPoisson(e(u), 1.0), counts),
        "Geometric": (lambda u, c: dist.Geometric(logits=u), counts),
        "NegativeBinomial2": (lambda u, c: dist.NegativeBinomial2(e(u), 1.0), counts),
        "ZeroInflatedPoisson": (lambda u, c: dist.ZeroInflatedPoisson(0.3, e(u)), counts),
        "ZeroInflated": (
            lambda u, c: dist.ZeroInflatedDistribution(dist.Poisson(2.0), gate_logits=u),
            counts,
        ),
        "OrderedLogistic": (lambda u, c: dist.OrderedLogistic(u, jnp.arange(2.0)), codes),
        "Categorical": (lambda u, c: dist.Categorical(logits=u * jnp.arange(3)), codes),
        "Beta": (lambda u, c: dist.Beta(e(u), 1.0), fraction),
        "BetaProportion": (lambda u, c: dist.BetaProportion(jax.nn.sigmoid(u), 3.0), fraction),
        "Gamma": (lambda u, c: dist.Gamma(e(u), 1.0), positive),
        "InverseGamma": (lambda u, c: dist.InverseGamma(e(u), 1.0), positive),
        "Exponential": (lambda u, c: dist.Exponential(e(u)), positive),
        "Weibull": (lambda u, c: dist.Weibull(e(u), 1.0), positive),
        "LogNormal": (lambda u, c: dist.LogNormal(u, 1.0), positive),
        "Gompertz": (lambda u, c: dist.Gompertz(e(u), 1.0), positive),
        "Dirichlet": (lambda u, c: dist.Dirichlet(e(u) * jnp.ones(3)), simplex),
        "VonMises": (lambda u, c: dist.VonMises(u, 1.0), x % 3),
        "MultivariateNormal": (
            lambda u, c: dist.MultivariateNormal(u * jnp.ones(2), jnp.eye(2) + e(u)),
            pair,
        ),
        "MultivariateStudentT": (
            lambda u, c: dist.MultivariateStudentT(5.0, u * jnp.ones(2), jnp.eye(2)),
            pair,
        ),
        "GaussianRandomWalk": (lambda u, c: dist.GaussianRandomWalk(e(u), 2), pair),
        "MixtureSameFamily": (
            lambda u, c: dist.MixtureSameFamily(
                dist.Categorical(half), dist.Normal(jnp.stack([u, 0.0]), 1.0)
            ),
            x,
        ),
        "Mixture": (
            lambda u, c: dist.Mixture(
                dist.Categorical(half), [dist.Normal(u, 1.0), dist.StudentT(3.0)]
            ),
            x,
        ),
        "RightCensored": (
            lambda u, c: dist.RightCensoredDistribution(dist.Weibull(e(u), 1.0), c > 1),
            positive,
        ),
        "LeftCensored": (
            lambda u, c: dist.LeftCensoredDistribution(dist.Normal(u, 1.0), c > 0),
            x,
        ),
        "IntervalCensored": (
            lambda u, c: dist.IntervalCensoredDistribution(
                dist.Weibull(e(u), 1.0), jnp.zeros(len(c)), jnp.zeros(len(c))
            ),
            np.stack([np.floor(positive), np.floor(positive) + 1], -1),  # from zero on
        ),
        "TruncatedNormal": (lambda u, c: dist.TruncatedNormal(u, 1.0, low=0.0), positive),
        "TruncatedCauchy": (lambda u, c: dist.TruncatedCauchy(u, 1.0, low=0.0), positive),
        "Masked": (lambda u, c: dist.Poisson(e(u)).mask(c >= 0), np.where(flags, counts, -1)),
        "Transformed": (
            lambda u, c: dist.TransformedDistribution(
                dist.Gumbel(u, 1.0), dist.transforms.ExpTransform()
            ),
            positive,
        ),
    }


@pytest.mark.parametrize("part", range(4))
def test_distributions_of_all_kinds_are_observed_without_a_warning(part):
    """Each model has a quarter of the distributions, so that few programs are compiled."""
    kinds = dict(list(draw_observed_values(np.random.default_rng(0), 40).items())[part::4])

    def model(**rows):
        for name, (fn, _) in kinds.items():
            u = numpyro.sample(f"u_{name}", dist.Normal())
            with numpyro.plate("rows", len(rows[name])):
                numpyro.sample(name, fn(u, rows[name]), obs=rows[name])

    rows = {name: value for name, (_, value) in kinds.items()}
    clients = [jax.tree.map(lambda leaf, i=i: leaf[i::2], rows) for i in (0, 1)]
    data = fedmcmc.FederatedData.from_clients(clients)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        posterior = from_numpyro(model, example=data)
    position = {f"u_{name}": jnp.float32(0.1) for name in kinds}

    @jax.jit
    def terms(rows):
        each = [fn(0.1, rows[name]).log_prob(rows[name]) for name, (fn, _) in kinds.items()]
        return posterior.loglikelihood_fn(position, rows), sum(each[1:], each[0])

    np.testing.assert_allclose(*terms(rows), rtol=1e-4)


def test_batches_hold_several_rows_of_a_rare_level_and_each_row_once():
    arm = np.zeros(5000, int)
    arm[[17, 4000]] = 3
    batches = batches_of({"arm": arm, "x": np.arange(5000.0)}, None)
    assert all(len(batch.numbers) == BATCH_SIZE for batch in batches)
    for batch in batches:
        real = batch.numbers[batch.numbers >= 0]
        assert len(np.unique(real)) == len(real)
        np.testing.assert_array_equal(batch.rows["x"][batch.numbers >= 0], real)
    assert any({17, 4000} <= set(batch.numbers.tolist()) for batch in batches)
    assert any({0, 4999} <= set(batch.numbers.tolist()) for batch in batches)


def test_a_column_may_have_an_index_that_depends_on_a_parameter():
    def model(t, y):
        b = numpyro.sample("b", dist.Normal())
        index = jnp.argmax(jnp.stack([b, 0.0]))  # 0 if b is positive, else 1
        with numpyro.plate("rows", len(t)):
            numpyro.sample("y", dist.Normal(b * t[index + jnp.arange(len(t)) - index], 1.0), obs=y)

    rows = {"t": np.arange(4.0), "y": np.ones(4)}
    posterior = from_numpyro(model, example=rows)
    start = posterior.init_fn(jax.random.key(0))
    assert np.isfinite(start["b"])
    np.testing.assert_allclose(posterior.logprior_fn({"b": jnp.float32(2.0)}), -2.918939, rtol=1e-6)
    terms = posterior.loglikelihood_fn({"b": jnp.float32(0.5)}, rows)
    np.testing.assert_allclose(terms, -0.918939 - 0.5 * (0.5 * np.arange(4) - 1) ** 2, rtol=1e-5)


@pytest.mark.parametrize(
    ("fn", "value", "message"),
    [
        (lambda a, x: dist.Bernoulli(probs=a * x), 1, r"'y': the parameter probs .* in \[0"),
        (lambda a, x: dist.Normal(0.0, a + 0 * x), 1.0, "the parameter scale .* above 0,"),
        (lambda a, x: dist.Poisson(a * x), 1, r"'y': the parameter rate .*\(Poisson\) must lie"),
        (lambda a, x: dist.ZeroInflatedPoisson(a * x, 1.0), 1, "the parameter gate"),
    ],
)
def test_parameters_outside_their_bounds_warn(fn, value, message):
    def model(x, y):
        a = numpyro.sample("a", dist.Normal())
        with numpyro.plate("rows", len(x)):
            numpyro.sample("y", fn(a, x), obs=y)

    with pytest.warns(UserWarning, match=message) as caught:
        from_numpyro(model, example={"x": np.linspace(0.1, 1, 9), "y": np.full(9, value)})
    assert [warning.filename for warning in caught] == [__file__]


def test_parameters_that_the_prior_keeps_inside_do_not_warn():
    def model(x, y):
        share = numpyro.sample("share", dist.Beta(1.0, 1.0))
        numpyro.sample("w", dist.Bernoulli(share * x), obs=y)  # of shares x below one
        a = numpyro.sample("a", dist.Normal(0.0, 0.01))  # unlike random positions
        b = numpyro.sample("b", dist.HalfNormal(0.1))
        with numpyro.plate("rows", len(x)):
            numpyro.sample("y", dist.Bernoulli(0.5 + a * x), obs=y)
            numpyro.sample("z", dist.Poisson(jnp.exp(-500 * b * x)), obs=y)  # underflows

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        from_numpyro(model, example={"x": np.linspace(0.1, 1, 9), "y": np.ones(9, int)})
