"""The check that the requested platform has a device, before an experiment starts."""

from fedmcmc import distributed

__all__ = ["require_devices"]


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
