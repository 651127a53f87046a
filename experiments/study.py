"""Studies: the grids and computations of a table or figure, ``configs/study/<paper>/<name>.yaml``.

The run of a study leaves ``rows.csv`` and ``record.json`` in ``results/<paper>/<name>``, which
``python -m experiments.tidy results/<paper>/<name>`` copies into ``records``.
"""

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
from omegaconf import OmegaConf

from experiments import output, restarts, tidy, wiring
from experiments.tidy import Row
from experiments.wiring import ConfigError

RECORD = "record.json"
CONFIGS = Path(__file__).resolve().parents[1] / "configs"
KEYS = ("extends", "values", "overrides", "grid", "metrics", "methods", "references", "special")


class JobRows(NamedTuple):
    """Config of one job with its rows."""

    config: dict[str, Any]
    rows: list[Row]


def choices(group: str) -> list[str]:
    """Return the names of a group's files."""
    folder = CONFIGS / group
    files = folder.rglob("*.yaml")
    return sorted(path.relative_to(folder).with_suffix("").as_posix() for path in files)


def load(name: str, special: Sequence[str] = ()) -> dict[str, Any]:
    """Return a study, checked, with its `special` changed by arguments ``special.name=value``."""
    config = OmegaConf.merge(_read(name), OmegaConf.from_dotlist(list(special)))
    study: Any = OmegaConf.to_container(config, resolve=True)
    wiring.check(study.get("special"), "special", ("jobs", *wiring.Supplies.NAMES))
    return {key: study.get(key) for key in KEYS}


def _read(name: str) -> dict[str, Any]:
    if name not in choices("study"):
        listed = ", ".join(choices("study"))
        raise ConfigError(f"study={name} does not exist; the studies are {listed}.")
    study: Any = OmegaConf.to_container(OmegaConf.load(CONFIGS / "study" / f"{name}.yaml"))
    unknown = sorted({*study} - {*KEYS})
    if unknown:
        raise ConfigError(f"study={name} has {', '.join(unknown)}; it can have {', '.join(KEYS)}.")
    base = _read(study.pop("extends")) if "extends" in study else {}
    merged = {key: _merged(base.get(key), study.get(key)) for key in ("special", "values")}
    overrides = [*(base.get("overrides") or []), *(study.get("overrides") or [])]
    return {**base, **study, **merged, "overrides": overrides}


def _merged(base: Any, changes: Any) -> Any:
    """Merge mappings entry by entry; arguments of another function replace the whole."""
    if changes is None:
        return base
    mappings = isinstance(base, Mapping) and isinstance(changes, Mapping)
    if not mappings or changes.get("_target_", base.get("_target_")) != base.get("_target_"):
        return changes
    return {**base, **{key: _merged(base.get(key), value) for key, value in changes.items()}}


def grids(study: Mapping[str, Any]) -> list[list[str]]:
    """Return the arguments of a study, one list for each of its grids."""
    fixed = list(study["overrides"] or [])
    if study["metrics"]:
        fixed.append(f"metrics=[{','.join(study['metrics'])}]")
    if study["references"]:
        fixed.insert(0, f"references={_literal(study['references'])}")
    grid = study["grid"] or ([] if study["special"] else {})
    parts = grid if isinstance(grid, list) else [grid]
    return [[*fixed, *(f"{key}={_choice(values)}" for key, values in g.items())] for g in parts]


def _choice(values: Any) -> str:
    return ",".join(map(_literal, values)) if isinstance(values, list) else str(values)


def _literal(value: Any) -> str:
    """Return a value as Hydra's command line takes it."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_literal(item)}" for key, item in value.items()) + "}"
    return "null" if value is None else str(value)


def finish(
    name: str,
    study: Mapping[str, Any],
    jobs: Sequence[JobRows],
    out: Path,
    *,
    command: str,
    start_time: float,
    checkpoint_seconds: str | None = None,
) -> None:
    """Compute what is special, and write rows and record of a study into the folder `out`."""
    jobs = _renamed(jobs, study["methods"] or {})
    rows = tidy.distinct(row for job in jobs for row in job.rows)
    if study["special"]:
        function = wiring.build({**study["special"], "_partial_": True}, "special", None)
        keywords = {"jobs": jobs} if wiring.takes(function, ("jobs",)) else {}
        seconds = None if checkpoint_seconds is None else float(checkpoint_seconds)
        try:
            with restarts.checkpointed(out, recorded_settings(study, []), seconds):
                rows += function(**keywords)
        except ValueError as error:
            raise ConfigError(f"study={name}: {error}") from error
    out.mkdir(parents=True, exist_ok=True)
    rows.sort(key=lambda row: (row.x is not None, row.seed is not None))
    tidy.write_rows(out / "rows.csv", rows)
    about = {"study": name, "command": command, "wall_seconds": seconds_since(start_time)}
    write_record(out, about, recorded_settings(study, [job.config for job in jobs]))
    print(f"{len(rows)} rows in {output.relative(out)}")


def seconds_since(start_time: float) -> float:
    """Return the seconds since a value of `time.perf_counter`, for a record."""
    return round(time.perf_counter() - start_time, 2)


def write_record(folder: Path, about: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Write ``record.json``: what is given, versions, devices and commit, and the config."""
    devices = {"processes": jax.process_count(), "devices": jax.device_count()}
    record = {**about, **devices, **output.environment(), "config": config}
    output.write_atomically(folder / RECORD, json.dumps(output.plain(record), indent=1) + "\n")


def recorded_settings(
    study: Mapping[str, Any], configs: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the settings of a study for its record, from the configs of its jobs."""
    special = study["special"] or {}
    settings = {k: v for k, v in special.items() if k not in wiring.HYDRA_KEYS}
    if special.get("_recursive_") is False:
        settings = _leaves(settings, depth=2)
    return {**_common(configs), **settings}


def _renamed(jobs: Sequence[JobRows], methods: Mapping[str, str]) -> list[JobRows]:
    """Name methods as the study does; keep seeds and settings that differ, and each `setting`."""
    rows = [row for job in jobs for row in job.rows]
    several = len({row.seed for row in rows}) > 1
    values = {pair for row in rows for pair in row.settings.items()}
    counts = Counter(key for key, _ in values)
    shown = {key: key.rpartition(".")[2] for key, count in counts.items() if count > 1}
    shown |= {key: key for job in jobs for key in tidy.pairs(job.config.get("setting") or "")}
    shown["data"] = "data"  # added by metrics

    def rename(row: Row) -> Row:
        settings = {shown[key]: value for key, value in row.settings.items() if key in shown}
        seed = row.seed if several else None
        method = methods.get(row.method, row.method)
        return replace(row, method=method, settings=settings, seed=seed)

    return [JobRows(job.config, [rename(row) for row in job.rows]) for job in jobs]


def _common(configs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return all settings by dotted names: one value, or a list where jobs differ."""
    values: dict[str, list[Any]] = {}
    for config in configs:
        for key, value in _leaves(config).items():
            if value not in values.setdefault(key, []):
                values[key].append(value)
    return {key: each[0] if len(each) == 1 else each for key, each in values.items()}


def _leaves(node: Any, name: str = "", depth: int = 99) -> dict[str, Any]:
    """Return the values of nested mappings by dotted names."""
    if not isinstance(node, Mapping) or not depth:
        return {name: node}
    parts = [_leaves(item, f"{name}.{key}".lstrip("."), depth - 1) for key, item in node.items()]
    return {key: value for part in parts for key, value in part.items()}
