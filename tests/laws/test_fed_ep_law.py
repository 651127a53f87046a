"""FedEP, FedSEP and ADF on Gaussian likelihoods, against a loop in float64, and exact facts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc import inference
from fedmcmc.hierarchy import conjugate
from tests.oracles import federations_joint as joint
from tests.oracles import laws_natural
from tests.oracles.federations import LIMIT, Federation, loglikelihood
from tests.support.lanes import fast_and_slow

FEDERATION = Federation()
DATA = FEDERATION.data
SIZES = np.array(FEDERATION.sizes)
PRIOR = np.array([0.7, 0.3, 1.1]), np.array([0.2, -0.4, 0.1])  # precisions, means
ROUNDS = 6
STRUCTURES = ("dense", "diagonal", "scaled_identity")


def flat(position):
    return jnp.zeros(())


def logprior(position):
    precision, mean = (jnp.asarray(x, position.dtype) for x in PRIOR)
    return -0.5 * jnp.sum(precision * (position - mean) ** 2)


FLAT = fedmcmc.Posterior(flat, loglikelihood)
GAUSSIAN = fedmcmc.Posterior(logprior, loglikelihood)
PRIOR_PARAMETERS = np.diag(PRIOR[0]), PRIOR[0] * PRIOR[1]
EXACT = inference.exact_gaussian()
SCALED = inference.scaled_identity(inference.exact_mean(), precision=2.0)
PER_ROW = inference.scaled_identity(inference.exact_mean(), precision_per_row=0.5)


def rounds_of(kernel, num_rounds=ROUNDS, start=None, data=DATA, seed=0):
    """Return the states of all rounds."""
    init, step = fedmcmc.simulate(kernel, data)
    step = jax.jit(step)
    start = jnp.asarray(FEDERATION.start if start is None else start, jnp.float32)
    states = [jax.jit(init)(start)]
    for _ in range(num_rounds):
        states.append(step(jax.random.key(seed), states[-1])[0])
    return states


def cohort_key(key, round_):
    return jax.random.fold_in(jax.random.fold_in(key, round_), jnp.uint32(2**32 - 2))


def as_matrix(q):
    """Return precision mean and precision matrix of one Gaussian over a vector."""
    precision = np.asarray(q.precision, float)
    dim = q.precision_mean.shape[-1]
    if q.structure == "diagonal":
        precision = np.diag(precision)
    elif q.structure == "scaled_identity":
        precision = precision * np.eye(dim)
    return np.asarray(q.precision_mean, float), precision


def compare(states, expected, rtol=2e-4):
    """Hold every round's global parameters and mean against the loop's."""
    means = expected.means if np.linalg.det(expected.precision[1]) > 0 else None
    for r, state in enumerate(states):
        eta, precision = as_matrix(state.broadcast.extra[0])
        scale = np.abs(expected.precision[r]).max() + 1
        np.testing.assert_allclose(precision, expected.precision[r], rtol=0, atol=rtol * scale)
        scale = np.abs(expected.eta[r]).max() + 1
        np.testing.assert_allclose(eta, expected.eta[r], rtol=0, atol=rtol * scale)
        if r and means is not None:
            np.testing.assert_allclose(state.broadcast.position, means[r], rtol=0, atol=2e-3)


def law(rule, **settings):
    return laws_natural.propagate(
        FEDERATION.precisions,
        FEDERATION.means,
        rule,
        sizes=SIZES,
        start=FEDERATION.start,
        num_rounds=ROUNDS,
        **settings,
    )


CASES = {
    f"{cavity}-{structure}": (cavity, structure)
    for cavity in ("site", "average", "power", "global", "none")
    for structure in STRUCTURES
}
FAST = ("site-diagonal", "average-scaled_identity")


@pytest.mark.parametrize("case", fast_and_slow(CASES, FAST))
def test_every_round_is_that_of_the_loop(case):
    cavity, structure = CASES[case]
    settings = dict(cavity=cavity, structure=structure, damping=0.3, initial_precision=0.05)
    expected = PRIOR_PARAMETERS
    if structure == "scaled_identity":
        # The expected second derivatives of the prior under any approximation, averaged; then the
        # expected gradient depends on the approximation: give the factor instead.
        settings["prior"] = fedmcmc.Gaussian.from_moments(
            jnp.asarray(PRIOR[1], jnp.float32), variance=jnp.array(0.5)
        )
        expected = 2 * np.eye(3), 2 * PRIOR[1]
    kernel = fedmcmc.natural(GAUSSIAN, EXACT, **settings)
    rule = laws_natural.matched(structure)
    compare(rounds_of(kernel), law(rule, prior=expected, cavity=cavity, damping=0.3, first=0.05))


@pytest.mark.parametrize("name", fast_and_slow(["precision", "per row", "variance"], ["per row"]))
def test_scaled_identities_follow_the_loop(name):
    block, rule = {
        "precision": (SCALED, laws_natural.added(2.0)),
        "per row": (PER_ROW, laws_natural.added(0.5, per_row=True)),
        "variance": (
            inference.scaled_identity(inference.exact_mean(), variance=0.1),
            laws_natural.constant(0.1),
        ),
    }[name]
    # With a constant covariance four clients' plain steps of a half overshoot.
    kernel = fedmcmc.fed_ep(GAUSSIAN, inference=block, damping=0.2)
    compare(rounds_of(kernel), law(rule, prior=PRIOR_PARAMETERS, damping=0.2))


@pytest.mark.parametrize(
    "cavity", fast_and_slow(["site", "average", "power", "global"], ["site", "average"], ["site"])
)
def test_cohorts_change_what_they_send(cavity):
    kernel = fedmcmc.natural(
        FLAT,
        EXACT,
        cavity=cavity,
        structure="dense",
        damping=0.4,
        initial_precision=1.0,
        participation=fedmcmc.uniform(2),
    )
    states = rounds_of(kernel)
    key = jax.random.key(0)
    cohorts = []
    for r in range(ROUNDS):
        chosen = kernel.participation.prepare(cohort_key(key, r), DATA.num_clients)
        cohorts.append([int(i) for i in chosen.ids])
    assert len({tuple(c) for c in cohorts}) > 2
    expected = law(
        laws_natural.matched("dense"), cavity=cavity, damping=0.4, first=1.0, cohorts=cohorts
    )
    compare(states, expected)
    if cavity == "site":
        sites = states[-1].clients.site
        eta, precision = np.asarray(sites.precision_mean), np.asarray(sites.precision)
        np.testing.assert_allclose(eta, expected.sites[0], rtol=1e-4, atol=1e-3)
        np.testing.assert_allclose(precision, expected.sites[1], rtol=1e-4, atol=1e-3)


# Exact facts


def posterior_of(federation, prior=None):
    """Return mean and precision of the posterior."""
    precision = federation.precisions.sum(0)
    eta = np.einsum("kij,kj->i", federation.precisions, federation.means)
    if prior is not None:
        precision, eta = precision + prior[0], eta + prior[1]
    return np.linalg.solve(precision, eta), precision


def test_i25_dense_sites_give_the_posterior_in_one_round():
    mean, precision = posterior_of(FEDERATION, PRIOR_PARAMETERS)
    kernel = fedmcmc.fed_ep(GAUSSIAN, inference=EXACT, structure="dense")
    for state in rounds_of(kernel, 3)[1:]:
        fitted = state.server.approximation
        assert bool(fitted.ever_proper)
        np.testing.assert_allclose(fitted.gaussian.precision, precision, rtol=1e-5, atol=1e-3)
        np.testing.assert_allclose(state.broadcast.position, mean, rtol=1e-5, atol=1e-5)


def test_damped_dense_sites_converge_geometrically_with_an_exact_mean():
    mean, precision = posterior_of(FEDERATION)
    kernel = fedmcmc.fed_ep(FLAT, inference=EXACT, structure="dense", damping=0.25)
    for r, state in enumerate(rounds_of(kernel)):
        site_sum = as_matrix(state.broadcast.extra[0])[1]
        np.testing.assert_allclose(site_sum, (1 - 0.75**r) * precision, rtol=1e-5, atol=1e-3)
        if r:
            np.testing.assert_allclose(state.broadcast.position, mean, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", fast_and_slow(["diagonal", "scaled"], ["diagonal"]))
def test_i26_at_rest_the_mean_is_exact(name):
    mean, _ = posterior_of(FEDERATION, PRIOR_PARAMETERS)
    block, rounds = (EXACT, 150) if name == "diagonal" else (PER_ROW, 400)
    kernel = fedmcmc.fed_ep(GAUSSIAN, inference=block, damping=0.5)
    state = rounds_of(kernel, rounds)[-1]
    np.testing.assert_allclose(state.broadcast.position, mean, rtol=0, atol=1e-4)
    q = state.broadcast.extra[0]
    if name == "scaled":
        expected = 0.5 * SIZES.sum() + PRIOR[0]
        np.testing.assert_allclose(q.precision, expected, rtol=1e-4)
    else:
        # The variance of each client's tilted distribution is the global one.
        for k, site in enumerate(np.asarray(state.clients.site.precision)):
            cavity = np.asarray(q.precision) - site
            tilted = np.linalg.inv(FEDERATION.precisions[k] + np.diag(cavity))
            np.testing.assert_allclose(1 / np.diag(tilted), q.precision, rtol=1e-3)


@pytest.mark.parametrize(
    "posterior", fast_and_slow([FLAT, GAUSSIAN], [GAUSSIAN]), ids=["flat", "prior"]
)
def test_i28_stateless_dense_is_exact_in_one_round_from_any_start(posterior):
    """Also with a prior, which no cavity leaves out."""
    mean, precision = posterior_of(FEDERATION, PRIOR_PARAMETERS if posterior is GAUSSIAN else None)
    for cavity in ("average", "power"):
        kernel = fedmcmc.fed_sep(
            posterior, inference=EXACT, structure="dense", cavity=cavity, initial_precision=0.7
        )
        state = rounds_of(kernel, 1)[1]
        q = state.server.approximation.gaussian
        np.testing.assert_allclose(q.precision, precision, rtol=1e-5, atol=1e-3)
        np.testing.assert_allclose(state.broadcast.position, mean, rtol=1e-4, atol=1e-4)


TEN = 10
TEN_PRECISIONS = np.random.default_rng(3).uniform(1.0, 3.0, (TEN, 2))
TEN_MEANS = np.random.default_rng(4).normal(size=(TEN, 2))


def of_ten(participation, damping=1.0, prior_precision=1.0):
    """Return a kernel and data of ten clients of one row each, with diagonal precisions."""
    posterior = fedmcmc.Posterior(
        lambda theta: -0.5 * prior_precision * jnp.sum(theta**2),
        lambda theta, row: -0.5 * jnp.sum(row["precision"] * (row["x"] - theta) ** 2, axis=-1),
    )
    rows = {"x": TEN_MEANS.astype(np.float32), "precision": TEN_PRECISIONS.astype(np.float32)}
    kernel = fedmcmc.fed_sep(
        posterior,
        inference=EXACT,
        structure="dense",
        damping=damping,
        participation=participation,
    )
    return kernel, fedmcmc.FederatedData.from_arrays(rows, np.arange(TEN))


def test_stateless_cohorts_replace_average_sites_by_their_own():
    """Algorithm 3: ``q <- q * prod_k (tilted_k / q)``, in closed form for Gaussian clients.

    Each of the two clients takes out an average site, a tenth of all, and puts in its likelihood.
    """
    kernel, data = of_ten(fedmcmc.uniform(2))
    states = rounds_of(kernel, 10, start=np.zeros(2), data=data)
    sites, eta = np.zeros(2), np.zeros(2)
    for r in range(10):
        chosen = kernel.participation.prepare(cohort_key(jax.random.key(0), r), TEN).ids
        two = np.asarray(chosen)
        sites = 0.8 * sites + TEN_PRECISIONS[two].sum(0)
        eta = 0.8 * eta + (TEN_PRECISIONS * TEN_MEANS)[two].sum(0)
        global_eta, precision = as_matrix(states[r + 1].broadcast.extra.approximation)
        np.testing.assert_allclose(precision, np.diag(1 + sites), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(global_eta, eta, rtol=1e-4, atol=1e-3)
        position = states[r + 1].broadcast.position
        np.testing.assert_allclose(position, eta / (1 + sites), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("who", fast_and_slow(["bernoulli", "categorical"], ["bernoulli"]))
def test_stateless_clients_that_take_part_more_often_do_not_count_more(who):
    """A message counts the mean probability over the client's own."""
    p = np.linspace(0.2, 0.9, TEN)
    rule = fedmcmc.bernoulli(jnp.asarray(p, jnp.float32))
    if who == "categorical":
        rule = fedmcmc.categorical(jnp.asarray(p / p.sum(), jnp.float32), cohort_size=3)
    kernel, data = of_ten(rule, damping=0.3)
    state = rounds_of(kernel, 1, start=np.zeros(2), data=data)[1]
    cohort = kernel.participation.prepare(cohort_key(jax.random.key(0), 0), TEN)
    active = np.asarray(cohort.ids)[np.asarray(cohort.active)]
    factor = p.mean() / p[active]
    sites = 0.3 * (factor[:, None] * TEN_PRECISIONS[active]).sum(0)
    precision = as_matrix(state.broadcast.extra.approximation)[1]
    np.testing.assert_allclose(precision, np.diag(1 + sites), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cavity", fast_and_slow(["average", "power"], ["average"]))
def test_the_known_bias_of_stateless_scaled_identities(cavity):
    """At rest ``sum_k T_k ((1 - pi_k) Lambda_g + P_k)^-1 P_k (mu_k - mu) = 0``, ``Lambda_g = c N``.

    The tilted precisions ``T_k`` are all the same, and drop out, where the parts are the shares.
    """
    kernel = fedmcmc.fed_sep(FLAT, inference=PER_ROW, cavity=cavity, damping=0.3)
    state = rounds_of(kernel, 600)[-1]
    total = 0.5 * SIZES.sum()
    parts = SIZES / SIZES.sum() if cavity == "power" else np.full(4, 0.25)
    at_rest = np.asarray(state.broadcast.extra[0].precision, float)
    np.testing.assert_allclose(at_rest, total, rtol=1e-4)
    weights = np.stack(
        [
            ((1 - part) * total + 0.5 * size)
            * np.linalg.solve((1 - part) * total * np.eye(3) + precision, precision)
            for part, size, precision in zip(parts, SIZES, FEDERATION.precisions, strict=True)
        ]
    )
    expected = np.linalg.solve(weights.sum(0), np.einsum("kij,kj->i", weights, FEDERATION.means))
    np.testing.assert_allclose(state.broadcast.position, expected, rtol=0, atol=1e-4)
    exact, _ = posterior_of(FEDERATION)
    assert np.abs(expected - exact).max() > 0.01


def test_i24_the_first_round_is_posterior_averaging():
    diagonals = 1 / np.diagonal(np.linalg.inv(FEDERATION.precisions), axis1=1, axis2=2)
    expected = (diagonals * FEDERATION.means).sum(0) / diagonals.sum(0)
    for cavity in ("site", "none"):
        states = rounds_of(fedmcmc.natural(FLAT, EXACT, cavity=cavity), 2)
        np.testing.assert_allclose(states[1].broadcast.position, expected, rtol=1e-4, atol=1e-4)
        moved = np.abs(np.asarray(states[2].broadcast.position) - expected).max()
        assert moved > 0.01 if cavity == "site" else moved < 1e-4


def test_i29_one_client_has_its_posterior_in_one_round():
    data = fedmcmc.FederatedData.from_clients(FEDERATION.client_trees()[2:3])
    state = rounds_of(fedmcmc.fed_ep(GAUSSIAN, inference=EXACT), 1, data=data)[1]
    precision = FEDERATION.precisions[2] + PRIOR_PARAMETERS[0]
    eta = FEDERATION.precisions[2] @ FEDERATION.means[2] + PRIOR_PARAMETERS[1]
    np.testing.assert_allclose(
        state.broadcast.position, np.linalg.solve(precision, eta), rtol=1e-4, atol=1e-5
    )
    variances = 1 / np.asarray(state.server.approximation.gaussian.precision)
    np.testing.assert_allclose(variances, np.diag(np.linalg.inv(precision)), rtol=1e-4)


CENTER = np.array([0.5, -0.4])


def clients_without_latents():
    """Return precision and mean of each client's likelihood, its latents integrated out."""
    found = []
    for client in range(3):
        own = [group for group in joint.MODEL.groups if group.client == client]
        solved = [np.linalg.solve(g.D, np.column_stack([g.B.T, g.e])) for g in own]
        precision = sum(g.A - g.B @ x[:, :-1] for g, x in zip(own, solved, strict=True))
        linear = sum(g.a - g.B @ x[:, -1] for g, x in zip(own, solved, strict=True))
        found.append((precision, np.linalg.solve(precision, linear)))
    return [np.array(x) for x in zip(*found, strict=True)]


def with_latents(structure, block, posterior):
    """Return an undamped kernel of all clients, and what a round makes of constants."""
    variance = jnp.array(0.5) if structure == "scaled_identity" else jnp.full(2, 0.5)
    if structure == "dense":
        variance = jnp.diag(variance)
    prior = fedmcmc.Gaussian.from_moments(jnp.asarray(CENTER, jnp.float32), variance)
    kernel = fedmcmc.fed_ep(posterior, inference=block, structure=structure, prior=prior)
    law = laws_natural.propagate(
        *clients_without_latents(),
        laws_natural.matched(structure),
        prior=(2 * np.eye(2), 2 * CENTER),
        num_rounds=1,
    )
    return kernel, law


@pytest.mark.slow
def test_one_round_of_clients_whose_latents_are_integrated_out():
    kernel, law = with_latents("dense", EXACT, fedmcmc.marginal(joint.POSTERIOR, nodes=1))
    state = rounds_of(kernel, 1, joint.START, joint.DATA)[-1]
    eta, precision = as_matrix(state.broadcast.extra[0])
    np.testing.assert_allclose(precision, law.precision[1], rtol=0, atol=2e-4)
    np.testing.assert_allclose(eta, law.eta[1], rtol=0, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("structure", STRUCTURES)
def test_one_round_of_clients_that_sample_latents_along(structure):
    """Over many chains, as a chain's sites are without bias up to one part in the samples."""
    num, block = 32, inference.mcmc_local(conjugate(), num_samples=400)
    kernel, law = with_latents(structure, block, joint.POSTERIOR)
    settings = dict(num_rounds=1, num_chains=num, progress=False)
    samples = fedmcmc.sample(jax.random.key(2), kernel, joint.DATA, joint.START, **settings)
    found = samples.state.broadcast.extra[0]
    every = [as_matrix(jax.tree.map(lambda x, i=i: x[i], found)) for i in range(num)]
    # Latents of the second client's one group, given its rows and its cavity, the prior.
    own = joint.Model([g for g in joint.MODEL.groups if g.client == 1], 2 * np.eye(2), CENTER)
    latents = samples.state.clients.locals.latents[:, 1, 0]
    pairs = [([eta for eta, _ in every], law.eta[1]), ([p for _, p in every], law.precision[1])]
    for some, exact in [*pairs, (latents, own.posterior.mean[2:])]:
        error = np.maximum(np.std(some, axis=0) / num**0.5, 1e-3)  # none where it is always zero
        z = np.abs(np.mean(some, axis=0) - exact) / error
        assert z.max() < LIMIT
