"""Typed settings: every experiment's ``Config``, registered with Hydra.

Hydra checks names and types against the registered copy; ranges are checked by ``Config`` itself.
"""

import dataclasses
import importlib
import pkgutil
import typing
from pathlib import Path
from types import ModuleType
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

import experiments
from experiments import checks

__all__ = [
    "RUN_SETTINGS",
    "RunSettings",
    "SettingsError",
    "build",
    "modules",
    "name_of",
    "register",
    "split",
]


class SettingsError(ValueError):
    """Settings that no experiment accepts."""


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """Settings of how to run, which change no result; every experiment takes them.

    `clients_at_a_time` is the one that decides to the last bit, and with one whatever the devices.
    """

    checkpoint_seconds: float | None = None
    keep_finished: bool = False
    all_devices: bool = False
    clients_at_a_time: int | None = None

    def __post_init__(self) -> None:
        if self.clients_at_a_time is not None:
            checks.at_least(1, self, "clients_at_a_time")
        if self.checkpoint_seconds is not None:
            checks.at_least(0, self, "checkpoint_seconds")


RUN_SETTINGS = tuple(item.name for item in dataclasses.fields(RunSettings))


def modules() -> dict[str, ModuleType]:
    """Import every experiment; names are ``<paper>/<module>``."""
    found = {}
    root = Path(experiments.__file__).parent
    for paper in sorted(p.name for p in root.iterdir() if (p / "__init__.py").is_file()):
        for info in pkgutil.iter_modules([str(root / paper)]):
            module = importlib.import_module(f"experiments.{paper}.{info.name}")
            if hasattr(module, "Config"):
                found[f"{paper}/{info.name}"] = module
    return found


def register() -> dict[str, ModuleType]:
    """Store a schema for every experiment in the group ``schema`` and return the experiments."""
    found = modules()
    store = ConfigStore.instance()
    for name, module in found.items():
        paper, leaf = name.split("/")
        store.store(
            group=f"schema/{paper}", name=leaf, node=_editable(name, module.Config, RunSettings)
        )
    return found


def _editable(name: str, *parts: type) -> type:
    # OmegaConf takes a frozen dataclass as read-only, so that no value could be overridden.
    fields: list[Any] = []
    for part in parts:
        hints = typing.get_type_hints(part)
        for item in dataclasses.fields(part):
            if item.default is dataclasses.MISSING:
                raise TypeError(f"{name}: the setting {item.name} needs a plain default.")
            fields.append((item.name, hints[item.name], dataclasses.field(default=item.default)))
    return dataclasses.make_dataclass(name, fields)


def name_of(cfg: DictConfig) -> str:
    """Return which experiment's schema `cfg` was composed with."""
    schema = OmegaConf.get_type(cfg)
    return schema.__name__


def build(cfg: DictConfig, module: ModuleType) -> Any:
    """Return the experiment's ``Config`` for what Hydra composed.

    Raises
    ------
    SettingsError
        On a setting that the experiment does not have (Hydra lets ``+name=value`` pass), or a
        value out of range.
    """
    values, _ = split(cfg)
    known = [item.name for item in dataclasses.fields(module.Config)]
    for name in values:
        if name not in known:
            names = ", ".join([*known, *RUN_SETTINGS])
            raise SettingsError(f"Unknown setting {name!r}; the settings are {names}.")
    try:
        return module.Config(**{name: _frozen(value) for name, value in values.items()})
    except ValueError as error:
        raise SettingsError(str(error)) from error


def split(cfg: DictConfig) -> tuple[dict[str, Any], RunSettings]:
    """Return the experiment's own settings, and those of the run.

    Raises
    ------
    SettingsError
        On settings of the run out of range.
    """
    values: Any = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    of_run = {name: values.pop(name) for name in RUN_SETTINGS if name in values}
    try:
        return values, RunSettings(**of_run)
    except ValueError as error:
        raise SettingsError(str(error)) from error


def _frozen(value: Any) -> Any:
    return tuple(_frozen(v) for v in value) if isinstance(value, list) else value
