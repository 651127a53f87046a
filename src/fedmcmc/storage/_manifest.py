"""The manifest of a checkpoint: how far the run is, which parts it consists of, whose they are.

A manifest is written after its parts, so the parts that it names are on the disk. The manifest
before it and the parts of that one are kept: if the last checkpoint is damaged, the run goes on
from there.
"""

from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedmcmc.storage._files import read_record, write_record
from fedmcmc.storage._parts import Part

__all__ = ["BEFORE", "RUN", "Manifest", "changed_versions", "versions"]

RUN, BEFORE = "run.json", "run-before.json"
"""The last manifest of a directory, and the one before it."""


@dataclass(frozen=True)
class Manifest:
    """What ``run.json`` holds."""

    identity: dict[str, Any]
    versions: dict[str, str]
    first: int  # the round in which the run began
    round: int
    num_draws: int  # per chain
    draws: tuple[Part, ...]
    state: Part
    totals: dict[str, list[int]]
    stopped: dict[str, Any]
    num_skipped: int  # checkpoints that were due while the one before was still being written

    @property
    def files(self) -> set[str]:
        """The names of the parts."""
        return {self.state.name, *(part.name for part in self.draws)}

    def write(self, path: Path) -> None:
        """Write the manifest to a file."""
        write_record(path, asdict(self))

    @classmethod
    def read(cls, path: Path) -> "Manifest":
        """Return the manifest in a file; raises as `read_record`."""
        record = read_record(path)
        draws = tuple(Part(*part) for part in record.pop("draws"))
        return cls(draws=draws, state=Part(*record.pop("state")), **record)


def versions() -> dict[str, str]:
    """Return the versions on which the bits of draws may depend."""
    return {"fedmcmc": version("fedmcmc"), "jax": jax.__version__, "numpy": np.__version__}


def changed_versions(manifest: Manifest) -> str:
    """Return in words which versions are others than those of a manifest, if any."""
    now = versions()
    return "; ".join(
        f"{name} {manifest.versions.get(name)}, now {now[name]}"
        for name in now
        if manifest.versions.get(name) != now[name]
    )
