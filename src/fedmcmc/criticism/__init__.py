"""Criticism checks a model against data; `fedmcmc.diagnostics` checks draws against a posterior.

Clients send sums over their rows, or nothing. Rows, numbers per row and replicated rows never leave
a client.

================== ================================================== =================
function           question                                           exchanges
================== ================================================== =================
`loo`              How well is a row predicted by all other rows?     one
`compare`          Which of several models predicts rows best?        one
`predictive_check` Do replicated outcomes look like observed ones?    one
`prior_predictive` Do the prior's outcomes look like observed ones?   one
`conflict`         Which client disagrees with the other clients?     one
`leave_out`        What is the posterior without a client?            one
`calibrate`        Is the fit right on simulated outcomes?            exchanges of fits
================== ================================================== =================
"""

from fedmcmc.criticism._calibrate import RankCalibration as RankCalibration
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
