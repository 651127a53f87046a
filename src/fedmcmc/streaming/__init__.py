"""Accumulators: statistics of draws that a run computes on the device without keeping the draws.

Pass accumulators to ``fedmcmc.Record(streams={"name": accumulator})``; their results are in
``samples.streams``. Their memory does not grow with the number of rounds.
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
