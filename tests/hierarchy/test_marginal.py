"""Effects integrated out: closed forms, other quadratures, and every layout of groups."""

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import numpyro
import pytest
import scipy.optimize
from numpyro import distributions as dist

import fedmcmc
from fedmcmc import FederatedData, hierarchy, marginal
from fedmcmc.data import _federated
from fedmcmc.diagnostics import diagnose
from fedmcmc.hierarchy import _latents
from tests.hierarchy.models import (
    SIZES,
    break_other_groups,
    clients,
    contraception,
    gaussian,
    in_two_clients,
    logistic,
    quadratic_terms,
    sleepstudy,
    terms,
    total,
)
from tests.support.lanes import fast_and_slow

PLACE = {"mu": 0.4, "slope": -0.2}
ODDS = {"tau": -0.3, "slope": 0.6}


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def integrate(model, data, nodes=5, **settings):
    return marginal(fedmcmc.from_numpyro(model, example=data, **settings), nodes)


@pytest.mark.parametrize("nodes", fast_and_slow([1, 5], fast=[5]))
@pytest.mark.parametrize("centered", fast_and_slow([0.0, 1.0], fast=[0.0]))
def test_a_gaussian_model_is_integrated_exactly(nodes, centered):
    data = in_two_clients(clients())
    posterior = integrate(gaussian, data, nodes, centered=centered)

    @jax.jit
    def value_and_terms(position):
        of_groups = terms(posterior, position, data)
        return jnp.sum(of_groups), of_groups

    gradient, of_groups = jax.grad(value_and_terms, has_aux=True)(PLACE)
    point = np.array([PLACE["mu"], PLACE["slope"]])
    values, gradients, curvatures = quadratic_terms(clients())
    values = values + gradients @ point - curvatures @ point @ point / 2
    slopes = gradients.sum(0) - curvatures.sum(0) @ point
    assert of_groups.shape == (2, 3) and of_groups[1, 2] == 0  # the second client has two groups
    present = np.arange(3) < np.array(data.num_groups)[:, None]
    np.testing.assert_allclose(np.sort(of_groups[present]), np.sort(values), rtol=1e-10)
    np.testing.assert_allclose([gradient["mu"], gradient["slope"]], slopes, rtol=1e-8)


def rare(y):
    tau = numpyro.sample("tau", dist.HalfNormal(2))
    effect = numpyro.sample("effect", dist.Normal(-2, tau), infer={"local": True})
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Poisson(jnp.exp(effect)), obs=y)


@pytest.mark.slow
def test_an_inaccurate_quadrature_is_reported():
    """Laplace's approximation of counts that are mostly zero is compared with more nodes."""
    rng = np.random.default_rng(0)
    groups = [{"y": rng.poisson(np.exp(rng.normal(-2, 1)), size=2)} for _ in range(100)]
    data = FederatedData.from_clients(groups)
    draws = {"tau": rng.normal(0, 0.2, size=(2, 200))}
    few, more = integrate(rare, data, 1), integrate(rare, data, 5)
    diagnosis = diagnose(draws, few, data)
    few_fn, more_fn = total(few, data), total(more, data)
    taus = draws["tau"].ravel()[np.linspace(0, 399, 20).astype(int)]
    gaps = np.array([more_fn({"tau": tau}) - few_fn({"tau": tau}) for tau in taus])
    error = np.abs(gaps - gaps.mean()).max()
    np.testing.assert_allclose(diagnosis.quadrature_error, error, rtol=1e-8)
    finding = diagnosis.findings[-1]
    assert error > 0.1 and "off by" in finding and "nodes=5" in finding
    fine = diagnose(draws, integrate(rare, data, 9), data)
    assert fine.quadrature_error < 0.1
    assert not any("nodes" in x or "the search for the mode" in x for x in fine.findings)
    assert diagnose(draws, few, data, integrates=False).quadrature_error is None


def kinked(y):
    tau = numpyro.sample("tau", dist.HalfNormal(2))
    effect = numpyro.sample("effect", dist.Normal(0, tau), infer={"local": True})
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Laplace(effect, 0.1), obs=y)


def hard_searches():
    """Return a model, data and draws whose latents have modes at a kink or far away."""
    outcomes = [0.3, -0.7, 1.2, 50.0]  # the mode of the last is 10 tau ** 2, where slopes cancel
    data = FederatedData.from_clients([{"y": np.array([y])} for y in outcomes])
    draws = {"tau": np.random.default_rng(0).normal(0, 0.1, size=(1, 400))}
    return fedmcmc.from_numpyro(kinked, example=data), data, draws


def findings_on_searches(posterior, data, draws, **settings):
    return [x for x in diagnose(draws, posterior, data, **settings).findings if "search" in x]


def test_failed_searches_are_counted():
    posterior, data, draws = hard_searches()
    counts = hierarchy.failed_searches(posterior.local, data, draws)
    np.testing.assert_array_equal(counts, (60, 80))


@pytest.mark.slow
def test_failed_searches_are_reported_if_they_matter():
    posterior, data, draws = hard_searches()
    integrated = marginal(posterior, nodes=1)
    (finding,) = findings_on_searches(posterior, data, draws, integrates=False, proposes=True)
    assert "failed in 60 of 80 cases" in finding and "seldom accepted" in finding
    (finding,) = findings_on_searches(integrated, data, draws)
    assert "failed in 60 of 80 cases" in finding and "what is integrated" in finding
    assert not findings_on_searches(integrated, data, draws, integrates=False)
    assert not findings_on_searches(posterior, data, draws, integrates=False)


def squared(y):
    tau = numpyro.sample("tau", dist.HalfNormal(2))
    effect = numpyro.sample("effect", dist.Normal(0, tau), infer={"local": True})
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(effect**2, 0.1), obs=y)


def test_a_search_that_ends_at_a_saddle_has_failed():
    """By symmetry zero is a mode if the outcome is negative, and none if it is positive."""
    data = FederatedData.from_clients([{"y": np.array([y])} for y in (1.0, -1.0)])
    local = fedmcmc.from_numpyro(squared, example=data).local
    draws = {"tau": np.zeros((1, 20))}
    np.testing.assert_array_equal(hierarchy.failed_searches(local, data, draws), (20, 40))


@pytest.mark.slow
def test_a_logistic_group_has_the_integral_of_a_grid():
    group = clients("logistic")[4]
    data = FederatedData.from_clients([group])
    tau = np.exp(ODDS["tau"])
    effects = np.linspace(-12 * tau, 12 * tau, 4001)
    eta = effects[:, None] + ODDS["slope"] * group["x"]
    log_terms = np.sum(group["y"] * eta - np.log1p(np.exp(eta)), 1)
    density = np.exp(log_terms - effects**2 / (2 * tau**2)) / np.sqrt(2 * np.pi * tau**2)
    integral = np.log(np.trapezoid(density, effects))
    coarse, medium, fine = (
        abs(total(integrate(logistic, data, nodes), data)(ODDS) - integral) for nodes in (1, 5, 15)
    )
    assert 1e-4 < coarse < 0.1 and medium < coarse / 20 and fine < 1e-8


SCALE = jnp.linalg.cholesky(jnp.array([[1.0, 0.3], [0.3, 0.5]]))


def intercept_and_slope(x, y=None):
    level = numpyro.sample("level", dist.Normal(0, 1))
    normal = dist.MultivariateNormal(jnp.zeros(2), scale_tril=SCALE)
    effects = numpyro.sample("effects", normal, infer={"local": True})
    with numpyro.plate("rows", len(x)):
        eta = level + effects[0] + effects[1] * x
        numpyro.sample("y", dist.Bernoulli(logits=eta), obs=y)


@pytest.mark.slow
def test_correlated_effects_of_two_numbers_have_the_integral_of_a_grid():
    group = clients("logistic")[4]
    data = FederatedData.from_clients([group])
    value = total(integrate(intercept_and_slope, data, 9), data)({"level": 0.3})
    axis = np.linspace(-8, 8, 401)
    places = np.stack(np.meshgrid(axis, axis), -1).reshape(-1, 2)
    eta = 0.3 + places[:, :1] + places[:, 1:] * group["x"]
    log_terms = np.sum(group["y"] * eta - np.log1p(np.exp(eta)), 1)
    prior = dist.MultivariateNormal(jnp.zeros(2), scale_tril=SCALE).log_prob(places)
    integral = np.sum(np.exp(log_terms + np.asarray(prior))) * (axis[1] - axis[0]) ** 2
    np.testing.assert_allclose(value, np.log(integral), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 5])
def test_gradients_are_those_of_the_value(nodes):
    """With one node they come from the mode's own derivative alone."""
    data = in_two_clients(clients("logistic"))
    value_fn = total(integrate(logistic, data, nodes), data)
    gradient, step = jax.grad(value_fn)(ODDS), 1e-5
    for name in ODDS:
        up, down = (value_fn({**ODDS, name: ODDS[name] + s * step}) for s in (1, -1))
        np.testing.assert_allclose(gradient[name], (up - down) / (2 * step), rtol=1e-7)


@pytest.mark.slow
def test_the_layout_of_groups_does_not_matter(monkeypatch):
    """Groups of one client, of several, in another order, pooled, and cut by chunks of rows."""
    groups = clients("logistic")
    apart, together = FederatedData.from_clients(groups), in_two_clients(groups)
    posterior = integrate(logistic, apart)
    expected, expected_gradient = jax.value_and_grad(total(posterior, apart))(ODDS)
    layouts = (together, together.pooled(groups=True), FederatedData.from_clients(groups[::-1]))
    for data in layouts:
        np.testing.assert_allclose(total(posterior, data)(ODDS), expected, rtol=1e-12)
    pooled = apart.pooled(groups=True)
    np.testing.assert_allclose(total(posterior, pooled)(ODDS), expected, rtol=1e-9)
    place = jax.tree.map(lambda x: jnp.asarray(x)[None], ODDS)
    potential = fedmcmc.metrics.potential(posterior, together, place)
    np.testing.assert_allclose(potential[0], -posterior.logprior_fn(ODDS) - expected, rtol=1e-9)
    for module in (_federated, _latents):
        monkeypatch.setattr(module, "CHUNK_ROWS", 4)
    value, gradient = jax.value_and_grad(total(posterior, together))(ODDS)
    np.testing.assert_allclose(value, expected, rtol=1e-10)
    for name in ODDS:
        np.testing.assert_allclose(gradient[name], expected_gradient[name], rtol=1e-10)


@pytest.mark.slow
def test_rows_of_other_groups_and_clients_do_not_enter():
    data = in_two_clients(clients("logistic"))
    posterior = integrate(logistic, data)
    of_client = jax.jit(lambda data: posterior.loglikelihood_fn.terms(ODDS, data.client(0)))
    clean, broken = np.asarray(of_client(data)), np.asarray(of_client(break_other_groups(data)))
    assert not np.isfinite(broken[1]) and np.array_equal(broken[[0, 2]], clean[[0, 2]])


@pytest.mark.slow
def test_equal_outcomes_have_an_integral_at_any_spread():
    """Without a population their likelihood has no maximum; half of a wide population has it."""
    data = FederatedData.from_clients([{"x": np.zeros(6), "y": np.ones(6, np.int32)}] * 2)
    value_and_grad = jax.value_and_grad(total(integrate(logistic, data), data))
    for tau, expected in ((1e-6, 12 * np.log(0.5)), (100.0, 2 * np.log(0.5))):
        value, gradient = value_and_grad({"tau": np.log(tau), "slope": 0.6})
        np.testing.assert_allclose(value, expected, rtol=0.2)
        assert all(np.isfinite(leaf) for leaf in jax.tree.leaves(gradient))


@pytest.mark.slow
def test_kernels_sample_a_marginal_posterior():
    """Draws equal those from the Gaussian model that is integrated by hand."""
    data = FederatedData.from_clients(clients())
    posterior = integrate(gaussian, data)
    numbers = FederatedData.from_arrays({"client": np.arange(len(SIZES))}, np.arange(len(SIZES)))

    def by_hand(position, rows):
        point = jnp.stack([position["mu"], position["slope"]])
        values, gradients, curvatures = map(jnp.asarray, quadratic_terms(clients()))
        return (values + gradients @ point - curvatures @ point @ point / 2)[rows["client"]]

    exact = posterior._replace(loglikelihood_fn=by_hand)
    draws, expected = (
        fedmcmc.sample(
            jax.random.key(3),
            fedmcmc.lsd(model, step_size=0.05, participation=fedmcmc.bernoulli(0.6)),
            rows,
            PLACE,
            num_rounds=20,
            progress=False,
        ).draws
        for model, rows in ((posterior, data), (exact, numbers))
    )
    for name in PLACE:
        np.testing.assert_allclose(draws[name], expected[name], rtol=1e-6, atol=1e-8)


# Maximum likelihood as lme4 prints it: fixed effects, log likelihood.
LAPLACE = {
    "b": np.array([-1.0350762, 0.6972703, 0.0353329, -0.4562347]),
    "c": np.array([0.8150539, 0.9164961, 0.9150850]),
    "tau": np.log(0.4752434),
}
SLEEP = {
    "b": np.array([251.4051, 10.46729]),
    "sds": np.log([23.7806, 5.7168]),
    "correlation": np.log((1 + 0.0813) / (1 - 0.0813)),
    "sigma": np.log(25.5918),
}
RESTRICTED = {
    "sds": np.log([24.740, 5.922]),
    "correlation": np.log((1 + 0.066) / (1 - 0.066)),
    "sigma": np.log(25.592),
}


@pytest.mark.slow
def test_real_districts_have_the_published_likelihood():
    """Contraceptive use over 60 districts: the Laplace fit that lme4's documentation shows.

    With seven nodes the maximum has a wider spread of the effects.
    """
    model, data = contraception()
    value, gradient = jax.value_and_grad(total(integrate(model, data, 1), data))(LAPLACE)
    np.testing.assert_allclose(value, -1186.36, atol=0.005)
    for leaf in jax.tree.leaves(gradient):
        assert np.abs(leaf).max() < 1e-2  # errors of the estimates are about 0.1
    start, unravel = jax.flatten_util.ravel_pytree(LAPLACE)
    value_fn = total(integrate(model, data, 7), data)
    loss = jax.jit(jax.value_and_grad(lambda flat: -value_fn(unravel(flat))))
    fitted = scipy.optimize.minimize(loss, start, jac=True, method="BFGS")
    np.testing.assert_allclose(-fitted.fun, -1186.23, atol=0.005)
    np.testing.assert_allclose(np.exp(unravel(fitted.x)["tau"]), 0.4786, atol=5e-4)


@pytest.mark.slow
def test_two_effects_per_subject_have_the_published_likelihoods():
    """Reaction times after days without sleep, by maximum and by restricted likelihood (REML)."""
    model, data = sleepstudy()
    value_fn = total(integrate(model, data, 1), data)
    value, gradient = jax.value_and_grad(value_fn)(SLEEP)
    np.testing.assert_allclose(-2 * value, 1751.94, atol=0.005)
    assert np.abs(gradient["sds"]).max() < 1e-2 and abs(gradient["sigma"]) < 1e-2

    def value_at(b, spread):
        return value_fn({"b": b, **spread})

    @jax.jit
    def criterion(spread):
        zero = jnp.zeros(2)  # the value is quadratic in the fixed effects: one Newton step suffices
        precision = -jax.hessian(value_at)(zero, spread)
        b = jnp.linalg.solve(precision, jax.grad(value_at)(zero, spread))
        log_det = jnp.linalg.slogdet(precision / (2 * jnp.pi))[1]
        errors = jnp.sqrt(jnp.diagonal(jnp.linalg.inv(precision)))
        return log_det - 2 * value_at(b, spread), (b, errors)

    (value, (b, errors)), gradient = jax.value_and_grad(criterion, has_aux=True)(RESTRICTED)
    np.testing.assert_allclose(value, 1743.628, atol=5e-4)
    np.testing.assert_allclose(b, [251.405, 10.467], atol=5e-4)
    np.testing.assert_allclose(errors, [6.825, 1.546], atol=1e-3)
    for leaf in jax.tree.leaves(gradient):
        assert np.abs(leaf).max() < 2e-2  # per unit of a logarithm, of estimates of 4 digits


def wide(x, y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    effects = dist.Normal(mu, 1).expand([4]).to_event(1)
    effect = numpyro.sample("effect", effects, infer={"local": True})
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(effect.sum() + x, 1), obs=y)


def test_unsupported_posteriors_raise():
    data = FederatedData.from_clients(clients())
    posterior = fedmcmc.from_numpyro(gaussian, example=data)
    four = fedmcmc.from_numpyro(wide, example=data)
    integrated = marginal(posterior)
    for build, message in (
        (lambda: fedmcmc.lsd(posterior, step_size=0.1), "marginal"),
        (lambda: marginal(posterior, 4), "nodes must be odd"),
        (lambda: marginal(integrated), "no latents of groups"),
        (lambda: marginal(four), "at most 3 numbers per group, and this model has 4"),
        (lambda: fedmcmc.sgld(integrated, step_size=0.1), "Pooled rows have no groups"),
    ):
        with pytest.raises(ValueError, match=message):
            build()
    assert marginal(four, nodes=1).local is None  # Laplace's approximation takes any number
    kernel = fedmcmc.lsd(integrated, step_size=0.1, batch_size=1)
    with pytest.raises(TypeError, match="one term per group"):
        fedmcmc.sample(jax.random.key(0), kernel, data, PLACE, num_rounds=1, progress=False)
