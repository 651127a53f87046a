"""One call: from a model and clients to draws, evidence and a verdict, with a report.

Modes, curvatures and corrections ask a consortium for sums. The room may import every room on
lower floors, and exactness.
"""

from fedmcmc.fitting._modes import Mode as Mode
from fedmcmc.fitting._modes import Search as Search
from fedmcmc.fitting._modes import find_modes as find_modes
