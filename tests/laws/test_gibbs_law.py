"""Gibbs sampling over clients: the law of every round, exact in the long run whoever takes part."""

from dataclasses import dataclass

import jax
import numpy as np
import numpyro
import pytest
from numpyro import distributions as dist
from scipy import stats

import fedmcmc
from fedmcmc.hierarchy import Refresh, conjugate, hmc, independence
from fedmcmc.types import register_dataclass
from tests.oracles import chains, laws, laws_joint
from tests.oracles.chains import split_keys
from tests.oracles.federations import LIMIT, worst_z
from tests.oracles.federations_gibbs import DATA, MODEL, POSTERIOR, SLICED
from tests.oracles.federations_joint import PROBABILITIES, START, joint_vector
from tests.support.lanes import fast_and_slow

NUM_CHAINS, ROUNDS = 8192, (1, 3, 10)
CASES = {
    "all clients": (np.ones(3), fedmcmc.full()),
    "some clients": (PROBABILITIES, fedmcmc.bernoulli(PROBABILITIES)),
}


def run(posterior, refresh, num_rounds, seed=5, num_chains=NUM_CHAINS, **settings):
    kernel = fedmcmc.fed_gibbs(posterior, refresh=refresh, **settings)
    return chains.run(kernel, DATA, START, split_keys(num_chains, seed), num_rounds, joint_vector)


def compute_laws(probabilities, num_rounds):
    rounds = [
        (chance, laws_joint.gibbs_round(MODEL, weights > 0))
        for chance, weights in laws_joint.cohorts(probabilities)
    ]
    return laws_joint.laws_of(rounds, MODEL.at_modes(START), num_rounds)


@pytest.mark.parametrize("case", fast_and_slow(CASES, ["some clients"]))
def test_law_of_every_round(case):
    probabilities, participation = CASES[case]
    draws = run(POSTERIOR, conjugate(), max(ROUNDS), participation=participation)
    expected = compute_laws(probabilities, max(ROUNDS))
    for round_ in ROUNDS:
        assert worst_z(draws[:, round_ - 1], expected[round_]) < LIMIT, f"after {round_} rounds"


@register_dataclass
@dataclass(frozen=True)
class Zeros(Refresh):
    """Latents that are all zero."""

    def begin(self, groups, position):
        return np.zeros((groups.num, groups.size), np.float32)


def test_slices_draw_what_is_shared_given_latents():
    """Four sweeps of the server alone, without a message of a client, are as good as a draw."""
    kernel = fedmcmc.fed_gibbs(SLICED, refresh=Zeros(), server_moves=4)
    state = jax.jit(kernel.init)(jax.random.key(0), START, DATA)
    like = kernel.message_like(state.broadcast)
    silence = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), like)

    @jax.jit
    @jax.vmap
    def draw(key):
        return kernel.aggregate(key, state.broadcast, state.server, silence)[0].position

    draws = np.asarray(draw(jax.random.split(jax.random.key(1), 4096)))
    precision, linear = MODEL.joint
    covariance = np.linalg.inv(precision[: len(START), : len(START)])
    law = laws.Moments(covariance @ linear[: len(START)], covariance)
    assert worst_z(draws, law) < LIMIT


@pytest.mark.slow
def test_law_of_every_round_where_the_server_draws_by_slices():
    """Four sweeps are as good as draws; absent clients enter through the totals alone."""
    participation = fedmcmc.bernoulli(PROBABILITIES)
    settings = dict(server_moves=4, participation=participation)
    draws = run(SLICED, conjugate(), 3, num_chains=2048, **settings)
    expected = compute_laws(PROBABILITIES, 3)
    for round_ in range(3):
        z = worst_z(draws[:, round_], expected[round_ + 1])
        assert z < LIMIT, f"after {round_ + 1} rounds"


SERVERS = {
    "slices": (SLICED, conjugate(), dict(server_moves=2)),
    "slices, metropolis": (SLICED, independence(num_tries=2), dict(server_moves=1)),
    "trajectories": (POSTERIOR, hmc(4, num_steps=3, num_adapt=10), {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", SERVERS)
def test_in_the_long_run_it_is_the_posterior(case):
    posterior, refresh, settings = SERVERS[case]
    draws = run(posterior, refresh, 24, **settings)  # steps are adapted within ten rounds
    for round_ in (20, 24):
        assert worst_z(draws[:, round_ - 1], MODEL.posterior) < LIMIT, f"after {round_} rounds"


FAR, SIZES = 3000.0, (4, 9, 2, 6, 12, 3, 7, 5)


def rows_of(center, spread=1.0):
    """Return outcomes of groups whose effects spread around a center."""
    rng = np.random.default_rng(4)
    effects = (center + rng.normal(0.5, spread) + rng.normal(size=size) for size in SIZES)
    return [np.float32(x) for x in effects]


def effects_of(center):
    def model(y):
        mu = numpyro.sample("mu", dist.Normal(center, 50))
        tau = numpyro.sample("tau", dist.HalfNormal(20))
        effect = numpyro.sample("effect", dist.Normal(mu, tau), infer={"local": True})
        with numpyro.plate("rows", len(y)):
            numpyro.sample("y", dist.Normal(effect, 1.0), obs=y)

    return model


def law_of_effects(center, groups):
    """Return a grid of mu, and of log tau, with the posterior's distribution functions there."""
    log_tau, mu = np.linspace(-12, 3, 3001), center + np.linspace(-4, 5, 2001)
    rows = [np.float64(y) for y in groups]
    variances = np.exp(2 * log_tau)[:, None] + 1 / np.array(SIZES)  # of a group's mean, [grid, G]
    gap = np.array([y.mean() for y in rows]) - center
    precision = (1 / variances).sum(1) + 1 / 50**2
    mean = (gap / variances).sum(1) / precision
    # The density of all means where mu is integrated out.
    square = (gap**2 / variances).sum(1) - precision * mean**2
    log_density = -0.5 * (np.log(variances).sum(1) + np.log(precision) + square)
    log_density += log_tau - np.exp(2 * log_tau) / 800  # HalfNormal(20), of the logarithm
    weight = np.exp(log_density - log_density.max())
    weight /= weight.sum()
    of_mu = stats.norm.cdf(mu, center + mean[:, None], precision[:, None] ** -0.5)
    return (mu, weight @ of_mu), (log_tau, np.cumsum(weight) - weight / 2)


@pytest.mark.slow
@pytest.mark.parametrize("share", [1.0, 0.4])
def test_effects_far_from_zero_have_a_spread(share):
    """In float32, from a start at zero, around which sums of squares have no digit left of it."""
    groups = rows_of(FAR)
    data = fedmcmc.FederatedData.from_clients([{"y": y} for y in groups])
    posterior = fedmcmc.from_numpyro(effects_of(FAR), example=data, centered=1.0)
    kernel = fedmcmc.fed_gibbs(
        posterior,
        refresh=conjugate(),
        server_moves=1,
        participation=fedmcmc.bernoulli(share),
    )
    num_rounds = int(240 / share)
    samples = fedmcmc.sample(
        jax.random.key(1),
        kernel,
        data,
        {"mu": 0.0, "tau": 0.0},
        num_rounds=num_rounds,
        num_burnin=num_rounds - 1,
        num_chains=2048,
        progress=False,
    )
    for name, z in z_of_quantiles(samples, law_of_effects(FAR, groups)).items():
        assert z < LIMIT, name


def z_of_quantiles(samples, laws):
    """Return how many standard errors shares of the last draws below quantiles are off at most."""
    levels, worst = np.linspace(0.05, 0.95, 19), {}
    for name, (places, chances) in zip(("mu", "tau"), laws, strict=True):
        quantiles = np.interp(levels, chances, places)
        below = (samples.draws[name][:, -1:] < quantiles).mean(0)
        error = np.sqrt(levels * (1 - levels) / len(samples.draws[name]))
        worst[name] = np.abs((below - levels) / error).max()
    return worst
