"""Storage of what a run keeps: `Record`, recorders for memory and Zarr, and the result `Samples`.

A recorder stores the draws of each segment of rounds.
"""

from fedmcmc.records._record import Record as Record
from fedmcmc.records._recorders import Draws as Draws
from fedmcmc.records._recorders import MemoryRecorder as MemoryRecorder
from fedmcmc.records._recorders import Recorder as Recorder
from fedmcmc.records._recorders import ZarrReader as ZarrReader
from fedmcmc.records._recorders import ZarrRecorder as ZarrRecorder
from fedmcmc.records._samples import Samples as Samples
