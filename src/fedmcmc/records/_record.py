"""Selection of what a run keeps."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fedmcmc.streaming import Accumulator
from fedmcmc.types import Described


@dataclass(frozen=True, repr=False)
class Record(Described):
    """Selection of what `fedmcmc.sample` keeps, and where.

    By default a run keeps draws and ``info`` in memory.

    Parameters
    ----------
    streams
        Accumulators by name (`fedmcmc.streaming`). On the device, they process each kept draw, or
        the value of `collect`; their results are in ``samples.streams``.
    keep_draws
        If false, draws and ``info`` are not kept, and memory does not grow with the rounds.
    local
        If true, the latents of all clients' groups are kept in ``samples.local`` after each kept
        round, for a kernel that moves latents (`fedmcmc.lsd` with ``refresh=``). Only for
        simulations without a mesh or a client store: real sites do not send latents.
    draws_to
        Path of a Zarr store that receives draws and ``info`` during the run instead of memory. It
        stores bfloat16 numbers as float32.

    Raises
    ------
    TypeError
        If `streams` is not a mapping of names to accumulators.
    ValueError
        If two arguments exclude each other.

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
            raise ValueError("Use local=True or keep_draws=False, but not both.")
        if self.draws_to is not None:
            object.__setattr__(self, "draws_to", Path(self.draws_to))
            if not self.keep_draws:
                raise ValueError("Use draws_to= or keep_draws=False, but not both.")
