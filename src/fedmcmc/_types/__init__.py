"""Types that all packages share: clients, posteriors, phases, kernels and their states.

A kernel is a frozen dataclass and a pytree. Its numbers (step sizes, surrogates, probabilities) are
leaves, which enter a compiled program as arguments; its structure is static. Kernels that differ
only in numbers share one compilation.

This package imports no other package of fedmcmc.
"""

from fedmcmc._types._compiled import compiled as compiled
from fedmcmc._types._describing import Described as Described
from fedmcmc._types._describing import described as described
from fedmcmc._types._describing import undefined as undefined
from fedmcmc._types._html import html_table as html_table
from fedmcmc._types._kernels import FederatedKernel as FederatedKernel
from fedmcmc._types._kernels import Phase as Phase
from fedmcmc._types._kernels import ServerMemory as ServerMemory
from fedmcmc._types._kernels import SetupPhase as SetupPhase
from fedmcmc._types._kernels import check_start as check_start
from fedmcmc._types._kernels import constrain_fn_of as constrain_fn_of
from fedmcmc._types._kernels import initial_state as initial_state
from fedmcmc._types._kernels import local_model as local_model
from fedmcmc._types._kernels import memory_of as memory_of
from fedmcmc._types._kernels import setup_message as setup_message
from fedmcmc._types._kernels import user_position as user_position
from fedmcmc._types._parts import GradientEstimator as GradientEstimator
from fedmcmc._types._parts import Participation as Participation
from fedmcmc._types._parts import Reference as Reference
from fedmcmc._types._pickling import Absent as Absent
from fedmcmc._types._pickling import WithFunctions as WithFunctions
from fedmcmc._types._pickling import refuse_unstorable as refuse_unstorable
from fedmcmc._types._register import register_dataclass as register_dataclass
from fedmcmc._types._traits import Disclosure as Disclosure
from fedmcmc._types._traits import Traits as Traits
from fedmcmc._types._values import Adjusted as Adjusted
from fedmcmc._types._values import ArrayTree as ArrayTree
from fedmcmc._types._values import Arrivals as Arrivals
from fedmcmc._types._values import Broadcast as Broadcast
from fedmcmc._types._values import Cached as Cached
from fedmcmc._types._values import Client as Client
from fedmcmc._types._values import ClientLatent as ClientLatent
from fedmcmc._types._values import ClientTerms as ClientTerms
from fedmcmc._types._values import Cohort as Cohort
from fedmcmc._types._values import Counts as Counts
from fedmcmc._types._values import Exact as Exact
from fedmcmc._types._values import FederatedState as FederatedState
from fedmcmc._types._values import Federation as Federation
from fedmcmc._types._values import LatentSums as LatentSums
from fedmcmc._types._values import Local as Local
from fedmcmc._types._values import LogDensity as LogDensity
from fedmcmc._types._values import Number as Number
from fedmcmc._types._values import PerClient as PerClient
from fedmcmc._types._values import Population as Population
from fedmcmc._types._values import Posterior as Posterior
from fedmcmc._types._values import Refined as Refined
from fedmcmc._types._values import Sender as Sender
from fedmcmc._types._values import Shapes as Shapes
from fedmcmc._types._values import Static as Static
from fedmcmc._types._values import StepInfo as StepInfo
from fedmcmc._types._values import as_functions as as_functions
from fedmcmc._types._values import mapped as mapped
