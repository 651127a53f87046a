"""The server's links to its sites: who may join, and one exchange of messages with them."""

import logging
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from fedmcmc.deploy._frames import Frame, FrameError, Tag, printable
from fedmcmc.deploy._study import Study, software
from fedmcmc.deploy._transport import Transport

LOG = logging.getLogger("fedmcmc.deploy")
MOST_REASON = 2000
"""Characters of a site's reason that are shown."""
POLL_SECONDS = 1.0
"""How long to wait at a time, so that an interrupt is noticed."""


class SiteError(RuntimeError):
    """A site declines or cannot do what it was asked; the run ends."""


class SessionLost(Exception):
    """A site has joined without the session of the masks, so that no sum can be made in it."""


class Links:
    """Connections to the sites of a study.

    Parameters
    ----------
    study
        What the parties agreed on.
    transport
        The server's end of the network.
    timeout
        Seconds after which a site that does not answer is missing, where one may be.
    """

    def __init__(self, study: Study, transport: Transport, timeout: float) -> None:
        self.study, self.transport, self.timeout = study, transport, timeout
        self.joined: set[str] = set()
        self.refusals: dict[str, str] = {}
        # Of the masks; none is lost that a site which calls again still has.
        self.session, self.num_lost = "", 0
        self.beginning: Callable[[str], list[bytes]] = lambda site: []

    def exchange(
        self,
        requests: Mapping[str, bytes],
        kind: str,
        tag: Tag,
        read: Callable[[str, bytes], Any],
        *,
        may_miss: bool = False,
        masked: bool = False,
    ) -> dict[str, Any]:
        """Send each site its request and return what `read` makes of the answers.

        A site that joins meanwhile is told how the run began, and gets its request (again). Without
        `may_miss` this waits for all; with it, for those that are connected, for `timeout` seconds
        at most.

        Raises
        ------
        SiteError
            If a site declines.
        SessionLost
            If this is `masked`, and a site joins meanwhile without the masks' session.
        """
        answers: dict[str, Any] = {}
        num_lost = self.num_lost
        self._take_news()
        for site in requests.keys() & self.joined:
            self.transport.send(site, requests[site])
        begun, told = time.monotonic(), False
        while missing := requests.keys() - answers.keys():
            if masked and self.num_lost != num_lost:
                raise SessionLost
            waited = time.monotonic() - begun
            if may_miss and (waited > self.timeout or not missing & self.joined):
                break
            if not may_miss and not told and waited > self.timeout:
                told = True
                LOG.warning("waiting for %s", ", ".join(sorted(missing)))
            left = self.timeout - waited if may_miss else POLL_SECONDS
            news = self.transport.receive(max(min(POLL_SECONDS, left), 0.001))
            if news is None:
                continue
            site, data = news
            frame = self._understood(site, data, requests)
            if frame is None or site not in missing or frame.header.get("tag") != list(tag):
                continue  # late answers are dropped here
            if frame.kind in ("declined", "error"):
                raise SiteError(f"{site}: {printable(frame.header.get('reason'), MOST_REASON)}")
            if frame.kind != kind:
                continue
            try:
                answers[site] = read(site, frame.body)
            except FrameError as error:
                raise SiteError(f"{site} sent an answer that is none: {printable(error)}") from None
        if masked and self.num_lost != num_lost:
            raise SessionLost
        return answers

    def wait_for_all(self) -> None:
        """Wait until all sites have joined."""
        while missing := self.study.sites.keys() - self.joined:
            news = self.transport.receive(POLL_SECONDS)
            if news is not None:
                self._understood(*news, {})
            elif LOG.isEnabledFor(logging.INFO):
                LOG.info("waiting for %s", ", ".join(sorted(missing)))

    def _take_news(self) -> None:
        """Take in who has joined or left, and what comes too late."""
        while (news := self.transport.receive(0.0)) is not None:
            self._understood(*news, {})

    def _understood(
        self, site: str, data: bytes | None, requests: Mapping[str, bytes]
    ) -> Frame | None:
        """Return a message of a site that has joined; deal with those that join or leave."""
        if site not in self.study.sites:
            return None
        if data is None:
            self.joined.discard(site)
            LOG.info("%s has left", site)
            return None
        try:
            frame = Frame.parse(data)
        except FrameError as error:
            LOG.warning("%s: a message was not understood: %s", site, printable(error))
            return None
        if frame.kind != "hello":
            return frame if site in self.joined else None
        reason = self._objection(site, frame.header)
        if reason:
            self.joined.discard(site)
            self.refusals[site] = reason
            self.transport.send(site, Frame("refused", {"reason": reason}).to_bytes())
            warnings.warn(f"{site} is not taken: {reason}", RuntimeWarning, stacklevel=2)
            return None
        LOG.info("%s has joined", site)
        if not self.session or frame.header.get("session") != self.session:
            self.session = ""
            self.num_lost += 1
        self.joined.add(site)
        self.refusals.pop(site, None)
        self.transport.send(site, Frame("welcome", {"study": self.study.digest}).to_bytes())
        for message in self.beginning(site):
            self.transport.send(site, message)
        if site in requests:
            self.transport.send(site, requests[site])
        return None

    def _objection(self, site: str, header: dict[str, Any]) -> str:
        """Return why a site that says `header` of itself is not taken; empty if it is."""
        if header.get("site") != site:
            name = printable(repr(header.get("site")))
            return f"it is registered as {site!r} and calls itself {name}."
        if header.get("study") != self.study.digest:
            digest = printable(repr(header.get("study")))
            return (
                f"its study is another one (digest {digest}, the server's is "
                f"{self.study.digest!r}): compare settings, sizes, columns and files."
            )
        theirs, ours = header.get("software"), software()
        if not isinstance(theirs, dict):
            return "it does not say which software it runs."
        for name in ours:
            if theirs.get(name) != ours[name]:
                version = printable(theirs.get(name))
                return f"{name} is {version} there and {ours[name]} at the server."
        if header.get("kernels") != self.study.kernel_digests:
            return "the study's files make other kernels there: their dependencies differ."
        return ""
