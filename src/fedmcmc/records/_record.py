"""The user's object: what a run keeps of its rounds, and where."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fedmcmc._types import Described
from fedmcmc.streaming import Accumulator


@dataclass(frozen=True, repr=False)
class Record(Described):
    """What `fedmcmc.sample` keeps of a run, and where.

    By default draws and ``info`` are kept in memory.

    Parameters
    ----------
    streams
        Accumulators by name (`fedmcmc.streaming`) that take in every kept draw on the device, or
        what `collect` made of it; what they found is in ``samples.streams``.
    keep_draws
        Whether to keep draws and ``info``; without, the memory of a run does not grow with its
        rounds, and `streams` is what it gives.
    local
        Whether to keep the latents of all clients' groups after each kept round, too, of a kernel
        that moves them (`fedmcmc.lsd` with ``refresh=``): in ``samples.local``. In a simulation
        without a mesh or a client store; sites keep theirs to themselves.
    draws_to
        A Zarr store to which draws and ``info`` go while the run goes on, in place of memory. It
        holds bfloat16 numbers as float32.

    Raises
    ------
    ValueError, TypeError
        If an argument is off, or two do not go together.

    Examples
    --------
    >>> import fedmcmc
    >>> record = fedmcmc.Record(streams={"m": fedmcmc.streaming.moments()}, keep_draws=False)
    >>> sorted(record.streams), record.keep_draws
    (['m'], False)
    """

    streams: Mapping[str, Accumulator] = field(default_factory=dict)
    keep_draws: bool = True
    local: bool = False
    draws_to: str | Path | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.streams, Mapping):
            raise TypeError(
                "streams must be a mapping of names to accumulators (fedmcmc.streaming.moments()), "
                f"got {type(self.streams).__name__}."
            )
        for name, accumulator in self.streams.items():
            if not isinstance(name, str) or not isinstance(accumulator, Accumulator):
                raise TypeError(
                    "streams must be a mapping of names to accumulators "
                    f"(fedmcmc.streaming.moments()), got {name!r}: {type(accumulator).__name__}."
                )
        if self.local and not self.keep_draws:
            raise ValueError("Give local=True, or keep_draws=False, and not both.")
        if self.draws_to is not None:
            object.__setattr__(self, "draws_to", Path(self.draws_to))
            if not self.keep_draws:
                raise ValueError("Give draws_to=, or keep_draws=False, and not both.")
