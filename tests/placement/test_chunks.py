"""Clients computed some at a time: the numbers of all together, whatever the kernel."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc.pytrees import trees
from fedmcmc.runs import _starts as starts
from tests.contracts.model import DATA, KEY, POSITIONS, Given
from tests.contracts.tables import KERNELS

NESTED = POSITIONS["nested"]
SOME = ("qlsd_pp", pytest.param("fa_hmc", marks=pytest.mark.slow))


@pytest.mark.slow
@pytest.mark.parametrize("at_a_time", [1, 2])
@pytest.mark.parametrize("name", SOME)
def test_chunks_change_nothing(name, at_a_time):
    kernel = KERNELS[name](NESTED, Given())
    results = []
    for placement in (None, fedmcmc.Placement(clients_at_a_time=at_a_time)):
        init, step = fedmcmc.simulate(kernel, DATA, placement=placement)
        step, state = jax.jit(step), init(NESTED)
        for _ in range(3):
            state, info = step(KEY, state)
        results.append((state, info.bits_up, info.bits_down, info.gradient_norm))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *results)


def test_a_cpu_walks_many_large_clients_one_by_one(monkeypatch):
    keys = jax.random.split(KEY, 1)
    apart = KERNELS["fa_hmc"](NESTED, Given())
    together = KERNELS["lsd"](NESTED, Given())
    places = jax.tree.map(lambda leaf: leaf[None], NESTED)
    one_by_one = 1 if jax.devices()[0].platform == "cpu" else None

    def chosen(kernel, clients_at_a_time=None, *, on_many=False):
        requested = fedmcmc.rounds.Layout(clients_at_a_time)
        layout = starts.choose_layout(kernel, DATA, requested, keys, places, on_many=on_many)
        return layout.clients_at_a_time

    assert chosen(apart) is None
    # Positions of all three clients, on one device.
    monkeypatch.setattr(starts, "MANY_CLIENTS", 3)
    size = 3 * sum(leaf.nbytes for leaf in jax.tree.leaves(places))
    monkeypatch.setattr(starts, "COHORT_BYTES", size + 1)
    assert chosen(apart) is None
    monkeypatch.setattr(starts, "COHORT_BYTES", size)
    assert chosen(apart) == one_by_one
    assert chosen(apart, 2) == 2
    assert chosen(together) is None
    monkeypatch.setattr(starts, "MANY_CLIENTS", 4)
    assert chosen(apart) is None

    # Rows of all clients, on several devices.
    rows = sum(leaf.nbytes for leaf in jax.tree.leaves(DATA.rows))
    monkeypatch.setattr(starts, "CACHE_BYTES", rows + 1)
    assert chosen(apart, on_many=True) is None
    monkeypatch.setattr(starts, "CACHE_BYTES", rows)
    assert chosen(apart, on_many=True) == one_by_one
    assert chosen(apart, 2, on_many=True) == 2
    assert chosen(apart) is chosen(together, on_many=True) is None

    for name in ("consensus", "dg_sgld", "ensemble", "fed_be", "fed_avg"):
        assert chosen(KERNELS[name](NESTED, Given()), on_many=True) == one_by_one, name


def test_a_cpu_computes_chains_of_large_positions_one_by_one(monkeypatch):
    keys, name = jax.random.split(KEY, 2), "fa_hmc"
    positions = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), NESTED)
    size = 3 * trees.num_bytes(NESTED)
    on_cpu = jax.devices()[0].platform == "cpu"

    def is_one_by_one(name, **settings):
        kernel, layout = KERNELS[name](NESTED, Given()), fedmcmc.rounds.Layout(**settings)
        return starts.choose_layout(kernel, DATA, layout, keys, positions).chains_one_by_one

    monkeypatch.setattr(starts, "COHORT_BYTES", size + 1)
    assert not is_one_by_one(name)
    monkeypatch.setattr(starts, "COHORT_BYTES", size)
    assert is_one_by_one(name) == is_one_by_one(name, clients_at_a_time=2) == on_cpu
    assert not is_one_by_one("lsd")


def test_chains_one_by_one_have_the_same_draws(monkeypatch):
    kernel = KERNELS["fed_sep"](NESTED, Given())

    def run():
        return fedmcmc.sample(
            KEY, kernel, DATA, NESTED, num_rounds=4, num_chains=3, progress=False
        ).draws

    together = run()
    monkeypatch.setattr(starts, "COHORT_BYTES", 1)
    chex.assert_trees_all_close(run(), together, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_large_positions_change_nothing_but_the_order(monkeypatch):
    posterior = fedmcmc.Posterior(
        lambda theta: -0.5 * jnp.sum(theta**2),
        lambda theta, rows: -0.5 * jnp.sum((rows - theta) ** 2, axis=-1),
    )
    rng = np.random.default_rng(0)
    data = fedmcmc.FederatedData.from_clients([rng.normal(size=(n, 3)) for n in (2, 5, 3, 1)])
    exact = fedmcmc.inference.exact_gaussian()
    kernel = fedmcmc.fed_ep(posterior, inference=exact, cohort_size=2, damping=0.5)

    def run(**settings):
        start = jnp.zeros(3)
        return fedmcmc.sample(
            KEY, kernel, data, start, num_rounds=5, progress=False, **settings
        ).draws

    first = run()
    monkeypatch.setattr(starts, "COHORT_BYTES", 1)
    monkeypatch.setattr(starts, "MANY_CLIENTS", 1)
    for draws in (run(), run(placement=fedmcmc.Placement(client_store=fedmcmc.HostStore()))):
        np.testing.assert_allclose(first, draws, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int8, np.uint16])
def test_rows_are_nobody_elses(dtype):
    """Memory may be shared with the device, but never with the caller."""
    array = np.arange(12, dtype=dtype).reshape(6, 2)
    expected = array.copy()
    sets = [
        fedmcmc.FederatedData.from_arrays(array, np.repeat([0, 1], 3)),
        fedmcmc.FederatedData.from_clients([array]),
    ]
    array[:] = 0
    for data in sets:
        np.testing.assert_array_equal(data.rows, expected)
    widened = np.int32 if np.issubdtype(dtype, np.integer) else dtype
    assert sets[0].rows.dtype == jax.dtypes.canonicalize_dtype(widened)


@pytest.mark.slow
def test_a_run_of_many_chains_takes_chunks():
    kernel = KERNELS["fa_hmc"](NESTED, Given())

    def run(placement=None):
        return fedmcmc.sample(
            KEY,
            kernel,
            DATA,
            NESTED,
            num_rounds=6,
            num_chains=3,
            progress=False,
            placement=placement,
        ).draws

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        run(),
        run(fedmcmc.Placement(clients_at_a_time=2)),
    )
