"""Arithmetic on pytrees, schedules over rounds, and branches and convolutions under `jax.vmap`.

Any package may import this one. It computes with arrays only, without models, clients or rounds,
and imports only `fedmcmc.types`.
"""

from fedmcmc.pytrees import _convolutions as convolutions
from fedmcmc.pytrees import _schedules as schedules
from fedmcmc.pytrees import _trees as trees
from fedmcmc.pytrees._branches import largest_of_batch as largest_of_batch
from fedmcmc.pytrees._branches import where_any as where_any
from fedmcmc.pytrees._operations import num_operations as num_operations
from fedmcmc.pytrees._precision import in_single_precision as in_single_precision
from fedmcmc.pytrees._trees import is_key as is_key
from fedmcmc.pytrees._trees import named_leaves as named_leaves
from fedmcmc.pytrees._trees import num_bytes as num_bytes
from fedmcmc.pytrees._trees import variables as variables
