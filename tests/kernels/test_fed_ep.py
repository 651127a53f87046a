"""FedEP: sites and their product, improper fits and products, priors, and optimizers."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedmcmc
from fedmcmc import inference
from fedmcmc.pytrees import trees
from tests.oracles.federations import Federation, loglikelihood
from tests.support.lanes import fast_and_slow

FEDERATION = Federation()
DATA = FEDERATION.data
START = jnp.asarray(FEDERATION.start, jnp.float32)
FLAT = fedmcmc.Posterior(lambda theta: jnp.zeros(()), loglikelihood)
MEAN = inference.sgd_mean(optax.sgd(0.1), num_samples=4, batch_size=3)
MCMC = inference.mcmc(MEAN, shrinkage=0.3)
EXACT = inference.exact_gaussian()
STRUCTURES = ("diagonal", "scaled_identity", "dense")


@jax.jit
def first_state(kernel, data, start):
    return fedmcmc.simulate(kernel, data).init(start)


@jax.jit
def step(kernel, data, state):
    return fedmcmc.simulate(kernel, data).step(jax.random.key(4), state)


def run(kernel, num_rounds=6, start=START, data=DATA):
    """Return the states before the first round and after each round, and the rounds' reports."""
    states, infos = [first_state(kernel, data, start)], []
    for _ in range(num_rounds):
        state, info = step(kernel, data, states[-1])
        states.append(state)
        infos.append(info)
    return states, infos


def assert_close(actual, expected, rtol=1e-4, atol=1e-3):
    chex.assert_trees_all_close(actual, expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("structure", fast_and_slow(STRUCTURES, ["diagonal"]))
@pytest.mark.parametrize("rule", fast_and_slow(["uniform", "bernoulli"], ["uniform"]))
def test_i27_the_approximation_is_prior_times_sites(structure, rule):
    kernel = fedmcmc.fed_ep(
        FLAT,
        inference=MCMC,
        structure=structure,
        damping=lambda r: 0.5 / (1 + r),
        participation=fedmcmc.uniform(2) if rule == "uniform" else fedmcmc.bernoulli(0.5),
        initial_precision=0.2,
    )
    state = run(kernel)[0][-1]
    assert_close(state.broadcast.extra[0], state.clients.site.sum())


COMPRESSORS = {
    "quantize": fedmcmc.quantize(2),
    "top_k": fedmcmc.top_k(0.4),
    "memory": fedmcmc.memory(fedmcmc.quantize(3)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPRESSORS)
def test_sites_contain_the_noise_of_the_code(name):
    """Otherwise the noise stays in the approximation."""
    plain = fedmcmc.fed_ep(FLAT, inference=EXACT, structure="dense", damping=0.5)
    states, infos = run(fedmcmc.compress(plain, COMPRESSORS[name]), 86)
    q = states[6].broadcast.extra[0]
    assert_close(q, states[6].clients.kernel.site.sum(), atol=2e-3)
    uncompressed = run(plain)[0][-1].broadcast.extra[0]
    assert np.abs(q.precision - uncompressed.precision).max() > 1e-3
    # In the long run, the approximation is the exact posterior.
    precision = states[-1].broadcast.extra[0].precision
    np.testing.assert_allclose(precision, FEDERATION.precisions.sum(0), rtol=1e-3, atol=1e-2)
    assert int(infos[5].bits_up) < 4 * 32 * 12 or name == "memory"


# Fits and products that are improper


def signed(theta, rows):
    """Return log likelihoods that are convex for rows with a negative sign."""
    return -0.5 * jnp.sum(rows["sign"][:, None] * (rows["x"] - theta) ** 2, axis=-1)


SIGNED = fedmcmc.Posterior(lambda theta: jnp.zeros(()), signed)
SIGNED_DATA = fedmcmc.FederatedData.from_clients(
    [
        {"x": np.ones((3, 2)), "sign": np.ones(3)},
        {"x": np.zeros((2, 2)), "sign": -np.ones(2)},
        {"x": np.ones((4, 2)) * 2, "sign": np.ones(4)},
    ]
)


def signed_data(*clients):
    return fedmcmc.FederatedData.from_clients([SIGNED_DATA.client_rows(i) for i in clients])


def test_an_improper_fit_keeps_the_site_and_sends_nothing():
    states, infos = run(fedmcmc.fed_ep(SIGNED, inference=EXACT), 2, jnp.zeros(2), SIGNED_DATA)
    assert infos[0].clients.usable.tolist() == [True, False, True]
    assert np.abs(states[1].clients.site.precision[1]).max() == 0
    # With the other clients' sites as a cavity, the second client's fit is proper.
    assert infos[1].clients.usable.tolist() == [True, True, True]
    for state, precision, position in zip(states[1:], (7.0, 5.0), (11 / 7, 11 / 5), strict=True):
        np.testing.assert_allclose(state.broadcast.extra[0].precision, precision, rtol=1e-5)
        np.testing.assert_allclose(state.broadcast.position, position, rtol=1e-5)


@pytest.mark.slow
def test_a_run_counts_lost_fits_and_warns_of_many():
    kernel = fedmcmc.fed_ep(SIGNED, inference=EXACT)

    def num_lost(*clients, num_rounds):
        settings = dict(num_rounds=num_rounds, progress=False)
        data = signed_data(*clients)
        samples = fedmcmc.sample(jax.random.key(0), kernel, data, jnp.zeros(2), **settings)
        return samples.info["num_lost"].tolist()

    assert num_lost(0, 1, 2, num_rounds=2) == [[1, 0]]
    with pytest.warns(RuntimeWarning, match="67% of the clients' results in the kept rounds"):
        assert num_lost(1, 0, 1, num_rounds=1) == [[2]]


def test_only_the_product_moves_while_no_product_was_proper():
    kernel, start = fedmcmc.fed_ep(SIGNED, inference=EXACT), jnp.array([0.3, -0.4])
    states, infos = run(kernel, 3, start, signed_data(1, 1, 1))
    state = states[-1]
    assert not bool(infos[-1].server.proper)
    assert not bool(state.server.approximation.ever_proper)
    np.testing.assert_array_equal(state.broadcast.position, start)
    np.testing.assert_array_equal(kernel.draw(jax.random.key(0), state), start)


def test_the_last_proper_product_serves_while_the_product_is_improper():
    """If a step overshoots, position and draws wait, and the product does not."""
    kernel = fedmcmc.fed_ep(
        FLAT,
        inference=EXACT,
        damping=lambda r: jnp.where(r == 1, -3.0, 1.0),
        initial_precision=0.1,
    )
    (_, proper, improper), infos = run(kernel, 2)
    assert [bool(info.server.proper) for info in infos] == [True, False]
    assert np.asarray(improper.server.product.precision).min() < 0
    assert bool(improper.server.approximation.ever_proper)
    np.testing.assert_array_equal(improper.broadcast.position, proper.broadcast.position)
    for gaussian in (
        improper.server.approximation.gaussian,
        improper.broadcast.extra.approximation,
    ):
        chex.assert_trees_all_equal(gaussian, proper.broadcast.extra[0])
    assert np.isfinite(kernel.draw(jax.random.key(0), improper)).all()


@pytest.mark.parametrize("cavity", fast_and_slow(["site", "average", "power"], ["site", "average"]))
@pytest.mark.parametrize("cohort_size", [None, 2])
def test_a_run_recovers_from_an_improper_product(cavity, cohort_size):
    """After a wild step all sites are negative, and no fit is proper without another cavity."""
    kernel = fedmcmc.natural(
        FLAT,
        EXACT,
        cavity=cavity,
        structure="dense",
        damping=lambda r: jnp.where(r == 1, -30.0, 0.5),
        initial_precision=0.1,
        participation=fedmcmc.uniform(cohort_size) if cohort_size else None,
    )
    states, infos = run(kernel, 80)
    assert not bool(states[2].broadcast.extra.proper)
    np.testing.assert_array_equal([info.server.proper for info in infos[-5:]], True)
    np.testing.assert_array_equal(infos[-1].clients.usable, True)
    if cohort_size is None or cavity == "site":
        precision = FEDERATION.precisions.sum(0)
        weighted = np.einsum("kij,kj->i", FEDERATION.precisions, FEDERATION.means)
        q = states[-1].broadcast.extra.approximation
        np.testing.assert_allclose(q.precision, precision, rtol=2e-3, atol=2e-2)
        mean = np.linalg.solve(precision, weighted)
        np.testing.assert_allclose(states[-1].broadcast.position, mean, atol=2e-3)


def test_a_client_whose_fits_are_lost_gets_a_new_site():
    """A site that is too large makes its cavity improper, though the product is proper."""
    kernel = fedmcmc.fed_ep(FLAT, inference=EXACT, structure="dense")
    state = run(kernel, 1)[0][-1]
    sites = jax.tree.map(
        lambda leaf, product: leaf.at[0].set(10 * product), state.clients.site, state.server.product
    )
    state = state._replace(clients=state.clients._replace(site=sites))
    state, info = step(kernel, DATA, state)
    assert info.clients.usable.tolist() == [False, True, True, True]
    state, info = step(kernel, DATA, state)
    np.testing.assert_array_equal(info.clients.usable, True)
    np.testing.assert_allclose(
        state.clients.site.precision[0], FEDERATION.precisions[0], rtol=1e-3, atol=0.05
    )


def test_while_the_product_is_improper_the_last_proper_one_is_the_cavity():
    """The fit of a client with a site that is too large counts at once, not after a lost round."""
    kernel = fedmcmc.fed_ep(FLAT, inference=EXACT, structure="dense")
    state = run(kernel, 1)[0][-1]
    sites = jax.tree.map(
        lambda leaf, product: leaf.at[0].set(10 * product), state.clients.site, state.server.product
    )
    extra = state.broadcast.extra
    assert bool(extra.proper) and bool(extra.ever_proper)
    extra = extra._replace(proper=jnp.zeros_like(extra.proper))
    state = state._replace(
        clients=state.clients._replace(site=sites), broadcast=state.broadcast._replace(extra=extra)
    )
    _, info = step(kernel, DATA, state)
    np.testing.assert_array_equal(info.clients.usable, True)


def test_the_product_is_that_of_the_sites_if_clients_take_part_unequally_often():
    kernel = fedmcmc.fed_ep(
        FLAT,
        inference=EXACT,
        structure="dense",
        damping=0.4,
        initial_precision=1.0,
        participation=fedmcmc.bernoulli(jnp.array([0.3, 0.9, 0.5, 0.7])),
    )
    state = run(kernel, 5)[0][-1]
    sites = jax.tree.map(lambda leaf: leaf.sum(0), state.clients.site)
    chex.assert_trees_all_close(state.server.product, sites, rtol=1e-4, atol=1e-3)


# Warnings of steps that are too large


@pytest.mark.parametrize("row_curvature", fast_and_slow([None, 1.0], [None]))
def test_a_run_whose_steps_are_too_large_warns_without_lost_fits(row_curvature):
    """Among many clients of one row, a tilted distribution is far narrower than a likelihood."""
    posterior = fedmcmc.Posterior(
        lambda theta: jnp.zeros(()), lambda theta, x: -0.5 * jnp.sum((x - theta) ** 2, axis=-1)
    )
    rows = np.random.default_rng(0).normal(size=(40, 2)).astype(np.float32)
    data = fedmcmc.FederatedData.from_arrays(rows, np.arange(40))
    mean = inference.sgd_mean(optax.sgd(0.3, 0.9), num_samples=5, row_curvature=row_curvature)
    kernel = fedmcmc.fed_ep(
        posterior,
        inference=inference.scaled_identity(mean, precision_per_row=1.0),
        cohort_size=8,
        damping=1 / 8,
        initial_precision=1.0,
    )

    def largest_position(kernel, num_rounds=10):
        settings = dict(num_rounds=num_rounds, progress=False)
        samples = fedmcmc.sample(jax.random.key(0), kernel, data, jnp.zeros(2), **settings)
        assert samples.info["num_lost"].sum() == 0
        return np.abs(samples.state.broadcast.position).max()

    if row_curvature is not None:
        assert largest_position(kernel) < 1  # an unexpected warning fails
        return
    with pytest.warns(RuntimeWarning, match=r"grew to .* row_curvature="):
        assert largest_position(kernel) > 1e6
    averaging = fedmcmc.fed_avg(posterior, client_optimizer=optax.sgd(1e9), num_local_steps=1)
    with pytest.warns(RuntimeWarning, match=r"The position grew to 1.75e"):
        largest_position(averaging, num_rounds=1)


# Optimizers and clipping


@pytest.mark.parametrize("cohort_size", [None, 1])
def test_momenta_of_server_and_clients_advance_together(cohort_size):
    """A client's momentum must also advance while the client is absent."""
    optimizer = optax.sgd(0.5, momentum=0.8)
    kernel = fedmcmc.fed_ep(
        FLAT,
        inference=EXACT,
        structure="dense",
        server_optimizer=optimizer,
        client_optimizer=optimizer,
        damping=0.3,
        initial_precision=1.0,
        cohort_size=cohort_size,
    )
    sites = np.array(FEDERATION.sizes)[:, None, None] * np.eye(3)
    velocity, visited = np.zeros((4, 3, 3)), set()
    states, _ = run(kernel, 8)
    precisions = [np.asarray(state.clients.site.precision) for state in states]
    for before, after, state in zip(precisions[:-1], precisions[1:], states[1:], strict=True):
        active = np.flatnonzero(np.abs(after - before).max((1, 2)) > 0)
        assert len(active) == (cohort_size or 4)
        velocity *= 0.8
        # For Gaussian likelihoods, a change is the likelihood over the site.
        velocity[active] += FEDERATION.precisions[active] - sites[active]
        sites = sites + 0.3 * 0.5 * velocity
        np.testing.assert_allclose(after[active], sites[active], rtol=1e-4, atol=1e-2)
        product = state.broadcast.extra.approximation.precision
        np.testing.assert_allclose(product, sites.sum(0), rtol=1e-4, atol=1e-2)
        visited |= set(active.tolist())
    assert len(visited) > 2


def test_changes_are_clipped_at_the_client():
    def changes(**settings):
        kernel = fedmcmc.fed_ep(FLAT, inference=EXACT, initial_precision=0.1, **settings)
        before, after = (state.clients.site for state in run(kernel, 1)[0])
        return trees.subtract(after, before)

    moved = changes()
    norms = np.asarray(jax.vmap(lambda change: jnp.sqrt(trees.squared_norm(change)))(moved))
    limit = float(np.median(norms))
    assert norms.min() < 0.9 * limit and norms.max() > 1.1 * limit  # a short change stays
    scales = np.minimum(1, limit / norms)[:, None]
    expected = jax.tree.map(lambda leaf: leaf * scales, moved)
    assert_close(changes(max_norm=limit), expected, rtol=1e-3, atol=1e-4)


# Priors and starts


@pytest.mark.slow
@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_server_refines_the_site_of_a_prior_that_is_not_gaussian(structure):
    """At rest, the site has the expected gradient and curvature of the log prior."""
    posterior = fedmcmc.Posterior(lambda theta: -jnp.sum(jnp.sqrt(1 + 9 * theta**2)), loglikelihood)
    kernel = fedmcmc.natural(
        posterior,
        EXACT,
        structure=structure,
        damping=0.1,
        num_prior_samples=64,
        participation=fedmcmc.full(),
    )
    data = fedmcmc.FederatedData.from_clients([FEDERATION.client_trees()[1]])
    samples = fedmcmc.sample(
        jax.random.key(0),
        kernel,
        data,
        START,
        num_rounds=3000,
        num_burnin=200,
        progress=False,
        collect=lambda state, info: (state.server.prior, state.server.approximation.gaussian),
    )
    prior, q = jax.tree.map(lambda leaf: np.asarray(leaf[0], float).mean(0), samples.draws)
    q = jax.tree.map(jnp.asarray, q)
    draws = np.asarray(jax.vmap(q.draw)(jax.random.split(jax.random.key(1), 200_000)), float)
    root = np.sqrt(1 + 9 * draws**2)
    gradient, curvature = (-9 * draws / root).mean(0), (9 / root**3).mean(0)
    if structure == "scaled_identity":
        curvature = curvature.mean()
    precision = np.diagonal(prior.precision) if structure == "dense" else prior.precision
    np.testing.assert_allclose(precision, curvature, rtol=0.03, atol=0.03)
    expected = gradient + curvature * np.asarray(q.mean(), float)
    np.testing.assert_allclose(prior.precision_mean, expected, rtol=0.03, atol=0.05)


def test_a_gaussian_prior_is_used_unchanged():
    prior = fedmcmc.Gaussian.from_moments(jnp.ones(3), variance=jnp.full(3, 0.5))
    state = run(fedmcmc.fed_ep(FLAT, inference=EXACT, prior=prior), 2)[0][-1]
    chex.assert_trees_all_equal(state.server.prior, prior)
    expected = state.clients.site.sum() * prior
    np.testing.assert_allclose(state.broadcast.extra[0].precision, expected.precision, rtol=1e-4)


def test_sites_are_exact_surrogates_of_gaussian_likelihoods():
    sites = run(fedmcmc.fed_ep(FLAT, inference=EXACT, structure="dense"), 1)[0][-1].clients.site
    surrogates, _ = FEDERATION.surrogates("exact")
    np.testing.assert_allclose(sites.precision, FEDERATION.precisions, rtol=1e-4, atol=1e-3)
    # The chain is then unadjusted Langevin, whichever client is visited.
    positions = []
    for q in (sites, surrogates):
        kernel = fedmcmc.fsgld(FLAT, q, step_size=1e-3, num_local_steps=3)
        positions.append(run(kernel, 20)[0][-1].broadcast.position)
    np.testing.assert_allclose(*positions, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_a_run_starts_from_its_position_whatever_the_prior_mean():
    """An epoch of plain SGD would end elsewhere if it started from the prior's mean."""
    posterior = fedmcmc.Posterior(lambda theta: -0.5 * jnp.sum(theta**2), loglikelihood)
    mean = inference.sgd_mean(optax.sgd(0.01), num_samples=1)
    kernel = fedmcmc.fed_ep(posterior, inference=inference.scaled_identity(mean, precision=1.0))
    data = fedmcmc.FederatedData.from_clients([FEDERATION.client_trees()[2]])
    start = np.array([4.0, -3.0, 2.0], np.float32)
    (before, after), _ = run(kernel, 1, jnp.asarray(start), data)
    np.testing.assert_array_equal(before.broadcast.position, start)
    gradient = FEDERATION.precisions[2] @ (start - FEDERATION.means[2]) + start
    expected = start - 0.01 * gradient / 12
    np.testing.assert_allclose(after.broadcast.position, expected, rtol=1e-4)
