"""Runs over several processes: how they find each other, and the mesh that they share.

The same script runs in every process. `initialize` connects them, `mesh` is the mesh of all their
devices, and ``sample(..., mesh=mesh)`` spreads one run over it.

``python -m fedmcmc.launch -n 2 script.py`` starts the processes on one machine; clusters have
launchers of their own (``srun``), which `initialize` knows.
"""

import atexit
import os
import sys
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from fedmcmc._checks import EXTRAS
from fedmcmc.placement._processes import agreed as agreed
from fedmcmc.placement._processes import is_first as is_first
from fedmcmc.rounds import AXIS, CHAINS

CONNECTION = {"coordinator_address", "num_processes", "process_id", "cluster_detection_method"}
"""Settings that say how to find the other processes, or that there are some."""
ADDRESS, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
"""Environment variables by which `fedmcmc.launch` tells processes of each other."""
EXTRA_OF_PLATFORM = {"cuda": "cuda12", "gpu": "cuda12", "tpu": "tpu"}
"""Extras of the package that install JAX for a platform."""


def initialize(**settings: Any) -> None:
    """Connect this process to the others of its run; to be called before anything else of JAX.

    Under ``python -m fedmcmc.launch`` it takes what that says, and else leaves it to
    `jax.distributed.initialize` to find out, which knows SLURM, Open MPI and TPU pods. A process
    that nobody launched, and that is not told of others in `settings`, stays alone.

    Parameters
    ----------
    **settings
        Passed on, such as ``heartbeat_timeout_seconds``; what they say goes first.

    Raises
    ------
    ValueError
        If what the launcher sets is incomplete.
    """
    launched = {name: os.environ.get(name) for name in (ADDRESS, COUNT, INDEX)}
    if launched[COUNT] is None and launched[INDEX] is None:
        if CONNECTION & settings.keys() or _of_a_cluster():
            _connect(**settings)
        return
    missing = [name for name, value in launched.items() if value is None]
    if missing:
        raise ValueError(f"{', '.join(missing)} must be set as well, got {launched}.")
    connection = {
        "coordinator_address": launched[ADDRESS],
        "num_processes": int(str(launched[COUNT])),
        "process_id": int(str(launched[INDEX])),
    }
    _connect(**connection | settings)


def _connect(**settings: Any) -> None:
    jax.distributed.initialize(**settings)
    atexit.register(_leave_after_an_error)  # runs before what JAX registered


def _leave_after_an_error() -> None:
    """End this process if an exception ended its script.

    JAX would wait for the others, which wait for this one, until its shutdown times out (minutes).
    """
    if getattr(sys, "last_value", None) is not None and not hasattr(sys, "ps1"):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def leave(code: Any) -> None:
    """End this process at once if `code` tells of a failure and other processes take part.

    For scripts that end by ``sys.exit`` (an exception that ends a script does so by itself): JAX
    would wait for the others, which wait for this process.
    """
    if code in (None, 0) or not jax.distributed.is_initialized():
        return
    print(code if isinstance(code, str) else "", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(code if isinstance(code, int) else 1)


def _of_a_cluster() -> bool:
    """Return whether a cluster's launcher started this process as one of several."""
    # Of a step, which srun starts: the shell of an allocation is one process.
    counts = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
    several = any(int(os.environ.get(name, "1")) > 1 for name in counts)
    return several or "," in os.environ.get("TPU_WORKER_HOSTNAMES", "")


def require_devices() -> None:
    """Raise if JAX finds no device of the platform that ``JAX_PLATFORMS`` requests.

    JAX itself raises an `AssertionError` without a message.

    Raises
    ------
    RuntimeError
        With the command that installs JAX for the platform.

    Examples
    --------
    >>> from fedmcmc import distributed
    >>> distributed.require_devices()
    """
    try:
        jax.devices()
    except (AssertionError, RuntimeError) as error:
        # JAX adds the attributes of its options when it is imported, which mypy does not see.
        platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
        if not platforms:
            raise
        extra = EXTRA_OF_PLATFORM.get(platforms)
        command = f' (pip install "{EXTRAS[extra][0]}")' if extra else ""
        reason = f" JAX reports: {error}." if str(error) else ""
        raise RuntimeError(
            f"JAX finds no device for JAX_PLATFORMS={platforms}: install JAX for that platform"
            f"{command} on a machine that has such a device, or set JAX_PLATFORMS=cpu.{reason}"
        ) from error


def mesh(chains: int = 1) -> Mesh:
    """Return the mesh of all processes' devices: clients over one axis, chains over another.

    Parameters
    ----------
    chains
        Devices along the axis of chains; there is no such axis by default.

    Raises
    ------
    RuntimeError
        If JAX finds no device of the platform that ``JAX_PLATFORMS`` requests.
    ValueError
        If the number of devices is not a multiple of `chains`.

    Examples
    --------
    >>> from fedmcmc import distributed
    >>> distributed.mesh().axis_names
    ('clients',)
    """
    require_devices()
    devices = np.asarray(jax.devices())
    if chains < 1 or devices.size % chains:
        raise ValueError(f"chains must divide the number of devices, {devices.size}, got {chains}.")
    if chains == 1:
        return Mesh(devices, (AXIS,))
    return Mesh(devices.reshape(chains, -1), (CHAINS, AXIS))
