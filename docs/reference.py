"""Pages of ``api/``: every public name, on the page of the package that defines it.

`example` makes a notebook of a script, for its page. Sphinx calls `write` before it reads pages,
and `find_name` for names in docstrings without their package. The names of a package are read from
its ``__init__``; its public modules, such as ``fedmcmc.partition``, are sections of its page.
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
"""Modules that need another environment, and are read without being imported."""
GROUPS = {
    "Models and data": ("models", "interop", "data", "hierarchy", "types"),
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
"""Packages in the order of the list of pages; all others are listed last, as internals."""


class Name(NamedTuple):
    """Public name as users write it, its object, and the module that defines it."""

    shown: str
    value: Any
    source: str


def exports(module: ModuleType) -> dict[str, str]:
    """Return the public names of a module, each with the module that defines it."""
    sources = {}
    lines = ast.parse(inspect.getsource(module)).body
    for block in [line for line in lines if isinstance(line, ast.If)]:
        lines += block.body  # imports for type checkers, of names that are imported on first use
    for line in lines:
        if isinstance(line, ast.ImportFrom):
            sources.update({name.asname: str(line.module) for name in line.names if name.asname})
        elif isinstance(line, ast.FunctionDef | ast.ClassDef):
            sources[line.name] = module.__name__
    listed = getattr(module, "__all__", sources)
    return {name: sources.get(name, module.__name__) for name in listed if name[0] != "_"}


@functools.cache
def packages() -> dict[str, list[Name]]:
    """Return the public names of each package.

    A name is a name of the root package if possible, else of a public module, else of a package. It
    is listed once, where it is defined.
    """
    names: dict[str, list[Name]] = {}
    for path in sorted(SOURCE.glob("*/__init__.py")):
        names[path.parent.name] = []
    listed = set()

    def add(shown: str, value: Any, source: str) -> None:
        package = source.split(".")[1]
        if id(value) in listed:
            return
        listed.add(id(value))
        names[package].append(Name(shown, value, source))
        if inspect.ismodule(value):
            for name, module in exports(value).items():
                add(f"{shown}.{name}", getattr(value, name), module)

    for name, source in exports(fedmcmc).items():
        if source != "fedmcmc":
            add(f"fedmcmc.{name}", getattr(fedmcmc, name), source)
    for package in names:
        for path in sorted((SOURCE / package).glob("[a-z]*.py")):
            if path.stem not in APART:
                name = f"fedmcmc.{package}.{path.stem}"
                add(name, importlib.import_module(name), name)
        module = importlib.import_module(f"fedmcmc.{package}")
        for name, source in exports(module).items():
            if source.split(".")[1] == package:
                add(f"fedmcmc.{package}.{name}", getattr(module, name), source)
    return names


def comment(source: str, name: str) -> str:
    """Return the string below an assignment in a module, which documents the assigned name."""
    lines = ast.parse(inspect.getsource(importlib.import_module(source))).body
    for line, below in itertools.pairwise([*lines, None]):
        if isinstance(line, ast.ImportFrom) and name in [alias.name for alias in line.names]:
            return comment(str(line.module), name)
        if isinstance(line, ast.Assign | ast.AnnAssign):
            assigned = [node.id for node in ast.walk(line) if isinstance(node, ast.Name)]
            value = getattr(below, "value", None)
            if name in assigned and isinstance(value, ast.Constant):
                return inspect.cleandoc(str(value.value))
    raise LookupError(f"{source}.{name} has no string below it that documents it")


def directive(name: Name) -> str:
    """Return Sphinx's directive that documents a name."""
    shown, value, source = name
    if inspect.ismodule(value):
        return "\n".join(heading(shown, "-", shown, inspect.getdoc(value)))
    if inspect.isclass(value):
        return f".. autoclass:: {shown}\n   :members:\n"
    if inspect.isroutine(value) or hasattr(value, "__wrapped__"):
        return f".. autofunction:: {shown}\n"
    about = comment(source, shown.split(".")[-1])
    return f".. py:data:: {shown}\n\n{textwrap.indent(about, '   ')}\n"


def heading(title: str, line: str, module: str, about: str | None) -> list[str]:
    """Return the lines of a title and of a module's docstring."""
    return [title, line * len(title), "", f".. py:module:: {module}", "", about or "", ""]


def page(package: str) -> str:
    """Return the page of a package."""
    module = f"fedmcmc.{package}"
    about = inspect.getdoc(importlib.import_module(module))
    parts = heading(package.lstrip("_"), "=", module, about)
    parts += map(directive, packages()[package])
    for path in sorted((SOURCE / package).glob("[a-z]*.py")):
        if path.stem in APART:
            parts += summaries(path, f"{module}.{path.stem}")
    return "\n".join(parts)


def summaries(path: Path, module: str) -> list[str]:
    """Return a module's docstring, with the first paragraphs of its functions and classes."""
    source = ast.parse(path.read_text())
    lines = heading(module, "-", module, ast.get_docstring(source))
    for node in source.body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name[0] == "_":
            continue
        kind, signature = "class", node.name
        if isinstance(node, ast.FunctionDef):
            kind, signature = "function", f"{node.name}({ast.unparse(node.args)})"
        about = (ast.get_docstring(node) or "").partition("\n\n")[0]
        lines += [f".. py:{kind}:: {module}.{signature}", "", textwrap.indent(about, "   "), ""]
    return lines


def commands() -> str:
    """Return the page of the programs that are run with ``python -m``."""
    parts = ["commands", "========", ""]
    for command in COMMANDS:
        module = f"fedmcmc.{command}"
        title = module.removesuffix(".__main__")
        parts += heading(title, "-", module, inspect.getdoc(importlib.import_module(module)))
    return "\n".join(parts)


def index() -> str:
    """Return the list of pages, each with the names that it adds to the package itself."""
    lines = []
    listed = set(itertools.chain(*GROUPS.values()))
    internals = tuple(package for package in packages() if package not in listed)
    for group, members in {**GROUPS, "Internals": internals}.items():
        lines += ["", f"## {group}", ""]
        for package in members:
            about = inspect.getdoc(importlib.import_module(f"fedmcmc.{package}")) or ""
            title, summary = package.lstrip("_"), about.partition("\n")[0]
            in_root = [name.shown for name in packages()[package] if name.shown.count(".") == 1]
            names = ", ".join(f"`{name.removeprefix('fedmcmc.')}`" for name in in_root)
            lines.append(f"- [{title}](../api/{title}.rst): {summary} {names}")
    lines.append("- [commands](../api/commands.rst): Programs, such as `python -m fedmcmc.site`.")
    return "\n".join(lines) + "\n"


def write(folder: Path) -> None:
    """Write a page per package and one of the commands; remove all other pages."""
    pages = {f"{package.lstrip('_')}.rst": page(package) for package in packages()}
    pages["commands.rst"] = commands()
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        if path.name not in pages:
            path.unlink()
    for name, text in pages.items():
        path = folder / name
        if not path.exists() or path.read_text() != text:  # Sphinx reads changed pages again
            path.write_text(text)


def find_name(target: str, package: str) -> str | None:
    """Return the documented name that `target` in a docstring of a package refers to, if any.

    Fields of a class are described by the class.
    """
    shown = {id(name.value): name.shown for names in packages().values() for name in names}
    path = target.removeprefix("fedmcmc.").split(".")
    for parts in (path, [package, *path]):
        *_, owner, value = itertools.accumulate(parts, _attribute, initial=fedmcmc)
        if inspect.isclass(owner) and parts[-1] in inspect.get_annotations(owner):
            value = owner
        if id(value) in shown:
            return shown[id(value)]
    return None


def _attribute(owner: Any, name: str) -> Any:
    return getattr(owner, name, None)


def example(script: str) -> Any:
    """Return the notebook of a script whose cells are marked by ``# %%``."""
    notebook = jupytext.reads(script, fmt="py:percent")
    notebook.metadata["language_info"] = {"name": "python", "pygments_lexer": "ipython3"}
    return notebook
