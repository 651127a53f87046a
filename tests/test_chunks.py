"""Clients computed some at a time: the numbers of all together, whatever the kernel."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract_model import DATA, KEY, POSITIONS, Given
from contract_tables import KERNELS

import fedmcmc

layout = importlib.import_module("fedmcmc.sample")  # the package has a function of that name

NESTED = POSITIONS["nested"]
SOME = ("qlsd_pp", "fa_hmc")


@pytest.mark.parametrize("at_a_time", [pytest.param(1, marks=pytest.mark.slow), 2])
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
    assert layout._laid_out(apart, spread, keys).at_a_time is None
    monkeypatch.setattr(layout, "CACHE_BYTES", 1)
    cpu = jax.devices()[0].platform == "cpu"
    assert layout._laid_out(apart, spread, keys).at_a_time == (1 if cpu else None)
    assert layout._laid_out(apart, DATA, keys).at_a_time is None
    assert layout._laid_out(together, spread, keys).at_a_time is None
    assert layout._laid_out(apart, spread.chunked(2), keys).at_a_time == 2


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
