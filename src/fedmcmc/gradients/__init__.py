"""Estimators of the gradient of a client's log likelihood, and all rescalings of gradients.

The package contains minibatches, epochs, control variates, corrections that sum to zero over the
clients, and the derivatives of a client's log density (`ClientDensity`). An estimator reads one
client at a time.
"""

from fedmcmc.gradients._augmented import Augmentation as Augmentation
from fedmcmc.gradients._augmented import augmented as augmented
from fedmcmc.gradients._augmented import has_augmented_data as has_augmented_data
from fedmcmc.gradients._augmented import refuse_augmented as refuse_augmented
from fedmcmc.gradients._augmented import without_augmented as without_augmented
from fedmcmc.gradients._corrections import Conducive as Conducive
from fedmcmc.gradients._corrections import FixedPoint as FixedPoint
from fedmcmc.gradients._corrections import Scaffold as Scaffold
from fedmcmc.gradients._corrections import Svrg as Svrg
from fedmcmc.gradients._corrections import as_surrogates as as_surrogates
from fedmcmc.gradients._corrections import conducive as conducive
from fedmcmc.gradients._corrections import fixed_point as fixed_point
from fedmcmc.gradients._corrections import scaffold as scaffold
from fedmcmc.gradients._corrections import svrg as svrg
from fedmcmc.gradients._corrections import zero_sum_correction as zero_sum_correction
from fedmcmc.gradients._curvature import BLOCK as BLOCK
from fedmcmc.gradients._curvature import blockwise as blockwise
from fedmcmc.gradients._curvature import minus_hessian as minus_hessian
from fedmcmc.gradients._estimators import FullGradient as FullGradient
from fedmcmc.gradients._estimators import Noisy as Noisy
from fedmcmc.gradients._estimators import client_gradient as client_gradient
from fedmcmc.gradients._estimators import first_reference as first_reference
from fedmcmc.gradients._estimators import full_gradient as full_gradient
from fedmcmc.gradients._estimators import next_broadcast as next_broadcast
from fedmcmc.gradients._estimators import noisy as noisy
from fedmcmc.gradients._minibatches import Epochs as Epochs
from fedmcmc.gradients._minibatches import Minibatch as Minibatch
from fedmcmc.gradients._minibatches import epochs as epochs
from fedmcmc.gradients._minibatches import for_batch_size as for_batch_size
from fedmcmc.gradients._minibatches import minibatch as minibatch
from fedmcmc.gradients._minibatches import offsets_of_call as offsets_of_call
from fedmcmc.gradients._minibatches import row_size as row_size
from fedmcmc.gradients._minibatches import steps_per_epoch as steps_per_epoch
from fedmcmc.gradients._scaling import importance as importance
from fedmcmc.gradients._scaling import over_weight as over_weight
from fedmcmc.gradients._scaling import prior_share as prior_share
from fedmcmc.gradients._targets import ClientDensity as ClientDensity
from fedmcmc.gradients._targets import as_gaussian as as_gaussian
from fedmcmc.gradients._terms import Terms as Terms
from fedmcmc.gradients._terms import TransformedTerms as TransformedTerms
from fedmcmc.gradients._terms import fold_terms as fold_terms
from fedmcmc.gradients._terms import over as over
from fedmcmc.gradients._terms import refuse_latents as refuse_latents
from fedmcmc.gradients._terms import row_terms as row_terms
