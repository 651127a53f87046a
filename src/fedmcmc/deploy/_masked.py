"""The server's part in masks: it passes on what sites sign, and adds words that it cannot read."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from fedmcmc.deploy._frames import Frame, FrameError, Tag, pack
from fedmcmc.deploy._links import Links, SessionLost
from fedmcmc.deploy._masks import STAGES

Requests = Callable[[dict[str, Any]], dict[str, bytes]]


class MaskedSums:
    """Sums over all sites of a study under masks.

    Parameters
    ----------
    links
        To the sites.
    """

    def __init__(self, links: Links) -> None:
        self.links, self.names = links, list(links.study.sites)

    def total(
        self, tag: Tag, place: tuple[int, int, bool], num_words: int, requests: Requests
    ) -> np.ndarray:
        """Return the sum ``[num_words]`` uint64 of all sites' words.

        Where a site is lost, what came so far is void, and another session is made. In it all sites
        send the same words again, under other masks.

        Parameters
        ----------
        tag
            Of the exchange.
        place
            ``(number of the phase, number of phases, whether of the set-up)``.
        num_words
            That each site sends.
        requests
            From what is said of the masks to the sites' requests.
        """
        from fedmcmc.deploy.secure import MaskTag, masked_bytes, unmask

        number, num_phases, is_setup = place
        mask_tag = MaskTag.of_phase(tag.round, 0, number, num_phases, setup=is_setup)

        def read(site: str, data: bytes) -> np.ndarray:
            expected = (self.links.session, mask_tag, self.names.index(site), num_words)
            return _words_in(data, *expected)

        while True:
            try:
                if not self.links.session:
                    self._open_session(tag.run)
                masks = {
                    "session": self.links.session,
                    "attempt": mask_tag.attempt,
                    "sites": list(range(len(self.names))),
                }
                asked = requests(masks)
                most = masked_bytes(num_words)
                answers = self.links.exchange(
                    asked, "answer", tag, read, most_bytes=most, masked=True
                )
            except SessionLost:
                continue
            return unmask(list(answers.values()))

    def _open_session(self, run: str) -> None:
        """Pass on what the sites need to agree on keys."""
        from fedmcmc.deploy.secure import session_identifier

        number = time.time_ns()
        passed: list[list[bytes]] = [[]]
        for stage in STAGES:
            tag = Tag(run, -1, STAGES.index(stage), number)
            request = Frame(stage, {"tag": list(tag)}, pack(*passed[-1])).to_bytes()
            asked = dict.fromkeys(self.names, request)
            answers = self.links.exchange(
                asked, "answer", tag, lambda site, data: data, masked=True
            )
            passed.append([answers[site] for site in self.names])
        hellos = passed[1]
        self.links.session = session_identifier(self.links.study.consortium, hellos).hex()


def _words_in(data: bytes, session: str, tag: Any, index: int, num_words: int) -> np.ndarray:
    from fedmcmc.deploy.secure import read_masked

    try:
        identifier, found, number, words = read_masked(data)
    except ValueError as error:
        raise FrameError(str(error)) from None
    if (identifier.hex(), found, number, words.size) != (session, tag, index, num_words):
        raise FrameError("These are not the masked words that were asked for.")
    return words
