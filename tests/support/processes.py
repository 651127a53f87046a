"""Programs of other processes that tests start."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def environment(devices=None, flags=""):
    """Return an environment to start a program in, which imports what this process can.

    Where `devices` is given, the program has as many, of the host.
    """
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    if devices is not None:
        flags += f" {os.environ.get('XLA_FLAGS', '')}"
        flags += f" --xla_force_host_platform_device_count={devices}"
        env |= {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    return env
