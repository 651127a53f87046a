"""The examples run, and their own assertions hold what they claim."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples"
PROGRAMS = sorted(FOLDER.glob("*demo.py"))
EXAMPLES = sorted(set(FOLDER.glob("*.py")) - set(PROGRAMS))


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_it_runs(path, tmp_path):
    done = subprocess.run(
        [sys.executable, str(path)],
        cwd=tmp_path,  # it writes nothing beside itself
        env={**os.environ, "MPLBACKEND": "agg", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    print(done.stdout)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_it_is_a_page(path):
    """In jupytext's percent format, with a title, and links that lead somewhere."""
    text = path.read_text()
    title, *cells = re.split(r"^# %%", text, flags=re.MULTILINE)[1:]
    assert re.match(r" \[markdown\]\n# # \S", title)
    assert len(re.findall(r"^# # ", text, re.MULTILINE)) == 1
    assert all(cell.startswith((" [markdown]\n# ", "\n")) for cell in cells)
    assert "assert " in text  # claims are held against what was computed
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert (FOLDER / link).exists(), link


@pytest.mark.parametrize(
    ("page", "listed"), [("examples/README.md", EXAMPLES + PROGRAMS), ("docs/index.md", EXAMPLES)]
)
def test_lists_name_all(page, listed):
    named = re.findall(r"\]\((?:\.\./examples/)?(\w+\.py)\)", (FOLDER.parent / page).read_text())
    assert sorted(named) == sorted(path.name for path in listed)
