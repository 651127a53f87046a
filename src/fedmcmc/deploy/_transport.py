"""What the server and a site need of a network, and the one inside a program that tests use."""

import queue
import threading
from collections.abc import Callable
from typing import Protocol

from fedmcmc.deploy._frames import Refused
from fedmcmc.deploy._site import Site


class Transport(Protocol):
    """The server's end: it knows which of the registered sites a message is from.

    A site's first message after it has joined is its `Site.hello`. Messages of one connection come
    in their order; those of a connection that breaks may be lost, and the site then joins again.
    """

    def send(self, site: str, data: bytes) -> None:
        """Send bytes to a site; where it is not connected they are dropped."""
        ...

    def receive(self, timeout: float) -> tuple[str, bytes | None] | None:
        """Return who sent what, `None` for the bytes if its connection ended, `None` if nobody."""
        ...

    def limit(self, site: str, num_bytes: int) -> None:
        """Accept messages of at most `num_bytes` over a site's present connection.

        A connection starts with `JOIN_BYTES`. A longer message ends it, unread.
        """
        ...

    def close(self) -> None:
        """End all connections."""
        ...


class Local:
    """Sites in threads of this program, which take turns: for tests and rehearsals.

    NumPyro traces one model at a time in a program.

    Examples
    --------
    >>> local = Local()
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
        """Connect a site, which then answers in a thread of its own until `leave` or `close`.

        `heard` is told of every message and its answer.
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
                return  # the server has ended
            self.leave(site.name)
            self._outboxes[site.name] = outbox
            self._threads.append(thread)
            self._inbox.put((site.name, site.hello()))
            thread.start()

    def leave(self, name: str) -> None:
        """End a site's connection, as if it had died: what it is doing is never heard of."""
        outbox = self._outboxes.pop(name, None)
        if outbox is not None:
            outbox.put(None)
            self._inbox.put((name, None))

    def send(self, site: str, data: bytes) -> None:
        """Send bytes to a site; where it is not connected they are dropped."""
        outbox = self._outboxes.get(site)
        if outbox is not None:
            outbox.put(data)

    def receive(self, timeout: float) -> tuple[str, bytes | None] | None:
        """Return who sent what, `None` for the bytes if its connection ended, `None` if nobody."""
        try:
            return self._inbox.get(timeout=timeout) if timeout else self._inbox.get_nowait()
        except queue.Empty:
            return None

    def limit(self, site: str, num_bytes: int) -> None:
        """Do nothing: messages within a program have been made by the time they are sent."""

    def close(self) -> None:
        """End all connections and wait for the threads."""
        with self._lock:
            self._closed = True
            for name in list(self._outboxes):
                self.leave(name)
        for thread in self._threads:
            thread.join()
