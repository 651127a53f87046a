"""Jobs of a sweep of `experiments.run` in one process, with one table of rows for all.

All configs are checked before the first job runs. Jobs that differ in their kernels and seeds alone
run in one call of `fedmcmc.sweep`, where kernels that differ by numbers share a program; others
run one after another. ``python -m experiments.sweeping FOLDER`` tabulates jobs that ran elsewhere.
"""

import copy
import json
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf, open_dict

import fedmcmc
from experiments import arguments, metrics, output, problems, run, study, tidy, wiring
from fedmcmc.pytrees import named_leaves, variables

__all__ = ["gather", "launch"]

OF_JOB = ("kernel", "seed", "method", "setting")
"""Keys in which jobs that run in one program may differ."""

JOBS: dict[Path, list[study.JobRows]] = {}
"""Finished jobs by folder: the grids of one study share a folder."""


class Job(NamedTuple):
    """One job of a sweep."""

    overrides: Sequence[str]
    config: dict[str, Any]
    out: Path
    names: dict[str, str]
    settings: dict[str, Any]

    @property
    def label(self) -> str:
        """Return the method and its setting."""
        return f"{self.names['kernel']} {tidy.setting_text(self.settings)}".strip()


def launch(
    run_jobs: Callable[[Sequence[Sequence[str]], int], Sequence[JobReturn]],
    launcher: Any,
    job_overrides: Sequence[Sequence[str]],
    first_index: int,
) -> Sequence[JobReturn]:
    """Run all jobs, continue where one fails, and write ``rows.csv`` and ``table.md`` for all.

    Parameters
    ----------
    run_jobs
        ``(job_overrides, index of the first) -> returns``, Hydra's unconstrained launcher.
    launcher
        Launcher with Hydra's `config` and `hydra_context`.
    job_overrides, first_index
        Arguments of every job, and the index of the first.

    Raises
    ------
    SystemExit
        Before the first job, if a config cannot be run; after the last, if any job failed.
    """
    jobs = [_job(launcher, overrides, first_index + i) for i, overrides in enumerate(job_overrides)]
    together, alone = _split(jobs)
    failed, interrupted = [], False
    for group in together:
        try:
            _run_together(group)
        except (Exception, SystemExit) as error:
            failed += [f"{job.label}: {_reason(error)}" for job in group]
    returned, interrupted = _in_turn(alone, run_jobs, first_index)
    failed += [f"{alone[i].label}: {error}" for i, error in returned.items() if error]
    finished = [job for job in jobs if (job.out / run.RECORD).is_file()]
    out = Path(launcher.config.hydra.sweep.dir)
    together_jobs = JOBS.setdefault(out, [])
    for job in finished:
        together_jobs.append(study.JobRows(job.config, tidy.read_rows(job.out / metrics.ROWS)))
    rows = tidy.distinct(row for job in together_jobs for row in job.rows)
    if rows:
        _write_tables(out, rows)
        print(
            f"{len(finished)} of {len(jobs)} jobs; rows.csv and table.md in {output.relative(out)}"
        )
    if interrupted:
        raise SystemExit(f"error: interrupted, {len(finished)} of {len(jobs)} jobs are done.")
    if failed:
        listed = "\n".join(f"  {line}" for line in failed)
        raise SystemExit(f"error: {len(failed)} of {len(jobs)} jobs failed:\n{listed}")
    returned_value = JobReturn(status=JobStatus.COMPLETED)
    returned_value.return_value = None
    return [returned_value] * len(jobs)


def _in_turn(
    jobs: Sequence[Job], run_jobs: Callable[..., Any], first_index: int
) -> tuple[dict[int, str | None], bool]:
    """Run jobs one after another; return why each failed, and whether it was interrupted."""
    returned: dict[int, str | None] = {}
    for i, job in enumerate(jobs):
        try:
            (result,) = run_jobs([job.overrides], first_index + i)
            _ = result.return_value  # raises what the job raised
            returned[i] = None
        except KeyboardInterrupt:
            return returned, True
        except (Exception, SystemExit) as error:
            returned[i] = _reason(error)
    return returned, False


def _reason(error: BaseException) -> str:
    """Return the message of an error; print the traceback of one that is not for users."""
    if isinstance(error, SystemExit):
        return str(error).removeprefix("error: ")
    print("A job failed; the others continue.", file=sys.stderr)
    traceback.print_exception(error)
    return f"{type(error).__name__}: {error}"


def gather(folder: Path) -> list[tidy.Row]:
    """Write the tables of all jobs below a folder, such as a SLURM array's."""
    folders = sorted({path.parent for path in folder.rglob(run.RECORD)} - {folder})
    rows = tidy.distinct(row for job in folders for row in tidy.read_rows(job / metrics.ROWS))
    _write_tables(folder, rows)
    return rows


def _write_tables(out: Path, rows: list[tidy.Row]) -> None:
    tidy.write_rows(out / metrics.ROWS, rows)
    table = output.markdown_table(metrics.table(rows))
    output.write_whole(out / "table.md", table + "\n")
    print(table)


def _job(launcher: Any, overrides: Sequence[str], index: int) -> Job:
    load_config = launcher.hydra_context.config_loader.load_sweep_config
    config = load_config(launcher.config, list(overrides))
    with open_dict(config):
        config.hydra.job.id = config.hydra.job.num = index
    out = Path(config.hydra.sweep.dir) / config.hydra.sweep.subdir
    choices = config.hydra.runtime.choices
    names = {group: choices[group] for group in arguments.GROUPS}
    settings = arguments.settings_of(overrides, sys.argv[1:])
    values = copy.deepcopy(config)
    with open_dict(values):
        del values["hydra"]
    job = Job(list(overrides), run.plain(values), out, names, settings)
    try:
        run.check(job.config)
    except wiring.ConfigError as error:
        raise SystemExit(f"error: {job.label}: {error}") from error
    return job


def _split(jobs: Sequence[Job]) -> tuple[list[list[Job]], list[Job]]:
    """Return groups of jobs that one call of `fedmcmc.sweep` can run, and all others."""
    groups: dict[str, list[Job]] = {}
    for job in jobs:
        shared = {k: v for k, v in job.config.items() if k not in OF_JOB}
        groups.setdefault(json.dumps(shared), []).append(job)
    together = [group for group in groups.values() if _fits(group)]
    grouped = {id(job) for group in together for job in group}
    return together, [job for job in jobs if id(job) not in grouped]


def _fits(group: Sequence[Job]) -> bool:
    config = group[0].config
    plain_placement = config["placement"] in (None, {"_target_": "fedmcmc.Placement"})
    enabled = config["vmapped"] and not config["keep_finished"] and plain_placement
    separate = config["checkpoint_seconds"] is not None or config["collect"] is not None
    if len(group) < 2 or not enabled or separate:
        return False
    seeds: dict[str, list[int]] = {}
    for job in group:
        seeds.setdefault(json.dumps(job.config["kernel"]), []).append(job.config["seed"])
    num = len(next(iter(seeds.values())))
    return all(sorted(numbers) == list(range(num)) for numbers in seeds.values())


def _run_together(group: Sequence[Job]) -> None:
    """Run kernels and seeds in one call of `fedmcmc.sweep`; write every job's rows and record."""
    config, start_time = group[0].config, time.perf_counter()
    settings, problem = run.check(config), problems.load(config, group[0].names)
    kernels = {
        job.label: wiring.build(
            job.config["kernel"], f"kernel={job.names['kernel']}", problem.supplies
        )
        for job in group
    }
    if any(kernel.approximates for kernel in kernels.values()):
        for job in group:
            run.execute(job.config, job.out, **_provenance(job))
        return
    posterior = problem.posterior
    position = run.start_of(settings, problem)
    swept = fedmcmc.sweep(
        jax.random.key(0),
        lambda point: point,
        {"point": kernels},
        problem.data,
        position,
        num_seeds=1 + max(job.config["seed"] for job in group),
        num_rounds=settings.num_rounds,
        num_burnin=settings.num_burnin,
        thinning=settings.thinning,
        num_chains=settings.num_chains,
        progress=False,
    )
    treedef = jax.tree.structure(jax.eval_shape(posterior.init_fn, jax.random.key(0)))
    for job in group:
        unconstrained = swept.dataset.sel(point=job.label, seed=job.config["seed"])
        constrained = swept.constrained.sel(point=job.label, seed=job.config["seed"])
        _write(
            job,
            problem,
            _samples(unconstrained, constrained, posterior, treedef),
            start_time,
            len(group),
        )


def _samples(unconstrained: Any, constrained: Any, posterior: Any, treedef: Any) -> Any:
    """Return what `metrics.tidy` needs of the draws of one job."""
    shapes = jax.eval_shape(posterior.init_fn, jax.random.key(0))
    names = list(variables(named_leaves(shapes)))
    draws = jax.tree.unflatten(treedef, [unconstrained[name].values for name in names])
    user = {
        name: leaf.values
        for name, leaf in constrained.data_vars.items()
        if "draw" in leaf.dims and (name in names or name not in unconstrained.data_vars)
    }
    totals = {
        "bits_up": unconstrained["total_bits_up"].values,
        "bits_down": unconstrained["total_bits_down"].values,
        "rounds": unconstrained["num_rounds"].values,
    }
    return SimpleNamespace(draws=draws, constrained=user, final_draws=None, totals=totals)


def _provenance(job: Job) -> dict[str, Any]:
    return dict(
        names=job.names,
        settings_shown=job.settings,
        command=f"python -m experiments.run {shlex.join(arguments.as_typed(sys.argv[1:]))}",
        overrides=arguments.as_typed(job.overrides),
    )


def _write(job: Job, problem: Any, samples: Any, start_time: float, num_jobs: int) -> None:
    job.out.mkdir(parents=True, exist_ok=True)
    rows = run.rows_of(samples, problem, job.config, job.names["kernel"], job.settings)
    tidy.write_rows(job.out / metrics.ROWS, rows)
    (job.out / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(job.config)))
    provenance = _provenance(job)
    names = provenance.pop("names")
    del provenance["settings_shown"]
    run.write_record(
        job.out, {**names, **provenance, "jobs_together": num_jobs}, job.config, start_time
    )


if __name__ == "__main__":
    gather(Path(sys.argv[1]))
