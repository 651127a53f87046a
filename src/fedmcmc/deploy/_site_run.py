"""State of a run at a site, in memory and on the site's disk."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc import wire
from fedmcmc.deploy._disk import Disk
from fedmcmc.deploy._frames import FrameError, Refused, decode, digest_of, unpack
from fedmcmc.deploy._programs import init_client_states, select_chains, stack_chains
from fedmcmc.deploy._shapes import RunShapes
from fedmcmc.pytrees import trees
from fedmcmc.types import ArrayTree, Client, FederatedKernel


@dataclass
class SiteRun:
    """Run in which a site takes part."""

    site: str
    disk: Disk
    name: str
    attempt: int
    kernel: FederatedKernel
    num_chains: int
    generator: Any  # of the server's keys
    key_like: jax.ShapeDtypeStruct  # words of one key
    keys: Array | None  # [num_chains], if the study is reproducible
    shapes: RunShapes
    readers: list[Callable[[bytes], ArrayTree]]  # decoders of broadcasts, one per phase
    digest: str  # of the server's description of the run
    num_numbers: list[int]  # in a message and report of one chain, one entry per phase
    # State that the server has counted, leaves [num_chains, ...]; `None` before the first round.
    state: ArrayTree = None
    answered: tuple[int, int] = (-1, -1)  # round and phase of the last answer
    pending: ArrayTree = None  # state after the last answer, if the server counts it
    # Digests of everything the server sent that produced the two states. Clients' keys depend on
    # them, and under masks they must be the same at all sites.
    origin: str = ""
    pending_origin: str = ""
    _encoded: tuple[ArrayTree, bytes] = (None, b"")  # the next round encodes the same state again

    def __post_init__(self) -> None:
        if not self.has_client_state:
            self.state = self.pending = self.shapes.client

    def encode(self, state: ArrayTree) -> bytes:
        """Return a state of all chains as bytes."""
        if state is not self._encoded[0]:
            self._encoded = state, wire.encode([state])
        return self._encoded[1]

    @cached_property
    def has_private_draws(self) -> bool:
        """If true, clients draw from keys that only the site can compute."""
        return self.keys is None and not trees.is_empty([p.private for p in self.shapes.phases])

    @property
    def has_client_state(self) -> bool:
        """If true, this kernel's clients store a state between rounds."""
        return bool(jax.tree.leaves(self.shapes.client))

    def start(self, client: Client, body: bytes) -> None:
        """Compute the client's first state from its rows and the first broadcast."""
        if self._recall():
            return
        self.disk.begin(self.name)
        like = self.shapes.phases[0].broadcast
        broadcasts = stack_chains([decode(part, like) for part in unpack(body, self.num_chains)])
        self.state = self.pending = init_client_states(self.kernel, client, broadcasts)
        self.answered = (-1, -1)
        self.origin = self.pending_origin = digest_of(b"start", self.digest.encode(), body)
        self.save()

    def resume(self, round_: int, header: dict[str, Any], *, masked: bool) -> None:
        """Return to the state before the round from which the server continues.

        The state is from this run or from the run named in `header`, whose files stay unchanged.
        """
        if self._recall():
            return
        name = str(header.get("run", self.name))
        is_same_run = name == self.name
        marked = self.disk.marked(name, round_, forget=is_same_run)
        if marked is not None:
            origin, encoded = unpack(marked, 2)
            self.state = self.pending = self._decode_state(encoded)  # as counted at that time
            self.origin = self.pending_origin = origin.decode()
            self.answered = tuple(header["last"] or (-1, -1))
        elif self._read(name) is None or self.answered > (round_, 0):
            raise Refused(
                f"{self.site} has no state of round {round_} of this run, from which the server "
                "continues: its folder does not belong to this run."
            )
        else:
            self.settle(header, masked=masked)
        if not is_same_run:
            self.disk.begin(self.name)
        self.save()

    def settle(self, header: dict[str, Any], *, masked: bool) -> None:
        """Adopt the pending state in the chains in which the server counted the last answer."""
        last_counted, counted = header["last"], header["counted"]
        if last_counted is None or tuple(last_counted) != self.answered:
            is_ahead = last_counted is not None and tuple(last_counted) > self.answered
            if self.has_client_state and is_ahead:
                raise Refused(
                    f"The server has counted an answer of {self.site} to round {last_counted[0]} "
                    "that is not on its disk: its folder does not belong to this run."
                )
            self.pending_origin = self.origin
            self.pending = self.state
            return
        if len(counted) != self.num_chains:
            raise FrameError("A message does not state for every chain if the answer counted.")
        if not all(counted):
            if masked:
                raise Refused("Under masks a server counts the answers of all chains or of none.")
            self.pending = select_chains(np.asarray(counted, bool), self.pending, self.state)
            if self.pending_origin != self.origin:  # it is not settled already
                chains = repr([bool(chain) for chain in counted])
                parts = (self.origin, self.pending_origin, chains)
                self.pending_origin = digest_of(*(part.encode() for part in parts))
        self.origin = self.pending_origin
        self.state = self.pending

    def save(self) -> None:
        """Write both states to the disk."""
        if self.has_client_state:
            origins = [self.origin, self.pending_origin]
            header = {"attempt": self.attempt, "answered": list(self.answered), "origins": origins}
            self.disk.write(self.name, header, self.encode(self.state), self.encode(self.pending))

    def _recall(self) -> bool:
        """Return true if this process, or its predecessor, already has a state of this attempt."""
        if self.state is not None or self._read(self.name) == self.attempt:
            return True
        self.state = self.pending = None
        self.answered = (-1, -1)
        return False

    def _read(self, name: str) -> int | None:
        """Read the state of a run from the disk; return its attempt, ``None`` without a state."""
        stored = self.disk.read(name, 2)
        if stored is None:
            return None
        header, parts = stored
        self.state, self.pending = map(self._decode_state, parts)
        self.answered = tuple(header["answered"])
        self.origin, self.pending_origin = header["origins"]
        attempt: int = header["attempt"]
        return attempt

    def _decode_state(self, data: bytes) -> ArrayTree:
        like = jax.tree.map(
            lambda s: jax.ShapeDtypeStruct((self.num_chains, *s.shape), s.dtype), self.shapes.client
        )
        return jax.tree.map(jnp.asarray, wire.decode(data, [like])[0])
