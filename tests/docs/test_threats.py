"""The page on threats: each attack has a test that makes it, or is marked as not defended."""

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.check
ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests" / "deploy"
LABEL = re.compile(r"[A-Z]\d+")


def page():
    return (ROOT / "docs" / "explanation" / "threats.md").read_text()


def attacks():
    """Return the protection against each attack by its label, the first cell of its row."""
    lines = [line for line in page().splitlines() if line.startswith("|")]
    table = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    assert all(len(cells) == 4 for cells in table if LABEL.fullmatch(cells[0]))
    return {cells[0]: cells[3] for cells in table if LABEL.fullmatch(cells[0])}


def named_tests():
    """Return pairs of file and function of the tests of each attack, by its label."""
    return {
        label: re.findall(r"`([\w/]+\.py)::(\w+)`", tests)
        for label, tests in re.findall(r"(?m)^- ([A-Z]\d+): (.*)$", page())
    }


def functions(path):
    """Return the names of a module's functions, none of a module that does not exist."""
    tree = ast.parse(path.read_text() if path.exists() else "")
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_attack_has_a_test_or_is_not_defended():
    protections, tests = attacks(), named_tests()
    assert len(protections) > 30
    assert tests.keys() <= protections.keys() and all(tests.values())
    for label, protection in protections.items():
        assert label in tests or "not defended" in protection, label


def test_every_test_that_the_page_names_exists():
    named = {test for tests in named_tests().values() for test in tests}
    missing = {(file, test) for file, test in named if test not in functions(TESTS / file)}
    assert len(named) > 60 and not missing
