"""Checkpoints: what is written to disk so that a killed run goes on to the same bytes.

One format, the identity of the run beside it, and `resumable` for programs of many calls. It
imports records, and no run.
"""

from fedmcmc.storage._checkpoints import Checkpoint as Checkpoint
from fedmcmc.storage._fingerprint import digest as digest
from fedmcmc.storage._fingerprint import digests_of_clients as digests_of_clients
from fedmcmc.storage._fingerprint import fingerprint as fingerprint
from fedmcmc.storage._resuming import alone as alone
from fedmcmc.storage._resuming import checkpoint_of_call as checkpoint_of_call
from fedmcmc.storage._resuming import ending_programs as ending_programs
from fedmcmc.storage._resuming import hands_on_interrupts as hands_on_interrupts
from fedmcmc.storage._resuming import resumable as resumable
from fedmcmc.storage._saving import Saved as Saved
from fedmcmc.storage._saving import Saver as Saver
