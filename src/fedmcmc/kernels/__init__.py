"""Kernels: the steps of a client and of the server, and the states that both start with.

Each family of samplers has one file. `_shared` and `_adjusted` hold base classes of families;
`_natural_update`, `_prior_site`, `_sites` and `_distillation` hold parts of single families.
`_questions`, `_evaluations`, `_expansions` and `_separate` hold kernels that query all clients.
Kernels do not depend on devices, chunks of rows, files or processes, and import no transform.
"""

from fedmcmc.kernels._averaging import averaging as averaging
from fedmcmc.kernels._consensus import consensus as consensus
from fedmcmc.kernels._distillation import distillation as distillation
from fedmcmc.kernels._ensemble import Distiller as Distiller
from fedmcmc.kernels._ensemble import dirichlet_ensemble as dirichlet_ensemble
from fedmcmc.kernels._ensemble import ensemble as ensemble
from fedmcmc.kernels._ensemble import gaussian_ensemble as gaussian_ensemble
from fedmcmc.kernels._evaluations import Dithered as Dithered
from fedmcmc.kernels._evaluations import Evaluated as Evaluated
from fedmcmc.kernels._evaluations import Evaluations as Evaluations
from fedmcmc.kernels._evaluations import PointRecipe as PointRecipe
from fedmcmc.kernels._evaluations import Points as Points
from fedmcmc.kernels._evaluations import compensated_sum as compensated_sum
from fedmcmc.kernels._evaluations import differences as differences
from fedmcmc.kernels._evaluations import dither_of as dither_of
from fedmcmc.kernels._evaluations import evaluations as evaluations
from fedmcmc.kernels._evaluations import split_sum as split_sum
from fedmcmc.kernels._expansions import Expanded as Expanded
from fedmcmc.kernels._expansions import Expansions as Expansions
from fedmcmc.kernels._expansions import expansions as expansions
from fedmcmc.kernels._gibbs import fed_gibbs as fed_gibbs
from fedmcmc.kernels._hamiltonian import hmc as hmc
from fedmcmc.kernels._hamiltonian import mala as mala
from fedmcmc.kernels._joint import joint as joint
from fedmcmc.kernels._langevin import Langevin as Langevin
from fedmcmc.kernels._langevin import langevin as langevin
from fedmcmc.kernels._latents import check_latent_model as check_latent_model
from fedmcmc.kernels._natural import Natural as Natural
from fedmcmc.kernels._natural import natural as natural
from fedmcmc.kernels._natural_update import NaturalUpdate as NaturalUpdate
from fedmcmc.kernels._pseudo_gradients import displacement as displacement
from fedmcmc.kernels._pseudo_gradients import posterior_delta as posterior_delta
from fedmcmc.kernels._pseudo_gradients import pseudo_gradients as pseudo_gradients
from fedmcmc.kernels._questions import LOG_ZERO_THRESHOLD as LOG_ZERO_THRESHOLD
from fedmcmc.kernels._questions import Answer as Answer
from fedmcmc.kernels._questions import Question as Question
from fedmcmc.kernels._refreshed_relay import refreshed_relay as refreshed_relay
from fedmcmc.kernels._relay import Relay as Relay
from fedmcmc.kernels._relay import relay as relay
from fedmcmc.kernels._separate import PerClientQuestion as PerClientQuestion
from fedmcmc.kernels._shared import EstimatorKernel as EstimatorKernel
from fedmcmc.kernels._shared import check_model as check_model
from fedmcmc.kernels._underdamped import underdamped as underdamped
from fedmcmc.kernels._weighted import gaussian_mh as gaussian_mh
from fedmcmc.kernels._weighted import multiple_try as multiple_try
