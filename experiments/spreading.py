"""How an experiment is spread over devices and processes."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

from experiments.schemas import RunSettings
from fedmcmc import distributed

__all__ = ["own_folder", "over_devices"]


@contextmanager
def over_devices(of_run: RunSettings) -> Iterator[None]:
    """Spread the runs within over all devices if the settings say so, or several processes are."""
    spread = of_run.all_devices or jax.process_count() > 1
    mesh = distributed.mesh() if spread else None
    with distributed.use_layout(mesh, clients_at_a_time=of_run.clients_at_a_time):
        yield


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
