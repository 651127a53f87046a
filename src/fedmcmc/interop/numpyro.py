"""NumPyro models as federated posteriors, and federated kernels under `numpyro.infer.MCMC`."""

from fedmcmc.interop._numpyro_kernel import FederatedMCMCKernel
from fedmcmc.interop._numpyro_model import from_numpyro
from fedmcmc.interop._numpyro_state import FederatedMCMCState

__all__ = ["FederatedMCMCKernel", "FederatedMCMCState", "from_numpyro"]
