"""Runs on several devices or in several processes."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

import fedmcmc
from fedmcmc import Placement, distributed

__all__ = ["ONE_DEVICE", "folder_of_process", "key_of", "sample"]

ONE_DEVICE = Placement()


def key_of(seed: int) -> Any:
    """Return the key of a run; `fedmcmc.sweep` gives seed ``s`` the same."""
    return jax.random.fold_in(jax.random.key(0), seed)


def sample(
    rng_key: Any,
    kernel: fedmcmc.FederatedKernel,
    data: fedmcmc.FederatedData,
    position: Any = None,
    *,
    placement: Placement,
    client_store: fedmcmc.HostStore | None = None,
    **settings: Any,
) -> fedmcmc.Samples:
    """Call `fedmcmc.sample` with a placement.

    Kernels of pooled rows and runs with a store are on one device, wherever others are.
    """
    if client_store is not None or kernel.participation.pooled:
        placement = replace(placement, mesh=None, client_store=client_store)
    return fedmcmc.sample(rng_key, kernel, data, position, placement=placement, **settings)


@contextmanager
def folder_of_process(out: Path) -> Iterator[Path]:
    """Return where this process writes: `out`, or a temporary folder if it is not the first.

    All processes make the same files, and none must replace what another is writing.
    """
    if distributed.is_first():
        yield out
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)
