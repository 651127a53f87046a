"""What a run keeps, and how it is handed out: draws in memory or in a store, `Samples`.

A recorder takes what a segment of rounds kept. It imports types, pytrees, streaming, placement and
what the rounds return.
"""

from fedmcmc.records._record import Record as Record
from fedmcmc.records._recorders import Draws as Draws
from fedmcmc.records._recorders import MemoryRecorder as MemoryRecorder
from fedmcmc.records._recorders import Recorder as Recorder
from fedmcmc.records._recorders import ZarrReader as ZarrReader
from fedmcmc.records._recorders import ZarrRecorder as ZarrRecorder
from fedmcmc.records._samples import Samples as Samples
