"""Gaussians in natural parameters, and mixtures of Gaussians and t distributions.

Surrogates and expectation propagation use `Gaussian`; proposals of importance sampling are
`Mixture` objects. The package imports only `fedmcmc.pytrees` and `fedmcmc.random`.
"""

from fedmcmc.gaussian._gaussian import STRUCTURES as STRUCTURES
from fedmcmc.gaussian._gaussian import Gaussian as Gaussian
from fedmcmc.gaussian._gaussian import as_dense as as_dense
from fedmcmc.gaussian._gaussian import flat_precision as flat_precision
from fedmcmc.gaussian._gaussian import from_covariance as from_covariance
from fedmcmc.gaussian._gaussian import from_flat as from_flat
from fedmcmc.gaussian._gaussian import is_proper as is_proper
from fedmcmc.gaussian._gaussian import plus_precision as plus_precision
from fedmcmc.gaussian._gaussian import project as project
from fedmcmc.gaussian._gaussian import symmetric as symmetric
from fedmcmc.gaussian._gaussian import with_mean as with_mean
from fedmcmc.gaussian._mixtures import WHOLE as WHOLE
from fedmcmc.gaussian._mixtures import Mixture as Mixture
from fedmcmc.gaussian._mixtures import StandardDraws as StandardDraws
from fedmcmc.gaussian._mixtures import defensive as defensive
from fedmcmc.gaussian._mixtures import moments_of as moments_of
