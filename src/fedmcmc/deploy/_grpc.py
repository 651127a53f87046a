"""Sites over gRPC: mutual TLS, one stream of messages per site.

Sites connect to one port of the server. The server identifies a site by the fingerprint of its
certificate.

A message consists of parts of at most 1 MiB, and its first part contains its length. gRPC rejects
longer parts and compressed ones. If a message is longer than expected, the receiver ends the
connection before it allocates memory.
"""

import logging
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedmcmc._checks import missing_extra_error
from fedmcmc.deploy._frames import JOIN_BYTES, FrameError, Refused, num_bytes_of, printable
from fedmcmc.deploy._pki import (
    SERVER_CERTIFICATE,
    fingerprint,
    first_certificate,
    is_key_of,
)
from fedmcmc.deploy._private import check_private
from fedmcmc.deploy._settings import check_address
from fedmcmc.deploy._site import Site

LOG = logging.getLogger("fedmcmc.deploy")
METHOD = "/fedmcmc.Study/Join"
CHUNK_BYTES = 2**20
"""Bytes of a message in each gRPC message; the last one may have fewer."""
NO_COMPRESSION = 1
"""gRPC's set of enabled compression algorithms; bit 0 stands for no compression."""
OPTIONS = [
    ("grpc.max_receive_message_length", CHUNK_BYTES),
    ("grpc.max_send_message_length", CHUNK_BYTES),
    ("grpc.compression_enabled_algorithms_bitset", NO_COMPRESSION),
    ("grpc.max_concurrent_streams", 8),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.so_reuseport", 0),  # two servers at one port would share the sites
]
MIN_WAIT_SECONDS, MAX_WAIT_SECONDS = 0.1, 5.0
"""Waits between attempts to reach the server."""
MAX_UNREAD = 3
"""Largest number of unread messages per site; a site answers one request at a time."""
MAX_UNSENT = 16
"""Largest number of unsent messages per site; a site that is further behind joins again."""
WRONG_CERTIFICATE = "CERTIFICATE_VERIFY_FAILED"
"""Text in the details of gRPC's error for an invalid certificate."""


class TransportError(Exception):
    """Bytes that are not the parts of a message, or a message that is longer than expected."""


def split_message(data: bytes) -> Iterator[bytes]:
    """Yield the parts of a message."""
    for start in range(0, len(data), CHUNK_BYTES):
        yield data[start : start + CHUNK_BYTES]


def join_parts(parts: Iterable[bytes], max_bytes: Callable[[], int]) -> Iterator[bytes]:
    """Yield complete messages from their parts; drop an incomplete message at the end.

    Raise `TransportError` if a message is longer than the result of `max_bytes`, which is called
    once per message, or if bytes are not a part of a message.
    """
    parts = iter(parts)
    for part in parts:
        try:
            size = num_bytes_of(part)
        except FrameError as error:
            raise TransportError(str(error)) from None
        limit = max_bytes()
        if size > limit:
            raise TransportError(
                f"a message of {size:,} bytes, where at most {limit:,} are expected"
            )
        pieces, missing = [], size
        while len(part) == min(missing, CHUNK_BYTES):
            pieces.append(part)
            missing -= len(part)
            if not missing:
                yield b"".join(pieces)  # does not copy a single piece
                break
            following = next(parts, None)
            if following is None:
                return
            part = following
        else:
            expected = min(missing, CHUNK_BYTES)
            raise TransportError(f"a part of {len(part):,} bytes, where {expected:,} are expected")


@dataclass(frozen=True)
class Credentials:
    """Files of a party: its key, its certificate, and the certificate of the authority.

    With `server_fingerprint`, a site accepts only the server's certificate with this SHA-256, even
    if the authority has signed others. The certificate is in the file ``server.crt`` next to
    `authority`.
    """

    key: str | Path
    certificate: str | Path
    authority: str | Path
    server_fingerprint: str | None = None

    def read(self) -> tuple[bytes, bytes, bytes]:
        """Return key, certificate, and the certificate that verifies the other party.

        Raises
        ------
        ValueError
            If other users can read the key, or ``server.crt`` has another fingerprint.
        """
        check_private(self.key)
        authority = Path(self.authority).read_bytes()
        if self.server_fingerprint is not None:
            trusted = Path(self.authority).with_name(SERVER_CERTIFICATE)
            if not trusted.exists():
                raise ValueError(
                    f"server_fingerprint needs the server's certificate in {trusted}, which is "
                    "missing: request it from the operator of the consortium."
                )
            # Other certificates in the file would also be trusted.
            authority = first_certificate(trusted.read_bytes())
            pin, actual = _normal(self.server_fingerprint), fingerprint(authority)
            if actual != pin:
                raise ValueError(
                    f"{trusted} has the fingerprint {actual}, and server_fingerprint is {pin}: put "
                    "the server's current certificate there, and compare its fingerprint with the "
                    "operator of the server before you change the setting."
                )
        key, certificate = Path(self.key).read_bytes(), Path(self.certificate).read_bytes()
        if not is_key_of(key, certificate):
            raise ValueError(
                f"{self.key} is not the private key of the certificate {self.certificate}: use the "
                "key that created its request (fedmcmc deploy request)."
            )
        return key, certificate, authority


class _Connection:
    """Connection of a site at the server, with bounded queues in both directions."""

    def __init__(self, name: str, context: Any) -> None:
        self.name, self.context = name, context
        self.max_bytes = JOIN_BYTES
        self.outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.refusal = ""
        self._arrived: deque[bytes | None] = deque()
        self._free_slots = threading.Semaphore(MAX_UNREAD)
        self._lock, self._ended = threading.Lock(), False

    def admit(self) -> int:
        """Wait for space in the queue, and return the largest accepted length of a message."""
        while not self._free_slots.acquire(timeout=1.0):
            if self._ended:
                raise ConnectionError
        return self.max_bytes

    def put(self, data: bytes) -> None:
        """Add a message that has arrived, unless the connection has ended."""
        with self._lock:
            if not self._ended:
                self._arrived.append(data)

    def take(self) -> bytes | None:
        """Return the oldest unread message, `None` for the end of the connection.

        Raise `IndexError` if the message was dropped.
        """
        data = self._arrived.popleft()
        if data is not None:
            self._free_slots.release()
        return data

    def end(self, *, was_last: bool = False) -> None:
        """Drop unread messages and send no more; with `was_last`, `take` returns the end."""
        with self._lock:
            if not self._ended:
                self._ended = True
                self._arrived.clear()
            if was_last:
                self._arrived.append(None)
        self.outbox.put(None)


class GrpcServer:
    """The server's end of gRPC, which waits for sites at one port.

    Parameters
    ----------
    address
        ``"host:port"`` of the server; port 0 selects a free port.
    credentials
        Credentials of the server.
    sites
        Fingerprints of the sites' certificates by name (`deploy.fingerprint`). To revoke a
        certificate, remove its fingerprint and start the server again.

    Attributes
    ----------
    port
        Port of the server.

    Raises
    ------
    OSError
        If the port is not available.
    """

    def __init__(self, address: str, credentials: Credentials, sites: Mapping[str, str]) -> None:
        check_address(address, "address")
        grpc = _grpc()
        from concurrent.futures import ThreadPoolExecutor

        self._grpc = grpc
        self._names = {_normal(pin): name for name, pin in sites.items()}
        if len(self._names) != len(sites):
            raise ValueError("Two sites have the same certificate.")
        # One entry per message, in the order of arrival from all sites.
        self._arrivals: queue.SimpleQueue[_Connection] = queue.SimpleQueue()
        self._connections: dict[str, _Connection] = {}
        self._lock, self._closed = threading.Lock(), threading.Event()
        # One thread per stream; a site that connects again may briefly have two streams.
        num_threads = 4 * len(sites) + 4
        workers = ThreadPoolExecutor(num_threads, thread_name_prefix="sites")
        self._server = grpc.server(workers, options=OPTIONS, maximum_concurrent_rpcs=num_threads)
        handler = grpc.method_handlers_generic_handler(
            METHOD.split("/")[1],
            {METHOD.split("/")[2]: grpc.stream_stream_rpc_method_handler(self._join)},
        )
        self._server.add_generic_rpc_handlers((handler,))
        key, certificate, authority = credentials.read()
        secure = grpc.ssl_server_credentials(
            [(key, certificate)], authority, require_client_auth=True
        )
        try:
            self.port = self._server.add_secure_port(address, secure)
        except RuntimeError as error:
            raise OSError(
                f"The server cannot wait at {address}: another process uses that port, the address "
                "is not an address of this machine, or key and certificate do not match."
            ) from error
        self._server.start()

    def _join(self, parts: Iterator[bytes], context: Any) -> Iterator[bytes]:
        certificate = context.auth_context().get("x509_pem_cert", [b""])[0]
        name = self._names.get(fingerprint(certificate) if certificate else "", "")
        if not name:
            LOG.warning("a connection with an unregistered certificate was rejected")
            context.abort(
                self._grpc.StatusCode.PERMISSION_DENIED,
                "this certificate is not registered for the study",
            )
        connection = _Connection(name, context)
        with self._lock:
            previous, self._connections[name] = self._connections.get(name), connection
        if previous is not None:
            previous.end()
        if not context.add_callback(connection.end) or self._closed.is_set():
            connection.end()  # the site has disconnected or the server has closed
        threading.Thread(
            target=self._read, args=(connection, parts), name=f"from {name}", daemon=True
        ).start()
        try:
            while (data := connection.outbox.get()) is not None:
                yield from split_message(data)
        finally:
            self._remove(connection)
        if connection.refusal:
            context.abort(self._grpc.StatusCode.PERMISSION_DENIED, connection.refusal)

    def _read(self, connection: _Connection, parts: Iterator[bytes]) -> None:
        name = connection.name
        try:
            for data in join_parts(parts, connection.admit):
                if self._connections.get(name) is not connection:
                    return  # a newer connection of the site has replaced this one
                connection.put(data)
                self._arrivals.put(connection)
        except TransportError as error:
            if self._connections.get(name) is connection:
                LOG.warning("%s sent %s; its connection was ended", name, error)
                connection.refusal = f"{name} sent {error}"
        except Exception as error:  # gRPC ends the iterator of a broken stream this way
            LOG.info("%s: the connection ended (%s)", name, type(error).__name__)
        connection.outbox.put(None)

    def _remove(self, connection: _Connection) -> None:
        with self._lock:
            if self._connections.get(connection.name) is not connection:
                return
            del self._connections[connection.name]
        connection.end(was_last=True)
        self._arrivals.put(connection)

    def send(self, site: str, data: bytes) -> None:
        """Send bytes to a site; if it is not connected, drop them."""
        connection = self._connections.get(site)
        if connection is None:
            return
        if connection.outbox.qsize() >= MAX_UNSENT:
            LOG.info("%s: %d messages wait for it; it has to join again", site, MAX_UNSENT)
            connection.context.cancel()
            self._remove(connection)
            return
        connection.outbox.put(data)

    def receive(self, timeout: float) -> tuple[str, bytes | None] | None:
        """Return a site and its message (`None` if it left), or `None` after `timeout` seconds."""
        end = time.monotonic() + timeout
        while True:
            try:
                connection = self._arrivals.get(timeout=max(end - time.monotonic(), 0.0))
                return connection.name, connection.take()
            except queue.Empty:
                return None
            except IndexError:
                continue  # a newer connection has replaced this one

    def limit(self, site: str, num_bytes: int) -> None:
        """Accept messages of at most `num_bytes` over a site's current connection."""
        connection = self._connections.get(site)
        if connection is not None:
            connection.max_bytes = num_bytes

    def close(self) -> None:
        """End all connections."""
        self._closed.set()
        with self._lock:
            connections = list(self._connections.values())
        for connection in connections:
            connection.outbox.put(None)
        self._server.stop(grace=1.0).wait()


def serve_site(
    site: Site,
    address: str,
    credentials: Credentials,
    *,
    server_name: str | None = None,
    stop: threading.Event | None = None,
) -> None:
    """Answer the server's messages until `stop` is set, and reconnect after each interruption.

    Parameters
    ----------
    site
        Site that answers.
    address
        ``"host:port"`` of the server.
    credentials
        Credentials of the site.
    server_name
        Name in the server's certificate, if it is not the host of `address`.
    stop
        Event that ends the function.

    Raises
    ------
    Refused
        If the server rejects this site, or sends a longer message than the site accepts.
    ValueError
        If other users can read the site's key, or ``server.crt`` is not the pinned certificate.
    """
    check_address(address, "server")
    grpc = _grpc()
    key, certificate, authority = credentials.read()
    secure = grpc.ssl_channel_credentials(authority, key, certificate)
    options: list[Any] = list(OPTIONS)
    if server_name is not None:
        options.append(("grpc.ssl_target_name_override", server_name))
    stop = threading.Event() if stop is None else stop
    wait = MIN_WAIT_SECONDS
    logged: set[str] = set()  # problems since the last message
    while not stop.is_set():
        with grpc.secure_channel(address, secure, options) as channel:
            outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
            outbox.put(site.hello())
            messages = iter(outbox.get, None)
            call = channel.stream_stream(METHOD)(
                part for data in messages for part in split_message(data)
            )
            watch = threading.Thread(target=_cancel, args=(stop, call), daemon=True)
            watch.start()
            has_joined = False
            try:
                for data in join_parts(call, lambda: site.limits.max_bytes):
                    wait, has_joined = MIN_WAIT_SECONDS, True
                    logged.clear()
                    answer = site.answer(data)
                    if answer is not None:
                        outbox.put(answer)
            except TransportError as error:
                raise Refused(
                    f"{site.name} has ended its connection: the server at {address} sent {error} "
                    "(max_bytes in [limits] of site.toml)."
                ) from None
            except grpc.RpcError as error:
                if error.code() == grpc.StatusCode.PERMISSION_DENIED:
                    raise Refused(
                        f"The server rejected {site.name}: {printable(error.details())}."
                    ) from None
                is_wrong = WRONG_CERTIFICATE in (error.details() or "")
                problem = WRONG_CERTIFICATE if is_wrong else error.code().name
                if problem not in logged and not stop.is_set():
                    _log_problem(problem, site.name, address, credentials)
                logged.add(problem)
            else:
                if has_joined and not stop.is_set():
                    LOG.info("%s: the server ended the run; waiting for the next one", site.name)
                    logged.add("UNAVAILABLE")  # expected until the server is started again
            finally:
                outbox.put(None)
                call.cancel()
        stop.wait(wait * (0.5 + 0.5 * random.random()))  # so that sites do not all connect at once
        wait = min(2 * wait, MAX_WAIT_SECONDS)


def _cancel(stop: threading.Event, call: Any) -> None:
    while not stop.wait(0.2):
        if not call.is_active():
            return
    call.cancel()


def _log_problem(problem: str, name: str, address: str, credentials: Credentials) -> None:
    """Log why a site has no connection."""
    if problem == WRONG_CERTIFICATE:
        LOG.warning(
            "%s: the server at %s was not accepted and received nothing: its certificate is not "
            "%s, or is not valid today. Ask the operator of the server.",
            *(name, address, _expected(credentials)),
        )
    else:
        LOG.info("%s: no connection (%s); calling %s until it answers", name, problem, address)


def _expected(credentials: Credentials) -> str:
    pin = credentials.server_fingerprint
    return "signed by the authority" if pin is None else f"the pinned one ({_normal(pin)})"


def _normal(pin: str) -> str:
    return pin.replace(":", "").lower()


def _grpc() -> Any:
    try:
        import grpc
    except ImportError as error:
        raise missing_extra_error("Sites over gRPC need", "deploy") from error
    return grpc
