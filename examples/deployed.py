# %% [markdown]
# # Run three sites and a server on one machine
#
# Other examples simulate their clients. Here three sites run as separate processes with their own
# rows, and a server never sees a row. All of them communicate over TLS at a free local port, and
# they stop at the end. [A server and two sites](../docs/tutorials/deployed_federation.md) explains
# each file step by step.

# %%
import contextlib
import io
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import fedmcmc
from fedmcmc import deploy
from fedmcmc.__main__ import main as fedmcmc_command

folder = Path(tempfile.mkdtemp())
sizes = {"bern": 60, "basel": 30, "chur": 24}

# %% [markdown]
# ## Write the study
#
# All parties read and approve the files of the study. They contain the model and the kernel.

# %%
(folder / "model.py").write_text("""\
import jax.numpy as jnp

import fedmcmc


def posterior(settings):
    def logprior_fn(theta):
        return -0.5 * jnp.sum(theta**2)

    def loglikelihood_fn(theta, rows):
        logits = rows["x"] @ theta
        return rows["y"] * logits - jnp.logaddexp(0.0, logits)

    return fedmcmc.Posterior(logprior_fn, loglikelihood_fn, init_fn=lambda key: jnp.zeros(2))


def kernel(posterior, settings):
    return fedmcmc.lsd(posterior, step_size=settings["step_size"])
""")
(folder / "study.toml").write_text(f"""\
name = "infections"
posterior = "model.py:posterior"

[sites]
{chr(10).join(f"{name} = {size}" for name, size in sizes.items())}

[rows]
x = {{ dtype = "float32", shape = [2] }}
y = {{ dtype = "float32" }}

[kernels]
main = "model.py:kernel"

[settings]
step_size = 0.02
""")
study = deploy.Study.read(folder / "study.toml")
print(study)

# %% [markdown]
# ## Make kits, add rows, approve
#
# Every party gets a folder, its kit, with keys and settings. Each site's owner adds the rows, reads
# the description of the study, and approves it.


# %%
def free_port():
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


kits = folder / "kits"
deploy.make_consortium(folder / "study.toml", kits, f"localhost:{free_port()}")
rng = np.random.default_rng(0)
rows = {}
for name, size in sizes.items():
    x = np.stack([np.ones(size), rng.normal(size=size)], 1).astype(np.float32)
    y = (rng.random(size) < 1 / (1 + np.exp(-x[:, 1]))).astype(np.float32)
    rows[name] = {"x": x, "y": y}
    np.savez(kits / name / "rows.npz", **rows[name])
    listing = io.StringIO()
    with contextlib.redirect_stdout(listing):
        approve = ["deploy", "approve", "--yes", "--settings", str(kits / name / "site.toml")]
        assert fedmcmc_command(approve) == 0
print(listing.getvalue())

# %% [markdown]
# ## Run
#
# Each site is a process, and this program is the server. `deploy.connect` waits for the sites and
# returns an object that takes the place of the data. The last lines end the sites' processes, even
# after an error.

# %%
processes = []
try:
    for name in sizes:
        with (folder / f"{name}.log").open("wb") as log:
            site = [sys.executable, "-P", "-m", "fedmcmc.site", str(kits / name / "site.toml")]
            env = {**os.environ, "JAX_PLATFORMS": "cpu"}
            processes.append(subprocess.Popen(site, stdout=log, stderr=log, env=env))
    sites = deploy.connect(kits / "server" / "server.toml")
    print(sites)
    kernel = study.kernel("main")
    key, rounds = jax.random.key(0), dict(num_rounds=300, progress=False)
    deployed = sites.sample(key, kernel, jnp.zeros(2), **rounds)
    sites.close()
finally:
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait(timeout=60)
print(deployed)

# %% [markdown]
# ## Compare with a simulation
#
# With the same key, a simulation gives the same draws up to rounding, because the clients of this
# kernel draw no random numbers. (In a real study nobody has all rows, so nobody could make this
# comparison.)

# %%
data = fedmcmc.FederatedData.from_clients([rows[name] for name in study.sites])
simulated = fedmcmc.sample(key, kernel, data, jnp.zeros(2), **rounds)
largest = np.abs(deployed.draws - simulated.draws).max()
print(f"largest difference between {deployed.draws.size} pairs of numbers: {largest:.1g}")
assert largest < 1e-4
print(f"each site sent {int(deployed.totals['bits_up'][0]) // len(sizes) // 300} bits per round")
