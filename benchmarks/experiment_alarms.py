"""What the judge says of the experiments' runs: ``python -m benchmarks.experiment_alarms``.

Every ``_small`` study and the demo, 3 seeds (or ``seeds=``), each in a process of its own. A
setting that takes more than a minute of a processor (or ``seconds=``), or needs data that are not
there, is left out and named.
Whether an alarm is false is for the reader: some methods of the papers are biased, and are shown
for that. What the judge found of runs that it calls wrong is printed: how far means are off, in
posterior sds, and how wide sds are, the largest coordinate of each run.
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


def one(name: str, seed: int, folder: Path) -> None:
    """Run an experiment, and write how many calls of `sample` were judged and what was found."""
    judged, judge = [], _watch.judge

    def counting(*args):
        judged.append(judge(*args))
        return judged[-1]

    if name == "demo":
        main = partial(demo.main, ["--seed", str(seed), "--out", str(folder)])
    else:
        main = run.main
        given = (f"seed={seed}", "vmapped=false", f"hydra.sweep.dir={folder}")
        sys.argv = ["run", f"study={name}", *given]
    with mock.patch.object(_watch, "judge", counting), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        main()
    alarms = [str(w.message) for w in said if issubclass(w.category, DiagnosisWarning)]
    told = [x for x in judged if x is not None]
    wrong = [
        (float(np.abs(x.moments.bias).max()), float(x.moments.spread.max()))
        for x in told
        if x.moments is not None and any(line.startswith(WRONG) for line in x.findings)
    ]
    found = {"judged": len(told), "alarms": alarms, "wrong": wrong}
    (folder / "alarms.json").write_text(json.dumps(found))


def bench(names: list[str], seconds: int, seeds: int) -> None:
    """Run settings by name, or all, and print what was said of their runs."""

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))

    for name in names or [n for n in arguments.choices("study") if n.endswith("_small")] + ["demo"]:
        judged, alarms, wrong = 0, Counter(), []
        for seed in range(seeds):
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, "-m", "benchmarks.experiment_alarms", name]
                command += [f"seed={seed}", f"folder={folder}"]
                try:
                    subprocess.run(
                        command, cwd=ROOT, check=True, capture_output=True, preexec_fn=limited
                    )
                except subprocess.CalledProcessError as error:
                    last = error.stderr.decode().strip().splitlines()[-1:]
                    why = f"over {seconds} s" if error.returncode < 0 else " ".join(last)
                    print(f"{name}: left out, {why}", flush=True)
                    break
                found = json.loads((Path(folder) / "alarms.json").read_text())
            judged += found["judged"]
            alarms.update(text.split(":")[0] for text in found["alarms"])
            wrong += found["wrong"]
        else:
            kinds = "; ".join(f"{kind} {num}" for kind, num in alarms.items()) or "no alarm"
            if wrong:
                off, wide = np.transpose(wrong)
                kinds += f"; of the wrong ones means off by {off.min():.2g} to {off.max():.2g} sd, "
                kinds += f"sds {wide.min():.3g} to {wide.max():.3g} of the posterior's"
            print(f"{name}: {judged} runs judged, {kinds}", flush=True)


if __name__ == "__main__":
    options = dict(x.split("=") for x in sys.argv[1:] if "=" in x)
    names = [x for x in sys.argv[1:] if "=" not in x]
    if "folder" in options:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        one(names[0], int(options["seed"]), Path(options["folder"]))
    else:
        bench(names, int(options.get("seconds", SECONDS)), int(options.get("seeds", SEEDS)))
