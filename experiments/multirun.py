"""The jobs of a sweep in one process: checked first, run to the last, and tabulated together.

They run one after another and share what is compiled. A grid of kernels in one program is
`fedmcmc.sweep`.
"""

import copy
import json
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hydra.core.utils import JobReturn, filter_overrides
from omegaconf import DictConfig, OmegaConf, open_dict

from experiments import output, schemas, sweep_results

__all__ = ["in_turn", "launch", "reason"]


class Job(NamedTuple):
    """One job of a sweep."""

    overrides: Sequence[str]
    config: DictConfig  # without Hydra's own
    out: Path
    experiment: str
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
    returned, interrupted = in_turn(jobs, run, first)
    finished, failed = [], {}
    for i, result in returned.items():
        if isinstance(result, JobReturn):
            record = json.loads((jobs[i].out / output.METRICS).read_text())
            finished.append((jobs[i].settings, record))
        else:
            failed[i] = result
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
    return [result for result in returned.values() if isinstance(result, JobReturn)]


Returned = dict[int, JobReturn | str]
"""What jobs returned, or why they failed."""


def in_turn(jobs: Sequence[Any], run: Callable[..., Any], first: int) -> tuple[Returned, bool]:
    """Run jobs one after another; return what each returned, and whether it was interrupted."""
    returned: Returned = {}
    for i, job in enumerate(jobs):
        try:
            (done,) = run([job.overrides], first + i)
            _ = done.return_value  # raises what the job raised
            returned[i] = done
        except KeyboardInterrupt:
            return returned, True
        except (Exception, SystemExit) as error:
            returned[i] = reason(error)
    return returned, False


def reason(error: BaseException) -> str:
    """Return the message of an error; print the traceback of one that is not for users."""
    if isinstance(error, SystemExit):
        return str(error).removeprefix("error: ")
    print("A job failed; the others go on.", file=sys.stderr)
    traceback.print_exception(error)
    return f"{type(error).__name__}: {error}"


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
    plain = copy.deepcopy(config)  # its type is the schema's
    with open_dict(plain):
        del plain["hydra"]
    experiment = config.hydra.runtime.choices["experiment"]
    job = Job(overrides, plain, out, experiment, settings)
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
