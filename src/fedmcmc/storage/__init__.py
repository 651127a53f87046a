"""Checkpoints on disk: a killed run continues from them and ends with the same bits.

A checkpoint is a manifest with the part files that it lists, in a directory with one owner at a
time. `_checkpoints` defines the user's interface: `Checkpoint` for one run, and `resumable` for
programs of many calls. `_answers` stores clients' answers to questions, `_saving` writes and reads
checkpoints, `_files` their files, `_owner` locks the directory, and `_identity` computes the
identity of a run. The package imports `data`, `rounds`, `streaming`, `placement` and `records`.
"""

from fedmcmc.storage._answers import StoredAnswer as StoredAnswer
from fedmcmc.storage._checkpoints import Checkpoint as Checkpoint
from fedmcmc.storage._checkpoints import answers_of_program as answers_of_program
from fedmcmc.storage._checkpoints import checkpoint_of_call as checkpoint_of_call
from fedmcmc.storage._checkpoints import hands_on_interrupts as hands_on_interrupts
from fedmcmc.storage._checkpoints import reraise_interrupts as reraise_interrupts
from fedmcmc.storage._checkpoints import resumable as resumable
from fedmcmc.storage._checkpoints import without_resumable as without_resumable
from fedmcmc.storage._files import CheckpointError as CheckpointError
from fedmcmc.storage._files import versions as versions
from fedmcmc.storage._files import write_atomically as write_atomically
from fedmcmc.storage._identity import describe as describe
from fedmcmc.storage._identity import digest_of_call as digest_of_call
from fedmcmc.storage._identity import digest_of_rows as digest_of_rows
from fedmcmc.storage._identity import fingerprint as fingerprint
from fedmcmc.storage._owner import lock_checkpoint as lock_checkpoint
from fedmcmc.storage._saving import Progress as Progress
from fedmcmc.storage._saving import Saver as Saver
