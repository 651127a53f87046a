"""The demo's trial at real sites: four hospitals and a server, each a process, over TLS.

``make deploy-demo``, or ``python -m experiments.deploy_demo [key=value ...]`` with the fields of
`Config`. Beside what the processes draw stands what the demo's simulation draws with the same keys.
The server asks the hospitals for all that it needs; this program, which has all rows, hands it
nothing but settings.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

import fedmcmc
from experiments import demo
from experiments.output import text_table
from fedmcmc import deploy
from fedmcmc.__main__ import main as fedmcmc_command

STUDY = Path(__file__).parent / "deployed_trial"
ASKS = (*deploy.FIT, "CommonExpansions", "Relay", "Conducive")
"""For `fedmcmc.fit`, for the mode and the hospitals' expansions there, and for FSGLD with these."""
PYTHONPATH = os.pathsep.join(
    filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")])
)
"""Where processes find the module of the demo's own server."""
FEW_ROWS = 50
"""Rows below which a hospital has to allow it that few rows take part; this is a demo."""
PATIENCE_SECONDS = 900.0  # machines are busy


@dataclass(frozen=True)
class Config:
    """Settings of the deployed demo."""

    seed: int = 0
    num_chains: int = 4
    num_rounds: int = 5_000
    num_burnin: int = 200
    thinning: int = 2
    num_local_steps: int = 10
    step_size: float = 1e-3
    killed_rounds: int = 1_000  # of the run in which a hospital is killed
    out: str = "results/deploy_demo"


class Processes:
    """The processes of a consortium in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, module: str, settings: str) -> None:
        """Start the process of a party, which writes to ``NAME.log``."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(self.folder / name / settings)],
                stdout=log,
                stderr=log,
                env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": PYTHONPATH},
            )

    def start_site(self, name: str) -> None:
        """Start a hospital."""
        self.start(name, "fedmcmc.site", "site.toml")

    def kill(self, name: str) -> None:
        """End a process at once."""
        self.running[name].send_signal(signal.SIGKILL)
        self.running[name].wait()

    def wait(self, true: Callable[[], bool], what: str) -> None:
        """Wait until something is true, or a process ends that should not."""
        end = time.monotonic() + PATIENCE_SECONDS
        while not true():
            ended = [name for name, p in self.running.items() if p.poll() not in (None, 0)]
            if ended or time.monotonic() > end:
                logs = "\n".join(self._log(name) for name in ended or self.running)
                sys.exit(f"{what} did not happen. {logs}")
            time.sleep(0.02)

    def _log(self, name: str) -> str:
        return f"{name}: {(self.folder / f'{name}.log').read_text()[-2000:]}"

    def end(self) -> None:
        """End all processes, whatever they do."""
        for process in self.running.values():
            process.terminate()
        for process in self.running.values():
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def running(folder: Path) -> Iterator[Processes]:
    """Start nothing yet, and leave nothing running."""
    processes = Processes(folder)
    try:
        yield processes
    finally:
        processes.end()


def make_study(config: Config, data: fedmcmc.FederatedData, names: list[str]) -> Path:
    """Write the study's files; return its path."""
    folder = Path(config.out) / "study"
    folder.mkdir(parents=True)
    shutil.copyfile(STUDY / "model.py", folder / "model.py")
    sites = "\n".join(
        f"{name} = {num}" for name, num in zip(names, data.sizes.tolist(), strict=True)
    )
    path = folder / "study.toml"
    path.write_text(f"""\
name = "indomethacin"
posterior = "model.py:posterior"
asks = {json.dumps(ASKS)}
reproducible = true               # to compare with a simulation: all keys are public

[sites]
{sites}

[rows]
treated = {{ dtype = "float32" }}
risk = {{ dtype = "float32" }}
pancreatitis = {{ dtype = "int32" }}
""")
    return path


def make_kits(study: Path, data: fedmcmc.FederatedData, names: list[str], folder: Path) -> None:
    """Make a folder per party, give each hospital its rows, and let all owners approve."""
    deploy.make_consortium(study, folder, f"localhost:{free_port()}")
    for index, name in enumerate(names):
        np.savez(folder / name / "rows.npz", **jax.tree.map(np.asarray, data.client_rows(index)))
        if data.sizes[index] < FEW_ROWS:
            # Its owner would not: few messages tell all of its rows.
            path = folder / name / "site.toml"
            path.write_text(path.read_text().replace("# min_rows = 20", "min_rows = 1"))
        settings = ["--settings", str(folder / name / "site.toml")]
        with (folder / f"{name}.approved.txt").open("w") as file, printed_to(file):
            if fedmcmc_command(["deploy", "approve", "--yes", *settings]):
                sys.exit(f"{name} did not approve.")


@contextmanager
def printed_to(file: Any) -> Iterator[None]:
    """Write what is printed to a file."""
    shown, sys.stdout = sys.stdout, file
    try:
        yield
    finally:
        sys.stdout = shown


def free_port() -> int:
    """Return a port of this machine that nobody has."""
    with socket.socket() as at:
        at.bind(("127.0.0.1", 0))
        port: int = at.getsockname()[1]
        return port


def begin_server(
    processes: Processes, name: str, module: str = "fedmcmc.server", **run: Any
) -> Callable[[], np.ndarray]:
    """Start the server's process with a run; return what waits for the coefficients it draws."""
    folder = processes.folder / "server"
    head = (folder / "server.toml").read_text().partition("[run]")[0]
    run |= dict(draws=f"{name}.npz", progress=False)
    lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in run.items())
    head = head.replace("0.0.0.0", "127.0.0.1")  # nobody from outside
    (folder / f"{name}.toml").write_text(f"{head}[run]\n{lines}\n")
    processes.start("server", module, f"{name}.toml")
    server = processes.running["server"]

    def finish() -> np.ndarray:
        processes.wait(lambda: server.poll() == 0, f"The end of {name}")
        with np.load(folder / f"{name}.npz") as stored:
            draws: np.ndarray = stored["coefficients"]
        return draws

    return finish


def simulate(
    config: Config, data: fedmcmc.FederatedData, kernel: fedmcmc.FederatedKernel, mode: Any
) -> np.ndarray:
    """Return the coefficients that the demo's simulation draws."""
    samples = fedmcmc.sample(
        jax.random.key(config.seed),
        kernel,
        data,
        mode,
        num_rounds=config.num_rounds,
        num_burnin=config.num_burnin,
        thinning=config.thinning,
        num_chains=config.num_chains,
        progress=False,
    )
    draws: np.ndarray = samples.draws["coefficients"]
    return draws


def compare(drawn: dict[str, dict[str, np.ndarray]]) -> list[dict[str, Any]]:
    """Return the table: means and sds of both, and how far draws are apart at most."""
    table = []
    for method, both in drawn.items():
        sites, simulated = (
            demo.quantities({"coefficients": x, "odds_ratio": np.exp(x[..., 1])})
            for x in (both["sites"], both["simulation"])
        )
        for name in sites:
            one, other = sites[name], simulated[name]
            table.append(
                {
                    "quantity": name,
                    "method": method,
                    "mean, sites": f"{one.mean():.4f}",
                    "mean, simulated": f"{other.mean():.4f}",
                    "sd, sites": f"{one.std():.4f}",
                    "sd, simulated": f"{other.std():.4f}",
                    "draws apart": f"{np.abs(one - other).max():.1e}",
                }
            )
    return table


def main(arguments: list[str]) -> None:
    """Run the deployed demo and print its table."""
    config, begun = demo.settings_of(Config, arguments), time.perf_counter()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("The demo was ended."))  # by ending all

    def say(text: str) -> None:
        print(f"{time.perf_counter() - begun:4.0f} s  {text}", flush=True)

    out = Path(config.out)
    for earlier in ("study", "consortium"):
        shutil.rmtree(out / earlier, ignore_errors=True)
    data, names = demo.load_trial()
    posterior = fedmcmc.from_numpyro(demo.model, example=data)
    assert posterior.init_fn is not None
    start = posterior.init_fn(jax.random.split(jax.random.key(config.seed))[1])
    study = make_study(config, data, names)
    folder = out / "consortium"
    make_kits(study, data, names, folder)
    say(f"{', '.join(names)} have approved {deploy.Study.read(study).digest[:16]}")
    settings = dict(step_size=config.step_size, num_local_steps=config.num_local_steps)
    chains = dict(
        module="experiments.deployed_trial.server",
        seed=config.seed,
        num_burnin=config.num_burnin,
        thinning=config.thinning,
        num_chains=config.num_chains,
        **settings,
    )
    drawn: dict[str, dict[str, np.ndarray]] = {"fit": {}, "FSGLD": {}}
    with running(folder) as processes:
        for name in names:
            processes.start_site(name)
        finish = begin_server(processes, "fit", kernel="fit", seed=config.seed + 3)
        say("five processes are started; meanwhile the simulation")
        mode = fedmcmc.surrogates.mode(posterior, data, start).position
        surrogates = fedmcmc.surrogates.taylor(posterior, data, mode)
        kernel = fedmcmc.fsgld(posterior, surrogates, **settings)
        drawn["FSGLD"]["simulation"] = simulate(config, data, kernel, mode)
        key = jax.random.key(config.seed + 3)
        fitted = fedmcmc.fit(demo.model, data, rng_key=key, progress=False)
        drawn["fit"]["simulation"] = fitted.samples.draws["coefficients"]
        drawn["fit"]["sites"] = finish()
        say("fit has ended")
        seconds = time.perf_counter()
        finish = begin_server(processes, "fsgld", num_rounds=config.num_rounds, **chains)
        drawn["FSGLD"]["sites"] = finish()
        seconds = time.perf_counter() - seconds
        say(
            f"FSGLD has ended: {config.num_rounds:,} rounds of {config.num_chains} chains, "
            f"{1e3 * seconds / config.num_rounds:.1f} ms per round with the server's start and "
            "what it asks before"
        )
        again = kill_one(config, processes, names[0], chains, say)
    print("\n" + text_table(compare(drawn)) + "\n")
    same = drawn["FSGLD"]["sites"][:, : again.shape[1]]
    if not np.array_equal(again, same):
        sys.exit(f"Draws after a kill are others, by {np.abs(again - same).max():.1e}.")
    num = again.shape[1]
    print(
        f"{names[0]} was killed and came back: all {num} draws of each chain are those of the run"
    )
    print("in peace, to the last bit. What left each hospital:")
    for name in names:
        found = deploy.verify_log(folder / name / "audit.log")
        print(f"  {name}: {found.num_answers:,} messages, {found.num_bytes:,} bytes")
    print(f"What was approved, settings, logs and draws are in {folder}/.")
    say("the end")


def kill_one(
    config: Config, processes: Processes, name: str, chains: dict[str, Any], say: Any
) -> np.ndarray:
    """Run the first rounds again, in which a hospital is killed and started again."""
    log = processes.folder / name / "audit.log"
    before = log.stat().st_size
    finish = begin_server(processes, "killed", num_rounds=config.killed_rounds, **chains)
    processes.wait(lambda: last_round(log, before) > config.killed_rounds // 3, "A third of it")
    processes.kill(name)
    say(f"{name} was killed after round {last_round(log, before)}")
    processes.start_site(name)
    again = finish()
    say(f"{name} came back, and the run has ended")
    return again


def last_round(log: Path, begin: int) -> int:
    """Return the round of the last answer in a log behind byte `begin`, -1 if there is none."""
    with log.open("rb") as file:
        file.seek(max(log.stat().st_size - 2_000, begin))
        lines = file.read().split(b"\n")[1:-1]
    rounds = [json.loads(line) for line in lines]
    return max((entry["round"] for entry in rounds if entry["what"] == "answer"), default=-1)


if __name__ == "__main__":
    main(sys.argv[1:])
