"""Clients computed some at a time: the numbers of all together, whatever the kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc.runs import _starts as layout
from tests.contracts.model import DATA, KEY, POSITIONS, Given
from tests.contracts.tables import KERNELS

NESTED = POSITIONS["nested"]
SOME = ("qlsd_pp", pytest.param("fa_hmc", marks=pytest.mark.slow))


@pytest.mark.parametrize("at_a_time", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SOME)
def test_chunks_change_nothing(name, at_a_time):
    kernel = KERNELS[name](NESTED, Given())
    found = []
    for data in (DATA, DATA.chunked(at_a_time)):
        init, step = fedmcmc.simulate(kernel, data)
        step, state = jax.jit(step), init(NESTED)
        for _ in range(3):
            state, info = step(KEY, state)
        found.append((state, info.bits_up, info.bits_down, info.gradient_norm))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *found)


def test_devices_of_a_cpu_walk_large_rows_client_by_client(monkeypatch):
    keys = jax.random.split(KEY, 1)
    apart = KERNELS["fa_hmc"](NESTED, Given())
    together = KERNELS["lsd"](NESTED, Given())
    spread = DATA.sharded(jax.make_mesh((1,), ("clients",)))
    places = jax.tree.map(lambda leaf: leaf[None], NESTED)
    one = 1 if jax.devices()[0].platform == "cpu" else None

    def laid_out(kernel, data):
        return layout.laid_out(kernel, data, keys, places).at_a_time

    assert laid_out(apart, spread) is None
    monkeypatch.setattr(layout, "CACHE_BYTES", 1)
    assert laid_out(apart, spread) == one
    assert laid_out(apart, DATA) is None
    assert laid_out(together, spread) is None
    assert laid_out(apart, spread.chunked(2)) == 2
    # Positions of all three clients, on one device.
    monkeypatch.setattr(layout, "MANY_CLIENTS", 3)
    size = 3 * sum(leaf.nbytes for leaf in jax.tree.leaves(places))
    monkeypatch.setattr(layout, "COHORT_BYTES", size + 1)
    assert laid_out(apart, DATA) is None
    monkeypatch.setattr(layout, "COHORT_BYTES", size)
    assert laid_out(apart, DATA) == one
    assert laid_out(together, DATA) is None
    monkeypatch.setattr(layout, "MANY_CLIENTS", 4)
    assert laid_out(apart, DATA) is None


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
    monkeypatch.setattr(layout, "COHORT_BYTES", 1)
    monkeypatch.setattr(layout, "MANY_CLIENTS", 1)
    for other in (run(), run(client_store=fedmcmc.HostStore())):
        np.testing.assert_allclose(first, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int8, np.uint16])
def test_rows_are_nobody_elses(dtype):
    """Memory may be shared with the device, but never with the caller."""
    given = np.arange(12, dtype=dtype).reshape(6, 2)
    wanted = given.copy()
    sets = [
        fedmcmc.FederatedData.from_arrays(given, np.repeat([0, 1], 3)),
        fedmcmc.FederatedData.from_clients([given]),
    ]
    given[:] = 0
    for data in sets:
        np.testing.assert_array_equal(data.rows, wanted)
    assert sets[0].rows.dtype == jax.dtypes.canonicalize_dtype(dtype)


@pytest.mark.slow
def test_a_run_of_many_chains_takes_chunks():
    kernel = KERNELS["fa_hmc"](NESTED, Given())

    def run(data):
        return fedmcmc.sample(
            KEY, kernel, data, NESTED, num_rounds=6, num_chains=3, progress=False
        ).draws

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        run(DATA),
        run(DATA.chunked(2)),
    )


def test_bad_numbers_say_so():
    for given in (0, 1.5):
        with pytest.raises(ValueError, match="clients_at_a_time must be a positive integer, got"):
            DATA.chunked(given)
    assert jnp.shape(DATA.chunked(2).share) == (3,)
