"""Citations by author and year have an entry in the bibliography, and no entry is superfluous."""

import importlib.util
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.check
ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("citations", ROOT / "docs" / "citations.py")
citations = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(citations)


def texts(*patterns):
    """Return the texts of files without line breaks and the signs of comments."""
    paths = sorted(path for pattern in patterns for path in ROOT.glob(pattern))
    return {
        str(path.relative_to(ROOT)): re.sub(r"\n\s*#?\s*", " ", path.read_text())
        for path in paths
        if path != citations.BIBLIOGRAPHY and "api" not in path.relative_to(ROOT).parts
    }


USERS_FILES = texts("docs/**/*.md", "README.md", "examples/*.*", "src/**/*.py")


def test_every_citation_has_an_entry():
    missing = {
        (path, work)
        for path, text in USERS_FILES.items()
        for work in citations.find(text)
        if work not in citations.works()
    }
    assert not missing, "add these to docs/reference/bibliography.md"


def test_every_entry_is_cited():
    files = USERS_FILES | texts("tests/**/*.py")
    cited = {work for text in files.values() for work in citations.find(text)}
    assert set(citations.works()) <= cited


def test_entries_are_sorted_and_distinct():
    works = citations.works()
    assert list(works) == sorted(set(works), key=str.casefold)


def test_links_are_addresses_of_identifiers():
    text = citations.BIBLIOGRAPHY.read_text()
    for entry in text.split("\n### ")[1:]:
        for address in re.findall(r"\]\((.*?)\)", entry):
            assert re.match(r"https://doi\.org/10\.\d{4,5}/\S+$", address), entry


@pytest.mark.parametrize(
    ("text", "works"),
    [
        ("Vehtari et al. (2024), Algorithm 1", ["Vehtari et al. 2024"]),
        ("a penalty (Ceperley and\nDewing 1999) and (Neal 2003)", 2 * [""]),
        ("Hoang, Morris and Rogaway (2012)", ["Hoang et al. 2012"]),
        ("assumption H2 of Vono et\n    al., 2022).", ["Vono et al. 2022"]),
        ("El Mekkaoui et al. 2021; Al-Shedivat et al. 2021", 2 * [""]),
        ("Elias (1975); Brier 1950)", ["Elias 1975", "Brier 1950"]),
        ("measured in November 2026, Gelman et al. stop at 1.1", []),
    ],
)
def test_citations_are_found(text, works):
    found = list(citations.find(text))
    assert len(found) == len(works)
    assert all(not work or work == other for work, other in zip(works, found, strict=True))
    linked = citations.link(text, lambda anchor: "page.html#" + anchor)
    assert linked.count(">`__") == len(works)


def test_a_citation_of_an_unknown_work_stays_text():
    assert citations.link("Nobody (1900)", str) == "Nobody (1900)"
