"""Run the demo's trial with four hospitals and a server as separate processes, over TLS.

``make deploy-demo``, or ``python -m examples.deploy_demo [--num-rounds 5000] [--out FOLDER]``.
The demo runs `fedmcmc.fit` and FSGLD, and compares their draws with a simulation with the same
keys. Then it kills a hospital during a run and starts it again, which changes no draw. The server
receives settings from this program, and everything else from the hospitals.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np

import fedmcmc
from examples import demo
from fedmcmc import deploy
from fedmcmc.__main__ import main as fedmcmc_command

STUDY = Path(__file__).parent / "deployed_trial"
QUESTIONS = (*deploy.FIT, "CommonExpansions", "Relay", "Conducive")
"""Requests that the study allows: for `fedmcmc.fit`, then for FSGLD's mode and expansions."""
SEED = 0
RUN = {"num_burnin": 200, "thinning": 2, "num_chains": 4}
MIN_ROWS = 50
"""Smaller hospitals must explicitly allow their number of rows."""
PATIENCE_SECONDS = 900


def make_consortium(out, data, names):
    """Write the study, make a folder per party with its rows, and approve at all hospitals."""
    study, folder = out / "study", out / "consortium"
    for earlier in (study, folder):
        shutil.rmtree(earlier, ignore_errors=True)
    study.mkdir(parents=True)
    shutil.copy(STUDY / "model.py", study)
    sites = "\n".join(f"{name} = {num}" for name, num in zip(names, data.sizes, strict=True))
    (study / "study.toml").write_text(f"""\
name = "indomethacin"
posterior = "model.py:posterior"
asks = {json.dumps(QUESTIONS)}
reproducible = true               # all keys are public, to compare with a simulation

[sites]
{sites}

[rows]
treated = {{ dtype = "float32" }}
risk = {{ dtype = "float32" }}
pancreatitis = {{ dtype = "int32" }}
""")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    deploy.make_consortium(study / "study.toml", folder, f"localhost:{port}")
    for index, name in enumerate(names):
        np.savez(folder / name / "rows.npz", **jax.device_get(data.client_rows(index)))
        settings = folder / name / "site.toml"
        if data.sizes[index] < MIN_ROWS:
            # In practice, an owner would refuse: a few messages determine all of these rows.
            settings.write_text(settings.read_text().replace("# min_rows = 20", "min_rows = 1"))
        approve = ["deploy", "approve", "--yes", "--settings", str(settings)]
        with (folder / f"{name}.approved.txt").open("w") as text, contextlib.redirect_stdout(text):
            if fedmcmc_command(approve):
                sys.exit(f"{name} did not approve.")
    return folder


class Processes:
    """Processes of a consortium, which end with the ``with`` block."""

    def __init__(self, folder):
        self.folder, self.running = folder, {}

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for process in self.running.values():
            process.terminate()
        for process in self.running.values():
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def start(self, party, *command):
        """Start the process of a party, with output to ``PARTY.log``."""
        with (self.folder / f"{party}.log").open("ab") as log:
            self.running[party] = subprocess.Popen(
                [sys.executable, "-P", *map(str, command)],
                stdout=log,
                stderr=log,
                env={**os.environ, "JAX_PLATFORMS": "cpu"},
            )

    def start_site(self, name):
        self.start(name, "-m", "fedmcmc.site", self.folder / name / "site.toml")

    def start_server(self, name, program, **run):
        """Start the server with the settings of one run."""
        server = self.folder / "server"
        head, _, _ = (server / "server.toml").read_text().partition("[run]")
        head = head.replace("0.0.0.0", "127.0.0.1")  # no access from outside this machine
        run |= {"draws": f"{name}.npz", "progress": False}
        lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in run.items())
        (server / f"{name}.toml").write_text(f"{head}[run]\n{lines}\n")
        self.start("server", *program, server / f"{name}.toml")

    def wait_for(self, is_true):
        """Wait until a condition holds; exit if a process fails or nothing happens."""
        end = time.monotonic() + PATIENCE_SECONDS
        while not is_true():
            failed = [party for party, p in self.running.items() if p.poll() not in (None, 0)]
            if failed or time.monotonic() > end:
                logs = [self.folder / f"{party}.log" for party in failed or self.running]
                sys.exit("\n".join(f"{log}: {log.read_text()[-2000:]}" for log in logs))
            time.sleep(0.02)

    def wait_for_draws(self, name):
        """Wait for the end of a run; return the coefficients that the server drew."""
        self.wait_for(lambda: self.running["server"].poll() == 0)
        with np.load(self.folder / "server" / f"{name}.npz") as stored:
            return stored["coefficients"]


def simulate(data, num_rounds):
    """Return the draws of the coefficients in simulations of both runs."""
    posterior = fedmcmc.from_numpyro(demo.model, example=data)
    start = posterior.init_fn(jax.random.split(jax.random.key(SEED))[1])
    mode = fedmcmc.surrogates.mode(posterior, data, start).position
    surrogates = fedmcmc.surrogates.taylor(posterior, data, mode)
    kernel = fedmcmc.fsgld(posterior, surrogates, **demo.LOCAL_STEPS)
    key = jax.random.key(SEED)
    run = {"num_rounds": num_rounds, "progress": False, **RUN}
    fsgld = fedmcmc.sample(key, kernel, data, mode, **run)
    fitted = fedmcmc.fit(demo.model, data, rng_key=jax.random.key(SEED + 3), progress=False)
    samples = {"fit": fitted.samples, "FSGLD": fsgld}
    return {method: x.draws["coefficients"] for method, x in samples.items()}


def last_round(log, start):
    """Return the round of the last answer in an audit log after byte `start`, or -1."""
    entries = map(json.loads, log.read_bytes()[start:].split(b"\n")[:-1])
    return max((entry["round"] for entry in entries if entry["what"] == "answer"), default=-1)


def print_comparison(at_sites, simulated):
    """Print the means and sds of both, and the largest difference between their draws."""
    columns = ("quantity", "method", "mean, sites", "mean, simulated", "sd, sites")
    columns += ("sd, simulated", "largest difference")
    print("\n" + "  ".join(f"{name:>18}" for name in columns))
    for method, draws in at_sites.items():
        pairs = [demo.quantities({"coefficients": x}) for x in (draws, simulated[method])]
        for name, x in pairs[0].items():
            y = pairs[1][name]
            cells = [name, method, *(f"{v:.4f}" for v in (x.mean(), y.mean(), x.std(), y.std()))]
            cells.append(f"{np.abs(x - y).max():.1e}")
            print("  ".join(f"{cell:>18}" for cell in cells))


def main(arguments=None):
    """Run the consortium, compare with the simulation, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-rounds", type=int, default=5_000, help="number of rounds of FSGLD")
    parser.add_argument(
        "--killed-rounds",
        type=int,
        default=1_000,
        help="number of rounds of the run with a killed hospital",
    )
    parser.add_argument("--out", type=Path, default=Path("results/deploy_demo"))
    settings = parser.parse_args(arguments)
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit("The demo was terminated.")
    )  # ends all processes
    start_seconds = time.perf_counter()

    def report(text):
        print(f"{time.perf_counter() - start_seconds:4.0f} s  {text}", flush=True)

    data, names = demo.load_trial()
    folder = make_consortium(settings.out, data, names)
    report(f"{', '.join(names)} have approved the study")
    simulated = simulate(data, settings.num_rounds)
    report("the simulation has finished")

    at_sites = {}
    fsgld = {"seed": SEED, **demo.LOCAL_STEPS, **RUN}
    program = [STUDY / "server.py"]
    with Processes(folder) as processes:
        for name in names:
            processes.start_site(name)
        processes.start_server("fit", ["-m", "fedmcmc.server"], kernel="fit", seed=SEED + 3)
        at_sites["fit"] = processes.wait_for_draws("fit")
        report("fit has finished")
        processes.start_server("fsgld", program, num_rounds=settings.num_rounds, **fsgld)
        at_sites["FSGLD"] = processes.wait_for_draws("fsgld")
        report(f"FSGLD has finished: {settings.num_rounds:,} rounds of {RUN['num_chains']} chains")

        victim, num_rounds = names[0], settings.killed_rounds
        log = folder / victim / "audit.log"
        start = log.stat().st_size
        processes.start_server("killed", program, num_rounds=num_rounds, **fsgld)
        processes.wait_for(lambda: last_round(log, start) > num_rounds // 3)
        processes.running[victim].kill()
        processes.running[victim].wait()
        report(f"{victim} was killed after round {last_round(log, start)}")
        processes.start_site(victim)
        again = processes.wait_for_draws("killed")
        report(f"{victim} restarted, and the run has finished")

    print_comparison(at_sites, simulated)
    num_draws = again.shape[1]
    if not np.array_equal(again, at_sites["FSGLD"][:, :num_draws]):
        sys.exit("The draws of the run with a kill differ from the run without.")
    print(f"\nAll {num_draws} draws per chain with and without the kill are equal, bit by bit.")
    for name in names:
        sent = deploy.verify_log(folder / name / "audit.log")
        print(f"{name} sent {sent.num_answers:,} messages, {sent.num_bytes:,} bytes")
    print(f"Approvals, settings, logs and draws are in {folder}/.")


if __name__ == "__main__":
    main()
