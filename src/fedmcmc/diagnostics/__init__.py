"""Diagnostics check draws against a posterior; `fedmcmc.criticism` checks a model against data.

Convergence (R-hat, effective sample sizes), bias by gradients and weights, Monte Carlo errors and
stopping rules. The package sees draws, a model and rows, but no kernels.
"""

from fedmcmc.diagnostics._diagnosis import MAX_BIAS as MAX_BIAS
from fedmcmc.diagnostics._diagnosis import MAX_RHAT as MAX_RHAT
from fedmcmc.diagnostics._diagnosis import MAX_SPREAD as MAX_SPREAD
from fedmcmc.diagnostics._diagnosis import MIN_DRAWS as MIN_DRAWS
from fedmcmc.diagnostics._diagnosis import MIN_ESS as MIN_ESS
from fedmcmc.diagnostics._diagnosis import MIN_OF_A_CHAIN as MIN_OF_A_CHAIN
from fedmcmc.diagnostics._diagnosis import Diagnosis as Diagnosis
from fedmcmc.diagnostics._diagnosis import DiagnosisWarning as DiagnosisWarning
from fedmcmc.diagnostics._diagnosis import SamplingWarning as SamplingWarning
from fedmcmc.diagnostics._diagnosis import diagnose as diagnose
from fedmcmc.diagnostics._diagnosis import warnings_are_ignored as warnings_are_ignored
from fedmcmc.diagnostics._errors import MonteCarloErrors as MonteCarloErrors
from fedmcmc.diagnostics._errors import chain_errors as chain_errors
from fedmcmc.diagnostics._errors import errors_of_weighted as errors_of_weighted
from fedmcmc.diagnostics._errors import group_errors as group_errors
from fedmcmc.diagnostics._mixing import Mixing as Mixing
from fedmcmc.diagnostics._mixing import judged_values as judged_values
from fedmcmc.diagnostics._mixing import mixing as mixing
from fedmcmc.diagnostics._mixing import worst_mixing as worst_mixing
from fedmcmc.diagnostics._moments import MomentErrors as MomentErrors
from fedmcmc.diagnostics._moments import check_moments as check_moments
from fedmcmc.diagnostics._moments import depth_of as depth_of
from fedmcmc.diagnostics._psis import khat_threshold as khat_threshold
from fedmcmc.diagnostics._psis import psis as psis
from fedmcmc.diagnostics._stopping import StopDecision as StopDecision
from fedmcmc.diagnostics._stopping import StoppingRule as StoppingRule
from fedmcmc.diagnostics._stopping import at_rest as at_rest
from fedmcmc.diagnostics._stopping import last_passes as last_passes
from fedmcmc.diagnostics._stopping import rhat_below as rhat_below
from fedmcmc.diagnostics._verdict import Verdict as Verdict
from fedmcmc.diagnostics._verdict import VerdictKind as VerdictKind
from fedmcmc.diagnostics._weights import check_by_weights as check_by_weights
