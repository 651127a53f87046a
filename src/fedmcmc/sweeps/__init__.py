"""Runs of a kernel at all points of a grid of settings (`sweep`), in as few programs as possible.

Kernels that differ only by numbers share a program.
"""

from fedmcmc.sweeps._sweeps import Sweep as Sweep
from fedmcmc.sweeps._sweeps import sweep as sweep
