"""One JAX device per core of the CPU."""

import os

import jax


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def use_all_cores() -> None:
    """Make one JAX device per core of the CPU, so that runs use all cores.

    By default JAX has one device for the whole CPU, and a run of small operations uses one core. A
    second call does nothing. Accelerators remain JAX's default devices.

    Raises
    ------
    RuntimeError
        If JAX already has another number of CPU devices, because a computation came first.

    Examples
    --------
    At the start of a program, before the first JAX computation:

    >>> import fedmcmc
    >>> fedmcmc.use_all_cores()  # doctest: +SKIP
    """
    cores = num_cores()
    try:
        jax.config.update("jax_num_cpu_devices", cores)
    except RuntimeError as error:
        devices = len(jax.local_devices(backend="cpu"))
        if devices != cores:
            raise RuntimeError(
                f"JAX already runs with {devices} CPU device{'s' * (devices > 1)}, and this "
                f"process may use {cores} cores: call fedmcmc.use_all_cores() before the first "
                "JAX computation of the program."
            ) from error
