"""Settings of JAX that hold for one thread, to be carried over to another."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import jax

__all__ = ["jax_settings", "under"]

NAMES = (
    "check_tracer_leaks",
    "debug_infs",
    "debug_key_reuse",
    "debug_nans",
    "default_device",
    "default_matmul_precision",
    "default_prng_impl",
    "disable_jit",
    "enable_x64",
    "numpy_dtype_promotion",
    "numpy_rank_promotion",
    "threefry_partitionable",
)
"""Each a context manager ``jax.<name>`` and a value ``jax.config.jax_<name>``."""


def jax_settings() -> tuple[Any, ...]:
    """Return the settings that hold in this thread."""
    return tuple(getattr(jax.config, f"jax_{name}") for name in NAMES)


@contextmanager
def under(settings: tuple[Any, ...]) -> Iterator[None]:
    """Have what `jax_settings` returned elsewhere hold here."""
    with ExitStack() as stack:
        for name, value, here in zip(NAMES, settings, jax_settings(), strict=True):
            if value != here:
                stack.enter_context(getattr(jax, name)(value))
        yield
