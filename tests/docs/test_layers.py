"""Imports go to lower layers only, and no files import each other.

The layers are read from the table of docs/explanation/design.md, which thus cannot drift.
"""

import ast
import graphlib
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.check
ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "fedmcmc"


def layers():
    """Return ``(layer, rank)`` of every package in the table of docs/explanation/design.md."""
    text = (ROOT / "docs" / "explanation" / "design.md").read_text()
    table = text.split("## Layers")[1]
    ranks = {}
    for layer, packages in re.findall(r"^\| (\d+) \| (.+) \|$", table, re.MULTILINE):
        for rank, package in enumerate(re.findall(r"`([\w/]+)`", packages)):
            ranks[package.rstrip("/")] = (int(layer), rank)
    return ranks


def package_of(path):
    """Return the package of a file, or its own name if it lies at the root."""
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path):
    """Return dotted names of everything of fedmcmc that the file at `path` imports."""
    parents = ("fedmcmc", *path.relative_to(SOURCE).parts[:-1])
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = list(parents[: len(parents) - node.level + 1]) if node.level else []
            base += node.module.split(".") if node.module else []
            names.update(".".join([*base, alias.name]) for alias in node.names)
    return {name for name in names if name == "fedmcmc" or name.startswith("fedmcmc.")}


def imported_package(name):
    """Return the package of an imported name, ``None`` for the root itself."""
    parts = name.split(".")
    if len(parts) > 1 and ((SOURCE / f"{parts[1]}.py").exists() or (SOURCE / parts[1]).is_dir()):
        return parts[1]
    return None


def files(folder=SOURCE):
    return [path for path in sorted(folder.rglob("*.py")) if path != SOURCE / "__init__.py"]


def violation(importer, imported, ranks):
    """Return what is wrong with an import by the package `importer`, or ``None``."""
    package = imported_package(imported)
    if package is None:
        return f"{importer} imports the root package ({imported})"
    if package == importer:
        return None
    if any(part.startswith("_") for part in imported.split(".")[2:]):
        return f"{importer} imports a private module of {package} ({imported})"
    if ranks[package] < ranks[importer]:
        return None
    return f"{importer} (layer, rank {ranks[importer]}) imports {imported} ({ranks[package]})"


def test_the_table_has_its_packages():
    ranks = layers()
    assert ranks["types"] == (0, 0) and ranks["kernels"] < ranks["algorithms"]
    assert len(ranks) > 20


def test_files_import_from_lower_layers():
    ranks = layers()
    packages = {package_of(path) for path in files()}
    assert packages <= ranks.keys(), "not in the table of docs/explanation/design.md"
    messages = [
        f"{path}: {message}"
        for path in files()
        for name in sorted(imports(path))
        if (message := violation(package_of(path), name, ranks))
    ]
    assert messages == []


def test_no_files_import_each_other():
    names = {}
    for path in files():
        parts = path.relative_to(SOURCE).with_suffix("").parts
        names[".".join(["fedmcmc", *(part for part in parts if part != "__init__")])] = path
    graph = {}
    for name, path in names.items():
        modules = (n if n in names else n.rpartition(".")[0] for n in imports(path))
        graph[name] = {n for n in modules if n in names and n != name}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError with the files


def test_an_import_from_a_higher_layer_is_noticed():
    ranks = layers()
    assert violation("pytrees", "fedmcmc.runs.sample", ranks)
    assert violation("gaussian", "fedmcmc.gradients", ranks)
    assert violation("pytrees", "fedmcmc.FederatedData", ranks)
    assert violation("gradients", "fedmcmc.gaussian.Gaussian", ranks) is None


def test_an_import_of_a_private_module_is_noticed():
    ranks = layers()
    assert violation("gradients", "fedmcmc.gaussian._gaussian.Gaussian", ranks)
    assert violation("runs", "fedmcmc.rounds._program", ranks)
    assert violation("runs", "fedmcmc.runs._run.Run", ranks) is None
    assert violation("runs", "fedmcmc.types.Client", ranks) is None


def test_every_package_has_a_docstring():
    for folder in sorted(path.parent for path in SOURCE.rglob("__init__.py")):
        docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
        assert docstring and (folder == SOURCE or len(docstring.split()) >= 20), folder


def test_relative_and_nested_imports_are_seen(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "SOURCE", tmp_path)
    (tmp_path / "kernels").mkdir()
    path = tmp_path / "kernels" / "x.py"
    path.write_text(
        "from . import y\nfrom ..sample import sample\ndef f():\n    import fedmcmc.a\n"
    )
    assert imports(path) == {"fedmcmc.kernels.y", "fedmcmc.sample.sample", "fedmcmc.a"}
