"""Runs on meshes against one device: ``-m tests.support.mesh_runs [--quick] NAME ...``.

To be run with eight devices of the host; prints ``same`` at its end. A device that holds one chain
of several runs another program than one that vmaps them, which a compiler may round otherwise. Runs
are held to the same bits where devices hold two chains, and to closeness where they hold one.
"""

import sys
import tempfile
from dataclasses import replace

import jax
import numpy as np

import fedmcmc
from tests.contracts.model import DATA, KEY, POSITIONS, Given
from tests.contracts.tables import KERNELS


def leaves(samples):
    parts = (samples.draws, dict(samples.info), samples.totals, samples.state)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(parts)]


def same(one, other):
    for a, b in zip(leaves(one), leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


def close(one, other):
    for a, b in zip(leaves(one), leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def quick(name):
    """Hold one run on a mesh of two by two devices against that of one device."""
    kernel, position = KERNELS[name](POSITIONS["nested"], Given()), POSITIONS["nested"]
    given = dict(num_rounds=5, num_chains=4, progress=False)
    mesh = jax.make_mesh((2, 2), ("chains", "clients"), devices=jax.devices()[:4])
    # Buckets are for kernels in which everybody takes part.
    grouped = fedmcmc.Placement(clients_at_a_time=1, num_buckets=2)
    one, other = (
        fedmcmc.sample(KEY, kernel, DATA, position, placement=replace(grouped, mesh=where), **given)
        for where in (None, mesh)
    )
    same(one, other)


def compare(name):
    """Hold a kernel's runs on meshes against that of one device."""
    devices = jax.devices()
    eight = jax.make_mesh((8,), ("clients",))
    two = jax.make_mesh((2,), ("clients",), devices=devices[:2])
    both = jax.make_mesh((2, 2), ("chains", "clients"), devices=devices[:4])
    one_each = jax.make_mesh((4, 2), ("chains", "clients"))
    kernel, position = KERNELS[name](POSITIONS["nested"], Given()), POSITIONS["nested"]

    def run(placement, mesh=None, totals="gather", **settings):
        given = dict(num_rounds=5, num_chains=4, progress=False) | settings
        placement = replace(placement, mesh=mesh, totals=totals)
        return fedmcmc.sample(KEY, kernel, DATA, position, placement=placement, **given)

    alone = fedmcmc.Placement(clients_at_a_time=1)
    if kernel.participation.pooled:
        try:
            run(alone, mesh=two)
        except ValueError as error:
            assert "single client" in str(error)
            return
        raise AssertionError(f"{name} ran pooled rows on a mesh")
    one = run(alone)
    for mesh in (eight, two, both):
        same(one, run(alone, mesh=mesh))
    close(one, run(alone, mesh=one_each))
    grouped = replace(alone, num_buckets=2)
    same(run(grouped), run(grouped, mesh=two))
    close(one, run(fedmcmc.Placement(), mesh=two))
    close(one, run(alone, mesh=two, totals="psum"))
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = fedmcmc.Checkpoint(folder)
        run(alone, num_rounds=3, mesh=eight, checkpoint=checkpoint)
        same(one, run(alone, mesh=two, checkpoint=checkpoint))


if __name__ == "__main__":
    assert jax.device_count() == 8
    names = sys.argv[1:]
    check = quick if names[0] == "--quick" else compare
    for name in names[names[0] == "--quick" :]:
        print(name, flush=True)
        check(name)
    print("same")
