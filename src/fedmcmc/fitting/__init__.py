"""One call from a model and clients to draws, evidence, a verdict and a report.

A fit runs a list of stages (`_decisions`): functions of the problem and of the results so far
(`_stages`). The server receives only sums over clients.
"""

from fedmcmc.fitting._fit import fit as fit
from fedmcmc.fitting._fitted import Fitted as Fitted
from fedmcmc.fitting._modes import ModeSearch as ModeSearch
from fedmcmc.fitting._modes import PosteriorMode as PosteriorMode
from fedmcmc.fitting._modes import find_modes as find_modes
from fedmcmc.fitting._report import Report as Report
from fedmcmc.fitting._report import StageReport as StageReport
from fedmcmc.fitting._saving import store_fitted as store_fitted
