"""Checkpoints: a killed run goes on from its last checkpoint, with the same draws to the bit."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from fedmcmc._checks import positive_integer
from fedmcmc.storage._files import (
    CheckpointError,
    DamagedFileError,
    read_record,
    write_record,
)
from fedmcmc.storage._manifest import BEFORE, RUN

__all__ = ["Checkpoint"]

CLAIMS = "files.json"
"""Files of the run outside of the directory."""


@dataclass(frozen=True)
class Checkpoint:
    """Where and how often a run saves its progress.

    ``sample(..., checkpoint=Checkpoint(directory))`` writes the state, the draws so far and the
    accumulators' states. If the process is killed at any time, the same call goes on from the last
    checkpoint. Its draws, ``info`` and ``totals`` are those of an uninterrupted run, to the last
    bit. A call with more `num_rounds` continues a finished run.

    A run raises `fedmcmc.CheckpointError` if the directory holds the checkpoint of another run
    (another model, kernel, key, start, data, number of chains, burn-in or thinning), or if another
    process writes there.

    A thread writes the files while the run goes on, and each file appears only once it is
    complete. Files have checksums, and the last two checkpoints are kept: if a file of the last
    one is damaged, the run goes on from the one before, with a warning.

    Parameters
    ----------
    directory
        Created if missing. Each run needs one of its own.
    every_rounds
        Rounds from one checkpoint to the next.
    every_seconds
        Seconds, in place of rounds; 60 if neither is given. A checkpoint is also written at the end
        of a run, when it is interrupted and when it turns non-finite.

    Examples
    --------
    >>> import tempfile
    >>> import jax, jax.numpy as jnp
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(
    ...     lambda theta: -0.5 * theta**2, lambda theta, x: -0.5 * (x - theta) ** 2
    ... )
    >>> data = fedmcmc.FederatedData.from_clients([jnp.ones(3), jnp.zeros(4)])
    >>> kernel = fedmcmc.lsd(posterior, step_size=0.01)
    >>> folder = tempfile.TemporaryDirectory()
    >>> def run(num_rounds):
    ...     return fedmcmc.sample(
    ...         jax.random.key(0), kernel, data, 0.0, num_rounds=num_rounds, progress=False,
    ...         checkpoint=fedmcmc.Checkpoint(folder.name),
    ...     )
    >>> run(100).num_draws, run(150).num_draws  # the second runs 50 rounds
    (100, 150)
    >>> folder.cleanup()
    """

    directory: str | Path
    every_rounds: int | None = None
    every_seconds: float | None = None

    hands_on_interrupts: ClassVar[bool] = False  # Ctrl-C ends the call alone, not the program

    def __post_init__(self) -> None:
        if self.every_rounds is not None and self.every_seconds is not None:
            raise ValueError("Give every_rounds= or every_seconds=, and not both.")
        if self.every_rounds is not None:
            positive_integer(self.every_rounds, "every_rounds")
        if self.every_seconds is not None and not self.every_seconds >= 0:
            raise ValueError(f"every_seconds must be at least 0, got {self.every_seconds!r}.")

    @property
    def advice(self) -> str:
        """What to do where the directory holds the checkpoint of another run."""
        return (
            "Give the run a directory of its own, or the settings with which the checkpoint was "
            "written."
        )

    @property
    def exists(self) -> bool:
        """Whether the directory holds a checkpoint."""
        return any((Path(self.directory) / name).exists() for name in (RUN, BEFORE))

    def claims(self, *paths: Path | None) -> bool:
        """Return whether files at `paths` are this run's, and note them as its own if they are new.

        The note is written before the files, since a process may die after it made them and before
        its first checkpoint.

        Raises
        ------
        CheckpointError
            If the record of such files is damaged.
        """
        files = [str(path.absolute()) for path in paths if path is not None]
        record = Path(self.directory) / CLAIMS
        try:
            known = read_record(record)["files"] if record.exists() else []
        except DamagedFileError as error:
            raise CheckpointError(
                f"{error} Put back a copy of it, or delete {self.directory} and the files of "
                "draws_to= and of the store to start anew."
            ) from error
        if files and set(files) <= set(known):
            return True
        if files and not any(Path(path).exists() for path in files):
            Path(self.directory).mkdir(parents=True, exist_ok=True)
            write_record(record, {"files": files})
        return False
