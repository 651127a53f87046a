"""FedEP besides Gaussian likelihoods: what stays invariant, what is improper, priors, switching."""

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
FLAT = fedmcmc.Posterior(lambda theta: jnp.zeros(()), loglikelihood)
MEAN = inference.sgd_mean(optax.sgd(0.1), num_samples=4, batch_size=3)
MCMC = inference.mcmc(MEAN, shrinkage=0.3)
STRUCTURES = ("diagonal", "scaled_identity", "dense")


def run(kernel, num_rounds=6, start=None, data=DATA):
    init, step = fedmcmc.simulate(kernel, data)
    start = jnp.asarray(FEDERATION.start, jnp.float32) if start is None else start
    state, step, infos = jax.jit(init)(start), jax.jit(step), []
    for _ in range(num_rounds):
        state, info = step(jax.random.key(4), state)
        infos.append(info)
    return state, infos


def product_of_sites(state, compressed=False):
    clients = state.clients.kernel if compressed else state.clients
    return clients.site.sum()


@pytest.mark.parametrize("structure", fast_and_slow(STRUCTURES, ["diagonal"]))
@pytest.mark.parametrize("who", fast_and_slow(["uniform", "bernoulli"], ["uniform"]))
def test_i27_the_approximation_is_prior_times_sites(structure, who):
    rule = {"uniform": fedmcmc.uniform(2), "bernoulli": fedmcmc.bernoulli(0.5)}[who]
    kernel = fedmcmc.fed_ep(
        FLAT,
        inference=MCMC,
        structure=structure,
        damping=lambda r: 0.5 / (1 + r),
        participation=rule,
        initial_precision=0.2,
    )
    state, _ = run(kernel)
    q, sites = state.broadcast.extra[0], product_of_sites(state)
    for found, expected in zip(jax.tree.leaves(q), jax.tree.leaves(sites), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "compressor",
    ("quantize", "top_k", "memory"),
)
def test_clients_keep_what_they_said_not_what_they_meant(compressor):
    """The code's noise is in the sites too, so that it does not stay in the approximation."""
    build = {
        "quantize": lambda: fedmcmc.quantize(2),
        "top_k": lambda: fedmcmc.top_k(0.4),
        "memory": lambda: fedmcmc.memory(fedmcmc.quantize(3)),
    }[compressor]
    plain = fedmcmc.fed_ep(
        FLAT, inference=inference.exact_gaussian(), structure="dense", damping=0.5
    )
    kernel = fedmcmc.compress(plain, build())
    state, infos = run(kernel)
    q, sites = state.broadcast.extra[0], product_of_sites(state, compressed=True)
    for found, expected in zip(jax.tree.leaves(q), jax.tree.leaves(sites), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-3)
    uncompressed, _ = run(plain)
    gap = np.abs(np.asarray(q.precision) - np.asarray(uncompressed.broadcast.extra[0].precision))
    assert gap.max() > 1e-3
    # In the long run the exact posterior all the same.
    state, _ = run(kernel, num_rounds=80)
    expected = FEDERATION.precisions.sum(0)
    np.testing.assert_allclose(state.broadcast.extra[0].precision, expected, rtol=1e-3, atol=1e-2)
    assert int(infos[-1].bits_up) < 4 * 32 * 12 or compressor == "memory"


def cursed(theta, rows):
    """Convex in its first coordinate where the row's sign is negative."""
    return -0.5 * jnp.sum(rows["sign"][:, None] * (rows["x"] - theta) ** 2, axis=-1)


CURSED = fedmcmc.FederatedData.from_clients(
    [
        {"x": np.ones((3, 2)), "sign": np.ones(3)},
        {"x": np.zeros((2, 2)), "sign": -np.ones(2)},
        {"x": np.ones((4, 2)) * 2, "sign": np.ones(4)},
    ]
)


def test_an_improper_fit_keeps_the_site_and_sends_nothing():
    posterior = fedmcmc.Posterior(lambda theta: jnp.zeros(()), cursed)
    kernel = fedmcmc.fed_ep(posterior, inference=inference.exact_gaussian())
    state, infos = run(kernel, 1, jnp.zeros(2), CURSED)
    assert infos[0].clients.usable.tolist() == [True, False, True]
    np.testing.assert_allclose(state.broadcast.extra[0].precision, 7.0, rtol=1e-5)
    np.testing.assert_allclose(state.broadcast.position, 11 / 7, rtol=1e-5)
    assert np.abs(np.asarray(state.clients.site.precision[1])).max() == 0
    # With the others' sites for a cavity its tilted distribution is proper: it takes part.
    state, infos = run(kernel, 2, jnp.zeros(2), CURSED)
    assert infos[1].clients.usable.tolist() == [True, True, True]
    np.testing.assert_allclose(state.broadcast.extra[0].precision, 5.0, rtol=1e-5)
    np.testing.assert_allclose(state.broadcast.position, 11 / 5, rtol=1e-5)


@pytest.mark.slow
def test_a_run_counts_lost_fits_and_warns_of_many():
    posterior = fedmcmc.Posterior(lambda theta: jnp.zeros(()), cursed)
    kernel = fedmcmc.fed_ep(posterior, inference=inference.exact_gaussian())

    def lost(clients, **settings):
        data = fedmcmc.FederatedData.from_clients([CURSED.client_rows(i) for i in clients])
        return fedmcmc.sample(
            jax.random.key(0), kernel, data, jnp.zeros(2), progress=False, **settings
        ).info["num_lost"]

    assert lost([0, 1, 2], num_rounds=2).tolist() == [[1, 0]]
    with pytest.warns(RuntimeWarning, match="67% of the clients' results in the kept rounds"):
        assert lost([1, 0, 1], num_rounds=1).tolist() == [[2]]


@pytest.mark.parametrize("row_curvature", fast_and_slow([None, 1.0], [None]))
def test_a_run_whose_steps_are_too_large_warns_though_no_fit_is_lost(row_curvature):
    """Clients of one row, among many: a tilted distribution is far narrower than the row's own."""
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

    def went():
        samples = fedmcmc.sample(
            jax.random.key(0), kernel, data, jnp.zeros(2), num_rounds=10, progress=False
        )
        assert samples.info["num_lost"].sum() == 0
        return np.abs(samples.state.broadcast.position).max()

    if row_curvature is None:
        with pytest.warns(RuntimeWarning, match=r"grew to .* row_curvature="):
            assert went() > 1e6
    else:
        assert went() < 1  # an unexpected warning fails


def test_a_learning_rate_without_measure_warns():
    posterior = fedmcmc.Posterior(
        lambda theta: jnp.zeros(()), lambda theta, x: -0.5 * jnp.sum((x - theta) ** 2, axis=-1)
    )
    kernel = fedmcmc.fed_avg(posterior, client_optimizer=optax.sgd(1e9), num_local_steps=1)
    data = fedmcmc.FederatedData.from_clients([np.ones((2, 2), np.float32)] * 2)
    with pytest.warns(RuntimeWarning, match="The position grew to 1e"):
        fedmcmc.sample(jax.random.key(0), kernel, data, jnp.zeros(2), num_rounds=1, progress=False)


def test_without_a_proper_product_nothing_moves_but_the_product():
    posterior = fedmcmc.Posterior(lambda theta: jnp.zeros(()), cursed)
    data = fedmcmc.FederatedData.from_clients([CURSED.client_rows(1), CURSED.client_rows(1)])
    kernel = fedmcmc.fed_ep(posterior, inference=inference.exact_gaussian())
    start = jnp.array([0.3, -0.4])
    state, infos = run(kernel, 3, start, data)
    assert not bool(infos[-1].server.proper)
    np.testing.assert_array_equal(state.broadcast.position, start)
    np.testing.assert_array_equal(kernel.draw(jax.random.key(0), state), start)
    assert not bool(state.server.approximation.ever_proper)


def test_the_last_proper_product_serves_while_the_product_is_not():
    """A step of optimisers that overshoots: the product is kept, position and draws wait."""
    kernel = fedmcmc.fed_ep(
        FLAT,
        inference=inference.exact_gaussian(),
        damping=lambda r: jnp.where(r == 1, -3.0, 1.0),
        initial_precision=0.1,
    )
    first, _ = run(kernel, 1)
    state, infos = run(kernel, 2)
    assert bool(infos[0].server.proper) and not bool(infos[1].server.proper)
    np.testing.assert_array_equal(state.broadcast.position, first.broadcast.position)
    kept = state.server.approximation
    assert bool(kept.ever_proper)
    chex.assert_trees_all_equal(kept.gaussian, first.broadcast.extra[0])
    assert np.asarray(state.server.product.precision).min() < 0
    chex.assert_trees_all_equal(state.broadcast.extra.approximation, kept.gaussian)
    assert np.isfinite(kernel.draw(jax.random.key(0), state)).all()


def test_optimisers_act_on_both_sides():
    optimizer = optax.sgd(0.5, momentum=0.9)
    kernel = fedmcmc.fed_ep(
        FLAT,
        inference=inference.exact_gaussian(),
        structure="dense",
        server_optimizer=optimizer,
        client_optimizer=optimizer,
        damping=0.1,
        initial_precision=1.0,
    )
    init, step = fedmcmc.simulate(kernel, DATA)
    state, step = init(jnp.asarray(FEDERATION.start, jnp.float32)), jax.jit(step)
    sizes = np.array(FEDERATION.sizes)
    sites = sizes[:, None, None] * np.eye(3)
    whole, velocity, own = sites.sum(0), np.zeros((3, 3)), np.zeros((4, 3, 3))
    for _ in range(5):
        # For Gaussian likelihoods a change is the likelihood over the site.
        changes = FEDERATION.precisions - sites
        velocity, own = 0.9 * velocity + changes.sum(0), 0.9 * own + changes
        whole, sites = whole + 0.05 * velocity, sites + 0.05 * own
        state, _ = step(jax.random.key(0), state)
        np.testing.assert_allclose(state.broadcast.extra[0].precision, whole, rtol=1e-4, atol=1e-2)
        np.testing.assert_allclose(state.clients.site.precision, sites, rtol=1e-4, atol=1e-2)


def test_a_clients_momentum_advances_while_it_is_absent():
    """The product is prior times sites, if sites of absent clients move on as the server's does."""
    optimizer = optax.sgd(0.5, momentum=0.8)
    damping = 0.3
    kernel = fedmcmc.fed_ep(
        FLAT,
        inference=inference.exact_gaussian(),
        structure="dense",
        server_optimizer=optimizer,
        client_optimizer=optimizer,
        damping=damping,
        initial_precision=1.0,
        cohort_size=1,
    )
    init, step = fedmcmc.simulate(kernel, DATA)
    state, step = init(jnp.asarray(FEDERATION.start, jnp.float32)), jax.jit(step)
    sites = np.array(FEDERATION.sizes)[:, None, None] * np.eye(3)
    velocity, seen = np.zeros((4, 3, 3)), set()
    for _ in range(8):
        before = np.asarray(state.clients.site.precision)
        state, _ = step(jax.random.key(1), state)
        after = np.asarray(state.clients.site.precision)
        (k,) = np.flatnonzero(np.abs(after - before).max((1, 2)) > 0)
        velocity *= 0.8
        velocity[k] += FEDERATION.precisions[k] - sites[k]
        sites = sites + damping * 0.5 * velocity
        np.testing.assert_allclose(after[k], sites[k], rtol=1e-4, atol=1e-2)
        whole = np.asarray(state.broadcast.extra.approximation.precision)
        np.testing.assert_allclose(whole, sites.sum(0), rtol=1e-4, atol=1e-2)
        seen.add(int(k))
    assert len(seen) > 2


@pytest.mark.parametrize("cavity", fast_and_slow(["site", "average", "power"], ["site", "average"]))
@pytest.mark.parametrize("cohort_size", [None, 2])
def test_an_improper_product_is_left_again(cavity, cohort_size):
    """One wild step makes all sites negative: without another cavity no fit would be proper."""
    participation = fedmcmc.uniform(cohort_size) if cohort_size else None
    kernel = fedmcmc.natural(
        FLAT,
        inference.exact_gaussian(),
        cavity=cavity,
        structure="dense",
        damping=lambda r: jnp.where(r == 1, -30.0, 0.5),
        initial_precision=0.1,
        participation=participation,
    )
    improper, _ = run(kernel, 2)
    assert not bool(improper.broadcast.extra.proper)
    state, infos = run(kernel, 80)
    np.testing.assert_array_equal([info.server.proper for info in infos[-5:]], True)
    np.testing.assert_array_equal(infos[-1].clients.usable, True)
    if cohort_size is None or cavity == "site":
        mean = np.linalg.solve(
            FEDERATION.precisions.sum(0),
            np.einsum("kij,kj->i", FEDERATION.precisions, FEDERATION.means),
        )
        q = state.broadcast.extra.approximation
        np.testing.assert_allclose(q.precision, FEDERATION.precisions.sum(0), rtol=2e-3, atol=2e-2)
        np.testing.assert_allclose(state.broadcast.position, mean, atol=2e-3)


def test_a_client_whose_fits_are_lost_gets_a_new_site():
    """A site far too large makes its own cavity improper, though the product is proper."""
    kernel = fedmcmc.fed_ep(FLAT, inference=inference.exact_gaussian(), structure="dense")
    init, step = fedmcmc.simulate(kernel, DATA)
    state, step = init(jnp.asarray(FEDERATION.start, jnp.float32)), jax.jit(step)
    state, _ = step(jax.random.key(0), state)
    q, sites = state.server.product, state.clients.site
    large = jax.tree.map(lambda leaf: 10 * leaf, q)
    sites = jax.tree.map(lambda all_, one: all_.at[0].set(one), sites, large)
    state = state._replace(clients=state.clients._replace(site=sites))
    state, info = step(jax.random.key(0), state)
    assert info.clients.usable.tolist() == [False, True, True, True]
    state, info = step(jax.random.key(0), state)
    np.testing.assert_array_equal(info.clients.usable, True)
    np.testing.assert_allclose(
        state.clients.site.precision[0], FEDERATION.precisions[0], rtol=1e-3, atol=0.05
    )


def test_changes_are_clipped_at_the_client():
    settings = dict(inference=inference.exact_gaussian(), initial_precision=0.1)
    plain, _ = run(fedmcmc.fed_ep(FLAT, **settings), 1)
    before, _ = run(fedmcmc.fed_ep(FLAT, **settings), 0)
    moved = trees.subtract(plain.clients.site, before.clients.site)
    norms = np.asarray(jax.vmap(lambda change: jnp.sqrt(trees.squared_norm(change)))(moved))
    limit = float(np.median(norms))
    assert norms.min() < 0.9 * limit and norms.max() > 1.1 * limit  # a short change stays as it is
    clipped, _ = run(fedmcmc.fed_ep(FLAT, max_norm=limit, **settings), 1)
    for k in range(4):
        change, short = (
            trees.subtract(
                *(jax.tree.map(lambda leaf, k=k: leaf[k], s.clients.site) for s in (state, before))
            )
            for state in (plain, clipped)
        )
        norm = float(jnp.sqrt(trees.squared_norm(change)))
        expected = jax.tree.map(lambda leaf, n=norm: leaf * min(1, limit / n), change)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), short, expected
        )


# The prior's factor


@pytest.mark.slow
@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_prior_that_is_not_gaussian_is_a_site_that_the_server_refines(structure):
    """At rest its gradient and curvature are the log prior's expected ones."""
    posterior = fedmcmc.Posterior(lambda theta: -jnp.sum(jnp.sqrt(1 + 9 * theta**2)), loglikelihood)
    kernel = fedmcmc.natural(
        posterior,
        inference.exact_gaussian(),
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
        jnp.asarray(FEDERATION.start, jnp.float32),
        num_rounds=3000,
        num_burnin=200,
        progress=False,
        collect=lambda state, info: (state.server.prior, state.server.approximation.gaussian),
    )
    priors, wholes = jax.tree.map(lambda leaf: np.asarray(leaf[0], float), samples.draws)
    q = jax.tree.map(lambda leaf: leaf.mean(0), wholes)
    draws = jax.vmap(lambda key: jax.tree.map(jnp.asarray, q).draw(key))(
        jax.random.split(jax.random.key(1), 200_000)
    )
    draws = np.asarray(draws, float)
    root = np.sqrt(1 + 9 * draws**2)
    gradient, curvature = (-9 * draws / root).mean(0), (9 / root**3).mean(0)
    mean = np.asarray(jax.tree.map(jnp.asarray, q).mean(), float)
    precision = priors.precision.mean(0)
    if structure == "scaled_identity":
        curvature = curvature.mean()
    found = np.diagonal(precision) if structure == "dense" else precision
    np.testing.assert_allclose(found, curvature, rtol=0.03, atol=0.03)
    np.testing.assert_allclose(
        priors.precision_mean.mean(0), gradient + curvature * mean, rtol=0.03, atol=0.05
    )


def test_a_given_prior_is_taken_as_it_is_and_must_fit():
    given = fedmcmc.Gaussian.from_moments(jnp.ones(3), variance=jnp.full(3, 0.5))
    kernel = fedmcmc.fed_ep(FLAT, inference=inference.exact_gaussian(), prior=given)
    state, _ = run(kernel, 2)
    chex.assert_trees_all_equal(state.server.prior, given)
    expected = product_of_sites(state) * given
    np.testing.assert_allclose(state.broadcast.extra[0].precision, expected.precision, rtol=1e-4)
    with pytest.raises(ValueError, match="structure of the approximation, dense"):
        fedmcmc.fed_ep(FLAT, inference=MCMC, prior=given, structure="dense")
    with pytest.raises(TypeError, match=r"must be a fedmcmc\.Gaussian"):
        fedmcmc.fed_ep(FLAT, inference=MCMC, prior=1.0)
    wrong = fedmcmc.Gaussian.from_moments(jnp.ones(2), variance=jnp.ones(2))
    with pytest.raises(ValueError, match="over the position"):
        run(fedmcmc.fed_ep(FLAT, inference=MCMC, prior=wrong))


def test_bad_settings_are_named():
    for settings, error, match in (
        (dict(structure="banded"), ValueError, "structure must be one of"),
        (dict(damping=0.0), ValueError, "damping must be"),
        (dict(cohort_size=2, participation=fedmcmc.full()), ValueError, "either cohort_size"),
        (
            dict(participation=fedmcmc.categorical(cohort_size=2)),
            ValueError,
            "at most once per round",
        ),
        (dict(server_optimizer=0.1), TypeError, "server_optimizer must be an optax"),
    ):
        with pytest.raises(error, match=match):
            fedmcmc.fed_ep(FLAT, inference=MCMC, **settings)
    with pytest.raises(TypeError, match="inference"):
        fedmcmc.fed_ep(FLAT, inference=MEAN)
    with pytest.raises(ValueError, match="cavity must be"):
        fedmcmc.fed_sep(FLAT, inference=MCMC, cavity="site")


def test_sites_are_surrogates_as_they_are():
    kernel = fedmcmc.fed_ep(FLAT, inference=inference.exact_gaussian(), structure="dense")
    state, _ = run(kernel, 1)
    np.testing.assert_allclose(
        state.clients.site.precision, FEDERATION.precisions, rtol=1e-4, atol=1e-3
    )
    # Exact surrogates: with full gradients the chain is unadjusted Langevin, whoever is visited.
    fsgld = fedmcmc.fsgld(FLAT, state.clients.site, step_size=1e-3, num_local_steps=3)
    _, fresh = FEDERATION.surrogates("exact")
    exact = fedmcmc.Gaussian.from_moments(fresh[1], np.linalg.inv(fresh[0]))
    expected = fedmcmc.fsgld(FLAT, exact, step_size=1e-3, num_local_steps=3)
    found = [run(k, 20)[0].broadcast.position for k in (fsgld, expected)]
    np.testing.assert_allclose(*found, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_a_run_starts_where_it_is_told_whatever_the_priors_mean():
    """One epoch of plain SGD from the start: it would end elsewhere from the prior's mean."""
    posterior = fedmcmc.Posterior(lambda theta: -0.5 * jnp.sum(theta**2), loglikelihood)
    mean = inference.sgd_mean(optax.sgd(0.01), num_samples=1)
    kernel = fedmcmc.fed_ep(posterior, inference=inference.scaled_identity(mean, precision=1.0))
    data = fedmcmc.FederatedData.from_clients([FEDERATION.client_trees()[2]])
    start = jnp.array([4.0, -3.0, 2.0])
    state, _ = run(kernel, 0, start, data)
    np.testing.assert_array_equal(state.broadcast.position, start)
    state, _ = run(kernel, 1, start, data)
    at = np.asarray(start)
    gradient = FEDERATION.precisions[2] @ (at - FEDERATION.means[2]) + at
    expected = at - 0.01 * gradient / 12
    np.testing.assert_allclose(state.broadcast.position, expected, rtol=1e-4)
