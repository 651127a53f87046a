"""Devices: the check that the requested platform has one, and their precision."""

import jax

from fedmcmc import distributed

__all__ = ["require_devices", "use_single_precision"]


def require_devices() -> None:
    """Exit with status 1 and one sentence if the requested platform has no device.

    Call it after `distributed.initialize`, since it starts JAX.
    """
    try:
        distributed.require_devices()
    except RuntimeError as error:
        message = f"error: {error} For a sweep on this machine, run `make sweep-cpu`."
        distributed.leave(message)  # returns if this process is alone
        raise SystemExit(message) from None


def use_single_precision() -> None:
    """Let a GPU or TPU multiply as a CPU does: by default JAX allows them to round factors."""
    if jax.default_backend() != "cpu" and jax.config.jax_default_matmul_precision is None:
        jax.config.update("jax_default_matmul_precision", "highest")
