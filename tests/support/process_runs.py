"""Runs that several processes share: ``-m tests.support.process_runs FOLDER CHAINS NAME ...``.

To be run by ``python -m experiments.launch``, or alone. CHAINS are the devices along that axis, a
NAME is one of the contracts' kernels. Draws go to FOLDER, one file per kernel and process, and so
does the list of clients that the process loaded.
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np

import fedmcmc
from fedmcmc import distributed, streaming

distributed.initialize()

from tests.contracts.model import DATA, KEY, POSITIONS, SIZES, Given  # noqa: E402
from tests.contracts.tables import KERNELS  # noqa: E402


def run(name, folder, chains=1):
    """Run a kernel in parts, with all that a run can keep, and write what it gave."""
    loaded = []

    def load(client):
        loaded.append(client)
        return jax.tree.map(np.asarray, DATA.client_rows(client))

    data = fedmcmc.ClientLoader(SIZES, load, allow_nonfinite=True)
    kernel, position = KERNELS[name](POSITIONS["nested"], Given()), POSITIONS["nested"]
    mesh = distributed.mesh(chains) if jax.device_count() > 1 else None
    # Two on each device: one alone runs another program, whose last digits may be others.
    placement = fedmcmc.Placement(mesh=mesh, clients_at_a_time=1)
    given = dict(placement=placement, num_chains=2 * chains, progress=False)
    moments = {"moments": streaming.moments()}
    checkpoint = fedmcmc.Checkpoint(folder / f"{name}-checkpoint", every_rounds=2)

    def up_to(num_rounds):
        return fedmcmc.sample(
            KEY,
            kernel,
            data,
            position,
            num_rounds=num_rounds,
            checkpoint=checkpoint,
            record=fedmcmc.Record(moments),
            **given,
        )

    first, samples = up_to(3), up_to(6)
    on_disk = fedmcmc.sample(
        KEY,
        kernel,
        DATA,
        num_rounds=3,
        state=first.state,
        record=fedmcmc.Record(moments, draws_to=folder / f"{name}.zarr"),
        **given,
    )
    found = {
        "draws": samples.draws,
        "info": samples.info,
        "totals": samples.totals,
        "state": samples.state,
        "moments": samples.streams["moments"],
        "later": on_disk.draws,
    }
    process = jax.process_index()
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(found)]
    np.savez(folder / f"{name}-{process}.npz", *leaves)
    (folder / f"{name}-{process}.json").write_text(json.dumps(sorted(set(loaded))))


if __name__ == "__main__":
    place, num, *names = sys.argv[1:]
    for kernel_name in names:
        run(kernel_name, Path(place), int(num))
    print("done", jax.process_index(), jax.process_count(), jax.device_count())
