"""Clients' states on the host: the run without a store, to the last bit."""

import importlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedmcmc
from fedmcmc import inference
from tests.support.lanes import fast_and_slow

KEY = jax.random.key(5)
DATA = fedmcmc.FederatedData.from_clients(
    [
        np.random.default_rng(i).normal(i, 1.0, (n, 4)).astype(np.float32)
        for i, n in enumerate((5, 1, 4, 7, 2, 3, 6, 2, 4, 5, 3))
    ]
)
POSTERIOR = fedmcmc.Posterior(
    lambda theta: -0.5 * jnp.sum(theta**2),
    lambda theta, x: -0.5 * jnp.sum((x - theta) ** 2, axis=-1),
)
OPTIMIZER = optax.sgd(0.05, momentum=0.5)


def fed_ep(cohort):
    mean = inference.sgd_mean(OPTIMIZER, num_samples=3, batch_size=2)
    return fedmcmc.fed_ep(
        POSTERIOR,
        inference=inference.mcmc(mean, shrinkage=0.3),
        participation=cohort,
        damping=lambda r: 0.5 / (1 + r),
        initial_precision=0.5,
        client_optimizer=OPTIMIZER,
    )


KERNELS = {
    "fed_ep": lambda: fed_ep(fedmcmc.uniform(3)),
    "svrg": lambda: fedmcmc.lsd_pp(
        POSTERIOR, step_size=1e-2, batch_size=2, refresh_every=3, participation=fedmcmc.uniform(2)
    ),
    "memories of all": lambda: fedmcmc.compress(
        fedmcmc.lsd(POSTERIOR, step_size=1e-2, participation=fedmcmc.uniform(2)),
        fedmcmc.memory(fedmcmc.quantize(3)),
    ),
    "faults": lambda: fedmcmc.faults(
        fed_ep(fedmcmc.uniform(3)), drop=0.2, late=0.3, nan=0.2, rescale=False
    ),
    "relay": lambda: fedmcmc.compress(
        fedmcmc.dsgld(POSTERIOR, step_size=1e-2, num_local_steps=2), fedmcmc.top_k(0.5)
    ),
}


def run(kernel, store=None, num_rounds=14, **settings):
    settings = dict(position=jnp.zeros(4), num_chains=2) | settings
    return fedmcmc.sample(
        KEY,
        kernel,
        DATA,
        num_rounds=num_rounds,
        progress=False,
        placement=fedmcmc.Placement(client_store=store),
        **settings,
    )


def same(a, b):
    chex.assert_trees_all_equal(a, b)


@pytest.mark.parametrize("place", fast_and_slow(["memory", "files"], ["files"]))
@pytest.mark.parametrize("name", fast_and_slow(KERNELS, ["memories of all"]))
def test_a_store_changes_nothing(name, place, tmp_path):
    kernel = KERNELS[name]()
    # Memory for few rounds, so that states move in and out.
    store = fedmcmc.HostStore(tmp_path / "states" if place == "files" else None, device_bytes=400)
    plain, stored = run(kernel), run(kernel, store)
    same(stored.draws, plain.draws)
    same(stored.info, plain.info)
    same(stored.state, plain.state)
    for leaf in jax.tree.leaves(stored.state.clients):
        assert isinstance(leaf, np.ndarray)
        assert isinstance(leaf, np.memmap) == (place == "files")


@pytest.mark.slow
def test_only_the_states_of_coming_cohorts_are_on_the_device(monkeypatch):
    sizes = []
    executors = importlib.import_module("fedmcmc.runs._executors")
    call = executors.run_segment

    def watched(program, keys, state, *args, **kwargs):
        sizes.append({leaf.shape[1] for leaf in jax.tree.leaves(state.clients)})
        return call(program, keys, state, *args, **kwargs)

    monkeypatch.setattr(executors, "run_segment", watched)
    kernel = KERNELS["fed_ep"]()
    run(kernel, fedmcmc.HostStore(device_bytes=1), num_chains=1)
    assert len(sizes) == 14 and all(size == {3} for size in sizes)
    sizes.clear()
    run(kernel, fedmcmc.HostStore())
    assert len(sizes) < 14 and all(size == {11} for size in sizes)


@pytest.mark.slow
def test_a_run_goes_on_with_and_without_a_store():
    kernel = KERNELS["fed_ep"]()
    expected = run(kernel)
    first = run(kernel, fedmcmc.HostStore(device_bytes=300), 6)
    before = jax.tree.map(np.array, first.state)
    clients = first.state.clients
    second = run(kernel, fedmcmc.HostStore(), 8, position=None, state=first.state)
    same(second.state, expected.state)
    # In place, as the store's arrays may be larger than memory.
    assert jax.tree.leaves(second.state.clients)[0] is jax.tree.leaves(clients)[0]
    alone = run(kernel, None, 8, position=None, state=before)
    same(alone.state, expected.state)
    again = run(kernel, fedmcmc.HostStore(device_bytes=300), 8, position=None, state=before)
    same(again.draws, second.draws)


@pytest.mark.slow
def test_what_was_kept_before_a_chain_is_lost_is_in_the_store():
    def loglikelihood(theta, x):
        return -0.5 * jnp.sum((x - theta) ** 2, axis=-1) * jnp.where(theta[0] > 1.5, jnp.nan, 1.0)

    posterior = fedmcmc.Posterior(lambda theta: jnp.zeros(()), loglikelihood)
    kernel = fedmcmc.lsd_pp(
        posterior, step_size=2e-3, batch_size=2, refresh_every=3, participation=fedmcmc.uniform(2)
    )
    with pytest.raises(fedmcmc.NonFiniteError) as plain:
        run(kernel, num_rounds=200)
    with pytest.raises(fedmcmc.NonFiniteError) as stored:
        run(kernel, fedmcmc.HostStore(device_bytes=200), num_rounds=200)
    assert stored.value.round == plain.value.round > 2
    same(stored.value.samples.draws, plain.value.samples.draws)
    same(stored.value.samples.state, plain.value.samples.state)


@pytest.mark.slow
def test_what_does_not_fit_is_said(tmp_path):
    with pytest.raises(ValueError, match="uniform\\(cohort_size\\) or categorical"):
        run(fed_ep(fedmcmc.full()), fedmcmc.HostStore())
    with pytest.raises(TypeError, match=r"client_store must be a fedmcmc\.HostStore, got str"):
        run(KERNELS["svrg"](), "here")
    with pytest.raises(ValueError, match="device_bytes must be positive"):
        fedmcmc.HostStore(device_bytes=0)
    run(KERNELS["svrg"](), fedmcmc.HostStore(tmp_path), 2)
    with pytest.raises(FileExistsError, match="holds states of another run"):
        run(KERNELS["svrg"](), fedmcmc.HostStore(tmp_path), 2)
    # Stateless clients have nothing to store.
    stateless = fedmcmc.fed_avg(
        POSTERIOR, client_optimizer=OPTIMIZER, num_local_steps=2, cohort_size=2
    )
    same(run(stateless, fedmcmc.HostStore()).draws, run(stateless).draws)
