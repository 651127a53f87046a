"""The page on threats: each attack has a test that makes it, or is said to be not defended."""

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.check
ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests" / "deploy"


def rows():
    """Return the cells of each attack in the page's table."""
    text = (ROOT / "docs" / "explanation" / "threats.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def named_tests(cell):
    """Return file and function of each test that a cell names."""
    return re.findall(r"`([\w/]+\.py)::(\w+)`", cell)


def functions(path):
    """Return the names of a module's functions, none of a module that does not exist."""
    tree = ast.parse(path.read_text() if path.exists() else "")
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_attack_has_a_test_or_is_not_defended():
    table = rows()
    assert len(table) > 20 and all(len(cells) == 5 for cells in table)
    for cells in table:
        assert named_tests(cells[-1]) or "not defended" in cells[3], cells


def test_every_test_that_the_page_names_exists():
    named = {test for cells in rows() for test in named_tests(cells[-1])}
    missing = {(file, test) for file, test in named if test not in functions(TESTS / file)}
    assert not missing
