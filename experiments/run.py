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
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
    platforms,
    problems,
    restarts,
    spreading,
    study,
    tidy,
    wiring,
)
from experiments.data import DataNotFound
from experiments.wiring import ConfigError
from fedmcmc import distributed
from fedmcmc.storage import ending_programs

__all__ = ["RunSettings", "check", "execute", "execute_job", "main", "write_record"]

RECORD = "record.json"
SETTINGS_OF_FORM = ("checkpoint_seconds", "keep_finished", "vmapped")
"""Settings that change no result."""


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """Settings of a run; all but the first six change no result, up to rounding.

    Attributes
    ----------
    num_rounds, num_burnin, thinning, num_chains, collect, placement
        Arguments of `fedmcmc.sample`.
    seed
        Seed of the chains alone: data sets have their own, as ``data.seed``.
    start
        ``"init"`` draws starts from the model's ``init_fn``, ``"mode"`` starts at the mode, and a
        target makes a function of a key, such as `experiments.setup.laplace_start`.
    checkpoint_seconds
        Seconds between checkpoints; ``None`` writes none.
    keep_finished
        If true, a run whose results are there is skipped.
    vmapped
        If true, jobs of a sweep that differ in kernels and seeds alone run in one program. Their
        folders then hold rows and records, and no draws, figures and reports.
    """

    num_rounds: int
    num_burnin: int
    thinning: int
    num_chains: int
    seed: int
    start: Any = "init"
    collect: Any = None
    placement: Any = None
    checkpoint_seconds: float | None = None
    keep_finished: bool = False
    vmapped: bool = True

    def __post_init__(self) -> None:
        for name in ("num_rounds", "thinning", "num_chains"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if not 0 <= self.num_burnin <= self.num_rounds - self.thinning:
            raise ValueError(
                "num_burnin must leave at least `thinning` of num_rounds, "
                f"got num_burnin={self.num_burnin}."
            )
        if not isinstance(self.start, dict) and self.start not in ("init", "mode"):
            raise ValueError(f"start must be init, mode or a target, got {self.start}.")


def plain(cfg: DictConfig) -> dict[str, Any]:
    """Return a resolved config as plain containers, without Hydra's own part."""
    values: Any = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    values.pop("hydra", None)
    return values


def check(config: dict[str, Any]) -> RunSettings:
    """Check all names and types in a config, and return the settings of the run.

    Raises
    ------
    ConfigError
        If anything is unknown, missing, or of another type.
    """
    values = {name: value for name, value in config.items() if name not in arguments.OTHERS}
    wiring.check({"_target_": f"{__name__}.RunSettings", **values}, "")
    try:
        settings = RunSettings(**values)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    metrics.check_names(config.get("metrics"))
    wiring.check(config["data"], "data", ())
    wiring.check(problems.model_node(config["model"]), "model", ("data", "example"))
    wiring.check(config["kernel"], "kernel")
    comparisons.check(config)
    return settings


def execute(
    config: dict[str, Any],
    out: Path,
    *,
    names: dict[str, str] | None = None,
    settings_shown: Mapping[str, Any] | None = None,
    command: str = "",
    overrides: Sequence[str] = (),
) -> list[tidy.Row]:
    """Run one config into the folder `out` and return its tidy rows.

    Parameters
    ----------
    config
        Plain containers with the keys of ``configs/config.yaml``.
    out
        Folder of the results.
    names
        Names of data, model and kernel for rows and messages.
    settings_shown
        Settings of the kernel, for rows.
    command, overrides
        Provenance for ``record.json``.

    Raises
    ------
    ConfigError, DataNotFound
        Before anything is sampled.
    """
    settings = check(config)
    names = {group: (names or {}).get(group, group) for group in arguments.GROUPS}
    if settings.keep_finished and distributed.agreed(_is_finished(out, config)):
        return tidy.read_rows(out / metrics.ROWS)
    problem = problems.load(config, names)
    start_time = time.perf_counter()
    with (
        restarts.checkpointed(out, _without(config), settings.checkpoint_seconds) as resumed,
        ending_programs(),
        spreading.folder_of_process(out) as folder,
    ):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RECORD).unlink(missing_ok=True)
        (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(config)))
        samples = sample(config, settings, problem, f"kernel={names['kernel']}")
        rows = rows_of(samples, problem, config, names["kernel"], settings_shown or {})
        metrics.write(folder, samples, rows)
        write_record(
            folder,
            {**names, "command": command, "overrides": list(overrides), "resumed": resumed},
            config,
            start_time,
        )
    return rows


def rows_of(
    samples: Any,
    problem: problems.Problem,
    config: dict[str, Any],
    kernel: str,
    settings: Mapping[str, Any],
) -> list[tidy.Row]:
    """Return the rows of a run, under the config's `method` and `setting` where it has them."""
    if config.get("setting") is not None:
        settings = tidy.pairs(str(config["setting"]))
    about: dict[str, Any] = {
        "method": config.get("method") or kernel,
        "settings": settings,
        "seed": config["seed"],
    }
    rows = metrics.tidy(samples, problem, names=config.get("metrics"), **about)
    return rows + comparisons.rows(samples, problem, config, **about)


def start_of(settings: RunSettings, problem: problems.Problem) -> Any:
    """Return the start of all chains, or a function that draws it from a key."""
    if settings.start == "init":
        return problem.posterior.init_fn
    if settings.start == "mode":
        return problem.supplies.centre
    return wiring.build(settings.start, "start", problem.supplies)


def write_record(
    out: Path, provenance: dict[str, Any], config: dict[str, Any], start_time: float
) -> None:
    """Write ``record.json``: the config, the command, versions, device, commit and seconds."""
    record = {
        **provenance,
        "seconds": round(time.perf_counter() - start_time, 2),
        "processes": jax.process_count(),
        "devices": jax.device_count(),
        **output.environment(),
        "config": config,
    }
    output.write_whole(out / RECORD, json.dumps(output.plain(record), indent=1) + "\n")


def sample(
    config: dict[str, Any], settings: RunSettings, problem: problems.Problem, where: str = "kernel"
) -> fedmcmc.Samples:
    """Build the kernel of a config and sample."""
    kernel = wiring.build(config["kernel"], where, problem.supplies)
    if not isinstance(kernel, fedmcmc.FederatedKernel):
        raise ConfigError(f"{where} must make a kernel, got {type(kernel).__name__}.")
    position = start_of(settings, problem)
    placement = wiring.build(settings.placement, "placement", None) or spreading.ONE_DEVICE
    if jax.process_count() > 1 and placement.mesh is None:
        placement = dataclasses.replace(placement, mesh=distributed.mesh())
    counts = {name: getattr(settings, name) for name in ("num_rounds", "num_burnin", "thinning")}
    collect = wiring.build(settings.collect, "collect", None)
    try:
        return spreading.sample(
            spreading.key_of(settings.seed),
            kernel,
            problem.data,
            position,
            num_chains=settings.num_chains,
            placement=placement,
            progress=sys.stderr.isatty(),
            collect=collect,
            **counts,
        )
    except ValueError as error:  # of settings that the kernel can only check on model and data
        raise ConfigError(f"{where}: {error}") from error


def _without(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config without the settings that change no result."""
    return {k: v for k, v in config.items() if k not in SETTINGS_OF_FORM}


def _is_finished(out: Path, config: dict[str, Any]) -> bool:
    try:
        record = json.loads((out / RECORD).read_text())
    except FileNotFoundError:
        return False
    same = all(record.get(name) == value for name, value in output.environment().items())
    return same and _without(record["config"]) == output.plain(_without(config))


def execute_job(cfg: DictConfig, out: Path, choices: Any, overrides: Sequence[str]) -> None:
    """Run a composed config into the folder `out` and print its results.

    Raises
    ------
    SystemExit
        With one sentence, if the config cannot be run or data are missing.
    """
    provenance: dict[str, Any] = dict(
        names={group: choices[group] for group in arguments.GROUPS},
        settings_shown=arguments.settings_of(overrides, sys.argv[1:]),
        command=f"python -m experiments.run {shlex.join(arguments.as_typed(sys.argv[1:]))}",
        overrides=arguments.as_typed(overrides),
    )
    try:
        rows = execute(plain(cfg), out, **provenance)
    except (ConfigError, DataNotFound, fedmcmc.NonFiniteError) as error:
        raise SystemExit(f"error: {error}") from error
    if distributed.is_first():
        whole = [r for r in rows if r.x is None and "parameter" not in r.settings]
        shown = [{"metric": r.metric, "value": r.value} for r in whole]
        if shown:
            print(output.text_table(shown))
        print(f"Results: {output.relative(out)}")


def _job(cfg: DictConfig) -> None:
    hydra_config = HydraConfig.get()
    out = Path(hydra_config.runtime.output_dir)
    execute_job(cfg, out, hydra_config.runtime.choices, hydra_config.overrides.task)


def main() -> None:
    """Read the command line and run."""
    distributed.initialize()
    platforms.require_devices()
    logging.getLogger("hydra.utils").setLevel(logging.CRITICAL)  # `wiring.locate` reports these
    platforms.use_single_precision()
    from experiments import sweeping  # imports this module

    sweeping.JOBS.clear()
    typed, start_time = sys.argv[1:], time.perf_counter()
    try:
        commands = arguments.prepare(typed)
        name, content = arguments.study_of(typed)
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from None
    if jax.process_count() > 1 and any({"--multirun", "-m"} & set(c) for c in commands):
        raise SystemExit("error: several processes run one config at a time, not a --multirun.")
    arguments.register_resolvers()
    program = sys.argv[0]
    config_path = str(study.CONFIGS)
    try:
        for command in commands:
            sys.argv = [program, *arguments.with_log_of_first(command)]
            hydra.main(version_base="1.3", config_path=config_path, config_name="config")(_job)()
        if content and not {"--cfg", "-c", "--help"} & {*typed}:
            folder = Path(os.environ.get("FEDMCMC_RESULTS", "results")) / name
            typed_command = f"python -m experiments.run {shlex.join(typed)}"
            about = dict(command=typed_command, start_time=start_time)
            seconds = arguments.checkpoint_seconds(typed)
            for out, jobs in sweeping.JOBS.items() or [(folder, [])]:
                study.finish(name, content, jobs, out, **about, checkpoint_seconds=seconds)
    except (ConfigError, DataNotFound) as error:
        raise SystemExit(f"error: {error}") from None
    except KeyboardInterrupt:
        distributed.leave(1)
        raise SystemExit("error: interrupted; only checkpoints of this run remain.") from None
    except SystemExit as stop:
        distributed.leave(stop.code)
        raise


if __name__ == "__main__":
    main()
