"""Gibbs sampling of NumPyro models: the server's statistics of latents, and its draws."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pytest
from numpyro import distributions as dist

import fedmcmc
from fedmcmc import FederatedData, fed_gibbs
from fedmcmc.hierarchy import conjugate, hmc, independence, ula
from fedmcmc.pytrees import trees
from tests.hierarchy.models import (
    SD,
    clients,
    gaussian,
    in_two_clients,
    logistic,
    quadratic_terms,
    shared_spread,
)
from tests.oracles.federations import LIMIT, worst_z
from tests.oracles.laws import Moments

KEY, START = jax.random.key(6), {"mu": 0.0, "tau": 0.0}


def center(model, data):
    return fedmcmc.from_numpyro(model, example=data, centered=1.0)


def correlated(x, y=None):
    b = numpyro.sample("b", dist.Normal(0, 2).expand([2]).to_event(1))
    sds = numpyro.sample("sds", dist.HalfNormal(1).expand([2]).to_event(1))
    factor = sds[:, None] * jnp.array([[1.0, 0.0], [0.6, 0.8]])
    effects = dist.MultivariateNormal(b, scale_tril=factor)
    effect = numpyro.sample("effect", effects, infer={"local": True})
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Normal(effect[0] + effect[1] * x, SD), obs=y)


POPULATIONS = {
    "normal": (shared_spread, ("mu", "tau"), jnp.array(300.0), np.eye(1)),
    "multivariate": (
        correlated,
        ("b", "sds"),
        jnp.array([300.0, 200.0]),
        np.array([[1.0, 0.0], [0.6, 0.8]]),
    ),
}
"""Models, the names of their means and scales, sums of latents, and factors of correlations."""


@pytest.mark.parametrize("name", POPULATIONS)
def test_sums_of_statistics_give_the_log_prior_of_all_latents(name):
    model, names, sums, _ = POPULATIONS[name]
    local = center(model, FederatedData.from_clients(clients())).local
    rng, num, shape = np.random.default_rng(0), 7, sums.shape
    latents = {"effect": jnp.asarray(rng.normal(size=(num, *shape)), jnp.float32)}
    origin = {"effect": jnp.full(shape, 0.4)}

    @jax.jit
    def gap(place):
        """Return the log prior minus the log density of the sums, which must be a constant."""
        statistics = jax.vmap(lambda x: local.population.statistics_fn(x, origin))(latents)
        total = jax.tree.map(lambda leaf: jnp.sum(leaf, 0), statistics)
        sums = fedmcmc.types.LatentSums(jnp.float32(num), total, origin, trees.scale(1e-6, total))
        log_priors = jax.vmap(lambda x: local.logprior_fn(place, x))(latents)
        return jnp.sum(log_priors) - local.population.logdensity_fn(place, sums)

    places = [
        {name: jnp.asarray(0.5 * rng.normal(size=shape), jnp.float32) for name in names}
        for _ in range(3)
    ]
    gaps = [gap(place) for place in places]
    np.testing.assert_allclose(gaps, gaps[0], rtol=1e-4)
    assert not any(local.population.row_parameters.value)


@pytest.mark.parametrize("name", POPULATIONS)
def test_a_spread_is_not_below_its_rounding_error(name):
    """A difference of rounded sums may be negative: a scale of zero would be the likeliest."""
    model, (mean, scale), total, factor = POPULATIONS[name]
    population = center(model, FederatedData.from_clients(clients())).local.population
    num, bound, zeros = 50, 0.1, jnp.zeros_like(total)
    squares = (jnp.outer(total, total).reshape(2 * total.shape) / num) * (1 - 1e-6)
    sums = fedmcmc.types.LatentSums(
        jnp.float32(num),
        {"effect": (total, squares)},
        {"effect": zeros},
        {"effect": (zeros, jnp.full_like(squares, bound))},
    )
    lowest = bound * (np.linalg.inv(factor) ** 2).sum()
    for size in (1e-4, 0.05, 1.0):
        position = {mean: total / num, scale: jnp.full_like(total, np.log(size))}
        log_scale = np.log(size * np.diagonal(factor)).sum()
        expected = -num * log_scale - lowest / (2 * size**2)
        np.testing.assert_allclose(population.logdensity_fn(position, sums), expected, rtol=1e-3)


def test_parameters_of_rows_are_distinguished():
    data = FederatedData.from_clients(clients())
    assert center(gaussian, data).local.population.row_parameters.value == (
        False,
        True,
    )  # mu, slope
    data = FederatedData.from_clients(clients("logistic"))
    assert center(logistic, data).local.population.row_parameters.value == (
        True,
        False,
    )  # slope, tau


def gaussian_law():
    """Return the posterior of the Gaussian model's mu and slope."""
    _, gradients, curvatures = quadratic_terms(clients())
    precision = np.diag([1 / 4, 1.0]) + curvatures.sum(0)
    return Moments(np.linalg.solve(precision, gradients.sum(0)), np.linalg.inv(precision))


# With a small step a wrong density of the proposals shows: it must bring variances down.
REFRESHES = {
    "conjugate": (conjugate(), dict(step_size=0.5)),
    "independence": (independence(num_tries=2), {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("refresh", REFRESHES)
def test_parameters_of_rows_move_by_their_own_exchange(refresh):
    data = in_two_clients(clients())
    block, settings = REFRESHES[refresh]
    samples = fedmcmc.sample(
        KEY,
        fed_gibbs(center(gaussian, data), refresh=block, server_moves=1, **settings),
        data,
        {"mu": 0.0, "slope": 0.0},
        num_rounds=40,
        num_burnin=20,
        thinning=10,
        num_chains=2048,
        progress=False,
    )
    draws = np.stack([samples.draws["mu"], samples.draws["slope"]], -1)
    for place in range(2):
        assert worst_z(draws[:, place], gaussian_law()) < LIMIT
    assert 0.4 < samples.info["acceptance"].mean() < 0.99


def totals_of(data, samples):
    """Return the totals that the server has, and the sums over the clients' latents."""
    latents, num = samples.state.clients.latents["effect"][0][data.group_mask], data.num_groups
    origins = samples.state.broadcast.extra.origins
    server, away = samples.state.server.sums, latents - jax.tree.leaves(origins.now)[0][0]
    counted = samples.state.clients.kernel[0] == origins.recount[0]
    again = (latents - jax.tree.leaves(origins.next)[0][0]) * np.repeat(counted, num)
    totals = [leaf[0] for leaf in jax.tree.leaves((server.now.total, server.next.total))]
    return totals, [away.sum(), (away**2).sum(), again.sum(), (again**2).sum()]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*messages of the kept rounds were excluded")
@pytest.mark.parametrize("faulty", [False, True])
def test_the_totals_are_those_of_the_latents_after_every_round(faulty):
    """Totals are exact if clients are absent and if messages are lost or broken."""
    with jax.enable_x64(True):
        data = in_two_clients(clients())
        posterior, half = center(shared_spread, data), fedmcmc.bernoulli(0.6)
        kernel = fed_gibbs(posterior, refresh=conjugate(), participation=half)
        if faulty:
            kernel = fedmcmc.faults(kernel, drop=0.2, nan=0.2)
        state, taus = None, set()
        for _ in range(25):
            start = {"position": START} if state is None else {"state": state}
            samples = fedmcmc.sample(KEY, kernel, data, num_rounds=1, progress=False, **start)
            state = samples.state
            taus.add(float(samples.draws["tau"][0, 0]))
            for total, expected in zip(*totals_of(data, samples), strict=True):
                assert total.dtype == np.float64
                np.testing.assert_allclose(total, expected, rtol=1e-10, atol=1e-10)
        assert len(taus) == 25 and state.broadcast.extra.origins.recount[0] > 3


def counts(y):
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfNormal(5))
    effect = numpyro.sample("effect", dist.Normal(mu, tau), infer={"local": True})
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Poisson(jnp.exp(effect)), obs=y)


@pytest.mark.slow
def test_a_warning_names_a_group_whose_latents_hardly_move():
    """Steps for a rate of one are a hundred times too long for a rate of ten thousand."""
    rows = [{"y": np.array([1, 2, 0, 10_000, 10_100])}, {"y": np.array([3, 1])}]
    labels = [["low"] * 3 + ["high"] * 2, ["low"] * 2]
    data = FederatedData.from_clients(rows, groups=labels)
    refresh = hmc(1, num_steps=5, num_adapt=0)
    kernel = fed_gibbs(center(counts, data), refresh=refresh)
    message = r"0% of the proposals for the latents of group 'high' of client 0"
    with pytest.warns(fedmcmc.SamplingWarning, match=message):
        samples = fedmcmc.sample(KEY, kernel, data, START, num_rounds=40, progress=False)
    accepted = samples.state.clients.accepted
    assert (accepted.num == 40).all() and (accepted.mean[:, 1, 1] == 1).all()
    assert accepted.mean[:, 0, 1].max() < 0.2 < 0.5 < accepted.mean[:, :, 0].min()


@pytest.mark.slow
def test_a_warning_counts_draws_of_rounds_in_which_steps_adapt():
    data = FederatedData.from_clients([{"y": np.array([1, 2, 0])}] * 5)
    refresh = hmc(1, num_adapt=30, target_accept=0.57)
    kernel = fed_gibbs(center(counts, data), refresh=refresh)
    settings = dict(num_rounds=420, progress=False)
    with pytest.warns(fedmcmc.SamplingWarning, match=r"^20 of 410 kept draws.*num_burnin=30"):
        fedmcmc.sample(KEY, kernel, data, START, num_burnin=10, **settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fedmcmc.sample(KEY, kernel, data, START, num_burnin=30, **settings)
    assert not any("still adapted" in str(warning.message) for warning in caught)


def heavy_tails(x, y=None):
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    effect = numpyro.sample("effect", dist.StudentT(4, 0, tau), infer={"local": True})
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Bernoulli(logits=effect * x), obs=y)


def test_unsupported_models_and_settings_raise():
    data = FederatedData.from_clients(clients("logistic"))
    centered, standard = center(logistic, data), fedmcmc.from_numpyro(logistic, example=data)
    plain = center(shared_spread, FederatedData.from_clients(clients()))
    population, tries = centered.local.population, independence()

    def with_population(changed):
        return centered._replace(local=centered.local._replace(population=changed))

    without_origin = with_population(population._replace(origin_fn=None))
    kernel = fed_gibbs(centered, refresh=tries)
    half = fedmcmc.bernoulli(0.5)
    for build, message in (
        (lambda: fed_gibbs(standard, refresh=tries), r"'effect' is written as a .*centered=1\.0"),
        (
            lambda: fed_gibbs(with_population(None), refresh=tries),
            r"latents 'effect' \(Normal\), their distribution",
        ),
        (
            lambda: fed_gibbs(center(heavy_tails, data), refresh=tries),
            r"latents 'effect' \(StudentT\), their distribution",
        ),
        (lambda: fed_gibbs(centered, refresh=ula()), "a refresh that is exact"),
        (lambda: fed_gibbs(centered, refresh=tries, participation=half), "full participation"),
        (lambda: fed_gibbs(fedmcmc.marginal(centered), refresh=tries), "has none"),
        (
            lambda: fed_gibbs(plain, refresh=conjugate(), recenter=True),
            "only parameters of the population",
        ),
        (lambda: fed_gibbs(without_origin, refresh=tries, recenter=True), "origin_fn"),
        (lambda: fedmcmc.compress(kernel, fedmcmc.quantize(4)), "cannot be compressed"),
        (lambda: fedmcmc.faults(kernel, late=0.1), "late"),
    ):
        with pytest.raises(ValueError, match=message):
            build()
    # Without row parameters nothing adapts, and no run warns of it.
    assert fed_gibbs(plain, refresh=conjugate(), num_adapt=7).num_adapt == 0
    for wrong, message in (
        (population._replace(row_parameters=(False, False)), "depends on slope"),
        (population._replace(row_parameters=(True,)), "one entry per leaf"),
        (population._replace(logdensity_fn=lambda phi, sums: jnp.float32(0)), "log priors"),
    ):
        kernel = fed_gibbs(with_population(wrong), refresh=tries)
        with pytest.raises(ValueError, match=message):
            kernel.init(KEY, {"tau": 0.0, "slope": 0.0}, data)
