"""Imports go downwards only; the floors are read from docs/design.md, which thus cannot drift."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "fedmcmc"


def floors():
    """Return the place ``(floor, rank)`` of every room named in the table of docs/design.md."""
    text = (ROOT / "docs" / "design.md").read_text()
    table = text.split("## Rooms")[1]
    places = {}
    for floor, rooms in re.findall(r"^\| (\d+) \| (.+) \|$", table, re.MULTILINE):
        for rank, room in enumerate(re.findall(r"`([\w/]+)`", rooms)):
            places[room.rstrip("/")] = (int(floor), rank)
    return places


def room(path):
    """Return the room of a module: its own name, or that of its package."""
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path):
    """Return dotted names of everything of fedmcmc that the module at `path` imports."""
    package = ("fedmcmc", *path.relative_to(SOURCE).parts[:-1])
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            base += node.module.split(".") if node.module else []
            found.update(".".join([*base, alias.name]) for alias in node.names)
    return {name for name in found if name == "fedmcmc" or name.startswith("fedmcmc.")}


def target(name):
    """Return the room an imported name lies in, ``None`` for the package itself."""
    parts = name.split(".")
    if len(parts) > 1 and ((SOURCE / f"{parts[1]}.py").exists() or (SOURCE / parts[1]).is_dir()):
        return parts[1]
    return None


def modules(folder=SOURCE):
    return [path for path in sorted(folder.rglob("*.py")) if path != SOURCE / "__init__.py"]


def violation(own, imported, places):
    """Return what is wrong with an import from room `own`, or ``None``."""
    other = target(imported)
    if other is None:
        return f"{own} imports the package itself ({imported})"
    if other == own or places[other] < places[own]:
        return None
    return f"{own} (floor, rank {places[own]}) imports {imported} ({places[other]})"


def test_the_table_is_read():
    places = floors()
    assert places["_types"] == (0, 0) and places["kernels"][0] < places["algorithms"][0]
    assert len(places) > 15


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_every_module_has_a_floor_and_imports_downwards(path):
    places = floors()
    assert room(path) in places, f"{room(path)} is not in the table of docs/design.md"
    wrong = [violation(room(path), name, places) for name in sorted(imports(path))]
    assert [message for message in wrong if message] == []


def test_an_import_that_goes_upwards_is_noticed():
    places = floors()
    assert violation("trees", "fedmcmc.sample.sample", places)
    assert violation("gaussian", "fedmcmc.gradients", places)
    assert violation("trees", "fedmcmc.FederatedData", places)
    assert violation("gradients", "fedmcmc.gaussian.Gaussian", places) is None


def test_relative_and_nested_imports_are_seen(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "SOURCE", tmp_path)
    (tmp_path / "kernels").mkdir()
    path = tmp_path / "kernels" / "x.py"
    path.write_text(
        "from . import y\nfrom ..sample import sample\ndef f():\n    import fedmcmc.a\n"
    )
    assert imports(path) == {"fedmcmc.kernels.y", "fedmcmc.sample.sample", "fedmcmc.a"}
