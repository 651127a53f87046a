"""Conversion of NumPyro models to posteriors, and federated kernels for `numpyro.infer.MCMC`."""

from fedmcmc.interop._numpyro_centering import centering
from fedmcmc.interop._numpyro_client_effects import share_client_effects
from fedmcmc.interop._numpyro_kernel import FederatedMCMCKernel, FederatedMCMCState
from fedmcmc.interop._numpyro_model import from_numpyro

__all__ = [
    "FederatedMCMCKernel",
    "FederatedMCMCState",
    "centering",
    "from_numpyro",
    "share_client_effects",
]
