"""Latents that continue with another kernel: their bits, their distribution, and errors."""

import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc import FederatedData, hierarchy
from fedmcmc.hierarchy import conjugate, hmc, independence
from tests.hierarchy.models import clients, gaussian, in_two_clients
from tests.hierarchy.test_gibbs import shared_spread
from tests.oracles import federations_two_levels as two
from tests.oracles import laws_joint
from tests.oracles.federations import LIMIT, worst_z
from tests.oracles.federations_gibbs import DATA, MODEL, POSTERIOR
from tests.oracles.federations_joint import PROBABILITIES, START, joint_vector
from tests.oracles.laws import Moments

KEY, NUM_CHAINS, STEP = jax.random.key(3), 2048, 0.06
COHORT_RULE = fedmcmc.bernoulli(PROBABILITIES)
COHORTS = list(laws_joint.cohorts(PROBABILITIES))


def langevin():
    """Return Langevin dynamics with gradients at the previous latents, and its distribution."""
    rounds = [
        (
            chance,
            laws_joint.langevin_round(
                MODEL, laws_joint.exact, weights, step_size=STEP, order="gradient_first"
            ),
        )
        for chance, weights in COHORTS
    ]
    kernel = fedmcmc.lsd(
        POSTERIOR,
        step_size=STEP,
        refresh=conjugate(),
        order="gradient_first",
        participation=COHORT_RULE,
    )
    return kernel, rounds


def gibbs():
    """Return a Gibbs sampler, where absent clients enter by sums only, and its distribution."""
    kernel = fedmcmc.fed_gibbs(POSTERIOR, refresh=conjugate(), participation=COHORT_RULE)
    return kernel, [(c, laws_joint.gibbs_round(MODEL, weights > 0)) for c, weights in COHORTS]


def run(kernel, num_rounds, **settings):
    return fedmcmc.sample(
        KEY,
        kernel,
        DATA,
        num_rounds=num_rounds,
        collect=joint_vector,
        progress=False,
        **settings,
    )


ORDERS = {"to gibbs": (langevin, gibbs), "to langevin": (gibbs, langevin)}


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_the_law_goes_on(order):
    """Latents of absent clients show that they and their sums were carried over."""
    (kernel, kernel_rounds), (new_kernel, new_rounds) = (build() for build in ORDERS[order])
    samples = run(kernel, 2, position=START, num_chains=NUM_CHAINS)
    state = fedmcmc.switch(new_kernel, DATA, samples.state)
    chex.assert_trees_all_equal(state.clients.latents, samples.state.clients.latents)
    law = laws_joint.laws_of(kernel_rounds, MODEL.at_modes(START), 2)[-1]
    draws = run(new_kernel, 2, state=state, num_chains=NUM_CHAINS).draws
    for round_ in range(2):
        law = laws_joint.after(new_rounds, law)
        assert worst_z(draws[:, round_], law) < LIMIT, f"after {round_ + 1} rounds"


@pytest.mark.slow
def test_where_there_were_no_latents_clients_draw_theirs():
    """The new latents are draws from their distribution given the position."""
    kernel = fedmcmc.lsd(POSTERIOR, step_size=STEP, refresh=conjugate())
    marginal = fedmcmc.lsd(fedmcmc.marginal(POSTERIOR), step_size=STEP).init(KEY, START, DATA)
    states = jax.tree.map(lambda leaf: jnp.stack([leaf] * 1024), marginal)
    switched = jax.jit(lambda x: fedmcmc.switch(kernel, DATA, x, jax.random.key(1)))(states)
    latents = np.asarray(jax.vmap(joint_vector)(switched))[:, len(START) :]
    size = latents.shape[1]
    mean, covariance = np.zeros(size), np.zeros((size, size))
    for i, group in enumerate(MODEL.groups):
        block = slice(i * len(group.D), (i + 1) * len(group.D))
        covariance[block, block] = np.linalg.inv(group.D)
        mean[block] = covariance[block, block] @ (group.e - group.B.T @ START)
    assert worst_z(latents, Moments(mean, covariance)) < LIMIT


def totals(state):
    """Return the server's sums and the sums over the clients' latents, for one chain."""
    latents = jax.tree.leaves(state.clients.latents)[0]
    differences = latents - jax.tree.leaves(state.broadcast.extra.origins.now)[0]
    server_sums = [np.asarray(leaf) for leaf in jax.tree.leaves(state.server.sums.now.total)]
    return server_sums, [differences.sum(), (differences**2).sum()]


@pytest.mark.slow
def test_rounds_in_which_the_second_kernel_adapts_count_from_the_switch():
    data = FederatedData.from_clients([np.ones(3), np.zeros(2)])
    posterior = fedmcmc.Posterior(
        lambda theta: -0.5 * theta**2, lambda theta, x: -0.5 * (x - theta) ** 2
    )
    settings = dict(progress=False)
    langevin = fedmcmc.lsd(posterior, step_size=0.1)
    burnt_in = fedmcmc.sample(KEY, langevin, data, 0.0, num_rounds=25, **settings)
    adjusted = fedmcmc.mala(posterior, 0.5, num_adapt=20)
    state = fedmcmc.switch(adjusted, data, burnt_in.state)
    with pytest.warns(fedmcmc.SamplingWarning, match=r"^20 of 30 kept draws.*num_burnin=20"):
        adapted = fedmcmc.sample(KEY, adjusted, data, state=state, num_rounds=30, **settings)
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        fedmcmc.sample(KEY, adjusted, data, state=adapted.state, num_rounds=30, **settings)
        fedmcmc.sample(KEY, adjusted, data, state=state, num_rounds=30, num_burnin=20, **settings)
    assert not any("still adapted" in str(record.message) for record in records)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*step sizes still adapted")
def test_latents_of_numpyro_models_go_on_between_all_kernels():
    data = FederatedData.from_clients(clients())
    posterior = fedmcmc.from_numpyro(shared_spread, example=data, centered=1.0)
    refresh = hmc(3, num_adapt=30)
    settings = dict(progress=False, num_rounds=5)
    joint = fedmcmc.lsd(posterior, step_size=0.01, refresh=refresh)
    samples = fedmcmc.sample(KEY, joint, data, {"mu": 0.0, "tau": 0.0}, **settings)
    kernels = {
        "gibbs": fedmcmc.fed_gibbs(posterior, refresh=refresh),
        "faulty": fedmcmc.faults(fedmcmc.fed_gibbs(posterior, refresh=refresh), drop=0.1),
        "ep": fedmcmc.fed_ep(posterior, inference=fedmcmc.inference.mcmc_local(refresh)),
    }
    for name, kernel in kernels.items():
        state = fedmcmc.switch(kernel, data, samples.state)
        carried, previous = (hierarchy.locals_in(x.clients) for x in (state, samples.state))
        np.testing.assert_array_equal(carried.latents["effect"], previous.latents["effect"])
        # Learned step sizes are kept, and the number of adaptation rounds continues.
        chex.assert_trees_all_equal(carried.refresh, previous.refresh)
        assert (np.asarray(carried.refresh.num) == 5).all() and (state.broadcast.round == 5).all()
        if name == "gibbs":
            chain = jax.tree.map(lambda leaf: leaf[0], state)
            for actual, expected in zip(*totals(chain), strict=True):
                np.testing.assert_allclose(actual, expected, rtol=1e-5)
        continued = fedmcmc.sample(KEY, kernel, data, state=state, **settings)
        back = fedmcmc.switch(joint, data, continued.state)
        np.testing.assert_array_equal(
            back.clients.latents["effect"],
            hierarchy.locals_in(continued.state.clients).latents["effect"],
        )
    subset = fedmcmc.switch(joint, data, samples.state, clients=jnp.array([3, 1]))
    np.testing.assert_array_equal(
        subset.clients.latents["effect"], samples.state.clients.latents["effect"][:, [3, 1]]
    )
    single = jax.tree.map(lambda leaf: leaf[0], samples.state)
    fresh = fedmcmc.switch(kernels["gibbs"], data, single, carry_latents=False)
    expected = kernels["gibbs"].init(KEY, single.broadcast.position, data)
    chex.assert_trees_all_equal(fresh.clients, expected.clients)
    chex.assert_trees_all_equal(fresh.server, expected.server)
    moments = fedmcmc.lsd(
        posterior, step_size=0.01, refresh=hierarchy.with_moments(conjugate(), num_burnin=0)
    )
    local_moments = hierarchy.local_moments(fedmcmc.switch(moments, data, samples.state).clients)
    assert (local_moments.num == 0).all()


@pytest.mark.slow
def test_latents_of_both_levels_go_on():
    settings = dict(num_rounds=3, progress=False)
    kernel, new_kernel = (
        fedmcmc.lsd(two.POSTERIOR, step_size=0.02, refresh=hierarchy.two_levels(move(), move()))
        for move in (conjugate, independence)
    )
    samples = fedmcmc.sample(KEY, kernel, two.DATA, two.START, **settings)
    state = fedmcmc.switch(new_kernel, two.DATA, samples.state)
    for level in ("client", "group"):
        actual, expected = (x.clients.latents[level] for x in (state, samples.state))
        np.testing.assert_array_equal(actual, expected)
        assert (actual != 0).any()
    fedmcmc.sample(KEY, new_kernel, two.DATA, state=state, **settings)


@pytest.mark.slow
def test_other_latents_are_refused_by_name():
    data = FederatedData.from_clients(clients())
    standard, centered = (
        fedmcmc.from_numpyro(gaussian, example=data, centered=x) for x in (0.0, 1.0)
    )
    joint = fedmcmc.lsd(standard, step_size=0.01, refresh=conjugate())
    gibbs = fedmcmc.fed_gibbs(centered, refresh=conjugate())
    state = joint.init(KEY, {"mu": 0.0, "slope": 0.0}, data)
    with pytest.raises(ValueError, match=r"are effect_decentered \[5, 1\].*moves effect \[5, 1\]"):
        fedmcmc.switch(gibbs, data, state)
    with pytest.raises(ValueError, match=r"centered=1\.0 for fed_gibbs; .* carry_latents=False"):
        fedmcmc.switch(gibbs, data, state)
    with pytest.raises(ValueError, match="Go on with the same data"):
        fedmcmc.switch(joint, in_two_clients(clients()), state)
