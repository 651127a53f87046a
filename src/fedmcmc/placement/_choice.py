"""Choice of the devices of a run for which no placement is given.

The rule and its numbers come from `benchmarks/devices.py`.
"""

from collections.abc import Sequence

import jax
from jax import Array
from jax.sharding import Mesh

from fedmcmc.placement._cores import num_cores
from fedmcmc.placement._layouts import mesh_of
from fedmcmc.placement._processes import has_other_processes
from fedmcmc.rounds import CHAIN_AXIS, CLIENT_AXIS

MIN_OPERATIONS = 2**25
"""Least operations of a chain's round for which clients on several devices are faster."""
NUM_BUCKETS, MAX_BUCKET_OPERATIONS = 4, 0.8
"""Number of groups of clients by size, and the fraction of operations for which they are faster."""
MIN_RUN_OPERATIONS = 2**32
"""Least operations of a run for which a hint at idle cores is worth a line."""


def devices_of_run(keys: Array) -> Sequence[jax.Device]:
    """Return the devices that a run with these keys may use by default.

    These are all devices of a CPU, unless the keys are on another device or other processes take
    part. On accelerators a run uses one device.
    """
    devices = jax.local_devices()
    is_free = keys.devices() == {devices[0]} and not has_other_processes()
    return devices if is_free and devices[0].platform == "cpu" else devices[:1]


def has_idle_cores() -> bool:
    """Return true if JAX has one device, which is a CPU with several cores."""
    devices = jax.devices()
    return len(devices) == 1 and devices[0].platform == "cpu" and num_cores() > 1


def spreads_chains_only(mesh: Mesh) -> bool:
    """Return true if each device of a mesh of this process has all clients of its chains."""
    return CHAIN_AXIS in mesh.shape and mesh.shape[CLIENT_AXIS] == 1 and not has_other_processes()


def split_devices(
    num_devices: int, num_chains: int, num_clients: int, operations: int
) -> tuple[int, int]:
    """Return the numbers of devices along the axes of chains and of clients.

    Parameters
    ----------
    num_devices
        Number of devices.
    num_chains, num_clients
        Number of chains, and of clients per round.
    operations
        Number of scalar operations of a chain's round.

    Notes
    -----
    Chains are independent, so they are spread over as many devices as divide them. The clients of a
    chain wait for each other in every round, so they are spread over the remaining devices only if
    a round is long.
    """
    over_chains = max(n for n in range(1, num_devices + 1) if num_chains % n == 0)
    over_clients = min(num_devices // over_chains, num_clients)
    return over_chains, over_clients if operations >= MIN_OPERATIONS else 1


def choose_mesh(
    devices: Sequence[jax.Device], num_chains: int, num_clients: int, operations: int
) -> Mesh | None:
    """Return the mesh of a run, ``None`` for one device; see `split_devices`."""
    over_chains, over_clients = split_devices(len(devices), num_chains, num_clients, operations)
    if over_chains * over_clients == 1:
        return None
    return mesh_of(devices[: over_chains * over_clients], over_chains)


def idle_cores_hint(num_chains: int, num_clients: int, operations: int, num_rounds: int) -> str:
    """Return a hint for a run on one device of a CPU, empty if more devices would not help."""
    cores = num_cores()
    split = split_devices(cores, num_chains, num_clients, operations)
    if split == (1, 1) or operations * num_chains * num_rounds < MIN_RUN_OPERATIONS:
        return ""
    return (
        f"one device for {cores} cores: fedmcmc.use_all_cores() before the first JAX computation "
        "makes one per core"
    )
