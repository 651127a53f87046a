"""What a run keeps, and how it is handed out: draws in memory or in a store, `Samples`.

A recorder takes what a segment of rounds kept. It imports types and what the rounds return.
"""

from fedmcmc.records._keeping import Keeper as Keeper
from fedmcmc.records._keeping import MemoryKeeper as MemoryKeeper
from fedmcmc.records._keeping import ZarrKeeper as ZarrKeeper
from fedmcmc.records._keeping import ZarrReader as ZarrReader
from fedmcmc.records._record import Record as Record
from fedmcmc.records._samples import Samples as Samples
from fedmcmc.records._samples import named_leaves as named_leaves
