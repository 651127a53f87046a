"""How an experiment is spread over devices and processes."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

import fedmcmc
from experiments.schemas import RunSettings
from fedmcmc import Placement, distributed

__all__ = ["ONE_DEVICE", "own_folder", "placement_of", "sample"]

ONE_DEVICE = Placement()


def placement_of(of_run: RunSettings) -> Placement:
    """Return where runs lie: as the settings say, or over all devices of several processes."""
    spread = of_run.all_devices or jax.process_count() > 1
    mesh = distributed.mesh() if spread else None
    return Placement(mesh=mesh, clients_at_a_time=of_run.clients_at_a_time)


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
    """Call `fedmcmc.sample` with the placement of an experiment.

    Kernels of pooled rows and runs with a store are on one device, wherever the others are.
    """
    if client_store is not None or kernel.participation.pooled:
        placement = replace(placement, mesh=None, client_store=client_store)
    return fedmcmc.sample(rng_key, kernel, data, position, placement=placement, **settings)


@contextmanager
def own_folder(out: Path) -> Iterator[Path]:
    """Return where this process writes: `out`, but of several processes only the first's is kept.

    Each makes the same files, and one must not replace what another is writing.
    """
    if distributed.is_first():
        yield out
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)
