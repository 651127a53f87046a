"""Runs over several processes.

The same script runs in every process. `initialize` connects them, `mesh` returns the mesh of all
their devices, and ``sample(..., mesh=mesh)`` spreads one run over it.

``python -m experiments.launch -n 2 script.py`` in the repository starts processes on one machine;
`initialize` also supports the launchers of clusters (``srun``).
"""

import atexit
import os
import sys
from typing import Any

import jax
from jax.sharding import Mesh

from fedmcmc._checks import EXTRAS
from fedmcmc.placement._layouts import mesh_of
from fedmcmc.placement._processes import broadcast_from_first as broadcast_from_first
from fedmcmc.placement._processes import is_first as is_first

CONNECTION = {"coordinator_address", "num_processes", "process_id", "cluster_detection_method"}
"""Settings that identify the other processes, or imply that there are some."""
ADDRESS, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
"""Environment variables by which a launcher connects processes."""
EXTRA_OF_PLATFORM = {"cuda": "cuda12", "gpu": "cuda12", "tpu": "tpu"}
"""Extras of the package that install JAX for a platform."""


def initialize(**settings: Any) -> None:
    """Connect this process to the other processes of its run, before any other call of JAX.

    The environment variables of a launcher (docs/guides/processes.md) define the connection;
    otherwise `jax.distributed.initialize` detects SLURM, Open MPI and TPU pods. Without a launcher
    and without `settings` that imply other processes, the process stays alone.

    Parameters
    ----------
    **settings
        Arguments of `jax.distributed.initialize`, such as ``heartbeat_timeout_seconds``. They
        override the launcher's.

    Raises
    ------
    ValueError
        If an environment variable of the launcher is missing.
    """
    launched = {name: os.environ.get(name) for name in (ADDRESS, COUNT, INDEX)}
    if launched[COUNT] is None and launched[INDEX] is None:
        if CONNECTION & settings.keys() or _is_in_cluster():
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

    JAX would wait for the other processes, which wait for this process, until a timeout (minutes).
    """
    if getattr(sys, "last_value", None) is not None and not hasattr(sys, "ps1"):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def leave(code: object) -> None:
    """End this process at once if `code` is an error and other processes take part.

    Scripts that end with ``sys.exit`` need it, because JAX would wait for the other processes,
    which wait for this process. After an exception it is not needed.
    """
    if code in (None, 0) or not jax.distributed.is_initialized():
        return
    print(code if isinstance(code, str) else "", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(code if isinstance(code, int) else 1)


def _is_in_cluster() -> bool:
    """Return true if a cluster's launcher started this process together with others."""
    # srun sets the variable of the step; the shell of an allocation is a single process.
    counts = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
    several = any(int(os.environ.get(name, "1")) > 1 for name in counts)
    return several or "," in os.environ.get("TPU_WORKER_HOSTNAMES", "")


def require_devices() -> None:
    """Raise if JAX finds no device of the platform that ``JAX_PLATFORMS`` requests.

    JAX itself raises an `AssertionError` without a message.

    Raises
    ------
    RuntimeError
        If there is none; the message has the command that installs JAX for the platform.

    Examples
    --------
    >>> from fedmcmc import distributed
    >>> distributed.require_devices()
    """
    try:
        jax.devices()
    except (AssertionError, RuntimeError) as error:
        # JAX defines the attributes of its options at import, which mypy does not see.
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
    """Return the mesh of all processes' devices, with the axes ``chains`` and ``clients``.

    Parameters
    ----------
    chains
        Number of devices along the axis ``chains``. With one (the default) there is no such axis.

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
    devices = jax.devices()
    if chains < 1 or len(devices) % chains:
        raise ValueError(f"chains must divide the number of devices, {len(devices)}, got {chains}.")
    return mesh_of(devices, chains)
