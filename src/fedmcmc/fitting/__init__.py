"""One call: from a model and clients to draws, evidence and a verdict, with a report.

Modes, curvatures and corrections ask a consortium for sums. The room may import every room on
lower floors, and exactness.
"""

from fedmcmc.fitting._fit import fit as fit
from fedmcmc.fitting._fitted import Fitted as Fitted
from fedmcmc.fitting._modes import Mode as Mode
from fedmcmc.fitting._modes import Search as Search
from fedmcmc.fitting._modes import find_modes as find_modes
from fedmcmc.fitting._report import Report as Report
from fedmcmc.fitting._report import Stage as Stage
