"""Run one kernel on one model and one data set, or a sweep over any of their settings.

``python -m experiments.run data=covtype model=logistic kernel=fa_hmc kernel.step_size=1e-3``

``configs/README.md`` describes the commands.
"""

import dataclasses
import json
import logging
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import hydra
import jax
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

import fedmcmc
from experiments import (
    arguments,
    comparisons,
    metrics,
    output,
    problems,
    restarts,
    study,
    tidy,
    wiring,
)
from experiments.data import DataNotFound
from experiments.wiring import ConfigError
from fedmcmc import distributed
from fedmcmc.storage import reraise_interrupts

SETTINGS_OF_FORM = ("checkpoint_seconds", "keep_finished", "vmapped")
"""Settings that change no result, up to rounding."""


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """Settings of a run, which ``configs/run/default.yaml`` explains."""

    num_rounds: int
    num_burnin: int
    thinning: int
    num_chains: int
    seed: int
    start: Literal["init", "mode"] | Callable[[jax.Array], Any] = "init"
    collect: Any = None
    placement: Any = None
    checkpoint_seconds: float | None = None
    keep_finished: bool = False
    vmapped: bool = True


class Job(NamedTuple):
    """One config to run into the folder `out`."""

    config: dict[str, Any]  # plain containers with the keys of configs/config.yaml
    out: Path
    names: Mapping[str, str] = {name: name for name in arguments.GROUPS}  # for rows and messages
    settings: Mapping[str, Any] = {}  # of the kernel, and others that were swept, for rows
    about: Mapping[str, Any] = {}  # names, command line and arguments, for record.json

    @property
    def label(self) -> str:
        """Return the method and its setting."""
        return f"{self.names['kernel']} {tidy.setting_text(self.settings)}".strip()


def job_of(cfg: DictConfig, hydra_config: Any, out: Path) -> Job:
    """Return the job of a composed config."""
    names = {group: hydra_config.runtime.choices[group] for group in arguments.GROUPS}
    overrides = hydra_config.overrides.task
    about = {**names, "command": command(sys.argv[1:]), "overrides": arguments.as_typed(overrides)}
    return Job(plain(cfg), out, names, arguments.settings_of(overrides), about)


def command(typed: Sequence[str]) -> str:
    """Return the command line with these arguments, for a record."""
    return f"python -m experiments.run {shlex.join(arguments.as_typed(typed))}"


def plain(cfg: DictConfig) -> dict[str, Any]:
    """Return a resolved config as plain containers, without Hydra's own part."""
    settings = OmegaConf.masked_copy(cfg, [str(name) for name in cfg if name != "hydra"])
    values: Any = OmegaConf.to_container(settings, resolve=True, throw_on_missing=True)
    return values


def check(config: dict[str, Any]) -> RunSettings:
    """Check all names and types in a config, and return the settings of the run."""
    values = {name: value for name, value in config.items() if name not in arguments.OTHERS}
    wiring.check({"_target_": f"{__name__}.RunSettings", **values}, "")
    settings = RunSettings(**values)
    if not 0 <= settings.num_burnin <= settings.num_rounds - settings.thinning:
        raise ConfigError(
            "num_burnin must leave at least `thinning` of num_rounds, "
            f"got num_burnin={settings.num_burnin}."
        )
    metrics.check_names(config.get("metrics"))
    wiring.check(config["data"], "data", ())
    wiring.check(problems.model_node(config["model"]), "model", ("data", "example"))
    wiring.check(config["kernel"], "kernel")
    comparisons.check(config)
    return settings


def execute(job: Job) -> list[tidy.Row]:
    """Run a job and return its tidy rows."""
    settings = check(job.config)
    if settings.keep_finished and distributed.broadcast_from_first(_is_finished(job)):
        return tidy.read_rows(job.out / metrics.ROWS)
    problem, start_time = problems.load(job.config, job.names), time.perf_counter()
    identity, seconds = _without(job.config), settings.checkpoint_seconds
    with (
        restarts.checkpointed(job.out, identity, seconds) as resumed,
        reraise_interrupts(),
        tempfile.TemporaryDirectory() as unused,
    ):
        # All processes make the same files, and none must replace what another is writing.
        folder = job.out if distributed.is_first() else Path(unused)
        start_folder(folder, job.config)
        samples = sample(job, settings, problem)
        rows = rows_of(job, samples, problem)
        metrics.write(folder, samples, rows)
        about = {**job.about, "resumed": resumed, "seconds": study.seconds_since(start_time)}
        study.write_record(folder, about, job.config)
    return rows


def start_folder(folder: Path, config: dict[str, Any]) -> None:
    """Write ``config.yaml`` into a folder of results, which is unfinished from then on."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / study.RECORD).unlink(missing_ok=True)
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(config)))


def rows_of(job: Job, samples: Any, problem: wiring.Supplies) -> list[tidy.Row]:
    """Return the rows of a run, under the config's `method` and `setting` where it has them."""
    config, setting = job.config, job.config.get("setting")
    about: dict[str, Any] = {
        "method": config.get("method") or job.names["kernel"],
        "settings": job.settings if setting is None else tidy.pairs(str(setting)),
        "seed": config["seed"],
    }
    rows = metrics.tidy(samples, problem, names=config.get("metrics"), **about)
    return rows + comparisons.rows(samples, problem, config, **about)


def start_of(settings: RunSettings, problem: wiring.Supplies) -> Any:
    """Return the start of all chains, or a function that draws it from a key."""
    if settings.start == "init":
        return problem.posterior.init_fn
    if settings.start == "mode":
        return problem.centre
    return wiring.build(settings.start, "start", problem)


def build_kernel(job: Job, problem: wiring.Supplies) -> fedmcmc.FederatedKernel:
    """Build the kernel of a job."""
    where = f"kernel={job.names['kernel']}"
    kernel = wiring.build(job.config["kernel"], where, problem)
    if not isinstance(kernel, fedmcmc.FederatedKernel):
        raise ConfigError(f"{where} must make a kernel, got {type(kernel).__name__}.")
    return kernel


def counts(settings: RunSettings) -> dict[str, int]:
    """Return the arguments of `fedmcmc.sample` that are numbers."""
    names = ("num_rounds", "num_burnin", "thinning", "num_chains")
    return {name: getattr(settings, name) for name in names}


def sample(job: Job, settings: RunSettings, problem: wiring.Supplies) -> fedmcmc.Samples:
    """Build the kernel of a job and sample."""
    kernel = build_kernel(job, problem)
    placement = wiring.build(settings.placement, "placement", None) or fedmcmc.Placement()
    if kernel.participation.pooled:  # on one device, wherever others are
        placement = dataclasses.replace(placement, mesh=None)
    elif jax.process_count() > 1 and placement.mesh is None:
        placement = dataclasses.replace(placement, mesh=distributed.mesh())
    chosen_by_sample = placement == fedmcmc.Placement()
    position = start_of(settings, problem)
    collect = wiring.build(settings.collect, "collect", None)
    try:
        return fedmcmc.sample(
            jax.random.fold_in(jax.random.key(0), settings.seed),  # as `fedmcmc.sweep` does
            kernel,
            problem.data,
            position,
            **counts(settings),
            placement=None if chosen_by_sample else placement,
            progress=sys.stderr.isatty(),
            collect=collect,
        )
    except ValueError as error:  # of settings that the kernel can only check on model and data
        raise ConfigError(f"kernel={job.names['kernel']}: {error}") from error


def _without(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config without the settings that change no result."""
    return {k: v for k, v in config.items() if k not in SETTINGS_OF_FORM}


def _is_finished(job: Job) -> bool:
    path = job.out / study.RECORD
    record = json.loads(path.read_text()) if path.is_file() else {}
    same = all(record.get(name) == value for name, value in output.environment().items())
    return same and _without(record["config"]) == output.plain(_without(job.config))


def execute_job(job: Job) -> None:
    """Run a job and print its results; exit with one sentence if it cannot be run."""
    try:
        rows = execute(job)
    except (ConfigError, DataNotFound, fedmcmc.NonFiniteError) as error:
        raise SystemExit(f"error: {error}") from error
    if distributed.is_first():
        shown = [r for r in rows if r.x is None and "parameter" not in r.settings]
        if shown:
            print(output.markdown_table([{"metric": r.metric, "value": r.value} for r in shown]))
        print(f"Results: {output.relative(job.out)}")


def _execute_composed(cfg: DictConfig) -> None:
    hydra_config = HydraConfig.get()
    execute_job(job_of(cfg, hydra_config, Path(hydra_config.runtime.output_dir)))


def main() -> None:
    """Read the command line and run."""
    try:
        _run_commands(sys.argv[0], sys.argv[1:])
    except (ConfigError, DataNotFound) as error:
        stop = SystemExit(f"error: {error}")
    except KeyboardInterrupt:
        stop = SystemExit("error: interrupted; only checkpoints of this run remain.")
    except SystemExit as error:
        stop = error
    else:
        return
    distributed.leave(stop.code)  # returns if this process is alone
    raise stop


def _run_commands(program: str, typed: Sequence[str]) -> None:
    from experiments import sweeping  # imports this module

    try:
        distributed.require_devices()
    except RuntimeError as error:
        raise ConfigError(f"{error} For a sweep on this machine, run `make sweep-cpu`.") from None
    logging.getLogger("hydra.utils").setLevel(logging.CRITICAL)  # `wiring.locate` reports these
    if jax.default_backend() != "cpu" and jax.config.jax_default_matmul_precision is None:
        # By default JAX allows a GPU or TPU to round factors.
        jax.config.update("jax_default_matmul_precision", "highest")
    sweeping.JOBS.clear()
    start_time, commands = time.perf_counter(), arguments.prepare(typed)
    name, content = arguments.study_of(typed)
    if jax.process_count() > 1 and any({"--multirun", "-m"} & {*c} for c in commands):
        raise ConfigError("several processes run one config at a time, not a --multirun.")
    OmegaConf.register_new_resolver("point_name", arguments.point_name, replace=True)
    folder = str(study.CONFIGS)
    decorate = hydra.main(version_base="1.3", config_path=folder, config_name="config")
    for prepared in commands:
        sys.argv = [program, *prepared]
        decorate(_execute_composed)()
    if content and not {"--cfg", "-c", "--help"} & {*typed}:
        folder = Path(os.environ.get("FEDMCMC_RESULTS", "results")) / name
        for out, jobs in sweeping.JOBS.items() or [(folder, [])]:
            seconds = arguments.last(typed, "checkpoint_seconds")
            about = {"command": command(typed), "start_time": start_time}
            study.finish(name, content, jobs, out, checkpoint_seconds=seconds, **about)


if __name__ == "__main__":
    distributed.initialize()
    if not jax.distributed.is_initialized():
        fedmcmc.use_all_cores()
    main()
