"""Records, claims, pages and figures: each is read, judged, current or drawn."""

import math
import re

import pytest
import yaml

from experiments import plots, render, tidy
from experiments.claims import NOTES, WORDS, Claim, Number, claims_of, evaluate, judge
from experiments.tidy import Row

STUDIES = tidy.studies()
PAGES = sorted(path.stem for path in NOTES.glob("*.md"))
FIGURES = plots.entries()
ONE_OF_EACH_KIND = (
    "fed_ep-toy-toy.png",  # curves, a scatter and ellipses
    "qlsd-gaussian_small-clients.png",  # bars
    "qlsd-label_split-labels.png",  # a heat map
)
SIDES = ("left", "relation", "right", "margin")
RECORD = {"config": {"dim": 3, "bits": [4, 8]}, "device": "cpu"}
ROWS = (
    *(Row("A", name, x, {"bits": 4}) for name, x in (("error", 1.0), ("error s.e.", 0.1))),
    *(Row("B", name, x, {}) for name, x in (("error", 2.0), ("error s.e.", 0.2))),
    Row("A", "error", 3.0, {"bits": 8}),
    Row("B", "lost", math.nan, {}),
    *(Row("A", "score", value, {}, seed=seed) for seed, value in enumerate((1.0, 2.0, 3.0))),
    *(Row("B", "score", value, {}, seed=seed) for seed, value in enumerate((2.0, 3.5, 4.0))),
    *(Row("A", "curve", value, {}, x=x) for x, value in ((1.0, 0.5), (2.0, 0.2), (4.0, 0.1))),
)
A, A8, B = (f'value("error", {place})' for place in ('method="A", bits=4', "bits=8", 'method="B"'))


@pytest.fixture
def root(tmp_path):
    tidy.write("made/up", ROWS, RECORD, tmp_path)
    return tmp_path


def claim(*comparisons, **kwargs):
    checks = tuple(dict(zip(SIDES, sides, strict=False)) for sides in comparisons)
    kwargs = {"study": ("made/up",), "expect": "reproduced", "checks": checks} | kwargs
    return Claim(id="c", where="Table 1", claim="A is better.", **kwargs)


@pytest.mark.parametrize("study", STUDIES)
def test_a_record_is_read_and_its_appendix_is_current(study):
    rows, record = tidy.read(study), tidy.read_record(study)
    assert rows and not any(row.value == -math.inf for row in rows)
    assert "metrics" not in record and isinstance(record["config"], dict)
    assert all(row.metric and " " not in row.metric.removesuffix(" s.e.") for row in rows)
    page = render.DOCS / "runs" / f"{study}.md"
    assert render.appendix(study) == page.read_text(), "run python -m experiments.render"


def test_records_have_the_settings_of_their_files():
    render.check_settings(STUDIES)


@pytest.mark.parametrize(
    ("study", "name", "wrong"),
    [
        ("fsgld/metric", "prior_scale", 1.0),
        ("fsgld/gaussian", "num_rounds", [220_000, 22_000, 2_200]),
        ("fsgld/alpha", "kernel", {"step_size": 1.0}),
    ],
)
def test_a_record_with_other_settings_than_its_file_is_refused(study, name, wrong, tmp_path):
    record = tidy.read_record(study)
    assert record["config"][name] != wrong
    record["config"][name] = wrong
    tidy.write(study, tidy.read(study), record, tmp_path)
    with pytest.raises(ValueError, match=rf"{study}: settings .* not those .* \['{name}'\]"):
        render.check_settings([study], tmp_path)


@pytest.mark.parametrize("paper", PAGES)
def test_a_page_is_what_its_template_gives_and_its_claims_have_their_verdicts(paper):
    page = render.text_of(paper)
    assert page == render.path_of(paper).read_text(), "run make docs"
    assert not re.search(r"\bnan\b", page)
    assert len(page.split()) <= 2_500 if paper == render.FINDINGS else page.count("\n") <= 200


def test_every_claim_is_on_a_page_and_every_figure_is_drawn_or_kept():
    claimed = [path.name.partition(".")[0] for path in NOTES.glob("*.claims.yaml")]
    kept = yaml.safe_load((NOTES / "figures.yaml").read_text())["kept"]
    figures = {path.name for path in plots.FIGURES.glob("*.png")}
    assert {*claimed} <= {*PAGES} and figures == {*FIGURES, *kept}
    assert {c.figure for paper in claimed for c in claims_of(paper)} <= {"", *figures}


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_has_rows(name):
    for panel in FIGURES[name]["panels"]:
        assert all(len(plots.series(layer)) > 0 for layer in plots.layers(panel))


@pytest.mark.parametrize("name", ONE_OF_EACH_KIND)
def test_every_kind_of_figure_is_drawn(name, tmp_path):
    assert 0 < plots.draw(name, FIGURES[name], tmp_path).stat().st_size < 120_000


def test_rows_are_read_back_as_written(root):
    assert str(tidy.read("made/up", root)) == str(ROWS)  # NaN is not equal to itself
    assert (tidy.read_record("made/up", root), tidy.studies("made", root)) == (RECORD, ["made/up"])


def test_numbers_carry_their_standard_errors():
    for number, expected in (
        (Number(6.0, 0.3) + Number(2, 0.4), (8, 0.5)),
        (Number(6.0, 0.3) * Number(2, 0.1), (12, math.hypot(0.6, 0.6))),
        (1 - 12 / Number(3.0, 0.3), (-3, 0.4)),
    ):
        assert (number.value, number.error) == pytest.approx(expected)
    assert math.isnan((Number(1.0) / 0).value) and abs(Number(-2.0, 0.1)) == Number(2.0, 0.1) == 2


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        (A, Number(1.0, 0.1)),
        (f"max(values('error')) - {B}", Number(1.0, 0.2)),
        ("min(x for x in choices('curve', 'x') if value('curve', x=x) <= 0.2)", 2.0),
        ("paired('score', {'method': 'A'}, {'method': 'B'}).value", pytest.approx(-3.5 / 3)),
        ("values('lost')", []),
        ("setting('dim') + len(setting('bits'))", 5),
        ("other('made/up', 'min(values(\"error\")).value')", 1.0),
    ],
)
def test_expressions(expression, expected, root):
    actual = evaluate(expression, "made/up", root)
    assert actual == expected
    assert getattr(actual, "error", 0.0) == getattr(expected, "error", 0.0)


@pytest.mark.parametrize(
    ("made", "word"),
    [
        (claim((A, "<", B), (A8, ">", B)), "reproduced"),
        (claim((A, "<", B), (A, ">", B)), "partly"),
        (claim((A, ">", B), (A8, "<", B)), "contradicted"),
        (claim((A, "<", "1.15")), "inconclusive"),  # 1.5 standard errors
        (claim((A, "<", "1.15", "none")), "reproduced"),
        (claim((A, ">", "1.15", "none")), "contradicted"),
        (claim(checks=({"holds": f"{A} < 2"},)), "reproduced"),
        (claim((A, "<", B), needs=(f"{A} > 2",)), "inconclusive"),
        (claim((A, "<", B), deviations=("other data",)), "partly"),
        (claim((A, ">", B), deviations=("other data",)), "inconclusive"),
        (claim((A, ">", B), deviations=("unknown settings",)), "inconclusive"),
        (claim((A, "<", B), deviations=("a part",)), "partly"),
        (claim(checks=({"holds": f"{A} < 2", "studies": ("made/up",) * 2},)), "reproduced"),
        (claim((A, "<", B), study=("made/missing", "made/up")), "reproduced"),
        (claim((A, "<", B), study=("made/missing",)), "not run"),
        (claim(), "drawn"),
    ],
)
def test_verdicts(made, word, root):
    assert judge(made, root) == word and word in WORDS


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("""value("made/up", "value('eror')")""", "No row has the metric 'eror'.*'error'"),
        ("""value("made/up", "value('error')")""", "3 rows have the metric 'error'"),
        ("""verdict("c", "partly")""", "verdict on c is 'drawn', and the page says 'partly'"),
        ("""figure("none.png", "Nothing.")""", r"docs/results/figures/none\.png does not exist"),
    ],
)
def test_a_wrong_placeholder_is_one_clear_error(call, message, root):
    line = "- {id: c, where: w, claim: A, study: made/up, expect: drawn}\n"
    (root / "made.claims.yaml").write_text(line)
    page = render.Page("made", root, root)
    with pytest.raises(ValueError, match=message):
        page.fill(f"It is {{{{ {call} }}}}.")
    (root / "made.claims.yaml").write_text(2 * line)
    with pytest.raises(ValueError, match="made: claims have the same id"):
        claims_of("made", root)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"deviations": ("fewer",)}, "c: a deviation is one of .*other data.*, got 'fewer'"),
        ({"expect": "fewer"}, "c: expect is one of .*partly.*, got 'fewer'"),
        ({"checks": ({"left": A, "relation": "<"},)}, "c: a check has the entries"),
        ({"checks": ({"holds": A, "margn": "none"},)}, "c: a check has the entries"),
        ({"checks": ({"left": A, "relation": "=", "right": B},)}, "a relation is < or >, got '='"),
        ({"checks": ({"holds": A, "margin": "2 sd"},)}, "c: a margin is 'none' or .*, got '2 sd'"),
    ],
)
def test_a_claim_with_a_wrong_entry_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        claim(**wrong)
