"""Rounds of communication: the steps of clients and server, and programs of many rounds.

Simulations, meshes and real sites all run kernels through this package. It does not depend on a
particular kernel, and it does no input or output.
"""

from fedmcmc.rounds._layout import CHAIN_AXIS as CHAIN_AXIS
from fedmcmc.rounds._layout import CLIENT_AXIS as CLIENT_AXIS
from fedmcmc.rounds._layout import SINGLE_DEVICE as SINGLE_DEVICE
from fedmcmc.rounds._layout import Buckets as Buckets
from fedmcmc.rounds._layout import Layout as Layout
from fedmcmc.rounds._layout import MeshLayout as MeshLayout
from fedmcmc.rounds._layout import MeshPart as MeshPart
from fedmcmc.rounds._layout import state_specs as state_specs
from fedmcmc.rounds._phases import ClientKeys as ClientKeys
from fedmcmc.rounds._phases import Prepared as Prepared
from fedmcmc.rounds._phases import Received as Received
from fedmcmc.rounds._phases import client_draws_like as client_draws_like
from fedmcmc.rounds._phases import client_step as client_step
from fedmcmc.rounds._phases import code_like as code_like
from fedmcmc.rounds._phases import cohort_of as cohort_of
from fedmcmc.rounds._phases import first_memories as first_memories
from fedmcmc.rounds._phases import initialize_received as initialize_received
from fedmcmc.rounds._phases import receive as receive
from fedmcmc.rounds._phases import server_step as server_step
from fedmcmc.rounds._program import PREPARED_BYTES as PREPARED_BYTES
from fedmcmc.rounds._program import Accumulators as Accumulators
from fedmcmc.rounds._program import Collect as Collect
from fedmcmc.rounds._program import Plan as Plan
from fedmcmc.rounds._program import Program as Program
from fedmcmc.rounds._program import RoundRecord as RoundRecord
from fedmcmc.rounds._program import Segment as Segment
from fedmcmc.rounds._program import first_accumulator_states as first_accumulator_states
from fedmcmc.rounds._program import run_rounds as run_rounds
from fedmcmc.rounds._program import run_segment as run_segment
from fedmcmc.rounds._program import update_accumulators as update_accumulators
from fedmcmc.rounds._simulate import RoundDraws as RoundDraws
from fedmcmc.rounds._simulate import RoundInfo as RoundInfo
from fedmcmc.rounds._simulate import Simulation as Simulation
from fedmcmc.rounds._simulate import prepare_round as prepare_round
from fedmcmc.rounds._simulate import run_round as run_round
from fedmcmc.rounds._simulate import simulate as simulate
from fedmcmc.rounds._starts import initialize as initialize
