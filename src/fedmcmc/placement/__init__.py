"""Placement of clients, chains and states on devices, meshes, processes and the host.

`Placement` is the user's object. `_layouts` assigns clients to devices, and `_placing` moves rows
there. `_distributed` connects processes, and `_processes` moves arrays between them. `_stores`
keeps states on the host. Results do not depend on the placement, except for documented rounding.
"""

from fedmcmc.placement import _distributed as distributed
from fedmcmc.placement._choice import MAX_BUCKET_OPERATIONS as MAX_BUCKET_OPERATIONS
from fedmcmc.placement._choice import NUM_BUCKETS as NUM_BUCKETS
from fedmcmc.placement._choice import choose_mesh as choose_mesh
from fedmcmc.placement._choice import devices_of_run as devices_of_run
from fedmcmc.placement._choice import has_idle_cores as has_idle_cores
from fedmcmc.placement._choice import idle_cores_hint as idle_cores_hint
from fedmcmc.placement._choice import spreads_chains_only as spreads_chains_only
from fedmcmc.placement._cores import num_cores as num_cores
from fedmcmc.placement._cores import use_all_cores as use_all_cores
from fedmcmc.placement._layouts import by_size as by_size
from fedmcmc.placement._layouts import mesh_layout_of as mesh_layout_of
from fedmcmc.placement._placement import Placement as Placement
from fedmcmc.placement._placement import check_fits as check_fits
from fedmcmc.placement._placing import PlacedData as PlacedData
from fedmcmc.placement._placing import place as place
from fedmcmc.placement._processes import all_equal as all_equal
from fedmcmc.placement._processes import broadcast_from_first as broadcast_from_first
from fedmcmc.placement._processes import has_other_processes as has_other_processes
from fedmcmc.placement._processes import is_first as is_first
from fedmcmc.placement._processes import merge_processes as merge_processes
from fedmcmc.placement._processes import on_host as on_host
from fedmcmc.placement._processes import on_words as on_words
from fedmcmc.placement._processes import put as put
from fedmcmc.placement._stores import HostStore as HostStore
from fedmcmc.placement._stores import read as read
from fedmcmc.placement._stores import write as write
