"""Models and results of other libraries: NumPyro and Flax.

`interop.numpyro` and `interop.flax` are public modules, so that neither library is needed for the
other. They may import every room on lower floors.
"""

from fedmcmc.interop._numpyro_indices import check_indices as check_indices
