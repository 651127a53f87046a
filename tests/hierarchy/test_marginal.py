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
    clients,
    closed_form,
    contraception,
    gaussian,
    in_two_clients,
    logistic,
    sleepstudy,
    total,
)
from tests.support.lanes import fast_and_slow

PLACE = {"mu": 0.4, "slope": -0.2}
ODDS = {"tau": -0.3, "slope": 0.6}


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def rare(y):
    tau = numpyro.sample("tau", dist.HalfNormal(2))
    effect = numpyro.sample("effect", dist.Normal(-2, tau), infer={"local": True})
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Poisson(jnp.exp(effect)), obs=y)


def wide(x, y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    effect = numpyro.sample(
        "effect", dist.Normal(mu, 1).expand([4]).to_event(1), infer={"local": True}
    )
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(effect.sum() + x, 1), obs=y)


def of(model, data, nodes=5, **settings):
    return marginal(fedmcmc.from_numpyro(model, example=data, **settings), nodes)


@pytest.mark.parametrize("nodes", fast_and_slow([1, 5], fast=[5]))
@pytest.mark.parametrize("centered", fast_and_slow([0.0, 1.0], fast=[0.0]))
def test_of_a_gaussian_model_it_is_exact(nodes, centered):
    data = FederatedData.from_clients(clients())
    value_fn = total(of(gaussian, data, nodes, centered=centered), data)
    value, slope = jax.value_and_grad(value_fn)(PLACE)
    wanted, wanted_slope = jax.value_and_grad(closed_form)(PLACE, clients())
    np.testing.assert_allclose(value, wanted, rtol=1e-10)
    for name in PLACE:
        np.testing.assert_allclose(slope[name], wanted_slope[name], rtol=1e-8)


@pytest.mark.slow
def test_a_quadrature_that_is_off_is_told():
    """Laplace's approximation of counts, of which most are zero, by more nodes at once."""
    rng = np.random.default_rng(0)
    groups = [{"y": rng.poisson(np.exp(rng.normal(-2, 1)), size=2)} for _ in range(100)]
    data = FederatedData.from_clients(groups)
    draws = {"tau": rng.normal(0, 0.2, size=(2, 200))}
    few, more = of(rare, data, 1), of(rare, data, 5)
    found = diagnose(draws, few, data)
    few_fn, more_fn = total(few, data), total(more, data)
    some = draws["tau"].ravel()[np.linspace(0, 399, 20).astype(int)]
    gaps = np.array([more_fn({"tau": tau}) - few_fn({"tau": tau}) for tau in some])
    wanted = np.abs(gaps - gaps.mean()).max()
    np.testing.assert_allclose(found.quadrature_error, wanted, rtol=1e-8)
    assert wanted > 0.1 and "off by" in found.findings[-1] and "nodes=5" in found.findings[-1]
    fine = diagnose(draws, of(rare, data, 9), data)
    assert fine.quadrature_error < 0.1 and not any("nodes" in x for x in fine.findings)
    assert not any("the search for the mode" in x for x in fine.findings)
    moved = diagnose(draws, few, data, integrates=False)
    assert moved.quadrature_error is None


def kinked(y):
    tau = numpyro.sample("tau", dist.HalfNormal(2))
    effect = numpyro.sample("effect", dist.Normal(0, tau), infer={"local": True})
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Laplace(effect, 0.1), obs=y)


def astray():
    """Return a model, data and draws: latents at a row of theirs, at a kink, and one far away."""
    outcomes = [0.3, -0.7, 1.2, 50.0]  # the mode of the last is 10 tau ** 2, where slopes cancel
    data = FederatedData.from_clients([{"y": np.array([y])} for y in outcomes])
    draws = {"tau": np.random.default_rng(0).normal(0, 0.1, size=(1, 400))}
    return fedmcmc.from_numpyro(kinked, example=data), data, draws


def searches_told(posterior, data, draws, **settings):
    return [x for x in diagnose(draws, posterior, data, **settings).findings if "search" in x]


def test_searches_that_fail_are_counted():
    own, data, draws = astray()
    np.testing.assert_array_equal(hierarchy.failed_searches(own.local, data, draws), (60, 80))
    (told,) = searches_told(own, data, draws, integrates=False, proposes=True)
    assert "failed in 60 of 80 cases" in told and "seldom accepted" in told


def squared(y):
    tau = numpyro.sample("tau", dist.HalfNormal(2))
    effect = numpyro.sample("effect", dist.Normal(0, tau), infer={"local": True})
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(effect**2, 0.1), obs=y)


def test_searches_that_end_at_a_saddle_have_failed():
    """By symmetry zero is no mode where the outcome is positive, and one where it is negative."""
    data = FederatedData.from_clients([{"y": np.array([y])} for y in (1.0, -1.0)])
    local = fedmcmc.from_numpyro(squared, example=data).local
    draws = {"tau": np.zeros((1, 20))}
    np.testing.assert_array_equal(hierarchy.failed_searches(local, data, draws), (20, 40))


@pytest.mark.slow
def test_searches_that_fail_are_told_where_they_matter():
    own, data, draws = astray()
    (told,) = searches_told(marginal(own, nodes=1), data, draws)
    assert "failed in 60 of 80 cases" in told and "what is integrated" in told
    assert not searches_told(marginal(own, nodes=1), data, draws, integrates=False)
    assert not searches_told(own, data, draws, integrates=False)


@pytest.mark.slow
def test_of_a_logistic_group_it_is_the_integral():
    own = clients("logistic")[4]
    data = FederatedData.from_clients([own])
    tau = np.exp(ODDS["tau"])
    effects = np.linspace(-12 * tau, 12 * tau, 4001)
    eta = effects[:, None] + ODDS["slope"] * own["x"]
    log_terms = np.sum(own["y"] * eta - np.log1p(np.exp(eta)), 1)
    density = np.exp(log_terms - effects**2 / (2 * tau**2)) / np.sqrt(2 * np.pi * tau**2)
    wanted = np.log(np.trapezoid(density, effects))
    value = total(of(logistic, data, 15), data)(ODDS)
    np.testing.assert_allclose(value, wanted, atol=1e-8)
    errors = [abs(total(of(logistic, data, n), data)(ODDS) - wanted) for n in (1, 5)]
    assert 1e-4 < errors[0] < 0.1 and errors[1] < errors[0] / 20


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 5])
def test_gradients_are_those_of_the_value(nodes):
    """With one node they come from the mode's own derivative alone."""
    data = in_two_clients(clients("logistic"))
    value_fn = total(of(logistic, data, nodes), data)
    slope, step = jax.grad(value_fn)(ODDS), 1e-5
    for name in ODDS:
        up, down = (value_fn({**ODDS, name: ODDS[name] + s * step}) for s in (1, -1))
        np.testing.assert_allclose(slope[name], (up - down) / (2 * step), rtol=1e-7)


@pytest.mark.slow
def test_groups_lie_in_clients_of_their_own_or_together():
    own = clients("logistic")
    apart = FederatedData.from_clients(own)
    posterior = of(logistic, apart)
    wanted = total(posterior, apart)(ODDS)
    together = in_two_clients(own)
    for data in (together, together.pooled(groups=True), FederatedData.from_clients(own[::-1])):
        np.testing.assert_allclose(total(posterior, data)(ODDS), wanted, rtol=1e-12)
    np.testing.assert_allclose(total(posterior, apart.pooled(groups=True))(ODDS), wanted, rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("tau", [1e-6, 100.0])
def test_outcomes_that_are_all_alike_have_an_integral_at_any_spread(tau):
    """Without a population their likelihood rises without end; half of a wide one has it."""
    data = FederatedData.from_clients([{"x": np.zeros(6), "y": np.ones(6, np.int32)}] * 2)
    place = {"tau": np.log(tau), "slope": 0.6}
    value, slope = jax.value_and_grad(total(of(logistic, data), data))(place)
    wanted = 2 * np.log(0.5) if tau > 1 else 12 * np.log(0.5)
    np.testing.assert_allclose(value, wanted, rtol=0.2)
    assert all(np.isfinite(leaf) for leaf in jax.tree.leaves(slope))


@pytest.mark.slow
def test_a_group_cut_by_a_chunk_is_the_same(monkeypatch):
    data = in_two_clients(clients("logistic"))
    posterior = of(logistic, data)
    wanted = jax.value_and_grad(total(posterior, data))(ODDS)
    for module in (_federated, _latents):
        monkeypatch.setattr(module, "CHUNK_ROWS", 4)
    found = jax.value_and_grad(total(posterior, data))(ODDS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10), found, wanted)


@pytest.mark.slow
def test_rows_of_other_groups_and_clients_do_not_enter():
    own = clients("logistic")
    data = in_two_clients(own)
    posterior = of(logistic, data)
    terms = jax.jit(lambda data: posterior.loglikelihood_fn.terms(ODDS, data.client(0)))
    clean = np.asarray(terms(data))
    group = np.asarray(data.rows.group)
    broken = jax.tree.map(np.array, data.rows.values)
    other = (group == 1) | (np.arange(data.num_rows) >= int(data.start[1]))
    broken["x"][other] = np.nan
    rows = fedmcmc.data.Grouped(broken, data.rows.group, data.rows.max_groups)
    dirty = np.asarray(terms(fedmcmc.FederatedData(rows, data.start, data.size, data.share, 10)))
    assert not np.isfinite(dirty[1]) and np.array_equal(dirty[[0, 2]], clean[[0, 2]])


@pytest.mark.slow
def test_a_client_with_fewer_groups_has_zeros_for_the_others():
    data = in_two_clients(clients())
    terms = of(gaussian, data).loglikelihood_fn.terms(PLACE, data.client(1))
    assert data.num_groups.tolist() == [3, 2]
    assert terms.shape == (3,) and terms[2] == 0 and (np.asarray(terms[:2]) != 0).all()


@pytest.mark.slow
def test_correlated_effects_of_two_numbers():
    """Intercept and slope of one group, against a grid."""
    import numpyro
    from numpyro import distributions as dist

    scale = jnp.linalg.cholesky(jnp.array([[1.0, 0.3], [0.3, 0.5]]))

    def model(x, y=None):
        level = numpyro.sample("level", dist.Normal(0, 1))
        effects = numpyro.sample(
            "effects",
            dist.MultivariateNormal(jnp.zeros(2), scale_tril=scale),
            infer={"local": True},
        )
        with numpyro.plate("rows", len(x)):
            eta = level + effects[0] + effects[1] * x
            numpyro.sample("y", dist.Bernoulli(logits=eta), obs=y)

    own = clients("logistic")[4]
    data = FederatedData.from_clients([own])
    value = total(of(model, data, 9), data)({"level": 0.3})
    axis = np.linspace(-8, 8, 401)
    places = np.stack(np.meshgrid(axis, axis), -1).reshape(-1, 2)
    eta = 0.3 + places[:, :1] + places[:, 1:] * own["x"]
    terms = np.sum(own["y"] * eta - np.log1p(np.exp(eta)), 1)
    prior = dist.MultivariateNormal(jnp.zeros(2), scale_tril=scale).log_prob(places)
    wanted = np.log(np.sum(np.exp(terms + np.asarray(prior))) * (axis[1] - axis[0]) ** 2)
    np.testing.assert_allclose(value, wanted, atol=1e-6)


@pytest.mark.slow
def test_kernels_sample_it_as_any_other_model():
    """Draw for draw the run on the Gaussian model integrated by hand."""
    own = clients()
    data = FederatedData.from_clients(own)
    posterior = of(gaussian, data)

    numbers = FederatedData.from_arrays({"client": np.arange(len(SIZES))}, np.arange(len(SIZES)))

    def by_hand(position, rows):
        values = jnp.stack([closed_form(position, [group]) for group in own])
        return values[rows["client"]]

    exact = posterior._replace(loglikelihood_fn=by_hand)
    runs = [
        fedmcmc.sample(
            jax.random.key(3),
            fedmcmc.lsd(model, step_size=0.05, participation=fedmcmc.bernoulli(0.6)),
            rows,
            PLACE,
            num_rounds=20,
            progress=False,
        ).draws
        for model, rows in ((posterior, data), (exact, numbers))
    ]
    for name in PLACE:
        np.testing.assert_allclose(runs[0][name], runs[1][name], rtol=1e-6, atol=1e-8)


@pytest.mark.slow
def test_what_sums_over_rows_sums_over_groups():
    data = in_two_clients(clients())
    posterior = of(gaussian, data)
    place = jax.tree.map(lambda x: jnp.asarray(x)[None], PLACE)
    found = fedmcmc.metrics.potential(posterior, data, place)
    wanted = -(posterior.logprior_fn(PLACE) + closed_form(PLACE, clients()))
    np.testing.assert_allclose(found[0], wanted, rtol=1e-9)


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


@pytest.mark.slow
def test_of_real_districts_it_is_the_published_likelihood():
    """Contraceptive use over 60 districts: the Laplace fit that lme4's documentation shows."""
    model, data = contraception()
    value, slope = jax.value_and_grad(total(of(model, data, 1), data))(LAPLACE)
    np.testing.assert_allclose(value, -1186.36, atol=0.005)
    for leaf in jax.tree.leaves(slope):
        assert np.abs(leaf).max() < 1e-2  # errors of the estimates are about 0.1


@pytest.mark.slow
def test_of_two_effects_per_subject_it_is_the_published_likelihood():
    """Reaction times after days without sleep: minus two log likelihoods of 1751.94."""
    model, data = sleepstudy()
    value, slope = jax.value_and_grad(total(of(model, data, 1), data))(SLEEP)
    np.testing.assert_allclose(-2 * value, 1751.94, atol=0.005)
    assert np.abs(slope["sds"]).max() < 1e-2 and abs(slope["sigma"]) < 1e-2


@pytest.mark.slow
def test_of_real_districts_more_nodes_have_a_maximum_of_their_own():
    """Seven nodes, whose effects' sd is above that of Laplace's approximation."""
    model, data = contraception()
    start, unravel = jax.flatten_util.ravel_pytree(LAPLACE)
    value_fn = total(of(model, data, 7), data)
    both = jax.jit(jax.value_and_grad(lambda flat: -value_fn(unravel(flat))))
    found = scipy.optimize.minimize(both, start, jac=True, method="BFGS")
    np.testing.assert_allclose(-found.fun, -1186.23, atol=0.005)
    np.testing.assert_allclose(np.exp(unravel(found.x)["tau"]), 0.4786, atol=5e-4)


RESTRICTED = {
    "sds": np.log([24.740, 5.922]),
    "correlation": np.log((1 + 0.066) / (1 - 0.066)),
    "sigma": np.log(25.592),
}


@pytest.mark.slow
def test_of_two_effects_per_subject_it_has_the_published_restricted_likelihood():
    """With the fixed effects integrated out under a flat prior: REML, as lme4 fits by default."""
    model, data = sleepstudy()
    value_fn = total(of(model, data, 1), data)

    def at(b, spread):
        return value_fn({"b": b, **spread})

    @jax.jit
    def criterion(spread):
        zero = jnp.zeros(2)  # in the fixed effects the value is quadratic: one Newton step is all
        precision = -jax.hessian(at)(zero, spread)
        b = jnp.linalg.solve(precision, jax.grad(at)(zero, spread))
        log_det = jnp.linalg.slogdet(precision / (2 * jnp.pi))[1]
        return log_det - 2 * at(b, spread), (b, jnp.sqrt(jnp.diagonal(jnp.linalg.inv(precision))))

    (value, (b, errors)), slope = jax.value_and_grad(criterion, has_aux=True)(RESTRICTED)
    np.testing.assert_allclose(value, 1743.628, atol=5e-4)
    np.testing.assert_allclose(b, [251.405, 10.467], atol=5e-4)
    np.testing.assert_allclose(errors, [6.825, 1.546], atol=1e-3)
    for leaf in jax.tree.leaves(slope):
        assert np.abs(leaf).max() < 2e-2  # per unit of a logarithm, of estimates of 4 digits


def test_posteriors_that_do_not_fit_are_refused():
    data = FederatedData.from_clients(clients())
    posterior = fedmcmc.from_numpyro(gaussian, example=data)
    with pytest.raises(ValueError, match="marginal"):
        fedmcmc.lsd(posterior, step_size=0.1)
    with pytest.raises(ValueError, match="nodes must be odd"):
        marginal(posterior, 4)
    with pytest.raises(ValueError, match="no latents of groups"):
        marginal(marginal(posterior))
    four = fedmcmc.from_numpyro(wide, example=data)
    with pytest.raises(ValueError, match=r"at most 3 numbers per group, and this model has 4"):
        marginal(four)
    assert marginal(four, nodes=1).local is None  # Laplace's approximation takes any number
    with pytest.raises(ValueError, match="Pooled rows have no groups"):
        fedmcmc.sgld(marginal(posterior), step_size=0.1)
    kernel = fedmcmc.lsd(marginal(posterior), step_size=0.1, batch_size=1)
    with pytest.raises(TypeError, match="one term per group"):
        fedmcmc.sample(jax.random.key(0), kernel, data, PLACE, num_rounds=1, progress=False)
