"""Regression models by formulas: generalized linear and mixed models.

`glm` and `glmm` read a formula, let the clients agree on a schema by sums, build each client's
design matrix, and fit the NumPyro model with `fedmcmc.fit`.
"""

from fedmcmc.models._families import FAMILIES as FAMILIES
from fedmcmc.models._families import Family as Family
