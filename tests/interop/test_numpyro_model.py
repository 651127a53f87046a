"""`from_numpyro`: exact densities of all kinds of sites, and functions that JAX transforms."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.util import potential_energy

import fedmcmc
from fedmcmc import from_numpyro
from tests.support.numpyro_models import MODELS, SIZES, clients, observe, slope


@pytest.mark.parametrize("name", MODELS)
def test_prior_and_likelihoods_sum_to_the_joint_density_of_numpyro(name):
    """Values and gradients agree in double precision at two positions."""
    model = MODELS[name]
    with jax.enable_x64(True):
        trees = clients()[:2]
        data = fedmcmc.FederatedData.from_clients(trees)
        posterior = from_numpyro(model, example=data, check_rows=False)
        shapes = jax.eval_shape(posterior.init_fn, jax.random.key(0))
        rng = np.random.default_rng(1)
        positions = jax.tree.map(lambda s: jnp.asarray(rng.normal(0, 0.7, (2, *s.shape))), shapes)

        def split(position):
            each = [jnp.sum(posterior.loglikelihood_fn(position, rows)) for rows in trees]
            return posterior.logprior_fn(position) + sum(each)

        def pooled(position):
            return -potential_energy(model, (), data.rows, position)

        both = jax.jit(jax.vmap(lambda z: [jax.value_and_grad(fn)(z) for fn in (split, pooled)]))
        ours, numpyros = both(positions)
    assert all(leaf.dtype == np.float64 for leaf in jax.tree.leaves(ours))
    chex.assert_trees_all_close(ours, numpyros, rtol=1e-11, atol=1e-11)


def test_rows_have_the_same_terms_in_any_batch():
    trees = clients()
    data = fedmcmc.FederatedData.from_clients(trees)
    posterior = from_numpyro(MODELS["scaled and masked"], example=trees[1], check_rows=False)
    position = {"tau": jnp.float32(0.3), "mu": jnp.linspace(-1, 1, 4)}
    terms = jax.jit(lambda batches: [posterior.loglikelihood_fn(position, b) for b in batches])
    pooled, *each = terms([data.rows, *trees])
    assert pooled.shape == (sum(SIZES),)
    np.testing.assert_allclose(np.concatenate(each), pooled, rtol=1e-5)


def test_jacobians_belong_to_the_prior_and_sites_with_similar_names_do_not():
    def model(x):
        scale = numpyro.sample("scale", dist.Exponential(2.0))
        numpyro.factor("_scale_log_det", -x * scale)  # the name NumPyro gives to a Jacobian
        observe("x", dist.Normal(0.0, scale), x)

    x = np.array([0.5, -1.0], np.float32)
    posterior = from_numpyro(model, example=x, check_rows=False)
    z = np.float32(0.4)
    scale = np.exp(z)
    prior = dist.Exponential(2.0).log_prob(scale) + z
    np.testing.assert_allclose(posterior.logprior_fn({"scale": z}), prior, rtol=1e-6)
    terms = dist.Normal(0.0, scale).log_prob(x) - x * scale
    np.testing.assert_allclose(posterior.loglikelihood_fn({"scale": z}, x), terms, rtol=1e-6)


def test_a_conditioned_global_site_counts_once():
    rows = clients()[0]
    posterior = from_numpyro(MODELS["conditioned"], example=rows, check_rows=False)
    assert jax.eval_shape(posterior.init_fn, jax.random.key(0)).keys() == {"scale"}
    z = np.float32(-0.2)
    scale = np.exp(z)
    prior = dist.HalfCauchy(1.0).log_prob(scale) + z + dist.HalfNormal(scale).log_prob(0.7)
    np.testing.assert_allclose(posterior.logprior_fn({"scale": z}), prior, rtol=1e-5)
    terms = dist.Normal(rows["x"].sum(1), 0.7).log_prob(rows["y"])
    actual = posterior.loglikelihood_fn({"scale": z}, rows)
    np.testing.assert_allclose(actual, terms, rtol=1e-4)


def list_distributions():
    return [
        dist.AsymmetricLaplace(),
        dist.BetaProportion(0.4, 3.0),
        dist.Cauchy(),
        dist.Chi2(3.0),
        dist.GaussianRandomWalk(0.5, 4),
        dist.Gumbel(),
        dist.ImproperUniform(dist.constraints.positive, (), (2,)),
        dist.InverseGamma(2.0, 1.0),
        dist.Kumaraswamy(2.0, 2.0),
        dist.LKJ(3, 1.0),
        dist.LeftTruncatedDistribution(dist.Normal(), low=-1.0),
        dist.Logistic(),
        dist.MatrixNormal(np.zeros((2, 2)), np.eye(2), np.eye(2)),
        dist.MixtureSameFamily(dist.Categorical(np.ones(2) / 2), dist.Normal(np.zeros(2), 1)),
        dist.Pareto(1.0, 2.0),
        dist.SoftLaplace(0.0, 1.0),
        dist.StudentT(4.0),
        dist.TransformedDistribution(dist.Normal(), dist.transforms.ExpTransform()),
        dist.TruncatedNormal(low=0.0, high=2.0),
        dist.VonMises(0.0, 1.0),
        dist.Weibull(1.0, 2.0),
        dist.WishartCholesky(4.0, np.eye(2)),
        dist.ZeroSumNormal(1.0, (3,)),
    ]


def test_no_prior_seems_to_depend_on_the_rows():
    """The analysis compares the programs for two numbers of rows."""
    latents = list_distributions()

    def model(x):
        total = 0.0
        for i, fn in enumerate(latents):
            total = total + jnp.sum(numpyro.sample(f"site{i}", fn))
        numpyro.deterministic("total", jax.nn.softplus(total) + jax.nn.relu(total))
        observe("x", dist.Normal(total, 1), x)

    posterior = from_numpyro(model, example=np.ones(2), check_rows=False)
    position = jax.eval_shape(posterior.init_fn, jax.random.key(0))
    assert len(position) == len(latents)
    values = jax.eval_shape(posterior.constrain_fn, position)
    assert values.keys() == {*position, "total"}
    for i, fn in enumerate(latents):
        assert values[f"site{i}"].shape == fn.shape()


def test_constrain_fn_keeps_deterministic_sites_that_need_no_rows():
    def model(x, y):
        a = numpyro.sample("a", dist.Normal(0, 1))
        s = numpyro.sample("s", dist.HalfNormal(1))
        numpyro.deterministic("odds", jnp.exp(a))
        numpyro.deterministic("squashed", jax.jit(jax.nn.softplus)(a) * s)
        numpyro.deterministic("fit", a * x)
        numpyro.deterministic("mean_fit", a * jnp.mean(x))
        numpyro.deterministic("count", a * x.shape[0])
        # A compiled helper that sees both, yet whose first output needs no rows.
        both = jax.jit(lambda a, x: (2 * a, a * x))(a, x)
        numpyro.deterministic("double", both[0])
        observe("y", dist.Normal(both[1], s), y)

    posterior = from_numpyro(model, example=(np.ones(3), np.zeros(3)), check_rows=False)
    values = posterior.constrain_fn({"a": np.float32(0.5), "s": np.float32(-1.0)})
    assert values.keys() == {"a", "s", "odds", "squashed", "double"}
    np.testing.assert_allclose(values["s"], np.exp(-1), rtol=1e-6)
    np.testing.assert_allclose(values["squashed"], np.log1p(np.exp(0.5)) * np.exp(-1), rtol=1e-6)
    np.testing.assert_allclose(values["double"], 1.0)


def test_starts_are_finite_and_a_function_of_the_key():
    def model(x):
        s = slope()
        numpyro.factor("positive", jnp.where(s > 0, 0.0, -jnp.inf))
        observe("x", dist.Normal(s, 1), x)

    posterior = from_numpyro(model, example=np.ones(3), check_rows=False, init_radius=3.0)
    keys = jax.random.split(jax.random.key(0), 50)
    starts = np.asarray(jax.vmap(posterior.init_fn)(keys)["slope"])
    assert (starts > 0).all() and starts.max() < 3 and starts.max() > 2
    assert len(np.unique(starts)) == 50
    np.testing.assert_array_equal(posterior.init_fn(keys[7])["slope"], starts[7])


def test_rows_may_be_an_array_a_tuple_or_a_federation():
    def model(x, y):
        observe("y", dist.Normal(slope() * x, 1), y)

    x, y = np.arange(3.0), np.ones(3)
    position = {"slope": jnp.float32(0.5)}
    data = fedmcmc.FederatedData.from_clients([(x, y), (x[:1], y[:1])])
    expected = dist.Normal(0.5 * x, 1).log_prob(y)
    for example in ((x, y), data):
        posterior = from_numpyro(model, example=example, check_rows=False)
        actual = posterior.loglikelihood_fn(position, (x, y))
        np.testing.assert_allclose(actual, expected, rtol=1e-6)

    def one_argument(rows):
        observe("x", dist.Normal(slope(), 1), rows)

    posterior = from_numpyro(one_argument, example=x, check_rows=False)
    expected = dist.Normal(0.5, 1).log_prob(x)
    np.testing.assert_allclose(posterior.loglikelihood_fn(position, x), expected, rtol=1e-6)


def test_functions_are_traced_once_and_leak_nothing():
    calls = []

    def model(x):
        calls.append(None)
        s = numpyro.sample("s", dist.HalfNormal(1))
        observe("x", dist.Normal(0, s), x)

    x = np.ones(3, np.float32)
    with jax.checking_leaks():
        posterior = from_numpyro(model, example=x, check_rows=False)
        position = {"s": jnp.zeros(2)}
        grad = jax.vmap(jax.grad(lambda z, x: posterior.loglikelihood_fn(z, x).sum()), (0, None))
        jax.jit(grad)(position, x)
        jax.jit(jax.vmap(jax.grad(posterior.logprior_fn)))(position)
        jax.jit(jax.vmap(posterior.constrain_fn))(position)
        jax.eval_shape(posterior.init_fn, jax.random.key(0))
    jitted = jax.jit(posterior.loglikelihood_fn)
    before = len(calls)
    for value in (0.0, 1.0):
        jitted({"s": jnp.float32(value)}, x)
    assert len(calls) == before  # the same shapes were traced above


def test_positions_of_a_different_model_raise():
    posterior = from_numpyro(
        lambda y: observe("y", dist.Normal(slope(), 1), y), example=np.ones(3), check_rows=False
    )
    with pytest.raises(ValueError, match=r"has the sites \['slope'\], got \['theta'\]"):
        posterior.logprior_fn({"theta": jnp.zeros(())})


@pytest.mark.slow
def test_networks_are_sites_of_random_flax_module():
    linen = pytest.importorskip("flax.linen")
    from numpyro.contrib.module import random_flax_module

    def model(x, y):
        net = random_flax_module("net", linen.Dense(1), prior=dist.Normal(0, 1), input_shape=(1, 2))
        observe("y", dist.Normal(net(x)[:, 0], 1), y)

    rows = {name: clients()[0][name] for name in ("x", "y")}
    posterior = from_numpyro(model, example=rows, check_rows=False)
    position = jax.eval_shape(posterior.init_fn, jax.random.key(0))
    assert {name: leaf.shape for name, leaf in position.items()} == {
        "net/kernel": (2, 1),
        "net/bias": (1,),
    }
    values = {"net/kernel": jnp.ones((2, 1)), "net/bias": jnp.ones(1)}
    expected = dist.Normal(rows["x"].sum(1) + 1, 1).log_prob(rows["y"])
    actual = posterior.loglikelihood_fn(values, rows)
    np.testing.assert_allclose(actual, expected, rtol=1e-4)


def test_draws_of_a_constrained_model_are_in_its_space():
    def model(x, g):
        tau = numpyro.sample("tau", dist.HalfNormal(1))
        weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(3)))
        numpyro.deterministic("variance", tau**2)
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("x", dist.Normal(0, tau).expand([2]).to_event(1), obs=x)
            numpyro.sample("g", dist.Categorical(weights), obs=g)

    data = fedmcmc.FederatedData.from_clients(
        [{name: rows[name] for name in ("x", "g")} for rows in clients()]
    )
    posterior = from_numpyro(model, example=data, check_rows=False)
    kernel = fedmcmc.dsgld(posterior, step_size=1e-3, num_local_steps=2, batch_size=3)
    start = {"tau": jnp.zeros(()), "weights": jnp.zeros(2)}
    samples = fedmcmc.sample(
        jax.random.key(0),
        kernel,
        data,
        start,
        num_rounds=3,
        num_chains=2,
        progress=False,
    )
    assert samples.draws["weights"].shape == (2, 3, 2)
    values = samples.constrained
    assert {name: leaf.shape for name, leaf in values.items()} == {
        "tau": (2, 3),
        "weights": (2, 3, 3),
        "variance": (2, 3),
    }
    np.testing.assert_allclose(values["weights"].sum(-1), 1, rtol=1e-5)
    np.testing.assert_allclose(values["variance"], values["tau"] ** 2, rtol=1e-6)
    np.testing.assert_allclose(values["tau"], np.exp(samples.draws["tau"]), rtol=1e-5)
