"""Sites over gRPC: TLS with certificates both ways, one stream of messages per site.

Sites dial out; the server waits for them at one port. A site is known by the fingerprint of its
certificate, which the server has beside its name.
"""

import logging
import queue
import random
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedmcmc._checks import not_installed
from fedmcmc.deploy._frames import Refused, printable
from fedmcmc.deploy._pki import fingerprint
from fedmcmc.deploy._settings import check_address
from fedmcmc.deploy._site import Site

LOG = logging.getLogger("fedmcmc.deploy")
METHOD = "/fedmcmc.Study/Join"
OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.so_reuseport", 0),  # two servers at one port would share the sites
]
SHORTEST_WAIT, LONGEST_WAIT = 0.1, 5.0
"""Seconds between attempts to reach the server."""
WAITING = 64
"""Messages of a site that may wait at the server, so that none can fill its memory."""


@dataclass(frozen=True)
class Credentials:
    """Files of a party: its key, its certificate, and that of the consortium's authority."""

    key: str | Path
    certificate: str | Path
    authority: str | Path

    def read(self) -> tuple[bytes, bytes, bytes]:
        """Return what is in the files."""
        return (
            Path(self.key).read_bytes(),
            Path(self.certificate).read_bytes(),
            Path(self.authority).read_bytes(),
        )


class GrpcServer:
    """The server's end: it waits for sites at one port.

    Parameters
    ----------
    address
        ``"host:port"`` to wait at; port 0 takes a free one.
    credentials
        Of the server.
    sites
        Fingerprints of the sites' certificates by name (`deploy.fingerprint`). Removing one, and
        starting the server again, revokes it.

    Attributes
    ----------
    port
        At which it waits.
    """

    def __init__(self, address: str, credentials: Credentials, sites: Mapping[str, str]) -> None:
        check_address(address, "address")
        grpc = _grpc()
        from concurrent.futures import ThreadPoolExecutor

        self._grpc = grpc
        self._names = {_normal(pin): name for name, pin in sites.items()}
        if len(self._names) != len(sites):
            raise ValueError("Two sites have the same certificate.")
        self._inbox: queue.SimpleQueue[tuple[str, bytes | None]] = queue.SimpleQueue()
        self._rooms = {name: threading.Semaphore(WAITING) for name in sites}
        self._outboxes: dict[str, queue.SimpleQueue[bytes | None]] = {}
        self._lock, self._closed = threading.Lock(), threading.Event()
        # One thread per stream; a site that comes again may for a moment have two.
        workers = ThreadPoolExecutor(4 * len(sites) + 4, thread_name_prefix="sites")
        self._server = grpc.server(workers, options=OPTIONS)
        handler = grpc.method_handlers_generic_handler(
            METHOD.split("/")[1],
            {METHOD.split("/")[2]: grpc.stream_stream_rpc_method_handler(self._join)},
        )
        self._server.add_generic_rpc_handlers((handler,))
        key, certificate, authority = credentials.read()
        secure = grpc.ssl_server_credentials(
            [(key, certificate)], authority, require_client_auth=True
        )
        self.port = self._server.add_secure_port(address, secure)
        self._server.start()

    def _join(self, messages: Iterator[bytes], context: Any) -> Iterator[bytes]:
        given = context.auth_context().get("x509_pem_cert", [b""])[0]
        name = self._names.get(fingerprint(given) if given else "", "")
        if not name:
            LOG.warning("somebody whose certificate is not registered was turned away")
            context.abort(
                self._grpc.StatusCode.PERMISSION_DENIED,
                "this certificate is not registered for the study",
            )
        outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        with self._lock:
            before, self._outboxes[name] = self._outboxes.get(name), outbox
        if before is not None:
            before.put(None)
        if not context.add_callback(lambda: outbox.put(None)) or self._closed.is_set():
            outbox.put(None)  # it has ended by now
        threading.Thread(
            target=self._read, args=(name, messages, outbox), name=f"from {name}", daemon=True
        ).start()
        while (data := outbox.get()) is not None:
            yield data
        self._left(name, outbox)

    def _read(
        self, name: str, messages: Iterator[bytes], outbox: queue.SimpleQueue[bytes | None]
    ) -> None:
        try:
            for data in messages:
                if self._outboxes.get(name) is not outbox:
                    return  # it has joined again; what comes here is of its former life
                while not self._rooms[name].acquire(timeout=1.0):
                    if self._closed.is_set():
                        return
                self._inbox.put((name, data))
        except Exception as error:  # gRPC ends an iterator so when its stream breaks
            LOG.info("%s: the connection ended (%s)", name, type(error).__name__)
        outbox.put(None)

    def _left(self, name: str, outbox: queue.SimpleQueue[bytes | None]) -> None:
        with self._lock:
            if self._outboxes.get(name) is not outbox:
                return
            del self._outboxes[name]
        self._inbox.put((name, None))

    def send(self, site: str, data: bytes) -> None:
        """Send bytes to a site; where it is not connected they are dropped."""
        outbox = self._outboxes.get(site)
        if outbox is not None:
            outbox.put(data)

    def receive(self, timeout: float) -> tuple[str, bytes | None] | None:
        """Return who sent what, `None` for the bytes if its connection ended, `None` if nobody."""
        try:
            news = self._inbox.get(timeout=timeout) if timeout else self._inbox.get_nowait()
        except queue.Empty:
            return None
        if news[1] is not None:
            self._rooms[news[0]].release()
        return news

    def close(self) -> None:
        """End all connections."""
        self._closed.set()
        with self._lock:
            for outbox in self._outboxes.values():
                outbox.put(None)
        self._server.stop(grace=1.0).wait()


def serve_site(
    site: Site,
    address: str,
    credentials: Credentials,
    *,
    server_name: str | None = None,
    stop: threading.Event | None = None,
) -> None:
    """Answer the server's messages until `stop` is set; connect again whenever that is needed.

    Parameters
    ----------
    site
        The site.
    address
        ``"host:port"`` of the server.
    credentials
        Of the site.
    server_name
        A name in the server's certificate, where it is not the host of `address`.
    stop
        Ends this when set.

    Raises
    ------
    Refused
        If the server does not take this site.
    """
    check_address(address, "server")
    grpc = _grpc()
    key, certificate, authority = credentials.read()
    secure = grpc.ssl_channel_credentials(authority, key, certificate)
    options: list[Any] = list(OPTIONS)
    if server_name is not None:
        options.append(("grpc.ssl_target_name_override", server_name))
    stop = threading.Event() if stop is None else stop
    wait = SHORTEST_WAIT
    while not stop.is_set():
        with grpc.secure_channel(address, secure, options) as channel:
            outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
            outbox.put(site.hello())
            call = channel.stream_stream(METHOD)(iter(outbox.get, None))
            watch = threading.Thread(target=_cancel, args=(stop, call), daemon=True)
            watch.start()
            try:
                for data in call:
                    wait = SHORTEST_WAIT
                    answer = site.answer(data)
                    if answer is not None:
                        outbox.put(answer)
            except grpc.RpcError as error:
                if error.code() == grpc.StatusCode.PERMISSION_DENIED:
                    raise Refused(
                        f"The server turned {site.name} away: {printable(error.details())}."
                    ) from None
                if not stop.is_set():
                    LOG.info("%s: no connection (%s)", site.name, error.code().name)
            finally:
                outbox.put(None)
                call.cancel()
        stop.wait(wait * (0.5 + 0.5 * random.random()))  # so that sites do not all come at once
        wait = min(2 * wait, LONGEST_WAIT)


def _cancel(stop: threading.Event, call: Any) -> None:
    while not stop.wait(0.2):
        if not call.is_active():
            return
    call.cancel()


def _normal(pin: str) -> str:
    return pin.replace(":", "").lower()


def _grpc() -> Any:
    try:
        import grpc
    except ImportError as error:
        raise not_installed("Sites over gRPC need", "deploy") from error
    return grpc
