"""Participation rules: the clients of a round, and the weights of their messages.

A rule gets the number of clients and a key, never rows. It imports the random streams.
"""

from fedmcmc.participation._participation import bernoulli as bernoulli
from fedmcmc.participation._participation import categorical as categorical
from fedmcmc.participation._participation import cohorts_of as cohorts_of
from fedmcmc.participation._participation import full as full
from fedmcmc.participation._participation import mean_share as mean_share
from fedmcmc.participation._participation import pooled as pooled
from fedmcmc.participation._participation import uniform as uniform
