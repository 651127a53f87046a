"""Gibbs sampling of NumPyro models: what the server knows of latents, and what it draws."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pytest
from numpyro import distributions as dist

import fedmcmc
from fedmcmc import FederatedData
from fedmcmc.hierarchy import conjugate, independence, ula
from fedmcmc.pytrees import trees
from tests.hierarchy.models import (
    SD,
    SPREAD,
    clients,
    gaussian,
    in_two_clients,
    logistic,
)
from tests.oracles.federations import LIMIT, worst_z
from tests.oracles.laws import Moments

KEY = jax.random.key(6)


def of(model, data):
    return fedmcmc.from_numpyro(model, example=data, centered=1.0)


def shared_spread(x, y=None):
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    effect = numpyro.sample("effect", dist.Normal(mu, tau), infer={"local": True})
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Normal(effect, SD), obs=y)


def correlated(x, y=None):
    b = numpyro.sample("b", dist.Normal(0, 2).expand([2]).to_event(1))
    sds = numpyro.sample("sds", dist.HalfNormal(1).expand([2]).to_event(1))
    factor = sds[:, None] * jnp.array([[1.0, 0.0], [0.6, 0.8]])
    effects = dist.MultivariateNormal(b, scale_tril=factor)
    effect = numpyro.sample("effect", effects, infer={"local": True})
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Normal(effect[0] + effect[1] * x, SD), obs=y)


@pytest.mark.parametrize("model", [shared_spread, correlated], ids=["normal", "multivariate"])
def test_sums_of_statistics_say_the_log_prior_of_all_latents(model):
    data = FederatedData.from_clients(clients())
    local = of(model, data).local
    rng, num = np.random.default_rng(0), 7
    names = ("mu", "tau") if model is shared_spread else ("b", "sds")
    shape = () if model is shared_spread else (2,)
    latents = {"effect": jnp.asarray(rng.normal(size=(num, *shape)), jnp.float32)}
    origin = {"effect": jnp.full(shape, 0.4)}
    each = jax.vmap(lambda latent: local.population.statistics_fn(latent, origin))(latents)
    total = jax.tree.map(lambda leaf: jnp.sum(leaf, 0), each)
    sums = fedmcmc.types.LatentSums(jnp.float32(num), total, origin, trees.scale(1e-6, total))
    gaps = []
    for _ in range(3):
        place = {name: jnp.asarray(0.5 * rng.normal(size=shape), jnp.float32) for name in names}
        wanted = sum(local.logprior_fn(place, {"effect": x}) for x in latents["effect"])
        gaps.append(wanted - local.population.logdensity_fn(place, sums))
    np.testing.assert_allclose(gaps, gaps[0], rtol=1e-4)
    assert not any(local.population.row_parameters.value)


@pytest.mark.parametrize("model", [shared_spread, correlated], ids=["normal", "multivariate"])
def test_a_spread_is_not_below_what_rounding_leaves_of_it(model):
    """A difference of rounded sums may be negative: a scale of zero would be the likeliest."""
    population = of(model, FederatedData.from_clients(clients())).local.population
    num, bound = 50, 0.1
    if model is shared_spread:
        (mean, scale), factor, first = ("mu", "tau"), np.eye(1), jnp.array(300.0)
    else:
        (mean, scale), first = ("b", "sds"), jnp.array([300.0, 200.0])
        factor = np.array([[1.0, 0.0], [0.6, 0.8]])
    squares = (jnp.outer(first, first).reshape(2 * first.shape) / num) * (1 - 1e-6)
    none = jnp.zeros_like(first)
    sums = fedmcmc.types.LatentSums(
        jnp.float32(num),
        {"effect": (first, squares)},
        {"effect": none},
        {"effect": (none, jnp.full_like(squares, bound))},
    )
    lowest = bound * (np.linalg.inv(factor) ** 2).sum()
    for size in (1e-4, 0.05, 1.0):
        position = {mean: first / num, scale: jnp.full_like(first, np.log(size))}
        log_scale = np.log(size * np.diagonal(factor)).sum()
        wanted = -num * log_scale - lowest / (2 * size**2)
        np.testing.assert_allclose(population.logdensity_fn(position, sums), wanted, rtol=1e-3)


def test_parameters_of_rows_are_told_apart():
    data = FederatedData.from_clients(clients())
    assert of(gaussian, data).local.population.row_parameters.value == (False, True)  # mu, slope
    data = FederatedData.from_clients(clients("logistic"))
    assert of(logistic, data).local.population.row_parameters.value == (True, False)  # slope, tau


def heavy_tails(x, y=None):
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    effect = numpyro.sample("effect", dist.StudentT(4, 0, tau), infer={"local": True})
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Bernoulli(logits=effect * x), obs=y)


class ExactGaussian:
    """The posterior of the Gaussian model's mu and slope, its effects integrated out."""

    def __init__(self):
        precision, linear = np.diag([1 / 4, 1.0]), np.zeros(2)
        for own in clients():
            design = np.stack([np.ones(len(own["x"])), own["x"]], 1)
            inverse = np.linalg.inv(SD**2 * np.eye(len(design)) + SPREAD**2)
            precision += design.T @ inverse @ design
            linear += design.T @ inverse @ own["y"]
        self.law = Moments(np.linalg.solve(precision, linear), np.linalg.inv(precision))


# With a small step what is wrong with a proposal's density shows: it must bring variances down.
REFRESHES = {
    "conjugate": (conjugate(), dict(step_size=0.5)),
    "independence": (independence(num_tries=2), {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("refresh", REFRESHES)
def test_parameters_of_rows_move_by_an_exchange_of_their_own(refresh):
    data = in_two_clients(clients())
    block, settings = REFRESHES[refresh]
    posterior = of(gaussian, data)
    kernel = fedmcmc.fed_gibbs(posterior, refresh=block, server_moves=1, **settings)
    samples = fedmcmc.sample(
        KEY,
        kernel,
        data,
        {"mu": 0.0, "slope": 0.0},
        num_rounds=40,
        num_burnin=20,
        thinning=10,
        num_chains=2048,
        progress=False,
    )
    law = ExactGaussian().law
    draws = np.stack([samples.draws["mu"], samples.draws["slope"]], -1)
    for place in range(2):
        assert worst_z(draws[:, place], law) < LIMIT
    assert 0.4 < samples.info["acceptance"].mean() < 0.99


def totals_of(data, samples):
    """Return the totals that the server holds, and the sums over the clients' latents."""
    latents, num = samples.state.clients.latents["effect"][0][data.group_mask], data.num_groups
    origins = samples.state.broadcast.extra.origins
    server, away = samples.state.server.sums, latents - jax.tree.leaves(origins.now)[0][0]
    counted = samples.state.clients.kernel[0] == origins.recount[0]
    again = (latents - jax.tree.leaves(origins.next)[0][0]) * np.repeat(counted, num)
    found = [leaf[0] for leaf in jax.tree.leaves((server.now.total, server.next.total))]
    wanted = [away.sum(), (away**2).sum(), again.sum(), (again**2).sum()]
    return found, wanted


@pytest.mark.slow
@pytest.mark.parametrize("faulty", [False, True])
def test_the_totals_are_those_of_the_clients_latents(faulty):
    """After rounds with clients that vanish and messages that arrive broken, too."""
    data = in_two_clients(clients())
    kernel = fedmcmc.fed_gibbs(
        of(shared_spread, data), refresh=conjugate(), participation=fedmcmc.bernoulli(0.6)
    )
    if faulty:
        kernel = fedmcmc.faults(kernel, drop=0.2, nan=0.2)
    samples = fedmcmc.sample(
        KEY, kernel, data, {"mu": 0.0, "tau": 0.0}, num_rounds=300, progress=False
    )
    assert len(np.unique(samples.draws["tau"])) > 100
    assert samples.state.broadcast.extra.origins.recount[0] > 30
    for found, wanted in zip(*totals_of(data, samples), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=2e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*messages of the kept rounds were left out")
@pytest.mark.parametrize("faulty", [False, True])
def test_the_totals_are_those_of_the_latents_after_every_round(faulty):
    with jax.enable_x64(True):
        data = in_two_clients(clients())
        kernel = fedmcmc.fed_gibbs(
            of(shared_spread, data), refresh=conjugate(), participation=fedmcmc.bernoulli(0.6)
        )
        if faulty:
            kernel = fedmcmc.faults(kernel, drop=0.2, nan=0.2)
        state, taus = None, set()
        for _ in range(25):
            start = {"position": {"mu": 0.0, "tau": 0.0}} if state is None else {"state": state}
            samples = fedmcmc.sample(KEY, kernel, data, num_rounds=1, progress=False, **start)
            state = samples.state
            taus.add(float(samples.draws["tau"][0, 0]))
            for found, wanted in zip(*totals_of(data, samples), strict=True):
                assert found.dtype == np.float64
                np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-10)
        assert len(taus) == 25 and state.broadcast.extra.origins.recount[0] > 3


def test_what_does_not_fit_is_refused():
    data = FederatedData.from_clients(clients("logistic"))
    centered, standard = of(logistic, data), fedmcmc.from_numpyro(logistic, example=data)
    gibbs = fedmcmc.fed_gibbs
    with pytest.raises(ValueError, match=r"'effect' is written as a standard.*centered=1\.0"):
        gibbs(standard, refresh=independence())
    by_hand = centered._replace(local=centered.local._replace(population=None))
    with pytest.raises(ValueError, match=r"latents 'effect' \(Normal\), their distribution"):
        gibbs(by_hand, refresh=independence())
    with pytest.raises(ValueError, match=r"latents 'effect' \(StudentT\), their distribution"):
        gibbs(of(heavy_tails, data), refresh=independence())
    with pytest.raises(ValueError, match="a refresh that is exact"):
        gibbs(centered, refresh=ula())
    with pytest.raises(ValueError, match="full participation"):
        gibbs(centered, refresh=independence(), participation=fedmcmc.bernoulli(0.5))
    with pytest.raises(ValueError, match="has none"):
        gibbs(fedmcmc.marginal(centered), refresh=independence())
    gaussians = FederatedData.from_clients(clients())
    plain = of(shared_spread, gaussians)
    # Without row parameters nothing adapts, and no run warns of it.
    assert gibbs(plain, refresh=conjugate(), num_adapt=7).num_adapt == 0
    with pytest.raises(ValueError, match="only parameters of the population"):
        gibbs(plain, refresh=conjugate(), recenter=True)
    bare = centered.local._replace(population=centered.local.population._replace(origin_fn=None))
    with pytest.raises(ValueError, match="origin_fn"):
        gibbs(centered._replace(local=bare), refresh=independence(), recenter=True)
    kernel = gibbs(centered, refresh=independence())
    with pytest.raises(ValueError, match="cannot be compressed"):
        fedmcmc.compress(kernel, fedmcmc.quantize(4))
    with pytest.raises(ValueError, match="late"):
        fedmcmc.faults(kernel, late=0.1)
    population = centered.local.population
    for wrong, match in (
        (population._replace(row_parameters=(False, False)), "depends on slope"),
        (population._replace(row_parameters=(True,)), "one entry per leaf"),
        (population._replace(logdensity_fn=lambda phi, sums: jnp.float32(0)), "log priors"),
    ):
        local = centered.local._replace(population=wrong)
        other = gibbs(centered._replace(local=local), refresh=independence())
        start = {"tau": 0.0, "slope": 0.0}
        with pytest.raises(ValueError, match=match):
            fedmcmc.sample(KEY, other, data, start, num_rounds=1, progress=False)
