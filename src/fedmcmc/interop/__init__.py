"""Conversion of NumPyro models and Flax modules to posteriors.

`interop.numpyro` and `interop.flax` are separate public modules, so that using one library does not
require the other.
"""

from fedmcmc.interop._numpyro_indices import check_indices as check_indices
