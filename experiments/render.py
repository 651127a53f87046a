"""Pages of results from templates and records: ``python -m experiments.render [paper ...]``.

``notes/<paper>.md`` is written by a person. In it ``{{ ... }}`` holds a call of one of the
functions of `Page`. The page goes to ``docs/results/<paper>.md``, an appendix for each study to
``docs/results/runs/<paper>/<study>.md``.
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import hydra

from experiments import arguments, run, tidy
from experiments.claims import NOTES, claims_of, evaluate, judge
from experiments.output import markdown_table
from experiments.study import CONFIGS, load, recorded_settings

DOCS = Path(__file__).resolve().parents[1] / "docs" / "results"
PLACEHOLDER = re.compile(r"\{\{(.+?)\}\}", re.DOTALL)
BRACES = re.compile(r"\{([^{}]+?)(?::([^{}:]*))?\}")
FINDINGS = "findings"  # page of what users should know, from studies of all papers
MAX_ROWS = 60  # of an appendix; the others are in the file alone


class Page:
    """Functions that a template may call, for one paper with records in `root`."""

    def __init__(self, paper: str, root: Path = tidy.RECORDS, notes: Path = NOTES) -> None:
        self.paper, self.root, self.notes = paper, root, notes
        has_claims = (notes / f"{paper}.claims.yaml").exists()
        self.claims = {c.id: c for c in claims_of(paper, notes)} if has_claims else {}

    def value(self, study: str, expression: str, form: str = ".3g") -> str:
        """Return a number of a study; raise `ValueError` if it is NaN."""
        text = format(evaluate(expression, study, self.root), form)
        if "nan" in text:
            raise ValueError("the value is NaN")
        return text

    def verdict(self, name: str, word: str) -> str:
        """Return the verdict on a claim, or raise `ValueError` if it is not `word`.

        A claim of another paper is named ``"<paper>/<claim>"``.
        """
        paper, _, claim = name.rpartition("/")
        page = Page(paper, self.root, self.notes) if paper else self
        actual = judge(page.claims[claim], self.root)
        if actual != word:
            raise ValueError(f"The verdict on {name} is {actual!r}, and the page says {word!r}.")
        return f"**{word}**"

    def claims_table(self, *names: str) -> str:
        """Return the table of some claims, by default of all that the paper makes."""
        claims = [self.claims[name] for name in names]
        lines = []
        for claim in claims or [c for c in self.claims.values() if not c.is_ours]:
            study = claim.run(self.root)
            line = {
                "where": claim.where,
                "claim": claim.claim,
                "verdict": f"**{judge(claim, self.root)}**",
                "ours": (self._filled(claim.ours, study) if study else "") or "-",
                "paper": claim.paper or "-",
                "run": f"[{study.partition('/')[2]}](runs/{study}.md)" if study else "-",
            }
            lines.append(line)
        if all(line["paper"] == "-" for line in lines):
            lines = [{k: v for k, v in line.items() if k != "paper"} for line in lines]
        return markdown_table(lines)

    def _filled(self, text: str, study: str) -> str:
        """Return a text in which each ``{expression:format}`` is replaced by its value."""
        return BRACES.sub(lambda match: self.value(study, match[1], match[2] or ".3g"), text)

    def table(
        self, study: str, metrics: Mapping[str, str], by: str = "method", **where: Any
    ) -> str:
        """Return a table with a line per method or value of the setting `by`.

        `metrics` maps metrics to the headings of their columns; `where` are conditions on rows.
        """
        lines: dict[Any, dict[str, Any]] = {}
        for row in tidy.read(study, self.root):
            if row.metric in metrics and row.matches({"x": None, "seed": None, **where}):
                place = dict(row.place).get(by)
                line = lines.setdefault(place, {by: place, **dict.fromkeys(metrics.values())})
                line[metrics[row.metric]] = row.value
        if not lines:
            raise LookupError(f"{study} has no rows with the metrics {list(metrics)} and {where}.")
        return markdown_table(list(lines.values()))

    def figure(self, file: str, takeaway: str) -> str:
        """Return a figure of ``docs/results/figures`` with what to see in it."""
        if not (DOCS / "figures" / file).is_file():
            raise FileNotFoundError(f"docs/results/figures/{file} does not exist.")
        return f"![{takeaway}](figures/{file})\n\n*{takeaway}*"

    def fill(self, template: str) -> str:
        """Return a template with calls replaced by their results; an error has the call's text."""
        names = ("value", "verdict", "claims_table", "table", "figure")
        functions = {name: getattr(self, name) for name in names}

        def called(match: re.Match[str]) -> str:
            try:
                return str(eval(match[1].strip(), functions))
            except Exception as error:
                raise ValueError(f"{self.paper}: {{{{{match[1]}}}}}: {error}") from error

        return PLACEHOLDER.sub(called, template)


APPENDIX = """\
# {study}

Appendix of [results on {paper}](../../{paper}.md). The command of the run, with the versions that \
it used:

```
{command}
```

{facts}

## Settings

Names are paths in the config of `experiments.run`, values are this run's.

{settings}

{figures}## Numbers

{num_shown} of {num_rows} numbers. All rows, points of curves among them, are in \
[{name}.csv](../../../../records/{study}.csv). A method is blank if a number belongs to the whole \
run, s.e. is the standard error, where one was computed, and nan stands for a value that is not \
defined, for example because chains diverged.

{numbers}
"""


def appendix(study: str) -> str:
    """Return the appendix of a study: how it was run, its settings, figures and first rows."""
    record, rows = tidy.read_record(study), tidy.read(study)
    facts = {
        "device": record["device"],
        "run time (s)": f"{record['wall_seconds']:,.0f}",
        "commit of fedmcmc": (record["git_commit"] or "unknown")[:10],
        "fedmcmc": record["versions"]["fedmcmc"],
        "JAX": record["versions"]["jax"],
        "Python": record["versions"]["python"],
    }
    settings = [{"setting": f"`{k}`", "value": f"`{v}`"} for k, v in record["config"].items()]
    table = tidy.by_place(rows)
    summaries = [row for row in rows if row.x is None and not row.metric.endswith(" s.e.")]
    shown = sorted(summaries, key=lambda row: row.seed is not None)[:MAX_ROWS]
    numbers = []
    for row in shown:
        place = {**row.settings, "seed": row.seed}
        line = {
            "method": row.method,
            "settings and seed": " ".join(f"{k}={v}" for k, v in place.items() if v is not None),
            "metric": row.metric,
            "value": row.value,
            "s.e.": table[row.place].get(f"{row.metric} s.e."),
        }
        numbers.append(line)
    paper, _, name = study.partition("/")
    prefix = f"{paper}-{name}-"
    files = sorted(path.name for path in (DOCS / "figures").glob(f"{prefix}*.png"))
    figures = [f"![{f.removeprefix(prefix)[:-4]}](../../figures/{f})" for f in files]
    return APPENDIX.format(
        study=study,
        paper=paper,
        name=name,
        command=record["command"],
        facts=markdown_table([facts]),
        settings=markdown_table(settings),
        figures="".join(f"{part}\n\n" for part in ["## Figures", *figures] if figures),
        num_shown=len(shown),
        num_rows=len(summaries),
        numbers=markdown_table(numbers),
    )


def text_of(paper: str) -> str:
    """Return the page of a paper, or raise `ValueError` if a verdict is not the expected one."""
    page = Page(paper)
    for claim in page.claims.values():
        page.verdict(claim.id, claim.expect)
    return page.fill((NOTES / f"{paper}.md").read_text())


def check_settings(studies: Sequence[str], root: Path = tidy.RECORDS) -> None:
    """Raise `ValueError` unless ``configs/study`` has the settings of each record."""
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        for name in studies:
            expected = _compared(_settings_of(name))
            recorded = _compared(tidy.read_record(name, root)["config"])
            names = {*expected, *recorded}
            wrong = sorted(n for n in names if expected.get(n) != recorded.get(n))
            if wrong:
                raise ValueError(f"{name}: settings recorded are not those of its study: {wrong}.")


def _settings_of(name: str) -> dict[str, Any]:
    """Return the settings that a run of ``configs/study/<name>.yaml`` records."""
    commands = arguments.prepare([f"study={name}"])
    jobs = [job for command in commands for job in arguments.jobs(command)]
    configs = [run.plain(hydra.compose("config", job)) for job in jobs]
    return recorded_settings(load(name), configs)


def _compared(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with numbers as in a record, without those that change no result."""
    of_form = ("placement", *run.SETTINGS_OF_FORM)
    values = json.loads(
        json.dumps(settings), parse_float=lambda x: float(f"{float(x):.{tidy.DIGITS}g}")
    )
    return {name: v for name, v in values.items() if name.partition(".")[0] not in of_form}


def path_of(paper: str) -> Path:
    """Return where the page of a paper is."""
    return DOCS / f"{paper}.md"


if __name__ == "__main__":
    for paper in sys.argv[1:] or sorted(path.stem for path in NOTES.glob("*.md")):
        check_settings(tidy.studies(paper))
        path_of(paper).write_text(text_of(paper))
        for name in tidy.studies(paper):
            path = DOCS / "runs" / f"{name}.md"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(appendix(name))
        print(path_of(paper))
