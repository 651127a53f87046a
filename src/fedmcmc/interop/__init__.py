"""Models and results of other libraries: NumPyro, Flax, ArviZ.

`interop.numpyro` and `interop.flax` are public modules, so that neither library is needed for the
other. They import everything below.
"""
