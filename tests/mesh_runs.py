"""Runs on eight devices against one: ``python mesh_runs.py NAME ...``, names of the contract table.

To be run with eight devices of the host; prints ``same`` at its end.
"""

import sys
import tempfile

import jax
import numpy as np
from contract_model import DATA, KEY, POSITIONS, Given
from contract_tables import KERNELS

import fedmcmc


def leaves(samples):
    parts = (samples.draws, dict(samples.info), samples.totals, samples.state)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(parts)]


def same(one, other):
    for a, b in zip(leaves(one), leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


def close(one, other):
    for a, b in zip(leaves(one), leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def compare(name):
    """Hold a kernel's runs on meshes against that of one device."""
    devices = jax.devices()
    eight = jax.make_mesh((8,), ("clients",))
    two = jax.make_mesh((2,), ("clients",), devices=devices[:2])
    both = jax.make_mesh((2, 2), ("chains", "clients"), devices=devices[:4])
    kernel, position = KERNELS[name](POSITIONS["nested"], Given()), POSITIONS["nested"]

    def run(data, **settings):
        given = dict(num_rounds=5, num_chains=2, progress=False) | settings
        return fedmcmc.sample(KEY, kernel, data, position, **given)

    alone = DATA.chunked(1)
    if kernel.participation.pooled:
        try:
            run(alone, mesh=two)
        except ValueError as error:
            assert "one client" in str(error)
            return
        raise AssertionError(f"{name} ran pooled rows on a mesh")
    one = run(alone)
    for mesh in (eight, two, both):
        same(one, run(alone, mesh=mesh))
    close(one, run(DATA, mesh=two))
    close(one, run(alone, mesh=two, totals="psum"))
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = fedmcmc.Checkpoint(folder)
        run(alone, num_rounds=3, mesh=eight, checkpoint=checkpoint)
        same(one, run(alone, mesh=two, checkpoint=checkpoint))


if __name__ == "__main__":
    assert jax.device_count() == 8
    for name in sys.argv[1:]:
        print(name, flush=True)
        compare(name)
    print("same")
