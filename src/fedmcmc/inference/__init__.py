"""Client inference for expectation propagation: a Gaussian fitted to likelihood times cavity.

An inference sees one client and its cavity and returns a Gaussian, from which
`fedmcmc.natural` computes the client's message.
"""

from fedmcmc.inference._exact import exact_gaussian as exact_gaussian
from fedmcmc.inference._exact import exact_mean as exact_mean
from fedmcmc.inference._fisher import laplace as laplace
from fedmcmc.inference._fisher import ngvi as ngvi
from fedmcmc.inference._importance import importance as importance
from fedmcmc.inference._latents import mcmc_local as mcmc_local
from fedmcmc.inference._means import langevin_mean as langevin_mean
from fedmcmc.inference._means import sgd_mean as sgd_mean
from fedmcmc.inference._moments import mcmc as mcmc
from fedmcmc.inference._moments import scaled_identity as scaled_identity
from fedmcmc.inference._types import Inference as Inference
from fedmcmc.inference._types import LatentInference as LatentInference
from fedmcmc.inference._types import Mean as Mean
from fedmcmc.inference._types import Tilted as Tilted
from fedmcmc.inference._types import TiltedMoments as TiltedMoments
