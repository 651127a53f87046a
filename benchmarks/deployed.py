"""Milliseconds per round between real sites, beside a bare gRPC echo of the same bytes.

``python -m benchmarks deploy`` starts a process per site on this machine, all over TLS on loopback.
Alternatives take turns. Of the rounds of a run the median is shown, without the first, which
compiles. ``python -m benchmarks.deployed 4,16 1000`` measures some of the numbers of sites and of
floats alone.
"""

import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import grpc
import jax
import jax.numpy as jnp
import numpy as np

import fedmcmc
from fedmcmc import deploy
from fedmcmc.deploy import secure

SITES, SIZES = (4, 16), (1_000, 100_000, 1_000_000)
ROUNDS = {1_000: 200, 100_000: 60, 1_000_000: 12}
KINDS = ("plain", "state", "masked")
OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
ECHO = "/bench.Echo/Join"
MODEL = """
import jax.numpy as jnp
import fedmcmc

def posterior(settings):
    return fedmcmc.Posterior(
        lambda theta: -0.5 * jnp.sum(theta**2),
        lambda theta, rows: -0.5 * (rows["y"] - jnp.mean(theta)) ** 2,
    )

def plain(posterior, settings):
    return fedmcmc.lsd(posterior, step_size=1e-3)

def state(posterior, settings):
    return fedmcmc.dg_sgld(posterior, step_size=1e-3, tolerance=1.0, num_local_steps=1)

def masked(posterior, settings):
    return fedmcmc.secure_sum(plain(posterior, settings))
"""
HEADERS = 600
"""Bytes of a request beside its numbers, about."""


def names_of(num_sites):
    return [f"site{i}" for i in range(num_sites)]


def study_of(folder, kind, num_sites):
    names, masks = names_of(num_sites), {}
    if kind == "masked":
        masks = dict(
            identities={name: public_of(folder / "keys", name) for name in names}, rounds=10**6
        )
    return deploy.Study(
        name="rounds",
        posterior="model.py:posterior",
        sites=dict.fromkeys(names, 8),
        rows={"y": jax.ShapeDtypeStruct((), jnp.float32)},
        kernels={"main": f"model.py:{kind}"},
        secure=masks,
        folder=folder,
    )


def public_of(keys, name):
    path = keys / f"{name}.public"
    if not path.exists():
        path.write_text(deploy.make_identity(keys, name))
    return path.read_text()


def credentials(folder, name):
    keys = folder / "keys"
    return deploy.Credentials(keys / f"{name}.key", keys / f"{name}.crt", keys / "ca.crt")


# A site: a process that serves all kinds at once, of which one is asked at a time.


def serve(folder, name, num_sites, echo_port, *ports):
    folder, real = Path(folder), os.fsync
    os.fsync = lambda file: real(file) if (folder / "fsync").exists() else None
    threads = [threading.Thread(target=echo, args=(folder, name, echo_port))]
    for kind, port in zip(KINDS, ports, strict=True):
        study = study_of(folder, kind, int(num_sites))
        site = deploy.Site(
            study,
            name,
            {"y": np.ones(8, np.float32)},
            folder=folder / name / kind,
            identity=folder / "keys" / f"{name}.identity",
            min_rows=8,
        )
        given = (site, f"localhost:{port}", credentials(folder, name))
        threads.append(threading.Thread(target=deploy.serve_site, args=given, daemon=True))
    for thread in threads:
        thread.start()
    threads[0].join()  # ends with the server


def echo(folder, name, port):
    """Answer each request with as many bytes as its last eight say."""
    key, certificate, authority = credentials(folder, name).read()
    secured = grpc.ssl_channel_credentials(authority, key, certificate)
    outbox = queue.SimpleQueue()
    with grpc.secure_channel(f"localhost:{port}", secured, OPTIONS) as channel:
        call = channel.stream_stream(ECHO)(iter(outbox.get, None))
        try:
            for data in call:
                outbox.put(bytes(int.from_bytes(data[-8:], "big")))
        except grpc.RpcError:
            pass


# The server


class Echo:
    """Nothing but gRPC: a stream of bytes per site."""

    def __init__(self, folder, num_sites):
        self.inbox, self.outboxes = queue.SimpleQueue(), []
        self.server = grpc.server(ThreadPoolExecutor(2 * num_sites), options=OPTIONS)
        handler = grpc.stream_stream_rpc_method_handler(self.join)
        self.server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("bench.Echo", {"Join": handler}),)
        )
        key, certificate, authority = credentials(folder, "server").read()
        secured = grpc.ssl_server_credentials([(key, certificate)], authority, True)
        self.port = self.server.add_secure_port("127.0.0.1:0", secured)
        self.server.start()

    def join(self, messages, context):
        outbox = queue.SimpleQueue()
        self.outboxes.append(outbox)
        context.add_callback(lambda: outbox.put(None))

        def read():
            try:
                for message in messages:
                    self.inbox.put(message)
            except grpc.RpcError:
                pass  # the end

        threading.Thread(target=read, daemon=True).start()
        yield from iter(outbox.get, None)

    def round(self, down, up):
        request = bytes(down - 8) + up.to_bytes(8, "big")
        for outbox in self.outboxes:
            outbox.put(request)
        for _ in self.outboxes:
            self.inbox.get()

    def rounds(self, down, up, num):
        times = [time.perf_counter()]
        for _ in range(num):
            self.round(down, up)
            times.append(time.perf_counter())
        return np.diff(times)


class Timed(deploy.GrpcServer):
    """Notes when the first site is asked, and how long the server had all answers by then."""

    def __init__(self, *args):
        super().__init__(*args)
        self.asked, self.own, self._heard = [], [], 0.0

    def send(self, site, data):
        if site == "site0":
            self.asked.append(time.perf_counter())
            self.own.append(self.asked[-1] - self._heard)
        super().send(site, data)

    def receive(self, timeout):
        news = super().receive(timeout)
        if news is not None:
            self._heard = time.perf_counter()
        return news


class Consortium:
    """A server of each kind, and processes of sites."""

    def __init__(self, folder, num_sites):
        self.folder, self.num_sites, self.processes = folder, num_sites, []
        (folder / "model.py").write_text(MODEL)
        keys = folder / "keys"
        deploy.make_authority(keys)
        deploy.make_party(keys, keys, "server", hosts=("localhost",))
        pins = {name: deploy.make_party(keys, keys, name) for name in names_of(num_sites)}
        self.echo = Echo(folder, num_sites)
        self.sites, self.servers = {}, {}
        for kind in KINDS:
            server = Timed("127.0.0.1:0", credentials(folder, "server"), pins)
            self.servers[kind] = server
            self.sites[kind] = deploy.Sites(study_of(folder, kind, num_sites), server)

    def __enter__(self):
        ports = [str(self.echo.port), *(str(server.port) for server in self.servers.values())]
        for name in names_of(self.num_sites):
            command = [sys.executable, "-m", "benchmarks.deployed", "serve", str(self.folder)]
            self.processes.append(subprocess.Popen([*command, name, str(self.num_sites), *ports]))
        while len(self.echo.outboxes) < self.num_sites:
            time.sleep(0.1)
            if any(process.poll() is not None for process in self.processes):
                raise RuntimeError("A site's process has ended.")
        return self

    def __exit__(self, *error):
        self.echo.server.stop(0)
        for sites in self.sites.values():
            sites.close()
        for process in self.processes:
            process.terminate()
            process.wait()

    def rounds(self, kind, size, num, fsync):
        """Return seconds: of the first round, of each after it, and of the server's own part."""
        (self.folder / "fsync").touch() if fsync else (self.folder / "fsync").unlink(True)
        sites, server = self.sites[kind], self.servers[kind]
        kernel, key = sites.study.kernel("main"), jax.random.key(0)
        sites.sample(
            key, kernel, jnp.zeros(size), num_rounds=num + 1, thinning=num + 1, progress=False
        )
        times = np.diff(server.asked[-num - 1 :])  # what was asked before is the run's beginning
        own = server.own[1 - num :]
        server.asked.clear()
        server.own.clear()
        return times[0], times[1:], own

    @property
    def megabytes(self):
        """The largest memory of a site's process, of its peak, where the system tells."""
        peaks = []
        for process in self.processes:
            status = Path(f"/proc/{process.pid}/status")
            lines = status.read_text().splitlines() if status.exists() else ()
            peaks += [int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM")]
        return max(peaks, default=float("nan"))


def mask_seconds(num_sites, num_words):
    """Return how long a site takes to mask so many words."""
    keys = {other: bytes([other]) * 32 for other in range(1, num_sites)}
    identities = tuple(bytes([i + 1]) * 32 for i in range(num_sites))
    session = secure.Session(bytes(32), secure.MaskGroup(bytes(32), identities), 0, keys)
    words, tag, times = np.zeros(num_words, np.uint64), secure.MaskTag(0, 0, 0), []
    for _ in range(5):
        begun = time.perf_counter()
        secure.mask(words, session, tag)
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


COLUMNS = (
    "sites",
    "floats",
    "simulated",
    "echo",
    "plain",
    "over echo",
    "at the server",
    "state on disk",
    "with fsync",
    "echo of words",
    "masked",
    "with fsync",
    "masks alone",
    "first round",
)


def simulated_seconds(study, size, num):
    """Return the seconds of a round of the same clients in this program, one after another."""
    rows = [{"y": np.ones(8, np.float32)} for _ in study.sites]
    data = fedmcmc.FederatedData.from_clients(rows)
    settings = dict(thinning=num, placement=fedmcmc.Placement(clients_at_a_time=1), progress=False)
    seconds = []
    for _ in range(3):
        begun = time.perf_counter()
        samples = fedmcmc.sample(
            jax.random.key(0),
            study.kernel("main"),
            data,
            jnp.zeros(size),
            num_rounds=num,
            **settings,
        )
        jax.block_until_ready(samples.draws)
        seconds.append(time.perf_counter() - begun)
    return min(seconds) / num


def measure(consortium, size):
    """Return a line of the table, in milliseconds."""
    num, rounds = consortium.num_sites, ROUNDS.get(size, 20)
    down, up, wide = 4 * size + HEADERS, 4 * size + HEADERS, 8 * (size + 3) + HEADERS
    first = consortium.rounds("plain", size, 2, False)[0]
    for kind in ("state", "masked"):
        consortium.rounds(kind, size, 2, False)
    names = ("echo", "plain", "own", "state", "disk", "wide", "masked", "kept")
    found = {name: [] for name in names}
    parts = 4
    for _ in range(parts):  # in turns, so that a machine whose speed drifts stays fair
        few = max(rounds // parts, 3)
        found["echo"].append(consortium.echo.rounds(down, up, few))
        _, plain, own = consortium.rounds("plain", size, few + 1, False)
        found["plain"].append(plain)
        found["own"].append(own)
        found["state"].append(consortium.rounds("state", size, few + 1, False)[1])
        found["disk"].append(consortium.rounds("state", size, few + 1, True)[1])
        found["wide"].append(consortium.echo.rounds(down, wide, few))
        found["masked"].append(consortium.rounds("masked", size, few + 1, False)[1])
        found["kept"].append(consortium.rounds("masked", size, few + 1, True)[1])
    ms = {name: 1000 * np.median(np.concatenate(times)) for name, times in found.items()}
    masks = 1000 * mask_seconds(num, size + 3)
    study = consortium.sites["plain"].study
    alone = 1000 * simulated_seconds(study, size, max(10, 2_000_000 // size))
    ratio = ms["plain"] / ms["echo"]
    cells = [
        f"{alone:.2g}",
        *(f"{ms[name]:.3g}" for name in ("echo", "plain")),
        f"{ratio:.2f}",
        f"{ms['own']:.2g}",
        *(f"{ms[name]:.3g}" for name in ("state", "disk", "wide", "masked", "kept")),
        f"{masks:.2g}",
        f"{1000 * first:.0f}",
    ]
    return [str(num), f"{size:,}", *cells]


def bench(num_sites=SITES, sizes=SIZES) -> None:
    print("milliseconds per round, between processes on this machine")
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for num in num_sites:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            consortium = stack.enter_context(Consortium(folder, num))
            for size in sizes:
                print(f"| {' | '.join(measure(consortium, size))} |", flush=True)
            print(f"{num} sites: {consortium.megabytes:.0f} MB at most in a site's process")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["serve", *given]:
            serve(*given)
        case [*given]:
            bench(*([int(part) for part in numbers.split(",")] for numbers in given))
