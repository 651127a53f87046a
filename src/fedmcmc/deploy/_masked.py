"""The server's part in masks: it forwards signed messages and adds words that it cannot read."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from fedmcmc.deploy._frames import Frame, FrameError, Tag, pack
from fedmcmc.deploy._links import Links, SessionLost
from fedmcmc.deploy._masks import STAGES

if TYPE_CHECKING:
    from fedmcmc.deploy.secure import MaskTag

Requests = Callable[[dict[str, Any]], dict[str, bytes]]


class MaskedSums:
    """Sums over all sites of a study under masks."""

    def __init__(self, links: Links) -> None:
        self.links, self.names = links, list(links.study.sites)

    def total(
        self, tag: Tag, place: tuple[int, int, bool], num_words: int, requests: Requests
    ) -> np.ndarray:
        """Return the sum ``[num_words]`` uint64 of all sites' words.

        If a site loses the session, all answers are void and a new session begins. In it all sites
        send the same words again, under other masks. `place` has the number of the phase, the
        number of phases, and true in the set-up; `requests` returns the sites' requests from the
        entry ``masks`` of their headers.
        """
        from fedmcmc.deploy._sums import MaskTag, masked_bytes, unmask

        number, num_phases, is_setup = place
        mask_tag = MaskTag.of_phase(tag.round, 0, number, num_phases, setup=is_setup)

        def read(site: str, data: bytes) -> np.ndarray:
            expected = (self.links.session, mask_tag, self.names.index(site), num_words)
            return _read_words(data, expected)

        while True:
            try:
                if not self.links.session:
                    self._open_session(tag.run)
                masks = {
                    "session": self.links.session,
                    "attempt": mask_tag.attempt,
                    "sites": list(range(len(self.names))),
                }
                answers = self.links.exchange(
                    requests(masks),
                    "answer",
                    tag,
                    read,
                    max_bytes=masked_bytes(num_words),
                    masked=True,
                )
            except SessionLost:
                continue
            return unmask(list(answers.values()))

    def _open_session(self, run: str) -> None:
        """Forward the messages with which the sites agree on keys."""
        from fedmcmc.deploy._session import session_identifier

        number = time.time_ns()
        forwarded: list[list[bytes]] = [[]]
        for stage in STAGES:
            tag = Tag(run, -1, STAGES.index(stage), number)
            request = Frame(stage, {"tag": list(tag)}, pack(*forwarded[-1])).to_bytes()
            requests = dict.fromkeys(self.names, request)
            answers = self.links.exchange(
                requests, "answer", tag, lambda site, data: data, masked=True
            )
            forwarded.append([answers[site] for site in self.names])
        hellos = forwarded[1]
        self.links.session = session_identifier(self.links.study.consortium, hellos).hex()


def _read_words(data: bytes, expected: "tuple[str, MaskTag, int, int]") -> np.ndarray:
    """Return the masked words of a site; raise `FrameError` unless they are the requested ones.

    Expected are the session, the tag, the number of the site, and the number of words.
    """
    from fedmcmc.deploy.secure import read_masked

    try:
        identifier, message_tag, number, words = read_masked(data)
    except ValueError as error:
        raise FrameError(str(error)) from None
    if (identifier.hex(), message_tag, number, words.size) != expected:
        raise FrameError("The masked words are not the requested ones.")
    return words
