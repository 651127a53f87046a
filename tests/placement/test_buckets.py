"""Clients computed in groups of similar size draw and keep what they would in one group."""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc.placement._layouts import cheapest_ends
from tests.support.lanes import fast_and_slow

SIZES = (40, 3, 5, 4, 41, 90, 7)
DATA = fedmcmc.FederatedData.from_clients(
    [np.random.default_rng(i).normal(i, 1, (n, 3)).astype(np.float32) for i, n in enumerate(SIZES)]
)
POSTERIOR = fedmcmc.Posterior(
    lambda theta: -0.5 * jnp.sum(theta**2),
    lambda theta, x: -0.5 * jnp.sum((x - theta) ** 2, axis=-1),
)


def qlsd_pp(participation):
    return fedmcmc.qlsd_pp(
        POSTERIOR,
        compressor=fedmcmc.quantize(jnp.arange(2, 9)),
        step_size=1e-3,
        batch_size=0.3,
        refresh_every=5,
        participation=participation,
    )


KERNELS = {
    "full": lambda: qlsd_pp(fedmcmc.full()),
    "bernoulli": lambda: qlsd_pp(fedmcmc.bernoulli(0.5)),
    "uniform": lambda: qlsd_pp(fedmcmc.uniform(3)),
    "faults": lambda: fedmcmc.faults(
        qlsd_pp(fedmcmc.full()), drop=0.2, late=jnp.linspace(0.1, 0.7, 7), nan=0.2
    ),
    "full gradients": lambda: fedmcmc.lsd(POSTERIOR, step_size=1e-3),
    "without replacement": lambda: fedmcmc.lsd(
        POSTERIOR, step_size=1e-3, batch_size=0.3, replace=False
    ),
    "local steps": lambda: fedmcmc.dsgld(
        POSTERIOR, step_size=1e-3, num_local_steps=3, batch_size=0.3
    ),
}


@pytest.mark.parametrize("name", fast_and_slow(KERNELS, ["uniform"]))
def test_buckets_change_only_rounding(name):
    def run(placement=None):
        return fedmcmc.sample(
            jax.random.key(0),
            KERNELS[name](),
            DATA,
            jnp.zeros(3),
            num_rounds=20,
            num_chains=2,
            progress=False,
            placement=placement,
        )

    single, grouped = run(), run(fedmcmc.Placement(num_buckets=3))
    np.testing.assert_allclose(single.draws, grouped.draws, atol=1e-6)
    for key in ("bits_up", "num_active"):
        np.testing.assert_array_equal(single.info[key], grouped.info[key])
    chex.assert_trees_all_close(single.state.clients, grouped.state.clients, rtol=1e-7, atol=1e-4)


def test_a_clients_minibatch_does_not_depend_on_the_largest_client():
    kernel = KERNELS["local steps"]()
    like = fedmcmc.types.Broadcast(jnp.int32(0), jnp.zeros(3))
    small = DATA.client(jnp.int32(4), max_size=41)
    key = jax.random.key(3)
    wide = kernel.prepare(key, like, DATA.client(4)).gradient.rows
    narrow = kernel.prepare(key, like, small).gradient.rows
    np.testing.assert_array_equal(narrow, wide[:, : narrow.shape[1]])
    assert narrow.shape[1] < wide.shape[1]


def test_buckets_are_the_cheapest():
    rng = np.random.default_rng(0)
    for _ in range(40):
        sizes = np.sort(rng.integers(1, 30, rng.integers(1, 9)))

        def cost(ends, sizes=sizes):
            return sum((b - a) * sizes[b - 1] for a, b in zip([0, *ends[:-1]], ends, strict=True))

        for num in (1, 2, 3):
            cuts = itertools.chain.from_iterable(
                itertools.combinations(range(1, len(sizes)), k) for k in range(num)
            )
            chosen = cheapest_ends(sizes, num)
            assert len(chosen) <= num and chosen[-1] == len(sizes)
            assert cost(chosen) == min(cost([*cut, len(sizes)]) for cut in cuts)


def test_a_compiled_function_cannot_group_its_arguments():
    placement = fedmcmc.Placement(num_buckets=2)
    kernel = KERNELS["full gradients"]()

    @jax.jit
    def after_a_round(data):
        init, step = fedmcmc.simulate(kernel, data, placement=placement)
        return step(jax.random.key(0), init(jnp.zeros(3)))[0]

    with pytest.raises(ValueError, match="an argument of a compiled function"):
        after_a_round(DATA)
