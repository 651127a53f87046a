"""Jobs of a sweep of `experiments.run` in one process, with one table of rows for all.

All configs are checked before the first job runs. Jobs that differ in their kernels and seeds alone
run in one call of `fedmcmc.sweep`, where kernels that differ by numbers share a program; others
run one after another. ``python -m experiments.sweeping FOLDER`` tabulates jobs that ran elsewhere.
"""

import itertools
import json
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax

import fedmcmc
from experiments import metrics, output, problems, run, study, tidy, wiring
from fedmcmc.pytrees import named_leaves, variables

OF_JOB = ("kernel", "seed", "method", "setting")
"""Keys in which jobs that run in one program may differ."""

JOBS: dict[Path, list[study.JobRows]] = {}
"""Finished jobs by folder: the grids of one study share a folder."""


def launch(launcher: Any, job_overrides: Sequence[Sequence[str]]) -> None:
    """Run the jobs with these arguments, and write ``rows.csv`` and ``table.md`` for all.

    Exits before the first job if a config cannot be run, and after the last if any job failed.
    `launcher` has Hydra's `config` and `hydra_context`.
    """
    jobs = [_job(launcher, overrides) for overrides in job_overrides]
    failed, interrupted = [], False
    try:
        for group in _groups(jobs):
            try:
                _run_group(group)
            except (Exception, SystemExit) as error:
                reason = _reason(error)
                failed += [f"  {job.label}: {reason}" for job in group]
    except KeyboardInterrupt:
        interrupted = True
    finished = [job for job in jobs if (job.out / study.RECORD).is_file()]
    out = Path(launcher.config.hydra.sweep.dir)
    in_folder = JOBS.setdefault(out, [])
    in_folder += [study.JobRows(j.config, tidy.read_rows(j.out / metrics.ROWS)) for j in finished]
    rows = tidy.distinct(row for job in in_folder for row in job.rows)
    num = f"{len(finished)} of {len(jobs)} jobs"
    if rows:
        _write_tables(out, rows)
        print(f"{num}; rows.csv and table.md in {output.relative(out)}")
    if interrupted:
        raise SystemExit(f"error: interrupted, {num} are done.")
    if failed:
        listed = "\n".join(failed)
        raise SystemExit(f"error: {len(failed)} of {len(jobs)} jobs failed:\n{listed}")


def _reason(error: BaseException) -> str:
    """Return the message of an error; print the traceback of one that is not for users."""
    if isinstance(error, SystemExit):
        return str(error).removeprefix("error: ")
    print("A job failed; the others continue.", file=sys.stderr)
    traceback.print_exception(error)
    return f"{type(error).__name__}: {error}"


def gather(folder: Path) -> list[tidy.Row]:
    """Write the tables of all jobs below a folder, such as a SLURM array's."""
    folders = sorted({path.parent for path in folder.rglob(study.RECORD)} - {folder})
    rows = tidy.distinct(row for job in folders for row in tidy.read_rows(job / metrics.ROWS))
    _write_tables(folder, rows)
    return rows


def _write_tables(out: Path, rows: list[tidy.Row]) -> None:
    tidy.write_rows(out / metrics.ROWS, rows)
    table = output.markdown_table(metrics.table(rows))
    output.write_atomically(out / "table.md", table + "\n")
    print(table)


def _job(launcher: Any, overrides: Sequence[str]) -> run.Job:
    load_config = launcher.hydra_context.config_loader.load_sweep_config
    config = load_config(launcher.config, list(overrides))
    out = Path(config.hydra.sweep.dir) / config.hydra.sweep.subdir
    job = run.job_of(config, config.hydra, out)
    try:
        run.check(job.config)
    except wiring.ConfigError as error:
        raise SystemExit(f"error: {job.label}: {error}") from error
    return job


def _groups(jobs: Sequence[run.Job]) -> list[list[run.Job]]:
    """Return all jobs, those together that one call of `fedmcmc.sweep` can run."""
    groups: dict[str, list[run.Job]] = {}
    for job in jobs:
        shared = {k: v for k, v in job.config.items() if k not in OF_JOB}
        groups.setdefault(json.dumps(shared), []).append(job)
    parts = ([group] if _fits(group) else [[job] for job in group] for group in groups.values())
    return [group for part in parts for group in part]


def _fits(group: Sequence[run.Job]) -> bool:
    config = group[0].config
    enabled = config["vmapped"] and not config["keep_finished"]
    plain_placement = config["placement"] in (None, {"_target_": "fedmcmc.Placement"})
    separate = config["checkpoint_seconds"] is not None or config["collect"] is not None
    points = [(json.dumps(job.config["kernel"]), job.config["seed"]) for job in group]
    kernels = {kernel for kernel, _ in points}
    product = itertools.product(kernels, range(len(points) // len(kernels)))
    return enabled and plain_placement and not separate and sorted(points) == sorted(product)


def _run_group(group: Sequence[run.Job]) -> None:
    """Run kernels and seeds in one call of `fedmcmc.sweep` if there are several."""
    if len(group) == 1:
        run.execute_job(group[0])
        return
    config, start_time = group[0].config, time.perf_counter()
    settings, problem = run.check(config), problems.load(config, group[0].names)
    kernels = {job.label: run.build_kernel(job, problem) for job in group}
    if any(kernel.traits.approximates for kernel in kernels.values()):
        for job in group:
            run.execute_job(job)
        return
    swept = fedmcmc.sweep(
        jax.random.key(0),
        lambda point: point,
        {"point": kernels},
        problem.data,
        run.start_of(settings, problem),
        num_seeds=1 + max(job.config["seed"] for job in group),
        **run.counts(settings),
        progress=False,
    )
    for job in group:
        kernel = kernels[job.label]
        dataset = swept.dataset.sel(point=job.label, seed=job.config["seed"])
        rows = run.rows_of(job, _samples(dataset, kernel, problem.posterior), problem)
        run.start_folder(job.out, job.config)
        tidy.write_rows(job.out / metrics.ROWS, rows)
        seconds = study.seconds_since(start_time)
        about = {**job.about, "jobs_together": len(group), "seconds": seconds}
        study.write_record(job.out, about, job.config)


def _samples(dataset: Any, kernel: fedmcmc.FederatedKernel, posterior: fedmcmc.Posterior) -> Any:
    """Return what `metrics.tidy` needs of the draws of one job."""
    shapes = jax.eval_shape(posterior.init_fn, jax.random.key(0))
    leaves = [dataset[name].values for name in variables(named_leaves(shapes))]
    draws = constrained = jax.tree.unflatten(jax.tree.structure(shapes), leaves)
    if kernel.model.constrain_fn is not None:
        constrained = jax.vmap(jax.vmap(kernel.model.constrain_fn))(draws)
    names = {"bits_up": "total_bits_up", "bits_down": "total_bits_down", "rounds": "num_rounds"}
    totals = {name: dataset[variable].values for name, variable in names.items()}
    return SimpleNamespace(draws=draws, constrained=constrained, final_draws=None, totals=totals)


if __name__ == "__main__":
    gather(Path(sys.argv[1]))
