"""What software a run was made with."""

import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import jax
import numpy as np


@cache
def _own() -> str:
    try:
        return version("fedmcmc")
    except PackageNotFoundError:  # run from a source tree
        return "not installed"


def versions() -> dict[str, str]:
    """Return versions of what a result depends on, and the kind of devices.

    Examples
    --------
    >>> list(versions())
    ['fedmcmc', 'JAX', 'NumPy', 'Python', 'devices']
    """
    return {
        "fedmcmc": _own(),
        "JAX": jax.__version__,
        "NumPy": np.__version__,
        "Python": platform.python_version(),
        "devices": f"{jax.device_count()} ({jax.default_backend()})",
    }
