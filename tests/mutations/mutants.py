"""Mutants: copies of a definition of the package in which one small expression differs.

A mutant names a file and a definition in it, as pytest names a test, and a change: an expression
or a statement of that definition, an arrow, and its replacement. Comments and line breaks do not
matter, because syntax trees are compared, and neither does the rest of the file.
"""

import ast
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[2] / "src" / "fedmcmc"
DEFINITIONS = (ast.FunctionDef, ast.ClassDef)
ARROW = " -> "


class LostAnchorError(LookupError):
    """The definition or the expression of a mutant is not in the source, or not exactly once."""


class Mutant(NamedTuple):
    """One seeded bug, and the test that must notice it."""

    place: str
    """File below src/fedmcmc and qualified name: ``"kernels/_relay.py::Relay.visit"``."""
    change: str
    """Python code on both sides of an arrow: ``"2 * step_size -> step_size"``."""
    test: str
    """File below tests/ and name of the test, as pytest writes both."""

    @property
    def path(self) -> Path:
        return PACKAGE / self.place.partition("::")[0]

    def find_anchor(self, tree: ast.Module) -> ast.AST:
        """Return the node of the file's tree that changes; raise if it is not there once."""
        before, _ = self.codes()
        text = ast.dump(before)
        nodes = [
            node
            for node in ast.walk(find_definition(tree, self.place.partition("::")[2]))
            if type(node) is type(before) and ast.dump(node) == text
        ]
        if len(nodes) != 1:
            raise LostAnchorError(
                f"{self.place} has {ast.unparse(before)!r} {len(nodes)} times, not once"
            )
        return nodes[0]

    def codes(self) -> tuple[ast.AST, ast.AST | list[ast.stmt]]:
        """Return the trees on both sides of the arrow: two expressions, or statements."""
        (before,), after = (ast.parse(code).body for code in self.change.split(ARROW))
        if all(isinstance(node, ast.Expr) for node in (before, *after)):
            return before.value, after[0].value
        return before, after

    def source(self) -> str:
        """Return the source of the whole file with the bug."""
        tree = ast.parse(self.path.read_text())
        return ast.unparse(Replacement(self.find_anchor(tree), self.codes()[1]).visit(tree))


def find_definition(tree, name):
    """Return the function, class or assignment with a qualified name like ``"Relay.visit"``."""
    node = tree
    for part in name.split("."):
        nodes = [child for child in node.body if part in names_of(child)]
        if not nodes:
            raise LostAnchorError(f"There is no definition of {name}")
        node = nodes[-1]  # after the overloads
    return node


def names_of(node):
    """Return the names that a definition or an assignment of a name introduces."""
    if isinstance(node, DEFINITIONS):
        return [node.name]
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [x.id for target in targets for x in ast.walk(target) if isinstance(x, ast.Name)]
    return []


class Replacement(ast.NodeTransformer):
    """Replacement of one node of a tree by an expression, or by statements."""

    def __init__(self, node, replacement):
        self.node, self.replacement = node, replacement

    def visit(self, node):
        return self.replacement if node is self.node else self.generic_visit(node)
