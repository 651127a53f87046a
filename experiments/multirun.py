"""The jobs of a sweep in one process: checked first, run to the last, and put side by side."""

import json
import logging
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hydra.core.utils import JobReturn, filter_overrides
from omegaconf import DictConfig, OmegaConf

from experiments import output, schemas, sweep_results

__all__ = ["launch"]

log = logging.getLogger(__name__)


class Job(NamedTuple):
    """One job of a sweep."""

    overrides: Sequence[str]
    out: Path
    settings: dict[str, Any]  # those that were given on the command line


def launch(
    run: Callable[[Sequence[Sequence[str]], int], Sequence[JobReturn]],
    launcher: Any,
    job_overrides: Sequence[Sequence[str]],
    first: int,
) -> Sequence[JobReturn]:
    """Run all jobs, go on where one fails, and write what they found together.

    Parameters
    ----------
    run
        ``(job_overrides, index of the first) -> returns``, Hydra's own launcher.
    launcher
        Has what Hydra gave it: `config` and `hydra_context`.

    Raises
    ------
    SystemExit
        Before the first job, if the settings of any are out of range; after the last, if any
        failed; with one message for all.
    """
    jobs = [_job(launcher, overrides, first + i) for i, overrides in enumerate(job_overrides)]
    returns: list[JobReturn] = []
    finished: list[tuple[dict[str, Any], dict[str, Any]]] = []
    failed: dict[int, str] = {}
    interrupted = False
    for i, job in enumerate(jobs):
        try:
            done = run([job.overrides], first + i)
            _ = done[0].return_value  # raises what the job raised
            returns += done
            record = json.loads((job.out / output.METRICS).read_text())
            finished.append((job.settings, record))
        except KeyboardInterrupt:
            interrupted = True
            break
        except SystemExit as error:
            failed[i] = str(error).removeprefix("error: ")
        except Exception as error:
            log.exception("A job failed; the others go on.")
            failed[i] = f"{type(error).__name__}: {error}"
    lines = [f"{_named(jobs[i])}: {message}" for i, message in failed.items()]
    if finished:
        out = _common(jobs)
        command = f"python -m experiments.run {shlex.join(sys.argv[1:])}"
        name = sweep_results.stem([job.settings for job in jobs])
        names = sweep_results.write(out, finished, name=name, command=command, failed=lines)
        print(f"{len(finished)} jobs; {', '.join(names)} in {output.relative(out)}")
    if interrupted:
        raise SystemExit(f"error: interrupted, {len(finished)} of {len(jobs)} jobs are done.")
    if failed:
        listed = "\n".join(f"  {line}" for line in lines)
        raise SystemExit(f"error: {len(failed)} of {len(jobs)} jobs failed:\n{listed}")
    return returns


def _job(launcher: Any, overrides: Sequence[str], index: int) -> Job:
    config: DictConfig = launcher.hydra_context.config_loader.load_sweep_config(
        launcher.config, list(overrides)
    )
    with_number: Any = OmegaConf.merge(config, {})
    OmegaConf.set_struct(with_number, False)
    with_number.hydra.job.id = with_number.hydra.job.num = index
    out = Path(with_number.hydra.sweep.dir) / with_number.hydra.sweep.subdir
    settings = {}
    for override in filter_overrides(overrides):
        name, _, text = override.lstrip("+~").partition("=")
        if name in schemas.RUN_SETTINGS:
            continue
        value = OmegaConf.select(config, name)
        settings[name] = value if isinstance(value, bool | int | float | str) else text
    plain: Any = OmegaConf.masked_copy(config, [key for key in config if key != "hydra"])
    job = Job(overrides, out, settings)
    try:
        schemas.build(plain, schemas.modules()[schemas.name_of(config)])
    except schemas.SettingsError as error:
        raise SystemExit(f"error: {_named(job)}: {error}") from error
    return job


def _named(job: Job) -> str:
    return ", ".join(f"{name}={value}" for name, value in job.settings.items())


def _common(jobs: Sequence[Job]) -> Path:
    """Return the folder that all jobs' folders lie in."""
    parents = [set(job.out.parents) if len(jobs) > 1 else {job.out} for job in jobs]
    return max(set.intersection(*parents), key=lambda path: len(path.parts))
