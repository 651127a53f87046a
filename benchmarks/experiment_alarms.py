"""Warnings of the diagnosis in the experiments: ``python -m benchmarks.experiment_alarms``.

The program runs every ``_small`` study and the demo, with 3 seeds (``seeds=``) and one process per
run. It skips and lists settings that need more than a minute of processor time (``seconds=``) or
data that are not available.

It does not decide if a warning is false. Some methods of the papers are biased, and the studies
show this bias. For runs that the diagnosis reports as wrong, the program prints the errors of means
(in posterior sds) and the ratios of sds, in each run for the largest coordinate.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np

from examples import demo
from experiments import arguments, run
from fedmcmc import DiagnosisWarning
from fedmcmc.runs import _watch

SEEDS, SECONDS = 3, 60
WRONG = "These draws are not the posterior's"
ROOT = Path(__file__).parents[1]


def run_setting(name: str, seed: int, folder: Path) -> None:
    """Run an experiment, and write the number of diagnosed runs, their warnings and errors."""
    reports, judge = [], _watch.judge

    def counting(*args):
        reports.append(judge(*args))
        return reports[-1]

    if name == "demo":
        main = partial(demo.main, ["--seed", str(seed), "--out", str(folder)])
    else:
        main = run.main
        settings = (f"seed={seed}", "vmapped=false", f"hydra.sweep.dir={folder}")
        sys.argv = ["run", f"study={name}", *settings]
    patched = mock.patch.object(_watch, "judge", counting)
    with patched, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        main()
    alarms = [str(w.message) for w in caught if issubclass(w.category, DiagnosisWarning)]
    diagnoses = [x for x in reports if x is not None]
    wrong = [
        (float(np.abs(x.moments.bias).max()), float(x.moments.spread.max()))
        for x in diagnoses
        if x.moments is not None and any(line.startswith(WRONG) for line in x.findings)
    ]
    result = {"diagnosed": len(diagnoses), "alarms": alarms, "wrong": wrong}
    (folder / "alarms.json").write_text(json.dumps(result))


def bench(names: list[str], seconds: int, seeds: int) -> None:
    """Run the named settings, or all of them, and print a summary of each one's warnings."""

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))

    for name in names or [n for n in arguments.choices("study") if n.endswith("_small")] + ["demo"]:
        num_diagnosed, alarms, wrong = 0, Counter(), []
        for seed in range(seeds):
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, "-m", "benchmarks.experiment_alarms", name]
                command += [f"seed={seed}", f"folder={folder}"]
                try:
                    subprocess.run(
                        command, cwd=ROOT, check=True, capture_output=True, preexec_fn=limited
                    )
                except subprocess.CalledProcessError as error:
                    last_line = error.stderr.decode().strip().splitlines()[-1:]
                    reason = f"over {seconds} s" if error.returncode < 0 else " ".join(last_line)
                    print(f"{name}: skipped, {reason}", flush=True)
                    break
                result = json.loads((Path(folder) / "alarms.json").read_text())
            num_diagnosed += result["diagnosed"]
            alarms.update(text.split(":")[0] for text in result["alarms"])
            wrong += result["wrong"]
        else:
            kinds = "; ".join(f"{kind} {num}" for kind, num in alarms.items()) or "no warning"
            if wrong:
                off, wide = np.transpose(wrong)
                kinds += f"; in wrong runs means are off by {off.min():.2g} to {off.max():.2g} sd, "
                kinds += f"sds are {wide.min():.3g} to {wide.max():.3g} times the posterior's"
            print(f"{name}: {num_diagnosed} runs diagnosed, {kinds}", flush=True)


if __name__ == "__main__":
    options = dict(x.split("=") for x in sys.argv[1:] if "=" in x)
    names = [x for x in sys.argv[1:] if "=" not in x]
    if "folder" in options:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        run_setting(names[0], int(options["seed"]), Path(options["folder"]))
    else:
        bench(names, int(options.get("seconds", SECONDS)), int(options.get("seeds", SEEDS)))
