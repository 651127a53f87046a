"""Reads the command line of `experiments.run`: groups, studies, import paths and their errors."""

import hashlib
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import OmegaConf

from experiments import study, tidy, wiring
from experiments.study import CONFIGS, choices
from experiments.wiring import ConfigError
from fedmcmc import distributed

GROUPS = ("data", "model", "kernel")
OF_ROWS = ("method", "setting", "metrics", "references")
OTHERS = (*GROUPS, "study_name", *OF_ROWS)
"""Keys of a config that are no settings of the run."""
OF_STUDY = ("special.", "values.")
"""Beginnings of arguments that change a study and not the config of a job."""
NESTED = (*GROUPS, "start", "collect", "placement", "references")
"""Keys that hold functions with arguments."""


def prepare(arguments: Sequence[str]) -> list[list[str]]:
    """Return the command lines for Hydra: one, or of a study one for each of its grids."""
    flags = [a for a in arguments if a.startswith("-") or not ("=" in a or a.startswith("~"))]
    name, content = study_of(arguments)
    if content:
        flags.append("--multirun")
    plain = [a for a in arguments if a not in flags and not (name and a.startswith(OF_STUDY))]
    overrides = _parse(plain)
    keys = {override.key_or_group for override in overrides}
    prepared = []
    for grid in study.grids(content) if content else [[]]:
        merged = [o for o in _parse(grid) if o.key_or_group not in keys] + overrides
        command = _command(merged, flags)
        if command not in prepared:
            prepared.append(command)
    return prepared


def study_of(arguments: Sequence[str]) -> tuple[str, dict[str, Any] | None]:
    """Return name and content of the study that a command line names, if it names one."""
    name = last(arguments, "study")
    if name is None:
        return "", None
    return name, study.load(name, [a for a in arguments if a.startswith(OF_STUDY)])


def last(arguments: Sequence[str], name: str) -> str | None:
    """Return the last value of ``name=value`` on a command line."""
    values = [a.removeprefix(f"{name}=") for a in arguments if a.startswith(f"{name}=")]
    return values[-1] if values else None


def _command(overrides: Sequence[Override], flags: Sequence[str]) -> list[str]:
    for override in overrides:
        _check_key(override)
    keys = [override.key_or_group for override in overrides]
    for group in GROUPS:
        if group not in keys and not {"--help", "--hydra-help"} & set(flags):
            listed = ", ".join(choices(group))
            raise ConfigError(f"{group}= is missing; give an import path or one of {listed}.")
    lines = [*map(_line, overrides)]
    if not distributed.is_first() and "hydra/job_logging" not in keys:
        lines.append("hydra/job_logging=stdout")  # the first process alone opens the log file
    swept = any(override.is_sweep_override() for override in overrides)
    return [*dict.fromkeys([*flags, "--multirun"] if swept else flags), *lines]


def jobs(command: Sequence[str]) -> list[list[str]]:
    """Return the overrides of every job of a command line that `prepare` returned."""
    overrides = _parse([a for a in command if not a.startswith("-")])
    choices = [[f"{o.get_key_element()}={value}" for value in _values(o)] for o in overrides]
    return [list(job) for job in itertools.product(*choices)]


def _parse(arguments: Sequence[str]) -> list[Override]:
    try:
        return OverridesParser.create().parse_overrides(list(arguments))
    except HydraException as error:
        raise ConfigError(wiring.short(error)) from error


def _values(override: Override) -> list[str]:
    if override.is_sweep_override():
        return list(override.sweep_string_iterator())
    return [override.get_value_element_as_str()]


def _line(override: Override) -> str:
    """Return an override as Hydra takes it: arguments of functions need not be in the file."""
    line = override.input_line or ""
    top_level, _, argument = override.key_or_group.partition(".")
    if top_level == "study":  # the name of a group, for Hydra
        return f"study_name={_values(override)[0]}"
    is_argument = top_level in NESTED and argument and override.type == OverrideType.CHANGE
    return f"++{line}" if is_argument else line


def _check_key(override: Override) -> None:
    key, run_settings = override.key_or_group, [*OmegaConf.load(CONFIGS / "run" / "default.yaml")]
    top_level = key.partition(".")[0].partition("/")[0]
    if key in (*GROUPS, "run"):
        for value in _values(override):
            _check_choice(key, value)
    elif key not in (*run_settings, "study", *OF_ROWS) and top_level not in (*NESTED, "hydra"):
        names = ", ".join([*GROUPS, "run", "study", *OF_ROWS, *run_settings])
        raise ConfigError(
            f"{key}={','.join(_values(override))}: {key} is not a setting; the settings are "
            f"{names}, and arguments such as kernel.step_size."
        )


def _check_choice(group: str, value: str) -> None:
    names = choices(group)
    if value in names:
        return
    if group == "run" or "." not in value:
        alternative = "" if group == "run" else " or an import path such as my_package.my_function"
        raise ConfigError(
            f"{group}={value} does not exist; give one of {', '.join(names)}{alternative}."
        )
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    wiring.locate(value, group)
    ConfigStore.instance().store(group=group, name=value, node={"_target_": value})


def as_typed(arguments: Sequence[str]) -> list[str]:
    """Return arguments without the marks that `prepare` put in front of them."""
    shown = (argument.removeprefix("++") for argument in arguments)
    return [a.replace("study_name=", "study=") if a.startswith("study_") else a for a in shown]


def settings_of(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the settings of a job: the kernel's, and others that were swept."""
    swept = _swept() - {"kernel", "seed", *OF_ROWS}
    typed = sorted(override.lstrip("+") for override in overrides)
    chosen = [a for a in typed if a.startswith("kernel.") or a.partition("=")[0] in swept]
    return dict(tidy.pair(argument) for argument in chosen)


def point_name(overrides: str) -> str:
    """Return the name of a job's folder: what was swept, and a digest of all its settings."""
    parts, swept = overrides.replace("++", "").split(";"), _swept()
    shown = ",".join(p for p in parts if p.partition("=")[0] in swept).replace("/", "-")
    digest = hashlib.sha256(overrides.encode()).hexdigest()[:6]
    return f"{shown[:200]}-{digest}"


def _swept() -> set[str]:
    overrides = _parse([a for a in sys.argv[1:] if "=" in a and not a.startswith("-")])
    return {o.key_or_group for o in overrides if o.is_sweep_override()}
