"""Processes that speak gRPC to a site or a server and send what they should not.

They hold no part of fedmcmc, as those of an attacker would not:
``python hostile.py {site,server} KEYS PORT KIND``.
"""

import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc

METHOD = "/fedmcmc.Study/Join"
MEBI = 2**20
NUM_ZEROS = 128 * MEBI


HEAD = 20


def begin(num_bytes):
    """Return the beginning of a message of `num_bytes`."""
    return struct.pack(">4sIIQ", b"fmc2", 0, 0, num_bytes - HEAD)


def message(num_bytes):
    return begin(num_bytes) + bytes(num_bytes - HEAD)


def zeros():
    yield bytes(NUM_ZEROS)


def claim():
    """Yield the beginning of a message of a terabyte, and go on with it."""
    yield begin(2**40) + bytes(MEBI - HEAD)
    for _ in range(128):
        yield bytes(MEBI)


def large():
    """Yield a message of one byte more than a site may send before it has joined."""
    yield message(2**16 + 1)


def many():
    """Yield many messages that are short enough, one after another."""
    for _ in range(4096):
        yield message(2**16)


def empty():
    """Yield a message in parts that hold nothing."""
    yield begin(2**16) + bytes(10)
    while True:
        yield b""


def silent():
    """Yield the end of a stream after a while."""
    time.sleep(60)
    yield b""


KINDS = {
    "compressed": (zeros, grpc.Compression.Gzip),
    "deflated": (zeros, grpc.Compression.Deflate),
    "whole": (zeros, grpc.Compression.NoCompression),
    "claim": (claim, grpc.Compression.NoCompression),
    "large": (large, grpc.Compression.NoCompression),
    "many": (many, grpc.Compression.NoCompression),
    "empty": (empty, grpc.Compression.NoCompression),
    "silent": (silent, grpc.Compression.NoCompression),
}
OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


def read(keys, name):
    names = (f"{name}.key", f"{name}.crt", "ca.crt")
    return [(Path(keys) / file).read_bytes() for file in names]


def act_as_site(keys, port, kind):
    """Print how the server ends the connection."""
    key, certificate, authority = read(keys, "bern")
    secure = grpc.ssl_channel_credentials(authority, key, certificate)
    messages, compression = KINDS[kind]
    channel = grpc.secure_channel(
        f"localhost:{port}", secure, options=OPTIONS, compression=compression
    )
    with channel:
        call = channel.stream_stream(METHOD)(messages())
        try:
            if kind == "silent":
                time.sleep(60)  # it reads nothing
            for _ in call:
                pass
            print("OK")
        except grpc.RpcError as error:
            print(error.code().name, error.details())


def act_as_server(keys, port, kind):
    """Print the port and serve until the process is killed."""
    key, certificate, authority = read(keys, "server")
    messages, compression = KINDS[kind]
    server = grpc.server(ThreadPoolExecutor(4), options=OPTIONS, compression=compression)

    def join(requests, context):
        yield from messages()

    handler = grpc.stream_stream_rpc_method_handler(join)
    names = METHOD.split("/")
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(names[1], {names[2]: handler}),)
    )
    secure = grpc.ssl_server_credentials([(key, certificate)], authority, require_client_auth=True)
    print(server.add_secure_port(f"127.0.0.1:{port}", secure), flush=True)
    server.start()
    server.wait_for_termination()


@contextmanager
def process(role, keys, port, kind):
    """Run one of them; the process is killed at the end."""
    command = [sys.executable, "-P", __file__, role, str(keys), str(port), kind]
    running = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        yield running
    finally:
        running.kill()
        running.communicate()


@contextmanager
def growth():
    """Yield a list that holds, in the end, the bytes by which this process grew at most."""
    grown, ended = [0], threading.Event()
    at = Path("/proc/self/statm")

    def resident():
        return 4096 * int(at.read_text().split()[1])

    before = resident()

    def watch():
        while not ended.wait(0.001):
            grown[0] = max(grown[0], resident() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield grown
    finally:
        ended.set()
        thread.join()


if __name__ == "__main__":
    {"site": act_as_site, "server": act_as_server}[sys.argv[1]](*sys.argv[2:])
