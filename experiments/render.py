"""Pages of results from templates and records: ``python -m experiments.render``.

``notes/<paper>.md`` is written by a person. In it ``{{ ... }}`` holds a call of one of the
functions of `Page`. The page goes to ``docs/results/<paper>.md``, an appendix for each study to
``docs/results/runs/<paper>/<study>.md``. ``notes/findings.md`` becomes ``docs/findings.md``.
"""

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import hydra

from experiments import arguments as command_line
from experiments import run, tidy
from experiments.claims import NOTES, Claim, claims_of, evaluate, judge
from experiments.output import markdown_table, plain
from experiments.study import CONFIGS, recorded_settings

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs" / "results"
PLACEHOLDER = re.compile(r"\{\{(.+?)\}\}", re.DOTALL)
BRACES = re.compile(r"\{([^{}]+?)(?::([^{}:]*))?\}")
FINDINGS = "findings"
"""Page of what users should know, from studies of all papers."""
MAX_LINES, MAX_WORDS = 200, 2_500
MAX_ROWS = 60
"""Rows of an appendix; the others are in the file alone."""


class Page:
    """Functions that a template may call, for one paper.

    Parameters
    ----------
    paper
        Name of the paper's folder of records.
    root, notes
        Folders of the records and of the claims.
    """

    def __init__(self, paper: str, root: Path = tidy.RECORDS, notes: Path = NOTES) -> None:
        self.paper, self.root, self.notes = paper, root, notes
        path = notes / f"{paper}.claims.yaml"
        self.claims = {c.id: c for c in claims_of(paper, notes)} if path.exists() else {}

    def value(self, study: str, expression: str, form: str = ".3g") -> str:
        """Return a number of a study; raise `ValueError` if it is NaN."""
        text = format(evaluate(expression, study, self.root), form)
        if "nan" in text:
            raise ValueError("the value is NaN")
        return text

    def verdict(self, name: str, word: str) -> str:
        """Return the verdict on a claim, which the prose around it expects to be `word`.

        A claim of another paper is named ``"<paper>/<claim>"``.

        Raises
        ------
        ValueError
            If it is another.
        """
        paper, _, claim = name.rpartition("/")
        claims = self.claims
        if paper:
            claims = {claim.id: claim for claim in claims_of(paper, self.notes)}
        actual = judge(claims[claim], self.root)
        if actual != word:
            raise ValueError(f"The verdict on {name} is {actual!r}, and the page says {word!r}.")
        return f"**{word}**"

    def claims_table(self, *names: str) -> str:
        """Return the table of some claims, by default of all that the paper makes."""
        chosen = [self.claims[name] for name in names]
        if not names:
            of_paper = [claim for claim in self.claims.values() if not claim.is_ours]
            chosen = of_paper or list(self.claims.values())
        lines = [self._line(claim) for claim in chosen]
        if all(line["paper"] == "-" for line in lines):
            lines = [{k: v for k, v in line.items() if k != "paper"} for line in lines]
        return markdown_table(lines)

    def _line(self, claim: Claim) -> dict[str, str]:
        study = claim.run(self.root)
        link = "-"
        if study:
            link = f"[{study.partition('/')[2]}](runs/{study}.md)"
        return {
            "where": claim.where,
            "claim": claim.claim,
            "verdict": f"**{judge(claim, self.root)}**",
            "ours": _filled(claim.ours, study, self.root) if study and claim.ours else "-",
            "paper": claim.paper or "-",
            "run": link,
        }

    def table(
        self, study: str, metrics: Mapping[str, str], by: str = "method", **where: Any
    ) -> str:
        """Return a table with a line per value of `by` and a column per metric.

        Parameters
        ----------
        study
            Name of the study.
        metrics
            Heading of each metric, by its name.
        by
            ``"method"`` or the name of a setting.
        **where
            Conditions on the rows.
        """
        rows = [row for row in tidy.read(study, self.root) if row.matches(where)]
        lines: dict[Any, dict[str, Any]] = {}
        for row in rows:
            if row.metric in metrics and row.x is None and row.seed is None:
                place = row.method if by == "method" else row.settings.get(by)
                line = lines.setdefault(place, {by: place, **dict.fromkeys(metrics.values())})
                line[metrics[row.metric]] = row.value
        if not lines:
            raise LookupError(f"{study} has no rows with the metrics {list(metrics)} and {where}.")
        return markdown_table(list(lines.values()))

    def figure(self, file: str, takeaway: str) -> str:
        """Return a figure of ``docs/results/figures`` with what to see in it.

        Raises
        ------
        FileNotFoundError
            If there is no such file.
        """
        if not (DOCS / "figures" / file).is_file():
            raise FileNotFoundError(f"docs/results/figures/{file} does not exist.")
        return f"![{takeaway}](figures/{file})\n\n*{takeaway}*"

    def fill(self, template: str) -> str:
        """Return a template with all calls replaced by what they return.

        Raises
        ------
        ValueError
            If a call fails, with its text and the reason.
        """
        functions: dict[str, Callable[..., str]] = {
            name: getattr(self, name)
            for name in ("value", "verdict", "claims_table", "table", "figure")
        }

        def called(match: re.Match[str]) -> str:
            try:
                return str(eval(match[1].strip(), {"__builtins__": {"dict": dict}, **functions}))
            except Exception as error:
                raise ValueError(f"{self.paper}: {{{{{match[1]}}}}}: {error}") from error

        return PLACEHOLDER.sub(called, template)


def _filled(text: str, study: str, root: Path) -> str:
    """Return a text in which each ``{expression:format}`` is replaced by its value."""
    return BRACES.sub(
        lambda match: format(evaluate(match[1], study, root), match[2] or ".3g"), text
    )


def appendix(study: str, root: Path = tidy.RECORDS, docs: Path = DOCS) -> str:
    """Return the appendix of a study: how it was run, its settings, figures and first rows."""
    record, rows = tidy.read_record(study, root), tidy.read(study, root)
    versions = record["versions"]
    facts = {
        "device": record["device"],
        "run time (s)": f"{record['wall_seconds']:,.0f}",
        "commit of fedmcmc": (record["git_commit"] or "unknown")[:10],
        "fedmcmc": versions["fedmcmc"],
        "JAX": versions["jax"],
        "Python": versions["python"],
    }
    settings = [{"setting": name, "value": str(v)} for name, v in record["config"].items()]
    errors = {(row.method, str(row.settings), row.seed, row.metric): row.value for row in rows}
    summaries = [row for row in rows if row.x is None and not row.metric.endswith(" s.e.")]
    shown = sorted(summaries, key=lambda row: row.seed is not None)[:MAX_ROWS]
    numbers = [
        {
            "method": row.method,
            "settings and seed": " ".join(
                f"{name}={v}"
                for name, v in {**row.settings, "seed": row.seed}.items()
                if v is not None
            ),
            "metric": row.metric,
            "value": row.value,
            "s.e.": errors.get((row.method, str(row.settings), row.seed, f"{row.metric} s.e.")),
        }
        for row in shown
    ]
    flat = study.replace("/", "-")
    figures = sorted(path.name for path in (docs / "figures").glob(f"{flat}-*.png"))
    paper, _, name = study.partition("/")
    up = "../../../.."
    parts = [
        f"# {study}",
        f"Appendix of [results on {paper}](../../{paper}.md). The command of the run, with the "
        "versions that it used:",
        f"```\n{record['command']}\n```",
        markdown_table([facts]),
        "## Settings",
        "Names are paths in the config of `experiments.run`, values are this run's.",
        markdown_table(settings),
        *(["## Figures"] if figures else []),
        *(
            f"![{file.removeprefix(flat + '-').removesuffix('.png')}](../../figures/{file})"
            for file in figures
        ),
        "## Numbers",
        f"{len(shown)} of {len(summaries)} numbers. All rows, points of curves among them, are in "
        f"[{name}.csv]({up}/records/{paper}/{name}.csv). A method is blank if a number belongs to "
        "the whole run, s.e. is the standard error, where one was computed, and nan stands for a "
        "value that is not defined, for example because chains diverged.",
        markdown_table(numbers) if numbers else "",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def text_of(paper: str, notes: Path = NOTES, root: Path = tidy.RECORDS) -> str:
    """Return the page of a paper.

    Raises
    ------
    ValueError
        If a placeholder does not resolve or is NaN, a verdict is not the expected one, or the page
        is longer than 200 lines (that of findings: 2,500 words).
    """
    page = Page(paper, root, notes)
    for claim in page.claims.values():
        page.verdict(claim.id, claim.expect)
    text = page.fill((notes / f"{paper}.md").read_text())
    num, limit, unit = text.count("\n"), MAX_LINES, "lines"
    if paper == FINDINGS:
        num, limit, unit = len(text.split()), MAX_WORDS, "words"
    if num > limit:
        raise ValueError(f"The page of {paper} has {num:,} {unit}, at most {limit:,}.")
    return text


def check_settings(studies: Sequence[str], root: Path = tidy.RECORDS) -> None:
    """Raise `ValueError` unless ``configs/study`` has the settings of each record."""
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        for name in studies:
            expected = _plain(_of_study(name))
            recorded = _plain(tidy.read_record(name, root)["config"])
            names = sorted({*expected, *recorded})
            wrong = [n for n in names if expected.get(n) != recorded.get(n)]
            if wrong:
                raise ValueError(
                    f"{name}: settings of the record are not those of its study: {wrong}."
                )


def _of_study(name: str) -> dict[str, Any]:
    """Return the settings that a run of ``configs/study/<name>.yaml`` records."""
    line = [f"study={name}"]
    _, content = command_line.study_of(line)
    assert content is not None
    jobs = [job for command in command_line.prepare(line) for job in command_line.jobs(command)]
    return recorded_settings(content, [run.plain(hydra.compose("config", job)) for job in jobs])


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with numbers as in a record, without those that change no result."""
    values = json.loads(json.dumps(plain(settings)), parse_float=tidy.rounded)
    of_form = ("placement", *run.SETTINGS_OF_FORM)
    return {name: v for name, v in values.items() if name.partition(".")[0] not in of_form}


def path_of(paper: str, docs: Path = DOCS) -> Path:
    """Return where the page of a paper is."""
    return docs.parent / f"{paper}.md" if paper == FINDINGS else docs / f"{paper}.md"


def write(paper: str, docs: Path = DOCS, notes: Path = NOTES, root: Path = tidy.RECORDS) -> Path:
    """Write the page of a paper and the appendices of its studies; return the page's path."""
    check_settings(tidy.studies(paper, root), root)
    path = path_of(paper, docs)
    path.write_text(text_of(paper, notes, root))
    for study in tidy.studies(paper, root):
        path_of_study = docs / "runs" / f"{study}.md"
        path_of_study.parent.mkdir(parents=True, exist_ok=True)
        path_of_study.write_text(appendix(study, root, docs))
    return path


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the pages of all papers, or of those named."""
    parser = argparse.ArgumentParser(description="Write docs/results from notes and records.")
    parser.add_argument("papers", nargs="*", help="names of papers, by default all")
    papers = parser.parse_args(arguments).papers or sorted(
        path.stem for path in NOTES.glob("*.md") if path.stem != "README"
    )
    for paper in papers:
        print(write(paper).relative_to(ROOT))


if __name__ == "__main__":
    main()
