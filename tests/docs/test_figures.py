"""Figures of the pages: each is shown on a page, and a script that draws it stands beside it."""

import re
import runpy
from pathlib import Path

import pytest
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "docs" / "figures"
SCRIPTS = sorted(FIGURES.glob("*.py"))
MAX_BYTES = 100_000


@pytest.mark.check
def test_every_figure_is_shown_and_small():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    shown = {
        (page.parent / file).resolve()
        for page in pages
        for file in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", page.read_text())
    }
    figures = {path for path in FIGURES.iterdir() if path.suffix in (".png", ".svg")}
    assert figures == {path for path in shown if path.parent == FIGURES}
    assert all(path.stat().st_size <= MAX_BYTES for path in figures)


@pytest.mark.check
def test_every_plot_has_its_script():
    plots = {path.stem for path in FIGURES.glob("*.png")}
    assert plots - {path.stem for path in SCRIPTS} == {"demo"}  # `make demo` draws it


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_draws_its_figure(script, monkeypatch):
    files = []
    monkeypatch.syspath_prepend(FIGURES)  # as for `python docs/figures/...`
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, **_: files.append(Path(file)))
    with plt.rc_context():
        runpy.run_path(str(script), run_name="__main__")
    assert files == [script.with_suffix(".png")]
