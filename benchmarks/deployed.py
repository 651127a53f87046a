"""Milliseconds per round between real sites, compared with a bare gRPC echo of the same bytes.

``python -m benchmarks deploy`` starts one process per site on this machine. All of them use TLS on
loopback. Alternatives take turns. The table shows the median over rounds, without the first round,
which compiles. ``python -m benchmarks.deployed 4,16 1000`` measures these numbers of sites (4 and
16) and of floats per message (1000) only.
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
"""Approximate bytes of a request in addition to its numbers."""


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


# A site is a process that serves all kinds of rounds. The server uses one kind at a time.


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
        arguments = (site, f"localhost:{port}", credentials(folder, name))
        threads.append(threading.Thread(target=deploy.serve_site, args=arguments, daemon=True))
    for thread in threads:
        thread.start()
    threads[0].join()  # ends with the server


def echo(folder, name, port):
    """Answer each request with the number of bytes that its last eight bytes encode."""
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
    """Bare gRPC server with one stream of bytes per site."""

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
                pass  # the site has closed its stream

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
    """Server that records when each round starts and how long its own computation takes.

    `request_times` are the times of requests to the first site. `server_seconds` are the seconds
    between the last message that the server received and each of these requests.
    """

    def __init__(self, *args):
        super().__init__(*args)
        self.request_times, self.server_seconds, self._receive_time = [], [], 0.0

    def send(self, site, data):
        if site == "site0":
            self.request_times.append(time.perf_counter())
            self.server_seconds.append(self.request_times[-1] - self._receive_time)
        super().send(site, data)

    def receive(self, timeout):
        message = super().receive(timeout)
        if message is not None:
            self._receive_time = time.perf_counter()
        return message


class Consortium:
    """One server per kind of round, and the processes of the sites."""

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
        """Return seconds: the first round, each later round, and the server's computation."""
        (self.folder / "fsync").touch() if fsync else (self.folder / "fsync").unlink(True)
        sites, server = self.sites[kind], self.servers[kind]
        kernel, key = sites.study.kernel("main"), jax.random.key(0)
        sites.sample(
            key, kernel, jnp.zeros(size), num_rounds=num + 1, thinning=num + 1, progress=False
        )
        times = np.diff(server.request_times[-num - 1 :])  # earlier requests set up the run
        server_seconds = server.server_seconds[1 - num :]
        server.request_times.clear()
        server.server_seconds.clear()
        return times[0], times[1:], server_seconds

    @property
    def megabytes(self):
        """Largest peak memory of a site's process (NaN where the system does not report it)."""
        peaks = []
        for process in self.processes:
            status = Path(f"/proc/{process.pid}/status")
            lines = status.read_text().splitlines() if status.exists() else ()
            peaks += [int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM")]
        return max(peaks, default=float("nan"))


def mask_seconds(num_sites, num_words):
    """Return the median seconds that a site takes to mask `num_words` words."""
    keys = {site: bytes([site]) * 32 for site in range(1, num_sites)}
    identities = tuple(bytes([i + 1]) * 32 for i in range(num_sites))
    session = secure.Session(bytes(32), secure.MaskGroup(bytes(32), identities), 0, keys)
    words, tag, times = np.zeros(num_words, np.uint64), secure.MaskTag(0, 0, 0), []
    for _ in range(5):
        start_time = time.perf_counter()
        secure.mask(words, session, tag)
        times.append(time.perf_counter() - start_time)
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
    """Return the seconds of a simulated round, with the same clients computed one after another."""
    rows = [{"y": np.ones(8, np.float32)} for _ in study.sites]
    data = fedmcmc.FederatedData.from_clients(rows)
    settings = dict(thinning=num, placement=fedmcmc.Placement(clients_at_a_time=1), progress=False)
    seconds = []
    for _ in range(3):
        start_time = time.perf_counter()
        samples = fedmcmc.sample(
            jax.random.key(0),
            study.kernel("main"),
            data,
            jnp.zeros(size),
            num_rounds=num,
            **settings,
        )
        jax.block_until_ready(samples.draws)
        seconds.append(time.perf_counter() - start_time)
    return min(seconds) / num


def measure(consortium, size):
    """Return the cells of one row of the table, with times in milliseconds."""
    num, rounds = consortium.num_sites, ROUNDS.get(size, 20)
    down, up, wide = 4 * size + HEADERS, 4 * size + HEADERS, 8 * (size + 3) + HEADERS
    first_round = consortium.rounds("plain", size, 2, False)[0]
    for kind in ("state", "masked"):
        consortium.rounds(kind, size, 2, False)
    names = ("echo", "plain", "server", "state", "state_fsync", "wide", "masked", "masked_fsync")
    seconds = {name: [] for name in names}
    parts = 4
    for _ in range(
        parts
    ):  # take turns, so that drifts of the machine's speed affect all alternatives
        few = max(rounds // parts, 3)
        seconds["echo"].append(consortium.echo.rounds(down, up, few))
        _, plain, server = consortium.rounds("plain", size, few + 1, False)
        seconds["plain"].append(plain)
        seconds["server"].append(server)
        seconds["state"].append(consortium.rounds("state", size, few + 1, False)[1])
        seconds["state_fsync"].append(consortium.rounds("state", size, few + 1, True)[1])
        seconds["wide"].append(consortium.echo.rounds(down, wide, few))
        seconds["masked"].append(consortium.rounds("masked", size, few + 1, False)[1])
        seconds["masked_fsync"].append(consortium.rounds("masked", size, few + 1, True)[1])
    ms = {name: 1000 * np.median(np.concatenate(times)) for name, times in seconds.items()}
    masks = 1000 * mask_seconds(num, size + 3)
    study = consortium.sites["plain"].study
    alone = 1000 * simulated_seconds(study, size, max(10, 2_000_000 // size))
    ratio = ms["plain"] / ms["echo"]
    cells = [
        f"{alone:.2g}",
        *(f"{ms[name]:.3g}" for name in ("echo", "plain")),
        f"{ratio:.2f}",
        f"{ms['server']:.2g}",
        *(f"{ms[name]:.3g}" for name in ("state", "state_fsync", "wide", "masked", "masked_fsync")),
        f"{masks:.2g}",
        f"{1000 * first_round:.0f}",
    ]
    return [str(num), f"{size:,}", *cells]


def bench(num_sites=SITES, sizes=SIZES) -> None:
    print("milliseconds per round between processes on this machine")
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for num in num_sites:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            consortium = stack.enter_context(Consortium(folder, num))
            for size in sizes:
                print(f"| {' | '.join(measure(consortium, size))} |", flush=True)
            print(f"{num} sites: a site's process uses at most {consortium.megabytes:.0f} MB")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["serve", *arguments]:
            serve(*arguments)
        case [*arguments]:
            bench(*([int(part) for part in numbers.split(",")] for numbers in arguments))
