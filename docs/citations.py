"""Citations by author and year, and the entries of the bibliography that they refer to.

`conf.py` links the citations in docstrings, and a test compares citations with the bibliography.
"""

import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

BIBLIOGRAPHY = Path(__file__).parent / "reference" / "bibliography.md"
NAME = r"(?:El )?[A-Z][^\W\d_]+(?:-[A-Z][^\W\d_]+)*"
AUTHORS = rf"{NAME}(?:(?:,\s+{NAME})*\s+and\s+{NAME}|\s+et\s+al\.)?"
YEAR = r"(?:19|20)\d\d"
CITATION = re.compile(
    rf"(?<![\w-])(?P<authors>{AUTHORS})(?:\s+\((?P<narrative>{YEAR})(?:\)|(?=[,;]))|,?\s+(?P<year>{YEAR})\b)"
)


@functools.cache
def works() -> tuple[str, ...]:
    """Return the headings of the bibliography's entries, such as "Vono et al. 2022"."""
    return tuple(re.findall(r"(?m)^### (.*)$", BIBLIOGRAPHY.read_text()))


def anchor(work: str) -> str:
    """Return the anchor of an entry's heading."""
    return re.sub(r"[^\w\- ]", "", work.lower()).replace(" ", "-")


def work_of(citation: re.Match[str]) -> str | None:
    """Return the heading of the cited work, or ``None`` for text that only resembles a citation.

    A single name needs a year in parentheses, or parentheses around both: "in November 2026" cites
    nothing.
    """
    authors = re.sub(r"\s+", " ", citation["authors"])
    if "," in authors:
        authors = authors.partition(",")[0] + " et al."
    before = citation.string[: citation.start()]
    is_single = not authors.endswith("et al.") and " and " not in authors
    if is_single and citation["year"] and not before.endswith(("(", "[", "; ")):
        return None
    return f"{authors} {citation['narrative'] or citation['year']}"


def find(text: str) -> Iterator[str]:
    """Return the headings of all works that a text cites, in its order."""
    works_of_matches = map(work_of, CITATION.finditer(text))
    return (work for work in works_of_matches if work is not None)


def link(text: str, address: Callable[[str], str]) -> str:
    """Make each citation in reStructuredText a link to the address of the entry's anchor."""

    def linked(citation: re.Match[str]) -> str:
        work = work_of(citation)
        if work not in works():
            return citation[0]
        shown = re.sub(r"\s+", " ", citation[0])
        return f"`{shown} <{address(anchor(work))}>`__"

    return CITATION.sub(linked, text)
