"""The rows of all clients: stores, loaders and partitions.

A step reaches rows through `fold`, `gather` and `own_rows` only. What runs on the data is no
business of this room, which imports the ground floor.
"""

from fedmcmc.data import _partition as partition
from fedmcmc.data._federated import CHUNK_ROWS as CHUNK_ROWS
from fedmcmc.data._federated import FederatedData as FederatedData
from fedmcmc.data._federated import fold as fold
from fedmcmc.data._federated import gather as gather
from fedmcmc.data._federated import own_rows as own_rows
from fedmcmc.data._federated import single_chunk as single_chunk
from fedmcmc.data._layouts import AXIS as AXIS
from fedmcmc.data._layouts import CHAINS as CHAINS
from fedmcmc.data._layouts import Layout as Layout
from fedmcmc.data._layouts import Part as Part
from fedmcmc.data._layouts import layout_of as layout_of
from fedmcmc.data._layouts import state_specs as state_specs
from fedmcmc.data._loaders import ClientLoader as ClientLoader
from fedmcmc.data._processes import agreed as agreed
from fedmcmc.data._processes import all_equal as all_equal
from fedmcmc.data._processes import combined as combined
from fedmcmc.data._processes import is_first as is_first
from fedmcmc.data._processes import on_host as on_host
from fedmcmc.data._processes import on_words as on_words
from fedmcmc.data._processes import put as put
from fedmcmc.data._processes import several as several
from fedmcmc.data._totals import total_of_clients as total_of_clients
