"""The server's links to its sites: who may join, and one exchange of messages with them."""

import logging
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from fedmcmc.deploy._frames import JOIN_BYTES, Frame, FrameError, Tag, printable
from fedmcmc.deploy._study import Study, software
from fedmcmc.deploy._transport import Transport
from fedmcmc.runs import RunHalted

LOG = logging.getLogger("fedmcmc.deploy")
MOST_REASON = 2000
"""Characters of a site's reason that are shown."""
POLL_SECONDS = 1.0
"""How long to wait at a time, so that an interrupt is noticed."""
MOST_PROCESSES = 100
"""Former processes of a site that the server remembers."""
PROCESS_LETTERS = 64
MOST_NEWS = 8
"""Messages per site that are taken in before a request: who sends without end must not stop it."""


class SiteError(RunHalted):
    """A site declines, or cannot do what the server asks; the run ends.

    Attributes
    ----------
    samples
        The `fedmcmc.Samples` that were kept before; ``None`` before the first round.
    """


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
        # Processes of each site in the order in which they first joined, and sites of which two
        # were found to run.
        self._processes: dict[str, list[str]] = {}
        self._twice: set[str] = set()
        self._most_bytes = JOIN_BYTES
        self._num_unread: dict[str, int] = {}  # messages of each site that were not understood
        self.problems: dict[str, str] = {}  # of sites that did not do what was asked last
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
        most_bytes: int = 0,
        may_miss: bool = False,
        masked: bool = False,
    ) -> dict[str, Any]:
        """Send each site its request and return what `read` makes of the answers.

        An answer's body has at most `most_bytes`. A longer message is not taken, nor held in memory
        where the transport can refuse it; late answers to earlier requests may be as long as those.

        A site that joins meanwhile is told how the run began, and gets its request (again). Without
        `may_miss` this waits for all; with it, for those that are connected, for `timeout` seconds
        at most. A site that declines is then missing, and `problems` holds its reason.

        Raises
        ------
        SiteError
            If a site declines, and none may be missing.
        SessionLost
            If this is `masked`, and a site joins meanwhile without the masks' session.
        """
        answers: dict[str, Any] = {}
        self.problems = {}
        num_lost = self.num_lost
        self._most_bytes = max(self._most_bytes, JOIN_BYTES + most_bytes)
        for site in self.joined:
            self.transport.limit(site, self._most_bytes)
        self._take_news()
        for site in requests.keys() & self.joined:
            self.transport.send(site, requests[site])
        begun, told = time.monotonic(), False
        while missing := requests.keys() - answers.keys() - self.problems.keys():
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
                problem = printable(frame.header.get("reason"), MOST_REASON)
            elif frame.kind != kind:
                continue
            else:
                try:
                    answers[site] = read(site, frame.body)
                    continue
                except FrameError as error:
                    problem = f"its answer cannot be read: {printable(error)}"
            where = f" (in round {tag.round})" if tag.round >= 0 else ""
            if not may_miss:
                raise SiteError(f"{site}: {problem}{where}")
            self.problems[site] = f"{problem}{where}"
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
        for _ in range(MOST_NEWS * len(self.study.sites)):
            news = self.transport.receive(0.0)
            if news is None:
                return
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
            most = self._most_bytes if site in self.joined else JOIN_BYTES
            if len(data) > most:
                raise FrameError(f"{len(data):,} bytes are more than the expected {most:,}.")
            frame = Frame.parse(data)
        except FrameError as error:
            num = self._num_unread[site] = self._num_unread.get(site, 0) + 1
            if num.bit_count() == 1:  # 1, 2, 4, ...: they must not fill the disk with a log
                text = "%s: a message was not understood: %s (%d so far)"
                LOG.warning(text, site, printable(error), num)
            return None
        if frame.kind != "hello":
            return frame if site in self.joined else None
        reason = self._objection(site, frame.header)
        if reason:
            self.joined.discard(site)
            self.refusals[site] = reason
            told = {"reason": reason, "process": frame.header.get("process")}
            self.transport.send(site, Frame("refused", told).to_bytes())
            warnings.warn(f"{site} is not taken: {reason}", RuntimeWarning, stacklevel=2)
            return None
        LOG.info("%s has joined", site)
        if not self.session or frame.header.get("session") != self.session:
            self.session = ""
            self.num_lost += 1
        self.joined.add(site)
        self.refusals.pop(site, None)
        self.transport.limit(site, self._most_bytes)
        welcome = {"study": self.study.digest, "another_ended": site in self._twice}
        self._twice.discard(site)
        self.transport.send(site, Frame("welcome", welcome).to_bytes())
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
        process = header.get("process")
        if not isinstance(process, str) or not 0 < len(process) <= PROCESS_LETTERS:
            return "it does not say which of its processes it is."
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
        *former, last = self._processes.get(site) or [process]
        if process in former:
            self._twice.add(site)
            return (
                f"a newer process of {site} has joined, so two of them run: this one, the older, "
                f"ends. Run one process per site, and stop the other one if it is the wrong one."
            )
        if process != last:
            former.append(last)
        self._processes[site] = [*former[-MOST_PROCESSES:], process]
        return ""
