"""The pages of ``api/``: every public name, on the page of the room that it is written in.

And `example`, which makes a notebook of a script, for its page.

`conf.py` has Sphinx call `write` before it reads pages, and `find` for names in docstrings that
lack their room. What a room offers is read from its ``__init__``; modules in it that users know by
name, such as ``fedmcmc.partition``, are sections of its page.
"""

import ast
import functools
import importlib
import inspect
import itertools
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jupytext

import fedmcmc

SOURCE = Path(fedmcmc.__path__[0])
COMMANDS = ("__main__", "server", "site")
APART = ("nvflare",)
"""Modules that need an environment of their own, and are read without being imported."""
GROUPS = {
    "Models and data": ("interop", "data", "hierarchy", "types"),
    "Answers in one call": ("fitting", "exact", "criticism", "reports"),
    "Kernels": ("algorithms", "kernels", "transforms"),
    "Parts of kernels": (
        "participation",
        "gradients",
        "dynamics",
        "compression",
        "inference",
        "surrogates",
        "gaussian",
    ),
    "Settings and judgments": ("tuning", "diagnostics", "metrics"),
    "Running": (
        "runs",
        "records",
        "streaming",
        "storage",
        "placement",
        "sweeps",
        "rounds",
        "wire",
        "deploy",
    ),
}
"""Rooms in the order of the list of pages; others are listed last, as insides."""


class Name(NamedTuple):
    """A public name: as users write it, what it stands for, and the module that says so."""

    shown: str
    thing: Any
    source: str


def exports(module: ModuleType) -> dict[str, str]:
    """Return what a module offers under which name, and the module that says so."""
    found = {}
    for line in ast.parse(inspect.getsource(module)).body:
        if isinstance(line, ast.ImportFrom):
            found.update({name.asname: str(line.module) for name in line.names if name.asname})
        elif isinstance(line, ast.FunctionDef | ast.ClassDef):
            found[line.name] = module.__name__
    listed = getattr(module, "__all__", found)
    return {name: found.get(name, module.__name__) for name in listed if name[0] != "_"}


@functools.cache
def rooms() -> dict[str, list[Name]]:
    """Return the public names of each room.

    A name is one of the package itself where it can be, else one of a module that users know by
    name, else one of the room. It is shown once, where it is written.
    """
    found: dict[str, list[Name]] = {}
    for path in sorted(SOURCE.glob("*/__init__.py")):
        found[path.parent.name] = []
    seen = set()

    def add(shown: str, thing: Any, source: str) -> None:
        room = source.split(".")[1]
        if id(thing) in seen:
            return
        seen.add(id(thing))
        found[room].append(Name(shown, thing, source))
        if inspect.ismodule(thing):
            for name, place in exports(thing).items():
                add(f"{shown}.{name}", getattr(thing, name), place)

    for name, source in exports(fedmcmc).items():
        if source != "fedmcmc":
            add(f"fedmcmc.{name}", getattr(fedmcmc, name), source)
    for room in found:
        for path in sorted((SOURCE / room).glob("[a-z]*.py")):
            if path.stem not in APART:
                name = f"fedmcmc.{room}.{path.stem}"
                add(name, importlib.import_module(name), name)
        module = importlib.import_module(f"fedmcmc.{room}")
        for name, source in exports(module).items():
            if source.split(".")[1] == room:
                add(f"fedmcmc.{room}.{name}", getattr(module, name), source)
    return found


def comment(source: str, name: str) -> str:
    """Return the string below an assignment in a module of the package, which documents it."""
    lines = ast.parse(inspect.getsource(importlib.import_module(source))).body
    for line, below in itertools.pairwise([*lines, None]):
        if isinstance(line, ast.ImportFrom) and name in [alias.name for alias in line.names]:
            return comment(str(line.module), name)
        if isinstance(line, ast.Assign | ast.AnnAssign):
            assigned = [node.id for node in ast.walk(line) if isinstance(node, ast.Name)]
            value = getattr(below, "value", None)
            if name in assigned and isinstance(value, ast.Constant):
                return inspect.cleandoc(str(value.value))
    raise LookupError(f"{source}.{name} has no string below it that says what it is")


def directive(name: Name) -> str:
    """Return what has Sphinx show what a name stands for."""
    shown, thing, source = name
    if inspect.ismodule(thing):
        return "\n".join(heading(shown, "-", shown, inspect.getdoc(thing)))
    if inspect.isclass(thing):
        return f".. autoclass:: {shown}\n   :members:\n"
    if inspect.isroutine(thing) or hasattr(thing, "__wrapped__"):
        return f".. autofunction:: {shown}\n"
    about = comment(source, shown.split(".")[-1])
    return f".. py:data:: {shown}\n\n{textwrap.indent(about, '   ')}\n"


def heading(title: str, line: str, module: str, about: str | None) -> list[str]:
    """Return the lines of a title, and of what a module says of itself."""
    return [title, line * len(title), "", f".. py:module:: {module}", "", about or "", ""]


def page(room: str) -> str:
    """Return the page of a room."""
    module = f"fedmcmc.{room}"
    about = inspect.getdoc(importlib.import_module(module))
    parts = [*heading(room.lstrip("_"), "=", module, about), *map(directive, rooms()[room])]
    for path in sorted((SOURCE / room).glob("[a-z]*.py")):
        if path.stem in APART:
            parts += summaries(path, f"{module}.{path.stem}")
    return "\n".join(parts)


def summaries(path: Path, module: str) -> list[str]:
    """Return what a module says of itself, and first paragraphs of its functions and classes."""
    source = ast.parse(path.read_text())
    lines = heading(module, "-", module, ast.get_docstring(source))
    for node in source.body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name[0] == "_":
            continue
        what, signature = "class", node.name
        if isinstance(node, ast.FunctionDef):
            what, signature = "function", f"{node.name}({ast.unparse(node.args)})"
        about = (ast.get_docstring(node) or "").partition("\n\n")[0]
        lines += [f".. py:{what}:: {module}.{signature}", "", textwrap.indent(about, "   "), ""]
    return lines


def commands() -> str:
    """Return the page of what is run with ``python -m``."""
    parts = ["commands", "========", ""]
    for command in COMMANDS:
        module = f"fedmcmc.{command}"
        title = module.removesuffix(".__main__")
        parts += heading(title, "-", module, inspect.getdoc(importlib.import_module(module)))
    return "\n".join(parts)


def index() -> str:
    """Return the list of pages, each with the names that it adds to the package itself."""
    lines = []
    others = [room for room in rooms() if not any(room in listed for listed in GROUPS.values())]
    for group, listed in {**GROUPS, "Insides": others}.items():
        lines += ["", f"## {group}", ""]
        for room in listed:
            about = inspect.getdoc(importlib.import_module(f"fedmcmc.{room}")) or ""
            title, summary = room.lstrip("_"), about.partition("\n")[0]
            own = [name.shown.split(".")[1] for name in rooms()[room] if name.shown.count(".") == 1]
            names = ", ".join(f"`{name}`" for name in own)
            lines.append(f"- [{title}](../api/{title}.rst): {summary} {names}")
    lines.append("- [commands](../api/commands.rst): Programs, such as `python -m fedmcmc.site`.")
    return "\n".join(lines) + "\n"


def write(folder: Path) -> None:
    """Write a page per room and one of the commands; drop other pages."""
    pages = {f"{room.lstrip('_')}.rst": page(room) for room in rooms()}
    pages["commands.rst"] = commands()
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        if path.name not in pages:
            path.unlink()
    for name, text in pages.items():
        path = folder / name
        if not path.exists() or path.read_text() != text:  # Sphinx reads again what has changed
            path.write_text(text)


def find(target: str, room: str) -> str | None:
    """Return under which name is shown what a docstring of a room calls `target`, if anything is.

    Fields of a class are described by the class.
    """
    shown = {id(name.thing): name.shown for names in rooms().values() for name in names}
    path = target.removeprefix("fedmcmc.").split(".")
    for parts in (path, [room, *path]):
        things = list(itertools.accumulate(parts, _attribute, initial=fedmcmc))
        *_, owner, thing = things
        if inspect.isclass(owner) and parts[-1] in inspect.get_annotations(owner):
            thing = owner
        if id(thing) in shown:
            return shown[id(thing)]
    return None


def _attribute(owner: Any, name: str) -> Any:
    return getattr(owner, name, None)


def example(script: str) -> Any:
    """Return the notebook of a script whose cells are marked by ``# %%``."""
    notebook = jupytext.reads(script, fmt="py:percent")
    notebook.metadata["language_info"] = {"name": "python", "pygments_lexer": "ipython3"}
    return notebook
