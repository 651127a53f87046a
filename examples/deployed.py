# %% [markdown]
# # Three sites and a server on one machine
#
# What is simulated elsewhere runs here as it would between hospitals: three sites with rows of
# their own, each a process, and a server that never sees a row. They talk over TLS on this
# machine's own address, at a port that is free, and all of it ends by itself. [A
# server and two sites](../docs/tutorials/deployed_federation.md) explains each file.

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
# ## The study
#
# Its files are what all parties read and agree to: the model, and the kernel that will run.

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
# ## Kits, rows, approval
#
# Every party gets a folder with keys and settings. Each site's owner puts rows there, reads what
# will run, and approves.


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
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        approve = ["deploy", "approve", "--yes", "--settings", str(kits / name / "site.toml")]
        assert fedmcmc_command(approve) == 0
print(shown.getvalue())

# %% [markdown]
# ## The run
#
# Each site is a process. The server's part is this program: `deploy.connect` waits for the sites,
# which then stand where data would. They are ended in any case.

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
# ## The same draws as the simulation's
#
# With the same key a simulation draws the same numbers, up to rounding, since clients of this
# kernel draw nothing of their own. (Only this example has all rows, to compare.)

# %%
data = fedmcmc.FederatedData.from_clients([rows[name] for name in study.sites])
simulated = fedmcmc.sample(key, kernel, data, jnp.zeros(2), **rounds)
largest = np.abs(deployed.draws - simulated.draws).max()
print(f"largest difference of {deployed.draws.size} numbers: {largest:.1g}")
assert largest < 1e-4
print(f"each site sent {int(deployed.totals['bits_up'][0]) // len(sizes) // 300} bits per round")
