"""Links between pages lead somewhere, on a code host as well: to files in Git and to headings."""

import functools
import re
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.check
ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\(([^)\s]+)\)")


@functools.cache
def tracked():
    """Return the files in Git; in a copy without Git, all files."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    paths = listed.stdout.split("\n") if listed.returncode == 0 else map(str, ROOT.rglob("*"))
    return {(ROOT / path).resolve() for path in paths}


def without_code(text):
    text = re.sub(r"(?s)^ *```.*?^ *```", "", text, flags=re.MULTILINE)
    return re.sub(r"`[^`\n]*`", lambda code: code[0].replace("]", ""), text)


@functools.cache
def anchors(path):
    """Return the anchors that a code host gives to the headings of a page."""
    text = re.sub(r"(?s)^ *```.*?^ *```", "", path.read_text(), flags=re.MULTILINE)
    slugs = []
    for heading in re.findall(r"(?m)^#+ (.*)$", text):
        slug = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        slugs.append(f"{slug}-{slugs.count(slug)}" if slug in slugs else slug)
    return set(slugs)


def dead_links(path):
    for link in LINK.findall(without_code(path.read_text())):
        target, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link):
            continue
        file = (path.parent / target).resolve() if target else path
        in_git = file in tracked() or (file.is_dir() and any(file in p.parents for p in tracked()))
        if not in_git or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            yield link


PAGES = sorted(
    path
    for path in tracked()
    if path.suffix == ".md" and path.is_file() and path.parent.name not in ("notes", ".venv")
)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_of_a_page_lead_somewhere(path):
    assert not list(dead_links(path))


def test_dead_links_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A b, c\n[x](#a-b-c) [y](#a) [z](no.md) `[w](code)`\n```\n[v](code)\n```\n")
    tracked().add(page.resolve())
    assert list(dead_links(page)) == ["#a", "no.md"]
