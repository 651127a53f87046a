"""Runs of a kernel (`sample`), and consortia, which give a server sums over its clients.

A run is a loop on the host around the compiled program of `fedmcmc.rounds`. It adds warnings,
stopping rules, records and checkpoints.
"""

from fedmcmc.runs._consortium import Consortium as Consortium
from fedmcmc.runs._consortium import SimulatedConsortium as SimulatedConsortium
from fedmcmc.runs._consortium import Sum as Sum
from fedmcmc.runs._consortium import as_consortium as as_consortium
from fedmcmc.runs._consortium import check_fits_sum as check_fits_sum
from fedmcmc.runs._executors import Executor as Executor
from fedmcmc.runs._executors import RemoteClients as RemoteClients
from fedmcmc.runs._executors import RunHalted as RunHalted
from fedmcmc.runs._executors import SegmentWork as SegmentWork
from fedmcmc.runs._pace import pace_of as pace_of
from fedmcmc.runs._run import BUFFER_BYTES as BUFFER_BYTES
from fedmcmc.runs._sample import local_positions as local_positions
from fedmcmc.runs._sample import sample as sample
from fedmcmc.runs._starts import check_counts as check_counts
from fedmcmc.runs._starts import check_data as check_data
from fedmcmc.runs._starts import choose_layout as choose_layout
from fedmcmc.runs._starts import start as start
from fedmcmc.runs._starts import start_positions as start_positions
from fedmcmc.runs._unjudged import missing_target as missing_target
from fedmcmc.runs._watch import NonFiniteError as NonFiniteError
from fedmcmc.runs._watch import judge as judge
from fedmcmc.runs._watch import reason_not_judged as reason_not_judged
