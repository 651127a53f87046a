"""A run that continues with another kernel: its latents, and rounds that adapt."""

import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc import FederatedData
from fedmcmc.hierarchy import hmc, independence
from tests.hierarchy.models import clients
from tests.hierarchy.test_gibbs import shared_spread

KEY = jax.random.key(3)


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
def test_latents_start_as_in_a_new_run_of_the_kernel():
    data = FederatedData.from_clients(clients())
    posterior = fedmcmc.from_numpyro(shared_spread, example=data, centered=1.0)
    refresh = independence()
    settings = dict(progress=False, num_rounds=5)
    joint = fedmcmc.lsd(posterior, step_size=0.01, refresh=refresh)
    start = {"mu": 0.0, "tau": 0.0}
    samples = fedmcmc.sample(KEY, joint, data, start, **settings)
    kernels = {
        "gibbs": fedmcmc.fed_gibbs(posterior, refresh=refresh),
        "faulty": fedmcmc.faults(fedmcmc.fed_gibbs(posterior, refresh=refresh), drop=0.1),
        "ep": fedmcmc.fed_ep(posterior, inference=fedmcmc.inference.mcmc_local(hmc(3))),
    }
    single = jax.tree.map(lambda leaf: leaf[0], samples.state)
    for kernel in kernels.values():
        state = fedmcmc.switch(kernel, data, single)
        expected = kernel.init(jax.random.key(0), single.broadcast.position, data)
        chex.assert_trees_all_equal(state.clients, expected.clients)
        chex.assert_trees_all_equal(state.server, expected.server)
        assert state.broadcast.round == 5
        continued = fedmcmc.sample(
            KEY, kernel, data, state=fedmcmc.switch(kernel, data, samples.state), **settings
        )
        back = fedmcmc.switch(joint, data, continued.state)
        assert (back.broadcast.round == 10).all()
    everyone = fedmcmc.switch(joint, data, samples.state)
    subset = fedmcmc.switch(joint, data, samples.state, clients=jnp.array([3, 1]))
    np.testing.assert_array_equal(
        subset.clients.latents["effect"], everyone.clients.latents["effect"][:, [3, 1]]
    )
