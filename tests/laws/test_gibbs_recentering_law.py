"""Recentering of a Gibbs sampler: its moves keep the posterior, and slopes converge faster."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pytest
from numpyro import distributions as dist

import fedmcmc
from fedmcmc.hierarchy import conjugate, hmc
from fedmcmc.kernels._gibbs_recentering import draw_candidates, transport_latents
from tests.oracles import federations_gibbs, federations_joint, laws
from tests.oracles.federations import LIMIT, worst_z
from tests.oracles.federations_joint import DATA, D, joint_vector

NUM_CHAINS = 8192


@pytest.mark.slow
def test_draws_of_the_posterior_stay_such():
    """Nine moves alone, without other moves between them, of chains that start as exact draws."""
    oracle = federations_joint
    # The shared parameters are row parameters and determine the latents' means.
    population = federations_gibbs.POPULATION._replace(draw_fn=None, row_parameters=(True,))
    posterior = oracle.POSTERIOR._replace(local=oracle.LOCAL._replace(population=population))
    kernel = fedmcmc.fed_gibbs(posterior, refresh=conjugate(), recenter=True)
    _, phase, _ = kernel.phases
    law = oracle.MODEL.posterior
    first = jax.jit(kernel.init)(jax.random.key(0), federations_joint.START, DATA)
    owners = np.array(federations_joint.OWNERS)
    number = np.array([np.sum(owners[:i] == owner) for i, owner in enumerate(owners)])

    @jax.jit
    @jax.vmap
    def moved(key, place):
        position, latents = place[:D], place[D:].reshape(len(owners), -1)
        own = first.clients.latents.at[owners, number].set(latents)
        clients = first.clients._replace(latents=own)
        server, extra = first.server, first.broadcast.extra
        key, walk_key = jax.random.split(key)
        walk_key = jax.random.fold_in(walk_key, 0)
        walk, candidates = draw_candidates(server.walk, walk_key, position)
        server, extra = server._replace(walk=walk), extra._replace(candidates=candidates)
        broadcast = first.broadcast._replace(position=position, extra=extra)
        axes = DATA.client_axes()
        messages = jax.vmap(
            lambda state, client: phase.step((), broadcast, state, client)[0], in_axes=(0, axes)
        )(clients, DATA.everyone())
        total = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), messages)
        broadcast, _, _ = phase.aggregate(key, broadcast, server, total)
        along = jax.vmap(lambda state: transport_latents(kernel, state, broadcast))(clients)
        state = first._replace(broadcast=broadcast, clients=clients._replace(latents=along))
        return joint_vector(state)

    rng = np.random.default_rng(1)
    before = rng.multivariate_normal(law.mean, law.covariance, NUM_CHAINS).astype(np.float32)
    after = np.asarray(moved(jax.random.split(jax.random.key(2), NUM_CHAINS), before))
    last = after
    for i in range(3, 11):  # what is wrong with one adds up
        last = np.asarray(moved(jax.random.split(jax.random.key(i), NUM_CHAINS), last))
    assert worst_z(last, law) < LIMIT
    # They do move, all latents with them, and the pairs are exchangeable.
    share = np.mean(np.any(after[:, :D] != before[:, :D], axis=1))
    assert share > 0.5
    pairs = before[:, :, None] * after[:, None, :]
    above = np.triu_indices(pairs.shape[1], 1)
    gap = (pairs - np.swapaxes(pairs, 1, 2))[:, *above]
    assert np.max(np.abs(gap.mean(0)) / gap.std(0)) * np.sqrt(NUM_CHAINS) < LIMIT


SIZES, NOISE, SPREAD = (5, 8, 3, 9, 6, 4), 0.4, 0.7


def kinds_of_schools(y, kind):
    mu = numpyro.sample("mu", dist.Normal(0, 3))
    slope = numpyro.sample("slope", dist.Normal(0, 3))
    effect = numpyro.sample("effect", dist.Normal(mu, SPREAD), infer={"local": True})
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(effect + slope * kind, NOISE), obs=y)


def schools():
    """Return clients whose covariate is alike for all their rows, and the law of mu and slope."""
    rng, rows = np.random.default_rng(6), []
    information, linear = np.eye(2) / 9, np.zeros(2)
    for i, size in enumerate(SIZES):
        kind = i % 2 + 0.2 * rng.normal()
        y = rng.normal(0.5, SPREAD) + kind + NOISE * rng.normal(size=size)
        rows.append({"y": np.float32(y), "kind": np.full(size, kind, np.float32)})
        precision = 1 / (SPREAD**2 + NOISE**2 / size)  # of the mean of the rows, given both
        covariates = np.array([1, kind])
        information += precision * np.outer(covariates, covariates)
        linear += precision * y.mean() * covariates
    covariance = np.linalg.inv(information)
    return fedmcmc.FederatedData.from_clients(rows), laws.Moments(covariance @ linear, covariance)


@pytest.mark.slow
def test_slopes_of_what_varies_between_groups_get_to_the_posterior():
    """The same number of rounds without recentering is far from enough."""
    data, law = schools()
    # One leapfrog step moves latents little, so that it matters where they were.
    refresh = hmc(1, num_adapt=0)
    posterior = fedmcmc.from_numpyro(kinds_of_schools, example=data, centered=1.0)

    def worst(**settings):
        draws = fedmcmc.sample(
            jax.random.key(3),
            fedmcmc.fed_gibbs(posterior, refresh=refresh, server_moves=1, **settings),
            data,
            {"mu": -1.0, "slope": 3.0},
            num_rounds=40,
            num_burnin=39,
            num_chains=4096,
            progress=False,
        ).draws
        last = np.stack([draws["mu"][:, -1], draws["slope"][:, -1]], axis=1)
        return worst_z(last, law)

    assert worst() > 4 * LIMIT
    assert worst(recenter=True) < LIMIT
