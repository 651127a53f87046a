"""Where clients, chains and states lie: devices, meshes, processes, the host.

Results do not depend on it, up to rounding where the documentation says so. It imports data and
types, and knows no kernel.
"""

from fedmcmc.placement import _distributed as distributed
from fedmcmc.placement._distributed import ADDRESS as ADDRESS
from fedmcmc.placement._distributed import COUNT as COUNT
from fedmcmc.placement._distributed import INDEX as INDEX
from fedmcmc.placement._meshes import Spread as Spread
from fedmcmc.placement._meshes import check_mesh as check_mesh
from fedmcmc.placement._meshes import chosen_layout as chosen_layout
from fedmcmc.placement._placing import Placed as Placed
from fedmcmc.placement._placing import place as place
from fedmcmc.placement._stores import HostStore as HostStore
from fedmcmc.placement._stores import read as read
from fedmcmc.placement._stores import write as write
from fedmcmc.placement._warden import WARDEN as WARDEN
