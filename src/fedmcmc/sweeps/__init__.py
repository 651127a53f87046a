"""`sweep`: a kernel at every point of a grid of settings, in as few programs as can be.

Kernels that differ by numbers alone share a program. The room imports runs and what they import.
"""

from fedmcmc.sweeps._sweeps import Sweep as Sweep
from fedmcmc.sweeps._sweeps import sweep as sweep
from fedmcmc.sweeps._tables import draw_table as draw_table
from fedmcmc.sweeps._tables import tabulate_seeds as tabulate_seeds
