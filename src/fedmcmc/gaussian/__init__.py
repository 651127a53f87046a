"""Gaussians in natural parameters, and the clients' approximate factors (sites).

Surrogates and expectation propagation share them. They know nothing of data or rounds, and import
`fedmcmc.pytrees` and `fedmcmc.random`.
"""

from fedmcmc.gaussian._gaussian import STRUCTURES as STRUCTURES
from fedmcmc.gaussian._gaussian import Gaussian as Gaussian
from fedmcmc.gaussian._sites import as_dense as as_dense
from fedmcmc.gaussian._sites import is_proper as is_proper
from fedmcmc.gaussian._sites import plus_precision as plus_precision
from fedmcmc.gaussian._sites import project as project
from fedmcmc.gaussian._sites import with_mean as with_mean
