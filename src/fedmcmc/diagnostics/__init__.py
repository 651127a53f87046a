"""Whether draws suffice: R-hat, effective sample sizes, rules that stop a run.

It sees draws, not kernels, and imports types alone.
"""

from fedmcmc.diagnostics._stopping import StoppingRule as StoppingRule
from fedmcmc.diagnostics._stopping import Verdict as Verdict
from fedmcmc.diagnostics._stopping import rhat_below as rhat_below
from fedmcmc.diagnostics._stopping import worst as worst
