"""What a run can accumulate on the device, so that no draws need to be kept.

Pass accumulators to ``fedmcmc.Record(streams={"name": accumulator})``; what they found is in
``samples.streams``. Their memory does not grow with the number of rounds. The room imports the
ground floor alone.
"""

from fedmcmc.streaming._moments import Moments, moments, pool
from fedmcmc.streaming._predictions import Calibration, calibration, predictive
from fedmcmc.streaming._stored import Stored, reservoir, thinned
from fedmcmc.streaming._types import Accumulator

__all__ = [
    "Accumulator",
    "Calibration",
    "Moments",
    "Stored",
    "calibration",
    "moments",
    "pool",
    "predictive",
    "reservoir",
    "thinned",
]
