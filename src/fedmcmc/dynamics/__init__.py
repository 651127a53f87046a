"""Rules that move a position: integrators, momentum, metrics, preconditioners, local training.

They take a gradient function as an argument and do not depend on a model.
"""

from fedmcmc.dynamics import _preconditioners as preconditioners
from fedmcmc.dynamics._acceptance import gaussian_mh_acceptance as gaussian_mh_acceptance
from fedmcmc.dynamics._acceptance import hmc_acceptance as hmc_acceptance
from fedmcmc.dynamics._acceptance import hmc_step_size as hmc_step_size
from fedmcmc.dynamics._acceptance import mala_acceptance as mala_acceptance
from fedmcmc.dynamics._integrators import EulerMaruyama as EulerMaruyama
from fedmcmc.dynamics._integrators import Integrator as Integrator
from fedmcmc.dynamics._integrators import Leapfrog as Leapfrog
from fedmcmc.dynamics._integrators import euler_maruyama as euler_maruyama
from fedmcmc.dynamics._integrators import leapfrog as leapfrog
from fedmcmc.dynamics._integrators import overdamped_langevin as overdamped_langevin
from fedmcmc.dynamics._metrics import IDENTITY as IDENTITY
from fedmcmc.dynamics._metrics import Metric as Metric
from fedmcmc.dynamics._momentum import Momentum as Momentum
from fedmcmc.dynamics._momentum import independent_momentum as independent_momentum
from fedmcmc.dynamics._momentum import shared_momentum as shared_momentum
from fedmcmc.dynamics._preconditioners import Preconditioner as Preconditioner
from fedmcmc.dynamics._preconditioners import Rms as Rms
from fedmcmc.dynamics._preconditioners import rms as rms
from fedmcmc.dynamics._slices import slice_sweeps as slice_sweeps
from fedmcmc.dynamics._training import Length as Length
from fedmcmc.dynamics._training import Trained as Trained
from fedmcmc.dynamics._training import Training as Training
from fedmcmc.dynamics._training import Visitor as Visitor
from fedmcmc.dynamics._training import local_steps as local_steps
from fedmcmc.dynamics._training import plain_steps as plain_steps
from fedmcmc.dynamics._training import train as train
from fedmcmc.dynamics._training import training as training
