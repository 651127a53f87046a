"""A study of files, and its sites and server as the two commands start them."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np

from fedmcmc import deploy
from tests.support.consortium import credentials, make_keys

NAMES = ("bern", "basel", "chur")
SIZES = (5, 1, 4)
MODEL = '''
import jax.numpy as jnp
import fedmcmc

posterior = fedmcmc.Posterior(
    lambda theta: -0.5 * jnp.sum(theta**2),
    lambda theta, x: -jnp.sum(jnp.sqrt(1 + (x - theta) ** 2), axis=-1),
    init_fn=lambda key: jnp.zeros(2),
)
start = jnp.zeros(2)


def kernel(posterior, settings):
    """Clients keep snapshots and memories, of which the server has copies."""
    return fedmcmc.compress(
        fedmcmc.lsd_pp(
            posterior,
            step_size=settings["step_size"],
            batch_size=2,
            refresh_every=7,
            participation=fedmcmc.uniform(2),
        ),
        fedmcmc.memory(fedmcmc.quantize(4), of="active"),
    )


def hidden(posterior, settings):
    """All clients take part, in a secure sum."""
    return fedmcmc.secure_sum(
        fedmcmc.lsd_pp(posterior, step_size=settings["step_size"], batch_size=2, refresh_every=7)
    )
'''
SETTINGS = dict(num_rounds=400, num_chains=2, thinning=2)
EVERY_ROUNDS = 10


def rows_of(name):
    index = NAMES.index(name)
    return np.random.default_rng(index).normal(index, 1, (SIZES[index], 2)).astype(np.float32)


def free_port():
    with socket.socket() as at:
        at.bind(("127.0.0.1", 0))
        return at.getsockname()[1]


class Consortium:
    """Files of three sites and a server in one folder, and their processes.

    With `masked`, messages are under masks.
    """

    def __init__(self, folder, *, asks=(), run=None, masked=False):
        self.folder, self.port, self.processes = Path(folder), free_port(), {}
        (self.folder / "model.py").write_text(MODEL)
        keys = self.folder / "keys"
        secure = ""
        if masked:
            public = {name: deploy.make_identity(keys, name) for name in NAMES}
            lines = "\n".join(f'{name} = "{key}"' for name, key in public.items())
            secure = f"[secure]\nrounds = 1000\n[secure.identities]\n{lines}"
        table = "\n".join(f"{name} = {n}" for name, n in zip(NAMES, SIZES, strict=True))
        (self.folder / "study.toml").write_text(
            f"""
name = "three clinics"
posterior = "model.py:posterior"
rows = {{ dtype = "float32", shape = [2] }}
asks = {json.dumps(list(asks))}
[sites]
{table}
[kernels]
main = "model.py:{"hidden" if masked else "kernel"}"
[settings]
step_size = 0.01
{secure}
"""
        )
        self.study = deploy.Study.read(self.folder / "study.toml")
        self.pins = make_keys(keys, NAMES)
        for name in NAMES:
            np.savez(self.folder / f"{name}.npz", rows=rows_of(name))
            (self.folder / f"{name}.toml").write_text(
                f'''
name = "{name}"
study = "study.toml"
approved = "{self.study.digest}"
rows = "{name}.npz"
folder = "{name}"
log = "{name}.audit.log"
limits = {{ min_rows = 1, min_batch = 1 }}
server = "localhost:{self.port}"
{f'identity = "keys/{name}.identity"' if masked else ""}
{self._keys(name)}
'''
            )
        if run is None:
            run = dict(kernel="main", seed=3, draws="draws.npz", position="model.py:start")
            run |= dict(checkpoint="checkpoint", every_rounds=EVERY_ROUNDS, progress=False)
            run |= SETTINGS
        lines = "\n".join(f"{name} = {json.dumps(value)}" for name, value in run.items())
        pins = "\n".join(f'{name} = "{pin}"' for name, pin in self.pins.items())
        (self.folder / "server.toml").write_text(
            f"""
study = "study.toml"
address = "127.0.0.1:{self.port}"
{self._keys("server")}
[sites]
{pins}
[run]
{lines}
"""
        )

    def _keys(self, name):
        return (
            f'key = "keys/{name}.key"\ncertificate = "keys/{name}.crt"\nauthority = "keys/ca.crt"'
        )

    def start(self, name):
        """Start a site's process, or the server's."""
        command = "server" if name == "server" else "site"
        log = (self.folder / f"{name}.log").open("ab")
        self.processes[name] = subprocess.Popen(
            [sys.executable, "-P", "-m", f"fedmcmc.{command}", str(self.folder / f"{name}.toml")],
            stdout=log,
            stderr=log,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            start_new_session=True,
        )
        log.close()

    def kill(self, name):
        """End a process at once; return whether it was running."""
        process = self.processes[name]
        ran = process.poll() is None
        if ran:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return ran

    def end(self):
        for name in self.processes:
            self.kill(name)

    def log(self, name):
        return (self.folder / f"{name}.log").read_text()

    @property
    def round(self):
        """The round of the server's last checkpoint, 0 before the first."""
        try:
            return json.loads((self.folder / "checkpoint" / "run.json").read_text())["round"]
        except (OSError, ValueError):
            return 0

    def _site(self, name, folder):
        identity = self.folder / "keys" / f"{name}.identity" if self.study.secure else None
        given = dict(folder=folder, identity=identity, min_rows=1, min_batch=1)
        return deploy.Site(self.study, name, rows_of(name), **given)

    @contextmanager
    def in_threads(self, names):
        """Run sites in threads of this process, which dial the server's port."""
        stop, threads = threading.Event(), []
        for name in names:
            site = self._site(name, self.folder / name)
            given = (site, f"localhost:{self.port}", credentials(self.folder / "keys", name))
            threads.append(
                threading.Thread(target=deploy.serve_site, args=given, kwargs={"stop": stop})
            )
            threads[-1].start()
        try:
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join(timeout=30)
                assert not thread.is_alive()

    def undisturbed(self):
        """Return the samples of the same run with its sites, of the same secrets, in threads."""
        local = deploy.LocalTransport()
        for name in NAMES:
            (self.folder / "local" / name).mkdir(parents=True, exist_ok=True)
            shutil.copy(self.folder / name / "secret", self.folder / "local" / name)
            local.join(self._site(name, self.folder / "local" / name))
        return deploy.run(
            self.study,
            jax.random.key(3),
            "main",
            np.zeros(2, np.float32),
            transport=local,
            progress=False,
            **SETTINGS,
        )
