"""The server's connections to its sites: admission of sites and exchanges of messages."""

import logging
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from fedmcmc.deploy._frames import (
    JOIN_BYTES,
    MAX_REASON_LENGTH,
    Frame,
    FrameError,
    Tag,
    printable,
)
from fedmcmc.deploy._row_ranges import find_problem
from fedmcmc.deploy._study import Study, software
from fedmcmc.deploy._transport import Transport
from fedmcmc.runs import RunHalted

LOG = logging.getLogger("fedmcmc.deploy")
POLL_SECONDS = 1.0
"""Longest wait for a message; between waits the process notices an interrupt."""
MAX_PROCESSES = 100
"""Former processes of a site that the server stores."""
MAX_PROCESS_LENGTH = 64
"""Characters in the identifier of a site's process."""
MAX_QUEUED_MESSAGES = 8
"""Messages per site that are read before a request, so that a site cannot delay it forever."""


class SiteError(RunHalted):
    """Request that a site declines or cannot answer; it ends the run.

    Attributes
    ----------
    samples
        `fedmcmc.Samples` of the previous rounds; ``None`` before the first round.
    """


class SessionLost(Exception):
    """Session of masks that ended because a site joined without it."""


class Links:
    """Connections to the sites of a study.

    Parameters
    ----------
    study
        Study that the parties agreed on.
    transport
        The server's end of the network.
    timeout
        Seconds after which a site that does not answer is missing, if sites may be missing.

    Attributes
    ----------
    problems
        Problems of sites in the last exchange, by name.
    session, num_lost
        Identifier of the session of masks, empty without one, and number of lost sessions.
    beginning
        Function that returns the messages for a site that joins during a run.
    """

    def __init__(self, study: Study, transport: Transport, timeout: float) -> None:
        self.study, self.transport, self.timeout = study, transport, timeout
        self.joined: set[str] = set()
        self.refusals: dict[str, str] = {}
        self.num_rows: dict[str, int] = {}  # of sites with a range, when they first joined
        # Processes of each site in the order in which they first joined.
        self._processes: dict[str, list[str]] = {}
        self._duplicated: set[str] = set()  # sites with two running processes
        self._max_bytes = JOIN_BYTES
        self._num_unreadable: dict[str, int] = {}
        self.problems: dict[str, str] = {}
        self.session, self.num_lost = "", 0
        self.beginning: Callable[[str], list[bytes]] = lambda site: []

    def exchange(
        self,
        requests: Mapping[str, bytes],
        kind: str,
        tag: Tag,
        read: Callable[[str, bytes], Any],
        *,
        max_bytes: int = 0,
        may_miss: bool = False,
        masked: bool = False,
    ) -> dict[str, Any]:
        """Send each site its request and return the answers, decoded by `read`.

        An answer's body has at most `max_bytes`. Longer messages are dropped, and not stored in
        memory if the transport can reject them; late answers to earlier requests may be as long as
        these requests allowed.

        A site that joins meanwhile receives the beginning of the run and its request. Without
        `may_miss` the exchange waits for all sites. With it, the exchange waits for connected sites
        only, for at most `timeout` seconds; `problems` has the reasons of sites that decline.

        Raises
        ------
        SiteError
            If a site declines, and no site may be missing.
        SessionLost
            If the exchange is `masked`, and a site joins meanwhile without the session of masks.
        """
        answers: dict[str, Any] = {}
        self.problems = {}
        num_lost = self.num_lost
        self._max_bytes = max(self._max_bytes, JOIN_BYTES + max_bytes)
        for site in self.joined:
            self.transport.limit(site, self._max_bytes)
        self._read_queued()
        for site in requests.keys() & self.joined:
            self.transport.send(site, requests[site])
        start, has_logged = time.monotonic(), False
        while missing := requests.keys() - answers.keys() - self.problems.keys():
            if masked and self.num_lost != num_lost:
                raise SessionLost
            waited = time.monotonic() - start
            if may_miss and (waited > self.timeout or not missing & self.joined):
                break
            if not may_miss and not has_logged and waited > self.timeout:
                has_logged = True
                LOG.warning("waiting for %s", ", ".join(sorted(missing)))
            remaining = self.timeout - waited if may_miss else POLL_SECONDS
            message = self.transport.receive(max(min(POLL_SECONDS, remaining), 0.001))
            if message is None:
                continue
            site, data = message
            frame = self._admit(site, data, requests)
            if frame is None or site not in missing or frame.header.get("tag") != list(tag):
                continue  # a late answer
            if frame.kind in ("declined", "error"):
                problem = printable(frame.header.get("reason"), MAX_REASON_LENGTH)
            elif frame.kind != kind:
                continue
            else:
                try:
                    answers[site] = read(site, frame.body)
                    continue
                except FrameError as error:
                    problem = f"its answer cannot be read: {printable(error)}"
            place = f" (in round {tag.round})" if tag.round >= 0 else ""
            if not may_miss:
                raise SiteError(f"{site}: {problem}{place}")
            self.problems[site] = f"{problem}{place}"
        if masked and self.num_lost != num_lost:
            raise SessionLost
        return answers

    def wait_for_all(self) -> None:
        """Wait until all sites have joined."""
        while missing := self.study.sites.keys() - self.joined:
            message = self.transport.receive(POLL_SECONDS)
            if message is not None:
                self._admit(*message, {})
            elif LOG.isEnabledFor(logging.INFO):
                LOG.info("waiting for %s", ", ".join(sorted(missing)))

    def _read_queued(self) -> None:
        """Read queued messages: sites that joined or left, and late answers."""
        for _ in range(MAX_QUEUED_MESSAGES * len(self.study.sites)):
            message = self.transport.receive(0.0)
            if message is None:
                return
            self._admit(*message, {})

    def _admit(self, site: str, data: bytes | None, requests: Mapping[str, bytes]) -> Frame | None:
        """Return the message of a joined site; handle sites that join or leave."""
        if site not in self.study.sites:
            return None
        if data is None:
            self.joined.discard(site)
            LOG.info("%s has left", site)
            return None
        try:
            max_bytes = self._max_bytes if site in self.joined else JOIN_BYTES
            if len(data) > max_bytes:
                raise FrameError(f"{len(data):,} bytes are more than the expected {max_bytes:,}.")
            frame = Frame.parse(data)
        except FrameError as error:
            num = self._num_unreadable[site] = self._num_unreadable.get(site, 0) + 1
            if num.bit_count() == 1:  # 1, 2, 4, ..., so that the log cannot fill the disk
                text = "%s: a message was not understood: %s (%d so far)"
                LOG.warning(text, site, printable(error), num)
            return None
        if frame.kind != "hello":
            return frame if site in self.joined else None
        reason = self._find_objection(site, frame.header)
        if reason:
            self.joined.discard(site)
            self.refusals[site] = reason
            header = {"reason": reason, "process": frame.header.get("process")}
            self.transport.send(site, Frame("refused", header).to_bytes())
            warnings.warn(f"{site} was not accepted: {reason}", RuntimeWarning, stacklevel=2)
            return None
        LOG.info("%s has joined", site)
        if not self.session or frame.header.get("session") != self.session:
            self.session = ""
            self.num_lost += 1
        self.joined.add(site)
        self.refusals.pop(site, None)
        self.transport.limit(site, self._max_bytes)
        welcome = {"study": self.study.digest, "another_ended": site in self._duplicated}
        self._duplicated.discard(site)
        self.transport.send(site, Frame("welcome", welcome).to_bytes())
        for message in self.beginning(site):
            self.transport.send(site, message)
        if site in requests:
            self.transport.send(site, requests[site])
        return None

    def _find_objection(self, site: str, header: dict[str, Any]) -> str:
        """Return the reason to reject a site with this `header`, empty to accept it."""
        if header.get("site") != site:
            name = printable(repr(header.get("site")))
            return f"it is registered as {site!r} but its name is {name}."
        process = header.get("process")
        if not isinstance(process, str) or not 0 < len(process) <= MAX_PROCESS_LENGTH:
            return "its message lacks the identifier of its process."
        if header.get("study") != self.study.digest:
            digest = printable(repr(header.get("study")))
            return (
                f"its study differs from the server's (digest {digest}, the server's is "
                f"{self.study.digest!r}): compare settings, sizes, columns and files."
            )
        theirs, ours = header.get("software"), software()
        if not isinstance(theirs, dict):
            return "its message lacks the versions of its software."
        for name in ours:
            if theirs.get(name) != ours[name]:
                version = printable(theirs.get(name))
                return f"{name} is {version} at the site and {ours[name]} at the server."
        if header.get("kernels") != self.study.kernel_digests:
            return "the study's files create other kernels at the site: their dependencies differ."
        if site in self.study.row_ranges:
            num: Any = header.get("rows")
            problem = find_problem(self.study, site, num)
            if problem:
                return f"it {problem}"
            if num != self.num_rows.setdefault(site, num):
                return (
                    f"it has {num} rows, and had {self.num_rows[site]} when it joined first. If "
                    f"its rows have changed, start the server again."
                )
        *former, current = self._processes.get(site) or [process]
        if process in former:
            self._duplicated.add(site)
            return (
                f"a newer process of {site} has joined, so the server ends this older one. Run one "
                f"process per site; if the newer one is wrong, stop it and start this one again."
            )
        if process != current:
            former.append(current)
        self._processes[site] = [*former[-MAX_PROCESSES:], process]
        return ""
