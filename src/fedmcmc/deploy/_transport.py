"""Interface of a network between server and sites, and its implementation within a process."""

import queue
import threading
from collections.abc import Callable
from typing import Protocol

from fedmcmc.deploy._frames import Refused
from fedmcmc.deploy._site import Site


class Transport(Protocol):
    """The server's end of a network that authenticates the sender of each message.

    A site's first message after it has joined is its `Site.hello`. Messages of one connection
    arrive in order. If a connection breaks, its messages may be lost, and the site joins again.
    """

    def send(self, site: str, data: bytes) -> None:
        """Send bytes to a site; if it is not connected, drop them."""
        ...

    def receive(self, timeout: float) -> tuple[str, bytes | None] | None:
        """Return a site and its message (`None` if it left), or `None` after `timeout` seconds."""
        ...

    def limit(self, site: str, num_bytes: int) -> None:
        """Accept messages of at most `num_bytes` over a site's current connection.

        The initial limit is `JOIN_BYTES`. A longer message ends the connection unread.
        """
        ...

    def close(self) -> None:
        """End all connections."""
        ...


class LocalTransport:
    """Sites in threads of this process, for tests and rehearsals.

    One site computes at a time, because NumPyro can trace only one model at a time.

    Examples
    --------
    >>> local = LocalTransport()
    >>> local.receive(timeout=0.0) is None
    True
    """

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[tuple[str, bytes | None]] = queue.SimpleQueue()
        self._outboxes: dict[str, queue.SimpleQueue[bytes | None]] = {}
        self._threads: list[threading.Thread] = []
        self._lock, self._turns, self._closed = threading.Lock(), threading.Lock(), False
        self.refused: dict[str, str] = {}

    def join(self, site: Site, *, heard: Callable[[bytes, bytes], None] | None = None) -> None:
        """Connect a site, which answers in its own thread until `leave` or `close`.

        The transport calls `heard` with every message and its answer.
        """
        outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

        def serve() -> None:
            while (data := outbox.get()) is not None:
                try:
                    with self._turns:
                        answer = site.answer(data)
                except Refused as error:
                    self.refused[site.name] = str(error)
                    return
                if heard is not None:
                    heard(data, answer or b"")
                if answer is not None and self._outboxes.get(site.name) is outbox:
                    self._inbox.put((site.name, answer))

        thread = threading.Thread(target=serve, name=f"site {site.name}", daemon=True)
        with self._lock:
            if self._closed:
                return  # the transport is closed
            self.leave(site.name)
            self._outboxes[site.name] = outbox
            self._threads.append(thread)
            self._inbox.put((site.name, site.hello()))
            thread.start()

    def leave(self, name: str) -> None:
        """End a site's connection as if it had crashed: its current answer is lost."""
        outbox = self._outboxes.pop(name, None)
        if outbox is not None:
            outbox.put(None)
            self._inbox.put((name, None))

    def send(self, site: str, data: bytes) -> None:
        """Send bytes to a site; if it is not connected, drop them."""
        outbox = self._outboxes.get(site)
        if outbox is not None:
            outbox.put(data)

    def receive(self, timeout: float) -> tuple[str, bytes | None] | None:
        """Return a site and its message (`None` if it left), or `None` after `timeout` seconds."""
        try:
            return self._inbox.get(timeout=timeout) if timeout else self._inbox.get_nowait()
        except queue.Empty:
            return None

    def limit(self, site: str, num_bytes: int) -> None:
        """Do nothing: messages within a process already use memory when they are sent."""

    def close(self) -> None:
        """End all connections and wait for the threads."""
        with self._lock:
            self._closed = True
            for name in list(self._outboxes):
                self.leave(name)
        for thread in self._threads:
            thread.join()
