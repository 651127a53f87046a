"""Prose and names stay plain: counts of phrases and names that readers stumble over.

Docstrings, comments, assigned names and arguments of the source are counted per package, the prose
of pages per section of the documentation.
"""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

pytestmark = pytest.mark.check
ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "fedmcmc"
MAX_PHRASES = 2.5  # per 1,000 words
MAX_NAMES = 1.5  # per 1,000 lines
PHRASES = [
    re.compile(pattern, re.MULTILINE)
    for pattern in (
        r"\b(?:that|those) of\b",
        r"(?:^|[.:;!?]\s+)(?:Of|What|Whether|How|Which|Where|As)\b(?![^.!?]*\?)",
        r"\bas (?:it|they) (?:is|are|was|were)\b",
        r"\bso (?:many|much)\b",
        r"\bof (?:its|their|his|one's|your) own\b",
        r"\b(?:anew|dear|mend(?:s|ed)?|likewise|some ten|to and fro|alike|thereafter|beside)\b",
        r"\b(?:goes|go|went) on\b",
        r"\b(?:rooms?|floors?|wings?|hall|lanes?)\b",
        r"\b(?:says?|said|tells?|told|asks|asked|hears|heard|knows)\b",
        r"\bbut for\b",
        r", (?:of|in|by|with|from|to|on|for|after|before) (?:which|whom)\b",
    )
]
VAGUE_NAMES = {
    *("found", "own", "given", "kept", "said", "told", "asked", "taken", "made", "known", "seen"),
    *("gone", "begun", "done", "wanted", "here", "there", "one", "every", "some", "first", "last"),
    *("whole", "rest", "other", "others", "most", "least", "at"),
}


def prose(text):
    """Return the docstrings, without their examples, and the comments of a module."""
    parts = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node) or ""
            parts.append(re.sub(r"(?m)^\s*(?:>>>|\.\.\.).*$", "", docstring))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    parts += [token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT]
    return parts


def vague_names(text):
    """Return the vague names that a module assigns or has as arguments."""
    nodes = ast.walk(ast.parse(text))
    names = [
        node.arg if isinstance(node, ast.arg) else node.id
        for node in nodes
        if isinstance(node, ast.arg)
        or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    ]
    return [name for name in names if name in VAGUE_NAMES]


def rate_of_phrases(parts):
    """Return phrases per 1,000 words."""
    phrases = sum(len(phrase.findall(part)) for phrase in PHRASES for part in parts)
    num_words = sum(len(part.split()) for part in parts)
    return 1000 * phrases / max(num_words, 1)


def rates(texts):
    """Return phrases per 1,000 words and vague names per 1,000 lines of modules."""
    num_lines = sum(text.count("\n") for text in texts)
    names = sum(len(vague_names(text)) for text in texts)
    phrases = rate_of_phrases([part for text in texts for part in prose(text)])
    return phrases, 1000 * names / max(num_lines, 1)


def prose_of_page(path):
    """Return the words of a page without its blocks of code."""
    return re.sub(r"(?s)```.*?```", "", path.read_text())


PACKAGES = sorted(path.parent.name for path in SOURCE.glob("*/__init__.py"))
SECTIONS = {
    **{path.name: sorted(path.glob("*.md")) for path in (ROOT / "docs").iterdir() if path.is_dir()},
    "start": [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "docs" / "index.md"],
}
SECTIONS = {name: pages for name, pages in SECTIONS.items() if pages}
MAX_WORDS = 47_500


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_is_in_plain_english(package):
    phrases, names = rates([path.read_text() for path in (SOURCE / package).rglob("*.py")])
    assert phrases <= MAX_PHRASES and names <= MAX_NAMES, (phrases, names)


def test_code_of_the_documentation_is_in_plain_english():
    phrases, names = rates([path.read_text() for path in (ROOT / "docs").rglob("*.py")])
    assert phrases <= MAX_PHRASES and names <= MAX_NAMES, (phrases, names)


@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_is_in_plain_english(section):
    texts = list(map(prose_of_page, SECTIONS[section]))
    rate = rate_of_phrases(texts)
    assert rate <= MAX_PHRASES, {
        f"{path.name}: {match[0]}"
        for path, text in zip(SECTIONS[section], texts, strict=True)
        for phrase in PHRASES
        for match in phrase.finditer(text)
    }


def num_words(path):
    """Return the number of words of a page without formulas, addresses of links and rules."""
    text = re.sub(r"\$[^$\n]+\$|\]\([^)]*\)", " ", prose_of_page(path))
    return sum(bool(re.search(r"[A-Za-z0-9]", word)) for word in text.split())


def test_pages_are_short_enough_to_be_read():
    pages = [path for name, paths in SECTIONS.items() for path in paths if name != "results"]
    assert sum(num_words(path) for path in pages if path.parent != ROOT) <= MAX_WORDS
    assert num_words(ROOT / "README.md") <= 900


def test_phrases_and_names_are_counted():
    text = '"""Of the mode.\n\n>>> told = 1\n"""\n\nkept = 1  # that of a client, as it is\n'
    phrases, names = rates([text, "def move(position, at):\n    return position\n"])
    assert phrases == pytest.approx(1000 * 3 / 10) and names == pytest.approx(1000 * 2 / 8)
