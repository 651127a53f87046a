"""Importance weights and tempering: checked draws of the posterior from an approximation.

The server of this package collects sums of log likelihoods from a consortium and never sees a row.
"""

from fedmcmc.diagnostics import khat_threshold as khat_threshold
from fedmcmc.diagnostics import psis as psis
from fedmcmc.exact._correct import GOOD_KHAT as GOOD_KHAT
from fedmcmc.exact._correct import CorrectionTarget as CorrectionTarget
from fedmcmc.exact._correct import correct as correct
from fedmcmc.exact._correct import draws_needed as draws_needed
from fedmcmc.exact._corrected import Corrected as Corrected
from fedmcmc.exact._corrected import Round as Round
from fedmcmc.exact._corrected import draw_uniform as draw_uniform
from fedmcmc.exact._corrected import ravel_draws as ravel_draws
from fedmcmc.exact._tempered import Tempered as Tempered
from fedmcmc.exact._tempered import tempered as tempered
