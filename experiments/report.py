"""Turn records of runs into the pages of ``docs/results``: ``python -m experiments.report``.

A record is the ``metrics.json`` of a run, kept in ``docs/results/runs``; those of new runs, in
``--results``, are taken in first. The pages say nothing that is not in a record or computed from
one, as exact laws are at its settings; what was not run is listed as not run.
"""

import argparse
import importlib
import importlib.util
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import hydra
from PIL import Image

import experiments
from experiments import claims, findings, output, schemas
from experiments import settings_run as run

__all__ = [
    "claims_of",
    "collect",
    "differences",
    "full_name",
    "main",
    "page",
    "records_of",
    "settings_of",
    "write",
]

MAX_BYTES = 150_000
DIGITS = 6  # of the numbers in a record
SCHEMA = re.compile(r"^\s*-\s*/schema/(\S+)@_global_", re.MULTILINE)
WIDE = 9  # columns, beyond which a table is folded away

WRITTEN = (
    "`make docs` writes this page from the records in [runs](runs); edits by hand would be lost. "
    "Minibatches are drawn with replacement unless a section says otherwise."
)
OF_A_PAPER = (
    " Sections follow the paper. Experiments have the paper's settings where the paper states "
    "them, unless a section says otherwise.\n\n"
    "Each verdict is computed from the record of the run that its row links to, in places with a "
    "law (exact unless it says otherwise) at that run's settings. It holds for that run alone: "
    "many runs are smaller than the paper's.\n\n"
    f"- **{claims.REPRODUCED}**: the run shows what the paper claims.\n"
    f"- **{claims.PARTLY}**: it shows a part of the claim, or all of it on other data than the "
    "paper's, on one target where the paper has many, at an end of a grid, or with a lead that may "
    'be of the start alone ("so far").\n'
    f"- **{claims.CONTRADICTED}**: it shows the opposite, on the paper's data and with the paper's "
    "settings, as far as they decide.\n"
    f"- **{claims.UNTESTABLE}**: the run cannot tell, or the claim fails on other data or with "
    'settings that the paper does not give or our copy of it has lost ("fails with settings of '
    'ours"); with such settings a claim can be reproduced, but not contradicted.\n'
    f"- **{claims.DRAWN}**: a picture without a claim, drawn from our run."
)
OURS = "The same questions, asked of variants that the paper does not have or does not try:"

Record = Mapping[str, Any]


def settings_of(schema: str) -> list[str]:
    """Return the settings files (``<paper>/<name>``) that fill `schema`, the paper's own first."""
    names = []
    for name in run.available(schema.split("/")[0]):
        text = (run.CONFIGS / "experiment" / f"{name}.yaml").read_text()
        if SCHEMA.findall(text)[:1] == [schema]:
            names.append(name)
    return sorted(names, key=lambda name: (name != schema, name))


def claims_of(paper: str) -> tuple[claims.Claim, ...]:
    """Return the claims of a paper, in its order; none where experiments are of no paper."""
    name = f"experiments.{paper}.claims"
    if importlib.util.find_spec(name) is None:
        return ()
    return importlib.import_module(name).CLAIMS


def collect(results: Path, docs: Path) -> list[str]:
    """Take in the records of all runs below `results`, and the figures that only a run can draw.

    Numbers are rounded to six digits. Returns the names of the runs.
    """
    modules, names = schemas.modules(), []
    for schema, module in modules.items():
        for name in settings_of(schema):
            path = results / name / output.METRICS
            if not path.is_file():
                continue
            record = json.loads(path.read_text(), parse_float=_rounded)
            kept = _place(docs, name)
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(record, separators=(",", ":")) + "\n")
            names.append(name)
            if not hasattr(module, "draw"):
                for figure in record["metrics"].get("figures", []):
                    _copy_small(path.parent / figure["file"], _figure(docs, name, figure["file"]))
    return names


def _rounded(text: str) -> float:
    return float(f"{float(text):.{DIGITS}g}")


def _place(docs: Path, name: str) -> Path:
    return docs / "runs" / f"{name}.json"


def _figure(docs: Path, name: str, file: str) -> Path:
    (docs / "figures").mkdir(parents=True, exist_ok=True)
    return docs / "figures" / f"{name.replace('/', '-')}-{file}"


def write(paper: str, docs: Path) -> Path:
    """Write the page of one paper and its figures; return the page's path.

    Figures of the paper that the page does not show are removed.
    """
    docs.mkdir(parents=True, exist_ok=True)
    path = docs / f"{paper}.md"
    text = page(paper, docs)
    path.write_text(text)
    for old in (docs / "figures").glob(f"{paper}-*.png"):
        if f"figures/{old.name}" not in text:
            old.unlink()
    return path


def records_of(docs: Path, names: list[str]) -> dict[str, Record]:
    """Return the records of some experiments' runs, by the name of the settings."""
    places = {name: _place(docs, name) for schema in names for name in settings_of(schema)}
    return {n: json.loads(path.read_text()) for n, path in places.items() if path.is_file()}


def page(paper: str, docs: Path) -> str:
    """Return the page as Markdown; figures that its records suffice for are drawn anew."""
    package = importlib.import_module(f"experiments.{paper}")
    modules = {n: m for n, m in schemas.modules().items() if n.startswith(f"{paper}/")}
    made = claims_of(paper)
    ordered = _ordered(modules, made)
    records = records_of(docs, list(modules))
    figures = {
        name: _draw(record, modules[schema], docs)
        for schema in ordered
        for name, record in records.items()
        if name in settings_of(schema)
    }
    parts = [
        f"# {(package.__doc__ or paper).strip().rstrip('.')}",
        WRITTEN + (OF_A_PAPER if made else ""),
    ]
    rows = [(claim.ours, _row(claim, records, figures)) for claim in made]
    for ours, title in ((False, ""), (True, OURS)):
        table = [row for of_us, row in rows if of_us == ours]
        parts += [title, output.markdown_table(table)] if table else []
    for name in ordered:
        parts += _section(name, modules[name], records, figures)
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"


def _ordered(modules: Mapping[str, ModuleType], made: Sequence[claims.Claim]) -> list[str]:
    """Return experiments in the order of their claims; then others, studies of our own.

    A module with ``AFTER``, the name of another, follows that one.
    """
    order = [c.experiment for c in made if c.experiment in modules]
    others = sorted(set(modules) - set(order), key=lambda n: getattr(modules[n], "TITLE", n))
    names = [name for name in dict.fromkeys((*order, *others)) if name is not None]

    def placed(after: str | None) -> list[str]:
        found = [name for name in names if getattr(modules[name], "AFTER", None) == after]
        return [one for name in found for one in (name, *placed(name))]

    return placed(None)


def _row(
    claim: claims.Claim, records: Mapping[str, Record], figures: Mapping[str, list[dict[str, str]]]
) -> dict[str, str]:
    row = {"where": claim.where, "the question" if claim.ours else "the paper": claim.text}
    blank = {"verdict": claims.NOT_RUN, "our number": "-", "run": "-"}
    if claim.experiment is None or claim.judge is None:
        return row | blank
    candidates = claim.runs or tuple(settings_of(claim.experiment))
    name = next((n for n in candidates if n in records), None)
    if name is None:
        return row | blank | {"run": ", ".join(f"`{n}`" for n in candidates[:1])}
    record = records[name]
    verdict = claim.judge(record["metrics"], record["config"])
    anchor = re.sub(r"[^a-z0-9_-]", "", name.lower())
    links = [f"[`{name}`](#{anchor})"]
    links += [
        f"[figure](figures/{_figure(Path(), name, figure['file']).name})"
        for figure in figures.get(name, [])
        if figure["file"] == claim.figure
    ]
    return row | {
        "verdict": f"**{verdict.word}**",
        "our number": verdict.number,
        "run": ", ".join(links),
    }


def _draw(record: Record, module: ModuleType, docs: Path) -> list[dict[str, str]]:
    """Return files and captions of a run's figures, drawn anew where its record suffices.

    Those of other runs are kept as the run drew them.
    """
    name, metrics = record["experiment"], record["metrics"]
    if not hasattr(module, "draw"):
        kept = metrics.get("figures", [])
        return [figure for figure in kept if _figure(docs, name, figure["file"]).is_file()]
    with tempfile.TemporaryDirectory() as folder:
        drawn = module.draw(metrics, Path(folder))
        for figure in drawn:
            _copy_small(Path(folder) / figure["file"], _figure(docs, name, figure["file"]))
    return drawn


def _section(
    schema: str,
    module: ModuleType,
    records: Mapping[str, Record],
    figures: Mapping[str, list[dict[str, str]]],
) -> list[str]:
    parts = [f"## {getattr(module, 'TITLE', schema)}", getattr(module, "PAPER", "")]
    captions: dict[str, str] = {}
    for name in settings_of(schema):
        if name in records:
            parts += _run(records[name], module, figures[name], captions)
    missing = [name for name in settings_of(schema) if name not in records]
    if missing:
        listed = ", ".join(f"`{name}`" for name in missing)
        parts.append(
            f"Not run: {listed}. Command: `python -m experiments.run experiment={missing[0]}`"
            + (" and so on." if len(missing) > 1 else "")
        )
    return parts


def _run(
    record: Record, module: ModuleType, figures: list[dict[str, str]], captions: dict[str, str]
) -> list[str]:
    """Return a run's part of a section.

    `captions`, of the section so far, with the run that had them, are not told again.
    """
    metrics, versions, name = record["metrics"], record["versions"], record["experiment"]
    commit = (record["git_commit"] or "unknown")[:10]
    changed = " with changes" if record["git_dirty"] else ""
    seconds = f"{record['wall_seconds']:.0f} s"
    if record.get("resumed"):
        seconds += " in the last of several attempts"
    precision = record.get("matmul_precision")
    rounded, command = "", record["command"]
    if precision not in (None, "highest"):
        rounded = f", matrix products in {precision}"
        command = f"JAX_DEFAULT_MATMUL_PRECISION={precision} {command}"
    parts = [
        f"### `{name}`",
        f"```\n{command}\n```",
        f"{seconds} on {record['device']}{rounded}; fedmcmc {versions['fedmcmc']} "
        f"(commit {commit}{changed}), JAX {versions['jax']}, Python {versions['python']}; "
        f"[record](runs/{name}.json). {differences(record)}",
    ]
    if hasattr(module, "about"):
        parts.append(module.about(record["config"], metrics))
    if hasattr(module, "commentary"):
        parts.append(module.commentary(metrics))
    # An experiment whose commentary shows all of the table says so.
    if metrics.get("table") and not getattr(module, "SHOWS_TABLE", False):
        shown = module.table(metrics) if hasattr(module, "table") else metrics["table"]
        parts.append(_folded(output.markdown_table(shown), len(shown[0])))
    for figure in figures:
        path, caption = _figure(Path(), name, figure["file"]), figure["caption"]
        alternative = f"{name}: {Path(figure['file']).stem.replace('_', ' ')}"
        first = captions.setdefault(caption, name)
        told = caption if first == name else f"Caption as of `{first}`."
        parts.append(f"![{alternative}](figures/{path.name})\n\n*{told}*")
    return parts


def _folded(table: str, columns: int) -> str:
    if columns <= WIDE:
        return table
    return f"<details><summary>All numbers</summary>\n\n{table}\n\n</details>"


def full_name(name: str) -> str:
    """Return the settings file that `name` is a smaller or another variant of.

    The one without ``_small`` or ``_gpu`` and what follows, if there is such a file; else the
    paper's own.
    """
    plain = re.sub(r"_(small|gpu).*$", "", name)
    if plain != name and plain in run.available():
        return plain
    text = (run.CONFIGS / "experiment" / f"{name}.yaml").read_text()
    return SCHEMA.findall(text)[0]


def differences(record: Record) -> str:
    """Return which settings of a run differ from those of the full one, as a sentence."""
    full = full_name(record["experiment"])
    theirs = _settings(full)
    changed = [
        f"`{name}` {_short(value)} ({_short(theirs[name])})"
        for name, value in record["config"].items()
        if value != theirs.get(name)
    ]
    if not changed:
        same = record["experiment"] == full
        return "The full settings." if same else f"The settings are those of `{full}`."
    return (
        f"Settings that differ from `{full}`, whose values are in brackets: {', '.join(changed)}."
    )


@cache
def _settings(name: str) -> dict[str, Any]:
    schemas.register()
    with hydra.initialize_config_dir(str(run.CONFIGS), version_base="1.3"):
        composed = schemas.split(hydra.compose("settings", [f"experiment={name}"]))[0]
    return json.loads(json.dumps(output.plain(composed)), parse_float=_rounded)


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _copy_small(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)
    scale = 1.0
    while target.stat().st_size >= MAX_BYTES:
        scale *= 0.85
        image = Image.open(source).convert("RGB")
        size = (round(image.width * scale), round(image.height * scale))
        smaller = image.resize(size, Image.Resampling.LANCZOS).quantize(128)
        smaller.save(target, optimize=True)


def main(arguments: list[str] | None = None) -> None:
    """Take in new runs, if there are any; write the page of every paper and that of findings."""
    root = Path(experiments.__file__).resolve().parents[1]
    parser = argparse.ArgumentParser(description="Write docs/results from the records of runs.")
    default = Path(os.environ.get("FEDMCMC_RESULTS", "results"))
    parser.add_argument("--results", type=Path, default=default, help="where new runs lie")
    parser.add_argument("--docs", type=Path, default=root / "docs" / "results")
    options = parser.parse_args(arguments)
    for name in collect(options.results, options.docs):
        print(f"record of {name}")
    for paper in sorted({name.split("/")[0] for name in schemas.modules()}):
        print(output.relative(write(paper, options.docs)))
    told = options.docs.parent / "findings.md"
    told.write_text(findings.page(records_of(options.docs, list(schemas.modules()))))
    print(output.relative(told))


if __name__ == "__main__":
    main()
