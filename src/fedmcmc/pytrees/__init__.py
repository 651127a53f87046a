"""Arithmetic on pytrees, schedules of the round, branches and convolutions under `vmap`.

Every room may use it. It knows arrays and nothing of models, clients or rounds, and imports the
ground's types alone.
"""

from fedmcmc.pytrees import _convolutions as convolutions
from fedmcmc.pytrees import _schedules as schedules
from fedmcmc.pytrees import _trees as trees
from fedmcmc.pytrees._branches import largest_of_batch as largest_of_batch
from fedmcmc.pytrees._branches import where_any as where_any
from fedmcmc.pytrees._precision import in_single_precision as in_single_precision
from fedmcmc.pytrees._trees import is_key as is_key
from fedmcmc.pytrees._trees import named_leaves as named_leaves
from fedmcmc.pytrees._trees import num_bytes as num_bytes
from fedmcmc.pytrees._trees import variables as variables
