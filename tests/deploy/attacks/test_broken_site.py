"""A site, or a server, that is out of order or wants the other to be: memory, and connections."""

import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import grpc
import pytest

from fedmcmc import deploy
from tests.deploy.attacks.support import make_study, open_site
from tests.support.consortium import credentials, keys

__all__ = ["keys"]
METHOD = "/fedmcmc.Study/Join"
LARGE = 2**26
"""Bytes of a message that no exchange of this study needs; on the wire they may be few."""
ENOUGH = 2**24
"""Bytes that may wait at a receiver of small messages."""


@pytest.fixture
def server(keys):
    folder, pins = keys
    made = deploy.GrpcServer("127.0.0.1:0", credentials(folder, "server"), pins)
    yield made
    made.close()


@contextmanager
def stream_to(server, folder, name, messages, **settings):
    """Send raw messages as a registered site with code of its own."""
    key, certificate, authority = credentials(folder, name).read()
    secure = grpc.ssl_channel_credentials(authority, key, certificate)
    options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    with grpc.secure_channel(f"localhost:{server.port}", secure, options, **settings) as channel:
        call = channel.stream_stream(METHOD)(iter(messages))
        yield call
        call.cancel()


def wait_until(condition, seconds=20.0):
    """Wait for something to happen, and fail where it does not."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def bytes_received(server, call):
    """Return how many bytes the server takes in until it ends the stream, or has too many."""
    total = 0
    while total < ENOUGH and (call.is_active() or total == 0):
        news = server.receive(0.1)
        if news is not None and news[1] is not None:
            total += len(news[1])
        elif not call.is_active():
            break
    return total


COMPRESSED = [pytest.param(False, marks=pytest.mark.slow), True]


@pytest.mark.parametrize("compressed", COMPRESSED)
def test_a_site_sends_one_huge_message(compressed, keys, server):
    """It ends the server's process for lack of memory, by zeros that compress to nothing."""
    how = grpc.Compression.Gzip if compressed else grpc.Compression.NoCompression

    stop = threading.Event()

    def messages():
        yield bytes(LARGE)
        stop.wait(30)

    with stream_to(server, keys[0], "bern", messages(), compression=how) as call:
        received = bytes_received(server, call)
        stop.set()
    assert received < ENOUGH


def test_a_site_sends_many_messages_that_nobody_reads(keys, server):
    """The same by many of a size that is allowed."""
    sent = []

    def messages():
        for _ in range(LARGE // 2**19):
            sent.append(time.monotonic())
            yield bytes(2**19)

    with stream_to(server, keys[0], "bern", messages()) as call:
        wait_until(lambda: (sent and time.monotonic() - sent[-1] > 1.0) or not call.is_active())
        total = 0
        while (news := server.receive(0.2)) is not None and news[1] is not None:
            total += len(news[1])
            if total >= ENOUGH:
                break
        assert total < ENOUGH


def test_a_site_says_that_it_will_send_a_huge_message(keys, server):
    """A length in front of a message for which memory would be reserved."""
    stop, before = threading.Event(), resident()

    def messages():
        for length in (2**40, 2**31, 2**30):
            yield length.to_bytes(8, "big") + bytes(2**20)
        stop.wait(2)

    with stream_to(server, keys[0], "bern", messages()) as call:
        assert bytes_received(server, call) < ENOUGH
        stop.set()
    assert resident() - before < LARGE


def resident():
    """Return the bytes of memory that this process has."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


class HostileServer:
    """A server with the study's certificate and code of its own."""

    def __init__(self, folder, messages, compression):
        self.messages, self.num_joins = messages, 0
        pool = ThreadPoolExecutor(2)
        options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        self.server = grpc.server(pool, options=options, compression=compression)
        group, name = METHOD.strip("/").split("/")
        handler = grpc.stream_stream_rpc_method_handler(self.join)
        self.server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(group, {name: handler}),)
        )
        key, certificate, authority = credentials(folder, "server").read()
        secure = grpc.ssl_server_credentials([(key, certificate)], authority, True)
        self.port = self.server.add_secure_port("127.0.0.1:0", secure)
        self.server.start()

    def join(self, messages, context):
        self.num_joins += 1
        yield from self.messages()


@pytest.mark.parametrize("compressed", COMPRESSED)
def test_a_server_sends_one_huge_message(compressed, keys, tmp_path):
    """It ends the process of a site."""
    site = open_site(make_study(), "bern", tmp_path, max_bytes=2**20)
    sizes, stop = [], threading.Event()
    site.answer = lambda data: sizes.append(len(data))

    def messages():
        yield bytes(LARGE)
        stop.wait(30)

    how = grpc.Compression.Gzip if compressed else grpc.Compression.NoCompression
    hostile = HostileServer(keys[0], messages, how)
    thread = threading.Thread(
        target=quietly,
        args=(site, f"localhost:{hostile.port}", credentials(keys[0], "bern"), stop),
        daemon=True,
    )
    thread.start()
    wait_until(lambda: sizes or hostile.num_joins > 1 or not thread.is_alive())
    stop.set()
    thread.join(timeout=20)
    hostile.server.stop(0.2).wait()
    assert not thread.is_alive() and sum(sizes) < 2**21


def quietly(site, address, keys, stop):
    """Serve until there is an end, which may be a refusal."""
    with suppress(deploy.Refused):
        deploy.serve_site(site, address, keys, stop=stop)


@pytest.mark.slow
def test_two_processes_run_under_one_name(keys, server, tmp_path):
    """They would drive each other out for ever: both are told, in words, and one goes on."""
    study, joins, refusals = make_study(), [], queue.SimpleQueue()
    stop = threading.Event()

    def serve(folder):
        site = open_site(study, "bern", folder)
        try:
            deploy.serve_site(
                site, f"localhost:{server.port}", credentials(keys[0], "bern"), stop=stop
            )
        except deploy.Refused as error:
            refusals.put(str(error))

    sites = deploy.Sites(study, server)
    receive = server.receive

    def counted(timeout):
        news = receive(timeout)
        if news is not None and news[1] is not None:
            joins.append(news[0])
        return news

    server.receive = counted
    threads = [
        threading.Thread(target=serve, args=(tmp_path / str(n),), daemon=True) for n in range(2)
    ]
    try:
        for thread in threads:
            thread.start()
        with pytest.warns(RuntimeWarning, match="bern"):
            end = time.monotonic() + 4.0
            while time.monotonic() < end:
                sites._links._read_queued()
                time.sleep(0.02)
    finally:
        stop.set()
        for thread in threads:
            thread.join(timeout=20)
    assert 1 <= len(joins) <= 4
    assert "bern" in refusals.get(timeout=1.0)
