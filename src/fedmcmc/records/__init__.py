"""Storage of what a run keeps: `Record`, recorders for memory and Zarr, and the result `Samples`.

A recorder stores the draws of each segment of rounds.
"""

from fedmcmc.records._netcdf import SavedResult as SavedResult
from fedmcmc.records._netcdf import read_netcdf as read_netcdf
from fedmcmc.records._netcdf import write_netcdf as write_netcdf
from fedmcmc.records._record import Record as Record
from fedmcmc.records._recorders import Draws as Draws
from fedmcmc.records._recorders import MemoryRecorder as MemoryRecorder
from fedmcmc.records._recorders import Recorder as Recorder
from fedmcmc.records._recorders import ZarrReader as ZarrReader
from fedmcmc.records._recorders import ZarrRecorder as ZarrRecorder
from fedmcmc.records._samples import Samples as Samples
from fedmcmc.records._saving import restore_samples as restore_samples
from fedmcmc.records._saving import store_samples as store_samples
