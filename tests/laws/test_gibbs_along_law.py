"""Moves of a Gibbs sampler that take latents along: what they leave as it is, and what they add."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pytest
from numpyro import distributions as dist

import fedmcmc
from fedmcmc.hierarchy import conjugate
from fedmcmc.kernels._gibbs_interweaving import gone_along, proposed
from tests.oracles import federations_gibbs, federations_joint, laws
from tests.oracles.federations import LIMIT, worst_z
from tests.oracles.federations_joint import DATA, D, joint_vector

NUM_CHAINS = 8192


def shifted(latent, position, other):
    return latent + jnp.asarray(federations_joint.PULL, latent.dtype) @ (other - position)


POPULATION = federations_gibbs.POPULATION._replace(draw_fn=None, transport_fn=shifted)
WAYS = {
    # Shared parameters are those of rows and of the latents' means at once.
    "recentering": (federations_joint, (True,), dict(recenter=True)),
    "rescaling": (federations_gibbs, (False,), dict(interweave=True)),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", WAYS)
def test_draws_of_the_posterior_stay_such(kind):
    """Nine moves alone, with no other in between, of chains that are draws beforehand."""
    oracle, of_rows, settings = WAYS[kind]
    local = oracle.LOCAL._replace(population=POPULATION._replace(of_rows=of_rows))
    posterior = oracle.POSTERIOR._replace(local=local)
    kernel = fedmcmc.fed_gibbs(posterior, refresh=conjugate(), **settings)
    (way,) = kernel.ways_along
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
        server, extra = proposed(kernel, walk_key, position, server, extra)
        broadcast = first.broadcast._replace(position=position, extra=extra)
        axes = DATA.client_axes()
        messages = jax.vmap(
            lambda state, client: way.step((), broadcast, state, client)[0], in_axes=(0, axes)
        )(clients, DATA.everyone())
        total = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), messages)
        broadcast, _, _ = way.aggregate(key, broadcast, server, total)
        along = jax.vmap(lambda state: gone_along(kernel, state, broadcast))(clients)
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
    """Within rounds in which, without, they are far from it still; both moves in each round."""
    data, law = schools()
    posterior = fedmcmc.from_numpyro(kinds_of_schools, example=data, centered=1.0)

    def worst(**settings):
        draws = fedmcmc.sample(
            jax.random.key(3),
            fedmcmc.fed_gibbs(posterior, refresh=conjugate(), server_moves=1, **settings),
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
    assert worst(recenter=True, interweave=True) < LIMIT
