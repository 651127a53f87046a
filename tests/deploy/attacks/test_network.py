"""Who is on the network between sites and server, and has none of their keys, or only one's.

Certificates that are not registered and of other authorities are in `tests.deploy.test_grpc`, and
damaged messages there and in `tests.deploy.test_sites`.
"""

import socket
import threading
import time
from contextlib import contextmanager, suppress

import chex
import grpc
import pytest

from fedmcmc import deploy
from fedmcmc.deploy._frames import Frame
from tests.deploy.attacks.support import (
    KEY,
    NAMES,
    POSITION,
    ROWS,
    make_study,
    open_site,
)
from tests.support.consortium import credentials, keys

__all__ = ["keys"]
METHOD = "/fedmcmc.Study/Join"


class Tap:
    """Somebody on the way, who passes on all bytes and keeps them; `change` alters them."""

    def __init__(self, port, change=lambda data: data):
        self.port_of_server, self.change, self.recorded = port, change, []
        self.sockets = [socket.create_server(("127.0.0.1", 0))]
        self.port = self.sockets[0].getsockname()[1]
        self.threads = []
        self.start(self.accept)

    def start(self, target, *args):
        self.threads.append(threading.Thread(target=target, args=args, daemon=True))
        self.threads[-1].start()

    def accept(self):
        with suppress(OSError):
            while True:
                site, _ = self.sockets[0].accept()
                self.sockets.append(site)
                server = socket.create_connection(("127.0.0.1", self.port_of_server))
                self.sockets.append(server)
                self.start(self.carry, site, server)
                self.start(self.carry, server, site)

    def carry(self, source, destination):
        with suppress(OSError):
            while data := source.recv(65536):
                self.recorded.append(data)
                destination.sendall(self.change(data))
        end(source, destination)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        end(*self.sockets)
        for thread in self.threads:
            thread.join(timeout=20)
        for open_socket in self.sockets:
            open_socket.close()


def end(*sockets):
    for end_point in sockets:
        with suppress(OSError):
            end_point.shutdown(socket.SHUT_RDWR)


@contextmanager
def tapped(study, keys, folder, change=lambda data: data):
    """Connect a server and its sites through somebody on the way."""
    server = deploy.GrpcServer("127.0.0.1:0", credentials(keys[0], "server"), keys[1])
    stop = threading.Event()
    with Tap(server.port, change) as tap:
        threads = [
            serve(study, name, folder, tap.port, credentials(keys[0], name), stop) for name in NAMES
        ]
        try:
            yield server, tap
        finally:
            stop.set()
            for thread in threads:
                thread.join(timeout=20)
            server.close()


def serve(study, name, folder, port, party, stop):
    """Run a site in a thread, which dials a port; return the thread."""

    def run():
        with suppress(deploy.Refused):
            site = open_site(study, name, folder)
            deploy.serve_site(site, f"localhost:{port}", party, stop=stop)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_somebody_on_the_way_hears_all_bytes(keys, tmp_path):
    """No name, digest, gradient or total of the study is in them."""
    study = make_study()
    with tapped(study, keys, tmp_path) as (server, tap):
        deploy.run(study, KEY, "main", POSITION, transport=server, num_rounds=3, progress=False)
    recorded = b"".join(tap.recorded)
    gradient = ROWS["bern"].sum(axis=0).astype(">f4").tobytes()
    assert len(recorded) > 5000
    for secret in (b"fmc2", study.digest.encode(), b'"kind"', b"targets", gradient):
        assert secret not in recorded


def test_somebody_without_a_certificate_joins(keys):
    """The server ends the connection before any message."""
    server = deploy.GrpcServer("127.0.0.1:0", credentials(keys[0], "server"), keys[1])
    authority = (keys[0] / "ca.crt").read_bytes()
    hello = Frame("hello", {"site": "bern", "study": make_study().digest}).to_bytes()
    for channel in (
        grpc.secure_channel(f"localhost:{server.port}", grpc.ssl_channel_credentials(authority)),
        grpc.insecure_channel(f"localhost:{server.port}"),
    ):
        with channel, pytest.raises(grpc.RpcError):
            list(channel.stream_stream(METHOD)(iter([hello]), timeout=5))
    assert server.receive(0.2) is None
    server.close()


def dialed(study, folder, server, party):
    """Return what a server received from a site, which dials again where it does not come in."""
    stop, end_of_wait = threading.Event(), time.monotonic() + 20
    with Tap(server.port) as tap:
        thread = serve(study, "bern", folder, tap.port, party, stop)
        news = None
        while news is None and len(tap.sockets) < 1 + 2 * 2:
            assert time.monotonic() < end_of_wait
            news = server.receive(0.1)
        stop.set()
        thread.join(timeout=20)
    assert not thread.is_alive()
    return news


def test_a_server_of_another_name_is_called(keys, tmp_path):
    """A valid certificate of the authority, for another host: the site sends nothing to it."""
    deploy.make_party(keys[0], tmp_path / "other", "server", hosts=("elsewhere.example.org",))
    server = deploy.GrpcServer("127.0.0.1:0", credentials(tmp_path / "other", "server"), keys[1])
    assert dialed(make_study(), tmp_path, server, credentials(keys[0], "bern")) is None
    server.close()


def test_another_server_of_the_same_authority_is_called(keys, tmp_path):
    """Whoever got a certificate for the same host once could stand in the server's place."""
    folder, pins = keys
    deploy.make_party(folder, tmp_path / "other", "server", hosts=("localhost", "127.0.0.1"))
    pin = deploy.fingerprint((folder / "server.crt").read_bytes())
    files = (folder / "bern.key", folder / "bern.crt", folder / "ca.crt")
    party = deploy.Credentials(*files, server_fingerprint=pin)
    wrong = deploy.GrpcServer("127.0.0.1:0", credentials(tmp_path / "other", "server"), pins)
    assert dialed(make_study(), tmp_path / "wrong", wrong, party) is None
    wrong.close()
    right = deploy.GrpcServer("127.0.0.1:0", credentials(folder, "server"), pins)
    name, hello = dialed(make_study(), tmp_path / "right", right, party)
    assert name == "bern" and Frame.parse(hello).kind == "hello"
    right.close()


def test_somebody_on_the_way_changes_bytes(keys, tmp_path):
    """TLS ends the connection, the site dials again, and the draws are the same as in peace."""
    study, local = make_study(), deploy.LocalTransport()
    for name in NAMES:
        local.join(open_site(study, name, tmp_path / "peace"))
    settings = dict(num_rounds=5, progress=False)
    expected = deploy.run(study, KEY, "main", POSITION, transport=local, **settings)
    changed = []

    def change(data):
        """Flip a bit of some bytes after the handshake."""
        if len(data) > 200 and len(changed) < 3 and data[:1] == b"\x17":
            changed.append(data)
            return data[:100] + bytes([data[100] ^ 1]) + data[101:]
        return data

    with tapped(study, keys, tmp_path, change) as (server, _):
        samples = deploy.run(study, KEY, "main", POSITION, transport=server, **settings)
    assert changed
    chex.assert_trees_all_equal(samples.draws, expected.draws)
