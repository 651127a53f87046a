"""Imports go downwards only; the floors are read from docs/design.md, which thus cannot drift."""

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.check
ROOT = Path(__file__).parents[2]
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
    if other == own:
        return None
    if any(part.startswith("_") for part in imported.split(".")[2:]):
        return f"{own} imports what {other} keeps to itself ({imported})"
    if places[other] < places[own]:
        return None
    return f"{own} (floor, rank {places[own]}) imports {imported} ({places[other]})"


def test_the_table_is_read():
    places = floors()
    assert places["_types"] == (0, 0) and places["kernels"] < places["algorithms"]
    assert len(places) > 20


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_every_module_has_a_floor_and_imports_downwards(path):
    places = floors()
    assert room(path) in places, f"{room(path)} is not in the table of docs/design.md"
    wrong = [violation(room(path), name, places) for name in sorted(imports(path))]
    assert [message for message in wrong if message] == []


def test_an_import_that_goes_upwards_is_noticed():
    places = floors()
    assert violation("pytrees", "fedmcmc.runs.sample", places)
    assert violation("gaussian", "fedmcmc.gradients", places)
    assert violation("pytrees", "fedmcmc.FederatedData", places)
    assert violation("gradients", "fedmcmc.gaussian.Gaussian", places) is None


def test_an_import_of_what_another_room_keeps_to_itself_is_noticed():
    places = floors()
    assert violation("gradients", "fedmcmc.gaussian._gaussian.Gaussian", places)
    assert violation("runs", "fedmcmc.rounds._program", places)
    assert violation("runs", "fedmcmc.runs._run.Run", places) is None
    assert violation("runs", "fedmcmc._types.Client", places) is None


def test_every_room_has_a_sign():
    for folder in sorted(path.parent for path in SOURCE.rglob("__init__.py")):
        sign = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
        assert sign and (folder == SOURCE or len(sign.split()) >= 20), folder


def test_relative_and_nested_imports_are_seen(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "SOURCE", tmp_path)
    (tmp_path / "kernels").mkdir()
    path = tmp_path / "kernels" / "x.py"
    path.write_text(
        "from . import y\nfrom ..sample import sample\ndef f():\n    import fedmcmc.a\n"
    )
    assert imports(path) == {"fedmcmc.kernels.y", "fedmcmc.sample.sample", "fedmcmc.a"}
