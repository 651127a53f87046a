"""Criticism of a fitted model: what it predicts, and which client does not fit, as sums.

Every question here is one exchange in which clients send sums over their rows, or none: rows,
numbers per row and replicated rows never leave a client. The room imports `exact/` and every room
on lower floors; what asks sees a consortium, and never rows.

================== ============================================== =================
function           asks                                           exchanges
================== ============================================== =================
`loo`              how well is each row predicted from all others one
`compare`          which of several models does that better       one
`predictive_check` do replicated outcomes look like the observed  one
`prior_predictive` do the prior's replicated outcomes             one
`conflict`         which client does not fit the others           one
`leave_out`        what is the posterior without a client         one
`calibrate`        is the fit right on outcomes of its own        those of the fits
================== ============================================== =================
"""

from fedmcmc.criticism._calibrate import Calibration as Calibration
from fedmcmc.criticism._calibrate import calibrate as calibrate
from fedmcmc.criticism._compare import Comparison as Comparison
from fedmcmc.criticism._compare import compare as compare
from fedmcmc.criticism._conflict import Conflict as Conflict
from fedmcmc.criticism._conflict import conflict as conflict
from fedmcmc.criticism._histogram import Histogram as Histogram
from fedmcmc.criticism._leave_out import LeftOut as LeftOut
from fedmcmc.criticism._leave_out import leave_out as leave_out
from fedmcmc.criticism._loo import Loo as Loo
from fedmcmc.criticism._loo import loo as loo
from fedmcmc.criticism._predictive import PredictiveCheck as PredictiveCheck
from fedmcmc.criticism._predictive import predictive_check as predictive_check
from fedmcmc.criticism._predictive import prior_predictive as prior_predictive
