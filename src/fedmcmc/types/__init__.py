"""Types that all packages share: clients, posteriors, phases, kernels and their states.

A kernel is a frozen dataclass and a pytree. Its numbers (step sizes, surrogates, probabilities) are
leaves, which enter a compiled program as arguments; its structure is static. Kernels that differ
only in numbers share one compilation.

This package imports no other package of fedmcmc.
"""

from fedmcmc.types._compiled import cancel_compilations as cancel_compilations
from fedmcmc.types._compiled import compiled as compiled
from fedmcmc.types._describing import Described as Described
from fedmcmc.types._describing import describe as describe
from fedmcmc.types._describing import undefined as undefined
from fedmcmc.types._html import html_table as html_table
from fedmcmc.types._kernels import FederatedKernel as FederatedKernel
from fedmcmc.types._kernels import Phase as Phase
from fedmcmc.types._kernels import ServerMemory as ServerMemory
from fedmcmc.types._kernels import SetupPhase as SetupPhase
from fedmcmc.types._kernels import check_start as check_start
from fedmcmc.types._kernels import constrain_fn_of as constrain_fn_of
from fedmcmc.types._kernels import initial_state as initial_state
from fedmcmc.types._kernels import local_model as local_model
from fedmcmc.types._kernels import memory_of as memory_of
from fedmcmc.types._kernels import setup_message as setup_message
from fedmcmc.types._kernels import user_position as user_position
from fedmcmc.types._parts import GradientEstimator as GradientEstimator
from fedmcmc.types._parts import Participation as Participation
from fedmcmc.types._parts import Reference as Reference
from fedmcmc.types._pickling import MissingFunction as MissingFunction
from fedmcmc.types._pickling import WithFunctions as WithFunctions
from fedmcmc.types._pickling import check_picklable as check_picklable
from fedmcmc.types._register import register_dataclass as register_dataclass
from fedmcmc.types._traits import Disclosure as Disclosure
from fedmcmc.types._traits import Traits as Traits
from fedmcmc.types._values import ApproximationReport as ApproximationReport
from fedmcmc.types._values import ArrayTree as ArrayTree
from fedmcmc.types._values import Arrivals as Arrivals
from fedmcmc.types._values import Broadcast as Broadcast
from fedmcmc.types._values import Client as Client
from fedmcmc.types._values import ClientTerms as ClientTerms
from fedmcmc.types._values import Cohort as Cohort
from fedmcmc.types._values import FederatedState as FederatedState
from fedmcmc.types._values import Federation as Federation
from fedmcmc.types._values import LatentSums as LatentSums
from fedmcmc.types._values import Local as Local
from fedmcmc.types._values import LogDensity as LogDensity
from fedmcmc.types._values import MetropolisReport as MetropolisReport
from fedmcmc.types._values import Number as Number
from fedmcmc.types._values import ParticipationMoments as ParticipationMoments
from fedmcmc.types._values import PerClient as PerClient
from fedmcmc.types._values import Population as Population
from fedmcmc.types._values import Posterior as Posterior
from fedmcmc.types._values import RecomputableState as RecomputableState
from fedmcmc.types._values import Sender as Sender
from fedmcmc.types._values import Shapes as Shapes
from fedmcmc.types._values import Static as Static
from fedmcmc.types._values import StepInfo as StepInfo
from fedmcmc.types._values import Uncompressed as Uncompressed
from fedmcmc.types._values import as_functions as as_functions
from fedmcmc.types._values import bound as bound
from fedmcmc.types._values import vmap_axes as vmap_axes
