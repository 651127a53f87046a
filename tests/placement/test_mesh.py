"""Clients and chains over the devices of a mesh: the numbers of one device, to the last bit."""

import platform
import subprocess
import sys

import chex
import jax
import numpy as np
import pytest

import fedmcmc
from fedmcmc.placement import by_size, mesh_layout_of
from fedmcmc.placement._layouts import balanced
from tests.contracts.model import DATA, KEY, POSITIONS, Given
from tests.contracts.tables import KERNELS
from tests.support.processes import environment

NAMES = sorted(KERNELS)


def on_eight_devices(*names, flags=""):
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.mesh_runs", *names],
        env=environment(devices=8, flags=flags),
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
    )
    assert done.returncode == 0 and "same" in done.stdout, done.stdout + done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lsd", "fa_ld"])
def test_chains_with_a_cohort_and_with_everyone_on_four_devices(name):
    on_eight_devices("--quick", name)


@pytest.mark.slow
@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"),
    reason="the flag that leaves out fused arithmetic is for x86",
)
@pytest.mark.parametrize("part", range(6))
def test_every_kernel_on_eight_devices(part):
    # Instructions up to AVX have no fused multiply-add, which a compiler uses where a product and
    # a sum end up in one loop: some kernels differ by that in the last digit from mesh to mesh.
    on_eight_devices(*NAMES[part::6], flags="--xla_cpu_max_isa=AVX")


@pytest.mark.parametrize("num_devices", [1, 2, 3, 7, 20])
def test_clients_are_balanced(num_devices):
    sizes = np.random.default_rng(0).integers(1, 90, 20)
    parts = balanced(sizes, num_devices)
    assert sorted(i for part in parts for i in part) == list(range(20))
    assert max(map(len, parts)) <= -(-20 // num_devices)
    loads = [sizes[part].sum() for part in parts]
    assert max(loads) - min(loads) <= sizes.max()


def test_a_layout_has_the_places_of_rows_and_states():
    sizes = np.array([3, 1, 4, 1, 5])
    mesh = jax.make_mesh((1,), ("clients",))
    mesh_layout, clients, starts = mesh_layout_of(sizes, mesh, "gather")
    assert clients == [[0, 1, 2, 3, 4]] and starts.tolist() == [0, 3, 4, 8, 9]
    assert mesh_layout.block == 14 and mesh_layout.per_device == 5
    np.testing.assert_array_equal(mesh_layout.client_of_slot[mesh_layout.slots], np.arange(5))


def test_each_device_has_as_many_clients_of_each_bucket():
    sizes = np.array([30, 1, 40, 2, 50, 1, 2, 60])
    buckets = by_size(sizes, 2)
    mesh = jax.sharding.Mesh(np.repeat(np.array(jax.devices()), 2), ("clients",))
    mesh_layout, clients, starts = mesh_layout_of(sizes, mesh, "gather", buckets)
    assert clients == [[1, 3, 0, 7], [5, 6, 2, 4]] and mesh_layout.per_device == 4
    assert [(part.start, part.count, part.bound) for part in mesh_layout.parts] == [
        (0, 2, 2),
        (2, 2, 60),
    ]
    np.testing.assert_array_equal(mesh_layout.client_of_slot[mesh_layout.slots], np.arange(8))
    for part, (ids, _) in zip(mesh_layout.parts, buckets.groups(), strict=True):
        np.testing.assert_array_equal(part.members, ids)
        slots = slice(part.start, part.start + part.count)
        clients = mesh_layout.client_of_slot.reshape(2, 4)[:, slots].ravel()
        np.testing.assert_array_equal(clients[part.gathered], ids)
    assert starts[7] == 1 + 2 + 30 and mesh_layout.block == 93


@pytest.mark.slow
def test_a_single_bucket_keeps_the_order_of_the_clients():
    sizes, mesh = np.array([30, 1, 40]), jax.make_mesh((1,), ("clients",))
    mesh_layout, _, _ = mesh_layout_of(sizes, mesh, "gather", by_size(sizes, 1))
    (part,) = mesh_layout.parts
    np.testing.assert_array_equal(part.members, np.arange(3))
    kernel = KERNELS["lsd_pp"](POSITIONS["nested"], Given())
    states = [
        fedmcmc.sample(
            KEY, kernel, DATA, POSITIONS["nested"], num_rounds=3, progress=False, placement=where
        ).state
        for where in (None, fedmcmc.Placement(num_buckets=1))
    ]
    chex.assert_trees_all_equal(*states)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (dict(mesh=3), TypeError, "must be a jax.sharding.Mesh"),
        (dict(mesh=jax.make_mesh((1,), ("rows",))), ValueError, "must have an axis 'clients'"),
        (
            dict(mesh=jax.make_mesh((1, 1), ("clients", "model"))),
            ValueError,
            r"got axes \('clients', 'model'\)",
        ),
        (dict(placement=3), TypeError, r"must be a fedmcmc\.Placement, got int"),
        (
            dict(
                mesh=jax.make_mesh((1,), ("clients",)),
                placement=fedmcmc.Placement(),
            ),
            ValueError,
            "mesh= or placement=, not both",
        ),
    ],
)
def test_bad_meshes_are_refused(settings, error, message):
    settings = dict(num_rounds=2, progress=False) | settings
    kernel = KERNELS["lsd"](POSITIONS["nested"], Given())
    with pytest.raises(error, match=message):
        fedmcmc.sample(KEY, kernel, DATA, POSITIONS["nested"], **settings)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (dict(totals="sum"), ValueError, "totals must be one of"),
        (dict(totals="psum"), ValueError, "totals=.psum. needs mesh="),
        (
            dict(mesh=jax.make_mesh((1,), ("clients",)), client_store=fedmcmc.HostStore()),
            ValueError,
            "client_store=, not both",
        ),
        (dict(num_buckets=0), ValueError, "num_buckets must be a positive integer, got 0"),
        (dict(clients_at_a_time=0), ValueError, "clients_at_a_time must be a positive integer"),
        (dict(clients_at_a_time=1.5), ValueError, "clients_at_a_time must be a positive integer"),
    ],
)
def test_bad_placements_are_refused(settings, error, message):
    with pytest.raises(error, match=message):
        fedmcmc.Placement(**settings)


def test_rounds_on_one_device_refuse_other_devices_and_stores():
    kernel = KERNELS["lsd"](POSITIONS["nested"], Given())
    for placement in (
        fedmcmc.Placement(mesh=jax.make_mesh((1,), ("clients",))),
        fedmcmc.Placement(client_store=fedmcmc.HostStore()),
    ):
        with pytest.raises(ValueError, match=r"are for fedmcmc\.sample"):
            fedmcmc.simulate(kernel, DATA, placement=placement)
    with pytest.raises(TypeError, match=r"placement must be a fedmcmc\.Placement, got int"):
        fedmcmc.simulate(kernel, DATA, placement=1)


def test_a_run_reports_its_placement(capsys):
    kernel, nested = KERNELS["lsd"](POSITIONS["nested"], Given()), POSITIONS["nested"]
    placement = fedmcmc.Placement.over_devices(clients_at_a_time=2, num_buckets=2)
    samples = fedmcmc.sample(KEY, kernel, DATA, nested, num_rounds=3, placement=placement)
    assert samples.placement == placement
    words = "one device, 2 clients at a time, at most 2 groups by size"
    assert str(samples.placement) == words and words in capsys.readouterr().err
    psum = fedmcmc.Placement(jax.make_mesh((1,), ("clients",)), "psum")
    assert str(psum) == "one device, clients together, totals by psum"
    stored = fedmcmc.Placement(clients_at_a_time=1, client_store=fedmcmc.HostStore())
    assert str(stored) == "one device, clients one by one, states in a store"
