"""Rows of all clients: data, loaders and partitions.

A step reads rows only through `fold`, `gather` and `own_rows`. The package imports only
`fedmcmc.types`, ``_checks`` and `fedmcmc.pytrees`.
"""

from fedmcmc.data import _partition as partition
from fedmcmc.data._descriptions import group_name as group_name
from fedmcmc.data._descriptions import in_words as in_words
from fedmcmc.data._descriptions import labels_of as labels_of
from fedmcmc.data._dictionary import STUDY_KEYS as STUDY_KEYS
from fedmcmc.data._dictionary import Dictionary as Dictionary
from fedmcmc.data._dictionary_columns import Column as Column
from fedmcmc.data._dictionary_columns import Rules as Rules
from fedmcmc.data._federated import CHUNK_ROWS as CHUNK_ROWS
from fedmcmc.data._federated import FederatedData as FederatedData
from fedmcmc.data._federated import fold as fold
from fedmcmc.data._federated import gather as gather
from fedmcmc.data._federated import own_rows as own_rows
from fedmcmc.data._federated import own_rows_in_groups as own_rows_in_groups
from fedmcmc.data._federated import single_chunk as single_chunk
from fedmcmc.data._groups import Grouped as Grouped
from fedmcmc.data._groups import GroupLabels as GroupLabels
from fedmcmc.data._groups import max_groups as max_groups
from fedmcmc.data._groups import own_groups as own_groups
from fedmcmc.data._groups import row_values as row_values
from fedmcmc.data._inputs import constructor_of as constructor_of
from fedmcmc.data._inputs import is_table as is_table
from fedmcmc.data._known_levels import check_levels as check_levels
from fedmcmc.data._known_levels import code_rows as code_rows
from fedmcmc.data._loaders import ClientLoader as ClientLoader
from fedmcmc.data._rows import Levels as Levels
from fedmcmc.data._rows import host_view as host_view
from fedmcmc.data._rows import row_dtype as row_dtype
from fedmcmc.data._rows import warn_caller as warn_caller
from fedmcmc.data._rows import widened_dtype as widened_dtype
