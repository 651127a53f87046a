"""Bayesian federated learning by sampling: composable kernels for JAX."""

from fedmcmc import partition as partition
from fedmcmc import surrogates as surrogates
from fedmcmc._types import Broadcast as Broadcast
from fedmcmc._types import Client as Client
from fedmcmc._types import Cohort as Cohort
from fedmcmc._types import FederatedKernel as FederatedKernel
from fedmcmc._types import FederatedState as FederatedState
from fedmcmc._types import GradientEstimator as GradientEstimator
from fedmcmc._types import Participation as Participation
from fedmcmc._types import Posterior as Posterior
from fedmcmc._types import StepInfo as StepInfo
from fedmcmc.algorithms.fsgld import dsgld as dsgld
from fedmcmc.algorithms.fsgld import fsgld as fsgld
from fedmcmc.algorithms.fsgld import sgld as sgld
from fedmcmc.corrections import conducive as conducive
from fedmcmc.data import FederatedData as FederatedData
from fedmcmc.errors import NonFiniteError as NonFiniteError
from fedmcmc.gaussian import Gaussian as Gaussian
from fedmcmc.gradients import full_gradient as full_gradient
from fedmcmc.gradients import minibatch as minibatch
from fedmcmc.gradients import noisy as noisy
from fedmcmc.interop.numpyro import from_numpyro as from_numpyro
from fedmcmc.kernels.relay import relay as relay
from fedmcmc.participation import bernoulli as bernoulli
from fedmcmc.participation import categorical as categorical
from fedmcmc.participation import full as full
from fedmcmc.participation import uniform as uniform
from fedmcmc.sample import local_positions as local_positions
from fedmcmc.sample import sample as sample
from fedmcmc.samples import Samples as Samples
from fedmcmc.simulate import RoundInfo as RoundInfo
from fedmcmc.simulate import Simulation as Simulation
from fedmcmc.simulate import simulate as simulate

__version__ = "0.1.0"
