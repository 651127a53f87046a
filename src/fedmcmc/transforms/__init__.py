"""Transforms of kernels: compression, faults, secure sums, sequences, augmentation and others.

A transform takes any kernel and returns a kernel. Transforms import the types and blocks of kernels
and nothing that runs them.
"""

from fedmcmc.transforms._augment import augment as augment
from fedmcmc.transforms._compressed import compress as compress
from fedmcmc.transforms._faulty import faults as faults
from fedmcmc.transforms._natural_parameters import natural_parameters as natural_parameters
from fedmcmc.transforms._secure import MIN_SITES as MIN_SITES
from fedmcmc.transforms._secure import check_cohorts as check_cohorts
from fedmcmc.transforms._secure import counts_of as counts_of
from fedmcmc.transforms._secure import is_secured as is_secured
from fedmcmc.transforms._secure import secure_sum as secure_sum
from fedmcmc.transforms._secure import with_counts as with_counts
from fedmcmc.transforms._secure import without_secure_sum as without_secure_sum
from fedmcmc.transforms._sequence import sequence as sequence
from fedmcmc.transforms._sharing import share_momentum as share_momentum
from fedmcmc.transforms._switching import switch as switch
