"""Settings files of the papers: ``python -m experiments.run experiment=fsgld/gaussian key=value``.

``--multirun`` sweeps over comma-separated values. Results go to ``results/<experiment>/`` (or
``$FEDMCMC_RESULTS/<experiment>/``, or wherever ``hydra.run.dir=...`` says).
"""

import inspect
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import hydra
import jax
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from experiments import output, platforms, restarts, schemas, spreading
from experiments.data import DataNotFound
from fedmcmc import distributed
from fedmcmc.storage import ending_programs

CONFIGS = Path(__file__).resolve().parents[1] / "configs"

__all__ = [
    "CONFIGS",
    "available",
    "execute",
    "execute_job",
    "in_single_precision",
    "main",
    "with_log_of_first",
]


def available(paper: str = "*") -> list[str]:
    """Return the names that ``experiment=`` takes."""
    folder = CONFIGS / "experiment"
    return sorted(
        path.relative_to(folder).with_suffix("").as_posix()
        for path in folder.glob(f"{paper}/*.yaml")
    )


def execute(
    module: ModuleType,
    cfg: DictConfig,
    out: Path,
    *,
    experiment: str,
    command: str,
    overrides: Sequence[str] = (),
) -> dict[str, Any]:
    """Run one experiment into the folder `out` and return what ``metrics.json`` holds.

    Raises
    ------
    SettingsError
        Before anything is written, if the settings are unknown or out of range.
    """
    config = schemas.build(cfg, module)
    settings, of_run = schemas.split(cfg)
    if of_run.keep_finished:
        old = restarts.finished(out, experiment, settings)
        if distributed.agreed(old is not None):
            return old or {}
    told = {"experiment": experiment, **settings}
    with (
        restarts.surviving(out, told, of_run.checkpoint_seconds) as resumed,
        ending_programs(),  # a chain that was cut would be taken for a whole one
        spreading.own_folder(out) as folder,
    ):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / output.METRICS).unlink(missing_ok=True)  # a run that fails leaves no older result
        (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(settings)))
        begun = time.perf_counter()
        # Experiments that can be spread take a placement.
        spread = "placement" in inspect.signature(module.run).parameters
        where = {"placement": spreading.placement_of(of_run)} if spread else {}
        metrics = module.run(config, folder, **where)
        record = {
            "experiment": experiment,
            "command": command,
            "overrides": list(overrides),
            "wall_seconds": round(time.perf_counter() - begun, 2),
            "resumed": resumed,
            "processes": jax.process_count(),
            "devices": jax.device_count(),
            **output.environment(),
            "config": settings,
            "metrics": metrics,
        }
        return output.write_metrics(folder, record)


def _job(cfg: DictConfig) -> None:
    given = HydraConfig.get()
    out, experiment = Path(given.runtime.output_dir), given.runtime.choices["experiment"]
    execute_job(cfg, out, experiment, given.overrides.task)


def execute_job(cfg: DictConfig, out: Path, experiment: str, overrides: Sequence[str]) -> None:
    """Run one experiment from the command line into the folder `out`, and print what it found.

    Raises
    ------
    SystemExit
        With one message, if settings are out of range or data are missing.
    """
    try:
        record = execute(
            schemas.modules()[schemas.name_of(cfg)],
            cfg,
            out,
            experiment=experiment,
            overrides=overrides,
            command=f"python -m experiments.run {shlex.join(sys.argv[1:])}",
        )
    except (schemas.SettingsError, DataNotFound) as error:
        raise SystemExit(f"error: {error}") from error
    if not distributed.is_first():
        return
    print(output.summary(record))
    print(f"{record['wall_seconds']} s; results in {output.relative(out)}")


def main() -> None:
    """Compose the settings from the command line and run."""
    arguments = sys.argv[1:]
    distributed.initialize()
    platforms.require_devices()
    in_single_precision()
    if jax.process_count() > 1 and {"--multirun", "-m"} & set(arguments):
        raise SystemExit("Several processes run one experiment at a time, not a --multirun.")
    if not any(a.startswith("experiment=") for a in arguments):
        names = "\n".join(f"  experiment={name}" for name in available())
        raise SystemExit(f"Say which experiment to run, one of:\n{names}")
    schemas.register()
    sys.argv[1:] = with_log_of_first(arguments)
    try:
        hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="settings")(_job)()
    except KeyboardInterrupt:
        distributed.leave(1)
        raise SystemExit(
            "error: interrupted; nothing of this run is kept but checkpoints."
        ) from None
    except SystemExit as stop:
        distributed.leave(stop.code)
        raise


def in_single_precision() -> None:
    """Have a GPU or TPU multiply as a CPU does: by default JAX lets them round factors."""
    if jax.default_backend() != "cpu" and jax.config.jax_default_matmul_precision is None:
        jax.config.update("jax_default_matmul_precision", "highest")


def with_log_of_first(arguments: Sequence[str]) -> list[str]:
    """Have processes other than the first not open the log file; what they log is still shown."""
    logging = "hydra/job_logging="
    if distributed.is_first() or any(a.startswith(logging) for a in arguments):
        return list(arguments)
    # Beside the other overrides: Hydra takes none that stand apart from them.
    place = next(i for i, a in enumerate(arguments) if "=" in a and not a.startswith("-"))
    return [*arguments[:place], f"{logging}stdout", *arguments[place:]]


if __name__ == "__main__":
    main()
