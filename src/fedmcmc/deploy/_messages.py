"""Messages between the server and its sites in a run: encoding of requests, decoding of answers."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from fedmcmc import wire
from fedmcmc.deploy._frames import (
    PART_BYTES,
    Frame,
    FrameError,
    Tag,
    checksum,
    decode,
    digest_of,
    pack,
    unpack,
)
from fedmcmc.deploy._programs import shared_words, take_chain
from fedmcmc.deploy._shapes import RunShapes, max_num_bytes
from fedmcmc.deploy._study import Study
from fedmcmc.deploy._words import to_words
from fedmcmc.types import ArrayTree, Broadcast, FederatedKernel


class AtServer(NamedTuple):
    """The server's record of its sites, in place of the clients' states."""

    # Copies of the clients' memories if decoding needs them, one entry per phase, leaves
    # [num_chains, num_clients, ...].
    memories: tuple[ArrayTree, ...]
    # Round and phase of each site's last accepted answer, [num_chains, num_clients, 2] int32; -1
    # before the first answer.
    last: ArrayTree
    counted: ArrayTree  # [num_chains, num_clients] bool, chains that counted this answer
    run: ArrayTree  # [num_chains, 32] uint8, name of the run under which sites store their states

    def verdict(self, index: int) -> dict[str, Any]:
        """Return the server's verdict on a site's last answer, for the header of a message."""
        last_answer = np.asarray(self.last)[0, index].tolist()
        counted = np.asarray(self.counted)[:, index].tolist()
        return {"last": None if last_answer[0] < 0 else last_answer, "counted": counted}


class SiteShare(NamedTuple):
    """A site's chains in a round, and its weights in them."""

    on: np.ndarray  # [num_chains] bool
    weight: np.ndarray  # [num_chains]

    @classmethod
    def of_site(
        cls, index: int, ids: np.ndarray, weight: np.ndarray, active: np.ndarray
    ) -> "SiteShare":
        """Return the share of a site in a cohort ``[cohort_size, num_chains]``."""
        is_site = (ids == index) & active
        slot = is_site.argmax(axis=0)  # a client that a cohort holds twice answers once
        return cls(is_site.any(axis=0), weight[slot, np.arange(ids.shape[1])])


class RunMessages:
    """Messages of one run, for all of its chains together."""

    def __init__(
        self,
        study: Study,
        kernel: FederatedKernel,
        keys: Array,
        shapes: RunShapes,
        name: str,
        attempt: int,
    ) -> None:
        self.names, self._name, self._attempt = list(study.sites), name, attempt
        self._keys, self._setup_shapes = keys, shapes.setup
        self._marks: dict[str, list[int]] = {site: [] for site in self.names}
        self._rounds_to_keep: list[int] = []
        # Sites draw all other numbers from their own secrets, or from the keys that `begin` sends.
        self._sends_shared = bool(jax.tree.leaves(shapes.shared)) and not study.reproducible
        # One entry per phase: decoders of code and report of a chain, and zeros instead of both.
        self._readers = [
            (wire.make_decoder(x.code), wire.make_decoder(x.report)) for x in shapes.phases
        ]
        self.zeros = [
            jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), (x.code, x.report))
            for x in shapes.phases
        ]
        # Largest numbers of bytes of an answer, in the set-up and in a phase.
        self.max_setup_bytes = [len(keys) * (PART_BYTES + max_num_bytes(x)) for x in shapes.setup]
        self.max_bytes = [
            len(keys) * (2 * PART_BYTES + max_num_bytes(x.code) + max_num_bytes(x.report))
            for x in shapes.phases
        ]
        words, numbers = study.words_of(kernel)
        position, _ = to_words(shapes.setup_broadcast.position, study.functions)
        words_of_keys = wire.encode(jax.random.key_data(keys))
        header = {
            "tag": list(self.tag(-1)),
            "kernel": words,
            "position": position,
            "chains": len(keys),
            "generator": str(jax.random.key_impl(keys)),
            # Sites derive their keys from this digest too, so runs with other keys are independent.
            "keys": digest_of(words_of_keys),
        }
        if study.row_ranges:
            header["rows"] = list(study.sites.values())
        parts = [numbers, words_of_keys] if study.reproducible else [numbers]
        # Message that starts the run at a site.
        self.begin = Frame("begin", header, pack(*parts)).to_bytes()

    def tag(self, round_: int, phase: int = -1) -> Tag:
        """Return the tag of a message in a phase of a round."""
        return Tag(self._name, round_, phase, self._attempt)

    def mark(self, round_: int, keep: list[int]) -> None:
        """Request that sites store their states of a round, and keep stored states of `keep`."""
        self._rounds_to_keep = keep
        for marks in self._marks.values():
            marks[:] = sorted({*marks, round_} & {round_, *keep})

    def clear_marks(self, site: str) -> None:
        """Remove the marks of a site that has answered, and so has stored its states."""
        self._marks[site] = []

    def encode_setup(
        self, tag: Tag, broadcast: Broadcast, masks: dict[str, Any] | None = None
    ) -> dict[str, bytes]:
        """Return the requests for a sum before the first round."""
        header: dict[str, Any] = {"tag": list(tag)}
        if masks is not None:
            header["masks"] = masks
        body = self._pack_chains(broadcast)
        return dict.fromkeys(self.names, Frame("setup", header, body).to_bytes())

    def decode_setup(self, data: bytes, phase: int) -> list[ArrayTree]:
        """Return the codes of all chains in an answer before the first round."""
        like = self._setup_shapes[phase]
        return [decode(part, like) for part in unpack(data, len(self._keys))]

    def encode_start(self, tag: Tag, broadcast: Broadcast) -> dict[str, bytes]:
        """Return the requests to compute the first states."""
        frame = Frame("start", {"tag": list(tag)}, self._pack_chains(broadcast))
        return dict.fromkeys(self.names, frame.to_bytes())

    def encode_resume(self, tag: Tag, at_server: AtServer) -> dict[str, bytes]:
        """Return the requests to return to stored states."""
        header = {"tag": list(tag), "run": bytes(np.asarray(at_server.run)[0]).hex()}
        return {
            site: Frame("resume", header | at_server.verdict(i)).to_bytes()
            for i, site in enumerate(self.names)
        }

    def encode_step(
        self,
        tag: Tag,
        participants: Mapping[str, SiteShare],
        broadcast: Broadcast,
        at_server: AtServer,
        masks: dict[str, Any] | None = None,
    ) -> dict[str, bytes]:
        """Return the request of a phase for each participant."""
        bodies: dict[bytes, tuple[bytes, int]] = {}  # body and checksum by the chains of a site
        previous_header, request = None, b""  # most sites receive the same message
        shared: Any = None
        if self._sends_shared:
            shared = np.asarray(shared_words(self._keys, tag.round))
        requests = {}
        for site, share in participants.items():
            header = {
                "tag": list(tag),
                "weights": share.weight.tolist(),
                "active": share.on.tolist(),
                "marks": self._marks[site],
                "keep": self._rounds_to_keep,
                **at_server.verdict(self.names.index(site)),
            }
            if masks is not None:
                header["masks"] = masks
            if header == previous_header:
                requests[site] = request
                continue
            chains = share.on.tobytes()
            if chains not in bodies:
                on = np.flatnonzero(share.on).tolist()
                parts = [wire.encode(take_chain(broadcast, c)) for c in on]
                if shared is not None:
                    parts.append(wire.encode(shared[on]))
                body = pack(*parts)
                bodies[chains] = body, checksum(body)
            request = Frame("step", header, bodies[chains][0]).to_bytes(bodies[chains][1])
            requests[site], previous_header = request, header
        return requests

    def decode_answer(self, data: bytes, on: np.ndarray, phase: int) -> list[ArrayTree]:
        """Return code and report of every chain, zeros in chains without the site."""
        num = int(on.sum())
        parts = unpack(memoryview(data), 2 * num)
        read_code, read_report = self._readers[phase]
        try:
            codes = [read_code(part) for part in parts[:num]]
            reports = [read_report(part) for part in parts[num:]]
        except ValueError as error:
            raise FrameError(str(error)) from None
        pairs = zip(codes, reports, strict=True)
        return [next(pairs) if is_on else self.zeros[phase] for is_on in on]

    def _pack_chains(self, broadcast: Broadcast) -> bytes:
        return pack(*(wire.encode(take_chain(broadcast, c)) for c in range(len(self._keys))))
